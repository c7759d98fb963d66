"""The sampler: from rows of logits to a token each, and the requested logprobs.

A logit row belongs to one batch row, which has several of them with drafts. The steps, in vLLM V1's order:
 1. logits in float32;
 2. the grammar's mask (structured outputs);
 3. raw logprobs, or raw logits, for the logit rows that requested logprobs;
 4. `allowed_token_ids`;  5. `bad_words`;
 6. processors that may change the argmax: min_tokens, logit_bias, custom ones, then the request's own;
 7. penalties: repetition, frequency, presence; then `thinking_token_budget`;
 8. greedy logit rows take the argmax and are done;
 9. temperature;
10. argmax-invariant processors: min_p, then custom ones;
11. top_k, ties broken by the lower id;  12. top_p on what is left;
13. draw, inverting the cumulative distribution at one uniform number keyed by (seed, sample index, position);
14. gather the logprobs and ranks of the sampled token and the top tokens.

"Processed" logprobs are those after step 7 for a greedy logit row and after step 12 for a random one. They do not
depend on other logit rows. A request ends with an error if steps 2 to 7, or 10, leave it no token (every logit is -inf,
or one is NaN), or if its own processor raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from llm.errors import SamplingError
from llm.kernels.backend import Backend
from llm.kernels.reference.backend import REFERENCE
from llm.sampling.draw import draw_on_device, draw_rows, uniform
from llm.sampling.logits_processors.pipeline import LogitsProcessors
from llm.sampling.logprobs import (
    NO_LOGPROBS,
    TokenLogprobs,
    compute_logprobs,
    gather_logprobs,
    read_logprobs,
    select_logit_rows,
)
from llm.sampling_params import MIN_TEMPERATURE, SamplingParams

_INT64_MAX = 2**63 - 1


class SamplingRows:
    """Sampling parameters by batch row, in arrays that are updated as rows move."""

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float64)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.sample_index = np.zeros(max_num_seqs, dtype=np.int64)
        self.logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        # Batch rows that draw or want logprobs; the others need the argmax alone.
        self.demanding: set[int] = set()
        # batch row -> `logprob_token_ids`, for rows that set them.
        self.logprob_token_ids: dict[int, list[int]] = {}

    def set(self, row: int, params: SamplingParams, seed: int, sample_index: int) -> None:
        self.temperature[row] = 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
        self.top_k[row] = min(params.top_k, _INT64_MAX)
        self.top_p[row] = params.top_p
        self.seed[row] = seed
        self.sample_index[row] = sample_index
        self.logprobs[row] = NO_LOGPROBS if params.logprobs is None else min(params.logprobs, _INT64_MAX)
        self.logprob_token_ids.pop(row, None)
        if params.logprob_token_ids:
            self.logprobs[row] = len(params.logprob_token_ids)
            self.logprob_token_ids[row] = params.logprob_token_ids
        self.demanding.discard(row)
        if not params.greedy or self.logprobs[row] != NO_LOGPROBS:
            self.demanding.add(row)

    def move(self, source: int, target: int) -> None:
        draws = (self.temperature, self.top_k, self.top_p, self.seed, self.sample_index)
        for array in (*draws, self.logprobs):
            array[target] = array[source]
        self.demanding.discard(target)
        if source in self.demanding:
            self.demanding.remove(source)
            self.demanding.add(target)
        self.logprob_token_ids.pop(target, None)
        if source in self.logprob_token_ids:
            self.logprob_token_ids[target] = self.logprob_token_ids.pop(source)

    def clear(self, row: int) -> None:
        self.demanding.discard(row)
        self.logprob_token_ids.pop(row, None)

    def clear_all(self) -> None:
        self.demanding.clear()
        self.logprob_token_ids.clear()


@dataclass
class SamplerOutput:
    """`tokens` int64 [L]; `logprobs`: logit row -> those it requested; `errors`: logit row -> why it has no token."""

    tokens: torch.Tensor
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)


@dataclass
class Pending:
    """A sampler's output that is still on the device: the tensors to read, and what makes it of their values."""

    tensors: list[torch.Tensor]
    finish: Callable[[Sequence[np.ndarray]], SamplerOutput]


class Sampler:
    """Args:
    logprobs_mode: raw or processed x logprobs or logits, see `llm.sampling.logprobs.MODES`.
    backend: what computes it.
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs", backend: Backend = REFERENCE) -> None:
        self.logprobs_mode = logprobs_mode
        self.backend = backend
        self.gather_logprobs = partial(gather_logprobs, normalise=logprobs_mode.endswith("logprobs"), backend=backend)

    def likeliest(
        self, largest: torch.Tensor, tokens: torch.Tensor, params: SamplingRows, outputs: np.ndarray
    ) -> Pending | None:
        """The output for logit rows without active processors whose `argmax` is known; None: a batch row needs more."""
        if params.demanding:
            return None

        def finish(arrays: Sequence[np.ndarray]) -> SamplerOutput:
            found = SamplerOutput(torch.from_numpy(arrays[0]), errors=_errors_of(arrays[1].tolist()))
            return self.final(found, outputs)

        return Pending([tokens, largest], finish)

    def __call__(
        self,
        logits: torch.Tensor,
        params: SamplingRows,
        rows: np.ndarray,
        outputs: np.ndarray,
        processors: LogitsProcessors | None = None,
        batch_size: int = 0,
    ) -> SamplerOutput:
        """Draw one token per logit row.

        Args:
            logits: float [L, vocab]; may be overwritten.
            params: of all batch rows.
            rows: int64 [L], the batch row of each logit row; increasing if processors are given.
            outputs: int64 [L], number of tokens that the row has generated so far.
            processors: None if all are idle.
            batch_size: number of batch rows, for the processors.
        """
        if not self.backend.shares_host_memory:
            pending = self.start(logits, params, rows, outputs, processors, batch_size)
            return pending.finish(self.backend.download(*pending.tensors))
        step = _Step(self, params, rows, outputs, processors, batch_size)
        return self.final(step.run(logits.float()), outputs)

    def start(
        self,
        logits: torch.Tensor,
        params: SamplingRows,
        rows: np.ndarray,
        outputs: np.ndarray,
        processors: LogitsProcessors | None = None,
        batch_size: int = 0,
    ) -> Pending:
        """The same on a device, which nobody waits for."""
        pending = _DeviceStep(self, params, rows, outputs, processors, batch_size).start(logits.float())
        return Pending(pending.tensors, lambda arrays: self.final(pending.finish(arrays), outputs))

    def final(self, found: SamplerOutput, outputs: np.ndarray) -> SamplerOutput:
        """What the sampler gives of a step's output; `outputs` as in `__call__`."""
        return found


@dataclass
class _Step:
    """One call of the sampler.

    Attributes:
        reported: (logit rows, logits [logit rows, vocab] to take logprobs of), for those that requested logprobs.
    """

    sampler: Sampler
    params: SamplingRows
    rows: np.ndarray
    outputs: np.ndarray
    processors: LogitsProcessors | None
    batch_size: int
    errors: dict[int, Exception] = field(default_factory=dict)
    reported: list[tuple[np.ndarray, torch.Tensor]] = field(default_factory=list)

    def run(self, logits: torch.Tensor) -> SamplerOutput:
        logits, largest, tokens, random, wanted = self._processed(logits)
        if len(random):
            self._draw(logits, largest, random, tokens, wanted)
        return SamplerOutput(tokens, self._gather(tokens), self.errors)

    def _processed(
        self, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
        """Steps 1 to 8: (logits, the largest and their tokens, logit rows to draw, those with processed logprobs)."""
        temperature = self.params.temperature[self.rows]
        wants_logprobs = self.params.logprobs[self.rows] != NO_LOGPROBS
        raw = self.sampler.logprobs_mode.startswith("raw")
        random = np.flatnonzero(temperature > 0)
        logits = self._apply("grammar", logits)
        if raw:
            self._report(np.flatnonzero(wants_logprobs), logits, len(random) > 0 or self.processors is not None)
        logits = self._apply("non_argmax_invariant", logits)
        largest, tokens = self._argmax(logits)
        if not raw:
            self._report(np.flatnonzero(wants_logprobs & (temperature == 0)), logits, len(random) > 0)
        wanted = random[:0] if raw else np.flatnonzero(wants_logprobs & (temperature > 0))
        return logits, largest, tokens, random, wanted

    def _draws_of(self, random: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """top_k, top_p and the uniform numbers of these logit rows."""
        rows = self.rows[random]
        numbers = uniform(self.params.seed[rows], self.params.sample_index[rows], self.outputs[random])
        return self.params.top_k[rows], self.params.top_p[rows], numbers

    def _draw(
        self, logits: torch.Tensor, largest: torch.Tensor, random: np.ndarray, tokens: torch.Tensor, wanted: np.ndarray
    ) -> None:
        """Steps 9 to 13 for the logit rows of `random`; writes their tokens into `tokens`."""
        logits, largest, random = self._warm(logits, largest, random)
        if not len(random):
            return
        keep = set(np.flatnonzero(np.isin(random, wanted)).tolist())
        draws = draw_rows(logits, largest, *self._draws_of(random), keep, self.sampler.backend)
        tokens[_index(random, tokens)] = torch.from_numpy(draws.tokens).to(tokens.device)
        for index, ids in draws.kept.items():
            kept = _index(ids, logits)
            masked = torch.full_like(logits[index : index + 1], -math.inf)
            masked[0, kept] = logits[index, kept]
            self.reported.append((random[index : index + 1], masked))

    def _warm(
        self, logits: torch.Tensor, largest: torch.Tensor, random: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Steps 9 and 10: (logits, largest logits, logit rows) of the logit rows of `random` that have a token left."""
        late = self.processors is not None and any(not item.is_idle() for item in self.processors.argmax_invariant)
        if not late:
            random = self._without_errors(random)
            logits, largest = self._select(logits, random), self._select(largest, random)
        temperature = self.params.temperature[self.rows if late else self.rows[random]]
        divisor = self.sampler.backend.upload(np.where(temperature > 0, temperature, np.float32(1.0)))
        logits = self.sampler.backend.ops.divide_rows(logits, divisor)
        if not late:
            # Division is monotonic, so the largest quotient is the quotient of the largest.
            return logits, largest / divisor, random
        logits = self._apply("argmax_invariant", logits)
        largest, _ = self._argmax(logits)
        random = self._without_errors(random)
        return self._select(logits, random), self._select(largest, random), random

    def _select(self, tensor: torch.Tensor, logit_rows: np.ndarray) -> torch.Tensor:
        return select_logit_rows(tensor, logit_rows, self.sampler.backend)

    def _without_errors(self, logit_rows: np.ndarray) -> np.ndarray:
        return (
            logit_rows
            if not self.errors
            else logit_rows[[logit_row not in self.errors for logit_row in logit_rows.tolist()]]
        )

    def _apply(self, stage: str, logits: torch.Tensor) -> torch.Tensor:
        processors = self.processors
        if processors is None:
            return logits
        return processors.apply(getattr(processors, stage), logits, self.rows, self.batch_size, self.errors)

    def _argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(largest logit, its token) of each logit row; logit rows without a token are recorded in `errors`."""
        largest, tokens = self.sampler.backend.ops.argmax(logits)
        self._check(largest.tolist())
        return largest, tokens

    def _check(self, largest: list[float]) -> None:
        self.errors = _errors_of(largest) | self.errors

    def _report(self, logit_rows: np.ndarray, logits: torch.Tensor, overwritten: bool) -> None:
        """Record logits to take logprobs of. `overwritten`: True if later steps may overwrite `logits`."""
        if not len(logit_rows):
            return
        own = self._select(logits, logit_rows)
        self.reported.append((logit_rows, own.clone() if overwritten and own is logits else own))

    def _gather(self, tokens: torch.Tensor) -> dict[int, TokenLogprobs]:
        gathered: dict[int, TokenLogprobs] = {}
        for logit_rows, logits in self.reported:
            own = self.sampler.gather_logprobs(logits, *self._requested(tokens, logit_rows))
            gathered.update(zip(logit_rows.tolist(), own, strict=True))
        return self._good(gathered)

    def _requested(
        self, tokens: torch.Tensor, logit_rows: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray, dict[int, list[int]]]:
        """Of these logit rows: tokens, numbers of top logprobs, and index -> the ids whose logprobs are requested."""
        rows, ids_of = self.rows[logit_rows], self.params.logprob_token_ids
        requested = {index: ids_of[row] for index, row in enumerate(rows.tolist()) if row in ids_of}
        return self._select(tokens, logit_rows), self.params.logprobs[rows], requested

    def _good(self, gathered: dict[int, TokenLogprobs]) -> dict[int, TokenLogprobs]:
        return {logit_row: own for logit_row, own in gathered.items() if logit_row not in self.errors}


@dataclass
class _DeviceStep(_Step):
    """The same steps, queued on a device: what they give is read once, when all of it is known.

    Attributes:
        checked: largest logits [L], of logit rows that have an error if they have no token.
    """

    checked: list[torch.Tensor] = field(default_factory=list)

    def start(self, logits: torch.Tensor) -> Pending:
        logits, largest, tokens, random, wanted = self._processed(logits)
        if len(random):
            tokens = self._drawn(logits, largest, random, tokens, wanted)
        backend, normalise = self.sampler.backend, self.sampler.logprobs_mode.endswith("logprobs")
        computed = [
            (logit_rows, compute_logprobs(own, *self._requested(tokens, logit_rows), normalise, backend))
            for logit_rows, own in self.reported
        ]
        gathered = [tensor for _, parts in computed for part in parts for tensor in part.tensors]

        def finish(arrays: Sequence[np.ndarray]) -> SamplerOutput:
            start = 1 + len(self.checked)
            for values in arrays[1:start]:
                self._check(values.tolist())
            logprobs: dict[int, TokenLogprobs] = {}
            for logit_rows, parts in computed:
                end = start + 3 * len(parts)
                logprobs.update(
                    zip(logit_rows.tolist(), read_logprobs(len(logit_rows), parts, arrays[start:end]), strict=True)
                )
                start = end
            return SamplerOutput(torch.from_numpy(arrays[0]), self._good(logprobs), self.errors)

        return Pending([tokens, *self.checked, *gathered], finish)

    def _argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest, tokens = self.sampler.backend.ops.argmax(logits)
        self.checked.append(largest)
        return largest, tokens

    def _drawn(
        self, logits: torch.Tensor, largest: torch.Tensor, random: np.ndarray, tokens: torch.Tensor, wanted: np.ndarray
    ) -> torch.Tensor:
        """Steps 9 to 13: the tokens, with those of the logit rows of `random`. `wanted`: those that have processed
        logprobs."""
        backend = self.sampler.backend
        logits, largest, random = self._warm(logits, largest, random)
        wanted = np.flatnonzero(np.isin(random, wanted))
        drawn, kept = draw_on_device(logits, largest, *self._draws_of(random), len(wanted) > 0, backend)
        if kept is not None:
            among = logits.masked_fill(~kept, -math.inf)
            self.reported.append((random[wanted], self._select(among, wanted)))
        return tokens.index_copy(0, backend.upload(random), drawn)


def _errors_of(largest: list[float]) -> dict[int, Exception]:
    """Of the logit rows without a token, by their largest logits."""
    return {
        logit_row: SamplingError(_NAN if math.isnan(value) else _ALL_BARRED)
        for logit_row, value in enumerate(largest)
        if not value > -math.inf
    }


def _index(logit_rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(logit_rows).to(like.device)


_ALL_BARRED = "no token is left to draw: the parameters or processors of this request give every token a logit of -inf."
_NAN = "a logit is NaN, of the model or of a logits processor, so no token can be drawn."


class ForcedSampler(Sampler):
    """Computes tokens as `sampler` does, and replaces each by that of `answer` at its place."""

    def __init__(self, sampler: Sampler, answer: Sequence[int]) -> None:
        super().__init__(sampler.logprobs_mode, sampler.backend)
        self._answer = np.array(answer, dtype=np.int64)

    def final(self, found: SamplerOutput, outputs: np.ndarray) -> SamplerOutput:
        return replace(found, tokens=torch.from_numpy(self._answer[np.minimum(outputs, len(self._answer) - 1)]))
