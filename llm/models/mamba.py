"""Mamba 1 and 2, and Falcon Mamba: layers of one recurrent mixer each, without attention."""

import math

from llm.models import decoder as d

# Keys for training: how the first weights are drawn, and the types and forms of transformers' own computation.
TRAINING = (
    *("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor"),
    *("fused_add_norm", "pad_vocab_size_multiple", "rescale_prenorm_residual", "residual_in_fp32"),
    *("use_mambapy", "use_falcon_mambapy", "use_associative_scan"),
)
# A recurrent state does not limit the length of a sequence; memory for token ids and a default have to.
_POSITIONS = 131_072


class MambaForCausalLM(d.DecoderForCausalLM):
    """Mamba: layers of one recurrent mixer each, without attention."""

    renames = (
        ("backbone.embeddings", "model.embed_tokens"),
        ("backbone.embedding", "model.embed_tokens"),
        ("backbone.layers.*.norm", "model.layers.*.input_layernorm"),
        ("backbone.layers.*.mixer", "model.layers.*.mamba"),
        ("backbone.norm_f", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        return mamba_decoder(reader, _read_mamba(reader))


def _read_mamba(reader: d.ConfigReader, norm_eps: float | None = None) -> d.MambaConfig:
    """`norm_eps`: as in `MambaConfig`, of norms without a weight."""
    d.read_activation(reader)
    hidden = reader.positive("hidden_size")
    rank = reader.raw.get("time_step_rank", "auto")
    reader.expect("time_step_rank", rank)
    width = reader.positive("intermediate_size", int(reader.positive_number("expand", 2) * hidden))
    reader.expect("d_inner", width)
    return d.MambaConfig(
        reader.positive("state_size", 16),
        reader.positive("conv_kernel", 4),
        width,
        math.ceil(hidden / 16) if rank == "auto" else reader.positive("time_step_rank"),
        reader.boolean("use_conv_bias", True),
        reader.boolean("use_bias", False),
        norm_eps,
        norm_has_weight=False,
    )


def mamba_decoder(reader: d.ConfigReader, mixer: d.PartConfig, *, tied: bool = True) -> d.DecoderConfig:
    """One mixer over and over; the last thing that a family reads. `tied`: what a missing key means."""
    reader.ignore(*TRAINING)
    # The names of the first checkpoints, beside those of transformers.
    reader.expect("d_model", reader.positive("hidden_size"))
    reader.expect("n_layer", reader.positive("num_hidden_layers"))
    reader.expect("rms_norm", True)
    reader.expect("ssm_cfg", {})
    norm = d.NormConfig(reader.positive_number("layer_norm_epsilon", 1e-5))
    return d.read_decoder(
        reader,
        d.LayerConfig(attention=mixer, norms=d.OnePart(norm)),
        norm,
        positions=reader.positive("max_position_embeddings", _POSITIONS),
        tied=tied,
    )


class FalconMambaForCausalLM(MambaForCausalLM):
    """Falcon Mamba: Mamba with steps, B and C normalised."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        return mamba_decoder(reader, _read_mamba(reader, reader.positive_number("mixer_rms_eps", 1e-6)))


class Mamba2ForCausalLM(MambaForCausalLM):
    """Mamba 2: layers of one recurrent mixer each, without attention."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.read_activation(reader)
        mixer = read_mixer(reader, reader.positive_number("layer_norm_epsilon", 1e-5))
        width = reader.positive_number("expand", 2) * reader.positive("hidden_size", 4096)
        own = mixer.heads * mixer.head_size
        if own != width:
            wanted = f"of heads of {mixer.head_size} with {width:g} channels together"
            raise reader.error("num_heads", mixer.heads, wanted)
        reader.expect("intermediate_size", own)
        # Of other forms of the recurrence; the last is set for models whose gate comes first.
        reader.ignore("time_step_rank", "chunk_size", "norm_before_gate")
        return mamba_decoder(reader, mixer, tied=False)


def read_mixer(
    reader: d.ConfigReader, eps: float, names: tuple[str, str, str] = ("num_heads", "head_dim", "state_size")
) -> d.Mamba2Config:
    """From keys without a prefix; `names`: of those that families spell in their own way."""
    heads, size, states = names
    return d.Mamba2Config(
        reader.positive(heads, 128),
        reader.positive(size, 64),
        reader.positive("n_groups", 8),
        reader.positive(states, 128),
        reader.positive("conv_kernel", 4),
        reader.boolean("use_conv_bias", True),
        reader.boolean("use_bias", False),
        eps,
        dt_limit=d.read_step_limits(reader),
    )
