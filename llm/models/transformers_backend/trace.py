"""What a forward pass of transformers asks of attention: its calls with their heads, scales and masks.

Owns an attention function and a mask function that record, registered with transformers while a trace runs. A mask is
not compared by its values on a few tokens, which are fewer than a sliding window: transformers gives the mask as a
function of two positions, which is evaluated at the far end of the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from llm.base.text import show
from llm.errors import UnsupportedModelError
from llm.models.transformers_backend.interface import AttentionCall, choose_attention
from llm.models.transformers_backend.theirs import Theirs

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
