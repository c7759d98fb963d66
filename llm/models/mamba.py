"""Mamba: layers of one recurrent mixer each, without attention."""

from __future__ import annotations

import math

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    DecoderConfig,
    DecoderForCausalLM,
    LayerConfig,
    MambaConfig,
    NormConfig,
    OnePart,
    PartConfig,
    read_activation,
    read_decoder,
)

# Keys for training: how the first weights are drawn, and the types and forms of transformers' own computation.
TRAINING = (
    *("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor"),
    *("fused_add_norm", "pad_vocab_size_multiple", "rescale_prenorm_residual", "residual_in_fp32"),
    *("use_mambapy", "use_falcon_mambapy", "use_associative_scan"),
)
# A recurrent state does not limit the length of a sequence; memory for token ids and a default have to.
_POSITIONS = 131_072


class MambaForCausalLM(DecoderForCausalLM):
    renames = (
        ("backbone.embeddings", "model.embed_tokens"),
        ("backbone.embedding", "model.embed_tokens"),
        ("backbone.layers.*.norm", "model.layers.*.input_layernorm"),
        ("backbone.layers.*.mixer", "model.layers.*.mamba"),
        ("backbone.norm_f", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        return mamba_decoder(reader, read_mamba(reader))


def read_mamba(reader: ConfigReader, norm_eps: float | None = None) -> MambaConfig:
    """`norm_eps`: as in `MambaConfig`, of norms without a weight."""
    read_activation(reader)
    hidden = reader.positive("hidden_size")
    rank = reader.raw.get("time_step_rank", "auto")
    reader.expect("time_step_rank", rank)
    width = reader.positive("intermediate_size", int(reader.positive_number("expand", 2) * hidden))
    reader.expect("d_inner", width)
    return MambaConfig(
        reader.positive("state_size", 16),
        reader.positive("conv_kernel", 4),
        width,
        math.ceil(hidden / 16) if rank == "auto" else reader.positive("time_step_rank"),
        reader.boolean("use_conv_bias", True),
        reader.boolean("use_bias", False),
        norm_eps,
        norm_has_weight=False,
    )


def mamba_decoder(reader: ConfigReader, mixer: PartConfig, *, tied: bool = True) -> DecoderConfig:
    """One mixer over and over; the last thing that a family reads. `tied`: what a missing key means."""
    reader.ignore(*TRAINING)
    # The names of the first checkpoints, beside those of transformers.
    reader.expect("d_model", reader.positive("hidden_size"))
    reader.expect("n_layer", reader.positive("num_hidden_layers"))
    reader.expect("rms_norm", True)
    reader.expect("ssm_cfg", {})
    norm = NormConfig(reader.positive_number("layer_norm_epsilon", 1e-5))
    return read_decoder(
        reader,
        LayerConfig(attention=mixer, norms=OnePart(norm)),
        norm,
        positions=reader.positive("max_position_embeddings", _POSITIONS),
        tied=tied,
    )
