"""Gemma 4."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from llm.base.custom_op import CustomOp
from llm.base.watch import Patchable
from llm.forward import ForwardBatch
from llm.kernels.backend import Operations
from llm.layers.custom_op import KernelOp
from llm.layers.moe import FusedMoE, GateLinear
from llm.layers.norm import filled
from llm.models import decoder as d
from llm.models.gemma3n import (
    PER_LAYER_RENAMES,
    Factor,
    PerLayerEmbedding,
    PerLayerGate,
    PerLayerInputs,
    SharedKVConfig,
    connect_shared,
    read_shared,
)
from llm.models.text_part import TextPart, in_text_part


@dataclass(frozen=True)
class Gemma4Experts(d.PartConfig):
    """`top_k` of `num_experts`, chosen by a router with a norm of its own and a trained factor on each expert."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm: d.NormConfig

    @property
    def experts(self) -> int:
        return self.num_experts

    def build(self, context: d.BuildContext, prefix: str) -> nn.Module:
        return Gemma4MoE(self, context, prefix)


@CustomOp.register("scaled_topk")
class ScaledTopK(KernelOp):
    """A `custom_routing_function`: the best of a softmax, which sum to 1, each times its expert's factor."""

    operations = ("select_experts", "select_rows", "multiply")

    def __init__(self, num_experts: int, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.per_expert_scale = filled(num_experts, 1.0, torch.float32)

    def compute(
        self, ops: Operations, hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = ops.select_experts(gating_output, topk, "softmax", True, None, 1, 1, 1.0)
        factors = ops.select_rows(self.per_expert_scale.view(-1, 1), ids.view(-1)).view(ids.shape)
        return ops.multiply(weights, factors), ids


class Gemma4MoE(Patchable):
    def __init__(self, config: Gemma4Experts, context: d.BuildContext, prefix: str) -> None:
        super().__init__()
        hidden = context.hidden_size
        self.norm = config.norm.build(hidden, context)
        self.gate = GateLinear(
            hidden,
            config.num_experts,
            params_dtype=context.options.params_dtype,
            prefix=f"{prefix}.gate",
            return_bias=False,
        )
        self.experts = FusedMoE(
            config.num_experts,
            config.top_k,
            hidden,
            config.intermediate_size,
            prefix=f"{prefix}.experts",
            activation="gelu_tanh",
            custom_routing_function=ScaledTopK(config.num_experts),
            **context.common,
        )
        self.scale = hidden**-0.5

    def forward(self, hidden: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """`hidden` goes to the experts that the residual stream chooses."""
        return self.experts(hidden, self.gate(self.norm(stream) * self.scale))


@dataclass(frozen=True, kw_only=True)
class Gemma4LayerConfig(d.LayerConfig):
    """A layer that may have experts beside its feed-forward."""

    moe: Gemma4Experts | None = None

    @property
    def parts(self) -> Mapping[str, d.PartConfig]:
        return super().parts if self.moe is None else {**super().parts, "moe": self.moe}


class Gemma4Layer(d.PreAndPostNormLayer):
    moe: nn.Module

    def __init__(self, layer: d.LayerConfig, norms: "Gemma4Norms", context: d.BuildContext, prefix: str) -> None:
        super().__init__(layer, d.PreAndPostNorms(norms.norm), context, prefix)
        self.has_experts = "moe" in layer.parts
        if self.has_experts:
            for name in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"):
                self.add_module(name, norms.norm.build(context.hidden_size, context))
        self.per_layer: PerLayerGate | None = None
        if norms.per_layer_size:
            self.per_layer = PerLayerGate(
                norms.per_layer_size, "gelu_pytorch_tanh", norms.norm, context, f"{prefix}.per_layer"
            )
        self.layer_scalar = Factor(context.hidden_size)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        inputs: torch.Tensor | None = None,
    ) -> d.Stream:
        """`inputs`: the layer's embedding of each token, float [N, per_layer_size]."""
        hidden, stream = d.add_norm(self.input_layernorm, hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(hidden, batch))
        hidden, stream = self.pre_feedforward_layernorm(hidden, stream)
        hidden = self.mlp(hidden, batch)
        if self.has_experts:
            beside = self.moe(self.get_submodule("pre_feedforward_layernorm_2")(stream), stream)
            hidden = self.get_submodule("post_feedforward_layernorm_1")(hidden)
            hidden = hidden + self.get_submodule("post_feedforward_layernorm_2")(beside)
        stream = stream + self.post_feedforward_layernorm(hidden)
        if self.per_layer is not None and inputs is not None:
            stream = stream + self.per_layer(stream, inputs)
        stream = self.layer_scalar(stream)
        return stream, torch.zeros_like(stream)


@dataclass(frozen=True)
class Gemma4Norms(d.Norms):
    """Attributes:
    per_layer_size: channels of the layer's embedding of each token; 0: it has none.
    """

    layer = Gemma4Layer
    norm: d.NormConfig
    per_layer_size: int


_LAYER = "model.layers.*"
_FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


@dataclass(frozen=True)
class Gemma4Config(d.DecoderConfig):
    """`per_layer`: None: layers have no embeddings of their own. `values_are_keys`: full layers have one matrix."""

    per_layer: PerLayerEmbedding | None = None
    values_are_keys: bool = False


class Gemma4ForCausalLM(d.DecoderForCausalLM):
    """Heads of other sizes in full layers, keys and values of earlier layers, embeddings of every layer."""

    renames = (
        (f"{_LAYER}.router.scale", f"{_LAYER}.moe.norm.weight"),
        (f"{_LAYER}.router.proj", f"{_LAYER}.moe.gate"),
        (f"{_LAYER}.router.per_expert_scale", f"{_LAYER}.moe.experts.custom_routing_function.per_expert_scale"),
        (f"{_LAYER}.experts", f"{_LAYER}.moe.experts"),
        (f"{_LAYER}.layer_scalar", f"{_LAYER}.layer_scalar.value"),
        *PER_LAYER_RENAMES,
    )
    config: Gemma4Config

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        norm, count = d.read_rms_norm(reader), reader.positive("num_hidden_layers", 30)
        reader.expect("use_bidirectional_attention", "vision")
        reader.expect("hidden_activation", "gelu_pytorch_tanh")
        hidden, inner = reader.positive("hidden_size", 2304), reader.positive("intermediate_size", 9216)
        parts = _attention(reader, count, norm)
        experts, size = _experts(reader, norm), reader.count("hidden_size_per_layer_input", 256)
        factor = 2 if reader.boolean("use_double_wide_mlp", False) else 1
        layers = [
            Gemma4LayerConfig(
                attention=part,
                mlp=d.GatedMLPConfig(inner * (factor if isinstance(part, SharedKVConfig) else 1), "gelu_pytorch_tanh"),
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

    def __init__(self, config: Gemma4Config, options: d.BuildOptions) -> None:
        super().__init__(config, options)
        self.left_out = (*getattr(self, "left_out", ()), *connect_shared(list(self.model.layers)))
        if config.values_are_keys:
            self.merge_weights = partial(_with_values)
        self.per_layer: PerLayerInputs | None = None
        if config.per_layer is not None:
            self.per_layer = PerLayerInputs(config.per_layer, d.BuildContext(options, config.hidden_size), "per_layer")

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


def _attention(reader: d.ConfigReader, count: int, norm: d.NormConfig) -> list[d.PartConfig]:
    """The attention of each layer; the last `num_kv_shared_layers` read the keys and values of earlier ones."""
    window = reader.positive("sliding_window", 512)
    windows = d.layer_windows(reader, count, window, [(index + 1) % 6 != 0 for index in range(count)])
    windows[-1] = None
    sliding = d.AttentionConfig(
        d.Heads(
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


def _full_heads(reader: d.ConfigReader, sliding: d.Heads) -> d.Heads:
    """Those of layers without a window: in keys of their own, or as transformers writes them, layer by layer."""
    size = reader.positive("global_head_dim", 512)
    has_own = reader.boolean("attention_k_eq_v", False)
    kv = reader.positive("num_global_key_value_heads", sliding.key_value)
    layers = reader.nested("per_layer_config").values()
    given = [d.ConfigReader(layer, "config.json, per_layer_config") for layer in layers if isinstance(layer, dict)]
    found = {
        (one.positive("head_dim", sliding.size), one.positive("num_key_value_heads", sliding.key_value))
        for one in given
    }
    if len(found) > 1 or len(given) != len(layers):
        raise reader.error("per_layer_config", sorted(found), "the same for every layer that it names")
    for one in given:
        one.finish()
    for size, kv in found:
        return d.Heads(sliding.query, kv, size)
    return d.Heads(sliding.query, kv if has_own else sliding.key_value, size)


def _experts(reader: d.ConfigReader, norm: d.NormConfig) -> Gemma4Experts | None:
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


_OTHERS = (
    *("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id", "boa_token_id", "eoa_token_index"),
    *("audio_token_id", "audio_config", "eoa_token_id"),
)


class Gemma4ForConditionalGeneration(TextPart, Gemma4ForCausalLM):
    """Gemma 4 multimodal (E2B, E4B, 26B-A4B, 31B): its language model."""

    renames = (*in_text_part(Gemma4ForCausalLM.renames), *TextPart.renames)
    others = _OTHERS
