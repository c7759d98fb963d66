"""Gemma 1 to 3, and VaultGemma."""

from dataclasses import replace

from llm.models import decoder as d
from llm.models.text_part import TextPart


class GemmaForCausalLM(d.DecoderForCausalLM):
    """Gemma 1: Llama with Gemma's RMS norm, scaled embeddings and GeGLU."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("use_bidirectional_attention", False)
        # The first releases say "gelu" and mean its tanh form, which is what they were trained with.
        for key in ("hidden_act", "hidden_activation"):
            reader.expect(key, "gelu", "gelu_pytorch_tanh")
        heads = d.read_heads(reader, default_kv_heads=16, default_size=256)
        return d.uniform_decoder(
            reader,
            d.read_attention(reader, reader.rope(), heads),
            d.read_rms_norm(reader, kind=d.GemmaRMSNorm),
            mlp=d.GatedMLPConfig(reader.positive("intermediate_size"), "gelu_pytorch_tanh"),
            positions=8192,
            embedding_multiplier=reader.positive("hidden_size") ** 0.5,
            tied=True,
        )


class Gemma2ForCausalLM(d.DecoderForCausalLM):
    """Gemma 2: norms before and after both parts, soft caps, a sliding window on every other layer."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        count = reader.positive("num_hidden_layers")
        window = reader.optional_positive("sliding_window", 4096)
        reader.expect("sliding_window_size", window)  # its first name, which gemma-2-9b and 27b also have
        windows = d.layer_windows(reader, count, window, [index % 2 == 0 for index in range(count)])
        reader.expect("use_bidirectional_attention", False)
        soft_cap = reader.optional_number("attn_logit_softcapping", 50.0)
        attention = replace(_attention(reader), rope=reader.rope(), soft_cap=soft_cap)
        return _decoder(
            reader,
            d.with_windows(attention, windows),
            positions=reader.positive("max_position_embeddings", 8192),
            logits_soft_cap=reader.optional_number("final_logit_softcapping", 30.0),
        )


def _attention(reader: d.ConfigReader) -> d.AttentionConfig:
    """The attention config that Gemma 2 and 3 have in common."""
    heads = d.read_heads(reader, default_kv_heads=4, default_size=256)
    return d.read_attention(reader, None, heads, scale=reader.positive_number("query_pre_attn_scalar", 256) ** -0.5)


def _decoder(
    reader: d.ConfigReader, attention: list[d.AttentionConfig], *, positions: int, logits_soft_cap: float | None
) -> d.DecoderConfig:
    """The decoder around the attention layers."""
    # The first releases also have a `hidden_act` that transformers does not read.
    reader.expect("hidden_act", "gelu", "gelu_pytorch_tanh")
    activation = reader.string("hidden_activation", "gelu_pytorch_tanh")
    mlp = d.GatedMLPConfig(reader.positive("intermediate_size"), activation)
    norm = d.read_rms_norm(reader, kind=d.GemmaRMSNorm)
    norms, hidden_size = d.PreAndPostNorms(norm), reader.positive("hidden_size")
    return d.read_decoder(
        reader,
        [d.LayerConfig(attention=part, mlp=mlp, norms=norms) for part in attention],
        norm,
        positions=positions,
        embedding_multiplier=hidden_size**0.5,
        logits_soft_cap=logits_soft_cap,
        tied=True,
    )


_LAYER = "model.layers.*"


class VaultGemmaForCausalLM(Gemma2ForCausalLM):
    """VaultGemma: Gemma 2 without the norms behind the parts."""

    renames = ((f"{_LAYER}.pre_feedforward_layernorm", f"{_LAYER}.post_attention_layernorm"),)

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        config = super().read_config(reader)
        if config.final_norm is None:
            raise RuntimeError("Gemma 2 has a final norm")
        norms = d.PreNorms(config.final_norm)
        return replace(config, layers=tuple(replace(layer, norms=norms) for layer in config.layers))


class Gemma3ForCausalLM(d.DecoderForCausalLM):
    """Gemma 3, text only: Gemma 2 with normalised queries and keys, and two ropes: windowed layers have their own base.

    In EmbeddingGemma tokens see those after them.
    """

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        full, sliding = read_ropes(reader)
        count = reader.positive("num_hidden_layers")
        pattern = reader.positive("sliding_window_pattern", reader.positive("_sliding_window_pattern", 6))
        window = reader.optional_positive("sliding_window", 4096)
        causal = not reader.boolean("use_bidirectional_attention", False)
        if window is not None and not causal:
            window = window // 2 + 1  # of both sides together
        windows = d.layer_windows(reader, count, window, [(index + 1) % pattern != 0 for index in range(count)])
        soft_cap = reader.optional_number("attn_logit_softcapping")
        qk_norm = d.read_rms_norm(reader, kind=d.GemmaRMSNorm)
        attention = replace(_attention(reader), qk_norm=qk_norm, soft_cap=soft_cap, causal=causal)
        return _decoder(
            reader,
            [replace(attention, sliding_window=size, rope=full if size is None else sliding) for size in windows],
            positions=reader.positive("max_position_embeddings", 131072),
            logits_soft_cap=reader.optional_number("final_logit_softcapping"),
        )


def read_ropes(reader: d.ConfigReader) -> tuple[d.RopeParameters, d.RopeParameters]:
    """(full attention, sliding attention): per layer type since transformers 5, in separate keys before."""
    if "full_attention" in reader.raw.get("rope_parameters", {}):
        return reader.rope(1_000_000.0, "full_attention"), reader.rope(10_000.0, "sliding_attention")
    local = reader.positive_number("rope_local_base_freq", 10_000.0, above=1.0)
    return reader.rope(1_000_000.0), d.RopeParameters(theta=local)


# The published files leave out what equals these.
_DEFAULTS: dict[str, object] = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_OTHERS = ("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image")


class Gemma3ForConditionalGeneration(TextPart, Gemma3ForCausalLM):
    """Gemma 3 multimodal (4B, 12B, 27B): its language model."""

    others = _OTHERS
    defaults = _DEFAULTS
