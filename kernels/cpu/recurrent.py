"""The batch rows of a step as arguments of kernels that keep a state per request: `StateRows` in recurrent.h."""

from __future__ import annotations

import torch

from llm.forward import RecurrentMetadata


def row_arguments(metadata: RecurrentMetadata) -> tuple[int, int, int, int]:
    """Addresses of slots, starts and lengths, and the number of rows; `metadata` keeps the tensors alive."""
    tensors = metadata.slots, metadata.query_start_loc, metadata.seq_lens
    for tensor, dtype in zip(tensors, (torch.int64, torch.int32, torch.int32), strict=True):
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise TypeError(f"slots are contiguous int64, starts and lengths int32; got {tensor.dtype}")
    slots, starts, lengths = tensors
    if len(starts) != len(slots) + 1 or len(lengths) != len(slots):
        raise ValueError(f"{len(slots)} rows have {len(lengths)} lengths and {len(starts)} starts")
    return slots.data_ptr(), starts.data_ptr(), lengths.data_ptr(), len(slots)


def no_such_row(metadata: RecurrentMetadata, row: int, num_slots: int, tokens: int) -> IndexError:
    return IndexError(
        f"row {row} is out of range: slot {int(metadata.slots[row])} of {num_slots}, tokens "
        f"{metadata.query_start_loc[row : row + 2].tolist()} of {tokens}, length {int(metadata.seq_lens[row])}"
    )
