"""Hunyuan, dense, with experts, and version 3; and MiniMax M2, whose experts are chosen alike."""

from dataclasses import replace

from llm.models import decoder as d

_UNUSED = (
    "cla_share_factor class_num dense_list eod_token_id im_end_id im_newline_id im_start_id mask_init_id "
    "num_media_embeds org_vocab_size pad_id pool_type text_end_id text_start_id"
).split()


class HunYuanDenseV1ForCausalLM(d.DecoderForCausalLM):
    """Hunyuan, dense: Llama with QK norm per head after the rotary embedding."""

    renames = (
        ("model.layers.*.self_attn.query_layernorm", "model.layers.*.self_attn.q_norm"),
        ("model.layers.*.self_attn.key_layernorm", "model.layers.*.self_attn.k_norm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        _expect_older_keys(reader)
        reader.expect("num_experts", 1)
        norm = d.read_rms_norm(reader, 1e-5)
        return d.uniform_decoder(reader, _attention(reader, norm), norm)


def _attention(reader: d.ConfigReader, norm: d.NormConfig) -> d.AttentionConfig:
    heads = d.read_heads(reader)
    return d.read_attention(reader, _read_rope(reader, heads.size), heads, qk_norm=norm, qk_norm_after_rope=True)


def _expect_older_keys(reader: d.ConfigReader) -> None:
    """Of the published files, at the values that change nothing; the rest is about other models of the same code."""
    for key in ("use_qk_norm", "use_rotary_pos_emb"):
        reader.expect(key, True)
    for key in ("use_cla", "position_embedding_xdrope", "add_classification_head", "mlp_bias"):
        reader.expect(key, False)
    reader.expect("norm_type", "rms")
    reader.expect("attention_head_dim", reader.raw.get("head_dim"))
    for key in _UNUSED:
        reader.expect(key, reader.raw.get(key))


def _read_rope(reader: d.ConfigReader, size: int) -> d.RopeParameters:
    """`alpha` beside rope_type "dynamic" stretches the base, whatever the length; the other keys are then unused."""
    given = reader.raw.get("rope_parameters", reader.raw.get("rope_scaling", {}))
    alpha = given.get("alpha") if isinstance(given, dict) else None
    rope = reader.rope(others=("alpha",))
    if not alpha or rope.rope_type != "dynamic":
        return rope
    if not isinstance(alpha, int | float) or not 0 < alpha <= 1e30:
        raise reader.error("alpha", alpha, "a positive number")
    return replace(rope, rope_type="default", theta=rope.theta * alpha ** (size / (size - 2)))


_MLP = "model.layers.*.mlp"
# Of training, and of routing that transformers' code has not.
_UNUSED_OF_EXPERTS = ("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token", "routed_scaling_factor")


class HunYuanMoEV1ForCausalLM(d.DecoderForCausalLM):
    """Hunyuan with experts (A13B): the dense model's attention, experts, and a feed-forward that every token has."""

    renames = (
        *HunYuanDenseV1ForCausalLM.renames,
        (f"{_MLP}.gate.wg", f"{_MLP}.gate"),
        (f"{_MLP}.shared_mlp", f"{_MLP}.shared_experts"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        _expect_older_keys(reader)
        reader.expect("use_mixed_mlp_moe", True)
        reader.expect("moe_layer_num_skipped", 0)
        reader.expect("norm_topk_prob", True)
        reader.expect("group_limited_greedy", False)
        reader.ignore("n_group", "topk_group", *_UNUSED_OF_EXPERTS)
        norm, inner = d.read_rms_norm(reader, 1e-5), reader.positive("intermediate_size")
        _one_for_all(reader, "moe_intermediate_size", inner)
        mlp = d.MoEConfig(
            _one_for_all(reader, "num_experts", 1),
            _one_for_all(reader, "moe_topk", 1),
            inner,
            reader.string("hidden_act", "silu"),
            shared_size=inner * _one_for_all(reader, "num_shared_expert", 1),
        )
        return d.uniform_decoder(reader, _attention(reader, norm), norm, mlp=mlp)


def _one_for_all(reader: d.ConfigReader, key: str, default: int) -> int:
    """A number, or a list with the same number for every layer."""
    given = reader.raw.get(key)
    if not isinstance(given, list):
        return reader.positive(key, default)
    values = set(reader.integers(key) or ())
    if len(values) != 1 or min(values) < 1:
        raise reader.error(key, given, "one positive integer, or the same for all layers")
    return values.pop()


_BIAS = "e_score_correction_bias"


class HYV3ForCausalLM(d.DecoderForCausalLM):
    """Hunyuan 3: QK norm per head, and experts chosen by sigmoid scores with a bias."""

    renames = (
        (f"{_MLP}.{_BIAS}", f"{_MLP}.gate.{_BIAS}"),
        (f"{_MLP}.expert_bias", f"{_MLP}.gate.{_BIAS}"),
        (f"{_MLP}.router.gate", f"{_MLP}.gate"),
        (f"{_MLP}.shared_mlp", f"{_MLP}.shared_experts"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.ignore("enable_moe_fp32_combine")  # everything is added in float32
        heads, norm = d.read_heads(reader, default_kv_heads=8, default_size=128), d.read_rms_norm(reader, 1e-5)
        bias, inner = reader.boolean("mlp_bias", False), reader.positive("moe_intermediate_size", 1536)
        dense = d.read_gated_mlp(reader, bias=bias)
        sparse = d.read_experts(
            reader,
            count=192,
            top_k=8,
            size=1536,
            scoring="sigmoid",
            correction_bias=True,
            routed_scaling_factor=reader.number("router_scaling_factor", 2.826),
            shared_size=inner * reader.positive("num_shared_experts", 1),
            shared_bias=bias,
        )
        return d.uniform_decoder(
            reader,
            d.read_attention(reader, reader.rope(11_158_840.0), heads, qk_norm=norm),
            norm,
            mlp=[sparse if is_sparse else dense for is_sparse in d.layers_with_experts(reader, 1)],
            positions=131_072,
        )


# Of multi-token prediction and of other models of the same code.
_UNUSED_BY_MINIMAX = (
    *("attn_type_list", "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp"),
    "shared_moe_mode",
)


class MiniMaxM2ForCausalLM(d.DecoderForCausalLM):
    """MiniMax M2: queries and keys normalised over all heads, and experts chosen by sigmoid scores with a bias."""

    renames = (
        (f"model.layers.*.block_sparse_moe.{_BIAS}", f"model.layers.*.mlp.gate.{_BIAS}"),
        (f"model.layers.*.mlp.{_BIAS}", f"model.layers.*.mlp.gate.{_BIAS}"),
        *d.W1_W2_W3,
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        _expect_published(reader)
        heads, norm = d.read_heads(reader, default_kv_heads=8, default_size=128), d.read_rms_norm(reader)
        rope = reader.rope(5_000_000.0, default_share=reader.positive("rotary_dim", heads.size) / heads.size)
        attention = d.AttentionConfig(heads, rope, qk_norm=norm, qk_norm_over="all heads")
        mlp = d.read_experts(
            reader,
            count=256,
            top_k=8,
            size=1536,
            count_key="num_local_experts",
            size_key="intermediate_size",
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
    reader.ignore(*_UNUSED_BY_MINIMAX)
