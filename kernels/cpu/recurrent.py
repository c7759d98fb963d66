"""The batch rows of a step as arguments of kernels that keep a state per request: `StateRows` in recurrent.h."""

from __future__ import annotations

import torch

from llm.forward import RecurrentMetadata
from llm.kernels.cpu.tensors import pointer


def row_arguments(metadata: RecurrentMetadata) -> tuple[int, int, int, int | None, int | None, int]:
    """Addresses of slots, starts, lengths, counts and stored counts, and the number of rows; `metadata` keeps the
    tensors alive."""
    slots, starts = metadata.slots, metadata.query_start_loc
    rows, given = len(slots), (starts, metadata.seq_lens, metadata.counts, metadata.stored)
    if slots.dtype != torch.int64 or not slots.is_contiguous():
        raise TypeError(f"slots are contiguous int64; got {slots.dtype}")
    for tensor in given:
        if tensor is None:
            continue
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise TypeError(f"starts, lengths and counts are contiguous int32; got {tensor.dtype}")
        if len(tensor) != rows + (tensor is starts):
            raise ValueError(f"{rows} rows have {len(tensor)} starts, lengths or counts")
    addresses = slots.data_ptr(), starts.data_ptr(), metadata.seq_lens.data_ptr()
    return *addresses, pointer(metadata.counts), pointer(metadata.stored), rows


def no_such_row(metadata: RecurrentMetadata, row: int, num_slots: int, tokens: int) -> IndexError:
    return IndexError(
        f"row {row} is out of range: slot {int(metadata.slots[row])} of {num_slots}, tokens "
        f"{metadata.query_start_loc[row : row + 2].tolist()} of {tokens}, length {int(metadata.seq_lens[row])}"
    )
