"""Tiny random checkpoints, one per row of `TINY_MODELS`: what every family is tested on.

The table, the random weights, and transformers' side of every comparison.

A new family is one line: the name of its transformers config class and keyword arguments that are small and odd, and
that cross the thresholds that matter (a window, an original context length) within the prompts' `lengths`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB = 257
# Buffers that a checkpoint stores.
_RANDOM_BUFFERS = ("correction_bias", "expert_bias", "layer_scalar")
# Of the matrices in the layers: more makes greedy tokens vary more, and rounding errors grow faster.
GAIN = 1.5
# Odd sizes, head_dim != hidden_size / num_attention_heads, grouped queries.
BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 91,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# What an argument of `TinyModel.config` is where the file shall say null; None leaves it out.
NULL: Any = object()
# Of latent attention: heads of other widths than those of `BASE`.
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 6,
    "head_dim": None,
    "q_lora_rank": 14,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
}
# One dense layer, then one with experts in groups of two.
EXPERTS_OF_DEEPSEEK: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 13,
    "topk_group": 2,
}
# With head_dim 10 one wavelength is kept, one interpolated, and the rest are divided.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class TinyModel:
    """The options of one checkpoint.

    Attributes:
        config_class: a class of transformers, by name.
        config: its arguments, on top of `BASE`; None removes one that the class does not take.
        seed: of the weights; change it when a row is not decisive (`test_models.py` says so).
        dtype: what the weights are stored as.
        shards: split the weights over several files.
        rewrite_config: edits the config.json that transformers wrote.
        lengths: of the prompts.
        engine: arguments of `LLM` that this row always needs.
        control: `hf_overrides` that must change the answers: what is special about the row is felt at its lengths.
    """

    config_class: str
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    dtype: torch.dtype = torch.float32
    shards: bool = False
    rewrite_config: Callable[[dict[str, Any]], None] = lambda config: None
    lengths: tuple[int, ...] = (1, 5, 16, 23, 40)
    engine: Mapping[str, Any] = field(default_factory=dict)
    control: Mapping[str, Any] | None = None


def transformers_4(config: dict[str, Any]) -> None:
    """config.json as transformers 4 wrote it: `rope_theta` beside `rope_scaling`, `torch_dtype`."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    config["pretraining_tp"] = 1


TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("LlamaConfig"),
    "llama-biases-one-kv-head": TinyModel(
        "LlamaConfig", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}, seed=1
    ),
    "llama-tied": TinyModel("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-rope-llama3": TinyModel(
        "LlamaConfig",
        {"rope_parameters": LLAMA3},
        lengths=(1, 5, 16, 33, 80),
        control={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "llama-transformers-4": TinyModel(
        "LlamaConfig",
        {"rope_parameters": LLAMA3, "head_dim": 16},
        rewrite_config=transformers_4,
        control={"rope_scaling": None},
    ),
    "llama-bf16": TinyModel("LlamaConfig", {"tie_word_embeddings": True}, dtype=torch.bfloat16),
    "llama-sharded": TinyModel("LlamaConfig", {"attention_bias": True}, shards=True),
}

DEFAULT: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
TINY_MODELS = TINY_MODELS | {
    "mistral": TinyModel("MistralConfig", {"sliding_window": 7}, control={"sliding_window": 30}),
    "mistral-full": TinyModel("MistralConfig", {"sliding_window": None}),
    "qwen2": TinyModel("Qwen2Config", {"head_dim": None}),
    "qwen2-bf16": TinyModel("Qwen2Config", {"head_dim": None}, dtype=torch.bfloat16),
    "qwen2-window": TinyModel(
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "head_dim": None},
        control={"max_window_layers": 2, "layer_types": None},
    ),
    "qwen3": TinyModel("Qwen3Config", {"num_key_value_heads": 1}),
    "qwen3-bias": TinyModel("Qwen3Config", {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma2": TinyModel(
        "Gemma2Config",
        {"sliding_window": 7, "query_pre_attn_scalar": 14, "tie_word_embeddings": True},
        seed=6,
        control={"sliding_window": 30},
    ),
    "gemma2-caps": TinyModel(
        "Gemma2Config",
        {"sliding_window": 7, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 7.0},
        control={"attn_logit_softcapping": 4.0},
    ),
    "gemma3": TinyModel(
        "Gemma3TextConfig",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 14,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        control={"sliding_window": 30},
    ),
    "phi3": TinyModel("Phi3Config", {"head_dim": None, "sliding_window": 11}, control={"sliding_window": 30}),
    "phi3-partial": TinyModel(
        "Phi3Config",
        {
            "head_dim": None,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3-longrope-long": TinyModel(
        "Phi3Config",
        {
            "head_dim": None,
            "num_attention_heads": 6,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
                "original_max_position_embeddings": 32,
            },
        },
        lengths=(33, 35, 40, 47, 60),
        engine={"max_model_len": 100},
    ),
    "phi3-longrope-short": TinyModel(
        "Phi3Config",
        {
            "head_dim": None,
            "num_attention_heads": 6,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
                "original_max_position_embeddings": 64,
            },
        },
        engine={"max_model_len": 64},
    ),
    "granite": TinyModel(
        "GraniteConfig",
        {
            "head_dim": None,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.5,
        },
        control={"residual_multiplier": 1.0},
    ),
    "granite-bias": TinyModel("GraniteConfig", {"head_dim": None, "attention_bias": True, "mlp_bias": True}),
    "olmo2": TinyModel("Olmo2Config", {"head_dim": None}),
    "smollm3": TinyModel(
        "SmolLM3Config",
        {"head_dim": None, "no_rope_layer_interval": 2, "num_hidden_layers": 4},
        control={"no_rope_layers": [1, 1, 1, 1]},
    ),
    "opt": TinyModel(
        "OPTConfig",
        {
            "num_key_value_heads": None,
            "head_dim": None,
            "intermediate_size": None,
            "rms_norm_eps": None,
            "ffn_dim": 91,
            "word_embed_proj_dim": 48,
            "tie_word_embeddings": True,
        },
        seed=1,
    ),
    "gpt2": TinyModel(
        "GPT2Config",
        {
            "num_key_value_heads": None,
            "head_dim": None,
            "n_positions": 256,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 6,
            "n_inner": 91,
            "hidden_size": None,
            "intermediate_size": None,
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "max_position_embeddings": None,
            "rms_norm_eps": None,
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": True,
        },
        seed=2,
    ),
    "llama-linear": TinyModel(
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
        control={"rope_parameters": DEFAULT},
    ),
    "llama-dynamic": TinyModel(
        "LlamaConfig",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0},
        },
        engine={"max_model_len": 64},
    ),
    "llama-dynamic-scaled": TinyModel(
        "LlamaConfig",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0},
        },
        engine={"max_model_len": 64},
        lengths=(52, 52, 52),
        control={"rope_parameters": DEFAULT, "max_position_embeddings": 64},
    ),
    "llama-yarn": TinyModel(
        "LlamaConfig",
        {
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
            },
        },
        control={"rope_parameters": DEFAULT},
    ),
    # Latent attention: heads of queries alone, keys and values of other widths.
    "minicpm3": TinyModel(
        "MiniCPM3Config",
        {
            **LATENT,
            "scale_emb": 3.0,
            "scale_depth": 1.1,
            "dim_model_base": 60,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.0, 2.0, 3.0],
                "original_max_position_embeddings": 32,
            },
        },
        lengths=(33, 35, 40, 47, 60),
        engine={"max_model_len": 100},
        control={"scale_depth": 1.4},
    ),
    "deepseek-v2": TinyModel(
        "DeepseekV2Config",
        {
            **LATENT,
            **EXPERTS_OF_DEEPSEEK,
            **{"q_lora_rank": NULL, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "n_group": 3, "topk_group": 1},
            # Its complex rope in transformers needs queries of an even size.
            **{"topk_method": "group_limited_greedy", "qk_nope_head_dim": 8},
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.707,
                "mscale_all_dim": 1.0,
            },
        },
        dtype=torch.bfloat16,
        seed=2,
        control={"topk_method": "greedy"},
    ),
    "deepseek-v3": TinyModel(
        "DeepseekV3Config",
        {**LATENT, **EXPERTS_OF_DEEPSEEK, "n_group": 3, "routed_scaling_factor": 2.5},
        seed=1,
        control={"norm_topk_prob": False},
    ),
    "youtu": TinyModel("YoutuConfig", {**LATENT, "head_dim": None}, control={"rope_interleave": False}),
    "glm4-moe": TinyModel(
        "Glm4MoeConfig",
        {
            **EXPERTS_OF_DEEPSEEK,
            **{"head_dim": 12, "use_qk_norm": True, "attention_bias": True, "n_group": 1},
            "topk_group": 1,
        },
        control={"norm_topk_prob": False},
    ),
    "glm4-moe-lite": TinyModel(
        "Glm4MoeLiteConfig",
        {
            **LATENT,
            **EXPERTS_OF_DEEPSEEK,
            **{"head_dim": None, "mlp_layer_types": ["sparse", "dense"], "rope_interleave": False, "n_group": 1},
            **{"first_k_dense_replace": None, "topk_group": 1},
        },
        control={"rope_interleave": True},
    ),
    "gpt-oss": TinyModel(
        "GptOssConfig",
        {
            **{"num_hidden_layers": 2, "intermediate_size": 37, "num_local_experts": 5, "num_experts_per_tok": 2},
            **{"sliding_window": 7, "swiglu_limit": 1.1},
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
        control={"swiglu_limit": 7.0},
    ),
}

_LAYER_NORM: dict[str, Any] = {"rms_norm_eps": None, "layer_norm_eps": 1e-3, "head_dim": None}
_ALL_HEADS: dict[str, Any] = {**_LAYER_NORM, "num_key_value_heads": None}
_WIDER = {"hidden_size": 60}  # with heads of 10 channels, of which a share is rotated
_HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6}
TINY_MODELS = TINY_MODELS | {
    "gemma": TinyModel("GemmaConfig", {"hidden_act": "gelu", "tie_word_embeddings": True}),
    "phi": TinyModel(
        "PhiConfig",
        {**_LAYER_NORM, **_WIDER, "rope_parameters": _HALF, "qk_layernorm": True},
        seed=1,
        control={"rope_parameters": {**_HALF, "partial_rotary_factor": 0.4}},
    ),
    "glm": TinyModel(
        "GlmConfig", {"rope_parameters": _HALF}, control={"rope_parameters": {**_HALF, "partial_rotary_factor": 1.0}}
    ),
    "glm4": TinyModel("Glm4Config", {"rope_parameters": _HALF}),
    "cohere": TinyModel(
        "CohereConfig",
        {**_LAYER_NORM, "logit_scale": 0.7, "tie_word_embeddings": True},
        control={"logit_scale": 0.9},
    ),
    "cohere2": TinyModel(
        "Cohere2Config",
        {**_LAYER_NORM, "logit_scale": 0.9, "sliding_window": 7, "layer_types": None, "num_hidden_layers": 4},
        control={"sliding_window": 30},
    ),
    "starcoder2": TinyModel(
        "Starcoder2Config",
        {**_LAYER_NORM, "layer_norm_eps": None, "norm_epsilon": 1e-3, "sliding_window": 11},
        control={"sliding_window": 30},
    ),
    "gpt_neox": TinyModel(
        "GPTNeoXConfig",
        {**_ALL_HEADS, **_WIDER, "rope_parameters": _HALF},
        control={"use_parallel_residual": False},
    ),
    "falcon": TinyModel(
        "FalconConfig",
        {
            **_ALL_HEADS,
            "layer_norm_eps": None,
            "layer_norm_epsilon": 1e-3,
            "intermediate_size": None,
            "ffn_hidden_size": 91,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-one-kv-head": TinyModel(
        "FalconConfig",
        {
            **_ALL_HEADS,
            "layer_norm_eps": None,
            "layer_norm_epsilon": 1e-3,
            "intermediate_size": None,
            "ffn_hidden_size": 91,
        },
    ),
    "stablelm": TinyModel(
        "StableLmConfig",
        {**_LAYER_NORM, **_WIDER, "rope_parameters": _HALF, "use_qkv_bias": True},
        control={"rope_parameters": {**_HALF, "partial_rotary_factor": 0.4}},
    ),
}

_GPT2: dict[str, Any] = {**TINY_MODELS["gpt2"].config, "rms_norm_eps": None}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
}
TINY_MODELS = TINY_MODELS | {
    "olmo": TinyModel(
        "OlmoConfig", {**_LAYER_NORM, "layer_norm_eps": None, "clip_qkv": 0.9}, control={"clip_qkv": 1.2}
    ),
    "olmo3": TinyModel(
        "Olmo3Config",
        {
            "head_dim": None,
            "sliding_window": 7,
            "num_hidden_layers": 4,
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": DEFAULT},
        },
        control={"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": DEFAULT}},
    ),
    "exaone4": TinyModel(
        "Exaone4Config",
        {"sliding_window": 7, "sliding_window_pattern": 2, "num_hidden_layers": 4},
        seed=1,
        control={"sliding_window": None, "layer_types": None},
    ),
    "seed_oss": TinyModel("SeedOssConfig", {"attention_out_bias": True}),
    "hyperclovax": TinyModel(
        "HyperCLOVAXConfig",
        {"num_hidden_layers": 2, "head_dim": 8, "logits_scaling": 0.9, "embedding_multiplier": 2.0},
        control={"logits_scaling": 1.0},
    ),
    "jais2": TinyModel("Jais2Config", {"rms_norm_eps": None, "num_hidden_layers": 2}),
    "vaultgemma": TinyModel(
        "VaultGemmaConfig",
        {"num_hidden_layers": 2, "sliding_window": 7, "query_pre_attn_scalar": 12},
        control={"sliding_window": 30},
    ),
    "hunyuan_v1_dense": TinyModel(
        "HunYuanDenseV1Config",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}},
        control={"rope_parameters": DEFAULT},
    ),
    "ernie4_5": TinyModel("Ernie4_5Config", {"use_bias": True, "tie_word_embeddings": True}),
    "helium": TinyModel("HeliumConfig", {"num_key_value_heads": 3, "head_dim": 8}),
    "arcee": TinyModel("ArceeConfig", {"mlp_bias": True}),
    "internlm3": TinyModel("InternLM3Config", {"attention_bias": True, "mlp_bias": True}),
    "nemotron": TinyModel(
        "NemotronConfig",
        {**_LAYER_NORM, "layer_norm_eps": None, "norm_eps": 1e-3, "head_dim": 10, "rope_parameters": _HALF},
    ),
    "persimmon": TinyModel("PersimmonConfig", {**_ALL_HEADS, **_WIDER, "rope_parameters": _HALF}),
    "ministral3": TinyModel(
        "Ministral3Config",
        {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5}, "sliding_window": None},
        control={"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.0}},
    ),
    "gptj": TinyModel("GPTJConfig", {**_GPT2, "n_embd": 60, "rotary_dim": 6, "tie_word_embeddings": False}),
    "gpt_bigcode": TinyModel("GPTBigCodeConfig", _GPT2, seed=2),
    "gpt2-scaled-by-layer": TinyModel(
        "GPT2Config",
        {**_GPT2, "scale_attn_by_inverse_layer_idx": True},
        seed=2,
        control={"scale_attn_by_inverse_layer_idx": False},
    ),
    "opt-normed-sums": TinyModel(
        "OPTConfig",
        {**TINY_MODELS["opt"].config, "do_layer_norm_before": False, "word_embed_proj_dim": 24, "num_hidden_layers": 2},
        seed=3,
    ),
    "ministral": TinyModel(
        "MinistralConfig",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        control={"sliding_window": 30},
    ),
}

# ALiBi: six heads, whose slopes are those of four and every second one of eight.
_ALIBI: dict[str, Any] = {
    **dict.fromkeys(("intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings"), None),
    **{"rms_norm_eps": None, "layer_norm_epsilon": 1e-3, "num_hidden_layers": 2, "tie_word_embeddings": True},
}
TINY_MODELS = TINY_MODELS | {
    "bloom": TinyModel("BloomConfig", {**_ALIBI, "tie_word_embeddings": False}),
    "mpt": TinyModel(
        "MptConfig",
        {**_ALIBI, "attn_config": {"clip_qkv": 0.9}},
        control={"attn_config": {"clip_qkv": 1.2}},
    ),
    "falcon-alibi": TinyModel(
        "FalconConfig",
        {**_ALIBI, "alibi": True, "bias": True, "parallel_attn": False, "multi_query": False},
        control={"alibi": False},
    ),
}

TINY_MODELS = TINY_MODELS | {
    "apertus": TinyModel("ApertusConfig", {"num_hidden_layers": 2}, control={"rope_parameters": LLAMA3}),
    "nanochat": TinyModel("NanoChatConfig", {"num_hidden_layers": 2}, control={"final_logit_softcapping": 12.0}),
    "gpt_neo": TinyModel(
        "GPTNeoConfig",
        {
            **{**_ALIBI, "intermediate_size": 91, "max_position_embeddings": 256, "window_size": 7},
            "attention_types": [[["global", "local"], 1]],
        },
        seed=1,
        control={"window_size": 30},
    ),
    "codegen": TinyModel(
        "CodeGenConfig",
        {**_GPT2, "n_embd": 80, "n_head": 8, "n_layer": 2, "rotary_dim": 6, "tie_word_embeddings": False},
    ),
}

_GEMMA4: dict[str, Any] = {
    **{"num_hidden_layers": 5, "sliding_window": 7, "global_head_dim": 12, "final_logit_softcapping": 20.0},
    **{"layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2], "tie_word_embeddings": True},
    "hidden_size_per_layer_input": 9,
    "vocab_size_per_layer_input": VOCAB,
}
TINY_MODELS = TINY_MODELS | {
    "gemma4": TinyModel(
        "Gemma4TextConfig",
        {**_GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        control={"sliding_window": 30},
    ),
    "gemma3n": TinyModel(
        "Gemma3nTextConfig",
        {
            **{"num_hidden_layers": 4, "sliding_window": 7, "num_kv_shared_layers": 2, "laurel_rank": 11},
            **{"layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True},
            **{"hidden_size_per_layer_input": 9, "vocab_size_per_layer_input": 250, "altup_num_inputs": 3},
            **{"activation_sparsity_pattern": [0.8, 0.0, 0.0, 0.5], "altup_active_idx": 1},
        },
        control={"activation_sparsity_pattern": [0.7, 0.0, 0.0, 0.5]},
    ),
    "llama4": TinyModel(
        "Llama4TextConfig",
        {
            **{"num_hidden_layers": 4, "no_rope_layer_interval": 2, "attention_chunk_size": 9, "floor_scale": 5},
            **{"attn_scale": 0.4, "num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size_mlp": 61},
            **{"interleave_moe_layer_step": 2, "intermediate_size": 37},
        },
        control={"attention_chunk_size": 30},
    ),
    "gemma4-experts": TinyModel(
        "Gemma4TextConfig",
        {
            **{**_GEMMA4, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
            **{"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
            **{"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 13},
        },
        control={"top_k_experts": 3},
    ),
}

# Seven experts of odd size; the last layers of a hybrid are dense.
EXPERTS: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 37}
TINY_MODELS = TINY_MODELS | {
    "mixtral": TinyModel(
        "MixtralConfig",
        {**EXPERTS, "num_local_experts": 7, "num_experts_per_tok": 3},
        control={"num_experts_per_tok": 2},
    ),
    "qwen2-moe": TinyModel(
        "Qwen2MoeConfig",
        {
            **EXPERTS,
            **{"head_dim": None, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 37},
            **{"shared_expert_intermediate_size": 29, "num_hidden_layers": 3, "mlp_only_layers": [1]},
        },
        control={"norm_topk_prob": True},
    ),
    "qwen3-moe": TinyModel(
        "Qwen3MoeConfig",
        {**EXPERTS, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 37, "norm_topk_prob": True},
        dtype=torch.bfloat16,
        control={"norm_topk_prob": False},
    ),
    "ernie4-5-moe": TinyModel(
        "Ernie4_5_MoeConfig",
        {
            **EXPERTS,
            **{"head_dim": None, "moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 37},
            **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "num_hidden_layers": 3},
        },
    ),
    "olmoe": TinyModel("OlmoeConfig", {**EXPERTS, "head_dim": None, "num_experts": 7, "num_experts_per_tok": 7}),
    "phimoe": TinyModel(
        "PhimoeConfig",
        {
            **EXPERTS,
            **{"head_dim": None, "num_local_experts": 5, "router_jitter_noise": 0.3},
            **{"attention_bias": True, "lm_head_bias": True, "sliding_window": 50},
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                # transformers takes the short ones beyond the original length too.
                "short_factor": [1.0, 2.0, 3.0, 4.0],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
                "short_mscale": 1.05,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 32,
            },
        },
        lengths=(33, 35, 40, 47, 60),
        engine={"max_model_len": 100},
        control={"router_jitter_noise": 0.01},
    ),
    "dots1": TinyModel(
        "Dots1Config",
        {
            **EXPERTS_OF_DEEPSEEK,
            **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
            **{"sliding_window": 7, "max_window_layers": 1, "routed_scaling_factor": 1.7},
        },
        control={"norm_topk_prob": False},
    ),
    "exaone-moe": TinyModel(
        "ExaoneMoeConfig",
        {
            **{"sliding_window": 7, "sliding_window_pattern": 2, "num_hidden_layers": 2, "num_experts": 6},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 13, "num_shared_experts": 2},
        },
        control={"routed_scaling_factor": 1.0},
    ),
    "flex_olmo": TinyModel("FlexOlmoConfig", {**EXPERTS, "head_dim": None, "num_experts_per_tok": 3}),
    "granitemoeshared": TinyModel(
        "GraniteMoeSharedConfig",
        {
            **EXPERTS,
            **{"head_dim": None, "num_local_experts": 5, "num_experts_per_tok": 2, "attention_multiplier": 0.2},
            **{"residual_multiplier": 0.5, "shared_intermediate_size": 29},
        },
        control={"residual_multiplier": 0.4},
    ),
    "hunyuan_v1_moe": TinyModel("HunYuanMoEV1Config", {**EXPERTS, "num_experts": 5, "moe_topk": 3}),
    "hy_v3": TinyModel(
        "HYV3Config",
        {"num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 13},
        control={"router_scaling_factor": 1.0},
    ),
    "mellum": TinyModel(
        "MellumConfig",
        {
            **{**EXPERTS, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 37},
            **{"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7},
            "mlp_layer_types": ["sparse", "dense"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        control={"norm_topk_prob": False},
    ),
    "minimax_m2": TinyModel(
        "MiniMaxM2Config",
        {**EXPERTS, "num_local_experts": 7, "num_experts_per_tok": 3, "rope_parameters": _HALF},
        control={"num_experts_per_tok": 2},
    ),
    "solar_open": TinyModel(
        "SolarOpenConfig",
        {
            **{**EXPERTS_OF_DEEPSEEK, "intermediate_size": None, "first_k_dense_replace": None},
            **{"n_group": 1, "topk_group": 1, "attention_bias": True},
        },
        seed=1,
        control={"norm_topk_prob": False},
    ),
    "granitemoe": TinyModel(
        "GraniteMoeConfig",
        {
            **EXPERTS,
            **{"head_dim": None, "num_local_experts": 7, "num_experts_per_tok": 3, "attention_multiplier": 0.2},
            **{"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 0.5},
        },
    ),
}

# Layers with a state of fixed size per request, and attention.
TINY_MODELS = TINY_MODELS | {
    "lfm2": TinyModel(
        "Lfm2Config",
        {
            **{"head_dim": None, "rms_norm_eps": None, "norm_eps": 1e-3, "conv_bias": True, "conv_L_cache": 4},
            **{"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 13},
        },
        control={"norm_eps": 0.1},
    ),
    "lfm2-moe": TinyModel(
        "Lfm2MoeConfig",
        {
            **{"head_dim": None, "rms_norm_eps": None, "norm_eps": 1e-3, "num_dense_layers": 1, "num_experts": 7},
            **{"num_experts_per_tok": 3, "moe_intermediate_size": 37, "routed_scaling_factor": 2.5},
            **{"layer_types": ["full_attention", "conv", "conv"]},
        },
        control={"norm_topk_prob": False},
    ),
}
# Of recurrent mixers, with the sizes that each family spells in its own way.
_RECURRENT: Mapping[str, Any] = {
    **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"), None),
    **dict.fromkeys(("max_position_embeddings", "rms_norm_eps"), None),
    **{"layer_norm_epsilon": 1e-3, "state_size": 5, "conv_kernel": 3, "num_hidden_layers": 2},
}
TINY_MODELS = TINY_MODELS | {
    "mamba": TinyModel("MambaConfig", {**_RECURRENT, "time_step_rank": 7, "use_bias": True}),
    "falcon-mamba": TinyModel(
        "FalconMambaConfig", {**_RECURRENT, "tie_word_embeddings": True, "use_conv_bias": False, "mixer_rms_eps": 1e-2}
    ),
    "mamba2": TinyModel(
        "Mamba2Config",
        {
            **_RECURRENT,
            **{"num_heads": 4, "head_dim": 24, "n_groups": 2, "chunk_size": 8, "time_step_limit": (0.5, 1.5)},
        },
        control={"time_step_limit": [0.0, 1.5]},
    ),
}
# Of hybrids, with the sizes that they share.
_HYBRID: Mapping[str, Any] = {
    **{"head_dim": None, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_d_conv": 3},
    "mamba_chunk_size": 8,
}
TINY_MODELS = TINY_MODELS | {
    "granitemoehybrid": TinyModel(
        "GraniteMoeHybridConfig",
        {
            **EXPERTS,
            **_HYBRID,
            **{"num_local_experts": 7, "num_experts_per_tok": 3, "attention_multiplier": 0.2},
            **{"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 0.5},
            **{"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 31},
        },
        control={"residual_multiplier": 0.4},
    ),
    "granitemoehybrid-dense": TinyModel(
        "GraniteMoeHybridConfig",
        {
            **_HYBRID,
            **{"num_hidden_layers": 2, "num_local_experts": 0, "position_embedding_type": "rope"},
            **{"layer_types": ["full_attention", "linear_attention"], "mamba_proj_bias": True},
            "tie_word_embeddings": True,
        },
        rewrite_config=lambda config: config.update(layer_types=["attention", "mamba"]),
    ),
    "bamba": TinyModel("BambaConfig", {**_HYBRID, "num_hidden_layers": 2, "attn_layer_indices": [1]}),
    "falcon-h1": TinyModel(
        "FalconH1Config",
        {
            **_HYBRID,
            **{"num_hidden_layers": 2, "mamba_d_ssm": 60, "mamba_rms_norm": True, "key_multiplier": 0.7},
            **{"ssm_multipliers": [0.9, 1.2, 1.3, 0.8, 1.1], "mlp_multipliers": [0.8, 1.2], "ssm_in_multiplier": 1.2},
            **{"ssm_out_multiplier": 0.9, "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.8},
            **{"embedding_multiplier": 2.0, "lm_head_multiplier": 1.5},
        },
        control={"ssm_multipliers": [0.9, 1.2, 1.3, 0.9, 1.1]},
    ),
    "nemotron-h": TinyModel(
        "NemotronHConfig",
        {
            **{"rms_norm_eps": None, "layer_norm_epsilon": 1e-3, "num_hidden_layers": None},
            **{"layers_block_type": ["linear_attention", "mlp", "full_attention"], "mamba_num_heads": 4, "n_groups": 2},
            **{"mamba_head_dim": 9, "ssm_state_size": 5, "conv_kernel": 3, "chunk_size": 8, "n_routed_experts": 0},
            "time_step_min": 1e-9,  # where transformers clamps the steps of prompts
        },
    ),
    "nemotron-h-experts": TinyModel(
        "NemotronHConfig",
        {
            **{"rms_norm_eps": None, "layer_norm_epsilon": 1e-3, "num_hidden_layers": None},
            **{"layers_block_type": ["moe", "full_attention", "moe"], "n_routed_experts": 6, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 13, "moe_shared_expert_intermediate_size": 29, "moe_latent_size": 22},
            **{"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "mlp_bias": True},
        },
        control={"norm_topk_prob": False},
    ),
    "jamba": TinyModel(
        "JambaConfig",
        {
            **EXPERTS,
            **{"head_dim": None, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_dt_rank": 6, "num_experts": 7},
            **{"num_experts_per_tok": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
        },
        control={"num_experts_per_tok": 2},
    ),
    # Three uses of two shared blocks: the third is of the first block, with adapters of its own.
    "zamba2": TinyModel(
        "Zamba2Config",
        {
            **{"head_dim": None, "num_key_value_heads": None, "n_mamba_heads": 4, "mamba_ngroups": 2},
            **{"mamba_d_state": 5, "mamba_d_conv": 3, "chunk_size": 8, "num_mem_blocks": 2, "adapter_rank": 5},
            **{"layers_block_type": ["hybrid", "hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 4},
            **{"use_shared_attention_adapter": True, "use_mem_rope": True, "tie_word_embeddings": True},
            "time_step_min": 1e-9,  # where transformers clamps the steps of prompts
        },
        seed=3,
        control={"use_mem_rope": False},
    ),
    "zamba2-grouped": TinyModel(
        "Zamba2Config",
        {
            **{"head_dim": None, "num_key_value_heads": 2, "n_mamba_heads": 4, "mamba_d_state": 5, "mamba_d_conv": 3},
            **{"chunk_size": 8, "adapter_rank": 5, "layers_block_type": ["linear_attention", "hybrid"]},
            **{"num_hidden_layers": 2, "tie_word_embeddings": True, "time_step_min": 1e-9},
        },
    ),
}

# transformers has no code for it: held against `plamo2.py`. A window within the prompts, and a layer without one.
TINY_MODELS = TINY_MODELS | {
    "plamo2": TinyModel(
        "Plamo2Config",
        {
            **{"head_dim": None, "hidden_size_per_head": 10, "num_hidden_layers": 5, "tie_word_embeddings": True},
            **{"mamba_num_heads": 5, "mamba_d_state": 7, "mamba_d_conv": 3, "mamba_step": 2, "mamba_chunk_size": 8},
            **{"attention_window_size": 17, "full_attention_idx": [3], "rope_theta": 1000.0, "rope_local_theta": 100.0},
        },
        control={"attention_window_size": 18},
    ),
}

# The gated delta rule.
_DELTA: dict[str, Any] = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 7, "linear_value_head_dim": 9},
    **{"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6},
}
_SHARED: dict[str, Any] = {
    **{"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 37},
    "shared_expert_intermediate_size": 29,
}
TINY_MODELS = TINY_MODELS | {
    "qwen3-next": TinyModel(
        "Qwen3NextConfig",
        {**_DELTA, **_SHARED, "mlp_only_layers": [0], "linear_conv_kernel_dim": 3},
        seed=2,
        control={"norm_topk_prob": False},
    ),
    "qwen3-5": TinyModel("Qwen3_5TextConfig", _DELTA, control={"rms_norm_eps": 1e-6}),
    "qwen3-5-moe": TinyModel("Qwen3_5MoeTextConfig", {**_DELTA, **_SHARED, "intermediate_size": None}, seed=1),
    # Decays of each channel, and latent attention without rope.
    "kimi-linear": TinyModel(
        "KimiLinearConfig",
        {
            **{
                **LATENT,
                "q_lora_rank": NULL,
                "num_hidden_layers": 2,
                "layer_types": ["linear_attention", "full_attention"],
            },
            **{"mlp_layer_types": ["sparse", "dense"], "num_local_experts": 6, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 13, "linear_head_dim": 7, "linear_num_heads": 4, "linear_conv_kernel_dim": 3},
        },
        control={"routed_scaling_factor": 1.0},
    ),
    "olmo-hybrid": TinyModel(
        "OlmoHybridConfig",
        {**_DELTA, "rope_parameters": None, "head_dim": None},
        control={"linear_allow_neg_eigval": False},
    ),
}

# Families that are other arrangements of parts which the other rows have: they are held against transformers alone and
# in a ragged batch like all rows, and the schedules are tried on the rest, whose parts they are made of.
_REARRANGED = """
    gpt_neo gemma3n gemma4-experts mpt falcon-alibi apertus nanochat codegen
    hyperclovax jais2 vaultgemma dots1 exaone-moe flex_olmo granitemoeshared hunyuan_v1_moe hy_v3 mellum
    minimax_m2 solar_open
    arcee cohere ernie4_5 exaone4 falcon-one-kv-head gemma glm4 gpt2-scaled-by-layer gpt_bigcode gptj helium internlm3
    ministral olmo3 persimmon seed_oss stablelm starcoder2 olmoe granitemoe phimoe ernie4-5-moe glm4-moe lfm2-moe
    falcon-mamba granitemoehybrid-dense bamba nemotron-h nemotron-h-experts jamba zamba2-grouped
    qwen3-5 qwen3-5-moe olmo-hybrid youtu
""".split()
# Rows that differ from a scheduled one in how weights are read, in biases, or in numbers of a position's rotation.
_VARIANTS = """
    llama-tied llama-rope-llama3 llama-transformers-4 llama-sharded llama-linear llama-yarn mistral-full qwen3-bias
    phi3-partial phi3-longrope-short granite-bias
""".split()
SCHEDULED = [name for name in TINY_MODELS if name not in {*_REARRANGED, *_VARIANTS}]
# Of these the rows that meet the schedule in a way of their own: caches of other layers, windows that free blocks,
# latent and sunk attention, positions that depend on a length, experts, floats of 16 bits.
THOROUGH = """
    llama llama-bf16 llama-dynamic-scaled qwen2-window gemma2 phi3-longrope-long minicpm3 gpt-oss mixtral lfm2
""".split()


def tiny_checkpoint(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a row's checkpoint, written by the first test of the session that asks for it."""
    folder = tmp_path_factory.getbasetemp() / "tiny-models" / name
    if not folder.exists():
        partial = folder.with_name(f"{name}.partial")
        write_checkpoint(TINY_MODELS[name], partial)
        partial.rename(folder)
    return folder


def config_of(row: TinyModel) -> Any:
    """A row's config, of its class in transformers or in `plamo2.py`."""
    import plamo2
    import transformers

    plamo2.register()
    given = {key: value for key, value in {**BASE, **row.config}.items() if value is not None}
    arguments = {key: None if value is NULL else value for key, value in given.items()}
    owner = plamo2 if hasattr(plamo2, row.config_class) else transformers
    return getattr(owner, row.config_class)(**arguments)


def write_checkpoint(row: TinyModel, folder: Path) -> None:
    """Write config.json and safetensors with transformers' `save_pretrained`."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(row.seed)  # some vectors start from transformers' own draws
        model = transformers.AutoModelForCausalLM.from_config(config_of(row), dtype=torch.float32)
    randomise(model, row.seed)
    model.to(row.dtype).save_pretrained(folder, max_shard_size="40KB" if row.shards else "1GB")
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    row.rewrite_config(saved)
    path.write_text(json.dumps(saved))


@torch.no_grad()
def randomise(model: Any, seed: int) -> None:
    """Weights that make every parameter matter.

    Vectors (norm weights, biases) get noise on top of what they start from, matrices keep the scale of what flows
    through them. Embeddings are small, or a tied model would repeat its last token for ever; the last norm makes up for
    it, for logits with a deviation of about three: greedy tokens vary, with clear margins.
    """
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(_RANDOM_BUFFERS)]
    for name, parameter in [*model.named_parameters(), *biases]:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        of_a_layer = any(part.isdigit() for part in name.split("."))
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            parameter += 0.05 * noise  # beside scores that differ by as much: every expert is chosen by some token
        elif name.endswith(("linear_attn.A_log", "linear_attn.dt_bias", "forget_gate.A_log", "forget_gate.dt_bias")):
            parameter.copy_(noise)  # transformers draws them from its own generator
        elif parameter.dim() == 1:
            parameter += 0.3 * noise + (0 if of_a_layer or name.endswith("bias") else 2)
        elif "shared_transformer" in name:  # adapters add to its queries and keys, whose scores would be too sharp
            parameter.copy_(0.7 * noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.copy_(noise * (GAIN if of_a_layer else 1) / parameter.shape[-1] ** 0.5)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and where cores are busy the threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_prompts(row: TinyModel) -> list[list[int]]:
    """One prompt per length of the row; tokens 0 to 2 (special in `BASE`) do not occur."""
    generator = torch.Generator().manual_seed(len(row.lengths))
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in row.lengths]


@lru_cache(maxsize=2)
def reference_model(folder: Path) -> Any:
    """transformers' model, the stored weights widened to float32."""
    import plamo2
    import transformers

    plamo2.register()
    # Its grouped GEMM of experts refuses odd sizes; "eager" is its loop over experts.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    return model.eval()


@torch.no_grad()
def reference_logprobs(folder: Path, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """float32 [len(output), vocab]: transformers' logprobs at each position of `output`, the whole row fed at once."""
    ids = torch.tensor([[*prompt, *output]])
    logits = reference_model(folder)(input_ids=ids, use_cache=False).logits[0].float()
    return logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
