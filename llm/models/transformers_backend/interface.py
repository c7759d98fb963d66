"""The attention function that transformers' modeling code calls, computed by our attention layers.

Owns its name in transformers' registry, `AttentionCall`, which describes one call of a forward pass, and `PagedCalls`,
which hands the calls of a forward pass to the attention layers in their order. The keys and values of a step go into
the paged KV cache; what transformers passes as a mask is not read, `AttentionCall.sliding_window` is what it meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from llm.forward import ForwardBatch, KVCacheSpec
from llm.layers.attention import Attention

PAGED = "offline_llm_paged"
# Where a module of transformers finds the `PagedCalls` of its model.
CALLS = "offline_llm_calls"


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a forward pass.

    Attributes:
        module: the path of the attention module that makes it.
        key_size, value_size: channels of a head. The cache has one size for both, the larger.
        sinks: the module's parameter with a score per head for one more key; "": none.
    """

    module: str
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: str = ""

    @property
    def head_size(self) -> int:
        return max(self.key_size, self.value_size)

    def spec(self, dtype: torch.dtype) -> KVCacheSpec:
        return KVCacheSpec(self.num_kv_heads, self.head_size, dtype, self.sliding_window)

    def layer(self, index: int, sinks: torch.Tensor | None) -> Attention:
        """The layer with state `index`."""
        return Attention(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            layer_index=index,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            sinks=sinks,
        )


class PagedCalls:
    """The attention layers of one model, in the order in which a forward pass calls them."""

    def __init__(self, layers: Sequence[Attention]) -> None:
        self._layers = layers
        self._batch: ForwardBatch | None = None
        self._next = 0

    def start(self, batch: ForwardBatch) -> None:
        """The forward pass that begins computes `batch`."""
        self._batch, self._next = batch, 0

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [1, heads, N, d], key and value [1, kv_heads, N, d] -> [1, N, heads, d of the values]."""
        if self._batch is None:
            raise RuntimeError("attention of a model that is not computing a step")
        layer, tokens = self._layers[self._next], query.shape[2]
        self._next += 1
        rows = (_by_token(tensor, layer.head_size) for tensor in (query, key, value))
        out = layer(*rows, self._batch).view(1, tokens, layer.num_heads, layer.head_size)
        return out if value.shape[-1] == layer.head_size else out[..., : value.shape[-1]].contiguous()


def _by_token(heads: torch.Tensor, size: int) -> torch.Tensor:
    """[1, heads, N, d] -> [N, heads * size], the channels of each head filled up with zeros."""
    if heads.shape[-1] < size:
        heads = functional.pad(heads, (0, size - heads.shape[-1]))
    return heads[0].transpose(0, 1).flatten(1)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls. The keyword arguments are those that the probe saw, see `AttentionCall`."""
    calls: PagedCalls = getattr(module, CALLS)
    return calls.attend(query, key, value), None


def attention_layers(model: nn.Module, calls: Sequence[AttentionCall]) -> list[Attention]:
    """The layers of `calls`, whose states are numbered in their order."""
    found = []
    for index, call in enumerate(calls):
        sinks = getattr(model.get_submodule(call.module), call.sinks) if call.sinks else None
        found.append(call.layer(index, sinks))
    return found


def use_paged_attention(model: nn.Module, layers: Sequence[Attention]) -> PagedCalls:
    """From now on `layers` compute the attention of `model`, a model of transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, paged_attention)
    calls = PagedCalls(layers)
    for module in model.modules():
        setattr(module, CALLS, calls)
    choose_attention(model, PAGED)
    return calls


def choose_attention(model: nn.Module, name: str) -> None:
    """Set which registered attention the modules of `model` call; "eager" is transformers' own."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name
