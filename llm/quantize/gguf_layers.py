"""What GGUF metadata says of a decoder's layers: heads or latents, feed-forward and experts.

Owns the keys behind the architecture's name, which `llm/loading/gguf/experts.py` and `metadata.py` read.
"""

from __future__ import annotations

from llm.loading.gguf.container import Value
from llm.loading.gguf.experts import LOG_MULTIPLIER, SIGMOID, SOFTMAX
from llm.models.decoder import AttentionConfig, DecoderConfig, GatedMLPConfig, LatentAttentionConfig, MoEConfig

Attention = AttentionConfig | LatentAttentionConfig


def rotated_channels(attention: Attention) -> int:
    """Of a head, of those that have a rotary embedding."""
    if isinstance(attention, LatentAttentionConfig):
        return attention.qk_rope_head_dim
    return int(attention.heads.size * (1.0 if attention.rope is None else attention.rope.partial_rotary_factor))


def head_counts(attention: Attention) -> tuple[int, int]:
    """(of queries, of keys and values); all queries of latent attention read the same latent."""
    if isinstance(attention, LatentAttentionConfig):
        return attention.heads, 1
    return attention.heads.query, attention.heads.key_value


def of_attention(attention: Attention) -> dict[str, Value]:
    """Sizes of a head. Of latents they are those of the latent; a key of its own says the head's ("mla")."""
    query, key_value = head_counts(attention)
    own: dict[str, Value] = {"attention.head_count": query, "attention.head_count_kv": key_value}
    if not isinstance(attention, LatentAttentionConfig):
        own |= {"attention.key_length": attention.heads.size, "attention.value_length": attention.heads.size}
        return own if attention.soft_cap is None else own | {"attn_logit_softcapping": float(attention.soft_cap)}
    rotated = attention.qk_rope_head_dim
    own |= {
        "attention.key_length": attention.kv_lora_rank + rotated,
        "attention.value_length": attention.kv_lora_rank,
        "attention.key_length_mla": attention.qk_nope_head_dim + rotated,
        "attention.value_length_mla": attention.v_head_dim,
        "attention.kv_lora_rank": attention.kv_lora_rank,
        "attention.q_lora_rank": attention.q_lora_rank or 0,  # llama.cpp reads no file without this key
    }
    if attention.rope is not None and attention.rope.mscale_all_dim:
        own["rope.scaling.yarn_log_multiplier"] = LOG_MULTIPLIER * attention.rope.mscale_all_dim
    return own


def of_feed_forward(config: DecoderConfig, is_deepseek: bool) -> dict[str, Value]:
    """Of dense layers and of those with experts; what other architectures than DeepSeek's have no keys for is left
    out."""
    parts = [layer.mlp for layer in config.layers]
    dense = next((part for part in parts if isinstance(part, GatedMLPConfig)), None)
    experts = next((part for part in parts if isinstance(part, MoEConfig)), None)
    if experts is None:
        return {} if dense is None else {"feed_forward_length": dense.intermediate_size}
    own: dict[str, Value] = {
        "feed_forward_length": (dense or experts).intermediate_size,
        "expert_count": experts.num_experts,
        "expert_used_count": experts.top_k,
        "expert_feed_forward_length": experts.intermediate_size,
    }
    if not is_deepseek:
        shared = experts.shared_size
        return own if shared is None else own | {"expert_shared_feed_forward_length": shared}
    return own | {
        "leading_dense_block_count": next(index for index, part in enumerate(parts) if part is experts),
        "expert_shared_count": (experts.shared_size or 0) // experts.intermediate_size,
        "expert_weights_scale": float(experts.routed_scaling_factor),
        "expert_weights_norm": experts.renormalize,
        "expert_gating_func": SIGMOID if experts.scoring == "sigmoid" else SOFTMAX,
        "expert_group_count": experts.groups,
        "expert_group_used_count": experts.topk_group,
    }
