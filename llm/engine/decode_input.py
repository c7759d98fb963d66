"""The input of decode steps while the batch rows stay the same: made once, then filled anew for each step.

Owns the arrays of such a step, which share memory with its tensors. From one to the next only tokens, positions,
lengths and slots differ, and to make the arrays takes several times longer than to fill them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from llm.engine.step_input import StepInput
from llm.forward import AttentionMetadata, ForwardBatch, RecurrentMetadata

if TYPE_CHECKING:
    from llm.engine.batch import InputBatch


class DecodeInput:
    """The input of steps in which every batch row computes its last known token and samples; the device is a CPU.

    Args:
        step: the first of them, as `InputBatch.build` made it.
        counts: its plan's `num_scheduled_tokens`.

    Attributes:
        has_new_blocks: a row was given a block since the last step.
    """

    def __init__(self, step: StepInput, counts: Mapping[str, int]) -> None:
        batch = step.forward_batch
        self._step = step
        self._counts = counts
        self._input_ids, self._positions = batch.input_ids.numpy(), batch.positions.numpy()
        self._metadata: list[AttentionMetadata | RecurrentMetadata] = list(batch.metadata)
        self._seq_lens = [metadata.seq_lens.numpy() for metadata in self._metadata]
        self.has_new_blocks = False

    def fits(self, counts: Mapping[str, int]) -> bool:
        """True if a step with so many tokens is like this one, the rows being the same."""
        return self._counts == counts

    def fill(self, batch: InputBatch) -> StepInput:
        """The input of the next step, in the memory of the last one's."""
        step, positions = self._step, self._positions
        positions[:] = step.lines.positions[:] = batch.num_computed[: len(positions)]
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
