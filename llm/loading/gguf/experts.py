"""GGUF metadata of mixtures of experts -> the keys of their config.json, beside those that all models have.

Owns what llama.cpp assumes of an architecture and a file does not say, such as whether the weights of a token's experts
sum to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llm.base.types import JsonObject
from llm.loading.gguf.keys import Metadata

SOFTMAX, SIGMOID = 1, 2
# The converter writes this part of mscale_all_dim.
LOG_MULTIPLIER = 0.1


def _mixtral(metadata: Metadata, config: JsonObject) -> JsonObject:
    return config | {"model_type": "mixtral", "num_local_experts": metadata.integer("expert_count")} | _used(metadata)


def _qwen2(metadata: Metadata, config: JsonObject) -> JsonObject:
    return _sized(metadata, config, renormalize=False) | {
        "shared_expert_intermediate_size": metadata.integer(
            "expert_shared_feed_forward_length", config["intermediate_size"]
        )
    }


def _qwen3(metadata: Metadata, config: JsonObject) -> JsonObject:
    return _sized(metadata, config, renormalize=True)


def _sized(metadata: Metadata, config: JsonObject, renormalize: bool) -> JsonObject:
    """Of Qwen, whose experts have a size of their own."""
    return (
        config
        | _used(metadata)
        | {
            "num_experts": metadata.integer("expert_count"),
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
            "norm_topk_prob": metadata.boolean("expert_weights_norm", renormalize),
        }
    )


def _olmoe(metadata: Metadata, config: JsonObject) -> JsonObject:
    clamped: JsonObject = {}
    if clip := metadata.number("attention.clamp_kqv", 0.0):
        clamped["clip_qkv"] = clip
    norm = metadata.boolean("expert_weights_norm", False)
    return (
        config | clamped | _used(metadata) | {"num_experts": metadata.integer("expert_count"), "norm_topk_prob": norm}
    )


def granite(metadata: Metadata) -> JsonObject:
    """What Granite multiplies by, with experts or without; a file without a key has no such factor."""
    found: JsonObject = {
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }
    scale = metadata.number("attention.scale", 0.0)
    return found | ({"attention_multiplier": scale} if scale else {})


def _granite(metadata: Metadata, config: JsonObject) -> JsonObject:
    found = config | granite(metadata) | _used(metadata) | {"num_local_experts": metadata.integer("expert_count")}
    shared = metadata.integer("expert_shared_feed_forward_length", 0)
    return found | ({"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {})


def _gpt_oss(metadata: Metadata, config: JsonObject) -> JsonObject:
    found = config | _used(metadata) | {"num_local_experts": metadata.integer("expert_count")}
    found["intermediate_size"] = metadata.integer("expert_feed_forward_length", config["intermediate_size"])
    found["sliding_window"] = metadata.integer("attention.sliding_window")
    found["attention_bias"] = bool(config.get("attention_bias"))
    # A file says it if there is one; config.json's own default is YaRN.
    scaling = config.get("rope_scaling")
    found["rope_scaling"] = {"rope_type": "default"} if scaling is None else scaling | {"truncate": False}
    return found


def _deepseek(metadata: Metadata, config: JsonObject) -> JsonObject:
    """V2, or V3 where scores are sigmoids. Files since 2025 have the sizes of a head under keys of their own."""
    gating = metadata.integer("expert_gating_func", SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise metadata.error("expert_gating_func", gating, f"{SOFTMAX}, softmax, or {SIGMOID}, sigmoid")
    rotated = metadata.integer("rope.dimension_count")
    key = metadata.integer("attention.key_length_mla", metadata.integer("attention.key_length", 0))
    value = metadata.integer("attention.value_length_mla", metadata.integer("attention.value_length", 0))
    groups = metadata.integer("expert_group_count", 1) or 1
    found = {name: item for name, item in config.items() if name != "partial_rotary_factor"} | _used(metadata)
    found |= {
        "model_type": "deepseek_v3" if gating == SIGMOID else "deepseek_v2",
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "q_lora_rank": metadata.integer("attention.q_lora_rank", 0) or None,
        "n_routed_experts": metadata.integer("expert_count"),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": metadata.boolean("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": metadata.integer("expert_group_used_count", 1) or 1,
    }
    if gating == SOFTMAX:
        found["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    scaling = config.get("rope_scaling")
    if scaling and scaling["rope_type"] == "yarn":
        scale = metadata.number("rope.scaling.yarn_log_multiplier", 0.0) / LOG_MULTIPLIER
        found["rope_scaling"] = scaling | ({"mscale": scale, "mscale_all_dim": scale} if scale else {})
    return found


def _used(metadata: Metadata) -> JsonObject:
    return {"num_experts_per_tok": metadata.integer("expert_used_count")}


# By architecture.
WITH_EXPERTS: Mapping[str, Callable[[Metadata, JsonObject], JsonObject]] = {
    "llama": _mixtral,
    "qwen2moe": _qwen2,
    "qwen3moe": _qwen3,
    "olmoe": _olmoe,
    "granitemoe": _granite,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek,
}
