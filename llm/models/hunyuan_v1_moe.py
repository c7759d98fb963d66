"""Hunyuan with experts (A13B): the dense model's attention, experts, and a feed-forward that every token has."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    LayerConfig,
    MoEConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)
from llm.models.hunyuan_v1_dense import HunYuanDenseV1ForCausalLM, expect_older_keys, read_rope
from llm.models.reading_experts import ignore_training

_MLP = "model.layers.*.mlp"
# Of training, and of routing that transformers' code has not.
_UNUSED = ("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token", "routed_scaling_factor")


class HunYuanMoEV1ForCausalLM(DecoderForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        *HunYuanDenseV1ForCausalLM.renames,
        (f"{_MLP}.gate.wg", f"{_MLP}.gate"),
        (f"{_MLP}.shared_mlp", f"{_MLP}.shared_experts"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        expect_older_keys(reader)
        reader.expect("use_mixed_mlp_moe", True)
        reader.expect("moe_layer_num_skipped", 0)
        reader.expect("norm_topk_prob", True)
        reader.expect("group_limited_greedy", False)
        reader.ignore("n_group", "topk_group", *_UNUSED)
        norm, heads, inner = read_rms_norm(reader, 1e-5), read_heads(reader), reader.positive("intermediate_size")
        bias, rope = reader.boolean("attention_bias", False), read_rope(reader, heads.size)
        _one_for_all(reader, "moe_intermediate_size", inner)
        mlp = MoEConfig(
            _one_for_all(reader, "num_experts", 1),
            _one_for_all(reader, "moe_topk", 1),
            inner,
            reader.string("hidden_act", "silu"),
            shared_size=inner * _one_for_all(reader, "num_shared_expert", 1),
        )
        attention = AttentionConfig(heads, rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_after_rope=True)
        layer = LayerConfig(attention=attention, mlp=mlp, norms=PreNorms(norm))
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope))


def _one_for_all(reader: ConfigReader, key: str, default: int) -> int:
    """A number, or a list with the same number for every layer."""
    given = reader.raw.get(key)
    if not isinstance(given, list):
        return reader.positive(key, default)
    values = set(reader.integers(key) or ())
    if len(values) != 1 or min(values) < 1:
        raise reader.error(key, given, "one positive integer, or the same for all layers")
    return values.pop()
