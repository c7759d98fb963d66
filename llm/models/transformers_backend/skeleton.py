"""A model of transformers without weights: its parameters are meta tensors, its buffers are computed.

Owns building it, with the checks of what a checkpoint's config may ask for, and finding its parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import nn

from llm.base.text import clip, show
from llm.errors import UnsupportedModelError
from llm.models.transformers_backend.theirs import Theirs

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
        base_name: its path.
        embedding, head: the token embedding and the LM head; `tied` if they share their weight.
    """

    model: Theirs
    base: nn.Module
    base_name: str
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
    _compute_buffers(model)
    return _parts(model)


def _parts(model: Theirs) -> Skeleton:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kind = type(model).__name__
    if not isinstance(embedding, nn.Embedding):
        raise UnsupportedModelError(f"{kind} of transformers has no embedding of tokens.")
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError(f"{kind} of transformers has no LM head that is one matrix.")
    name = _called_first(model)
    return Skeleton(model, model.get_submodule(name), name, embedding, head, head.weight is embedding.weight)


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


def _compute_buffers(model: Theirs) -> None:
    """Buffers that no checkpoint stores get their values; those that it stores become parameters, to be loaded."""
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
        for module in model.modules():
            # Some read what only a loaded model has. A table that is left unset is found below.
            with suppress(AttributeError):
                model._init_weights(module)
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
