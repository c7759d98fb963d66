"""What kv_b_proj of latent attention takes beyond its bytes in a checkpoint that stores it as integers."""

from __future__ import annotations

from collections.abc import Mapping

from llm.loading.checkpoint import TensorInfo
from llm.models.decoder import DecoderConfig, LatentAttentionConfig

_NAME = ".kv_b_proj."
_FLOAT32 = 4


def widened_bytes(architecture: object, tensors: Mapping[str, TensorInfo]) -> int:
    """It is held as float32 (`llm.quantization.absorbed`): so much more than what the file has of it."""
    if not isinstance(architecture, DecoderConfig):
        return 0
    parts = [layer.attention for layer in architecture.layers if isinstance(layer.attention, LatentAttentionConfig)]
    stored = {name: info for name, info in tensors.items() if _NAME in name}
    if all(info.dtype.is_floating_point and info.dtype.itemsize > 1 for info in stored.values()):
        return 0
    values = sum(part.kv_lora_rank * part.heads * (part.qk_nope_head_dim + part.v_head_dim) for part in parts)
    return max(0, values * _FLOAT32 - sum(info.nbytes for info in stored.values()))
