"""Replayed steps: the kernel calls of a step are recorded once and replayed without Python.

Decode steps of R batch rows with k lines each (one, and one more per draft) make the same calls in the same order; only
token ids, positions, slots and block tables differ. Owns the recorded step of each (R, k) and the tensors it reads.
Other steps are replayed by `replay_sizes`, as are decode steps that have no recording of their own yet.
Replay pays because the weights of a step evict Python's code and data from the caches: between two kernels Python is
several times slower than elsewhere.

Used only if kernels compute everything (`EngineConfig.invariant`). If recording finds that PyTorch computes between the
model's kernels, steps are not replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from llm.base.watch import Watch
from llm.engine.recorded_head import RecordedHead, Scores
from llm.engine.replay_sizes import SizedReplay
from llm.forward import AttentionMetadata, ForwardBatch, RecurrentMetadata
from llm.kernels.backend import Backend, NotRecordable, Program

Metadata = AttentionMetadata | RecurrentMetadata

# With more tokens, the time between kernels is small compared to theirs.
MAX_TOKENS = 64
# Recorded steps to keep; the least recently used is dropped first.
_MAX_STEPS = 8
_MAX_SEEN = 64
Forward = Callable[[ForwardBatch], torch.Tensor]


# Rows, lines per row, threads, whether a row has an adapter, whether recurrent states are not to see drafts.
_Key = tuple[int, int, int, bool, bool]


@dataclass
class _Step:
    """A recorded step: `batch` has the tensors it reads, `hidden` is its result.

    `first_layers`: the first layer of each group; the layers of a group share one metadata object.
    `tables`: first layer -> the block table that was copied last: there is a new tensor when a table has changed.
    `head`: what computes the logits of `hidden`, once it was asked for them.
    """

    program: Program
    batch: ForwardBatch
    hidden: torch.Tensor
    first_layers: list[int]
    tables: dict[int, torch.Tensor]
    head: RecordedHead | None = None


class DecodeReplay:
    """Computes the hidden states of decode steps.

    Args:
        model: its `forward` is recorded.
        backend: the model's backend, which records.
        max_blocks: the largest width of a block table.
        forward: computes a step; None: the model's `forward`.
        record_head: makes the LM head of a recorded step from its hidden states; None: there are no `scores`.
        rolls_back: as of `SizedReplay`.

    Attributes:
        refusal: why recording was impossible; None: it was not.
    """

    def __init__(
        self,
        model: Any,
        backend: Backend,
        max_blocks: int,
        forward: Forward | None = None,
        record_head: Callable[[torch.Tensor], RecordedHead] | None = None,
        rolls_back: bool = True,
    ) -> None:
        self.refusal: str | None = None
        self._record_head = record_head
        self._last: _Step | None = None  # the step that ran last, if it was replayed
        self._forward: Forward = forward or model.forward
        self._is_watched = Watch(model.modules())
        self._backend = backend
        self._max_blocks = max_blocks
        self.sizes = SizedReplay(backend, max_blocks, self._forward, rolls_back)
        self._steps: dict[_Key, _Step] = {}
        self._seen: dict[_Key, None] = {}  # the last kinds of steps, the latest last

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """`model.forward(batch)`, float32 [N, H], overwritten by the next call; None if this step is not replayed."""
        self._last = None
        if not batch.metadata or not self._is_plain(batch):
            return None
        lines = self._lines_per_row(batch)
        if not lines:
            return self.sizes.run(batch, may_record=True)
        rows, stores_less = len(batch.input_ids) // lines, lines > 1 and any(map(_stores_less, batch.metadata))
        key = (rows, lines, torch.get_num_threads(), batch.adapter_ids is not None, stores_less)
        step = self._steps.pop(key, None)
        if step is None:
            if len(batch.input_ids) == 1 or self._came_before(key):
                return self._record(key, batch)
            return self.sizes.run(batch, may_record=False)
        self._steps[key] = step
        _fill(step.batch, batch, step.first_layers, step.tables)
        # If a kernel refuses its arguments, the caller runs the model, which raises the error.
        if not step.program.run():
            return None
        if stores_less:
            _share_calls(step.batch, batch)
        batch.taps = step.batch.taps
        self._last = step
        return step.hidden

    def scores(self, hidden: torch.Tensor) -> Scores | None:
        """The logits of all tokens of the step that ran last, whose hidden states these are; None: they are not."""
        step = self._last
        if step is None or hidden is not step.hidden or self._record_head is None:
            return None
        if step.head is None:
            step.head = self._record_head(hidden)
        return step.head.run()

    def _came_before(self, key: _Key) -> bool:
        """True from the second step of this kind on: more are likely to follow."""
        came_before = key in self._seen
        self._seen.pop(key, None)
        self._seen[key] = None
        if len(self._seen) > _MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        return came_before

    def _lines_per_row(self, batch: ForwardBatch) -> int:
        """Lines per batch row; 0 if this is no decode step or has too many tokens."""
        tokens = len(batch.input_ids)
        if tokens > MAX_TOKENS:
            return 0
        counts = batch.metadata[0].query_lens_list
        if len(counts) == tokens:
            return 1
        # With drafts every token needs logits; a chunk of a prompt has tokens that need none.
        same = len(batch.logits_indices) == tokens and len(set(counts)) == 1
        return counts[0] if same else 0

    def _is_plain(self, batch: ForwardBatch) -> bool:
        return (
            self.refusal is None
            and batch.positions.dim() == 1
            and batch.inputs_embeds is None
            and not batch.extensions
            # A replay would skip hooks and patches.
            and not self._is_watched()
        )

    def _record(self, key: _Key, batch: ForwardBatch) -> torch.Tensor | None:
        first_layers = list(
            {id(metadata): layer for layer, metadata in reversed(list(enumerate(batch.metadata)))}.values()
        )
        own, tables = self._own_batch(batch), dict[int, torch.Tensor]()
        _fill(own, batch, first_layers, tables)
        hidden = None
        try:
            with self._backend.record() as program:
                hidden = self._forward(own)
        except NotRecordable as reason:
            self.refusal = str(reason)
            if hidden is None:
                return None
        else:
            if len(self._steps) == _MAX_STEPS:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = _Step(program, own, hidden, first_layers, tables)
        # Recorded or not, it has run, and recurrent states have changed: it must not be computed again.
        batch.taps = own.taps
        _share_calls(own, batch)
        return hidden

    def _own_batch(self, batch: ForwardBatch) -> ForwardBatch:
        """A copy with its own tensors, and block tables of full width; layers of a group still share metadata."""
        groups = {id(metadata): self._own_metadata(metadata) for metadata in batch.metadata}
        return replace(
            batch,
            input_ids=batch.input_ids.clone(),
            positions=batch.positions.clone(),
            adapter_ids=None if batch.adapter_ids is None else batch.adapter_ids.clone(),
            metadata=[groups[id(metadata)] for metadata in batch.metadata],
            taps=[],
        )

    def _own_metadata(self, metadata: Metadata) -> Metadata:
        own: Metadata = copy(metadata)
        for name, tensor in _tensors(metadata).items():
            setattr(own, name, tensor.clone())
        if isinstance(own, AttentionMetadata):
            own.block_table = own.block_table.new_zeros(len(own.block_table), self._max_blocks)
            own.plan = None
        else:
            own.calls = []
        return own


def _fill(own: ForwardBatch, batch: ForwardBatch, first_layers: list[int], tables: dict[int, torch.Tensor]) -> None:
    """Copy the inputs of `batch` into the tensors of a recorded step."""
    own.input_ids.copy_(batch.input_ids)
    own.positions.copy_(batch.positions)
    if own.adapter_ids is not None and batch.adapter_ids is not None:
        own.adapter_ids.copy_(batch.adapter_ids)
    for layer in first_layers:
        target, source = own.metadata[layer], batch.metadata[layer]
        if not isinstance(target, AttentionMetadata):
            for name, tensor in _tensors(source).items():
                getattr(target, name).copy_(tensor)
            continue
        # Where rows start follows from their number and that of their lines.
        target.seq_lens.copy_(source.seq_lens)
        target.slot_mapping.copy_(source.slot_mapping)
        table = source.block_table
        if tables.get(layer) is not table:
            # It is only as wide as the step's longest request needs.
            target.block_table[:, : table.shape[1]].copy_(table)
            tables[layer] = table


def _stores_less(metadata: Metadata) -> bool:
    return isinstance(metadata, RecurrentMetadata) and metadata.stored is not None


def _share_calls(own: ForwardBatch, batch: ForwardBatch) -> None:
    """Drafts that are accepted are in the tensors of the recorded step."""
    for ours, theirs in zip(own.metadata, batch.metadata, strict=True):
        if _stores_less(ours):
            theirs.calls = ours.calls


def _tensors(metadata: Metadata) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(metadata).items() if isinstance(value, torch.Tensor)}
