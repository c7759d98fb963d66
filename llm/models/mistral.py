"""Mistral, Mixtral and Ministral."""

from llm.models import decoder as d
from llm.models.text_part import TextPart, read_text_part


class MistralForCausalLM(d.DecoderForCausalLM):
    """Mistral 7B and its successors: Llama, some with a sliding window on every layer."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        heads, window = d.read_heads(reader, default_kv_heads=8), reader.optional_positive("sliding_window", 4096)
        attention = d.AttentionConfig(heads, reader.rope(), window)
        return d.uniform_decoder(reader, attention, d.read_rms_norm(reader), positions=131072)


class MinistralForCausalLM(d.DecoderForCausalLM):
    """Ministral 8B: Mistral with a window on some layers only."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        count, window = reader.positive("num_hidden_layers"), reader.optional_positive("sliding_window", 4096)
        windows = d.layer_windows(reader, count, window, [window is not None] * count)
        attention = d.AttentionConfig(d.read_heads(reader, default_kv_heads=8), reader.rope())
        return d.uniform_decoder(reader, d.with_windows(attention, windows), d.read_rms_norm(reader), positions=131072)


class Ministral3ForCausalLM(d.DecoderForCausalLM):
    """Ministral 3: Llama with YaRN and queries scaled by position beyond the original context."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope = reader.rope(others=("llama_4_scaling_beta", "max_position_embeddings"))
        attention = d.AttentionConfig(
            d.read_heads(reader, default_kv_heads=8, default_size=128),
            rope,
            reader.optional_positive("sliding_window"),
            query_scale=d.QueryScale(_beta(reader), rope.original_max_position_embeddings),
        )
        return d.uniform_decoder(reader, attention, d.read_rms_norm(reader, 1e-5), positions=262144)


def _beta(reader: d.ConfigReader) -> float:
    given = reader.raw.get("rope_parameters", {})
    return d.ConfigReader(given if isinstance(given, dict) else {}).number("llama_4_scaling_beta")


class MixtralForCausalLM(d.DecoderForCausalLM):
    """Mixtral: Mistral with experts in the place of the feed-forward."""

    renames = d.W1_W2_W3

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        heads, window = d.read_heads(reader, default_kv_heads=8), reader.optional_positive("sliding_window")
        mlp = d.read_experts(reader, 8, 2, count_key="num_local_experts", size_key="intermediate_size")
        attention, norm = d.AttentionConfig(heads, reader.rope(1e6), window), d.read_rms_norm(reader, 1e-5)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=131_072)


_FAMILIES: dict[str, type[d.DecoderForCausalLM]] = {"mistral": MistralForCausalLM, "ministral3": Ministral3ForCausalLM}
_DEFAULTS: dict[str, object] = {"model_type": "mistral", "sliding_window": None}
_OTHERS = (
    "image_token_index",
    "image_token_id",
    "projector_hidden_act",
    "vision_feature_layer",
    "multimodal_projector_bias",
    "spatial_merge_size",
)


class Mistral3ForConditionalGeneration(TextPart, MistralForCausalLM):
    """Mistral Small 3.1 and later, Ministral 3: their language model, which is Mistral or Ministral 3."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        kind = str(reader.nested("text_config").get("model_type", "mistral"))
        if kind not in _FAMILIES:
            raise reader.error("model_type of text_config", kind, " or ".join(map(repr, _FAMILIES)))
        return read_text_part(reader, _FAMILIES[kind], _DEFAULTS, _OTHERS)
