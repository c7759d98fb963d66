"""Gemma 3n, text: AltUp, LAuReL, embeddings of every layer, keys and values of earlier layers, sparse feed-forwards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from llm.errors import UnsupportedModelError
from llm.forward import ForwardBatch
from llm.kernels.select import backend_of_construction
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    NormConfig,
    PartConfig,
    layer_windows,
    read_heads,
    read_rms_norm,
)
from llm.models.decoder.altup import AltUpConfig, Projections
from llm.models.decoder.part import BuildContext
from llm.models.decoder.per_layer import PerLayerEmbedding, PerLayerInputs
from llm.models.decoder.shared_kv import SharedKVConfig, left_out_names, read_shared, share_backends
from llm.models.gemma3_text import read_ropes
from llm.models.gemma3n_layer import Gemma3nNorms
from llm.models.interface import BuildOptions

_LAYER = "model.layers.*"
_OF_LAYER = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
_OF_MODEL = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")


@dataclass(frozen=True)
class Gemma3nConfig(DecoderConfig):
    """A decoder whose layers have embeddings of their own, and several streams between them."""

    per_layer: PerLayerEmbedding | None = None
    altup: AltUpConfig | None = None


class Gemma3nForCausalLM(DecoderForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        *((f"{_LAYER}.{name}", f"{_LAYER}.per_layer.{name}") for name in _OF_LAYER),
        *((f"model.{name}", f"per_layer.{name}") for name in _OF_MODEL),
        *((f"model.{name}", name) for name in ("altup_projections", "altup_unembed_projections")),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        norm, count = read_rms_norm(reader), reader.positive("num_hidden_layers", 35)
        reader.expect("hidden_activation", "gelu_pytorch_tanh")
        reader.ignore("altup_coef_clip")  # when it is trained
        hidden, size = reader.positive("hidden_size", 2048), reader.positive("hidden_size_per_layer_input", 256)
        inputs, active = reader.positive("altup_num_inputs", 4), reader.integer("altup_active_idx", 0)
        if not 0 <= active < inputs:
            raise reader.error("altup_active_idx", active, f"an integer from 0 to {inputs - 1}")
        altup = AltUpConfig(inputs, active, reader.boolean("altup_correct_scale", True), norm)
        norms = Gemma3nNorms(altup, reader.positive("laurel_rank", 64), size)
        parts = zip(_attention(reader, count, norm), _feed_forwards(reader, count), strict=True)
        vocab = reader.positive("vocab_size_per_layer_input", 262_144)
        config = Gemma3nConfig(
            vocab_size=reader.positive("vocab_size", 262_400),
            hidden_size=hidden,
            max_position_embeddings=reader.positive("max_position_embeddings", 32_768),
            layers=tuple(LayerConfig(attention=attention, mlp=mlp, norms=norms) for attention, mlp in parts),
            final_norm=norm,
            embedding_multiplier=hidden**0.5,
            logits_soft_cap=reader.optional_number("final_logit_softcapping", 30.0),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
            per_layer=PerLayerEmbedding(vocab, size, count, norm),
            altup=altup,
        )
        reader.finish()
        return config

    def __init__(self, config: Gemma3nConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        if config.per_layer is None or config.altup is None:
            raise RuntimeError("read_config makes both")
        if options.tp.size > 1:
            raise UnsupportedModelError(
                "gemma3n models run in one process: their feed-forwards read all channels of a token; pass "
                "tensor_parallel_size=1."
            )
        readers = [i for i, layer in enumerate(config.layers) if isinstance(layer.attention, SharedKVConfig)]
        self.left_out = (*getattr(self, "left_out", ()), *left_out_names(readers))
        share_backends(list(self.model.layers))
        context, others = BuildContext(options, config.hidden_size), config.altup.inputs - 1
        self.per_layer = PerLayerInputs(config.per_layer, context, "per_layer")
        self.altup_projections = Projections(others, context, "altup_projections")
        self.altup_unembed_projections = Projections(others, context, "altup_unembed_projections")
        self.streams, self.active = config.altup.inputs, config.altup.active
        self.ids = config.per_layer.vocab_size
        self._ids_below = backend_of_construction().op("ids_below")

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        embedded = self.embed_batch(batch)
        ids = self._ids_below(batch.input_ids, self.ids)
        inputs = self.per_layer(ids, embedded).split(self.per_layer.size, dim=-1)
        hidden = torch.cat(self.altup_projections([embedded] * self.streams), dim=-1)
        for index, (layer, own) in enumerate(zip(self.model.layers, inputs, strict=True)):
            if index in self.tapped:
                batch.taps.append(hidden.split(embedded.shape[1], dim=-1)[self.active])
            hidden, _ = layer(hidden, None, batch, own)
        streams = self.altup_unembed_projections(hidden.split(embedded.shape[1], dim=-1))
        total = streams[0]
        for stream in streams[1:]:
            total = total + stream
        total = total * (1.0 / self.streams)
        return total if self.model.norm is None else self.model.norm(total)


def _attention(reader: ConfigReader, count: int, norm: NormConfig) -> list[PartConfig]:
    """The attention of each layer; the last `num_kv_shared_layers` read the keys and values of earlier ones."""
    full, sliding = read_ropes(reader)
    window = reader.positive("sliding_window", 512)
    windows = layer_windows(reader, count, window, [(index + 1) % 5 != 0 for index in range(count)])
    bias = reader.boolean("attention_bias", False)
    attention = AttentionConfig(
        read_heads(reader, default_kv_heads=2, default_size=256),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
        v_norm=replace(norm, has_weight=False),
        scale=1.0,
    )
    own = [replace(attention, sliding_window=size, rope=full if size is None else sliding) for size in windows]
    return read_shared(reader, own, 15)


def _feed_forwards(reader: ConfigReader, count: int) -> list[PartConfig]:
    """One size for all layers or one each, and the share of the gate that is zero in each."""
    given = reader.raw.get("intermediate_size", 16_384)
    sizes = reader.integers("intermediate_size") if isinstance(given, list) else None
    sizes = [reader.positive("intermediate_size", 16_384)] * count if sizes is None else sizes
    sparse = 10 if count > 10 else 0
    shares = reader.numbers("activation_sparsity_pattern", [0.95] * sparse + [0.0] * (count - sparse))
    if len(sizes) != count or min(sizes) < 1:
        raise reader.error("intermediate_size", given, f"a positive integer, or {count} of them")
    if not all(0 <= share < 1 for share in shares):
        raise reader.error("activation_sparsity_pattern", list(shares), "numbers from 0 to less than 1")
    return [
        GatedMLPConfig(size, "gelu_pytorch_tanh", sparsity=share) for size, share in zip(sizes, shares, strict=True)
    ]
