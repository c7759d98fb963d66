"""GLM 4 to 4.7."""

from llm.models import decoder as d
from llm.models.deepseek import deepseek_decoder, dense_first, latent_of_v3, sigmoid_experts


class GlmForCausalLM(d.DecoderForCausalLM):
    """GLM-4 of 2024: Llama with an interleaved rotary embedding on half of each head."""

    @classmethod
    def norms(cls, norm: d.NormConfig) -> d.Norms:
        return d.PreNorms(norm)

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        norm = d.read_rms_norm(reader, 0.00000015625)
        attention = d.AttentionConfig(
            d.read_heads(reader, default_kv_heads=2, default_size=128),
            reader.rope(default_share=0.5),
            rope_interleaved=True,
            qkv_bias=reader.boolean("attention_bias", True),
        )
        return d.uniform_decoder(reader, attention, norm, norms=cls.norms(norm), positions=131072)


_LAYER = "model.layers.*"


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: GLM-4 with post-norms on both parts too."""

    renames = (
        (f"{_LAYER}.post_self_attn_layernorm", f"{_LAYER}.post_attention_layernorm"),
        (f"{_LAYER}.post_attention_layernorm", f"{_LAYER}.pre_feedforward_layernorm"),
        (f"{_LAYER}.post_mlp_layernorm", f"{_LAYER}.post_feedforward_layernorm"),
    )

    @classmethod
    def norms(cls, norm: d.NormConfig) -> d.Norms:
        return d.PreAndPostNorms(norm)


class Glm4MoeForCausalLM(d.DecoderForCausalLM):
    """GLM 4.5 and 4.6: experts by DeepSeek V3's rules under grouped attention; multi-token prediction drafts."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope = reader.rope(default_share=0.5)
        norm = d.NormConfig(reader.positive_number("rms_norm_eps", 1e-5))
        attention = d.AttentionConfig(
            d.read_heads(reader, default_kv_heads=8),
            rope,
            qkv_bias=reader.boolean("attention_bias", False),
            qk_norm=norm if reader.boolean("use_qk_norm", False) else None,
        )
        experts = sigmoid_experts(reader, 128, 8, 1408, groups=1, best=1, scale=1.0)
        is_sparse = dense_first(reader, reader.count("first_k_dense_replace", 1))
        return deepseek_decoder(reader, rope, attention, experts, is_sparse, eps=1e-5, positions=131_072)


class Glm4MoeLiteForCausalLM(d.DecoderForCausalLM):
    """GLM-4.7-Flash: DeepSeek V3 at another size, with the layers that have experts listed."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope = reader.rope()
        attention = latent_of_v3(reader, rope, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256)
        experts = sigmoid_experts(reader, 64, 4, 1536, groups=1, best=1, scale=1.8)
        first = reader.count("first_k_dense_replace", 1)
        is_sparse = d.layers_with_experts(reader, first)
        return deepseek_decoder(reader, rope, attention, experts, is_sparse, eps=1e-5, positions=202_752)
