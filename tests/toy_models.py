"""Decoders made of parts that no family here has: what the parts of `llm.models.decoder` must leave room for.

A toy computes with plain PyTorch, one
token at a time, by operations that round an element alike whatever is beside it: its bits depend on nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import VOCAB, TinyModel, randomise
from torch import nn

from llm.forward import ForwardBatch, LatentCacheSpec, RecurrentSpec
from llm.layers.linear import ReplicatedLinear
from llm.layers.parallel import TensorParallel
from llm.layers.rotary import RopeParameters
from llm.models import registry
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    BuildContext,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    Heads,
    LayerConfig,
    LearnedPositions,
    NormConfig,
    ParallelNorms,
    PartConfig,
    PreNorms,
)
from llm.models.decoder.layer import OnePart, PreNormLayer, Stream
from llm.models.interface import BuildOptions

HIDDEN = 48
POSITIONS = 256
TAPS = 3


@dataclass(frozen=True)
class RecurrentConfig(PartConfig):
    """h[t] = decay h[t-1] + a convolution of the last `TAPS` inputs: two tensors of state, of two shapes."""

    width: int

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return Recurrent(self, context, prefix)

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[RecurrentSpec, ...]:
        return (RecurrentSpec(((self.width,), (TAPS - 1, self.width)), (torch.float64, torch.float32)),)


class Recurrent(nn.Module):
    def __init__(self, config: RecurrentConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        self.in_proj = ReplicatedLinear(
            context.hidden_size,
            config.width,
            bias=False,
            prefix=f"{prefix}.in_proj",
            return_bias=False,
            **context.common,
        )
        self.out_proj = ReplicatedLinear(
            config.width,
            context.hidden_size,
            bias=False,
            prefix=f"{prefix}.out_proj",
            return_bias=False,
            **context.common,
        )
        self.decay = nn.Parameter(torch.full((config.width,), 0.7), requires_grad=False)
        self.taps = nn.Parameter(torch.ones(TAPS, config.width), requires_grad=False)
        self.state = context.next_state()

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        sums, windows = batch.states[self.state]
        metadata = batch.metadata[self.state]
        x, decay = self.in_proj(hidden), self.decay.clamp(-0.9, 0.9)
        out, ends = torch.empty_like(x), metadata.query_start_loc.tolist()[1:]
        rows = zip(metadata.slots.tolist(), metadata.query_lens_list, metadata.seq_lens_list, ends, strict=True)
        for slot, count, length, end in rows:
            if count == length:
                sums[slot], windows[slot] = 0, 0
            for token in range(end - count, end):
                seen = torch.cat((windows[slot], x[token : token + 1]))
                windows[slot] = seen[1:]
                for tap in range(TAPS):
                    seen[tap] = seen[tap] * self.taps[tap]
                sums[slot] = sums[slot] * decay + (seen[0] + seen[1] + seen[2])
                out[token] = sums[slot]
        return self.out_proj(out)


@dataclass(frozen=True)
class LatentConfig(PartConfig):
    """Attention with one head whose keys are its values: one vector per token is kept."""

    size: int
    sliding_window: int | None = None

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return Latent(self, context, prefix)

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[LatentCacheSpec, ...]:
        return (LatentCacheSpec(self.size, dtype, self.sliding_window),)


class Latent(nn.Module):
    def __init__(self, config: LatentConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        self.config = config
        self.q_proj, self.kv_proj = (
            ReplicatedLinear(
                context.hidden_size,
                config.size,
                bias=False,
                prefix=f"{prefix}.{name}",
                return_bias=False,
                **context.common,
            )
            for name in ("q_proj", "kv_proj")
        )
        self.o_proj = ReplicatedLinear(
            config.size, context.hidden_size, bias=False, prefix=f"{prefix}.o_proj", return_bias=False, **context.common
        )
        self.state = context.next_state()

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        (cache,) = batch.states[self.state]
        metadata = batch.metadata[self.state]
        query, latents = self.q_proj(hidden), cache.view(-1, self.config.size)
        latents[metadata.slot_mapping] = self.kv_proj(hidden).to(cache.dtype)
        out, token = torch.empty_like(query), 0
        for row, (count, length) in enumerate(zip(metadata.query_lens_list, metadata.seq_lens_list, strict=True)):
            places = torch.arange(length)
            blocks = metadata.block_table[row].long()[places // metadata.block_size]
            known = latents[blocks * metadata.block_size + places % metadata.block_size].float()
            for end in range(length - count + 1, length + 1):
                seen = known[max(0, end - (self.config.sliding_window or end)) : end]
                weights = ((seen * query[token]).sum(-1) * self.config.size**-0.5).softmax(0)
                out[token] = (seen * weights[:, None]).sum(0)
                token += 1
        return self.o_proj(out)


@dataclass(frozen=True, kw_only=True)
class ThreePartConfig(LayerConfig):
    """A layer with something behind its feed-forward."""

    last: PartConfig

    @property
    def parts(self) -> Mapping[str, PartConfig]:
        return {**super().parts, "last": self.last}


class ThreePartLayer(PreNormLayer):
    last: nn.Module

    def __init__(self, layer: LayerConfig, norms: ThreeNorms, context: BuildContext, prefix: str) -> None:
        super().__init__(layer, norms, context, prefix)
        self.last_layernorm = norms.norm.build(context.hidden_size, context)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        hidden, residual = self.last_layernorm(*super().forward(hidden, residual, batch))
        return self.last(hidden, batch), residual


@dataclass(frozen=True)
class ThreeNorms(PreNorms):
    """Each of three parts in turn, with a norm before it."""

    layer = ThreePartLayer


NORM = NormConfig(1e-3)
MLP = GatedMLPConfig(91)
ATTENTION = AttentionConfig(Heads(6, 2, 10), RopeParameters())
WINDOWED = AttentionConfig(Heads(6, 2, 10), RopeParameters(), sliding_window=7)
PRE, ONE, PARALLEL, THREE = PreNorms(NORM), OnePart(NORM), ParallelNorms(NORM), ThreeNorms(NORM)
PARALLEL_LAYER = LayerConfig(attention=ATTENTION, mlp=MLP, norms=PARALLEL)
RECURRENT_LAYER = LayerConfig(attention=RecurrentConfig(20), mlp=MLP, norms=PRE)

TOYS: dict[str, tuple[LayerConfig, ...]] = {
    "parallel": (
        PARALLEL_LAYER,
        LayerConfig(attention=WINDOWED, mlp=MLP, norms=PARALLEL),
        ThreePartConfig(attention=ATTENTION, mlp=MLP, last=GatedMLPConfig(17), norms=THREE),
    ),
    # Recurrent and paged states side by side, in one layer too, and a layer without any.
    "recurrent": (
        RECURRENT_LAYER,
        LayerConfig(attention=WINDOWED, mlp=MLP, norms=PRE),
        LayerConfig(mlp=MLP, norms=ONE),
        ThreePartConfig(attention=ATTENTION, mlp=RecurrentConfig(11), last=MLP, norms=THREE),
    ),
    "recurrent-only": (RECURRENT_LAYER, LayerConfig(attention=RecurrentConfig(9), norms=ONE)),
    "latent": (
        LayerConfig(attention=LatentConfig(12), mlp=MLP, norms=PRE),
        PARALLEL_LAYER,
        LayerConfig(attention=LatentConfig(12, sliding_window=5), mlp=MLP, norms=PRE),
    ),
}


class ToyForCausalLM(DecoderForCausalLM):
    """Stored under the names that its modules have."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    layers: ClassVar[tuple[LayerConfig, ...]] = ()

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.finish()
        return DecoderConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            max_position_embeddings=POSITIONS,
            layers=cls.layers,
            final_norm=NORM,
            learned_positions=LearnedPositions(POSITIONS),
        )


def toy_class(name: str) -> type[ToyForCausalLM]:
    return type("ToyForCausalLM", (ToyForCausalLM,), {"layers": TOYS[name]})


@contextmanager
def toy_model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinyModel, Path]]:
    """A toy's row and checkpoint; its class is registered for as long."""
    folder = tmp_path_factory.mktemp("toy")
    cls, kind = toy_class(name), f"toy-{name}"
    model: Any = cls(cls.read_config(ConfigReader({})), BuildOptions(POSITIONS, torch.float32))
    randomise(model, seed=0)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "eos_token_id": 2}))
    registry.register_model(kind, cls)
    try:
        yield TinyModel("toy"), folder
    finally:
        del registry._models[kind]
