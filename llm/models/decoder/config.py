"""The config of a whole decoder, its layers and everything around them; and reading the keys that families share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from llm.errors import UnsupportedModelError
from llm.forward import StateSpec
from llm.layers.norm import LayerNorm, RMSNorm
from llm.layers.parallel import TensorParallel
from llm.layers.rotary import RopeParameters
from llm.models.config_reader import ConfigReader
from llm.models.decoder.attention import AttentionConfig, Heads
from llm.models.decoder.layer import LayerConfig, Norms, PreNorms
from llm.models.decoder.mlp import GatedMLPConfig, PlainMLPConfig
from llm.models.decoder.multi_token import MultiTokenConfig
from llm.models.decoder.part import NormClass, NormConfig, PartConfig


@dataclass(frozen=True)
class LearnedPositions:
    """A table of position embeddings; position 0 is row `offset`."""

    rows: int
    offset: int = 0


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only language model.

    Attributes:
        max_position_embeddings: the longest sequence, rope scaling included.
        layers: one entry per layer.
        final_norm: between the last layer and the LM head; None: no such norm.
        classes: rows of `score`, the matrix of a classifier in place of the LM head; 0: there is neither, and hidden
            states are the result; None: an LM head.
        score_tokens: tokens (no, yes) whose rows of the LM head make `score`, of one class: the logit of yes less that
            of no; None: the checkpoint has `score`.
        classes_by_token: `score` is of every token's hidden state, with a bias; some files call it `classifier`.
        embedding_size: width of the embedding and of the LM head's input, between which and hidden_size a matrix each
            maps; None: hidden_size.
        embedding_norm: of what enters the first layer; None: no such norm.
        learned_positions: None: no position embeddings.
        embedding_multiplier, logits_divisor: constants that multiply the embedding and divide the logits.
        layers_left_out: how many layers for multi-token prediction a checkpoint may have behind these.
        multi_token: what the first of them is; None: the family has none.
        draft_head: the same if it is built, to draft tokens; None: it is not loaded.
        logits_soft_cap: logits become cap * tanh(logits / cap).
        tie_word_embeddings: the embedding is also the LM head.
        lm_head_bias: the LM head has a bias; not with tied embeddings.
    """

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    final_norm: NormConfig | None
    embedding_norm: NormConfig | None = None
    learned_positions: LearnedPositions | None = None
    embedding_multiplier: float = 1.0
    logits_divisor: float = 1.0
    layers_left_out: int = 0
    multi_token: MultiTokenConfig | None = None
    draft_head: MultiTokenConfig | None = None
    logits_soft_cap: float | None = None
    tie_word_embeddings: bool = False
    lm_head_bias: bool = False
    embedding_size: int | None = None
    classes: int | None = None
    classes_by_token: bool = False
    score_tokens: tuple[int, int] | None = None

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> list[StateSpec]:
        """All states of all layers on one rank, in the order in which the parts number them."""
        specs = [spec for layer in self.layers for spec in layer.states(dtype, tp)]
        if self.draft_head is not None:
            specs += self.draft_head.states(dtype, tp)
        if self.is_causal:
            return specs
        if len(set(specs)) > 1:
            raise UnsupportedModelError("config.json: layers that see following tokens have different heads.")
        return specs[:1]

    @property
    def is_causal(self) -> bool:
        """False if tokens see those after them."""
        return all(getattr(part, "causal", True) for layer in self.layers for part in layer.parts.values())

    @property
    def experts(self) -> int:
        """How many experts all layers have together."""
        return sum(part.experts for layer in self.layers for part in layer.parts.values())

    @property
    def ropes(self) -> set[RopeParameters]:
        """The rope parameters of all parts with a rotary embedding."""
        return {part.rope for layer in self.layers for part in layer.parts.values() if part.rope is not None}


def read_heads(reader: ConfigReader, *, default_kv_heads: int | None = None, default_size: int | None = None) -> Heads:
    """Read the numbers of heads. The defaults are what missing keys mean; null is one KV head per head, and hidden_size
    / heads as the size, and so is a default of None."""
    heads, hidden = reader.positive("num_attention_heads"), reader.positive("hidden_size")
    kv_heads = reader.optional_positive("num_key_value_heads", default_kv_heads)
    size = reader.optional_positive("head_dim", default_size)
    return Heads(
        heads,
        heads if kv_heads is None else reader.positive("num_key_value_heads", kv_heads),
        hidden // heads if size is None else reader.positive("head_dim", size),
    )


def read_rms_norm(reader: ConfigReader, default: float = 1e-6, kind: NormClass = RMSNorm) -> NormConfig:
    return NormConfig(reader.positive_number("rms_norm_eps", default), kind)


def read_layer_norm(
    reader: ConfigReader, key: str = "layer_norm_eps", kind: NormClass = LayerNorm, *, has_bias: bool = True
) -> NormConfig:
    return NormConfig(reader.positive_number(key, 1e-5), kind, has_bias=has_bias)


def read_attention(
    reader: ConfigReader, rope: RopeParameters | None, heads: Heads | None = None, **more: Any
) -> AttentionConfig:
    """Attention whose projections have biases if `attention_bias` says so; `more`: further fields."""
    bias = reader.boolean("attention_bias", False)
    return AttentionConfig(heads or read_heads(reader), rope, qkv_bias=bias, out_bias=bias, **more)


def read_gated_mlp(reader: ConfigReader, *, bias: bool = False) -> GatedMLPConfig:
    return GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"), bias)


def read_plain_mlp(reader: ConfigReader, activation: str, *, bias: bool = False) -> PlainMLPConfig:
    return PlainMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", activation), bias)


def read_decoder(
    reader: ConfigReader,
    layers: LayerConfig | Iterable[LayerConfig],
    final_norm: NormConfig | None,
    *,
    positions: int,
    tied: bool = False,
    **more: Any,
) -> DecoderConfig:
    """Everything around the layers, one for all or one each; the last thing that a family reads.

    Args:
        positions: the longest sequence.
        tied: what a missing `tie_word_embeddings` means.
        more: further fields of `DecoderConfig`.
    """
    if isinstance(layers, LayerConfig):
        layers = (layers,) * reader.positive("num_hidden_layers")
    config = DecoderConfig(
        vocab_size=reader.positive("vocab_size"),
        hidden_size=reader.positive("hidden_size"),
        max_position_embeddings=positions,
        layers=tuple(layers),
        final_norm=final_norm,
        tie_word_embeddings=reader.boolean("tie_word_embeddings", tied),
        **more,
    )
    reader.finish()
    return config


def uniform_decoder(
    reader: ConfigReader,
    attention: PartConfig | Sequence[PartConfig],
    norm: NormConfig,
    *,
    mlp: PartConfig | Sequence[PartConfig] | None = None,
    norms: Norms | None = None,
    rope: RopeParameters | None = None,
    positions: int = 2048,
    **more: Any,
) -> DecoderConfig:
    """Layers of one form, as Llama's; the last thing that a family reads.

    Args:
        attention, mlp: one for all layers, or a list of one each; `mlp` None: gated, without biases.
        norms: None: `norm` before each part.
        rope: whose scaling the longest sequence includes; None: the first layer's.
        positions: what a missing `max_position_embeddings` means.
        more: as of `read_decoder`.
    """
    mlp = read_gated_mlp(reader) if mlp is None else mlp
    count = next((len(parts) for parts in (attention, mlp) if not isinstance(parts, PartConfig)), None)
    count = reader.positive("num_hidden_layers") if count is None else count
    attentions, mlps = ([parts] * count if isinstance(parts, PartConfig) else parts for parts in (attention, mlp))
    layers = [
        LayerConfig(attention=one, mlp=other, norms=norms or PreNorms(norm))
        for one, other in zip(attentions, mlps, strict=True)
    ]
    longest = longest_sequence(reader, rope or attentions[0].rope or RopeParameters(), positions)
    return read_decoder(reader, layers, norm, positions=longest, **more)


def longest_sequence(reader: ConfigReader, rope: RopeParameters, default: int = 2048) -> int:
    """The longest sequence: `max_position_embeddings`, or the scaled length if that does not include the scaling."""
    longest = reader.positive("max_position_embeddings", default)
    if rope.rope_type in ("linear", "dynamic"):
        return int(longest * rope.factor)
    if rope.rope_type in ("yarn", "deepseek_yarn"):
        return int(rope.original_max_position_embeddings * rope.factor)
    return longest


def layer_windows(reader: ConfigReader, count: int, window: int | None, default: list[bool]) -> list[int | None]:
    """The sliding window of each layer, from `layer_types`; without it, `default` says which layers have one."""
    kinds = reader.names("layer_types")
    if kinds is None:
        sliding = default
    elif len(kinds) != count or set(kinds) - {"full_attention", "sliding_attention"}:
        raise reader.error("layer_types", kinds, f"{count} of 'full_attention' or 'sliding_attention'")
    else:
        sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and window is None:
        raise reader.error("sliding_window", None, "an integer, for layers of sliding_attention")
    return [window if slides else None for slides in sliding]


def with_windows(attention: AttentionConfig, windows: Iterable[int | None]) -> list[AttentionConfig]:
    """The attention of each layer, from the sliding window of each."""
    return [replace(attention, sliding_window=window) for window in windows]


def windows_by_pattern(reader: ConfigReader, pattern: int) -> list[int | None]:
    """The sliding window of each layer where every `pattern`th sees all."""
    count = reader.positive("num_hidden_layers")
    window = reader.optional_positive("sliding_window", 4096)
    sliding = [window is not None and (index + 1) % pattern != 0 for index in range(count)]
    return layer_windows(reader, count, window, sliding)
