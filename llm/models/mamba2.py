"""Mamba 2: layers of one recurrent mixer each, without attention."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, Mamba2Config, read_activation, read_step_limits
from llm.models.mamba import MambaForCausalLM, mamba_decoder


class Mamba2ForCausalLM(MambaForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        read_activation(reader)
        heads, size = reader.positive("num_heads", 128), reader.positive("head_dim", 64)
        hidden = reader.positive("hidden_size", 4096)
        expand = reader.positive_number("expand", 2)
        if heads * size != expand * hidden:
            raise reader.error("num_heads", heads, f"of heads of {size} with {expand * hidden:g} channels together")
        reader.expect("intermediate_size", heads * size)
        # Of other forms of the recurrence; the last is set for models whose gate comes first.
        reader.ignore("time_step_rank", "chunk_size", "norm_before_gate")
        mixer = Mamba2Config(
            heads,
            size,
            reader.positive("n_groups", 8),
            reader.positive("state_size", 128),
            reader.positive("conv_kernel", 4),
            reader.boolean("use_conv_bias", True),
            reader.boolean("use_bias", False),
            reader.positive_number("layer_norm_epsilon", 1e-5),
            dt_limit=read_step_limits(reader),
        )
        return mamba_decoder(reader, mixer, tied=False)
