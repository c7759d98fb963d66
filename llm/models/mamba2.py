"""Mamba 2: layers of one recurrent mixer each, without attention."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, Mamba2Config, read_activation, read_step_limits
from llm.models.mamba import MambaForCausalLM, mamba_decoder


class Mamba2ForCausalLM(MambaForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        read_activation(reader)
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
    reader: ConfigReader, eps: float, names: tuple[str, str, str] = ("num_heads", "head_dim", "state_size")
) -> Mamba2Config:
    """From keys without a prefix; `names`: of those that families spell in their own way."""
    heads, size, states = names
    return Mamba2Config(
        reader.positive(heads, 128),
        reader.positive(size, 64),
        reader.positive("n_groups", 8),
        reader.positive(states, 128),
        reader.positive("conv_kernel", 4),
        reader.boolean("use_conv_bias", True),
        reader.boolean("use_bias", False),
        eps,
        dt_limit=read_step_limits(reader),
    )
