"""Logprobs of chosen tokens, of the likeliest ones, and of any others that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llm.kernels.reference.vocabulary import log_softmax

# Logprobs are gathered for so many of a row's tokens at a time, to rank them.
_RANKED_AT_ONCE = 16
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


def as_logprobs(
    logits: torch.Tensor, mode: str, log_softmax: Callable[[torch.Tensor], torch.Tensor] = log_softmax
) -> torch.Tensor:
    """Float32 [n, vocab]: what `mode` reports of these logits, log-softmax or themselves; always a new tensor.

    `log_softmax`: the platform's.
    """
    return log_softmax(logits) if mode.endswith("logprobs") else logits.to(torch.float32, copy=True)


def gather_logprobs(
    values: torch.Tensor, tokens: torch.Tensor, counts: np.ndarray, asked: Mapping[int, Sequence[int]]
) -> list[TokenLogprobs]:
    """One `TokenLogprobs` per line.

    Args:
        values: float32 [n, vocab].
        tokens: int64 [n], the chosen tokens.
        counts: int64 [n], how many top ones; -1: all.
        asked: line -> ids to report in place of the top ones.
    """
    vocab = values.shape[1]
    chosen = values.gather(1, tokens.unsqueeze(1))
    ranks = (values >= chosen).sum(dim=-1).tolist()
    result = [
        TokenLogprobs([token], [value], [rank])
        for token, value, rank in zip(tokens.tolist(), chosen.squeeze(1).tolist(), ranks, strict=True)
    ]
    widths = np.where(counts == -1, vocab, np.minimum(counts, vocab))
    widths[list(asked)] = 0
    for width in np.unique(widths[widths > 0]).tolist():
        lines = np.flatnonzero(widths == width)
        top_values, top_ids = torch.topk(values[torch.from_numpy(lines).to(values.device)], width, dim=-1)
        for line, ids, own in zip(lines.tolist(), top_ids.tolist(), top_values.tolist(), strict=True):
            result[line].token_ids += ids
            result[line].logprobs += own
            result[line].ranks += range(1, width + 1)
    for line, ids in asked.items():
        own_values = values[line, torch.tensor(list(ids), device=values.device)]
        result[line].token_ids += ids
        result[line].logprobs += own_values.tolist()
        for part in own_values.split(_RANKED_AT_ONCE):
            result[line].ranks += (values[line] >= part.unsqueeze(1)).sum(dim=-1).tolist()
    return result
