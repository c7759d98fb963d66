"""Rotary position embeddings (arXiv:2104.09864), frequencies fixed at load.

Owns the frequency recipes and the CustomOp that rotates queries and keys. Frequencies are chosen from `max_model_len`,
never from the current batch: a rope that depends on how long today's prompts are cannot give the same answer twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llm.kernels.reference.rotary import apply_rotary
from llm.layers.custom_op import CustomOp


@dataclass(frozen=True)
class RopeParameters:
    """The `rope_parameters` of a config.json, under its names (`theta` is its `rope_theta`).

    Attributes:
        rope_type: a key of `RECIPES`.
        partial_rotary_factor: share of a head's channels that is rotated.
        max_position_embeddings: what the model was made for before scaling (dynamic).
        original_max_position_embeddings: the same under the name that llama3, yarn and longrope use.
        attention_factor: what cosine and sine are multiplied by; None: derived from `factor`.
        short_factor, long_factor: longrope's divisors, one per rotated pair of channels.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    partial_rotary_factor: float = 1.0
    max_position_embeddings: int = 0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def frequencies(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """(radians per position of each channel pair, float32 [rotary_dim / 2]; factor on cosine and sine)."""
    return RECIPES[rope.rope_type](rope, rotary_dim, max_model_len)


def _base(theta: float, rotary_dim: int) -> torch.Tensor:
    """theta ** (2i / d): the wavelengths over 2 pi."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return theta**exponents


def _default(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _base(rope.theta, rotary_dim), 1.0


def _linear(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _base(rope.theta, rotary_dim) / rope.factor, 1.0


def _dynamic(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """NTK-aware scaling of the base, once, for the longest sequence that will be served."""
    original = rope.max_position_embeddings
    stretch = rope.factor * max(max_model_len, original) / original - (rope.factor - 1)
    return 1.0 / _base(rope.theta * stretch ** (rotary_dim / (rotary_dim - 2)), rotary_dim), 1.0


def _llama3(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    plain = 1.0 / _base(rope.theta, rotary_dim)
    wavelengths = 2 * math.pi / plain
    original = rope.original_max_position_embeddings
    longest = original / rope.low_freq_factor
    shortest = original / rope.high_freq_factor
    scaled = torch.where(wavelengths > longest, plain / rope.factor, plain)
    share = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - share) * scaled / rope.factor + share * scaled
    is_between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(is_between, between, scaled), 1.0


def _yarn(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv:2309.00071): fast channels keep their frequency, slow ones are divided by `factor`, with a ramp."""
    base = _base(rope.theta, rotary_dim)
    low, high = (_yarn_channel(rope, rotary_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2).float() - low) / (high - low if high != low else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return (1.0 / (rope.factor * base)) * (1 - kept) + (1.0 / base) * kept, _yarn_attention_factor(rope)


def _yarn_channel(rope: RopeParameters, rotary_dim: int, turns: float) -> float:
    """The channel pair that makes `turns` rotations over the original context."""
    context = rope.original_max_position_embeddings
    return rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeParameters) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv:2402.13753): the long divisors exactly when longer sequences than the original may come."""
    original = rope.original_max_position_embeddings
    divisors = torch.tensor(rope.long_factor if max_model_len > original else rope.short_factor)
    factor = rope.attention_factor
    if factor is None:
        factor = 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
    return 1.0 / (divisors * _base(rope.theta, rotary_dim)), factor


RECIPES: dict[str, Callable[[RopeParameters, int, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


@CustomOp.register("rotary_embedding")
class RotaryEmbedding(CustomOp):
    """Rotates the leading channels of each head, in the half-split (neox) order of Hugging Face's weights."""

    cos_sin_cache: torch.Tensor

    def __init__(self, head_size: int, max_model_len: int, rope: RopeParameters) -> None:
        super().__init__()
        self.head_size = head_size
        self.rotary_dim = int(head_size * rope.partial_rotary_factor)
        per_position, factor = frequencies(rope, self.rotary_dim, max_model_len)
        angles = torch.outer(torch.arange(max_model_len).float(), per_position)
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor  # float32 [max_model_len, rotary_dim]
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
