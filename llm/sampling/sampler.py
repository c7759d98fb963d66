"""The sampler: from raw logits to one token per row, and the logprobs that were asked for.

The steps, in order (vLLM V1's):
 1. logits in float32;
 2. raw logprobs, for the rows that asked for them;
 3. min_tokens: EOS and stop tokens get -inf until enough tokens are out;
 4. greedy rows take the argmax and are done;
 5. temperature;  6. min_p;  7. top_k, of equal ones those with the lowest ids;  8. top_p on what is left;
 9. draw, by the inverse of the cumulative distribution at one uniform number keyed by (seed, sample index, position);
10. gather the logprobs and rank of the drawn token and the top ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from llm.sampling.philox import uniform
from llm.sampling_params import MIN_TEMPERATURE, SamplingParams

# top_k up to here is cut by torch.topk; beyond, the row is sorted.
_TOPK_LIMIT = 1024
_INT64_MAX = 2**63 - 1
NO_LOGPROBS = -2


@dataclass
class TokenLogprobs:
    """Logprobs of one drawn token: ids, logprobs and ranks, the drawn token first, then the top ones in order."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class SamplingRows:
    """Sampling parameters by batch row, as arrays that move with the rows."""

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.sample_index = np.zeros(max_num_seqs, dtype=np.int64)
        self.logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        # row -> (min_tokens, the ids that may not be drawn before); only rows that have min_tokens.
        self.min_tokens: dict[int, tuple[int, list[int]]] = {}

    def set(self, row: int, params: SamplingParams, seed: int, sample_index: int, suppressed: list[int]) -> None:
        self.temperature[row] = 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
        self.top_k[row] = min(params.top_k, _INT64_MAX)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seed
        self.sample_index[row] = sample_index
        self.logprobs[row] = NO_LOGPROBS if params.logprobs is None else min(params.logprobs, _INT64_MAX)
        self.min_tokens.pop(row, None)
        if params.min_tokens and suppressed:
            self.min_tokens[row] = (params.min_tokens, suppressed)

    def move(self, source: int, target: int) -> None:
        for array in self._arrays():
            array[target] = array[source]
        self.min_tokens.pop(target, None)
        if source in self.min_tokens:
            self.min_tokens[target] = self.min_tokens.pop(source)

    def clear(self, row: int) -> None:
        self.min_tokens.pop(row, None)

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return (
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
            self.sample_index,
            self.logprobs,
        )


@dataclass
class SamplerOutput:
    """`tokens` int64 [L]; `logprobs`: index into them -> what that row asked for."""

    tokens: torch.Tensor
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    def __call__(
        self, logits: torch.Tensor, params: SamplingRows, rows: np.ndarray, outputs: np.ndarray
    ) -> SamplerOutput:
        """Draw one token per row.

        Args:
            logits: float [L, vocab]; may be overwritten.
            params: of all batch rows.
            rows: int64 [L], the batch row of each line of `logits`.
            outputs: int64 [L], how many tokens each row has generated so far.
        """
        logits = logits.float()
        raw = self._raw_logprobs(logits, params.logprobs[rows])
        self._suppress(logits, params, rows, outputs)
        tokens = logits.argmax(dim=-1)
        random = np.nonzero(params.temperature[rows] > 0)[0]
        if len(random):
            tokens[torch.from_numpy(random)] = self._draw(logits, params, rows, outputs, random)
        return SamplerOutput(tokens, self._gather(raw, params.logprobs[rows], tokens))

    def _raw_logprobs(self, logits: torch.Tensor, wanted: np.ndarray) -> dict[int, torch.Tensor]:
        lines = np.nonzero(wanted != NO_LOGPROBS)[0].tolist()
        return {line: logits[line].log_softmax(dim=-1) for line in lines}

    def _suppress(self, logits: torch.Tensor, params: SamplingRows, rows: np.ndarray, outputs: np.ndarray) -> None:
        if not params.min_tokens:
            return
        vocab = logits.shape[-1]
        for line, row in enumerate(rows.tolist()):
            minimum, ids = params.min_tokens.get(row, (0, []))
            if outputs[line] < minimum:
                logits[line, [token for token in ids if token < vocab]] = -math.inf

    def _draw(
        self, logits: torch.Tensor, params: SamplingRows, rows: np.ndarray, outputs: np.ndarray, lines: np.ndarray
    ) -> torch.Tensor:
        """Steps 5 to 9 for the given lines. Each kind of cut is its own pass, so no row sees its companions' cut."""
        batch_rows = rows[lines]
        draws = uniform(params.seed[batch_rows], params.sample_index[batch_rows], outputs[lines])
        top_k, top_p = params.top_k[batch_rows], params.top_p[batch_rows]
        small = (top_k > 0) & (top_k <= _TOPK_LIMIT)
        sort = ~small & ((top_p < 1.0) | (top_k > 0))
        tokens = np.empty(len(lines), dtype=np.int64)
        for chosen, cut in ((small, "topk"), (sort, "sort"), (~small & ~sort, "none")):
            if not chosen.any():
                continue
            scaled = logits[torch.from_numpy(lines[chosen])]
            scaled /= torch.from_numpy(params.temperature[batch_rows[chosen]]).unsqueeze(1)
            min_p = torch.from_numpy(params.min_p[batch_rows[chosen]]).unsqueeze(1)
            tokens[chosen] = _draw_rows(
                scaled,
                min_p,
                torch.from_numpy(top_k[chosen]).unsqueeze(1),
                torch.from_numpy(top_p[chosen]).unsqueeze(1),
                torch.from_numpy(draws[chosen]).unsqueeze(1),
                cut,
            )
        return torch.from_numpy(tokens)

    def _gather(
        self, raw: dict[int, torch.Tensor], wanted: np.ndarray, tokens: torch.Tensor
    ) -> dict[int, TokenLogprobs]:
        gathered = {}
        for line, logprobs in raw.items():
            token = int(tokens[line])
            count = int(wanted[line])
            values, ids = torch.topk(logprobs, len(logprobs) if count == -1 else min(count, len(logprobs)))
            rank = int((logprobs >= logprobs[token]).sum())
            gathered[line] = TokenLogprobs(
                [token, *ids.tolist()],
                [float(logprobs[token]), *values.tolist()],
                [rank, *range(1, len(ids) + 1)],
            )
        return gathered


def _draw_rows(
    logits: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    draws: torch.Tensor,
    cut: str,
) -> np.ndarray:
    """Draw from softmax(logits) after min_p, top_k and top_p.

    Shapes: logits float32 [n, vocab]; the others [n, 1]; `cut` says how the likeliest come first: "topk", "sort", or
    "none" when neither top_k nor top_p asks for an order. Returns token ids [n].
    """
    top = logits.amax(dim=-1, keepdim=True)
    logits = logits.masked_fill(logits < top + min_p.log(), -math.inf)
    ids = None
    if cut == "topk":
        logits, ids = _likeliest(logits, top_k)
    elif cut == "sort":
        logits, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    weights = (logits - top).double().exp_()
    if ids is not None:
        order = torch.arange(weights.shape[-1])
        weights.masked_fill_((order >= top_k) & (top_k > 0), 0.0)
        cumulative = weights.cumsum(dim=-1)
        weights.masked_fill_(cumulative - weights >= top_p * cumulative[:, -1:], 0.0)
    cumulative = weights.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    # Rounding can put the target at the very end: take the last token that has any weight.
    last = (weights > 0).double().cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    index = torch.minimum(index, last)
    return (index if ids is None else ids.gather(1, index)).squeeze(1).numpy()


def _likeliest(logits: torch.Tensor, top_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """At least the `top_k` [n, 1] likeliest of each row, equal ones in order of id: (logits, ids) [n, width].

    `torch.topk` takes and orders equal values as it likes, differently for different widths, and the width is the
    companions' affair. So its ids are put in order, and a row whose equals may be beyond the edge is sorted as a whole.
    """
    width = min(int(top_k.max()) + 1, logits.shape[-1])
    values, ids = torch.topk(logits, width, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, order = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    least = values.gather(1, (top_k - 1).clamp(max=width - 1))
    cut_off = ((values[:, -1:] == least) & (least > -math.inf)).squeeze(1)
    if width < logits.shape[-1] and cut_off.any():
        whole, whole_ids = torch.sort(logits[cut_off], dim=-1, descending=True, stable=True)
        values[cut_off], ids[cut_off] = whole[:, :width], whole_ids[:, :width]
    return values, ids
