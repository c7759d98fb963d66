# ruff: noqa
# Of llm.base.vllm_paths: what `llm.model_executor.layers.attention` has at run time.
from llm.layers.attention import Attention as Attention
from llm.layers.vision import MMEncoderAttention as MMEncoderAttention
