"""Rotary position embeddings (arXiv:2104.09864), frequencies fixed at load.

Owns the frequency recipes (`default`, `llama3`) and the CustomOp that rotates queries and keys. Frequencies never
depend on the current batch, for an answer must not either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from llm.errors import UnsupportedModelError
from llm.kernels.reference.rotary import apply_rotary
from llm.layers.custom_op import CustomOp


@dataclass(frozen=True)
class RopeParameters:
    """The `rope_parameters` of a config.json.

    Attributes:
        theta: base of the geometric series of wavelengths.
        rope_type: "default" or "llama3".
        factor, low_freq_factor, high_freq_factor, original_max_position_embeddings: of llama3's scaling.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def inverse_frequencies(rotary_dim: int, rope: RopeParameters) -> torch.Tensor:
    """float32 [rotary_dim / 2]: radians per position of each pair of channels."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    raise UnsupportedModelError(f"rope_type {rope.rope_type!r} is not supported; known: 'default', 'llama3'.")


def _llama3(frequencies: torch.Tensor, rope: RopeParameters) -> torch.Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    original = rope.original_max_position_embeddings
    longest = original / rope.low_freq_factor
    shortest = original / rope.high_freq_factor
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    share = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - share) * scaled / rope.factor + share * scaled
    is_between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(is_between, between, scaled)


@CustomOp.register("rotary_embedding")
class RotaryEmbedding(CustomOp):
    """Rotates the first `rotary_dim` channels of each head, in the half-split (neox) order of Hugging Face."""

    cos_sin_cache: torch.Tensor

    def __init__(self, head_size: int, rotary_dim: int, max_position: int, rope: RopeParameters) -> None:
        super().__init__()
        self.head_size = head_size
        self.rotary_dim = rotary_dim
        angles = torch.outer(torch.arange(max_position).float(), inverse_frequencies(rotary_dim, rope))
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1)  # float32 [max_position, rotary_dim]
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [N], query [N, heads * head_size], key [N, kv_heads * head_size] -> both rotated."""
        cos, sin = self.cos_sin_cache.index_select(0, positions).chunk(2, dim=-1)
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.view(x.shape[0], -1, self.head_size)
        return apply_rotary(heads, cos, sin).view(x.shape)
