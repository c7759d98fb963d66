"""HyperCLOVA X: Granite with a norm behind each part too, and logits that are multiplied, not divided."""

from collections.abc import Mapping

from llm.models import decoder as d

_LAYER = "model.layers.*"


class HyperCLOVAXForCausalLM(d.DecoderForCausalLM):
    renames = (
        (f"{_LAYER}.post_attention_layernorm", f"{_LAYER}.pre_feedforward_layernorm"),
        (f"{_LAYER}.post_norm1", f"{_LAYER}.post_attention_layernorm"),
        (f"{_LAYER}.post_norm2", f"{_LAYER}.post_feedforward_layernorm"),
    )

    @classmethod
    def declines(cls, config: Mapping[str, object]) -> str | None:
        """Why transformers' code computes this model by default; None: this class does."""
        for key, usual in (("use_post_norm", True), ("residual_multiplier", 1.0)):
            if config.get(key, usual) != usual:
                return f"{key} is not {usual}"
        return None

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("use_post_norm", True)
        reader.expect("residual_multiplier", 1.0)
        norm = d.read_rms_norm(reader)
        return d.uniform_decoder(
            reader,
            d.read_attention(reader, reader.rope(), scale=reader.optional_number("attention_multiplier")),
            norm,
            mlp=d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False)),
            norms=d.PreAndPostNorms(norm),
            embedding_multiplier=reader.number("embedding_multiplier", 1.0),
            logits_divisor=1 / reader.positive_number("logits_scaling", 1.0),
        )
