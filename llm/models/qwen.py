"""Qwen 1.5 to 3, and Mellum 2, which is Qwen 3 with windows."""

from llm.models import decoder as d
from llm.models.text_part import TextPart, read_text_part


class Qwen2ForCausalLM(d.DecoderForCausalLM):
    """Qwen 2 and 2.5: biases on query, key and value; optionally sliding windows on the later layers."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm, heads = reader.rope(), d.read_rms_norm(reader), d.read_heads(reader, default_kv_heads=32)
        mlp = d.read_gated_mlp(reader)
        return d.read_decoder(
            reader,
            [
                d.LayerConfig(
                    attention=d.AttentionConfig(heads, rope, window, qkv_bias=True), mlp=mlp, norms=d.PreNorms(norm)
                )
                for window in qwen_windows(reader)
            ],
            norm,
            positions=d.longest_sequence(reader, rope, 32768),
        )


def qwen_windows(reader: d.ConfigReader) -> list[int | None]:
    """The sliding window of each layer: with `use_sliding_window`, layers from `max_window_layers` on have one."""
    count = reader.positive("num_hidden_layers")
    window = reader.optional_positive("sliding_window", 4096)
    first = reader.integer("max_window_layers", 28)
    use = reader.boolean("use_sliding_window", False)
    sliding = [use and window is not None and index >= first for index in range(count)]
    return d.layer_windows(reader, count, window if use else None, sliding)


class Qwen2MoeForCausalLM(d.DecoderForCausalLM):
    """Qwen 1.5 MoE and Qwen 2 MoE: Qwen 2 with experts, and a shared expert behind a gate of its own."""

    renames = (("model.layers.*.mlp.shared_expert", "model.layers.*.mlp.shared_experts.0"),)

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        rope, norm = reader.rope(), d.read_rms_norm(reader)
        heads, bias = d.read_heads(reader, default_kv_heads=16), reader.boolean("qkv_bias", True)
        activation = reader.string("hidden_act", "silu")
        dense = d.GatedMLPConfig(reader.positive("intermediate_size", 5632), activation)
        sparse = d.MoEConfig(
            reader.positive("num_experts", 60),
            reader.positive("num_experts_per_tok", 4),
            reader.positive("moe_intermediate_size", 1408),
            activation,
            renormalize=reader.boolean("norm_topk_prob", False),
            shared_size=reader.positive("shared_expert_intermediate_size", 5632),
            shared_gate=True,
        )

        def layer(window: int | None, is_sparse: bool) -> d.LayerConfig:
            mlp: d.PartConfig = sparse if is_sparse else dense
            return d.LayerConfig(
                attention=d.AttentionConfig(heads, rope, window, qkv_bias=bias), mlp=mlp, norms=d.PreNorms(norm)
            )

        return d.read_decoder(
            reader,
            map(layer, _windows(reader), d.sparse_layers(reader)),
            norm,
            positions=d.longest_sequence(reader, rope, 32768),
        )


def _windows(reader: d.ConfigReader) -> list[int | None]:
    """Of each layer: with `use_sliding_window` every second one before `max_window_layers` has one."""
    count = reader.positive("num_hidden_layers")
    window = reader.optional_integer("sliding_window", 4096)  # 0: switched off
    first_full = reader.integer("max_window_layers", 28)
    use = reader.boolean("use_sliding_window", False)
    sliding = [use and index % 2 == 0 and index < first_full for index in range(count)]
    return d.layer_windows(reader, count, window if use else None, sliding)


_OTHERS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)


class Qwen2_5_VLForConditionalGeneration(TextPart, Qwen2ForCausalLM):
    """Qwen 2 and 2.5 VL: their language model, Qwen 2."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        return read_text_part(nested(reader, _OTHERS), Qwen2ForCausalLM, {}, _OTHERS)


def nested(reader: d.ConfigReader, others: tuple[str, ...]) -> d.ConfigReader:
    """The first releases have the keys of the language model beside those of the others."""
    if "text_config" in reader.raw:
        return reader
    outside = {key: value for key, value in reader.decoded.items() if key in (*others, "vision_config")}
    text = {key: value for key, value in reader.decoded.items() if key not in outside}
    return d.ConfigReader({**outside, "model_type": reader.family, "text_config": text})


class Qwen2VLForConditionalGeneration(Qwen2_5_VLForConditionalGeneration):
    """The same language model, behind another vision tower."""


class Qwen3ForCausalLM(d.DecoderForCausalLM):
    """Qwen 3: queries and keys are normalised per head, and there are no biases unless config.json says so."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm = reader.rope(), d.read_rms_norm(reader)
        heads, mlp = d.read_heads(reader, default_kv_heads=32, default_size=128), d.read_gated_mlp(reader)

        def layer(window: int | None) -> d.LayerConfig:
            attention = d.read_attention(reader, rope, heads, sliding_window=window, qk_norm=norm)
            return d.LayerConfig(attention=attention, mlp=mlp, norms=d.PreNorms(norm))

        return d.read_decoder(
            reader, map(layer, qwen_windows(reader)), norm, positions=d.longest_sequence(reader, rope, 32768)
        )


class Qwen3MoeForCausalLM(d.DecoderForCausalLM):
    """Qwen 3 MoE: Qwen 3 with experts in all layers, or in those that config.json names."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        rope, norm = reader.rope(), d.read_rms_norm(reader)
        # transformers gives every layer a window or none.
        window = reader.optional_positive("sliding_window", 4096)
        window = window if reader.boolean("use_sliding_window", False) else None
        reader.integer("max_window_layers", 0)
        heads = d.read_heads(reader, default_kv_heads=4)
        attention = d.read_attention(reader, rope, heads, sliding_window=window, qk_norm=norm)
        activation = reader.string("hidden_act", "silu")
        dense = d.GatedMLPConfig(reader.positive("intermediate_size", 6144), activation)
        sparse = d.MoEConfig(
            reader.positive("num_experts", reader.positive("num_local_experts", 128)),
            reader.positive("num_experts_per_tok", 8),
            reader.positive("moe_intermediate_size", 768),
            activation,
            renormalize=reader.boolean("norm_topk_prob", False),
        )

        def layer(is_sparse: bool) -> d.LayerConfig:
            return d.LayerConfig(attention=attention, mlp=sparse if is_sparse else dense, norms=d.PreNorms(norm))

        return d.read_decoder(
            reader, map(layer, d.sparse_layers(reader)), norm, positions=d.longest_sequence(reader, rope, 32768)
        )


_OTHERS_OF_QWEN3 = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class Qwen3VLForConditionalGeneration(TextPart, Qwen3ForCausalLM):
    """Qwen 3 VL: its language model, Qwen 3."""

    others = _OTHERS_OF_QWEN3


class MellumForCausalLM(d.DecoderForCausalLM):
    """Mellum 2: Qwen 3 with experts, and a window with a rotary embedding of its own on some layers."""

    left_out = ("mtp",)  # a layer that predicts a second token

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        reader.ignore("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")
        full, sliding = reader.rope(500_000.0, "full_attention"), reader.rope(10_000.0, "sliding_attention")
        norm, activation = d.read_rms_norm(reader), reader.string("hidden_act", "silu")
        heads = d.read_heads(reader, default_kv_heads=4, default_size=128)
        count, window = reader.positive("num_hidden_layers"), reader.optional_positive("sliding_window", 1024)
        dense = d.GatedMLPConfig(reader.positive("intermediate_size", 7168), activation)
        sparse = d.MoEConfig(
            reader.positive("num_experts", reader.positive("num_local_experts", 64)),
            reader.positive("num_experts_per_tok", 8),
            reader.positive("moe_intermediate_size", 896),
            activation,
            renormalize=reader.boolean("norm_topk_prob", True),
        )

        def layer(size: int | None, is_sparse: bool) -> d.LayerConfig:
            rope = sliding if size else full
            attention = d.read_attention(reader, rope, heads, sliding_window=size, qk_norm=norm)
            return d.LayerConfig(attention=attention, mlp=sparse if is_sparse else dense, norms=d.PreNorms(norm))

        windows = d.layer_windows(reader, count, window, [False] * count)
        layers = map(layer, windows, d.layers_with_experts(reader, 0))
        return d.read_decoder(reader, layers, norm, positions=d.longest_sequence(reader, full, 131_072))
