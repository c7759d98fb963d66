"""Mellum 2: Qwen 3 with experts, and a window with a rotary embedding of its own on some layers."""

from llm.models import decoder as d


class MellumForCausalLM(d.DecoderForCausalLM):
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
