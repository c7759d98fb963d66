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
    top_k, gather = backend.ops.top_k, backend.ops.gather_logprobs
    logits, tokens = logits.float(), tokens.unsqueeze(1)
    vocab = logits.shape[1]
    result = [TokenLogprobs([], [], []) for _ in range(len(tokens))]
    widths = np.where(counts == -1, vocab, np.minimum(counts, vocab))
    widths[list(asked)] = -1
    for width in np.unique(widths[widths >= 0]).tolist():
        lines = np.flatnonzero(widths == width)
        own = select_lines(logits, lines)
        ids = select_lines(tokens, lines)
        if width:
            ids = torch.cat((ids, top_k(own, width)[1]), dim=1)
        values, ranks = gather(own, ids, 1, normalise)
        for line, *found in zip(lines.tolist(), ids.tolist(), values.tolist(), ranks.tolist(), strict=True):
            result[line] = TokenLogprobs(found[0], found[1], [*found[2], *range(1, width + 1)])
    for line, of_line in asked.items():
        ids = torch.cat((tokens[line], torch.tensor(list(of_line), device=tokens.device))).unsqueeze(0)
        values, ranks = gather(logits[line : line + 1], ids, ids.shape[1], normalise)
        result[line] = TokenLogprobs(ids[0].tolist(), values[0].tolist(), ranks[0].tolist())
    return result


def select_lines(tensor: torch.Tensor, lines: np.ndarray) -> torch.Tensor:
    """These lines of a tensor; the tensor itself if they are all of it."""
    return tensor if len(lines) == len(tensor) else tensor.index_select(0, torch.from_numpy(lines).to(tensor.device))
