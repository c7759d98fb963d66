"""Reading the keys of config.json that most families share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llm.layers.norm import LayerNorm, RMSNorm
from llm.layers.rotary import RopeParameters
from llm.models.config_reader import ConfigReader
from llm.models.decoder.attention import Heads
from llm.models.decoder.config import DecoderConfig
from llm.models.decoder.layer import LayerConfig
from llm.models.decoder.part import NormClass, NormConfig


def read_heads(reader: ConfigReader, *, default_kv_heads: int | None = None, default_size: int | None = None) -> Heads:
    """Read the numbers of heads. The defaults are what missing keys mean; null is one KV head per head, and hidden_size
    / heads as the size, and so is a default of None."""
    heads, hidden = reader.positive("num_attention_heads"), reader.positive("hidden_size")
    kv_heads = reader.optional_integer("num_key_value_heads", default_kv_heads)
    size = reader.optional_integer("head_dim", default_size)
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


def windows_by_pattern(reader: ConfigReader, default: int, pattern: int) -> list[int | None]:
    """The sliding window of each layer where every `pattern`th sees all; `default`: a missing `sliding_window`."""
    count = reader.positive("num_hidden_layers")
    window = reader.optional_integer("sliding_window", default)
    sliding = [window is not None and (index + 1) % pattern != 0 for index in range(count)]
    return layer_windows(reader, count, window, sliding)
