"""Logprobs of chosen tokens, of the likeliest ones, and of any others that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llm.kernels.select import REFERENCE, KernelSet

NO_LOGPROBS = -2
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


@dataclass
class TokenLogprobs:
    """Logprobs of one token: ids, logprobs and ranks, the chosen token first, then the top ones in order.

    A rank counts the tokens at least as likely (vLLM's count), so equals share the last place among them.
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
    kernels: KernelSet = REFERENCE,
) -> list[TokenLogprobs]:
    """One `TokenLogprobs` per line.

    Args:
        logits: float [n, vocab].
        tokens: int64 [n], the chosen tokens.
        counts: int64 [n], how many top ones; -1: all. Of equal ones those with the lower ids come first.
        asked: line -> ids to report in place of the top ones.
        normalise: False: report the logits themselves.
        kernels: what computes it.
    """
    top_k, gather = kernels.op("top_k"), kernels.op("gather_logprobs")
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
    """These lines of a tensor; itself where that is all of them."""
    return tensor if len(lines) == len(tensor) else tensor.index_select(0, torch.from_numpy(lines).to(tensor.device))
