"""The attention function that transformers' modeling code calls: computed by our attention layers, or recorded.

`PagedCalls` hands the calls of a forward pass to the attention layers in their order. The keys and values of a step go
into the paged KV cache; what transformers passes as a mask is not read, `AttentionCall.sliding_window` is what it
meant. `Trace` finds that out: it records what a forward pass asks of attention. A mask is not compared by its values on
a few tokens, which are fewer than a sliding window: transformers gives the mask as a function of two positions, which
is evaluated at the far end of the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from llm.base.text import show
from llm.errors import UnsupportedModelError
from llm.forward import ForwardBatch, KVCacheSpec
from llm.layers.attention import Attention
from llm.models.transformers_backend.skeleton import Theirs

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


# Keyword arguments of an attention call that may have any value: they are read, or mean nothing at inference.
_KNOWN = frozenset(
    "scaling softcap s_aux dropout is_causal sliding_window position_ids layer_idx use_cache logits_to_keep".split()
)
_LONGEST = 1 << 20


class Misfit(UnsupportedModelError):
    """A model does something that the paged KV cache has no place for; the message is the reason."""


class Trace:
    """Records the attention calls of a model's forward pass.

    Args:
        longest: positions that the model is made for.

    Attributes:
        calls: in order.
    """

    def __init__(self, model: nn.Module, longest: int) -> None:
        self.calls: list[AttentionCall] = []
        self._model = model
        self._longest = min(longest, _LONGEST)
        self._names = {id(module): name for name, module in model.named_modules()}
        # Address of a mask -> (the mask, its function); the mask is kept, so that the address stays its.
        self._masks: dict[int, tuple[torch.Tensor, Callable[..., torch.Tensor]]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Attention of the model is recorded, and computed by PyTorch."""
        from transformers import AttentionInterface, AttentionMaskInterface

        name = f"offline_llm_trace_{id(self)}"
        AttentionInterface._global_mapping[name] = self._attend
        AttentionMaskInterface._global_mapping[name] = self._mask
        choose_attention(self._model, name)
        try:
            yield
        finally:
            choose_attention(self._model, "eager")
            del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]

    def _mask(self, mask_function: Callable[..., torch.Tensor], **arguments: Theirs) -> torch.Tensor | None:
        """float [1, 1, queries, keys], as transformers' eager attention gets it; None: every token sees every other."""
        from transformers.masking_utils import eager_mask

        mask: Theirs = eager_mask(mask_function=mask_function, **arguments)
        if mask is not None:
            self._masks[mask.data_ptr()] = mask, mask_function
        return mask

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Theirs,
    ) -> tuple[torch.Tensor, None]:
        self.calls.append(self._call(module, (query, key, value), attention_mask, arguments))
        groups = query.shape[1] // key.shape[1]
        key, value = (item.repeat_interleave(groups, dim=1) for item in (key, value))
        is_causal = attention_mask is None
        mask = None if attention_mask is None else attention_mask[..., : key.shape[2]].to(query.dtype)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
        return out.transpose(1, 2).contiguous(), None

    def _call(
        self,
        module: nn.Module,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        arguments: Mapping[str, Theirs],
    ) -> AttentionCall:
        query, key, value = heads
        where = self._names[id(module)]
        if query.dim() != 4 or key.shape[:3] != value.shape[:3] or query.shape[2] != key.shape[2]:
            raise Misfit(f"{where} attends with {list(query.shape)} to {list(key.shape)}: no token to earlier ones")
        if query.shape[1] % key.shape[1]:
            raise Misfit(f"{where} has {query.shape[1]} heads of queries and {key.shape[1]} of keys")
        self._check_arguments(where, arguments)
        scale, cap = arguments.get("scaling"), arguments.get("softcap")
        if not isinstance(scale, float | int | None) or not isinstance(cap, float | int | None):
            raise Misfit(f"{where} scales its scores by a tensor")
        return AttentionCall(
            where,
            query.shape[1],
            key.shape[1],
            key.shape[3],
            value.shape[3],
            float(query.shape[3] ** -0.5 if scale is None else scale),
            self._window(where, module, mask, arguments),
            None if cap is None else float(cap),
            _name_of_sinks(where, module, arguments.get("s_aux")),
        )

    def _check_arguments(self, where: str, arguments: Mapping[str, Theirs]) -> None:
        for name, value in arguments.items():
            if name not in _KNOWN and value is not None and value is not False and not name.startswith("output_"):
                raise Misfit(f"{where} passes {show(name)} to attention, which has no place in the paged KV cache")

    def _window(
        self, where: str, module: nn.Module, mask: torch.Tensor | None, arguments: Mapping[str, Theirs]
    ) -> int | None:
        if mask is None:
            is_causal = arguments.get("is_causal")
            if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
                raise Misfit(f"{where} attends to tokens in both directions")
            return None
        if mask.data_ptr() not in self._masks:
            raise Misfit(f"{where} adds to its mask, as ALiBi and relative positions do")
        return window_of(self._masks[mask.data_ptr()][1], self._longest)


def _name_of_sinks(where: str, module: nn.Module, sinks: object) -> str:
    if sinks is None:
        return ""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter is sinks:
            return name
    raise Misfit(f"{where} has attention sinks that are no parameter of its own")


def window_of(mask_function: Callable[..., torch.Tensor], longest: int) -> int | None:
    """The sliding window of a mask, itself included; None: a causal mask. Raises `Misfit` for any other."""
    windows = set()
    for query in (longest - 1, longest // 2, 0):
        positions = torch.arange(longest)
        zero = torch.tensor(0)
        try:
            seen = mask_function(zero, zero, torch.tensor(query), positions).expand(longest)
        except (IndexError, RuntimeError, TypeError) as error:
            raise Misfit("its mask depends on more than two positions") from error
        count = int(seen.sum())
        if not 0 < count <= query + 1 or not seen[query + 1 - count : query + 1].all():
            raise Misfit("its mask is neither causal nor a sliding window")
        if count <= query:
            windows.add(count)
    if len(windows) > 1:
        raise Misfit("its mask is neither causal nor a sliding window")
    return windows.pop() if windows else None
