"""Replayed steps of any number of tokens: one recording serves prompts, chunks of prompts and mixed batches.

Owns the recorded step, its tensors, and what decides when to record. A step is recorded twice, with all its tokens and
with its first few: what differs between the two is what depends on the number of tokens (`for_any_size`). The second
recording runs no kernels. Steps with drafts are not recorded here if there are recurrent states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from llm.config.engine import DEFAULT_MAX_NUM_BATCHED_TOKENS
from llm.forward import AttentionMetadata, ForwardBatch, RecurrentMetadata
from llm.kernels.backend import Backend, NotRecordable, Program, SizedProgram

# Memory is allocated for so many tokens.
MOST_TOKENS = DEFAULT_MAX_NUM_BATCHED_TOKENS
MOST_ROWS = 64
# Of the shorter recording; the other one has at least _LEAST tokens.
_FEW, _LEAST = 5, 8
Forward = Callable[[ForwardBatch], torch.Tensor]
Metadata = AttentionMetadata | RecurrentMetadata
# Threads, whether a row has an adapter.
_Key = tuple[int, bool]


@dataclass
class _Step:
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
        self._steps: dict[_Key, _Step] = {}

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

    def _record(self, key: _Key, batch: ForwardBatch, tokens: int) -> torch.Tensor | None:
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
                self._steps[key] = _Step(program, inputs, hidden, own.taps)
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
