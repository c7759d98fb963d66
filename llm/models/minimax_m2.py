"""MiniMax M2: queries and keys normalised over all heads, and experts chosen by sigmoid scores with a bias."""

from llm.models import decoder as d

_BIAS = "e_score_correction_bias"
# Of multi-token prediction and of other models of the same code.
_UNUSED = (
    *("attn_type_list", "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp"),
    "shared_moe_mode",
)


class MiniMaxM2ForCausalLM(d.DecoderForCausalLM):
    renames = (
        (f"model.layers.*.block_sparse_moe.{_BIAS}", f"model.layers.*.mlp.gate.{_BIAS}"),
        (f"model.layers.*.mlp.{_BIAS}", f"model.layers.*.mlp.gate.{_BIAS}"),
        *d.W1_W2_W3,
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        _expect_published(reader)
        heads, norm = d.read_heads(reader, default_kv_heads=8, default_size=128), d.read_rms_norm(reader)
        rope = reader.rope(5_000_000.0, default_share=reader.positive("rotary_dim", heads.size) / heads.size)
        attention = d.AttentionConfig(heads, rope, qk_norm=norm, qk_norm_over="all heads")
        mlp = d.MoEConfig(
            reader.positive("num_local_experts", 256),
            reader.positive("num_experts_per_tok", 8),
            reader.positive("intermediate_size", 1536),
            reader.string("hidden_act", "silu"),
            scoring="sigmoid",
            correction_bias=True,
        )
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=196_608)


def _expect_published(reader: d.ConfigReader) -> None:
    """Of the published file, at the values that transformers' code has built in."""
    for key in ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"):
        reader.expect(key, 1.0)
    for key in ("use_qk_norm", "use_routing_bias"):
        reader.expect(key, True)
    reader.expect("qk_norm_type", "per_layer")
    reader.expect("scoring_func", "sigmoid")
    reader.expect("shared_intermediate_size", 0)
    reader.ignore(*_UNUSED)
