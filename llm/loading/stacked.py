"""Tensors that hold every expert's weight, as one tensor per expert: what the rest of loading knows.

Owns cutting them while they stream. Which tensors they are and what a slice holds is data on the model class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from llm.errors import CheckpointError
from llm.loading.weight_map import WeightMap
from llm.models.interface import Cut


def per_expert(name: str, tensor: torch.Tensor, weight_map: WeightMap) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint's tensor as (name, tensor) of each expert: views; itself where it is not stacked.

    Raises `CheckpointError` where its first dimension is not the number of experts.
    """
    ending = _ending(name, weight_map.stacked)
    start = name[: len(name) - len(ending)] if ending else ""
    experts = weight_map.module(f"{start}experts")
    count: int | None = getattr(experts, "num_experts", None)
    if ending is None or count is None:
        yield name, tensor
        return
    if tensor.dim() < 2 or tensor.shape[0] != count:
        raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, the model has {count} experts.")
    for index, part in enumerate(tensor):
        for last, weight in weight_map.stacked[ending](part):
            yield f"{start}experts.{index}.{last}", weight


def _ending(name: str, stacked: Mapping[str, Cut]) -> str | None:
    return next((ending for ending in stacked if name.endswith(f".{ending}")), None)
