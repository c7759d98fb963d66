"""Gemma 4, text: heads of other sizes in full layers, keys and values of earlier layers, embeddings of every layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from llm.forward import ForwardBatch
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    Heads,
    NormConfig,
    PartConfig,
    layer_windows,
    read_rms_norm,
)
from llm.models.decoder.part import BuildContext
from llm.models.decoder.per_layer import PerLayerEmbedding, PerLayerInputs
from llm.models.decoder.shared_kv import SharedKVConfig, left_out_names, read_shared, share_backends
from llm.models.gemma4_layer import Gemma4Experts, Gemma4LayerConfig, Gemma4Norms
from llm.models.interface import BuildOptions

_LAYER = "model.layers.*"
_FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


@dataclass(frozen=True)
class Gemma4Config(DecoderConfig):
    """`per_layer`: None: layers have no embeddings of their own. `values_are_keys`: full layers have one matrix."""

    per_layer: PerLayerEmbedding | None = None
    values_are_keys: bool = False


class Gemma4ForCausalLM(DecoderForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (f"{_LAYER}.router.scale", f"{_LAYER}.moe.norm.weight"),
        (f"{_LAYER}.router.proj", f"{_LAYER}.moe.gate"),
        (f"{_LAYER}.router.per_expert_scale", f"{_LAYER}.moe.experts.custom_routing_function.per_expert_scale"),
        (f"{_LAYER}.experts", f"{_LAYER}.moe.experts"),
        (f"{_LAYER}.layer_scalar", f"{_LAYER}.layer_scalar.value"),
        *(
            (f"{_LAYER}.{name}", f"{_LAYER}.per_layer.{name}")
            for name in ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
        ),
        *(
            (f"model.{name}", f"per_layer.{name}")
            for name in ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
        ),
    )
    config: Gemma4Config

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        norm, count = read_rms_norm(reader), reader.positive("num_hidden_layers", 30)
        reader.expect("use_bidirectional_attention", "vision")
        reader.expect("hidden_activation", "gelu_pytorch_tanh")
        hidden, inner = reader.positive("hidden_size", 2304), reader.positive("intermediate_size", 9216)
        parts = _attention(reader, count, norm)
        experts, size = _experts(reader, norm), reader.integer("hidden_size_per_layer_input", 256)
        factor = 2 if reader.boolean("use_double_wide_mlp", False) else 1
        layers = [
            Gemma4LayerConfig(
                attention=part,
                mlp=GatedMLPConfig(inner * (factor if isinstance(part, SharedKVConfig) else 1), "gelu_pytorch_tanh"),
                moe=experts,
                norms=Gemma4Norms(norm, size),
            )
            for part in parts
        ]
        vocab = reader.positive("vocab_size_per_layer_input", 262_144)
        config = Gemma4Config(
            vocab_size=reader.positive("vocab_size", 262_144),
            hidden_size=hidden,
            max_position_embeddings=reader.positive("max_position_embeddings", 131_072),
            layers=tuple(layers),
            final_norm=norm,
            embedding_multiplier=hidden**0.5,
            logits_soft_cap=reader.optional_number("final_logit_softcapping"),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
            per_layer=PerLayerEmbedding(vocab, size, count, norm) if size else None,
            values_are_keys=reader.boolean("attention_k_eq_v", False),
        )
        reader.finish()
        return config

    def __init__(self, config: Gemma4Config, options: BuildOptions) -> None:
        super().__init__(config, options)
        readers = [i for i, layer in enumerate(config.layers) if isinstance(layer.attention, SharedKVConfig)]
        self.left_out = (*getattr(self, "left_out", ()), *left_out_names(readers))
        share_backends(list(self.model.layers))
        if config.values_are_keys:
            self.merge_weights = partial(_with_values)
        self.per_layer: PerLayerInputs | None = None
        if config.per_layer is not None:
            self.per_layer = PerLayerInputs(config.per_layer, BuildContext(options, config.hidden_size), "per_layer")

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = self.embed_batch(batch)
        layers = self.model.layers
        inputs: list[torch.Tensor | None] = [None] * len(layers)
        if self.per_layer is not None:
            inputs = list(self.per_layer(batch.input_ids, hidden).split(self.per_layer.size, dim=-1))
        for index, (layer, own) in enumerate(zip(layers, inputs, strict=True)):
            if index in self.tapped:
                batch.taps.append(hidden)
            hidden, _ = layer(hidden, None, batch, own)
        return hidden if self.model.norm is None else self.model.norm(hidden)


def _attention(reader: ConfigReader, count: int, norm: NormConfig) -> list[PartConfig]:
    """The attention of each layer; the last `num_kv_shared_layers` read the keys and values of earlier ones."""
    window = reader.positive("sliding_window", 512)
    windows = layer_windows(reader, count, window, [(index + 1) % 6 != 0 for index in range(count)])
    windows[-1] = None
    sliding = AttentionConfig(
        Heads(
            reader.positive("num_attention_heads", 8),
            reader.positive("num_key_value_heads", 4),
            reader.positive("head_dim", 256),
        ),
        reader.rope(10_000.0, "sliding_attention"),
        window,
        qkv_bias=reader.boolean("attention_bias", False),
        out_bias=reader.boolean("attention_bias", False),
        qk_norm=norm,
        v_norm=replace(norm, has_weight=False),
        scale=1.0,
    )
    full = replace(
        sliding,
        heads=_full_heads(reader, sliding.heads),
        rope=reader.rope(1_000_000.0, "full_attention", default_scaling={"full_attention": _FULL_ROPE}),
        sliding_window=None,
    )
    return read_shared(reader, [full if size is None else sliding for size in windows], 0)


def _full_heads(reader: ConfigReader, sliding: Heads) -> Heads:
    """Those of layers without a window: in keys of their own, or as transformers writes them, layer by layer."""
    size = reader.positive("global_head_dim", 512)
    has_own = reader.boolean("attention_k_eq_v", False)
    kv = reader.positive("num_global_key_value_heads", sliding.key_value)
    layers = reader.nested("per_layer_config").values()
    given = [ConfigReader(layer, "config.json, per_layer_config") for layer in layers if isinstance(layer, dict)]
    found = {
        (one.positive("head_dim", sliding.size), one.positive("num_key_value_heads", sliding.key_value))
        for one in given
    }
    if len(found) > 1 or len(given) != len(layers):
        raise reader.error("per_layer_config", sorted(found), "the same for every layer that it names")
    for one in given:
        one.finish()
    for size, kv in found:
        return Heads(sliding.query, kv, size)
    return Heads(sliding.query, kv if has_own else sliding.key_value, size)


def _experts(reader: ConfigReader, norm: NormConfig) -> Gemma4Experts | None:
    if not reader.boolean("enable_moe_block", False):
        reader.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    count, best = reader.positive("num_experts"), reader.positive("top_k_experts")
    return Gemma4Experts(count, best, reader.positive("moe_intermediate_size"), norm)


def _with_values(
    tensors: Iterator[tuple[str, torch.Tensor]], names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """A layer without a matrix of values has its matrix of keys twice."""
    for name, tensor in tensors:
        yield name, tensor
        values = name.replace(".self_attn.k_proj.", ".self_attn.v_proj.")
        if values != name and values not in names:
            yield values, tensor
