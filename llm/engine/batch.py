"""The persistent batch: one row per running request, kept between steps.

Owns per-row state as NumPy arrays, so that a step's input is built by a handful of vector operations however many rows
there are. Rows are packed: a removed row is filled by the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from llm.engine.scheduler import NewRow, SchedulerOutput
from llm.forward import AttentionMetadata, ForwardBatch
from llm.sampling.sampler import SamplingRows


@dataclass
class StepInput:
    """What `InputBatch.build` gives the runner.

    Attributes:
        rows: int64 [R], the batch row of each scheduled request.
        counts: int64 [R], its tokens this step.
        sampled_rows: int64 [L], the batch rows that sample, in the order of `logits_indices`.
    """

    rows: np.ndarray
    counts: np.ndarray
    sampled_rows: np.ndarray
    forward_batch: ForwardBatch


class InputBatch:
    """State of up to `max_num_seqs` rows.

    `token_ids[row, :num_tokens[row]]` is everything known of a row; its first `num_computed[row]` are in the KV cache.
    The arrays are zero pages until written, so their width costs nothing.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, num_groups: int, block_size: int) -> None:
        self.block_size = block_size
        self.request_ids: list[str] = []
        self.index: dict[str, int] = {}
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        blocks = -(-max_model_len // block_size)
        self.block_tables = [np.zeros((max_num_seqs, blocks), dtype=np.int32) for _ in range(num_groups)]
        self.num_blocks = np.zeros((num_groups, max_num_seqs), dtype=np.int64)
        self.sampling = SamplingRows(max_num_seqs)

    def update(self, plan: SchedulerOutput) -> None:
        """Apply a step's arrivals, departures and new blocks."""
        for request_id in plan.removed:
            self._remove(request_id)
        for new in plan.new_rows:
            self._add(new)
        for request_id, groups in plan.new_blocks.items():
            self._append_blocks(self.index[request_id], groups)

    def build(self, plan: SchedulerOutput) -> StepInput:
        """The tokens of the scheduled rows, end to end, in the order of their batch rows."""
        scheduled = np.zeros(len(self.request_ids), dtype=np.int64)
        for request_id, count in plan.num_scheduled_tokens.items():
            scheduled[self.index[request_id]] = count
        rows = np.nonzero(scheduled)[0]
        counts = scheduled[rows]
        ends = np.cumsum(counts)
        row_of_token = np.repeat(rows, counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + self.num_computed[row_of_token]
        known = self.num_computed[rows] + counts
        samples = known == self.num_tokens[rows]
        attention = [
            self._attention(group, rows, row_of_token, positions, ends, counts, known)
            for group in range(len(self.block_tables))
        ]
        batch = ForwardBatch(
            input_ids=torch.from_numpy(self.token_ids[row_of_token, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            attention=attention,
            kv_caches=[],
            logits_indices=torch.from_numpy(ends[samples] - 1),
        )
        return StepInput(rows, counts, rows[samples], batch)

    def advance(self, step: StepInput, sampled: list[int]) -> None:
        """Record what the step computed and the one token each sampling row drew."""
        self.num_computed[step.rows] += step.counts
        self.token_ids[step.sampled_rows, self.num_tokens[step.sampled_rows]] = sampled
        self.num_tokens[step.sampled_rows] += 1

    def clear(self) -> None:
        """Forget every row, even when a removal was cut short half way."""
        self.request_ids.clear()
        self.index.clear()
        self.sampling.min_tokens.clear()

    def _attention(
        self,
        group: int,
        rows: np.ndarray,
        row_of_token: np.ndarray,
        positions: np.ndarray,
        ends: np.ndarray,
        counts: np.ndarray,
        known: np.ndarray,
    ) -> AttentionMetadata:
        table = self.block_tables[group]
        widest = -(-int(known.max()) // self.block_size)
        slots = table[row_of_token, positions // self.block_size].astype(np.int64) * self.block_size
        starts = np.zeros(len(rows) + 1, dtype=np.int32)
        starts[1:] = ends
        return AttentionMetadata(
            block_table=torch.from_numpy(table[rows, :widest]),
            slot_mapping=torch.from_numpy(slots + positions % self.block_size),
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(known.astype(np.int32)),
            block_size=self.block_size,
            query_lens_list=counts.tolist(),
            seq_lens_list=known.tolist(),
        )

    def _add(self, new: NewRow) -> None:
        row = len(self.request_ids)
        self.request_ids.append(new.request_id)
        self.index[new.request_id] = row
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[row] = len(new.token_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed[row] = new.num_computed_tokens
        self.num_blocks[:, row] = 0
        self._append_blocks(row, new.blocks)
        self.sampling.set(row, new.params, new.seed, new.sample_index, new.suppressed_token_ids)

    def _append_blocks(self, row: int, groups: list[list[int]]) -> None:
        for group, blocks in enumerate(groups):
            start = self.num_blocks[group, row]
            self.block_tables[group][row, start : start + len(blocks)] = blocks
            self.num_blocks[group, row] = start + len(blocks)

    def _remove(self, request_id: str) -> None:
        row = self.index.pop(request_id)
        last = len(self.request_ids) - 1
        if row != last:
            self._move(last, row)
        self.request_ids.pop()
        self.sampling.clear(last)

    def _move(self, source: int, target: int) -> None:
        tokens = self.num_tokens[source]
        self.token_ids[target, :tokens] = self.token_ids[source, :tokens]
        for array in (self.num_tokens, self.num_prompt_tokens, self.num_computed):
            array[target] = array[source]
        for group, table in enumerate(self.block_tables):
            count = self.num_blocks[group, source]
            table[target, :count] = table[source, :count]
            self.num_blocks[group, target] = count
        self.sampling.move(source, target)
        moved = self.request_ids[source]
        self.request_ids[target] = moved
        self.index[moved] = target
