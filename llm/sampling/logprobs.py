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
    asked: Mapping[int, Sequence[int]],
    normalise: bool = True,
    backend: Backend = REFERENCE,
) -> list[TokenLogprobs]:
    """One `TokenLogprobs` per line.

    Args:
        logits: float [n, vocab].
        tokens: int64 [n], the sampled tokens.
        counts: int64 [n], number of top tokens; -1: all. Ties are ordered by token id.
        asked: line -> ids to report instead of the top tokens.
        normalise: False: report the logits themselves.
        backend: what computes it.
    """
    computed = compute_logprobs(logits, tokens, counts, asked, normalise, backend)
    arrays = backend.download(*(tensor for part in computed for tensor in part.tensors))
    return read_logprobs(len(tokens), computed, arrays)


@dataclass
class ComputedLogprobs:
    """Logprobs of some lines, which have as many each, where they were computed.

    Attributes:
        lines: int64 [n].
        width: number of top tokens, whose ranks are 1, 2 ...; 0 where all ranks are computed.
        tensors: ids and logprobs [n, 1 + width or more], and ranks [n, those that are computed].
    """

    lines: np.ndarray
    width: int
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def compute_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: np.ndarray,
    asked: Mapping[int, Sequence[int]],
    normalise: bool,
    backend: Backend,
) -> list[ComputedLogprobs]:
    """`gather_logprobs` without reading a number."""
    top_k, gather = backend.ops.top_k, backend.ops.gather_logprobs
    logits, tokens = logits.float(), tokens.unsqueeze(1)
    vocab = logits.shape[1]
    computed = []
    widths = np.where(counts == -1, vocab, np.minimum(counts, vocab))
    widths[list(asked)] = -1
    for width in np.unique(widths[widths >= 0]).tolist():
        lines = np.flatnonzero(widths == width)
        own = select_lines(logits, lines, backend)
        ids = select_lines(tokens, lines, backend)
        if width:
            ids = torch.cat((ids, top_k(own, width)[1]), dim=1)
        computed.append(ComputedLogprobs(lines, width, (ids, *gather(own, ids, 1, normalise))))
    for line, of_line in asked.items():
        own_ids = backend.upload(np.array(of_line, dtype=np.int64))
        ids = torch.cat((tokens[line], own_ids)).unsqueeze(0)
        found = gather(logits[line : line + 1], ids, ids.shape[1], normalise)
        computed.append(ComputedLogprobs(np.array([line]), 0, (ids, *found)))
    return computed


def read_logprobs(
    count: int, computed: Sequence[ComputedLogprobs], arrays: Sequence[np.ndarray]
) -> list[TokenLogprobs]:
    """What was computed of `count` lines; `arrays` are the tensors' values, in order."""
    result = [TokenLogprobs([], [], []) for _ in range(count)]
    for index, part in enumerate(computed):
        columns = (array.tolist() for array in arrays[3 * index : 3 * index + 3])
        for line, ids, values, ranks in zip(part.lines.tolist(), *columns, strict=True):
            result[line] = TokenLogprobs(ids, values, [*ranks, *range(1, part.width + 1)])
    return result


def select_lines(tensor: torch.Tensor, lines: np.ndarray, backend: Backend = REFERENCE) -> torch.Tensor:
    """These lines of a tensor of the backend's device; the tensor itself if they are all of it."""
    return tensor if len(lines) == len(tensor) else tensor.index_select(0, backend.upload(lines))
