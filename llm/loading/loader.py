"""Loading as an equation: every tensor used, every parameter filled, shapes agree.

Owns the bookkeeping and the errors; where a tensor goes is `weight_map.py`, how it is copied is the parameter's own
`weight_loader`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from llm.bar import Bar
from llm.errors import CheckpointError
from llm.loading.checkpoint import Checkpoint
from llm.loading.weight_map import WeightMap

_NAMES_SHOWN = 5
_PROGRESS_DELAY_SECONDS = 2.0
_DUMMY_STD = 0.02


def load_weights(model: nn.Module, checkpoint: Checkpoint, *, show_progress: bool) -> None:
    """Fill every parameter of `model` from the checkpoint, streamed file by file.

    Raises:
        CheckpointError: names tensors nobody needs, parameters nobody filled, or shapes that disagree.
    """
    parameters = dict(model.named_parameters())
    weight_map = WeightMap(model)
    filled = dict.fromkeys(parameters, 0)
    unexpected: list[str] = []
    tied_copies: list[tuple[str, torch.Tensor]] = []
    for name, tensor in _with_progress(checkpoint, show_progress):
        target = weight_map.target(name)
        if target.parameter in parameters:
            tensor = tensor.t() if weight_map.transposed(target.parameter) else tensor
            filled[target.parameter] += _copy(name, parameters[target.parameter], tensor, target.shard_id)
        elif _tied_parameter(model, name) is not None:
            tied_copies.append((name, tensor))
        elif not weight_map.ignores(name):
            unexpected.append(name)
    missing = [name for name, count in filled.items() if count < parameters[name].numel()]
    twice = [name for name, count in filled.items() if count > parameters[name].numel()]
    _raise_unless_complete(unexpected, missing, twice)
    _check_tied_copies(model, tied_copies)
    process_weights(model)


def load_dummy_weights(model: nn.Module, seed: int) -> None:
    """Random weights for measuring: normal with deviation 0.02, ones for norms; deterministic by name and seed."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.data.fill_(1.0)
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        parameter.data.normal_(0.0, _DUMMY_STD, generator=generator)
    process_weights(model)


def process_weights(model: nn.Module) -> None:
    """Let every layer rearrange what was loaded for its kernel, once."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)


def _with_progress(checkpoint: Checkpoint, show: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors, with a bar in bytes once loading has taken two seconds."""
    bar = Bar(
        total=checkpoint.total_bytes,
        unit="B",
        unit_scale=True,
        desc="Loading weights",
        disable=not show,
        delay=_PROGRESS_DELAY_SECONDS,
        leave=False,
    )
    with bar:
        for name, tensor in checkpoint.stream():
            yield name, tensor
            bar.update(tensor.nbytes)


def _copy(name: str, parameter: nn.Parameter, tensor: torch.Tensor, shard_id: Any) -> int:
    # Weights stay as stored: a tensor wider than the rest (norms in float32, often) widens its parameter.
    wider = torch.promote_types(parameter.dtype, tensor.dtype)
    if wider != parameter.dtype and tensor.is_floating_point():
        parameter.data = parameter.data.to(wider)
    loader = getattr(parameter, "weight_loader", copy_whole)
    try:
        return loader(parameter, tensor, shard_id)
    except ValueError as error:
        raise CheckpointError(f"tensor {name} {error}.") from error


def copy_whole(parameter: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> int:
    """The weight loader of parameters that declare none; raises ValueError when shapes differ."""
    if parameter.shape != tensor.shape:
        raise ValueError(f"has shape {list(tensor.shape)}, the model needs {list(parameter.shape)}")
    parameter.data.copy_(tensor)
    return tensor.numel()


def _tied_parameter(model: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter that an alias such as "lm_head.weight" of a tied model stands for."""
    try:
        found = model.get_parameter(name)
    except AttributeError:
        return None
    return found


def _check_tied_copies(model: nn.Module, copies: list[tuple[str, torch.Tensor]]) -> None:
    """Some tied checkpoints store the embedding again as the LM head: allowed when it is the same, bit for bit."""
    for name, tensor in copies:
        parameter = _tied_parameter(model, name)
        if parameter is None or parameter.shape != tensor.shape or not torch.equal(parameter.data, tensor):
            raise CheckpointError(
                f"tensor {name} differs from the embedding that config.json ties it to; if the model is not tied, pass "
                "hf_overrides={'tie_word_embeddings': False}."
            )


def _raise_unless_complete(unexpected: list[str], missing: list[str], twice: list[str]) -> None:
    problems = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("tensors that the model does not have", unexpected),
            ("parameters that no tensor fills", missing),
            ("parameters filled more than once", twice),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"the checkpoint does not match the architecture; {'; '.join(problems)}.")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
