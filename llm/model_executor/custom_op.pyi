# ruff: noqa
# Of llm.base.vllm_paths: what `llm.model_executor.custom_op` has at run time.
from llm.base.custom_op import CustomOp as CustomOp
from llm.base.custom_op import PluggableLayer as PluggableLayer
from llm.base.custom_op import op_registry as op_registry
from llm.base.custom_op import op_registry_oot as op_registry_oot
