"""Granite 4: Granite with Mamba 2 in the place of most attention, and with experts, or without."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    GatedMLPConfig,
    LayerConfig,
    MoEConfig,
    PartConfig,
    ScaledPreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_mamba2,
    read_mixers,
    read_rms_norm,
)
from llm.models.granitemoe import GraniteMoeForCausalLM
from llm.models.interface import BuildOptions
from llm.models.reading_experts import ignore_training


class GraniteMoeHybridForCausalLM(GraniteMoeForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.layers.*.shared_mlp.input_linear", "model.layers.*.mlp.shared_experts.gate_up_proj"),
        ("model.layers.*.shared_mlp.output_linear", "model.layers.*.mlp.shared_experts.down_proj"),
        *GraniteMoeForCausalLM.renames,
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.expect("normalization_function", "rmsnorm")
        reader.ignore("init_method")  # of the first weights
        rope, norm = reader.rope(), read_rms_norm(reader)
        reader.expect("position_embedding_type", "rope", "nope")
        bias = reader.boolean("attention_bias", False)
        attention = AttentionConfig(
            read_heads(reader),
            rope if reader.raw.get("position_embedding_type") == "rope" else None,
            qkv_bias=bias,
            out_bias=bias,
            scale=reader.number("attention_multiplier", 1.0),
        )
        mamba, mlp = read_mamba2(reader, norm.eps), _read_mlp(reader)
        norms = ScaledPreNorms(norm, reader.number("residual_multiplier", 1.0))
        return read_decoder(
            reader,
            [
                LayerConfig(attention=attention if attends else mamba, mlp=mlp, norms=norms)
                for attends in read_mixers(reader, "layer_types")
            ],
            norm,
            positions=longest_sequence(reader, rope),
            embedding_multiplier=reader.number("embedding_multiplier", 1.0),
            logits_divisor=reader.positive_number("logits_scaling", 1.0),
        )

    def __init__(self, config: DecoderConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        if not config.experts:
            # Of this instance: the same feed-forward is then alone.
            alone = tuple((theirs, ours.replace("mlp.shared_experts", "mlp")) for theirs, ours in self.renames)
            vars(self)["renames"] = alone


def _read_mlp(reader: ConfigReader) -> PartConfig:
    ignore_training(reader)
    size, activation = reader.positive("shared_intermediate_size", 1024), reader.string("hidden_act", "silu")
    inner, top_k = reader.positive("intermediate_size"), reader.integer("num_experts_per_tok", 2)
    if reader.integer("num_local_experts", 8) == 0:
        return GatedMLPConfig(size, activation)
    return MoEConfig(reader.positive("num_local_experts", 8), top_k, inner, activation, shared_size=size)
