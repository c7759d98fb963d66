"""Granite 3 and 4."""

from collections.abc import Mapping
from typing import ClassVar

from llm.models import decoder as d


class GraniteForCausalLM(d.DecoderForCausalLM):
    """Granite 3: Llama with constants on the embedding, the attention scores, each part's output and the logits."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        return _decoder(reader, d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False)))


def _decoder(reader: d.ConfigReader, mlp: d.PartConfig) -> d.DecoderConfig:
    """Granite's decoder around any feed-forward part."""
    norm = d.read_rms_norm(reader)
    return d.uniform_decoder(
        reader,
        d.read_attention(reader, reader.rope(), scale=reader.number("attention_multiplier", 1.0)),
        norm,
        mlp=mlp,
        norms=d.ScaledPreNorms(norm, reader.number("residual_multiplier", 1.0)),
        embedding_multiplier=reader.number("embedding_multiplier", 1.0),
        logits_divisor=reader.positive_number("logits_scaling", 1.0),
    )


def _experts(reader: d.ConfigReader, shared_size: int | None = None) -> d.MoEConfig:
    return d.read_experts(
        reader, 8, 2, count_key="num_local_experts", size_key="intermediate_size", shared_size=shared_size
    )


class GraniteMoeForCausalLM(d.DecoderForCausalLM):
    """Granite 3 MoE: Granite with experts, whose weights the checkpoint stores stacked."""

    renames: ClassVar[d.Renames] = (
        ("model.layers.*.block_sparse_moe.router.layer", "model.layers.*.mlp.gate"),
        ("model.layers.*.block_sparse_moe.router", "model.layers.*.mlp.gate"),
        ("model.layers.*.block_sparse_moe", "model.layers.*.mlp"),
    )

    stacked_weights: ClassVar[Mapping[str, d.Cut]] = {
        "input_linear.weight": d.gate_and_up,
        "output_linear.weight": d.down,
        **d.DecoderForCausalLM.stacked_weights,
    }

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        return _decoder(reader, _experts(reader))


class GraniteMoeHybridForCausalLM(GraniteMoeForCausalLM):
    """Granite 4: Granite with Mamba 2 in the place of most attention, and with experts, or without."""

    renames = (
        ("model.layers.*.shared_mlp.input_linear", "model.layers.*.mlp.shared_experts.gate_up_proj"),
        ("model.layers.*.shared_mlp.output_linear", "model.layers.*.mlp.shared_experts.down_proj"),
        *GraniteMoeForCausalLM.renames,
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("normalization_function", "rmsnorm")
        reader.ignore("init_method")  # of the first weights
        rope, norm = reader.rope(), d.read_rms_norm(reader)
        reader.expect("position_embedding_type", "rope", "nope")
        rotates = reader.raw.get("position_embedding_type") == "rope"
        scale = reader.number("attention_multiplier", 1.0)
        attention = d.read_attention(reader, rope if rotates else None, scale=scale)
        mamba, mlp = d.read_mamba2(reader, norm.eps), _read_mlp(reader)
        norms = d.ScaledPreNorms(norm, reader.number("residual_multiplier", 1.0))
        return d.uniform_decoder(
            reader,
            [attention if attends else mamba for attends in d.read_mixers(reader)],
            norm,
            mlp=mlp,
            norms=norms,
            rope=rope,
            embedding_multiplier=reader.number("embedding_multiplier", 1.0),
            logits_divisor=reader.positive_number("logits_scaling", 1.0),
        )

    def __init__(self, config: d.DecoderConfig, options: d.BuildOptions) -> None:
        super().__init__(config, options)
        if not config.experts:
            # Of this instance: the same feed-forward is then alone.
            alone = tuple((theirs, ours.replace("mlp.shared_experts", "mlp")) for theirs, ours in self.renames)
            vars(self)["renames"] = alone


def _read_mlp(reader: d.ConfigReader) -> d.PartConfig:
    size = reader.positive("shared_intermediate_size", 1024)
    if reader.count("num_local_experts", 8):
        return _experts(reader, size)
    d.ignore_training(reader)
    reader.ignore("intermediate_size", "num_experts_per_tok")
    return d.GatedMLPConfig(size, reader.string("hidden_act", "silu"))


class GraniteMoeSharedForCausalLM(GraniteMoeHybridForCausalLM):
    """Granite MoE with a feed-forward that every token has."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        return _decoder(reader, _experts(reader, reader.count("shared_intermediate_size", 0) or None))
