"""The persistent batch: one batch row per running request, kept between steps, and a step's input made from it.

The state of the rows is in NumPy arrays, so that a few vector operations build a step's input for any number of rows.
Rows are packed: new rows fill the gaps of removed ones, then rows from the end fill the gaps that remain. The changes
of a step are reported as a `BatchUpdate`, in the order its docstring states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from llm.engine.step import NewRow, PoolingRow, SchedulerOutput
from llm.forward import AttentionMetadata, ForwardBatch, RecurrentMetadata, StateNumbers
from llm.sampling.logits_processors.interface import AddedRequest, BatchUpdate, BatchUpdateBuilder, MoveDirectionality
from llm.sampling.sampler import SamplingRows
from llm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Drafts:
    """The drafts that a step verifies.

    Attributes:
        firsts, ends: int64 [rows that sample], the indices of each one's first logit row and of that after its last.
        tokens: int64 [sampled logit rows], the draft for the token after each logit row; -1 at a row's last logit row.
    """

    firsts: np.ndarray
    ends: np.ndarray
    tokens: np.ndarray


@dataclass
class LogitRows:
    """The (batch row, position) pairs whose logits a step needs, in the order of `ForwardBatch.logits_indices`.

    The first `num_sampled` logit rows are sampled, row by row: the row's last known token, then its drafts. A logit row
    after a draft counts only if that draft is accepted. The other logit rows are scored: they give the prompt logprob
    of the token after them.

    Attributes:
        rows, positions: int64 [L].
        drafts: None if every row that samples has one logit row.
    """

    rows: np.ndarray
    positions: np.ndarray
    num_sampled: int
    drafts: Drafts | None = None

    @property
    def sampled_rows(self) -> np.ndarray:
        """The rows that sample, each once."""
        return self.rows[: self.num_sampled] if self.drafts is None else self.rows[self.drafts.firsts]

    def num_drafts(self) -> np.ndarray:
        """int64, the number of drafts of each of `sampled_rows`."""
        if self.drafts is None:
            return np.zeros(self.num_sampled, dtype=np.int64)
        return self.drafts.ends - self.drafts.firsts - 1


@dataclass
class StepInput:
    """What `InputBatch.build` gives the runner.

    Attributes:
        rows: int64 [R], the batch row of each scheduled request, increasing.
        counts: int64 [R], its tokens this step, drafts included.
        recurrent: of the model's recurrent states; None: it has none.
    """

    rows: np.ndarray
    counts: np.ndarray
    logit_rows: LogitRows
    forward_batch: ForwardBatch
    recurrent: RecurrentMetadata | None = None


_EMPTY = ""  # the request id of a gap, within `update`


class InputBatch:
    """State of up to `max_num_seqs` batch rows.

    `token_ids[row, :num_tokens[row]]` are a row's known tokens; the first `num_computed[row]` are in the KV cache.
    Pages of the arrays are committed when first written, so unused width costs no memory.

    Args:
        upload: copies an array to a tensor on the device.
        shares_memory: it does not copy, and the tensor follows what is written into the array.
        has_slots: the model has recurrent states.
        rolls_back: they do not see rejected drafts.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        num_groups: int,
        block_size: int,
        upload: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy,
        *,
        shares_memory: bool = True,
        has_slots: bool = False,
        rolls_back: bool = False,
    ) -> None:
        self.block_size = block_size
        self._upload, self._shares_memory = upload, shares_memory
        self.max_blocks = -(-max_model_len // block_size)
        self.request_ids: list[str] = []
        self.index: dict[str, int] = {}
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        # The first position whose next token needs a prompt logprob; the prompt's length if none does.
        self.prompt_logprobs_from = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_tables = [np.zeros((max_num_seqs, self.max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self.num_blocks = np.zeros((num_groups, max_num_seqs), dtype=np.int64)
        self.adapter_slots = np.zeros(max_num_seqs, dtype=np.int64)  # 0: no adapter
        # What is added to a token's position in its row to give that of its rotary embedding.
        self.position_shifts = np.zeros(max_num_seqs, dtype=np.int64)
        self.has_slots = has_slots
        self.takes_drafts = rolls_back or not has_slots
        self.slots = np.zeros(max_num_seqs, dtype=np.int64)
        self.sampling = SamplingRows(max_num_seqs)
        self.params: list[SamplingParams] = []
        self.prompt_token_ids: list[list[int]] = []
        self.output_token_ids: list[list[int]] = []  # live: logits processors keep references to these lists
        # Requests that needed prompt logprobs when they were added.
        self._scored: set[str] = set()
        self.pooling: list[PoolingRow | None] = []
        # Where a row's second text begins; beyond its tokens if it has one text.
        self.second_text = np.zeros(max_num_seqs, dtype=np.int64)
        self._changes = BatchUpdateBuilder()
        # Of decode steps since the rows last changed; None: there was none.
        self._decode: DecodeInput | None = None

    def update(self, plan: SchedulerOutput) -> BatchUpdate | None:
        """Apply a step's removed rows, new rows and new blocks; returns the changes, None if the rows are the same."""
        for request_id in plan.removed:
            row = self.index.pop(request_id)
            self.request_ids[row] = _EMPTY
            self._scored.discard(request_id)
            self._changes.removed_append(row)
        for new in plan.new_rows:
            self._add(new)
        self._condense()
        for request_id, groups in plan.new_blocks.items():
            self._append_blocks(self.index[request_id], groups)
        changes = self._changes.get_and_reset(len(self.request_ids))
        if changes is not None:
            self._decode = None
        elif self._decode is not None and plan.new_blocks:
            self._decode.has_new_blocks = True
        return changes

    def added_rows(self) -> list[AddedRequest]:
        """Every row as an added one, for a logits processor that is loaded later."""
        rows = zip(self.params, self.prompt_token_ids, self.output_token_ids, strict=True)
        return [(row, *state) for row, state in enumerate(rows)]

    def build(self, plan: SchedulerOutput) -> StepInput:
        """The tokens of the scheduled requests, concatenated in the order of their batch rows.

        The next decode step of the same rows overwrites it.
        """
        if self._decode is not None and self._decode.fits(plan.num_scheduled_tokens):
            return self._decode.fill(self)
        step = self._build(plan)
        if self._decodes(step):
            self._decode = DecodeInput(step, plan.num_scheduled_tokens, self.position_shifts[step.rows])
        return step

    def _decodes(self, step: StepInput) -> bool:
        """True if the step computes a token of every row and samples it, and its arrays can be filled anew."""
        logit_rows, rows = step.logit_rows, len(self.request_ids)
        is_plain = logit_rows.num_sampled == rows == len(logit_rows.rows) == len(step.forward_batch.input_ids)
        return is_plain and logit_rows.drafts is None and not any(self.pooling) and self._shares_memory

    def _build(self, plan: SchedulerOutput) -> StepInput:
        scheduled = np.zeros(len(self.request_ids), dtype=np.int64)
        for request_id, count in plan.num_scheduled_tokens.items():
            scheduled[self.index[request_id]] = count
        rows = np.nonzero(scheduled)[0]
        counts = scheduled[rows]
        ends = np.cumsum(counts)
        row_of_token = np.repeat(rows, counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + self.num_computed[row_of_token]
        lengths = self.num_computed[rows] + counts
        logit_rows, indices = self._find_logit_rows(rows, ends, lengths, plan.draft_token_ids)
        metadata: list[Any] = [
            self.attention_metadata(group, rows, row_of_token, positions, ends, counts, lengths)
            for group in range(len(self.block_tables))
        ]
        recurrent = self._recurrent(rows, ends, counts, lengths, plan.draft_token_ids) if self.has_slots else None
        if recurrent is not None:  # last, which is index `SLOTS` (kv_cache.py)
            metadata.append(recurrent)
        batch = ForwardBatch(
            input_ids=self._upload(self.token_ids[row_of_token, positions].astype(np.int64)),
            positions=self._upload(self._rotary(positions, row_of_token)),
            metadata=metadata,
            states=[],
            logits_indices=self._upload(indices),
            adapter_ids=self.adapters_of(row_of_token),
        )
        if any(self.pooling):
            batch.token_types = self._upload((positions >= self.second_text[row_of_token]).astype(np.int64))
        return StepInput(rows, counts, logit_rows, batch, recurrent)

    def build_next(self, positions: np.ndarray, tokens: torch.Tensor) -> StepInput | None:
        """The step that computes a token of every row, at these positions: the one that is being sampled. None: a row
        has no block for it.

        Args:
            positions: int64 [rows].
            tokens: int64 [rows], on the device.
        """
        rows, size = np.arange(len(positions)), self.block_size
        if (self.num_blocks[:, rows] * size <= positions).any() or positions.max() >= self.token_ids.shape[1]:
            return None
        counts = np.ones_like(rows)
        ends, lengths = rows + 1, positions + 1
        groups = range(len(self.block_tables))
        batch = ForwardBatch(
            input_ids=tokens,
            positions=self._upload(self._rotary(positions, rows)),
            metadata=[self.attention_metadata(group, rows, rows, positions, ends, counts, lengths) for group in groups],
            states=[],
            logits_indices=self._upload(rows),
            adapter_ids=self.adapters_of(rows),
        )
        return StepInput(rows, counts, LogitRows(rows, positions, len(rows)), batch)

    def _rotary(self, positions: np.ndarray, rows: np.ndarray) -> np.ndarray:
        shifts = self.position_shifts[rows]
        return positions + shifts if shifts.any() else positions

    def adapters_of(self, rows: np.ndarray) -> torch.Tensor | None:
        """The slot of each row's adapter, int64; None if no row has one."""
        slots = self.adapter_slots[rows]
        return self._upload(slots) if slots.any() else None

    def append(self, rows: np.ndarray, tokens: list[int]) -> None:
        """Append a sampled token to each of `rows`."""
        places = self.num_tokens[rows]
        self.token_ids[rows, places] = tokens
        self.num_tokens[rows] = places + 1
        for row, token in zip(rows.tolist(), tokens, strict=True):
            self.output_token_ids[row].append(token)

    def extend(self, row: int, tokens: list[int]) -> None:
        """Append several tokens to one row."""
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(tokens)] = tokens
        self.num_tokens[row] += len(tokens)
        self.output_token_ids[row].extend(tokens)

    def advance(self, rows: np.ndarray) -> None:
        """A token of each of these rows was computed, without drafts."""
        self.num_computed[rows] += 1

    def settle(self, step: StepInput) -> None:
        """Update the counts after all logit rows are sampled: rejected drafts do not count, and their blocks are
        freed."""
        self.num_computed[step.rows] += step.counts
        if step.logit_rows.drafts is not None:
            drafted = step.logit_rows.sampled_rows[step.logit_rows.num_drafts() > 0]
            self.num_computed[drafted] = self.num_tokens[drafted] - 1
            # The same as in `BlockManager.trim`.
            self.num_blocks[:, drafted] = -(-self.num_computed[drafted] // self.block_size)
            if step.recurrent is not None:
                own = np.zeros(len(self.request_ids), dtype=np.int64)
                own[step.logit_rows.sampled_rows] = step.logit_rows.num_drafts()
                accepted = own[step.rows] + self.num_computed[step.rows] - step.recurrent.seq_lens_list
                step.recurrent.store_accepted(np.maximum(0, accepted).astype(np.int32), self._upload)

    def clear(self) -> None:
        """Remove every row, even after an interrupted update."""
        for column in self._columns():
            column.clear()
        self.index.clear()
        self._scored.clear()
        self.sampling.clear_all()
        self._changes = BatchUpdateBuilder()
        self._decode = None

    def _find_logit_rows(
        self, rows: np.ndarray, ends: np.ndarray, lengths: np.ndarray, drafts: dict[str, list[int]]
    ) -> tuple[LogitRows, np.ndarray]:
        """The logit rows of a step, and their indices among its tokens.

        `ends`: cumulative token counts of `rows` in this step; `lengths`: their computed tokens after it.
        """
        samples = lengths >= self.num_tokens[rows]
        logit_rows = LogitRows(rows[samples], lengths[samples] - 1, 0)
        indices = ends[samples] - 1
        if drafts:
            indices = self._add_drafts(logit_rows, indices, drafts)
        logit_rows.num_sampled = len(indices)
        if self._scored:
            indices = self._add_scored(logit_rows, indices, rows, ends, lengths)
        return logit_rows, indices

    def _add_drafts(self, logit_rows: LogitRows, indices: np.ndarray, drafts: dict[str, list[int]]) -> np.ndarray:
        """Replace the last logit row of each row that samples by all its logit rows; returns their indices."""
        for request_id, own in drafts.items():
            row = self.index[request_id]
            start = self.num_tokens[row]
            # Stored after the known tokens: `append` overwrites them.
            self.token_ids[row, start : start + len(own)] = own
        counts = logit_rows.positions - self.num_tokens[logit_rows.rows] + 2
        ends = np.cumsum(counts)
        firsts = ends - counts
        until_last = np.repeat(ends - 1, counts) - np.arange(ends[-1])
        logit_rows.rows = np.repeat(logit_rows.rows, counts)
        logit_rows.positions = np.repeat(logit_rows.positions, counts) - until_last
        following = np.minimum(logit_rows.positions + 1, self.token_ids.shape[1] - 1)
        tokens = np.where(until_last > 0, self.token_ids[logit_rows.rows, following], -1)
        logit_rows.drafts = Drafts(firsts, ends, tokens)
        return np.repeat(indices, counts) - until_last

    def _add_scored(
        self, logit_rows: LogitRows, indices: np.ndarray, rows: np.ndarray, ends: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        """Add logit rows for the prompt tokens whose next token needs a logprob: all but the prompt's last."""
        firsts = np.maximum(self.num_computed[rows], self.prompt_logprobs_from[rows])
        lasts = np.minimum(lengths, self.num_prompt_tokens[rows] - 1)
        wanted = np.flatnonzero(firsts < lasts).tolist()
        if not wanted:
            return indices
        spans = [np.arange(firsts[index], lasts[index]) for index in wanted]
        logit_rows.rows = np.concatenate((logit_rows.rows, np.repeat(rows[wanted], list(map(len, spans)))))
        logit_rows.positions = np.concatenate((logit_rows.positions, *spans))
        # position + ends - lengths is the position's index among the step's tokens.
        shifted = [span + (ends[index] - lengths[index]) for span, index in zip(spans, wanted, strict=True)]
        return np.concatenate((indices, *shifted))

    def attention_metadata(
        self,
        group: int,
        rows: np.ndarray,
        row_of_token: np.ndarray,
        positions: np.ndarray,
        ends: np.ndarray,
        counts: np.ndarray,
        lengths: np.ndarray,
    ) -> AttentionMetadata:
        """Of `counts` tokens of each of these rows, the last of which is at `lengths` - 1."""
        table = self.block_tables[group]
        widest = -(-int(lengths.max()) // self.block_size)
        slots = table[row_of_token, positions // self.block_size].astype(np.int64) * self.block_size
        return AttentionMetadata(
            block_table=self._upload(table[rows, :widest]),
            slot_mapping=self._upload(slots + positions % self.block_size),
            query_start_loc=self._upload(_starts(ends)),
            seq_lens=self._upload(lengths.astype(np.int32)),
            block_size=self.block_size,
            query_lens_list=counts.tolist(),
            seq_lens_list=lengths.tolist(),
        )

    def _recurrent(
        self,
        rows: np.ndarray,
        ends: np.ndarray,
        counts: np.ndarray,
        lengths: np.ndarray,
        drafts: dict[str, list[int]],
    ) -> RecurrentMetadata:
        own = [len(drafts.get(self.request_ids[row], ())) for row in rows.tolist()] if drafts else []
        slots, starts, stored = self.slots[rows], _starts(ends), (counts - own).astype(np.int32) if own else None
        metadata = RecurrentMetadata(
            slots=self._upload(slots),
            query_start_loc=self._upload(starts),
            seq_lens=self._upload(lengths.astype(np.int32)),
            query_lens_list=counts.tolist(),
            seq_lens_list=lengths.tolist(),
            stored=None if stored is None else self._upload(stored),
        )
        if not self._shares_memory:
            listed = None if stored is None else stored.tolist()
            metadata.host = StateNumbers(slots.tolist(), starts.tolist(), metadata.seq_lens_list, None, listed)
        return metadata

    def _add(self, new: NewRow) -> None:
        """Add a row in the lowest gap, or else at the end."""
        row = self._changes.pop_removed()
        if row is None:
            row = len(self.request_ids)
            for column in self._columns():
                column.append(None)
        self.request_ids[row] = new.request_id
        self.index[new.request_id] = row
        self.params[row] = new.params
        self.prompt_token_ids[row] = new.token_ids[: new.num_prompt_tokens]
        self.output_token_ids[row] = new.token_ids[new.num_prompt_tokens :]
        self.prompt_logprobs_from[row] = new.prompt_logprobs_from
        if new.prompt_logprobs_from < new.num_prompt_tokens:
            self._scored.add(new.request_id)
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[row] = len(new.token_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed[row] = new.num_computed_tokens
        self.slots[row] = new.slot
        self.adapter_slots[row] = new.adapter_slot
        self.position_shifts[row] = 0
        self.num_blocks[:, row] = 0
        self._append_blocks(row, new.blocks)
        self.pooling[row] = new.pooling
        second = None if new.pooling is None else new.pooling.second_text
        self.second_text[row] = len(new.token_ids) if second is None else second
        self.sampling.set(row, new.params, new.seed, new.sample_index)
        self._changes.added.append((row, new.params, self.prompt_token_ids[row], self.output_token_ids[row]))

    def _condense(self) -> None:
        """Move the last row into the lowest gap until the rows are packed."""
        for hole in reversed(self._changes.removed):
            self._drop_empty_end()
            last = len(self.request_ids) - 1
            if hole > last:
                break
            self._move(last, hole)
            self.request_ids[last] = _EMPTY
            self._changes.moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
        self._drop_empty_end()

    def _drop_empty_end(self) -> None:
        while self.request_ids and self.request_ids[-1] == _EMPTY:
            self.sampling.clear(len(self.request_ids) - 1)
            for column in self._columns():
                column.pop()

    def _columns(self) -> tuple[list[Any], ...]:
        return self.request_ids, self.params, self.prompt_token_ids, self.output_token_ids, self.pooling

    def _append_blocks(self, row: int, groups: list[list[int]]) -> None:
        for group, blocks in enumerate(groups):
            start = self.num_blocks[group, row]
            self.block_tables[group][row, start : start + len(blocks)] = blocks
            self.num_blocks[group, row] = start + len(blocks)

    def _move(self, source: int, target: int) -> None:
        tokens = self.num_tokens[source]
        self.token_ids[target, :tokens] = self.token_ids[source, :tokens]
        counts = (self.num_tokens, self.num_prompt_tokens, self.num_computed, self.prompt_logprobs_from)
        for array in (*counts, self.slots, self.adapter_slots, self.second_text, self.position_shifts):
            array[target] = array[source]
        for group, table in enumerate(self.block_tables):
            count = self.num_blocks[group, source]
            table[target, :count] = table[source, :count]
            self.num_blocks[group, target] = count
        self.sampling.move(source, target)
        for column in self._columns():
            column[target] = column[source]
        self.index[self.request_ids[target]] = target


def _starts(ends: np.ndarray) -> np.ndarray:
    """int32 [R + 1]: where each row's tokens start, and the end of the last."""
    starts = np.zeros(len(ends) + 1, dtype=np.int32)
    starts[1:] = ends
    return starts


class DecodeInput:
    """The input of steps in which every row computes its last known token and samples: made once, then filled anew.

    Only tokens, positions, lengths and slots differ from one to the next, and to make the arrays takes several times
    longer than to fill them. The tensors share the memory of the arrays.

    Args:
        step: the first of them, as `InputBatch.build` made it.
        counts: its plan's `num_scheduled_tokens`.
        shifts: int64 [R], of the rows' positions (`InputBatch.position_shifts`).

    Attributes:
        has_new_blocks: a row was given a block since the last step.
    """

    def __init__(self, step: StepInput, counts: Mapping[str, int], shifts: np.ndarray) -> None:
        batch = step.forward_batch
        self._step = step
        self._counts = counts
        self._input_ids, self._rotary = batch.input_ids.numpy(), batch.positions.numpy()
        self._shifts = shifts if shifts.any() else None
        self._positions = self._rotary if self._shifts is None else np.empty_like(self._rotary)
        self._metadata: list[AttentionMetadata | RecurrentMetadata] = list(batch.metadata)
        self._seq_lens = [metadata.seq_lens.numpy() for metadata in self._metadata]
        self.has_new_blocks = False

    def fits(self, counts: Mapping[str, int]) -> bool:
        """True if a step with so many tokens is like this one, the rows being the same."""
        return self._counts == counts

    def fill(self, batch: InputBatch) -> StepInput:
        """The input of the next step, in the memory of the last one's."""
        step, positions = self._step, self._positions
        positions[:] = step.logit_rows.positions[:] = batch.num_computed[: len(positions)]
        if self._shifts is not None:
            np.add(positions, self._shifts, out=self._rotary)
        self._input_ids[:] = batch.token_ids[step.rows, positions]
        lengths = positions + 1
        listed = lengths.tolist()
        for metadata, seq_lens in zip(self._metadata, self._seq_lens, strict=True):
            seq_lens[:] = lengths
            metadata.seq_lens_list = listed
        self._place(batch, max(listed))
        last = step.forward_batch
        step.forward_batch = ForwardBatch(
            last.input_ids, last.positions, list(self._metadata), [], last.logits_indices, adapter_ids=last.adapter_ids
        )
        return step

    def _place(self, batch: InputBatch, longest: int) -> None:
        """Where the tokens are in the KV cache."""
        rows, size = self._step.rows, batch.block_size
        blocks, offsets = np.divmod(self._positions, size)
        width = -(-longest // size)
        for table, metadata in zip(batch.block_tables, self._metadata, strict=False):  # the last may be recurrent
            if not isinstance(metadata, AttentionMetadata):
                continue
            slots = metadata.slot_mapping.numpy()
            slots[:] = table[rows, blocks]
            slots *= size
            slots += offsets
            metadata.plan = None  # it may depend on lengths
            if self.has_new_blocks or width > metadata.block_table.shape[1]:
                # A new tensor: a recorded step copies the table when it is another one than the last.
                metadata.block_table = torch.from_numpy(table[rows, :width])
        self.has_new_blocks = False
