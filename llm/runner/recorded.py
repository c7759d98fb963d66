"""The LM head of recorded steps: from the hidden states that one leaves to the logits, and the likeliest tokens.

Owns the calls, recorded once like those of the layers (`llm.runner.recorded`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from llm.base.watch import Watch
from llm.config.engine import DEFAULT_MAX_NUM_BATCHED_TOKENS
from llm.forward import AttentionMetadata, ForwardBatch, RecurrentMetadata
from llm.kernels.backend import Backend, NotRecordable, Program, SizedProgram

# Logits of one recorded step, in bytes. With more of them Python's share of a step is small.
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Scores:
    """The logits of a step's lines; the next step like it overwrites them.

    Attributes:
        logits: float32 [L, vocab].
        largest, tokens: float32 [L] and int64 [L], the largest logit of each line and its token, as of `argmax`.
    """

    logits: torch.Tensor
    largest: torch.Tensor
    tokens: torch.Tensor


class RecordedHead:
    """Computes the logits of `hidden`, float32 [L, H], which is always the same memory.

    Args:
        compute_logits: float32 [L, H] -> float32 [L, vocab_size].
    """

    def __init__(
        self,
        backend: Backend,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        hidden: torch.Tensor,
    ) -> None:
        self._program: Program | None = None
        if 4 * vocab_size * len(hidden) > _MOST_BYTES:
            return
        try:
            with backend.record() as program:
                logits = compute_logits(hidden)
                largest, tokens = backend.op("argmax")(logits)
        except NotRecordable:
            return
        self._program, self._scores = program, Scores(logits, largest, tokens)

    def run(self) -> Scores | None:
        """None: no kernels compute all of it, or it is too large."""
        return self._scores if self._program is not None and self._program.run() else None


# Memory is allocated for so many tokens.
MOST_TOKENS = DEFAULT_MAX_NUM_BATCHED_TOKENS
MOST_ROWS = 64
# Of the shorter recording; the other one has at least _LEAST tokens.
_FEW, _LEAST = 5, 8
Forward = Callable[[ForwardBatch], torch.Tensor]
Metadata = AttentionMetadata | RecurrentMetadata
# Threads, whether a row has an adapter.
_SizedKey = tuple[int, bool]


@dataclass
class _SizedStep:
    """`inputs` has the tensors that `program` reads, `hidden` and `taps` what it writes, for the recorded step."""

    program: SizedProgram
    inputs: _Inputs
    hidden: torch.Tensor
    taps: list[torch.Tensor]


class _Inputs:
    """The tensors of a batch with MOST_TOKENS tokens in MOST_ROWS rows; rows that a step does not have are empty."""

    def __init__(self, batch: ForwardBatch, max_blocks: int) -> None:
        self._groups: list[int] = []  # per state, the index of its metadata
        self._metadata: list[Metadata] = []
        known: dict[int, int] = {}
        for metadata in batch.metadata:
            if id(metadata) not in known:
                known[id(metadata)] = len(self._metadata)
                self._metadata.append(_own_metadata(metadata, max_blocks))
            self._groups.append(known[id(metadata)])
        self._first_layers = [self._groups.index(group) for group in range(len(self._metadata))]
        self._input_ids = batch.input_ids.new_zeros(MOST_TOKENS)
        self._positions = batch.positions.new_zeros(MOST_TOKENS)
        self._adapter_ids = None if batch.adapter_ids is None else batch.adapter_ids.new_zeros(MOST_TOKENS)

    def fill(self, batch: ForwardBatch, tokens: int) -> None:
        """Copy the first `tokens` of `batch`."""
        self._input_ids[:tokens].copy_(batch.input_ids[:tokens])
        self._positions[:tokens].copy_(batch.positions[:tokens])
        if self._adapter_ids is not None and batch.adapter_ids is not None:
            self._adapter_ids[:tokens].copy_(batch.adapter_ids[:tokens])
        for layer, own in zip(self._first_layers, self._metadata, strict=True):
            source = batch.metadata[layer]
            rows = len(source.seq_lens)
            if isinstance(own, RecurrentMetadata):
                own.slots[:rows].copy_(source.slots)
            else:
                own.block_table[:rows, : source.block_table.shape[1]].copy_(source.block_table)
                own.slot_mapping[:tokens].copy_(source.slot_mapping[:tokens])
            own.query_start_loc.fill_(tokens)
            own.query_start_loc[: rows + 1].copy_(source.query_start_loc.clamp(max=tokens))
            own.seq_lens[:rows].copy_(source.seq_lens)

    def batch(self, batch: ForwardBatch, tokens: int) -> ForwardBatch:
        """As `batch`, with the first `tokens` of these tensors."""
        own = [_first_tokens(item, tokens) for item in self._metadata]
        return replace(
            batch,
            input_ids=self._input_ids[:tokens],
            positions=self._positions[:tokens],
            adapter_ids=None if self._adapter_ids is None else self._adapter_ids[:tokens],
            metadata=[own[group] for group in self._groups],
            taps=[],
        )


class SizedReplay:
    """Computes the hidden states of steps with up to MOST_TOKENS tokens of up to MOST_ROWS rows.

    Args:
        backend: records.
        max_blocks: the largest width of a block table.
        forward: computes a step.
        rolls_back: as of `RecurrentSpec`, of all states; if not, steps that change recurrent states are not recorded.

    Attributes:
        refusal: why recording was impossible; None: it was not.
    """

    def __init__(self, backend: Backend, max_blocks: int, forward: Forward, rolls_back: bool = True) -> None:
        self.refusal: str | None = None
        self._rolls_back = rolls_back
        self._backend = backend
        self._max_blocks = max_blocks
        self._forward = forward
        self._steps: dict[_SizedKey, _SizedStep] = {}

    def run(self, batch: ForwardBatch, may_record: bool) -> torch.Tensor | None:
        """The hidden states, float32 [N, H], overwritten by the next call; None if the step is not replayed."""
        tokens = len(batch.input_ids)
        if self.refusal is not None or not self._fits(batch, tokens):
            return None
        key = (torch.get_num_threads(), batch.adapter_ids is not None)
        step = self._steps.get(key)
        if step is None:
            # Recording takes little longer than computing: the first step like this is recorded.
            return self._record(key, batch, tokens) if may_record and tokens >= _LEAST else None
        step.inputs.fill(batch, tokens)
        # If a kernel refuses its arguments, the caller runs the model, which raises the error.
        if not step.program.run(tokens):
            return None
        batch.taps = [_first(tap, tokens) for tap in step.taps]
        return _first(step.hidden, tokens)

    def _fits(self, batch: ForwardBatch, tokens: int) -> bool:
        return (
            1 < tokens <= MOST_TOKENS
            and len(batch.metadata[0].seq_lens_list) <= MOST_ROWS
            and all(isinstance(item, AttentionMetadata) or self._is_plain(item) for item in batch.metadata)
        )

    def _is_plain(self, metadata: RecurrentMetadata) -> bool:
        return self._rolls_back and metadata.stored is None

    def _record(self, key: _SizedKey, batch: ForwardBatch, tokens: int) -> torch.Tensor | None:
        inputs = _Inputs(batch, self._max_blocks)
        inputs.fill(batch, tokens)
        own, hidden = inputs.batch(batch, tokens), None
        try:
            with self._backend.record(tokens, MOST_TOKENS) as large:
                hidden = self._forward(own)
            with self._backend.record(_FEW, MOST_TOKENS, like=large) as small:
                self._forward(inputs.batch(batch, _FEW))
        except NotRecordable as reason:
            self.refusal = str(reason)
        except (IndexError, RuntimeError, ValueError) as reason:
            # A model that reads the rows' lengths does not fit a few of their tokens. If the step itself raised, the
            # caller computes it, which raises again; but states that have changed must not change twice.
            if hidden is None and any(isinstance(item, RecurrentMetadata) for item in batch.metadata):
                raise
            self.refusal = f"{type(reason).__name__}: {reason}"
        else:
            program = self._in_one(small, large)
            if program is not None:
                self._steps[key] = _SizedStep(program, inputs, hidden, own.taps)
        # Recorded or not, it has run.
        if hidden is not None:
            batch.taps = own.taps
        return hidden

    def _in_one(self, small: Program, large: Program) -> SizedProgram | None:
        try:
            return self._backend.for_any_size(small, large)
        except NotRecordable as reason:
            self.refusal = str(reason)
            return None


def _own_metadata(metadata: Metadata, max_blocks: int) -> Metadata:
    starts = metadata.query_start_loc.new_zeros(MOST_ROWS + 1)
    lengths = metadata.seq_lens.new_zeros(MOST_ROWS)
    if isinstance(metadata, RecurrentMetadata):
        none = [0] * (MOST_ROWS - len(metadata.seq_lens))
        return RecurrentMetadata(
            metadata.slots.new_zeros(MOST_ROWS),
            starts,
            lengths,
            metadata.query_lens_list + none,
            metadata.seq_lens_list + none,
        )
    return replace(
        metadata,
        block_table=metadata.block_table.new_zeros(MOST_ROWS, max_blocks),
        slot_mapping=metadata.slot_mapping.new_zeros(MOST_TOKENS),
        query_start_loc=starts,
        seq_lens=lengths,
        plan=None,
    )


def _first_tokens(metadata: Metadata, tokens: int) -> Metadata:
    if isinstance(metadata, RecurrentMetadata):
        return metadata
    return replace(metadata, slot_mapping=metadata.slot_mapping[:tokens])


def _first(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """The result for so many tokens, in the storage of the recorded one's."""
    return tensor.as_strided((tokens, *tensor.shape[1:]), tensor.stride(), tensor.storage_offset())


# With more tokens, the time between kernels is small compared to theirs.
MAX_TOKENS = 64
# Recorded steps to keep; the least recently used is dropped first.
_MAX_STEPS = 8
_MAX_SEEN = 64


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
