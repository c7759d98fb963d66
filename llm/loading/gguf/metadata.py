"""GGUF metadata -> the keys that Hugging Face's config.json would have.

Metadata that changes what is computed and is not understood is an error; what the config's own reader checks (ranges,
sizes) is left to it.

The second half writes a decoder's configuration as metadata. It is held to be the inverse: what is written is read
again, and a model that would be read as another is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from llm.base.types import JsonObject
from llm.errors import CheckpointError, LLMError, UnsupportedModelError
from llm.layers.rotary import RopeParameters, base_wavelengths, frequencies
from llm.loading.gguf.container import Metadata, Value
from llm.loading.gguf.names import Family, family_of
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    GatedMLPConfig,
    LatentAttentionConfig,
    LayerConfig,
    MoEConfig,
    ScaledPreNorms,
)
from llm.models.registry import resolve_model_cls

# Keys behind the architecture's name that would change what is computed, whatever they hold.
_REFUSED = {
    "attention.temperature_scale": "its attention is scaled by position",
}
# What config.json calls biases of queries and of the feed-forward, of families that have other keys or none.
_BIASES = {**dict.fromkeys(("qwen2", "qwen2_moe", "phi", "starcoder2"), ()), "stablelm": ("use_qkv_bias",)}
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


@dataclass(frozen=True)
class Header:
    """What a configuration is made from.

    Attributes:
        metadata: of the first file.
        rows: of the embedding, which are the ids.
        has_lm_head: the file has an `output.weight`.
        attention_bias, mlp_bias: it has biases of those layers.
        ropes: the values of each rope tensor.
        dtype: the name of the type that unquantized weights have.
    """

    metadata: Mapping[str, Value]
    rows: int
    has_lm_head: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    ropes: Mapping[str, list[float]] = field(default_factory=dict)
    dtype: str = "float32"


# A key of our own: the type that a saved model computes in, of which a file of quantized matrices says nothing.
DTYPE_KEY = "offline_llm.dtype"


def config_of(header: Header) -> JsonObject:
    """config.json's content; raises `UnsupportedModelError` for an architecture or an option that is not computed."""
    metadata = Metadata(header.metadata)
    family = family_of(metadata.architecture)
    with_experts = WITH_EXPERTS.get(family.architecture) if metadata.get("expert_count") else None
    _refuse_others(metadata, family, with_experts is not None)
    config = _common(metadata, family, header) | _biases(header, family)
    if family.model_type in _OF_FAMILY:
        config |= _OF_FAMILY[family.model_type](metadata)
    config |= _rope(metadata, header, config) | _token_ids(header.metadata)
    return config if with_experts is None else with_experts(metadata, config)


def _refuse_others(metadata: Metadata, family: Family, has_experts: bool) -> None:
    """Keys that would change what is computed, of architectures that do not have them."""
    refused = dict(_REFUSED)
    if not has_experts:
        refused["expert_count"] = "it is a mixture of experts"
    if not family.architecture.startswith(("granite", "command-r", "cohere2")):
        refused["logit_scale"] = "its logits are scaled"
    for key, why in refused.items():
        if metadata.get(key):
            raise UnsupportedModelError(
                f"{metadata.architecture}.{key} of this GGUF file: {why}, which is not computed."
            )


def _common(metadata: Metadata, family: Family, header: Header) -> JsonObject:
    heads, hidden = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden // heads if heads > 0 else 0)
    is_latent = metadata.get("attention.kv_lora_rank") is not None  # whose sizes `_deepseek` reads
    if not is_latent and metadata.integer("attention.value_length", head_dim) != head_dim:
        raise metadata.error("attention.value_length", metadata.get("attention.value_length"), "the key_length")
    return {
        "model_type": family.model_type,
        "vocab_size": header.rows,
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length", metadata.integer("expert_feed_forward_length", 0)),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(metadata, heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": not header.has_lm_head,
        "torch_dtype": header.dtype,
    }


def _kv_heads(metadata: Metadata, heads: int) -> int:
    """Of layers with attention: 0 is said of one without, whose tensors then are others."""
    if not isinstance(metadata.get("attention.head_count_kv"), np.ndarray):
        return metadata.integer("attention.head_count_kv", heads)
    found = set(metadata.of_layers("attention.head_count_kv")) - {0}
    return found.pop() if len(found) == 1 else metadata.integer("attention.head_count_kv")


def _rope(metadata: Metadata, header: Header, config: JsonObject) -> JsonObject:
    """`rope_theta` and `rope_scaling`. Divisors in a tensor are LongRoPE's, and those of Llama 3.1's scaling."""
    theta = metadata.number("rope.freq_base", 10000.0)
    kind, factor = metadata.get("rope.scaling.type"), metadata.number("rope.scaling.factor", 1.0)
    longest = config["max_position_embeddings"]
    original = metadata.integer("rope.scaling.original_context_length", longest)
    rotated = metadata.integer("rope.dimension_count", config["head_dim"])
    if not 0 < rotated <= config["head_dim"] or rotated % 2:
        raise metadata.error("rope.dimension_count", rotated, f"an even number up to {config['head_dim']}, the head's")
    found: JsonObject = {"rope_theta": theta}
    if rotated != config["head_dim"]:
        found["partial_rotary_factor"] = rotated / config["head_dim"]
    scaling: JsonObject | None = None
    if header.ropes:
        scaling = _divisors(metadata, header.ropes, rotated) | {"original_max_position_embeddings": original}
    elif kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
        if metadata.number("rope.scaling.attn_factor", 1.0) != 1.0:
            raise metadata.error("rope.scaling.attn_factor", metadata.get("rope.scaling.attn_factor"), "1 here")
    elif kind not in (None, "none", "longrope"):
        raise metadata.error("rope.scaling.type", kind, "none, linear, yarn or longrope")
    return found | ({} if scaling is None else {"rope_scaling": scaling})


def _divisors(metadata: Metadata, ropes: Mapping[str, list[float]], rotated: int) -> JsonObject:
    one = ropes.get("rope_freqs.weight")
    short, long = ropes.get("rope_factors_short.weight", one), ropes.get("rope_factors_long.weight", one)
    if short is None or long is None or len(short) != rotated // 2 or len(long) != rotated // 2:
        raise CheckpointError(f"the rope tensors of this GGUF file must have {rotated // 2} values each.")
    attention = 1.0 if one is not None else metadata.number("rope.scaling.attn_factor", 1.0)
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention}


def _biases(header: Header, family: Family) -> JsonObject:
    keys = _BIASES.get(family.model_type, ("attention_bias", "mlp_bias"))
    return {key: True for key, given in zip(keys, (header.attention_bias, header.mlp_bias), strict=False) if given}


def _lfm2(metadata: Metadata) -> JsonObject:
    heads = metadata.of_layers("attention.head_count_kv")
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,  # feed_forward_length is adjusted already
        "rms_norm_eps": None,
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon", 1e-5),
    }


def _cohere(metadata: Metadata) -> JsonObject:
    scale = metadata.number("logit_scale", 1.0)
    return _layer_norm(metadata, "layer_norm_eps") | {"logit_scale": scale}


def _cohere2(metadata: Metadata) -> JsonObject:
    """One layer of four has no window; no key says which, but in llama.cpp's own code."""
    return _cohere(metadata) | {"sliding_window": metadata.integer("attention.sliding_window", 4096)}


def _stablelm(metadata: Metadata) -> JsonObject:
    parallel = metadata.boolean("use_parallel_residual", True)
    return _layer_norm(metadata, "layer_norm_eps") | {"use_parallel_residual": parallel}


def _olmo2(metadata: Metadata) -> JsonObject:
    """Olmo 3 is its own architecture in config.json alone: Olmo 2 with a window on some layers."""
    window = metadata.integer("attention.sliding_window", 0)
    if not window:
        return {}
    kinds = ("full_attention", "sliding_attention")
    pattern = [kinds[bool(each)] for each in metadata.of_layers("attention.sliding_window_pattern")]
    return {"model_type": "olmo3", "sliding_window": window, "layer_types": pattern}


def _layer_norm(metadata: Metadata, key: str) -> JsonObject:
    """`key`: what config.json calls the epsilon of a LayerNorm."""
    return {"rms_norm_eps": None, key: metadata.number("attention.layer_norm_epsilon", 1e-5)}


def _gemma2(metadata: Metadata) -> JsonObject:
    return {
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _gemma_scalar(metadata, _GEMMA2_27B_LAYERS),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma3(metadata: Metadata) -> JsonObject:
    cap = metadata.number("final_logit_softcapping", 0.0)
    return {
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
        "sliding_window_pattern": metadata.integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _gemma_scalar(metadata, _GEMMA3_27B_LAYERS),
        "hidden_activation": "gelu_pytorch_tanh",
    } | ({"final_logit_softcapping": cap} if cap else {})


def _gemma_scalar(metadata: Metadata, layers_of_27b: int) -> int:
    """No key says it: the head's size, but for the models of 27B, known by their layers as in llama.cpp."""
    heads, hidden = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    per_head = hidden // heads if heads > 0 else 0
    is_27b = metadata.integer("block_count") == layers_of_27b
    return per_head if is_27b else metadata.integer("attention.key_length", per_head)


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


# --- The architectures. ---

# By architecture.
WITH_EXPERTS: Mapping[str, Callable[[Metadata, JsonObject], JsonObject]] = {
    "llama": _mixtral,
    "qwen2moe": _qwen2,
    "qwen3moe": partial(_sized, renormalize=True),
    "olmoe": _olmoe,
    "granitemoe": _granite,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek,
}


_OF_FAMILY: Mapping[str, Callable[[Metadata], JsonObject]] = {
    "cohere": _cohere,
    "cohere2": _cohere2,
    "stablelm": _stablelm,
    "granite": granite,
    "gemma": lambda metadata: {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "lfm2": _lfm2,
    "olmo2": _olmo2,
    "phi": partial(_layer_norm, key="layer_norm_eps"),
    "phi3": lambda metadata: {"sliding_window": metadata.integer("attention.sliding_window", 0) or None},
    "starcoder2": partial(_layer_norm, key="norm_epsilon"),  # the files say no window, and llama.cpp computes none
}


def _token_ids(metadata: Mapping[str, Value]) -> JsonObject:
    """`bos_token_id`, and as `eos_token_id` every id that ends an answer: of a text, of a turn and of a message."""
    ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom")}
    found = {key: value for key, value in ids.items() if isinstance(value, int) and not isinstance(value, bool)}
    ends = list(dict.fromkeys(found[key] for key in ("eos", "eot", "eom") if key in found))
    config: JsonObject = {"eos_token_id": ends} if ends else {}
    return config | ({"bos_token_id": found["bos"]} if "bos" in found else {})


# model_type -> architecture, of decoders that are one of GGUF's.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
_ENDS = ("eos", "eot", "eom")
_ROPE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Described:
    """What a file says of a model.

    Attributes:
        metadata: the keys but for the tokenizer's vocabulary.
        ropes: divisors of the rotary frequencies, by tensor name.
        heads: how many of queries, and of keys and values.
    """

    metadata: dict[str, Value]
    ropes: dict[str, list[float]]
    heads: tuple[int, int]


def describe(config: DecoderConfig, model_type: str, bos: int | None, ends: Sequence[int]) -> Described:
    """The metadata of a model.

    Args:
        ends: the ids that end an answer.

    Raises:
        LLMError: the model has no form in GGUF.
    """
    architecture = ARCHITECTURES.get(model_type)
    layer = config.layers[0]
    attention = layer.attention
    if architecture is None or not isinstance(attention, Attention):
        raise LLMError(
            f"models of the type {model_type!r} are not written in GGUF; written are {', '.join(ARCHITECTURES)}."
        )
    config = _as_felt(config)
    if len(ends) > len(_ENDS):
        raise LLMError(f"{len(ends)} ids end an answer of this model, and GGUF has {len(_ENDS)} of them.")
    own, ropes = _of_layers(architecture, config, attention)
    own |= _of_ropes(architecture, config, attention, ropes) | _of_granite(config, layer, attention)
    found: dict[str, Value] = {"general.architecture": architecture}
    found |= {f"{architecture}.{key}": value for key, value in own.items()}
    found |= {f"tokenizer.ggml.{key}_token_id": value for key, value in zip(_ENDS, ends, strict=False)}
    found |= {} if bos is None else {"tokenizer.ggml.bos_token_id": bos}
    described = Described(found, ropes, head_counts(attention))
    _check(config, described)
    return described


def _as_felt(config: DecoderConfig) -> DecoderConfig:
    """Without the windows that are no shorter than the longest sequence, and the layers behind that draft tokens."""
    longest = config.max_position_embeddings

    def changed(layer: LayerConfig) -> LayerConfig:
        part = layer.attention
        if not isinstance(part, AttentionConfig) or part.sliding_window is None or part.sliding_window < longest:
            return layer
        return replace(layer, attention=replace(part, sliding_window=None))

    layers = tuple(map(changed, config.layers))
    return replace(config, layers=layers, layers_left_out=0, multi_token=None, draft_head=None)


def _of_layers(
    architecture: str, config: DecoderConfig, attention: Attention
) -> tuple[dict[str, Value], dict[str, list[float]]]:
    """The keys behind the architecture's name, and the divisors of rotary frequencies."""
    norm, rope, rotated = config.final_norm, _global_rope(config), rotated_channels(attention)
    own: dict[str, Value] = {
        # Before scaling, which the reader applies.
        "context_length": rope.max_position_embeddings or config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": len(config.layers),
        "attention.layer_norm_rms_epsilon": float(norm.eps if norm is not None else 0.0),
        "vocab_size": config.vocab_size,
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": rotated,
    }
    own |= of_attention(attention) | of_feed_forward(config, architecture == "deepseek2")
    if config.logits_soft_cap is not None:
        own["final_logit_softcapping"] = float(config.logits_soft_cap)
    return own, _written_divisors(rope, rotated)


def _of_ropes(
    architecture: str, config: DecoderConfig, attention: Attention, ropes: dict[str, list[float]]
) -> dict[str, Value]:
    """Windows, and scaling of rotary frequencies."""
    own: dict[str, Value] = {}
    windows = [_window(part) for part in _attention_parts(config)]
    if any(windows):
        own["attention.sliding_window"] = next(size for size in windows if size)
    if architecture == "gemma3":
        own["attention.sliding_window_pattern"] = windows.index(None) + 1 if None in windows else len(windows) + 1
        local = next((part.rope for part in _attention_parts(config) if _window(part)), None)
        own["rope.freq_base_swa"] = float(local.theta if local is not None else 10000.0)
    rope = _global_rope(config)
    if rope.rope_type in ("linear", "yarn"):
        own |= {"rope.scaling.type": rope.rope_type, "rope.scaling.factor": float(rope.factor)}
    if rope.rope_type in ("yarn", "longrope"):
        own["rope.scaling.original_context_length"] = rope.original_max_position_embeddings
    if "rope_factors_long.weight" in ropes:
        _, factor = frequencies(rope, rotated_channels(attention), config.max_position_embeddings)
        own |= {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": float(factor)}
    return own


def _of_granite(config: DecoderConfig, layer: LayerConfig, attention: Attention) -> dict[str, Value]:
    """What Granite multiplies by; other models have no such norms."""
    if not isinstance(layer.norms, ScaledPreNorms) or attention.scale is None:
        return {}
    return {
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(layer.norms.multiplier),
        "logit_scale": float(config.logits_divisor),
        "attention.scale": float(attention.scale),
    }


def _written_divisors(rope: RopeParameters, rotated: int) -> dict[str, list[float]]:
    if rope.rope_type == "longrope":
        return {
            "rope_factors_long.weight": list(rope.long_factor),
            "rope_factors_short.weight": list(rope.short_factor),
        }
    if rope.rope_type != "llama3":
        return {}
    scaled, _ = frequencies(rope, rotated, rope.original_max_position_embeddings)
    return {"rope_freqs.weight": (1.0 / base_wavelengths(rope.theta, rotated) / scaled).tolist()}


def _attention_parts(config: DecoderConfig) -> list[Attention]:
    return [layer.attention for layer in config.layers if isinstance(layer.attention, Attention)]


def _window(part: Attention) -> int | None:
    return part.sliding_window if isinstance(part, AttentionConfig) else None


def _global_rope(config: DecoderConfig) -> RopeParameters:
    """Of the layers without a window, else of the first."""
    parts = _attention_parts(config)
    found = next((part.rope for part in parts if _window(part) is None), parts[0].rope)
    if found is None:
        raise LLMError("this model has no rotary embedding, which every model in GGUF that is written here has.")
    return found


def _check(config: DecoderConfig, described: Described) -> None:
    """Raise `LLMError` where the file would be read as another model."""
    parts = _attention_parts(config)
    mlp = config.layers[0].mlp
    bias = isinstance(mlp, GatedMLPConfig) and mlp.bias
    ropes = {name: np.asarray(values, np.float32).tolist() for name, values in described.ropes.items()}
    tied = config.tie_word_embeddings
    qkv_bias = isinstance(parts[0], AttentionConfig) and parts[0].qkv_bias
    header = Header(described.metadata, config.vocab_size, not tied, qkv_bias, bias, ropes)
    raw = config_of(header)
    model_class = resolve_model_cls([], raw["model_type"])
    read = _as_felt(model_class.read_config(ConfigReader(raw)))
    same = _in_float32(_without_ropes(read)) == _in_float32(_without_ropes(config))
    if not same or len(parts) != len(config.layers):
        raise LLMError(
            "this model would be read from GGUF as another one, since the format has no keys for all of its "
            "configuration; save it as 'compressed-tensors' or leave out what hf_overrides or a window changed."
        )
    for mine, other in zip(parts, _attention_parts(read), strict=True):
        if not _same_rope(mine, other, config.max_position_embeddings):
            raise LLMError(f"the rotary embedding of this model ({mine.rope}) has no form in GGUF.")


def _in_float32(value: Any) -> Any:
    """A configuration with the numbers that the format holds."""
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, tuple):
        return tuple(map(_in_float32, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _in_float32(getattr(value, item.name)) for item in fields(value)})
    return value


def _without_ropes(config: DecoderConfig) -> DecoderConfig:
    def stripped(layer: LayerConfig) -> LayerConfig:
        attention = layer.attention
        if isinstance(attention, LatentAttentionConfig):
            return replace(layer, attention=replace(attention, rope=None))
        if not isinstance(attention, AttentionConfig):
            return layer
        scale = attention.heads.size**-0.5 if attention.scale is None else attention.scale
        return replace(layer, attention=replace(attention, rope=None, scale=scale))

    return replace(config, layers=tuple(stripped(layer) for layer in config.layers))


def _same_rope(mine: Attention, other: Attention, longest: int) -> bool:
    if mine.rope is None or other.rope is None:
        return mine.rope is other.rope
    rotated = rotated_channels(mine)
    if rotated != rotated_channels(other) or mine.rope.mrope_section:
        return False
    is_latent = isinstance(mine, LatentAttentionConfig) and isinstance(other, LatentAttentionConfig)
    if is_latent and not math.isclose(mine.scale or 1.0, other.scale or 1.0, rel_tol=_ROPE_TOLERANCE):
        return False
    for length in (1, longest):
        first, factor = frequencies(mine.rope, rotated, length)
        second, other_factor = frequencies(other.rope, rotated, length)
        if abs(factor - other_factor) > _ROPE_TOLERANCE or not torch.allclose(first, second, rtol=_ROPE_TOLERANCE):
            return False
    return True


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
