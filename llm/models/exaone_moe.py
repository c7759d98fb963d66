"""K-EXAONE: EXAONE 4's attention under norms before each part, with DeepSeek V3's experts."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    MoEConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)
from llm.models.exaone4 import exaone_windows
from llm.models.reading_experts import ignore_training, layers_with_experts

_BIAS = "e_score_correction_bias"


class ExaoneMoeForCausalLM(DecoderForCausalLM):
    renames = ((f"model.layers.*.mlp.{_BIAS}", f"model.layers.*.mlp.gate.{_BIAS}"),)
    left_out = ("mtp",)  # layers that predict a second token

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        reader.ignore("num_nextn_predict_layers")
        reader.expect("scoring_func", "sigmoid")
        reader.expect("topk_method", "noaux_tc")
        rope, norm, heads = reader.rope(), read_rms_norm(reader, 1e-5), read_heads(reader)
        window = reader.optional_integer("sliding_window", 4096)
        activation, inner = reader.string("hidden_act", "silu"), reader.positive("moe_intermediate_size", 1024)
        dense = GatedMLPConfig(reader.positive("intermediate_size"), activation)
        sparse = MoEConfig(
            reader.positive("num_experts", 64),
            reader.positive("num_experts_per_tok", 8),
            inner,
            activation,
            renormalize=reader.boolean("norm_topk_prob", True),
            scoring="sigmoid",
            correction_bias=True,
            groups=reader.positive("n_group", 1),
            topk_group=reader.positive("topk_group", 1),
            routed_scaling_factor=reader.number("routed_scaling_factor", 2.5),
            shared_size=inner * reader.positive("num_shared_experts", 1),
        )

        def layer(size: int | None, is_sparse: bool) -> LayerConfig:
            rotates = size is not None or window is None
            attention = AttentionConfig(heads, rope if rotates else None, size, qk_norm=norm)
            return LayerConfig(attention=attention, mlp=sparse if is_sparse else dense, norms=PreNorms(norm))

        kinds = layers_with_experts(reader, reader.integer("first_k_dense_replace", 1))
        layers = map(layer, exaone_windows(reader, window), kinds)
        return read_decoder(reader, layers, norm, positions=longest_sequence(reader, rope))
