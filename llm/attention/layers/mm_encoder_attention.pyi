# ruff: noqa
# Of llm.base.vllm_paths: what `llm.attention.layers.mm_encoder_attention` has at run time.
from llm.layers.vision import MMEncoderAttention as MMEncoderAttention
