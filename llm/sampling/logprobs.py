"""Logprobs of the sampled token, of the top tokens, and of requested token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llm.kernels.backend import Backend
from llm.kernels.reference.backend import REFERENCE

NO_LOGPROBS = -2
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


@dataclass
class TokenLogprobs:
    """Logprobs at one position: ids, logprobs and ranks, of the sampled token first, then of the top tokens in order.

    A rank is the number of tokens at least as likely (vLLM's definition), so tied tokens share the highest rank number.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


def gather_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: np.ndarray,
    requested: Mapping[int, Sequence[int]],
    normalise: bool = True,
    backend: Backend = REFERENCE,
) -> list[TokenLogprobs]:
    """One `TokenLogprobs` per logit row.

    Args:
        logits: float [n, vocab].
        tokens: int64 [n], the sampled tokens.
        counts: int64 [n], number of top tokens; -1: all. Ties are ordered by token id.
        requested: logit row -> ids to report instead of the top tokens.
        normalise: False: report the logits themselves.
        backend: what computes it.
    """
    computed = compute_logprobs(logits, tokens, counts, requested, normalise, backend)
    arrays = backend.download(*(tensor for part in computed for tensor in part.tensors))
    return read_logprobs(len(tokens), computed, arrays)


@dataclass
class ComputedLogprobs:
    """Logprobs of some logit rows, which have as many each, where they were computed.

    Attributes:
        logit_rows: int64 [n].
        width: number of top tokens, whose ranks are 1, 2 ...; 0 where all ranks are computed.
        tensors: ids and logprobs [n, 1 + width or more], and ranks [n, those that are computed].
    """

    logit_rows: np.ndarray
    width: int
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def compute_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: np.ndarray,
    requested: Mapping[int, Sequence[int]],
    normalise: bool,
    backend: Backend,
) -> list[ComputedLogprobs]:
    """`gather_logprobs` without reading a number."""
    top_k, gather = backend.ops.top_k, backend.ops.gather_logprobs
    logits, tokens = logits.float(), tokens.unsqueeze(1)
    vocab = logits.shape[1]
    computed = []
    widths = np.where(counts == -1, vocab, np.minimum(counts, vocab))
    widths[list(requested)] = -1
    for width in np.unique(widths[widths >= 0]).tolist():
        logit_rows = np.flatnonzero(widths == width)
        own = select_logit_rows(logits, logit_rows, backend)
        ids = select_logit_rows(tokens, logit_rows, backend)
        if width:
            ids = torch.cat((ids, top_k(own, width)[1]), dim=1)
        computed.append(ComputedLogprobs(logit_rows, width, (ids, *gather(own, ids, 1, normalise))))
    for logit_row, of_logit_row in requested.items():
        own_ids = backend.upload(np.array(of_logit_row, dtype=np.int64))
        ids = torch.cat((tokens[logit_row], own_ids)).unsqueeze(0)
        found = gather(logits[logit_row : logit_row + 1], ids, ids.shape[1], normalise)
        computed.append(ComputedLogprobs(np.array([logit_row]), 0, (ids, *found)))
    return computed


def read_logprobs(
    count: int, computed: Sequence[ComputedLogprobs], arrays: Sequence[np.ndarray]
) -> list[TokenLogprobs]:
    """What was computed of `count` logit rows; `arrays` are the tensors' values, in order."""
    result = [TokenLogprobs([], [], []) for _ in range(count)]
    for index, part in enumerate(computed):
        columns = (array.tolist() for array in arrays[3 * index : 3 * index + 3])
        for logit_row, ids, values, ranks in zip(part.logit_rows.tolist(), *columns, strict=True):
            result[logit_row] = TokenLogprobs(ids, values, [*ranks, *range(1, part.width + 1)])
    return result


def select_logit_rows(tensor: torch.Tensor, logit_rows: np.ndarray, backend: Backend = REFERENCE) -> torch.Tensor:
    """These logit rows of a tensor of the backend's device; the tensor itself if they are all of it."""
    return tensor if len(logit_rows) == len(tensor) else tensor.index_select(0, backend.upload(logit_rows))
