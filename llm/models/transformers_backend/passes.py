"""The two halves of a forward pass of transformers: to the hidden states, and from them to the logits.

Owns calling them. transformers has one forward for both; for the second half its base model returns hidden states that
it is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from llm.errors import UnsupportedModelError
from llm.models.transformers_backend.theirs import Theirs


class Passes:
    """The halves of `model`, whose `forward` calls `base`; `base.forward` is patched."""

    def __init__(self, model: Theirs, base: nn.Module) -> None:
        self._model = model
        self._base = base
        self._forward = base.forward
        self._given: torch.Tensor | None = None
        takes = inspect.signature(type(base).forward).parameters
        # Mamba's models call it otherwise.
        self._cache_name = "cache_params" if "cache_params" in takes else "past_key_values"
        takes_any = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in takes.values())
        self._names_positions, self._takes_any = "position_ids" in takes, takes_any
        self._more: dict[str, Theirs] = {"use_cache": False} if takes_any or "use_cache" in takes else {}
        base.forward = self._forward_of_base

    @contextmanager
    def without_positions(self) -> Iterator[None]:
        """Inside, the model finds the positions itself: from 0, or from the cache."""
        kept = self._names_positions, self._takes_any
        self._names_positions = self._takes_any = False
        try:
            yield
        finally:
            self._names_positions, self._takes_any = kept

    def hidden(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        embeds: torch.Tensor | None = None,
        cache: Theirs = None,
    ) -> torch.Tensor:
        """ids and positions int64 [N] -> hidden states float32 [N, H].

        Args:
            embeds: float [N, H], in place of the ids.
            cache: of transformers, with the tokens before these; None: the pass keeps nothing.
        """
        given: dict[str, Theirs]
        given = {"input_ids": input_ids[None]} if embeds is None else {"inputs_embeds": embeds[None]}
        # With a cache, a model that does not name positions takes them from there.
        if self._names_positions or (cache is None and self._takes_any):
            given["position_ids"] = positions[None]
        kept = self._more if cache is None else {"use_cache": True, self._cache_name: cache}
        hidden = self._base(**given, **kept)[0]
        if not isinstance(hidden, torch.Tensor) or hidden.shape[:2] != (1, len(input_ids)):
            raise UnsupportedModelError("its base model does not return one hidden state for each token")
        return hidden[0]

    def whole(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Both halves."""
        given = {"position_ids": positions[None]} if self._names_positions else {}
        self._model(input_ids=input_ids[None], **given, **self._more)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [L, H] -> float32 [L, vocab]: what `model.forward` does after its base model."""
        self._given = hidden[None]
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            return self._model(input_ids=ids, **self._more).logits[0].float()
        finally:
            self._given = None

    def _forward_of_base(self, *args: Theirs, **kwargs: Theirs) -> Theirs:
        return self._forward(*args, **kwargs) if self._given is None else _output(self._given)


def _output(hidden: torch.Tensor) -> Theirs:
    """What a base model returns, with everything but the hidden states None."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Output(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return Output(last_hidden_state=hidden)
