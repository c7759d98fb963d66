"""OLMo 3: OLMo 2 with a window on three of four layers, whose rope is not scaled."""

from __future__ import annotations

from llm.layers.rotary import RopeParameters
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    PostNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
    windows_by_pattern,
)

_THETA = 500_000.0


class Olmo3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        norm, heads, bias = read_rms_norm(reader, 1e-5), read_heads(reader), reader.boolean("attention_bias", False)
        full, sliding = _ropes(reader)
        mlp = GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"))

        def layer(window: int | None) -> LayerConfig:
            attention = AttentionConfig(
                heads,
                full if window is None else sliding,
                window,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=norm,
                qk_norm_over="all heads",
            )
            return LayerConfig(attention=attention, mlp=mlp, norms=PostNorms(norm))

        layers = [layer(window) for window in windows_by_pattern(reader, 4096, 4)]
        return read_decoder(reader, layers, norm, positions=longest_sequence(reader, full))


def _ropes(reader: ConfigReader) -> tuple[RopeParameters, RopeParameters]:
    """(full attention, sliding attention): by layer type since transformers 5; before, only the first is scaled."""
    if "full_attention" in reader.raw.get("rope_parameters", {}):
        return reader.rope(_THETA, "full_attention"), reader.rope(_THETA, "sliding_attention")
    return reader.rope(_THETA), RopeParameters(theta=reader.positive_number("rope_theta", _THETA, above=1.0))
