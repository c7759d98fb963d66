"""Reading the keys of config.json that most families share."""

from __future__ import annotations

from llm.layers.norm import RMSNorm
from llm.layers.rotary import RopeParameters
from llm.models.config_reader import ConfigReader
from llm.models.decoder.attention import Heads
from llm.models.decoder.part import NormClass, NormConfig


def read_heads(reader: ConfigReader, *, default_kv_heads: int | None = None, default_size: int | None = None) -> Heads:
    """Read the numbers of heads; a missing head_dim is `default_size`, or hidden_size / heads if that is None."""
    heads, hidden = reader.positive("num_attention_heads"), reader.positive("hidden_size")
    return Heads(
        heads,
        reader.positive("num_key_value_heads", default_kv_heads or heads),
        reader.positive("head_dim", default_size or hidden // heads),
    )


def read_rms_norm(reader: ConfigReader, default: float = 1e-6, kind: NormClass = RMSNorm) -> NormConfig:
    return NormConfig(reader.positive_number("rms_norm_eps", default), kind)


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
