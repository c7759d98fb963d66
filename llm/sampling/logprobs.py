"""Logprobs of chosen tokens, of the likeliest ones, and of any others that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llm.kernels.reference.vocabulary import log_softmax

# Logprobs are gathered for so many of a row's tokens at a time, to rank them.
_RANKED_AT_ONCE = 16
# So few top ones are looked for in blocks of so many tokens.
_FEW = 32
_BLOCK = 512
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
    ranks = _count_rows(values >= chosen)
    result = [
        TokenLogprobs([token], [value], [rank])
        for token, value, rank in zip(tokens.tolist(), chosen.squeeze(1).tolist(), ranks, strict=True)
    ]
    widths = np.where(counts == -1, vocab, np.minimum(counts, vocab))
    widths[list(asked)] = 0
    for width in np.unique(widths[widths > 0]).tolist():
        lines = np.flatnonzero(widths == width)
        top_values, top_ids = _top(values[torch.from_numpy(lines).to(values.device)], width)
        for line, ids, own in zip(lines.tolist(), top_ids.tolist(), top_values.tolist(), strict=True):
            result[line].token_ids += ids
            result[line].logprobs += own
            result[line].ranks += range(1, width + 1)
    for line, ids in asked.items():
        own_values = values[line, torch.tensor(list(ids), device=values.device)]
        result[line].token_ids += ids
        result[line].logprobs += own_values.tolist()
        for part in own_values.split(_RANKED_AT_ONCE):
            result[line].ranks += _count_rows(values[line] >= part.unsqueeze(1))
    return result


def _count_rows(mask: torch.Tensor) -> list[int]:
    """True values of each row of bool [n, vocab]; several times as fast as torch's sum of a mask."""
    return [int(np.count_nonzero(row)) for row in mask.cpu().numpy()]


def _top(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row [n, vocab], in falling order: (values, ids) [n, count].

    The largest few stand in the few blocks that have the largest maxima, and only those are searched.
    """
    vocab = values.shape[1]
    blocks = vocab // _BLOCK
    if count > _FEW or blocks < 4 * count:
        return torch.topk(values, count, dim=-1)
    whole = blocks * _BLOCK
    chosen = values[:, :whole].unflatten(1, (blocks, _BLOCK)).amax(dim=-1).topk(count, dim=-1).indices
    ids = (chosen.unsqueeze(2) * _BLOCK + torch.arange(_BLOCK, device=values.device)).flatten(1)
    ids = torch.cat((ids, torch.arange(whole, vocab, device=values.device).expand(len(values), -1)), dim=1)
    top_values, places = torch.topk(values.gather(1, ids), count, dim=-1)
    return top_values, ids.gather(1, places)
