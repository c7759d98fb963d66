"""A model of transformers without weights, its parts, and the two halves of its forward pass.

Its parameters are meta tensors, its buffers are computed.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from llm.base.text import clip, show
from llm.errors import UnsupportedModelError

# The type of transformers' objects and of what its modules are called with: each class has its own.
Theirs: TypeAlias = Any

# Tables that a model computes at start (rotary frequencies, masks), in all.
_MOST_BUFFER_BYTES = 1 << 30
_MOST_MODULES = 10_000
_COUNTED = ("layers", "experts", "heads", "blocks", "groups")


@dataclass
class Skeleton:
    """A model of transformers and its parts.

    Attributes:
        model: the causal language model.
        base: what `model.forward` calls for the hidden states.
        embedding, head: the token embedding and the LM head; `tied` if they share their weight.
    """

    model: Theirs
    base: nn.Module
    embedding: nn.Module
    head: nn.Module
    tied: bool


def build_skeleton(config: Theirs) -> Skeleton:
    """The model of a transformers config. Raises `UnsupportedModelError` if transformers cannot build it."""
    from transformers import AutoModelForCausalLM

    check_counts(config.to_dict(), "config.json")
    with refusing("transformers cannot build the model"), torch.device("meta"), without_warnings():
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation="eager",
            experts_implementation="eager",  # the default takes no odd sizes
            dtype=torch.float32,
            trust_remote_code=False,
        )
    model.eval().requires_grad_(False)
    compute_buffers(model)
    return _parts(model)


def _parts(model: Theirs) -> Skeleton:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kind = type(model).__name__
    if not isinstance(embedding, nn.Embedding):
        raise UnsupportedModelError(f"{kind} of transformers has no embedding of tokens.")
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError(f"{kind} of transformers has no LM head that is one matrix.")
    base = model.get_submodule(_called_first(model))
    return Skeleton(model, base, embedding, head, head.weight is embedding.weight)


def _called_first(model: Theirs) -> str:
    """The path of the base model. `AutoModelForCausalLM` classes of decoders wrap theirs once more."""
    name = model.base_model_prefix
    if not hasattr(model, name) and hasattr(model, "model"):
        name = "model"
    base = getattr(model, name, None)
    if not isinstance(base, nn.Module):
        raise UnsupportedModelError(f"{type(model).__name__} of transformers has no base model {show(name)}.")
    if type(base).forward is nn.Module.forward or type(base).__name__.endswith("DecoderWrapper"):
        return f"{name}.decoder"
    return name


def check_counts(config: object, where: str) -> None:
    """Refuse numbers of layers, heads and experts that are no model's: building takes time and memory for each."""
    if isinstance(config, list):
        for item in config:
            check_counts(item, where)
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        check_counts(value, where)
        counts = isinstance(value, int) and not isinstance(value, bool) and any(word in str(key) for word in _COUNTED)
        if counts and not -1 <= value <= _MOST_MODULES:
            raise UnsupportedModelError(f"{where}: {key} is {show(value)}, must be at most {_MOST_MODULES}.")


def compute_buffers(model: Theirs) -> None:
    """Buffers that no checkpoint stores get their values; those that it stores become parameters, to be loaded."""
    from transformers import PreTrainedModel

    total = sum(buffer.nbytes for buffer in model.buffers())
    if total > _MOST_BUFFER_BYTES:
        raise UnsupportedModelError(f"{type(model).__name__}'s tables would take {total} bytes.")
    made: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if name in module._non_persistent_buffers_set:
                module._buffers[name] = made[f"{path}.{name}"] = _unset(buffer)
            else:
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    with refusing("transformers cannot compute the model's tables"), torch.no_grad(), without_warnings():
        for owner in (part for part in model.modules() if isinstance(part, PreTrainedModel)):  # a tower has its own
            for module in owner.modules():
                # Some read what only a loaded model has. A table that is left unset is found below.
                with suppress(AttributeError):
                    owner._init_weights(module)
    for name in made:
        path, _, last = name.rpartition(".")
        if _is_unset(model.get_submodule(path)._buffers[last]):
            raise UnsupportedModelError(
                f"transformers computes {name.lstrip('.')} of {type(model).__name__} in no way known here."
            )


def _unset(buffer: torch.Tensor) -> torch.Tensor:
    """Memory for a table, with values that show whether anything was written."""
    value = torch.nan if buffer.is_floating_point() or buffer.is_complex() else buffer.dtype is torch.bool or -1
    return torch.full(buffer.shape, value, dtype=buffer.dtype)


def _is_unset(buffer: torch.Tensor) -> bool:
    unset = _unset(buffer)
    return (
        bool(buffer.numel())
        and buffer.dtype is not torch.bool
        and torch.equal(buffer.nan_to_num(7.5), unset.nan_to_num(7.5))
    )


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Errors of transformers' code about a config become ours: a config was written by others and may hold anything."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{what}: {type(error).__name__}: {clip(str(error), 300)}") from error


@contextmanager
def without_warnings() -> Iterator[None]:
    """transformers logs advice about its own generate()."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class Passes:
    """The halves of a forward pass: to the hidden states, and from them to the logits.

    transformers has one forward for both. For the second half its base model returns hidden states that it is given:
    `model.forward` calls `base`, and `base.forward` is patched.
    """

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
