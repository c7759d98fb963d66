"""GGUF metadata -> the keys that Hugging Face's config.json would have.

Owns the translation by architecture. Metadata that changes what is computed and is not understood is an error; what the
config's own reader checks (ranges, sizes) is left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from llm.base.types import JsonObject
from llm.errors import CheckpointError, UnsupportedModelError
from llm.loading.gguf.container import Value
from llm.loading.gguf.experts import WITH_EXPERTS, granite
from llm.loading.gguf.keys import Metadata
from llm.loading.gguf.names import Family, family_of

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


def config_of(header: Header) -> JsonObject:
    """config.json's content; raises `UnsupportedModelError` for an architecture or an option that is not computed."""
    metadata = Metadata(header.metadata)
    family = family_of(metadata.architecture)
    with_experts = WITH_EXPERTS.get(family.architecture) if metadata.get("expert_count") else None
    _refuse_others(metadata, family, with_experts is not None)
    config = _common(metadata, family, header) | _biases(header, family)
    config |= _OF_FAMILY.get(family.model_type, _nothing)(metadata)
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
    is_latent = metadata.get("attention.kv_lora_rank") is not None  # whose sizes `experts.py` reads
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


def _nothing(metadata: Metadata) -> JsonObject:
    return {}


def _gemma(metadata: Metadata) -> JsonObject:
    return {"hidden_activation": "gelu_pytorch_tanh"}


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


def _starcoder2(metadata: Metadata) -> JsonObject:
    """The files say no window, and llama.cpp computes none."""
    return _layer_norm(metadata, "norm_epsilon")


def _phi2(metadata: Metadata) -> JsonObject:
    return _layer_norm(metadata, "layer_norm_eps")


def _layer_norm(metadata: Metadata, key: str) -> JsonObject:
    """`key`: what config.json calls the epsilon of a LayerNorm."""
    return {"rms_norm_eps": None, key: metadata.number("attention.layer_norm_epsilon", 1e-5)}


def _windowed(metadata: Metadata) -> JsonObject:
    window = metadata.integer("attention.sliding_window", 0)
    return {"sliding_window": window or None}


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


_OF_FAMILY: Mapping[str, Callable[[Metadata], JsonObject]] = {
    "cohere": _cohere,
    "cohere2": _cohere2,
    "stablelm": _stablelm,
    "granite": granite,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "lfm2": _lfm2,
    "olmo2": _olmo2,
    "phi": _phi2,
    "phi3": _windowed,
    "starcoder2": _starcoder2,
}


def _token_ids(metadata: Mapping[str, Value]) -> JsonObject:
    """`bos_token_id`, and as `eos_token_id` every id that ends an answer: of a text, of a turn and of a message."""
    ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom")}
    found = {key: value for key, value in ids.items() if isinstance(value, int) and not isinstance(value, bool)}
    ends = list(dict.fromkeys(found[key] for key in ("eos", "eot", "eom") if key in found))
    config: JsonObject = {"eos_token_id": ends} if ends else {}
    return config | ({"bos_token_id": found["bos"]} if "bos" in found else {})
