"""Decoding steps without Python between the operations: the kernel calls of a step, recorded once and repeated.

A decoding step of R rows with k lines each (one, and one more per draft) makes the same calls in the same order every
time; only ids, positions, slots and block tables differ. Owns the recorded step of each (R, k) and the tensors it
reads. Weights streaming through the cache push Python out of it, so that between two kernels it costs several times
what it does elsewhere.

Used only where kernels compute everything (`EngineConfig.invariant`); a model that lets PyTorch compute between its
kernels is found out while recording, and runs as before.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from llm.base.custom_op import is_watched
from llm.forward import AttentionMetadata, ForwardBatch, RecurrentMetadata
from llm.kernels.backend import Backend, NotRecordable, Program

Metadata = AttentionMetadata | RecurrentMetadata

# Beyond so many tokens the time between kernels is small beside theirs.
MAX_TOKENS = 64
# Recorded steps that are kept; the one used longest ago goes first.
_MAX_STEPS = 4


_Key = tuple[int, int, int]  # rows, lines per row, threads


@dataclass
class _Step:
    """A recorded step: `batch` holds the tensors it reads, `hidden` is what it writes.

    `first_layers`: of each group of layers, whose metadata are one object.
    """

    program: Program
    batch: ForwardBatch
    hidden: torch.Tensor
    first_layers: list[int]


class DecodeReplay:
    """Computes hidden states of decoding steps.

    Args:
        model: whose `forward` is recorded.
        backend: what it computes with, which records.
        max_blocks: the widest a block table gets.

    Attributes:
        refusal: what made recording impossible, None so far.
    """

    def __init__(self, model: Any, backend: Backend, max_blocks: int) -> None:
        self.refusal: str | None = None
        self._model = model
        self._modules = list(model.modules())
        self._backend = backend
        self._max_blocks = max_blocks
        self._steps: dict[_Key, _Step] = {}
        self._last: _Key | None = None

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """`model.forward(batch)`, float32 [N, H]; the memory is used again by the next call. None: not this step."""
        before, self._last = self._last, None
        lines = self._lines_per_row(batch)
        if not lines:
            return None
        key = self._last = (len(batch.input_ids) // lines, lines, torch.get_num_threads())
        step = self._steps.pop(key, None)
        if step is None:
            # Once more of the same: more are likely to follow.
            return self._record(key, batch) if key == before else None
        self._steps[key] = step
        _fill(step.batch, batch, step.first_layers)
        # Where a kernel refuses its arguments the model is asked: it then says so.
        return step.hidden if step.program.run() else None

    def _lines_per_row(self, batch: ForwardBatch) -> int:
        """0: this is no decoding step, or one that cannot be repeated."""
        tokens = len(batch.input_ids)
        if tokens > MAX_TOKENS or not batch.metadata or not self._is_plain(batch):
            return 0
        counts = batch.metadata[0].query_lens_list
        if len(counts) == tokens:
            return 1
        # With drafts the logits of every token are needed; a chunk of a prompt has tokens that nobody asks for.
        same = len(batch.logits_indices) == tokens and len(set(counts)) == 1
        return counts[0] if same else 0

    def _is_plain(self, batch: ForwardBatch) -> bool:
        return (
            self.refusal is None
            and batch.positions.dim() == 1
            and batch.inputs_embeds is None
            and batch.adapter_ids is None
            and not batch.extensions
            # Hooks are Python, and repeating skips it.
            and not is_watched(self._modules)
        )

    def _record(self, key: _Key, batch: ForwardBatch) -> torch.Tensor | None:
        first_layers = list(
            {id(metadata): layer for layer, metadata in reversed(list(enumerate(batch.metadata)))}.values()
        )
        own = self._own_batch(batch)
        _fill(own, batch, first_layers)
        try:
            with self._backend.record() as program:
                hidden = self._model.forward(own)
        except NotRecordable as reason:
            self.refusal = str(reason)
            return None
        if len(self._steps) == _MAX_STEPS:
            del self._steps[next(iter(self._steps))]
        self._steps[key] = _Step(program, own, hidden, first_layers)
        return hidden

    def _own_batch(self, batch: ForwardBatch) -> ForwardBatch:
        """Tensors of its own, block tables as wide as they get; layers of a group share them as before."""
        groups = {id(metadata): self._own_metadata(metadata) for metadata in batch.metadata}
        return replace(
            batch,
            input_ids=batch.input_ids.clone(),
            positions=batch.positions.clone(),
            metadata=[groups[id(metadata)] for metadata in batch.metadata],
        )

    def _own_metadata(self, metadata: Metadata) -> Metadata:
        own: Metadata = copy(metadata)
        for name, tensor in _tensors(metadata).items():
            setattr(own, name, tensor.clone())
        if isinstance(own, AttentionMetadata):
            own.block_table = own.block_table.new_zeros(len(own.block_table), self._max_blocks)
            own.plan = None
        return own


def _fill(own: ForwardBatch, batch: ForwardBatch, first_layers: list[int]) -> None:
    """Write what varies into the tensors of a recorded step."""
    own.input_ids.copy_(batch.input_ids)
    own.positions.copy_(batch.positions)
    for layer in first_layers:
        target = _tensors(own.metadata[layer])
        for name, source in _tensors(batch.metadata[layer]).items():
            # A block table is as wide as the longest row of the step.
            (target[name][:, : source.shape[1]] if source.dim() == 2 else target[name]).copy_(source)


def _tensors(metadata: Metadata) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(metadata).items() if isinstance(value, torch.Tensor)}
