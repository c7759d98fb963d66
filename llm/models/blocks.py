"""The parametrised decoder that families share.

Owns `DecoderConfig` and the wiring of attention, feed-forward, layer and model. A family file maps its config.json onto
these parameters; a difference of three lines is a parameter here, not a copy there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from llm.base.errors import UnsupportedModelError
from llm.forward import ForwardBatch, KVCacheSpec
from llm.layers.activation import GeluAndMul, NewGELU, ReLU, SiluAndMul
from llm.layers.attention import Attention
from llm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from llm.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from llm.layers.logits import LogitsProcessor
from llm.layers.norm import GemmaRMSNorm, LayerNorm, RMSNorm
from llm.layers.rotary import RopeParameters, RotaryEmbedding
from llm.models.config_reader import ConfigReader
from llm.models.interface import BuildOptions

NORMS: dict[str, Callable[..., nn.Module]] = {
    "rms_norm": RMSNorm,
    "gemma_rms_norm": GemmaRMSNorm,
    "layer_norm": LayerNorm,
}
# Hugging Face's names of activations -> ours; the first table is of feed-forwards with a gate.
GATED_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": SiluAndMul,
    "gelu": GeluAndMul,
    "gelu_pytorch_tanh": lambda: GeluAndMul("tanh"),
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": ReLU, "gelu_new": NewGELU}


@dataclass(frozen=True)
class LayerConfig:
    """What differs between the layers of one model: the window (None: sees everything) and the rope (None: none)."""

    sliding_window: int | None = None
    rope: RopeParameters | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer.

    Attributes:
        head_size: independent of `hidden_size / num_heads`.
        max_position_embeddings: the longest sequence the model can serve, rope scaling included.
        layers: one entry per layer.
        norm: a key of `NORMS`.
        norm_placement: "pre" (before each block), "post" (on each block's output), "both".
        activation: a key of `GATED_ACTIVATIONS` when `gated_mlp`, else of `ACTIVATIONS`.
        qkv_bias, out_bias, mlp_bias: which linear layers have a bias.
        qk_norm: normalise queries and keys per "head", or over all heads together ("all").
        attention_scale: None: head_size ** -0.5.
        attention_soft_cap, logits_soft_cap: cap * tanh(x / cap) on scores and on logits.
        learned_positions: rows of the table of position embeddings; None: no such table. `position_offset` is the row
            of position 0.
        embedding_multiplier, residual_multiplier, logits_divisor: constants on the embedding, on each block's output
            and under the logits.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    norm: str = "rms_norm"
    norm_placement: Literal["pre", "post", "both"] = "pre"
    activation: str = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    learned_positions: int | None = None
    position_offset: int = 0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"config.json: num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}."
            )
        for rope in {layer.rope for layer in self.layers if layer.rope is not None}:
            self._check_rope(rope)
        known = GATED_ACTIVATIONS if self.gated_mlp else ACTIVATIONS
        if self.activation not in known:
            raise UnsupportedModelError(
                f"config.json: hidden_act (or activation_function) {self.activation!r} is not supported; known: "
                f"{', '.join(known)}."
            )

    def _check_rope(self, rope: RopeParameters) -> None:
        rotary_dim = int(self.head_size * rope.partial_rotary_factor)
        if rotary_dim % 2:
            raise UnsupportedModelError(f"config.json: {rotary_dim} rotated channels per head is odd, must be even.")
        divisors = {len(rope.short_factor), len(rope.long_factor)}
        if rope.rope_type == "longrope" and divisors != {rotary_dim // 2}:
            raise UnsupportedModelError(
                f"config.json: short_factor and long_factor need {rotary_dim // 2} numbers, have {sorted(divisors)}."
            )

    def make_norm(self, size: int, options: BuildOptions) -> nn.Module:
        return NORMS[self.norm](size, self.norm_eps, dtype=options.params_dtype)


class DecoderAttention(nn.Module):
    def __init__(
        self, config: DecoderConfig, options: BuildOptions, index: int, rotary: RotaryEmbedding | None, prefix: str
    ) -> None:
        super().__init__()
        common: dict[str, Any] = {"params_dtype": options.params_dtype, "quant_config": options.quant_config}
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        self.head_size = size
        self.sizes = [heads * size, kv_heads * size, kv_heads * size]
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, size, heads, kv_heads, bias=config.qkv_bias, prefix=f"{prefix}.qkv_proj", **common
        )
        self.o_proj = RowParallelLinear(
            heads * size, config.hidden_size, bias=config.out_bias, prefix=f"{prefix}.o_proj", **common
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm is not None:
            widths = (size, size) if config.qk_norm == "head" else (heads * size, kv_heads * size)
            self.q_norm, self.k_norm = (config.make_norm(width, options) for width in widths)
        self.norm_per_head = config.qk_norm == "head"
        self.rotary_emb = rotary
        self.attn = Attention(
            heads,
            kv_heads,
            size,
            layer_index=index,
            scale=size**-0.5 if config.attention_scale is None else config.attention_scale,
            sliding_window=config.layers[index].sliding_window,
            soft_cap=config.attention_soft_cap,
        )

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        query, key, value = self.qkv_proj(hidden).split_with_sizes(self.sizes, dim=-1)
        if self.q_norm is not None:
            query, key = self._normalise(self.q_norm, query), self._normalise(self.k_norm, key)
        if self.rotary_emb is not None:
            query, key = self.rotary_emb(batch.positions, query, key)
        return self.o_proj(self.attn(query, key, value, batch))

    def _normalise(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        if not self.norm_per_head:
            return norm(x)
        return norm(x.reshape(x.shape[0], -1, self.head_size)).view(x.shape)


class GatedMLP(nn.Module):
    def __init__(self, config: DecoderConfig, options: BuildOptions, prefix: str) -> None:
        super().__init__()
        common: dict[str, Any] = {
            "bias": config.mlp_bias,
            "params_dtype": options.params_dtype,
            "quant_config": options.quant_config,
        }
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], prefix=f"{prefix}.gate_up_proj", **common
        )
        self.down_proj = RowParallelLinear(inner, hidden, prefix=f"{prefix}.down_proj", **common)
        self.act_fn = GATED_ACTIVATIONS[config.activation]()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(hidden)))


class PlainMLP(nn.Module):
    def __init__(self, config: DecoderConfig, options: BuildOptions, prefix: str) -> None:
        super().__init__()
        common: dict[str, Any] = {
            "bias": config.mlp_bias,
            "params_dtype": options.params_dtype,
            "quant_config": options.quant_config,
        }
        hidden, inner = config.hidden_size, config.intermediate_size
        self.up_proj = ColumnParallelLinear(hidden, inner, prefix=f"{prefix}.up_proj", **common)
        self.down_proj = RowParallelLinear(inner, hidden, prefix=f"{prefix}.down_proj", **common)
        self.act_fn = ACTIVATIONS[config.activation]()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden)))


class DecoderLayer(nn.Module):
    """Attention and feed-forward around a residual stream.

    Norms by placement: "pre" has `input_layernorm` and `post_attention_layernorm` (before the feed-forward); "post" has
    `post_attention_layernorm` and `post_feedforward_layernorm` on the blocks' outputs; "both" has all four, the one
    before the feed-forward called `pre_feedforward_layernorm`. Hugging Face's names.
    """

    def __init__(
        self, config: DecoderConfig, options: BuildOptions, index: int, rotary: RotaryEmbedding | None, prefix: str
    ) -> None:
        super().__init__()

        def norm() -> nn.Module:
            return config.make_norm(config.hidden_size, options)

        self.placement = config.norm_placement
        self.multiplier = config.residual_multiplier
        self.self_attn = DecoderAttention(config, options, index, rotary, f"{prefix}.self_attn")
        self.mlp = (GatedMLP if config.gated_mlp else PlainMLP)(config, options, f"{prefix}.mlp")
        self.post_attention_layernorm = norm()
        if self.placement != "post":
            self.input_layernorm = norm()
        if self.placement != "pre":
            self.post_feedforward_layernorm = norm()
        if self.placement == "both":
            self.pre_feedforward_layernorm = norm()

    @property
    def norm_before_mlp(self) -> nn.Module:
        return self.post_attention_layernorm if self.placement == "pre" else self.pre_feedforward_layernorm

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and returns (what the last block added, the residual stream before it)."""
        if self.placement == "post":
            return self._forward_post(hidden + residual, batch)
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, batch)
        if self.placement == "both":
            hidden = self.post_attention_layernorm(hidden)
        hidden, residual = self.norm_before_mlp(self._scale(hidden), residual)
        hidden = self.mlp(hidden)
        if self.placement == "both":
            hidden = self.post_feedforward_layernorm(hidden)
        return self._scale(hidden), residual

    def _forward_post(self, residual: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + self.post_attention_layernorm(self.self_attn(residual, batch))
        return self.post_feedforward_layernorm(self.mlp(residual)), residual

    def _scale(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.multiplier == 1.0 else hidden * self.multiplier


class DecoderModel(nn.Module):
    def __init__(self, config: DecoderConfig, options: BuildOptions, prefix: str = "model") -> None:
        super().__init__()
        self.config = config
        common: dict[str, Any] = {"params_dtype": options.params_dtype, "quant_config": options.quant_config}
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            prefix=f"{prefix}.embed_tokens",
            tied=config.tie_word_embeddings,
            **common,
        )
        self.embed_positions: VocabParallelEmbedding | None = None
        if config.learned_positions is not None:
            self.embed_positions = VocabParallelEmbedding(
                config.learned_positions, config.hidden_size, prefix=f"{prefix}.embed_positions", **common
            )
        ropes = dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None)
        rotary = {rope: RotaryEmbedding(config.head_size, options.max_model_len, rope) for rope in ropes}
        self.layers = nn.ModuleList(
            DecoderLayer(config, options, index, rotary[layer.rope] if layer.rope else None, f"{prefix}.layers.{index}")
            for index, layer in enumerate(config.layers)
        )
        self.norm = config.make_norm(config.hidden_size, options)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [N] -> float32 [N, H], scaled as the first layer wants it."""
        hidden = self.embed_tokens(input_ids)
        multiplier = self.config.embedding_multiplier
        return hidden if multiplier == 1.0 else hidden * multiplier

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = self.embed(batch.input_ids) if batch.inputs_embeds is None else batch.inputs_embeds
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(batch.positions + self.config.position_offset)
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, batch)
        return self.norm(hidden, residual)[0]


class DecoderForCausalLM(nn.Module):
    """Implements `llm.models.interface.CausalLM`; a family overrides `read_config` and, when needed, the data below."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    # Older checkpoints store the rotary frequencies; they are recomputed from config.json.
    ignored_weights: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        raise NotImplementedError

    @classmethod
    def kv_cache_specs(cls, config: DecoderConfig, dtype: torch.dtype) -> list[KVCacheSpec]:
        return [
            KVCacheSpec(config.num_kv_heads, config.head_size, dtype, layer.sliding_window) for layer in config.layers
        ]

    def __init__(self, config: DecoderConfig, options: BuildOptions) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderModel(config, options)
        self.lm_head = self.model.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                params_dtype=options.params_dtype,
                quant_config=options.quant_config,
                prefix="lm_head",
            )
        self.logits_processor = LogitsProcessor(
            config.vocab_size, scale=1.0 / config.logits_divisor, soft_cap=config.logits_soft_cap
        )

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed(input_ids)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.model(batch)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden)


def decoder_sizes(reader: ConfigReader, *, default_kv_heads: int | None = None) -> dict[str, Any]:
    """The `DecoderConfig` sizes that most families spell alike. A missing head_dim is hidden_size / heads."""
    heads, hidden = reader.positive("num_attention_heads"), reader.positive("hidden_size")
    return {
        "vocab_size": reader.positive("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": reader.positive("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": reader.positive("num_key_value_heads", default_kv_heads or heads),
        "head_size": reader.positive("head_dim", hidden // heads),
        "norm_eps": reader.number("rms_norm_eps", 1e-6),
    }


def longest_sequence(reader: ConfigReader, rope: RopeParameters, default: int = 2048) -> int:
    """Positions a model serves: `max_position_embeddings`, stretched by the scalings that it leaves out."""
    longest = reader.positive("max_position_embeddings", default)
    if rope.rope_type in ("linear", "dynamic"):
        return int(longest * rope.factor)
    if rope.rope_type in ("yarn", "deepseek_yarn"):
        return int(rope.original_max_position_embeddings * rope.factor)
    return longest


def layer_windows(reader: ConfigReader, count: int, window: int | None, default: list[bool]) -> list[int | None]:
    """The sliding window of each layer, from `layer_types`; `default` says which layers slide when there is none."""
    kinds = reader.names("layer_types")
    if kinds is None:
        sliding = default
    elif len(kinds) != count or set(kinds) - {"full_attention", "sliding_attention"}:
        raise reader.error("layer_types", kinds, f"{count} of 'full_attention' or 'sliding_attention'")
    else:
        sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and window is None:
        raise reader.error("sliding_window", None, "an integer, for layers of sliding_attention")
    return [window if slides else None for slides in sliding]
