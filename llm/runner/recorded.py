"""Recorded steps: what a step computes is recorded once and replayed without Python.

What may be recorded, in which sizes and how is the backend's (`Backend.step_sizes`, `Backend.record`): on a CPU the
calls of its kernels, on a GPU a graph of its kernels. Here are the tensors that a recorded step reads: they stay where
they are, and every step of its size is copied into them. The result is read from where the recording left it.

On a CPU replay pays because the weights of a step evict Python's code and data from the caches: between two kernels
Python is several times slower than elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from llm.base.watch import Watch
from llm.forward import AttentionMetadata, ForwardBatch, RecurrentMetadata
from llm.kernels.backend import Backend, NotRecordable, PartFunction, PartResults, Recording, StepSize

Metadata = AttentionMetadata | RecurrentMetadata

_MAX_SEEN = 64
# Logits of a step in bytes, for its LM head to be recorded. With more of them Python's share of a step is small.
_MOST_LOGITS_BYTES = 4 << 20

# Size, whether a row has an adapter, whether stored recurrent states are not to see drafts.
_Key = tuple[StepSize, bool, bool]


class Scores(NamedTuple):
    """The logits of a step's tokens; the next step like it overwrites them.

    Attributes:
        logits: float32 [N, vocab].
        largest, tokens: float32 [N] and int64 [N], the largest logit of each token and its id, as of `argmax`.
    """

    logits: torch.Tensor
    largest: torch.Tensor
    tokens: torch.Tensor


@dataclass
class _Step:
    """A recorded step. `head`: what computes the logits of its hidden states, once it was asked for them."""

    recording: Recording
    inputs: StepInputs
    head: Recording | None = None


class RecordedSteps:
    """Computes the hidden states of steps that are recorded.

    Args:
        model: its `forward` is recorded. Its modules are watched: a replay would skip hooks and patches.
        max_blocks: the largest width of a block table.
        forward: computes a step in place of the model's.
        compute_logits: float32 [L, H] -> float32 [L, vocab_size]; None: there are no `scores`.
        rolls_back: no recurrent state sees a rejected draft; if False, steps of any size are not recorded where there
            are such states.
        repeats: a step may be computed twice, to record it and then to look into its replay.
        parts: the layers of the model. Where something looks inside the model (`ForwardBatch.inside`), a replay stops
            at the layers that are concerned: one that is looked at within is computed, and what one takes and gives is
            read and changed between replays.
        computing: the context in which layers are computed that read the batch's adapters, `adapter_ids`.

    Attributes:
        refusal: why steps cannot be recorded; None: they can, as far as is known.
        any_size_refusal: why those of any number of tokens per row cannot.
    """

    def __init__(
        self,
        model: Any,
        backend: Backend,
        max_blocks: int,
        forward: Callable[[ForwardBatch], torch.Tensor] | None = None,
        compute_logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
        vocab_size: int = 0,
        rolls_back: bool = True,
        repeats: bool = True,
        parts: Iterable[nn.Module] = (),
        computing: Callable[[torch.Tensor | None], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.refusal: str | None = None
        self.any_size_refusal: str | None = None
        self._is_watched = Watch(model.modules())
        self._backend = backend
        self._max_blocks = max_blocks
        self._model, self._forward = model, forward
        self._parts = tuple(parts)
        self._computing = computing
        # Module -> the part that it is, or is in.
        self._part_of = {module: part for part in self._parts for module in part.modules()}
        self._compute_logits = compute_logits
        self._vocab_size = vocab_size
        self._rolls_back = rolls_back
        self._repeats = repeats
        self._steps: dict[_Key, _Step] = {}  # with `tokens_per_row`, the latest used last
        self._any_size: dict[_Key, _Step] = {}
        self._seen: dict[_Key, int] = {}  # how often, of the last kinds of steps, the latest last
        # The step that was replayed last, and its hidden states.
        self._last: tuple[_Step, torch.Tensor] | None = None

    @property
    def is_watched(self) -> bool:
        """A module of the model has a hook or a patch."""
        return self._is_watched()

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """`forward(batch)`, float32 [N, H], overwritten by the next call; None if this step is not recorded."""
        self._last = None
        if self.refusal is not None or not batch.metadata or not self._is_plain(batch):
            return None
        tokens, counts, tokens_per_row = len(batch.input_ids), batch.metadata[0].query_lens_list, _tokens_per_row(batch)
        has_adapters, stores_less = batch.adapter_ids is not None, any(map(_stores_less, batch.metadata))
        for size, after in self._backend.step_sizes(tokens, len(counts), tokens_per_row):
            if not size.tokens_per_row and not self._takes_any_size(batch, size.is_whole):
                continue
            key = size, has_adapters, stores_less
            step = (self._steps if size.tokens_per_row else self._any_size).get(key)
            if step is not None:
                return self._replay(key, step, batch)
            if after is None or self._times_seen(key) < after:
                continue
            if batch.inside is None:
                return self._record(key, batch)
            if not self._repeats or not self._may_repeat(batch):
                continue
            with batch.inside.suspended():
                self._record(key, batch)
            step = (self._steps if size.tokens_per_row else self._any_size).get(key)
            return None if step is None else self._replay(key, step, batch)
        return None

    def scores(self, hidden: torch.Tensor) -> Scores | None:
        """The logits of the step that was replayed last, whose hidden states these are; None: they are not."""
        if self._last is None or hidden is not self._last[1] or self._compute_logits is None:
            return None
        step, compute_logits = self._last[0], self._compute_logits
        if step.head is None:
            recorded = step.recording.results[0]
            if 4 * self._vocab_size * len(recorded) > _MOST_LOGITS_BYTES:
                return None

            def compute(tokens: int) -> Sequence[torch.Tensor]:
                logits = compute_logits(recorded)
                return logits, *self._backend.ops.argmax(logits)

            try:
                step.head = self._backend.record(compute, len(recorded))
            except NotRecordable:
                self._compute_logits = None
                return None
        found = None if step.head.refusal else step.head.run(len(hidden))
        return None if found is None else Scores(*found)

    def _replay(self, key: _Key, step: _Step, batch: ForwardBatch) -> torch.Tensor | None:
        tokens, concerned = len(batch.input_ids), self._concerned(batch)
        if any(part not in step.recording.parts for part in concerned):
            return None
        step.inputs.fill(batch, tokens)
        found = self._run(step, batch, concerned) if concerned else step.recording.run(tokens)
        if found is None:  # a kernel refused its arguments: the caller runs the model, which raises the error
            if batch.inside is not None:
                batch.inside.replayed.clear()
            return None
        hidden, *batch.taps = found
        step.inputs.share_calls(batch)
        if key[0].tokens_per_row:
            self._steps[key] = self._steps.pop(key)
            self._last = step, hidden
        return hidden

    def _run(
        self, step: _Step, batch: ForwardBatch, concerned: dict[nn.Module, set[nn.Module]]
    ) -> Sequence[torch.Tensor] | None:
        """Replay a step, and stop at the parts in which modules are looked at."""
        recording, tokens, done = step.recording, len(batch.input_ids), 0
        own = step.inputs.batch(batch, tokens)
        for part, modules in concerned.items():
            place = recording.parts[part]
            if recording.run(tokens, done, place.first) is None:
                return None
            self._run_part(recording, part, own, tokens, replays=modules == {part})
            done = place.last
        return recording.run(tokens, done)

    def _run_part(
        self, recording: Recording, module: nn.Module, batch: ForwardBatch, tokens: int, replays: bool
    ) -> None:
        """Call a part whose arguments are in the recording's memory, and put there what it returns.

        Args:
            batch: with the tensors of the recording.
            replays: only what it takes and returns is looked at: between the two the recording is replayed.
        """
        place, inside = recording.parts[module], batch.inside
        arguments = [batch if isinstance(item, ForwardBatch) else item for item in place.arguments(tokens)]

        def replay(*given: object) -> PartResults:
            _put(given, place.arguments(tokens))
            if recording.run(tokens, place.first, place.last) is None:
                raise RuntimeError("a kernel refuses what the step before it computed")
            return place.results(tokens)

        if replays and inside is not None:
            inside.replayed[module] = replay
        with nullcontext() if self._computing is None else self._computing(batch.adapter_ids):
            _put(module(*arguments), place.results(tokens))

    def _concerned(self, batch: ForwardBatch) -> dict[nn.Module, set[nn.Module]]:
        """The parts in which modules are looked at, in order, with these; a module in none stands for itself."""
        found: dict[nn.Module, set[nn.Module]] = {}
        for module in () if batch.inside is None else batch.inside.modules:
            found.setdefault(self._part_of.get(module, module), set()).add(module)
        return {part: found[part] for part in self._parts if part in found} | found

    def _may_repeat(self, batch: ForwardBatch) -> bool:
        """True if a step may be computed twice, and its recording will have all parts that are concerned."""
        has_states = any(isinstance(item, RecurrentMetadata) for item in batch.metadata)
        return self._backend.stops and not has_states and self._concerned(batch).keys() <= set(self._parts)

    @contextmanager
    def _noting_parts(self) -> Iterator[None]:
        """Inside, what is recorded has the parts. Like a captured module's, their `forward` is replaced uncounted."""
        with ExitStack() as stack:
            for part in self._parts if self._backend.stops else ():
                own = vars(part)
                forward, before = part.forward, own.get("forward")
                own["forward"] = partial(_call_part, self._backend, part, forward)
                if before is None:
                    stack.callback(own.pop, "forward")
                else:
                    stack.callback(own.__setitem__, "forward", before)
            yield

    def _record(self, key: _Key, batch: ForwardBatch) -> torch.Tensor | None:
        size, tokens = key[0], len(batch.input_ids)
        # A recording of whatever computes would keep the lengths that a computation read on the host.
        inputs = StepInputs(batch, size, self._max_blocks, hides_lengths=not self._backend.records_kernels_only)
        inputs.fill(batch, tokens)

        def compute(tokens: int) -> Sequence[torch.Tensor]:
            own = replace(inputs.batch(batch, tokens), inside=None)
            hidden = self._model.forward(own) if self._forward is None else self._forward(own)
            return hidden, *own.taps

        try:
            with self._noting_parts():
                recording = self._backend.record(compute, tokens, size, lambda tokens: inputs.fill(batch, tokens))
        except NotRecordable as reason:
            if size.tokens_per_row:
                self.refusal = str(reason)
            else:
                self.any_size_refusal = str(reason)
            return None
        except (IndexError, RuntimeError, ValueError) as error:
            # The caller computes the step, which raises again; but states that have changed must not change twice.
            if size.tokens_per_row or any(isinstance(item, RecurrentMetadata) for item in batch.metadata):
                raise
            self.any_size_refusal = f"{type(error).__name__}: {error}"
            return None
        if recording.refusal and size.tokens_per_row:
            self.refusal = recording.refusal
        elif recording.refusal:
            self.any_size_refusal = recording.refusal
        elif not size.tokens_per_row:
            self._any_size[key] = _Step(recording, inputs)
        else:
            if len(self._steps) == self._backend.most_recordings:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = _Step(recording, inputs)
        # Recorded or not, it has been computed, and recurrent states have changed.
        hidden, *batch.taps = [item[:tokens] for item in recording.results]
        inputs.share_calls(batch)
        return hidden

    def _times_seen(self, key: _Key) -> int:
        """How many steps of this kind there were before this one, among the last kinds."""
        times = self._seen.pop(key, 0)
        self._seen[key] = times + 1
        if len(self._seen) > _MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        return times

    def _is_plain(self, batch: ForwardBatch) -> bool:
        return (
            batch.positions.dim() == 1
            and batch.inputs_embeds is None
            and batch.images is None
            and not batch.extensions
            and (batch.inside is None or not any(map(_stores_less, batch.metadata)))
            and not self.is_watched
        )

    def _takes_any_size(self, batch: ForwardBatch, is_whole: bool) -> bool:
        if self.any_size_refusal is not None:
            return False
        recurrent = [item for item in batch.metadata if isinstance(item, RecurrentMetadata)]
        if recurrent and is_whole:
            return False
        return not recurrent or (self._rolls_back and not any(map(_stores_less, recurrent)))


def _call_part(backend: Backend, part: nn.Module, forward: PartFunction, *arguments: object) -> PartResults:
    batches = [item for item in arguments if isinstance(item, ForwardBatch)]
    if any(batch.inputs_embeds is not None for batch in batches):  # which no other step has
        return forward(*arguments)
    return backend.record_part(part, forward, arguments)


def _put(values: Sequence[object], targets: Sequence[object]) -> None:
    """Copy the tensors that are elsewhere; what is copied may be in the memory of another target."""
    moved = [
        (value.clone(), target)
        for value, target in zip(values, targets, strict=True)
        if isinstance(value, torch.Tensor)
        and isinstance(target, torch.Tensor)
        and value.data_ptr() != target.data_ptr()
    ]
    for value, target in moved:
        target.copy_(value)


class StepInputs:
    """The tensors that a recorded step of this size reads; layers of a group share their metadata.

    What a step has less than the size is padding: token 0, in block 0 and slot 0. Lists of lengths stay those of the
    step that was recorded: what is recorded must read the tensors. `hides_lengths`: it cannot read the lists.
    """

    def __init__(self, batch: ForwardBatch, size: StepSize, max_blocks: int, hides_lengths: bool = False) -> None:
        self._size, self._hides_lengths = size, hides_lengths
        self._groups: list[int] = []  # per state, the index of its metadata
        self._first_layers: list[int] = []  # per metadata, the first state of its group
        self._metadata: list[Metadata] = []
        known: dict[int, int] = {}
        for layer, metadata in enumerate(batch.metadata):
            if id(metadata) not in known:
                known[id(metadata)] = len(self._metadata)
                self._first_layers.append(layer)
                self._metadata.append(self._own(metadata, max_blocks))
            self._groups.append(known[id(metadata)])
        # Of each group, the block table that was copied last: there is a new tensor when a table has changed.
        self._tables: list[torch.Tensor | None] = [None] * len(self._metadata)
        self._tokens = 0
        self._input_ids = batch.input_ids.new_zeros(size.tokens)
        self._positions = batch.positions.new_zeros(size.tokens)
        self._adapter_ids = None if batch.adapter_ids is None else batch.adapter_ids.new_zeros(size.tokens)

    def fill(self, batch: ForwardBatch, tokens: int) -> None:
        """Copy the first `tokens` of `batch`, and pad the rest."""
        fewer, self._tokens, tokens_per_row = tokens < self._tokens, tokens, self._size.tokens_per_row
        _copy(self._input_ids, batch.input_ids, tokens, fewer)
        _copy(self._positions, batch.positions, tokens, fewer)
        if self._adapter_ids is not None and batch.adapter_ids is not None:
            _copy(self._adapter_ids, batch.adapter_ids, tokens, fewer)
        for group, layer in enumerate(self._first_layers):
            own, source = self._metadata[group], batch.metadata[layer]
            rows = len(source.seq_lens) if tokens else 0
            if isinstance(own, AttentionMetadata):
                _copy(own.slot_mapping, source.slot_mapping, tokens, fewer)
                self._copy_table(group, own, source.block_table, rows)
            else:
                _copy(own.slots, source.slots, rows, fewer)
                if own.stored is not None and source.stored is not None:
                    _copy(own.stored, source.stored, rows, fewer, tokens_per_row)
            _copy(own.seq_lens, source.seq_lens, rows, fewer, tokens_per_row)
            if not tokens_per_row:
                own.query_start_loc.fill_(tokens)
                own.query_start_loc[: rows + 1].copy_(source.query_start_loc[: rows + 1].clamp(max=tokens))

    def batch(self, batch: ForwardBatch, tokens: int) -> ForwardBatch:
        """As `batch`, with the first `tokens` of these tensors; with all of them where padding is computed."""
        count = self._size.tokens if self._size.tokens_per_row or self._size.is_whole else tokens
        own = [item if isinstance(item, RecurrentMetadata) else _first_tokens(item, count) for item in self._metadata]
        return replace(
            batch,
            input_ids=self._input_ids[:count],
            positions=self._positions[:count],
            adapter_ids=None if self._adapter_ids is None else self._adapter_ids[:count],
            metadata=[own[group] for group in self._groups],
            taps=[],
        )

    def share_calls(self, batch: ForwardBatch) -> None:
        """Drafts that are accepted are in these tensors: what changes the states by them reads from here."""
        for group, layer in enumerate(self._first_layers):
            own, theirs = self._metadata[group], batch.metadata[layer]
            if isinstance(own, RecurrentMetadata) and own.stored is not None:
                theirs.calls = own.calls

    def _copy_table(self, group: int, own: AttentionMetadata, table: torch.Tensor, rows: int) -> None:
        if self._tables[group] is table and rows:
            return
        # It is only as wide as the step's longest request needs.
        own.block_table[:rows, : table.shape[1]].copy_(table[:rows])
        if self._size.tokens_per_row and rows < len(own.block_table):
            own.block_table[rows:].zero_()
        self._tables[group] = table if rows else None

    def _own(self, metadata: Metadata, max_blocks: int) -> Metadata:
        rows, tokens_per_row, own = self._size.rows, self._size.tokens_per_row, copy(metadata)
        if tokens_per_row or isinstance(own, RecurrentMetadata):
            own.query_lens_list = _padded(metadata.query_lens_list, rows, tokens_per_row)
            own.seq_lens_list = _padded(metadata.seq_lens_list, rows, tokens_per_row)
        elif self._size.is_whole:
            own.query_lens_list = [self._size.tokens] * rows  # the most that each may have
        if self._hides_lengths:
            own.seq_lens_list = _HiddenLengths()
        own.seq_lens = metadata.seq_lens.new_full((rows,), tokens_per_row)
        own.query_start_loc = metadata.query_start_loc.new_zeros(rows + 1)
        if tokens_per_row:
            own.query_start_loc += torch.arange(rows + 1, device=own.query_start_loc.device) * tokens_per_row
        if isinstance(own, AttentionMetadata):
            own.block_table = own.block_table.new_zeros(rows, max_blocks)
            own.slot_mapping = own.slot_mapping.new_zeros(self._size.tokens)
            own.plan = None
        else:
            own.slots = own.slots.new_zeros(rows)
            own.stored = None if own.stored is None else own.stored.new_full((rows,), tokens_per_row)
            own.calls = []
            own.host = None  # the numbers of this step, where the tensors are on a device
        return own


class _HiddenLengths(list[int]):
    """Lengths of rows that a recorded step must not read: they are other ones when it is replayed."""

    def _refuse(self, *_: Any) -> Any:
        raise NotRecordable("an operation of this model reads the lengths of rows on the host")

    __getitem__ = __iter__ = __len__ = _refuse


def _copy(target: torch.Tensor, source: torch.Tensor, count: int, fewer: bool, padding: int = 0) -> None:
    """The first `count` of `source`; `fewer`: than the step before had, which is to be padding again."""
    if count == len(target):
        target.copy_(source)
        return
    target[:count].copy_(source[:count])
    if fewer:
        target[count:].fill_(padding)


def _padded(numbers: list[int], count: int, padding: int) -> list[int]:
    return numbers + [padding] * (count - len(numbers))


def _first_tokens(metadata: AttentionMetadata, tokens: int) -> AttentionMetadata:
    return replace(metadata, slot_mapping=metadata.slot_mapping[:tokens])


def _tokens_per_row(batch: ForwardBatch) -> int:
    """Tokens per batch row, if every row has as many and needs the logits of all; else 0."""
    tokens, counts = len(batch.input_ids), batch.metadata[0].query_lens_list
    if len(counts) == tokens:
        return 1
    # With drafts every token needs logits; a chunk of a prompt has tokens that need none.
    same = len(batch.logits_indices) == tokens and len(set(counts)) == 1
    return counts[0] if same else 0


def _stores_less(metadata: Any) -> bool:
    return isinstance(metadata, RecurrentMetadata) and metadata.stored is not None
