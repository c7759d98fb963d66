"""ERNIE 4.5, dense and with experts."""

from llm.models import decoder as d


class Ernie4_5ForCausalLM(d.DecoderForCausalLM):
    """ERNIE 4.5, dense: Llama with an interleaved rotary embedding."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        bias = reader.boolean("use_bias", False)
        heads = d.read_heads(reader, default_kv_heads=2, default_size=128)
        attention = d.AttentionConfig(
            heads, reader.rope(500_000.0), rope_interleaved=True, qkv_bias=bias, out_bias=bias
        )
        mlp, norm = d.read_gated_mlp(reader, bias=bias), d.read_rms_norm(reader, 1e-5)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=131072, tied=True)


class Ernie4_5_MoeForCausalLM(d.DecoderForCausalLM):
    """ERNIE 4.5 with experts: a bias for choosing them, and some that every token has."""

    renames = (("model.layers.*.mlp.moe_statics", "model.layers.*.mlp.gate"),)
    # The layers that predict a second token.
    left_out = ("model.mtp_block", "model.mtp_emb_norm", "model.mtp_hidden_norm", "model.mtp_linear_proj")

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        for key in ("moe_capacity", "num_nextn_predict_layers"):
            reader.expect(key, reader.raw.get(key))
        reader.expect("moe_gate", "topk")
        reader.expect("moe_norm_min", 1e-12)
        reader.expect("use_bias", False)
        reader.expect("use_rmsnorm", True)
        rope, norm, heads = (
            reader.rope(500_000.0),
            d.read_rms_norm(reader, 1e-5),
            d.read_heads(reader, default_kv_heads=4),
        )
        activation, inner = reader.string("hidden_act", "silu"), reader.positive("moe_intermediate_size", 1536)
        dense = d.GatedMLPConfig(reader.positive("intermediate_size", 12288), activation)
        shared = reader.count("moe_num_shared_experts", 2)
        sparse = d.MoEConfig(
            reader.positive("moe_num_experts", 64),
            reader.positive("moe_k", 6),
            inner,
            activation,
            correction_bias=reader.boolean("moe_use_aux_free", True),
            shared_size=inner * shared if shared > 0 else None,
        )

        def layer(is_sparse: bool) -> d.LayerConfig:
            attention = d.AttentionConfig(heads, rope, rope_interleaved=True)
            return d.LayerConfig(attention=attention, mlp=sparse if is_sparse else dense, norms=d.PreNorms(norm))

        return d.read_decoder(
            reader,
            map(layer, _sparse_layers(reader)),
            norm,
            positions=d.longest_sequence(reader, rope, 131072),
            tied=True,
        )


def _sparse_layers(reader: d.ConfigReader) -> list[bool]:
    """Every `moe_layer_interval`-th of those between two indices; the last of them may be -1 for the last layer."""
    count = reader.positive("num_hidden_layers")
    interval = reader.positive("moe_layer_interval", 1)
    first, last = reader.count("moe_layer_start_index", 1), reader.integer("moe_layer_end_index", -1)
    last = count - 1 if last == -1 else last
    return [(index + 1) % interval == 0 and first <= index <= last for index in range(count)]
