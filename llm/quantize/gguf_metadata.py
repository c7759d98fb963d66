"""A decoder's configuration as GGUF metadata: the inverse of `llm/loading/gguf/metadata.py`.

Owns the check that makes it one: what is written is read again, and a model that would be read as another is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from llm.errors import LLMError
from llm.layers.rotary import RopeParameters, base_wavelengths, frequencies
from llm.loading.gguf.container import Value
from llm.loading.gguf.metadata import Header, config_of
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    GatedMLPConfig,
    LatentAttentionConfig,
    LayerConfig,
    ScaledPreNorms,
)
from llm.models.registry import resolve_model_cls
from llm.quantize.gguf_layers import Attention, head_counts, of_attention, of_feed_forward, rotated_channels

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
    return own, _divisors(rope, rotated)


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


def _divisors(rope: RopeParameters, rotated: int) -> dict[str, list[float]]:
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
    if _without_ropes(read) != _without_ropes(config) or len(parts) != len(config.layers):
        raise LLMError(
            "this model would be read from GGUF as another one, since the format has no keys for all of its "
            "configuration; save it as 'compressed-tensors' or leave out what hf_overrides or a window changed."
        )
    for mine, other in zip(parts, _attention_parts(read), strict=True):
        if not _same_rope(mine, other, config.max_position_embeddings):
            raise LLMError(f"the rotary embedding of this model ({mine.rope}) has no form in GGUF.")


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
