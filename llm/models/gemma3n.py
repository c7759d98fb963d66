"""Gemma 3n, and what Gemma 4 has of it: an embedding in every layer, and layers that read the KV cache of earlier ones.

The table of all layers' embeddings is one tensor; each layer has its part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.errors import UnsupportedModelError
from llm.forward import ForwardBatch
from llm.kernels.select import backend_of_construction
from llm.layers.activation import PLAIN_ACTIVATIONS
from llm.layers.attention import Attention
from llm.layers.embedding import VocabParallelEmbedding
from llm.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from llm.layers.moe import GateLinear
from llm.layers.norm import filled
from llm.models import decoder as d
from llm.models.gemma import read_ropes
from llm.models.text_part import TextPart, in_text_part
from llm.quantization.unquantized import new_parameter


@dataclass(frozen=True)
class PerLayerEmbedding:
    """`size` channels in each of `layers` layers, for the ids below `vocab_size`."""

    vocab_size: int
    size: int
    layers: int
    norm: d.NormConfig


class PerLayerInputs(Patchable):
    """ids int64 [N] and their embedding float [N, H] -> float [N, layers * size]."""

    def __init__(self, config: PerLayerEmbedding, context: d.BuildContext, prefix: str) -> None:
        super().__init__()
        hidden, width = context.hidden_size, config.layers * config.size
        self.embed_tokens_per_layer = VocabParallelEmbedding(
            config.vocab_size, width, prefix=f"{prefix}.embed_tokens_per_layer", **context.table
        )
        self.per_layer_model_projection = ReplicatedLinear(
            hidden,
            width,
            bias=False,
            prefix=f"{prefix}.per_layer_model_projection",
            **context.linear,
        )
        self.per_layer_projection_norm = config.norm.build(config.size, context)
        self.size, self.scale = config.size, hidden**-0.5

    def forward(self, ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        projected = self.per_layer_model_projection(embedded) * self.scale
        by_layer = projected.view(projected.shape[0], -1, self.size)
        own = self.embed_tokens_per_layer(ids) * self.size**0.5
        return (self.per_layer_projection_norm(by_layer).view(projected.shape) + own) * 2.0**-0.5


class PerLayerGate(Patchable):
    """norm(projection(act(gate(x)) * inputs)): x float [N, H], inputs float [N, size] -> [N, H]."""

    def __init__(self, size: int, activation: str, norm: d.NormConfig, context: d.BuildContext, prefix: str) -> None:
        super().__init__()
        hidden, linear = context.hidden_size, context.linear
        self.per_layer_input_gate = ReplicatedLinear(
            hidden, size, bias=False, prefix=f"{prefix}.per_layer_input_gate", **linear
        )
        self.per_layer_projection = ReplicatedLinear(
            size, hidden, bias=False, prefix=f"{prefix}.per_layer_projection", **linear
        )
        self.post_per_layer_input_norm = norm.build(hidden, context)
        self.act_fn = PLAIN_ACTIVATIONS[activation]()
        self._ops = backend_of_construction().ops

    def forward(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        gated = self._ops.multiply(self.act_fn(self.per_layer_input_gate(x)), inputs)
        return self.post_per_layer_input_norm(self.per_layer_projection(gated))


class Factor(Patchable):
    """x float [N, H] times a trained number, which the checkpoint stores as [1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # One per channel: the kernel multiplies rows.
        self.value = new_parameter(torch.ones(width), _fill)
        self._ops = backend_of_construction().ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.multiply(x, self.value.expand(x.shape))


def _fill(param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
    if loaded.numel() != 1:
        raise ValueError(f"has shape {list(loaded.shape)}, the model needs [1]")
    param.data.fill_(loaded.item())
    return param.numel()


@dataclass(frozen=True)
class SharedKVConfig(d.PartConfig):
    """`attention` of the layer whose keys and values are read, and the index of its state."""

    attention: d.AttentionConfig
    state: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rope", self.attention.rope)

    def build(self, context: d.BuildContext, prefix: str) -> nn.Module:
        return SharedKVAttention(self, context, prefix)


class SharedKVAttention(Patchable):
    """Queries, their norm and rotary embedding, and attention over what the other layer wrote in this step."""

    def __init__(self, config: SharedKVConfig, context: d.BuildContext, prefix: str) -> None:
        super().__init__()
        of, tp = config.attention, context.tp
        heads, size = of.heads, of.heads.size
        hidden, width = context.hidden_size, heads.query * size
        linear = context.linear
        self.q_proj = ColumnParallelLinear(hidden, width, bias=of.qkv_bias, prefix=f"{prefix}.q_proj", **linear)
        self.o_proj = RowParallelLinear(width, hidden, bias=of.out_bias, prefix=f"{prefix}.o_proj", **linear)
        self.head_size, self.state = size, config.state
        self.q_norm = None if of.qk_norm is None else of.qk_norm.build(size, context)
        self.rotary_emb = None if of.rope is None else context.rotary(size, of.rope, not of.rope_interleaved)
        self.attn = Attention(
            tp.share("num_attention_heads", heads.query),
            heads.key_value_on_rank(tp),
            size,
            layer_index=config.state,
            scale=size**-0.5 if of.scale is None else of.scale,
            sliding_window=of.sliding_window,
            soft_cap=of.soft_cap,
        )

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        query = self.q_proj(hidden)
        if self.q_norm is not None:
            query = self.q_norm(query.view(query.shape[0], -1, self.head_size)).view(query.shape)
        if self.rotary_emb is not None:
            query, _ = self.rotary_emb(batch.positions, query, query[:, :0])
        return self.o_proj(self.attn.attend(query, batch))


def read_shared(reader: d.ConfigReader, own: Sequence[d.AttentionConfig], default: int) -> list[d.PartConfig]:
    """The layers' attention, of which the last `num_kv_shared_layers` read the keys and values of the last layer before
    them with their window."""
    shared = reader.integer("num_kv_shared_layers", default)
    first = len(own) - shared
    if not 0 < first <= len(own):
        raise reader.error("num_kv_shared_layers", shared, f"an integer from 0 to {len(own) - 1}")
    last = {part.sliding_window: index for index, part in enumerate(own[:first])}
    if any(part.sliding_window not in last for part in own):
        raise reader.error("num_kv_shared_layers", shared, "fewer: no layer before them is of their type")
    return [*own[:first], *(SharedKVConfig(part, last[part.sliding_window]) for part in own[first:])]


def connect_shared(layers: Sequence[nn.Module]) -> tuple[str, ...]:
    """Layers that read another's cache get its backend, which knows the static scales of a quantized cache.

    Each of the other layers has one state, so states are numbered as those layers are. Returns what checkpoints store
    of the readers' own keys and values, in models by themselves and in multimodal ones.
    """
    parts = [layer.get_submodule("self_attn") for layer in layers]
    readers = {index: part for index, part in enumerate(parts) if isinstance(part, SharedKVAttention)}
    for part in readers.values():
        source = parts[part.state].get_submodule("attn")
        part.attn.backend = cast("Attention", source).backend
    outer = ("model", "model.language_model", "language_model.model")
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return tuple(f"{model}.layers.{index}.self_attn.{name}" for model in outer for index in readers for name in names)


# Of the squares of a projected stream, which is divided by its root.
_LEAST_MEAN = 1e-5


@dataclass(frozen=True)
class AltUpConfig:
    """`inputs` streams, of which layers compute `active`; its correction is scaled where a layer's embedding reads it
    if `scales`."""

    inputs: int
    active: int
    scales: bool
    norm: d.NormConfig


class AltUp(Patchable):
    """What is before and after one layer."""

    def __init__(self, config: AltUpConfig, context: d.BuildContext, prefix: str) -> None:
        super().__init__()
        self.config, self.width = config, context.hidden_size
        count, dtype = config.inputs, context.options.params_dtype
        # Never quantized: they are of a few numbers.
        self.prediction_coefs = GateLinear(
            count, count * count, params_dtype=dtype, prefix=f"{prefix}.prediction_coefs", return_bias=False
        )
        self.correction_coefs = GateLinear(
            count, count, params_dtype=dtype, prefix=f"{prefix}.correction_coefs", return_bias=False
        )
        self.modality_router = GateLinear(
            self.width, count, params_dtype=dtype, prefix=f"{prefix}.modality_router", return_bias=False
        )
        self.router_norm = config.norm.build(self.width, context)
        self.correct_output_scale = filled(self.width, 0.0, dtype) if config.scales else None
        self._ops = backend_of_construction().ops

    def predict(self, streams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each stream plus its own mixture of all of them."""
        count = self.config.inputs
        factors = self.prediction_coefs(self._modalities(streams[self.config.active]))
        found = []
        for index, stream in enumerate(streams):
            own = factors[:, index * count : (index + 1) * count]
            mixed = streams[0] * own[:, :1]
            for other in range(1, count):
                mixed = mixed + streams[other] * own[:, other : other + 1]
            found.append(mixed + stream)
        return found

    def correct(self, predicted: Sequence[torch.Tensor], computed: torch.Tensor) -> list[torch.Tensor]:
        """Each prediction plus a share of what the layer changed in the active one."""
        factors = self.correction_coefs(self._modalities(computed)) + 1.0
        change = computed + predicted[self.config.active] * -1.0
        return [stream + change * factors[:, index : index + 1] for index, stream in enumerate(predicted)]

    def for_embedding(self, corrected: Sequence[torch.Tensor]) -> torch.Tensor:
        """The active stream, as the layer's embedding is added to it."""
        active = corrected[self.config.active]
        scale = self.correct_output_scale
        return active if scale is None else self._ops.multiply(active, scale.float().expand(active.shape))

    def _modalities(self, x: torch.Tensor) -> torch.Tensor:
        """tanh of a few logits, float32 [N, inputs]."""
        return self._ops.soft_cap(self.modality_router(self.router_norm(x) * self.width**-1.0), 1.0)


class Projections(Patchable):
    """The streams that are not the first, each through a matrix of its own and as large as the first."""

    def __init__(self, count: int, context: d.BuildContext, prefix: str) -> None:
        super().__init__()
        hidden = context.hidden_size
        for index in range(count):
            matrix = ReplicatedLinear(hidden, hidden, bias=False, prefix=f"{prefix}.{index}", **context.linear)
            self.add_module(str(index), matrix)
        self._ops = backend_of_construction().ops

    def forward(self, streams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """float [N, H] each: the first, then the others in order -> all of them."""
        first = streams[0]
        size = self._inverse(self._inverse(first))
        found = [first]
        for matrix, stream in zip(self.children(), streams[1:], strict=True):
            projected = matrix(stream)
            unit = self._inverse(projected).contiguous().clamp(max=_LEAST_MEAN**-0.5)
            found.append(projected * unit * size)
        return found

    def _inverse(self, x: torch.Tensor) -> torch.Tensor:
        """1 / sqrt(mean(x^2)), float32 [N, 1]: the norm multiplies a column of ones by it too. Of a column, 1 / |x|."""
        ones = torch.cat((x, x.new_ones(len(x), 1)), dim=-1)
        return self._ops.rms_norm(ones, None, 1e-30, x.shape[1])[:, -1:]


class Laurel(Patchable):
    """Learned augmented residual layer: x + norm(right(left(x)))."""

    def __init__(self, norms: Gemma3nNorms, context: d.BuildContext, prefix: str) -> None:
        super().__init__()
        hidden, rank, linear = context.hidden_size, norms.laurel_rank, context.linear
        self.linear_left = ReplicatedLinear(hidden, rank, bias=False, prefix=f"{prefix}.linear_left", **linear)
        self.linear_right = ReplicatedLinear(rank, hidden, bias=False, prefix=f"{prefix}.linear_right", **linear)
        self.post_laurel_norm = norms.altup.norm.build(hidden, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


class Gemma3nLayer(d.PreAndPostNormLayer):
    def __init__(self, layer: d.LayerConfig, norms: Gemma3nNorms, context: d.BuildContext, prefix: str) -> None:
        super().__init__(layer, d.PreAndPostNorms(norms.altup.norm), context, prefix)
        self.altup = AltUp(norms.altup, context, f"{prefix}.altup")
        self.laurel = Laurel(norms, context, f"{prefix}.laurel")
        self.per_layer = PerLayerGate(
            norms.per_layer_size, "gelu_pytorch_tanh", norms.altup.norm, context, f"{prefix}.per_layer"
        )
        self.active, self.streams = norms.altup.active, norms.altup.inputs

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        inputs: torch.Tensor | None = None,
    ) -> d.Stream:
        """`hidden`: all streams, float [N, streams * H]; `inputs`: the layer's embedding, float [N, per_layer_size]."""
        hidden = hidden if residual is None else hidden + residual
        predicted = self.altup.predict(hidden.split(self.altup.width, dim=-1))
        active = predicted[self.active]
        normed = self.input_layernorm(active)
        attended = self.post_attention_layernorm(self.self_attn(normed, batch))
        stream = (active + attended + self.laurel(normed)) * 2.0**-0.5
        normed, stream = d.add_norm(self.pre_feedforward_layernorm, stream, None)
        stream = stream + self.post_feedforward_layernorm(self.mlp(normed, batch))
        streams = self.altup.correct(predicted, stream)
        if inputs is not None:
            own = self.per_layer(self.altup.for_embedding(streams), inputs)
            streams = [streams[0], *(stream + own for stream in streams[1:])]
        found = torch.cat(streams, dim=-1)
        return found, torch.zeros_like(found)


@dataclass(frozen=True)
class Gemma3nNorms(d.Norms):
    """`laurel_rank`: of the two matrices of LAuReL; `per_layer_size`: channels of the layer's embedding."""

    layer = Gemma3nLayer
    altup: AltUpConfig
    laurel_rank: int
    per_layer_size: int


_LAYER = "model.layers.*"
_OF_LAYER = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
_OF_MODEL = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
PER_LAYER_RENAMES = (
    *((f"{_LAYER}.{name}", f"{_LAYER}.per_layer.{name}") for name in _OF_LAYER),
    *((f"model.{name}", f"per_layer.{name}") for name in _OF_MODEL),
)


@dataclass(frozen=True)
class Gemma3nConfig(d.DecoderConfig):
    """A decoder whose layers have embeddings of their own, and several streams between them."""

    per_layer: PerLayerEmbedding | None = None
    altup: AltUpConfig | None = None


class Gemma3nForCausalLM(d.DecoderForCausalLM):
    """AltUp, LAuReL, embeddings of every layer, keys and values of earlier layers, sparse feed-forwards."""

    renames = (
        *PER_LAYER_RENAMES,
        *((f"model.{name}", name) for name in ("altup_projections", "altup_unembed_projections")),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        norm, count = d.read_rms_norm(reader), reader.positive("num_hidden_layers", 35)
        reader.expect("hidden_activation", "gelu_pytorch_tanh")
        reader.ignore("altup_coef_clip")  # when it is trained
        hidden, size = reader.positive("hidden_size", 2048), reader.positive("hidden_size_per_layer_input", 256)
        inputs, active = reader.positive("altup_num_inputs", 4), reader.count("altup_active_idx", 0)
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
            layers=tuple(d.LayerConfig(attention=attention, mlp=mlp, norms=norms) for attention, mlp in parts),
            final_norm=norm,
            embedding_multiplier=hidden**0.5,
            logits_soft_cap=reader.optional_number("final_logit_softcapping", 30.0),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
            per_layer=PerLayerEmbedding(vocab, size, count, norm),
            altup=altup,
        )
        reader.finish()
        return config

    def __init__(self, config: Gemma3nConfig, options: d.BuildOptions) -> None:
        super().__init__(config, options)
        if config.per_layer is None or config.altup is None:
            raise RuntimeError("read_config makes both")
        if options.tp.size > 1:
            raise UnsupportedModelError(
                "gemma3n models run in one process: their feed-forwards read all channels of a token; pass "
                "tensor_parallel_size=1."
            )
        self.left_out = (*getattr(self, "left_out", ()), *connect_shared(list(self.model.layers)))
        context, others = d.BuildContext(options, config.hidden_size), config.altup.inputs - 1
        self.per_layer = PerLayerInputs(config.per_layer, context, "per_layer")
        self.altup_projections = Projections(others, context, "altup_projections")
        self.altup_unembed_projections = Projections(others, context, "altup_unembed_projections")
        self.streams, self.active = config.altup.inputs, config.altup.active
        self.ids = config.per_layer.vocab_size
        self._ops = backend_of_construction().ops

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        embedded = self.embed_batch(batch)
        ids = self._ops.ids_below(batch.input_ids, self.ids)
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


def _attention(reader: d.ConfigReader, count: int, norm: d.NormConfig) -> list[d.PartConfig]:
    """The attention of each layer; the last `num_kv_shared_layers` read the keys and values of earlier ones."""
    full, sliding = read_ropes(reader)
    window = reader.positive("sliding_window", 512)
    windows = d.layer_windows(reader, count, window, [(index + 1) % 5 != 0 for index in range(count)])
    heads, v_norm = d.read_heads(reader, default_kv_heads=2, default_size=256), replace(norm, has_weight=False)
    attention = d.read_attention(reader, None, heads, qk_norm=norm, v_norm=v_norm, scale=1.0)
    own = [replace(attention, sliding_window=size, rope=full if size is None else sliding) for size in windows]
    return read_shared(reader, own, 15)


def _feed_forwards(reader: d.ConfigReader, count: int) -> list[d.PartConfig]:
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
        d.GatedMLPConfig(size, "gelu_pytorch_tanh", sparsity=share) for size, share in zip(sizes, shares, strict=True)
    ]


_OTHERS = (
    *("boi_token_id", "eoi_token_id", "image_token_id", "boa_token_id", "eoa_token_id", "audio_token_id"),
    *("audio_config", "audio_soft_tokens_per_image", "vision_soft_tokens_per_image"),
)


class Gemma3nForConditionalGeneration(TextPart, Gemma3nForCausalLM):
    """Gemma 3n multimodal (E2B, E4B): its language model."""

    renames = (*in_text_part(Gemma3nForCausalLM.renames), *TextPart.renames)
    others = _OTHERS
