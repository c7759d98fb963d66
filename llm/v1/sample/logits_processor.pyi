# ruff: noqa
# Of llm.base.vllm_paths: what `llm.v1.sample.logits_processor` has at run time.
from llm.plugins import LOGITS_PROCESSORS as LOGITSPROCS_GROUP
from llm.sampling.logits_processors import AdapterLogitsProcessor as AdapterLogitsProcessor
from llm.sampling.logits_processors import AddedRequest as AddedRequest
from llm.sampling.logits_processors import BatchUpdate as BatchUpdate
from llm.sampling.logits_processors import BatchUpdateBuilder as BatchUpdateBuilder
from llm.sampling.logits_processors import LogitsProcessor as LogitsProcessor
from llm.sampling.logits_processors import MoveDirectionality as MoveDirectionality
from llm.sampling.logits_processors import MovedRequest as MovedRequest
from llm.sampling.logits_processors import RemovedRequest as RemovedRequest
from llm.sampling.logits_processors import RequestLogitsProcessor as RequestLogitsProcessor
from llm.sampling.logits_processors import process_dict_updates as process_dict_updates
from llm.sampling.logits_processors.builtin import LogitBiasLogitsProcessor as LogitBiasLogitsProcessor
from llm.sampling.logits_processors.builtin import MinPLogitsProcessor as MinPLogitsProcessor
from llm.sampling.logits_processors.builtin import MinTokensLogitsProcessor as MinTokensLogitsProcessor
from llm.sampling.logits_processors.pipeline import LogitsProcessors as LogitsProcessors
