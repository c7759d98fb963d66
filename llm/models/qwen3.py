"""Qwen 3, and Mellum 2, which is Qwen 3 with windows."""

from llm.models import decoder as d
from llm.models.qwen2 import qwen_windows
from llm.models.text_part import TextPart, read_text_part


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


_OTHERS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class Qwen3VLForConditionalGeneration(TextPart, Qwen3ForCausalLM):
    """Qwen 3 VL: its language model, Qwen 3."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        return read_text_part(reader, Qwen3ForCausalLM, {}, _OTHERS)


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
