"""What a step's logit rows give: sampled tokens, accepted drafts, logprobs of prompt tokens.

The token sampled at a position depends on the row's logits, its parameters and (seed, position) alone. So
the token that a row would sample without drafts is known, and a draft is right if it equals that token: no rejection
sampling, and the same distribution and bits as without drafts. A row takes the sampled token of each of its logit rows,
up to and including the first that differs from the draft. The logits of later logit rows followed a wrong token.

Logits processors see the output tokens up to their logit row. So logit rows are sampled in rounds: the first logit row
of every row, then the second logit row of the rows whose first draft was right, and so on. Between rounds the accepted
tokens are appended and `update_state(None)` is called, as between steps; to a processor a round is a step in which the
other rows are not scheduled. No state is ever rolled back. Without active processors one round samples all logit rows.
Where a grammar is the only one and leaves no other token than the draft, there is nothing to sample: a round begins
with all such tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from llm.engine.step import RunnerOutput
from llm.errors import LogitsProcessorError
from llm.kernels.backend import Backend
from llm.runner.batch import Drafts, InputBatch, LogitRows
from llm.runner.recorded import Scores
from llm.sampling.logits_processors.pipeline import LogitsProcessors
from llm.sampling.logprobs import NO_LOGPROBS, TokenLogprobs, select_logit_rows
from llm.sampling.sampler import Pending, Sampler, SamplerOutput, SamplingRows

# The arguments of `Sampler`.
_ForSampler = tuple[torch.Tensor, SamplingRows, np.ndarray, np.ndarray, LogitsProcessors | None, int]
_MANY = 2**31  # more logprobs than any vocabulary has tokens


@dataclass
class Sampled:
    """The token of each logit row, and logit row -> requested logprobs, logit row -> error; logit rows are counted from
    the first."""

    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    def of(self, logit_rows: list[int]) -> Sampled:
        """The same of these logit rows, in this order."""
        places = list(enumerate(logit_rows))
        return Sampled(
            [self.tokens[logit_row] for logit_row in logit_rows],
            {index: self.logprobs[logit_row] for index, logit_row in places if logit_row in self.logprobs},
            {index: self.errors[logit_row] for index, logit_row in places if logit_row in self.errors},
        )

    def add(self, start: int, found: SamplerOutput) -> None:
        """Append the sampler's output for the logit rows from `start` on."""
        self.tokens += found.tokens.tolist()
        for logit_row, logprobs in found.logprobs.items():
            self.logprobs[start + logit_row] = logprobs
        for logit_row, error in found.errors.items():
            self.errors[start + logit_row] = error


@dataclass
class Unread:
    """What a device samples, which nobody has waited for.

    Attributes:
        rows: int64 [L], the batch row of each logit row.
        positions: int64 [L], of the tokens before the sampled ones.
        tokens: int64 [L], on the device.
        finish: waits for all of it, and is called once.
    """

    rows: np.ndarray
    positions: np.ndarray
    tokens: torch.Tensor
    finish: Callable[[], Sampled]


@dataclass
class LogitRowReader:
    """Turns the hidden states of one step's logit rows into the runner's answer.

    Attributes:
        batch: sampled tokens are appended to its rows.
        compute_logits: hidden states [L, H] and their batch rows -> float32 [L, vocab].
        logit_rows_at_once: most logit rows whose logits may be in memory at once.
        scores: hidden states -> the same logits if the step was recorded, else None.
        backend: uploads and downloads; a sampler that is being timed is a plain function.
    """

    batch: InputBatch
    sampler: Sampler
    processors: LogitsProcessors
    compute_logits: Callable[[torch.Tensor, np.ndarray], torch.Tensor]
    logit_rows_at_once: int
    scores: Callable[[torch.Tensor], Scores | None]
    backend: Backend

    def read(self, hidden: torch.Tensor, logit_rows: LogitRows, result: RunnerOutput) -> None:
        """Hidden states [L, H] of all logit rows -> tokens, logprobs and errors in `result`; tokens are also
        appended."""
        count = logit_rows.num_sampled
        if count < len(logit_rows.rows):
            self._score(hidden[count:], logit_rows.rows[count:], logit_rows.positions[count:], result)
            hidden, logit_rows = (
                hidden[:count],
                replace(logit_rows, rows=logit_rows.rows[:count], positions=logit_rows.positions[:count]),
            )
        if logit_rows.drafts is None:
            self.take(logit_rows.rows, self._sample(hidden, logit_rows.rows, logit_rows.positions), result)
        elif self.processors.is_idle() and not self.processors.custom:
            self._verify_at_once(hidden, logit_rows, logit_rows.drafts, result)
        else:
            self._verify_in_rounds(hidden, logit_rows, logit_rows.drafts, result)

    def _verify_at_once(
        self, hidden: torch.Tensor, logit_rows: LogitRows, drafts: Drafts, result: RunnerOutput
    ) -> None:
        sampled = self._sample(hidden, logit_rows.rows, logit_rows.positions)
        right = drafts.tokens == sampled.tokens
        right[list(sampled.errors)] = False
        lasts = np.flatnonzero(~right)
        lasts = lasts[np.searchsorted(lasts, drafts.firsts)]
        firsts, rows = drafts.firsts.tolist(), logit_rows.rows[drafts.firsts].tolist()
        for row, first, last in zip(rows, firsts, lasts.tolist(), strict=True):
            name = self.batch.request_ids[row]
            reached = range(first, last + 1)
            if sampled.logprobs:
                own = [sampled.logprobs[logit_row] for logit_row in reached if logit_row in sampled.logprobs]
                if own:
                    result.logprobs[name] = own
            if last in sampled.errors:
                result.errors[name] = sampled.errors[last]
                reached = range(first, last)
            if reached:
                result.sampled_token_ids[name] = sampled.tokens[reached.start : reached.stop]
                self.batch.extend(row, sampled.tokens[reached.start : reached.stop])

    def _verify_in_rounds(
        self, hidden: torch.Tensor, logit_rows: LogitRows, drafts: Drafts, result: RunnerOutput
    ) -> None:
        # One GEMM with the LM head for all rounds, if its result fits.
        scores, logits = self.scores(hidden), None
        if scores is not None:
            logits = scores.logits
        elif len(logit_rows.rows) <= self.logit_rows_at_once:
            logits = self.compute_logits(hidden, logit_rows.rows)

        def sample_round(current: np.ndarray) -> np.ndarray:
            if logits is not None:
                current = self._take_forced(logits, current, logit_rows.rows, result)
            own = _of_logit_rows(hidden if logits is None else logits, current)
            sampled = self._sample(own, logit_rows.rows[current], logit_rows.positions[current], logits is not None)
            self.take(logit_rows.rows[current], sampled, result)
            return _accepted(drafts, current, sampled)

        current = sample_round(drafts.firsts)
        try:
            while len(current):
                self.processors.update_state(None, _drafts_from(logit_rows.rows, drafts, current))
                current = sample_round(current)
        except LogitsProcessorError as error:
            # The accepted tokens may have ended these rows, so the engine decides whether the call fails.
            result.errors.update((self.batch.request_ids[row], error) for row in logit_rows.rows[current].tolist())

    def _take_forced(
        self, logits: torch.Tensor, current: np.ndarray, rows: np.ndarray, result: RunnerOutput
    ) -> np.ndarray:
        """Append the tokens to which a row's grammar leaves no alternative; returns the logit row after them of each
        row.

        A row that asks for logprobs samples them. So does one whose logits would give an error.
        """
        batch, after = self.batch, current.copy()
        for index, logit_row in enumerate(current.tolist()):
            row = int(rows[logit_row])
            tokens = self.processors.forced(row) if batch.sampling.logprobs[row] == NO_LOGPROBS else []
            if not tokens:
                continue
            own = logits[torch.arange(logit_row, logit_row + len(tokens)), tokens].isfinite().tolist()
            tokens = tokens[: [*own, False].index(False)]
            batch.extend(row, tokens)
            result.sampled_token_ids.setdefault(batch.request_ids[row], []).extend(tokens)
            after[index] += len(tokens)
        return after

    def start(self, source: torch.Tensor, rows: np.ndarray, positions: np.ndarray, has_logits: bool = False) -> Unread:
        """`_sample` on a device, which nobody waits for."""
        processors = None if self.processors.is_idle() else self.processors
        outputs = positions + 1 - self.batch.num_prompt_tokens[rows]
        scores = None if has_logits else self.scores(source)
        if scores is not None:  # of few logit rows: they are one chunk
            known = (scores.largest, scores.tokens, self.batch.sampling, outputs)
            likeliest = self.sampler.likeliest(*known) if processors is None else None
            if likeliest is not None:
                return self._unread(rows, positions, [likeliest])
            source, has_logits = scores.logits, True
        chunks = self._chunks(source, rows, outputs, processors, has_logits)
        return self._unread(rows, positions, [self.sampler.start(*arguments) for _, arguments in chunks])

    def _unread(self, rows: np.ndarray, positions: np.ndarray, pending: list[Pending]) -> Unread:
        tokens = [item.tensors[0] for item in pending]
        read = self.backend.start_download(*(tensor for item in pending for tensor in item.tensors))

        def finish() -> Sampled:
            sampled, arrays = Sampled(), iter(read())
            for item in pending:
                sampled.add(len(sampled.tokens), item.finish([next(arrays) for _ in item.tensors]))
            return sampled

        return Unread(rows, positions, tokens[0] if len(tokens) == 1 else torch.cat(tokens), finish)

    def _chunks(
        self,
        source: torch.Tensor,
        rows: np.ndarray,
        outputs: np.ndarray,
        processors: LogitsProcessors | None,
        has_logits: bool,
    ) -> Iterator[tuple[int, _ForSampler]]:
        """(first logit row, what the sampler is given) of each chunk; one chunk if a processor is active, as it must
        see the batch."""
        size = max(1, len(rows) if processors is not None else self.logit_rows_at_once)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            own = source if len(rows) <= size else source[part]
            logits = own if has_logits else self.compute_logits(own, rows[part])
            batch = self.batch
            yield start, (logits, batch.sampling, rows[part], outputs[part], processors, len(batch.request_ids))

    def _sample(
        self, source: torch.Tensor, rows: np.ndarray, positions: np.ndarray, has_logits: bool = False
    ) -> Sampled:
        """LM head and sampler in chunks of logit rows.

        `source`: hidden states [L, H]; if `has_logits`, logits [L, vocab], which may be overwritten.
        """
        if not len(rows):
            return Sampled()
        if not self.backend.shares_host_memory and isinstance(self.sampler, Sampler):
            return self.start(source, rows, positions, has_logits).finish()
        batch = self.batch
        processors = None if self.processors.is_idle() else self.processors
        scores = None if has_logits else self.scores(source)
        outputs = positions + 1 - batch.num_prompt_tokens[rows]
        sampled = Sampled()
        if scores is not None:  # of few logit rows: they are one chunk
            source, has_logits = scores.logits, True
            known = (scores.largest, scores.tokens, batch.sampling, outputs)
            likeliest = self.sampler.likeliest(*known) if processors is None else None
            if likeliest is not None:
                sampled.add(0, likeliest.finish(self.backend.download(*likeliest.tensors)))
                return sampled
        for start, arguments in self._chunks(source, rows, outputs, processors, has_logits):
            sampled.add(start, self.sampler(*arguments))
        return sampled

    def take(self, rows: np.ndarray, sampled: Sampled, result: RunnerOutput) -> None:
        """Append to each row its sampled token, or record the error."""
        batch, tokens = self.batch, sampled.tokens
        request_ids = [batch.request_ids[row] for row in rows.tolist()]
        for index, logprobs in sampled.logprobs.items():
            result.logprobs.setdefault(request_ids[index], []).append(logprobs)
        if sampled.errors:
            result.errors.update((request_ids[index], error) for index, error in sampled.errors.items())
            good = [index for index in range(len(rows)) if index not in sampled.errors]
            rows, tokens, request_ids = rows[good], [tokens[index] for index in good], [request_ids[i] for i in good]
        batch.append(rows, tokens)
        if not result.sampled_token_ids:
            result.sampled_token_ids = {
                request_id: [token] for request_id, token in zip(request_ids, tokens, strict=True)
            }
            return
        for request_id, token in zip(request_ids, tokens, strict=True):
            result.sampled_token_ids.setdefault(request_id, []).append(token)

    def _score(self, hidden: torch.Tensor, rows: np.ndarray, positions: np.ndarray, result: RunnerOutput) -> None:
        """LM head and logprobs of the prompt tokens after these logit rows, in chunks of logit rows."""
        batch, size = self.batch, self.logit_rows_at_once
        tokens = batch.token_ids[rows, positions + 1].astype(np.int64)
        counts = np.array([min(batch.params[row].prompt_logprobs or 0, _MANY) for row in rows.tolist()])
        found: list[TokenLogprobs] = []
        scores: dict[int, list[float]] = {}
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            logits = self.compute_logits(hidden[part], rows[part])
            chosen = self.backend.upload(tokens[part])
            found += self.sampler.gather_logprobs(logits, chosen, counts[part], {})
            requested = self._prompt_logprob_token_ids(rows[part], positions[part])
            if requested:
                logit_rows = np.array(list(requested))
                known = {index: [max(token, 0) for token in ids] for index, ids in enumerate(requested.values())}
                own_tokens = select_logit_rows(chosen, logit_rows, self.backend)
                gathered = self.sampler.gather_logprobs(
                    select_logit_rows(logits, logit_rows, self.backend),
                    own_tokens,
                    np.zeros(len(logit_rows), dtype=np.int64),
                    known,
                )
                for (logit_row, ids), own in zip(requested.items(), gathered, strict=True):
                    values = zip(ids, own.logprobs[1:], strict=True)
                    scores[start + logit_row] = [value if token >= 0 else -math.inf for token, value in values]
        for row, logprobs in zip(rows.tolist(), found, strict=True):
            result.prompt_logprobs.setdefault(batch.request_ids[row], []).append(logprobs)
        for index, of_logit_row in scores.items():
            result.prompt_scores.setdefault(batch.request_ids[rows[index]], []).append(of_logit_row)

    def _prompt_logprob_token_ids(self, rows: np.ndarray, positions: np.ndarray) -> dict[int, list[int]]:
        """Logit row -> its `prompt_logprob_token_ids`, as long as the longest."""
        found = {}
        for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            params = self.batch.params[row]
            place = position - (params.prompt_logprob_start or 0)
            if params.prompt_logprob_token_ids is not None and place >= 0:
                found[index] = params.prompt_logprob_token_ids[place]
        return found


def _of_logit_rows(tensor: torch.Tensor, logit_rows: np.ndarray) -> torch.Tensor:
    """These logit rows of a tensor; a single one without a copy, as no logit row is read twice."""
    return tensor[logit_rows[0] : logit_rows[0] + 1] if len(logit_rows) == 1 else select_logit_rows(tensor, logit_rows)


def _drafts_from(rows: np.ndarray, drafts: Drafts, current: np.ndarray) -> dict[int, list[int]]:
    """Batch row -> its drafts after each of the `current` logit rows."""
    lasts = drafts.ends[np.searchsorted(drafts.ends, current, side="right")] - 1
    return {
        int(rows[logit_row]): drafts.tokens[logit_row:last].tolist()
        for logit_row, last in zip(current.tolist(), lasts.tolist(), strict=True)
    }


def _accepted(drafts: Drafts, current: np.ndarray, sampled: Sampled) -> np.ndarray:
    """The next logit row of each row whose sampled token equals its draft."""
    is_right = drafts.tokens[current] == sampled.tokens
    is_right[list(sampled.errors)] = False
    return current[is_right] + 1
