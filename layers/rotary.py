"""Rotary position embeddings (arXiv:2104.09864), frequencies fixed at load.

The frequency recipes and the CustomOp that rotates queries and keys; two more are for models of your own. Frequencies
depend on `max_model_len`, never on the current batch: otherwise a request's answer would depend on the length of other
prompts. Tables and rotation are float32, whatever the type of queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from llm.base.checks import refuse
from llm.base.custom_op import CustomOp
from llm.errors import ValidationError
from llm.kernels.backend import Operations
from llm.kernels.reference.elementwise import apply_rotary
from llm.layers.custom_op import KernelOp

# Of a table that are computed at a time: its parts are not all in memory twice.
_POSITIONS = 1 << 16


@dataclass(frozen=True)
class RopeParameters:
    """The `rope_parameters` of a config.json, under its names (`theta` is its `rope_theta`).

    Attributes:
        rope_type: a key of `RECIPES`.
        partial_rotary_factor: share of a head's channels that is rotated: the leading ones, but in "proportional" of
            both halves.
        max_position_embeddings: the context length before scaling (dynamic).
        original_max_position_embeddings: the same, for llama3, yarn and longrope.
        attention_factor: factor on cosine and sine; None: derived from `factor`.
        mscale, mscale_all_dim: yarn's weights of log(factor) in the attention factor; None: deepseek_yarn uses 1 and 0.
        short_factor, long_factor: longrope's divisors, one per rotated pair of channels.
        short_mscale, long_mscale: its attention factors with either; None: `attention_factor`.
        mrope_section: how many pairs follow the temporal, the vertical and the horizontal position (Qwen2-VL,
            arXiv:2409.12191); empty: one position per token.
        reverse: rotate the other way round (NanoChat).
        mrope_interleaved: the three alternate (Qwen3-VL) instead of taking one run of pairs each.
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
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    short_mscale: float | None = None
    long_mscale: float | None = None
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    reverse: bool = False

    def rotary_dim(self, head_size: int) -> int:
        """How many leading channels of a head are rotated, by an angle of 0 too."""
        return head_size if self.rope_type == "proportional" else int(head_size * self.partial_rotary_factor)


def frequencies(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """(radians per position of each channel pair, float32 [rotary_dim / 2]; factor on cosine and sine)."""
    per_position, factor = RECIPES[rope.rope_type](rope, rotary_dim, max_model_len)
    return -per_position if rope.reverse else per_position, factor


def base_wavelengths(theta: float, rotary_dim: int) -> torch.Tensor:
    """theta ** (2i / d): the wavelengths divided by 2 pi."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return theta**exponents


def _default(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / base_wavelengths(rope.theta, rotary_dim), 1.0


def _linear(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / base_wavelengths(rope.theta, rotary_dim) / rope.factor, 1.0


def _dynamic(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """NTK-aware scaling of the base, fixed for sequences of `max_model_len`."""
    original = rope.max_position_embeddings
    stretch = rope.factor * max(max_model_len, original) / original - (rope.factor - 1)
    return 1.0 / base_wavelengths(rope.theta * stretch ** (rotary_dim / (rotary_dim - 2)), rotary_dim), 1.0


def _llama3(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between interpolated."""
    plain = 1.0 / base_wavelengths(rope.theta, rotary_dim)
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
    """YaRN (arXiv:2309.00071): high frequencies are kept, low ones divided by `factor`, with a linear ramp between."""
    return _yarn_frequencies(rope, rotary_dim), _yarn_attention_factor(rope)


def _deepseek_yarn(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """YaRN as DeepSeek V2 and V3 define it: the same frequencies; both mscales always enter the attention factor."""
    weight = 1.0 if rope.mscale is None else rope.mscale
    factor = _yarn_mscale(rope, weight) / _yarn_mscale(rope, rope.mscale_all_dim or 0.0)
    return _yarn_frequencies(rope, rotary_dim), factor * (rope.attention_factor or 1.0)


def _yarn_frequencies(rope: RopeParameters, rotary_dim: int) -> torch.Tensor:
    base = base_wavelengths(rope.theta, rotary_dim)
    low, high = (_yarn_channel(rope, rotary_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2).float() - low) / (high - low if high != low else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return (1.0 / (rope.factor * base)) * (1 - kept) + (1.0 / base) * kept


def _yarn_channel(rope: RopeParameters, rotary_dim: int, turns: float) -> float:
    """The channel pair that makes `turns` rotations over the original context."""
    context = rope.original_max_position_embeddings
    return rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_mscale(rope: RopeParameters, weight: float) -> float:
    return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0


def yarn_score_factor(rope: RopeParameters) -> float:
    """What latent attention multiplies scores by under a scaled rope: the square of mscale_all_dim's factor."""
    if rope.rope_type == "default" or not rope.mscale_all_dim:
        return 1.0
    return _yarn_mscale(rope, rope.mscale_all_dim) ** 2


def _yarn_attention_factor(rope: RopeParameters) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope, rope.mscale) / _yarn_mscale(rope, rope.mscale_all_dim)
    return _yarn_mscale(rope, 1.0)


def _longrope(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv:2402.13753): the long divisors if `max_model_len` exceeds the original context."""
    original = rope.original_max_position_embeddings
    is_long = max_model_len > original
    divisors = torch.tensor(rope.long_factor if is_long else rope.short_factor)
    own_factor = rope.long_mscale if is_long else rope.short_mscale
    factor = rope.attention_factor if own_factor is None else own_factor
    if factor is None:
        factor = 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
    return 1.0 / (divisors * base_wavelengths(rope.theta, rotary_dim)), factor


def _proportional(rope: RopeParameters, rotary_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Gemma 4: the last pairs of channels are not rotated, the others as if all were."""
    found = 1.0 / base_wavelengths(rope.theta, rotary_dim)
    found[int(rope.partial_rotary_factor * rotary_dim // 2) :] = 0.0
    return found.div_(rope.factor), 1.0


RECIPES: dict[str, Callable[[RopeParameters, int, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "deepseek_yarn": _deepseek_yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


# What "default" does not read.
_IGNORED_BY_DEFAULT: dict[str, Any] = {"max_position_embeddings": 0, "original_max_position_embeddings": 0}


@CustomOp.register("rotary_embedding")
class RotaryEmbedding(KernelOp):
    """Rotates the leading channels of each head.

    Args:
        head_size: channels of a head.
        rotary_dim: how many leading ones are rotated.
        max_position_embeddings: positions in the table.
        base: of the frequencies, the theta of plain rotary embeddings.
        is_neox_style: channel i is paired with i + d (Hugging Face's weights); False: 2i with 2i + 1 (GPT-J).
        dtype: of the queries; the table is float32 whatever it is.
        rope: another recipe of the frequencies, with a `rotary_dim` and a base of its own; None: the plain one. The
            layers of models here pass one only if it is not plain.
    """

    operations = ("rotary_embedding",)
    vllm_name = "RotaryEmbeddingBase"
    cos_sin_cache: torch.Tensor
    pair_axis: torch.Tensor

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float = 10000.0,
        is_neox_style: bool = True,
        dtype: torch.dtype | None = None,
        *,
        rope: RopeParameters | None = None,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        recipe = RopeParameters(theta=base) if rope is None else rope
        if not 0 < rotary_dim <= head_size or (rope is not None and rotary_dim != rope.rotary_dim(head_size)):
            right = f"from 1 to the {head_size} channels of a head" if rope is None else "that of the rope"
            refuse("rotary_dim", rotary_dim, right)
        self.head_size, self.rotary_dim, self.is_neox_style = head_size, rotary_dim, is_neox_style
        self.max_position_embeddings, self.base = max_position_embeddings, recipe.theta
        per_position, factor = frequencies(recipe, rotary_dim, max_position_embeddings)
        # float32 [max_position_embeddings, rotary_dim]: cosines, then sines.
        table = cos_sin_table(per_position, max_position_embeddings, factor)
        self.register_buffer("cos_sin_cache", table, persistent=False)
        self.has_sections = bool(recipe.mrope_section)
        if self.has_sections:
            self.register_buffer("pair_axis", _pair_axis(recipe, self.rotary_dim), persistent=False)

    @classmethod
    def of(
        cls, head_size: int, max_position_embeddings: int, rope: RopeParameters, is_neox_style: bool = True
    ) -> RotaryEmbedding:
        """The operation of a model's layers; a plain rope is said in vLLM's arguments alone, as replacements take."""
        dim, positions, dtype = rope.rotary_dim(head_size), max_position_embeddings, torch.get_default_dtype()
        if replace(rope, theta=10000.0, partial_rotary_factor=1.0, **_IGNORED_BY_DEFAULT) == RopeParameters():
            return cls(head_size, dim, positions, rope.theta, is_neox_style, dtype)
        return cls(head_size, dim, positions, rope.theta, is_neox_style, dtype, rope=rope)

    def compute(
        self, ops: Operations, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query float [N, heads * head_size], key float [N, kv_heads * head_size] -> both rotated.

        positions: int64 [N], or with `mrope_section` also [3, N]: temporal, vertical, horizontal.
        """
        if positions.dim() == 1:
            return ops.rotary_embedding(positions, query, key, self.cos_sin_cache, self.head_size, self.is_neox_style)
        # The same kernel, so that a token whose three positions are equal has the bits of one with that position.
        rows = torch.arange(positions.shape[1], device=positions.device)
        return ops.rotary_embedding(rows, query, key, self._table(positions), self.head_size, self.is_neox_style)

    def _table(self, positions: torch.Tensor) -> torch.Tensor:
        """Cosines, then sines [N, rotary_dim] of each token's three positions [3, N]."""
        if not self.has_sections:
            raise ValueError(f"positions have shape {list(positions.shape)}; without mrope_section they must be [N].")
        rows = positions[self.pair_axis].t()  # [N, pairs]: the position that each pair follows
        cos, sin = self.cos_sin_cache.chunk(2, dim=-1)
        return torch.cat((cos.gather(0, rows), sin.gather(0, rows)), dim=-1)

    def extra_repr(self) -> str:
        table = f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, positions={self.cos_sin_cache.shape[0]}"
        return f"{table}, is_neox_style={self.is_neox_style}"


def cos_sin_table(per_position: torch.Tensor, length: int, factor: float = 1.0) -> torch.Tensor:
    """float32 [length, 2 * pairs]: cosines, then sines, times `factor`."""
    pairs = len(per_position)
    table = torch.empty(length, 2 * pairs)
    for part, positions in zip(table.split(_POSITIONS), torch.arange(length).float().split(_POSITIONS), strict=True):
        angles = torch.outer(positions, per_position)
        part[:, :pairs], part[:, pairs:] = angles.cos(), angles.sin()
    return table.mul_(factor)


def _pair_axis(rope: RopeParameters, rotary_dim: int) -> torch.Tensor:
    """Which of the three positions each pair of channels follows: int64 [rotary_dim / 2]."""
    sections, pairs = rope.mrope_section, rotary_dim // 2
    axis = [0] * pairs
    if len(sections) == 3 and sum(sections) == pairs:
        for index in (1, 2):
            start = sum(sections[:index])
            run = (
                slice(index, 3 * sections[index], 3)
                if rope.mrope_interleaved
                else slice(start, start + sections[index])
            )
            axis[run] = [index] * len(axis[run])
    if [axis.count(index) for index in range(3)] != list(sections):
        raise ValidationError(
            f"mrope_section={list(sections)} must be three numbers that share out the {pairs} rotated pairs.",
            parameter="mrope_section",
            value=sections,
        )
    return torch.tensor(axis)


@CustomOp.register("apply_rotary_emb")
class ApplyRotaryEmb(CustomOp):
    """Rotation by given cosines and sines, as vision encoders use it.

    Args:
        enforce_enable: enable the operation whatever `custom_ops` says.
        is_neox_style: as in `RotaryEmbedding`.
    """

    def __init__(self, enforce_enable: bool = False, is_neox_style: bool = True) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.is_neox_style = is_neox_style

    def forward_native(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x float [(batch,) N, heads, head_size], cos and sin [N, d] with 2d <= head_size -> the shape of x."""
        return apply_rotary(x, cos.float(), sin.float(), self.is_neox_style)


@CustomOp.register("dual_chunk_rotary_embedding")
class DualChunkRotaryEmbedding(CustomOp):
    """Rotary embedding for dual chunk attention (arXiv:2402.17463): keys are rotated once, queries five times.

    With L = chunk_size - local_size, a key is rotated by its position in its chunk, p = position mod L. A query is
    rotated by p (keys of its own chunk), min(p + L, chunk_size) (the previous chunk), min(2L - 1, chunk_size) (earlier
    chunks), p + L and p + chunk_size (the previous and earlier chunks in the sparse pattern, not clamped).

    Args:
        head_size, rotary_dim: channels of a head, and how many of them are rotated.
        max_position_embeddings: the longest sequence; the tables wrap, so it does not size them.
        base: theta of the frequencies.
        is_neox_style: as in `RotaryEmbedding`.
        chunk_size, local_size: of dual chunk attention, local_size < chunk_size.
    """

    cos_sin_cache: torch.Tensor

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool = True,
        *,
        chunk_size: int,
        local_size: int,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if not 0 <= local_size < chunk_size:
            raise ValidationError(
                f"local_size={local_size} must be from 0 to below chunk_size={chunk_size}.",
                parameter="local_size",
                value=local_size,
            )
        self.head_size = head_size
        self.rotary_dim = rotary_dim
        self.max_position_embeddings = max_position_embeddings
        self.is_neox_style = is_neox_style
        self.chunk_size = chunk_size
        self.chunk_len = chunk_size - local_size
        cache = cos_sin_table(1.0 / base_wavelengths(base, rotary_dim), chunk_size + self.chunk_len)
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, offsets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [N], query [N, heads * head_size], key [N, kv_heads * head_size], offsets added to positions.

        Returns the five queries concatenated in the order above, [N, 5 * heads * head_size], and the key.
        """
        place = (positions if offsets is None else positions + offsets) % self.chunk_len
        last = min(2 * self.chunk_len - 1, self.chunk_size)
        of_queries = (
            place,
            (place + self.chunk_len).clamp(max=self.chunk_size),
            torch.full_like(place, last),
            place + self.chunk_len,
            place + self.chunk_size,
        )
        return torch.cat([self._rotate(query, rows) for rows in of_queries], dim=-1), self._rotate(key, place)

    def _rotate(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos_sin_cache.index_select(0, rows).chunk(2, dim=-1)
        heads = x.view(x.shape[0], x.shape[1] // self.head_size, self.head_size)
        return apply_rotary(heads, cos, sin, self.is_neox_style).view(x.shape)
