"""Pooling: from a prompt's hidden states to one vector, to its class logits, or to a vector per token.

Prompts may be computed in several chunks. Every number depends on its own prompt alone: sums are float64 and go token
by token, matrices are multiplied by the model's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from llm.engine.boundary import TOKENS, PoolingPlan
from llm.engine.step import PoolingRow
from llm.errors import CheckpointError
from llm.kernels.backend import Backend
from llm.kernels.weight import Weight
from llm.loading.checkpoint import Checkpoint
from llm.loading.sentence_transformers import DenseModule
from llm.models.encoder import ACTIVATE, normalised


class Classifier(Protocol):
    def classify(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Pooler:
    """Pools the hidden states of each step's rows.

    Args:
        model: computes class logits, of a plan that classifies.
    """

    def __init__(self, plan: PoolingPlan, model: Classifier, backend: Backend) -> None:
        self.plan = plan
        self._model = model
        self._dense = [_Dense(module, backend) for module in plan.modules.dense]
        self._backend = backend
        self._begun: dict[str, _Begun] = {}  # by request id; prompts of which a chunk has been computed

    def add(self, request_id: str, row: PoolingRow, first: int, hidden: torch.Tensor) -> None:
        """The hidden states [n, H] of a row's tokens from position `first` on; they may be overwritten later."""
        if first == 0 or request_id not in self._begun:  # after a preemption, a row begins again
            self._begun[request_id] = _Begun()
        self._begun[request_id].add(row, first, hidden)

    def finish(self, rows: Mapping[str, PoolingRow]) -> dict[str, np.ndarray]:
        """What each of these rows, all of whose tokens were added, asks for, float32: [size] or [tokens, size]."""
        if not rows:
            return {}
        pooled = [self._begun.pop(request_id).pooled(row) for request_id, row in rows.items()]
        counts = [len(values) for values in pooled]
        values = self._backend.upload(np.concatenate(pooled))
        if self.plan.task == "classify":
            found = self._model.classify(values)
        else:
            found = values
            for dense in self._dense:
                found = dense(found)
        (on_host,) = self._backend.download(found)
        parts = np.split(on_host, np.cumsum(counts)[:-1])
        return {
            request_id: self._activated(row, part) for (request_id, row), part in zip(rows.items(), parts, strict=True)
        }

    def forget(self) -> None:
        """Drop what was begun, after a failed step."""
        self._begun.clear()

    def _activated(self, row: PoolingRow, values: np.ndarray) -> np.ndarray:
        """float32 [rows, size], of one prompt."""
        wide = values.astype(np.float64)
        if self.plan.task == "classify":
            wide = ACTIVATE[self.plan.activation](wide) if row.activates else wide
        else:
            wide = wide[:, : row.dimensions] if row.dimensions else wide
            wide = normalised(wide) if row.activates else wide
        result = wide.astype(np.float32)
        return result if row.kind == TOKENS else result[0]


@dataclass
class _Begun:
    """The tokens of one prompt so far: their sum, the one that is wanted, or all."""

    total: np.ndarray | None = None
    count: int = 0
    kept: list[np.ndarray] = field(default_factory=list)

    def add(self, row: PoolingRow, first: int, hidden: torch.Tensor) -> None:
        if row.kind == "LAST":
            self.kept = [_copied(hidden[-1:])]
        elif row.kind == "CLS":
            self.kept += [_copied(hidden[:1])] if first == 0 else []
        elif row.kind == TOKENS:
            self.kept.append(_copied(hidden))
        else:
            self._sum(_copied(hidden[max(0, row.first - first) :]))

    def _sum(self, values: np.ndarray) -> None:
        """Adds token by token, so that a sum does not depend on the chunks."""
        self.count += len(values)
        start = np.zeros((1, values.shape[1])) if self.total is None else self.total[None]
        self.total = np.add.reduce(np.concatenate((start, values)), axis=0)

    def pooled(self, row: PoolingRow) -> np.ndarray:
        """float32 [rows, H]."""
        if row.kind != "MEAN":
            return np.concatenate(self.kept)
        if self.total is None:
            raise RuntimeError("a mean of no tokens")
        return (self.total / max(1, self.count)).astype(np.float32)[None]


def _copied(hidden: torch.Tensor) -> np.ndarray:
    return hidden.detach().cpu().numpy().copy()


class _Dense:
    """activation(x W^T + b) with the matrix of a sentence-transformers folder, by the backend's GEMM."""

    def __init__(self, module: DenseModule, backend: Backend) -> None:
        self._weight = _read_dense(module, backend)
        self._linear = backend.ops.linear
        self._activate = ACTIVATE[module.activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [R, inputs] -> [R, outputs]."""
        wide = self._activate(self._linear(x, self._weight).cpu().numpy().astype(np.float64))
        return torch.from_numpy(wide.astype(np.float32)).to(x.device)


def _read_dense(module: DenseModule, backend: Backend) -> Weight:
    expected: dict[str, tuple[int, ...]] = {"linear.weight": (module.outputs, module.inputs)}
    if module.bias:
        expected["linear.bias"] = (module.outputs,)
    checkpoint = Checkpoint.open(module.folder)
    try:
        found = {name: tuple(info.shape) for name, info in checkpoint.tensors.items()}
        if found != expected:
            raise CheckpointError(f"{module.folder} holds tensors {found}, its config.json means {expected}.")
        tensors = {name: checkpoint.load(name).float() for name in expected}
    finally:
        checkpoint.close()
    weight: Weight = backend.ops.pack(tensors["linear.weight"].clone())
    return replace(weight, bias=tensors["linear.bias"].clone().to(backend.device)) if module.bias else weight
