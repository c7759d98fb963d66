"""What a step's lines come to: tokens that are drawn, drafts that are accepted, logprobs that are scored.

Owns verification. The draw behind position p is a function of the row's logits, its parameters and (seed, p) alone, so
that the token a row would draw without drafts is known: a draft is right if it is that token. A row takes the tokens it
draws, line by line, up to the first that was not drafted; the lines behind it followed a wrong token and are void.

Processors see one token more with every line: their lists of output tokens grow, and `update_state(None)` is called, as
between steps. So lines are drawn in rounds, the rows' first lines, then the second lines of those that accepted; to a
processor a round is a step in which the other rows are not scheduled, and nothing is ever taken back. Where none can
have a say, all lines are drawn at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from llm.base.errors import LogitsProcessorError
from llm.engine.batch import Drafts, InputBatch, Lines
from llm.engine.step import RunnerOutput
from llm.sampling.logits_processors.pipeline import LogitsProcessors
from llm.sampling.logprobs import TokenLogprobs, select_lines
from llm.sampling.sampler import Sampler, SamplerOutput

_MANY = 2**31  # more logprobs than any vocabulary has tokens


@dataclass
class _Drawn:
    """Of some lines: the token of each, and by their index what was asked for and what went wrong."""

    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    def add(self, start: int, found: SamplerOutput) -> None:
        """The lines from `start` on."""
        self.tokens += found.tokens.tolist()
        for line, logprobs in found.logprobs.items():
            self.logprobs[start + line] = logprobs
        for line, error in found.errors.items():
            self.errors[start + line] = error

    def of(self, lines: list[int]) -> _Drawn:
        """As if only these lines had been drawn."""
        found = _Drawn([self.tokens[line] for line in lines])
        for index, line in enumerate(lines):
            if line in self.logprobs:
                found.logprobs[index] = self.logprobs[line]
            if line in self.errors:
                found.errors[index] = self.errors[line]
        return found


@dataclass
class LineReader:
    """Reads the hidden states of one step's lines.

    Attributes:
        batch: whose rows grow by what is drawn.
        compute_logits: hidden states [L, H] -> float32 [L, vocab].
        lines_at_once: for how many lines there is memory for logits.
    """

    batch: InputBatch
    sampler: Sampler
    processors: LogitsProcessors
    compute_logits: Callable[[torch.Tensor], torch.Tensor]
    lines_at_once: int

    def read(self, hidden: torch.Tensor, lines: Lines, result: RunnerOutput) -> None:
        """Hidden states [L, H] of all lines -> tokens, logprobs and errors in `result`; the rows grow."""
        count = lines.num_sampled
        if count < len(lines.rows):
            self._score(hidden[count:], lines.rows[count:], lines.positions[count:], result)
            hidden, lines = hidden[:count], replace(lines, rows=lines.rows[:count], positions=lines.positions[:count])
        if lines.drafts is None:
            self._take(lines.rows, self._draw(hidden, lines.rows, lines.positions), result)
        elif self.processors.is_idle() and not self.processors.custom:
            self._verify_at_once(hidden, lines, lines.drafts, result)
        else:
            self._verify_in_rounds(hidden, lines, lines.drafts, result)

    def _verify_at_once(self, hidden: torch.Tensor, lines: Lines, drafts: Drafts, result: RunnerOutput) -> None:
        drawn = self._draw(hidden, lines.rows, lines.positions)
        current = drafts.firsts
        while len(current):
            self._take(lines.rows[current], (own := drawn.of(current.tolist())), result)
            current = _accepted(drafts, current, own)

    def _verify_in_rounds(self, hidden: torch.Tensor, lines: Lines, drafts: Drafts, result: RunnerOutput) -> None:
        # One pass over the LM head for all rounds, if there is memory for it.
        logits = self.compute_logits(hidden) if len(lines.rows) <= self.lines_at_once else None

        def draw(current: np.ndarray) -> np.ndarray:
            own = select_lines(hidden if logits is None else logits, current)
            drawn = self._draw(own, lines.rows[current], lines.positions[current], logits is not None)
            self._take(lines.rows[current], drawn, result)
            return _accepted(drafts, current, drawn)

        current = draw(drafts.firsts)
        try:
            while len(current):
                self.processors.update_state(None)
                current = draw(current)
        except LogitsProcessorError as error:
            # The tokens these rows have by now may end them: whether the call fails is for the engine to say.
            result.errors.update((self.batch.request_ids[row], error) for row in lines.rows[current].tolist())

    def _draw(self, source: torch.Tensor, rows: np.ndarray, positions: np.ndarray, has_logits: bool = False) -> _Drawn:
        """Sampler, and LM head before it, over chunks of lines, or all at once where a processor must see the batch.

        `source`: hidden states [L, H], or, if `has_logits`, logits [L, vocab], which may be overwritten.
        """
        batch = self.batch
        processors = None if self.processors.is_idle() else self.processors
        size = len(rows) if processors is not None else self.lines_at_once
        outputs = positions + 1 - batch.num_prompt_tokens[rows]
        drawn = _Drawn()
        for start in range(0, len(rows), size or 1):
            part = slice(start, start + size)
            own = source if len(rows) <= size else source[part]
            logits = own if has_logits else self.compute_logits(own)
            found = self.sampler(logits, batch.sampling, rows[part], outputs[part], processors, len(batch.request_ids))
            drawn.add(start, found)
        return drawn

    def _take(self, rows: np.ndarray, drawn: _Drawn, result: RunnerOutput) -> None:
        """Give each row the token that was drawn for it, or note why there is none."""
        batch, tokens = self.batch, drawn.tokens
        request_ids = [batch.request_ids[row] for row in rows.tolist()]
        for index, logprobs in drawn.logprobs.items():
            result.logprobs.setdefault(request_ids[index], []).append(logprobs)
        if drawn.errors:
            result.errors.update((request_ids[index], error) for index, error in drawn.errors.items())
            good = [index for index in range(len(rows)) if index not in drawn.errors]
            rows, tokens, request_ids = rows[good], [tokens[index] for index in good], [request_ids[i] for i in good]
        batch.append(rows, tokens)
        if not result.sampled_token_ids:
            result.sampled_token_ids = {
                request_id: [token] for request_id, token in zip(request_ids, tokens, strict=True)
            }
            return
        for request_id, token in zip(request_ids, tokens, strict=True):
            result.sampled_token_ids[request_id].append(token)

    def _score(self, hidden: torch.Tensor, rows: np.ndarray, positions: np.ndarray, result: RunnerOutput) -> None:
        """LM head and logprobs of the tokens that follow, over chunks of lines."""
        batch, size = self.batch, self.lines_at_once
        tokens = batch.token_ids[rows, positions + 1].astype(np.int64)
        counts = np.array([min(batch.params[row].prompt_logprobs or 0, _MANY) for row in rows.tolist()])
        found: list[TokenLogprobs] = []
        for start in range(0, len(rows), size):
            logits = self.compute_logits(hidden[start : start + size])
            chosen = torch.from_numpy(tokens[start : start + size]).to(logits.device)
            found += self.sampler.gather_logprobs(logits, chosen, counts[start : start + size], {})
        for row, logprobs in zip(rows.tolist(), found, strict=True):
            result.prompt_logprobs.setdefault(batch.request_ids[row], []).append(logprobs)


def _accepted(drafts: Drafts, current: np.ndarray, drawn: _Drawn) -> np.ndarray:
    """The lines behind those of the `current` ones whose row drew the draft."""
    is_right = drafts.tokens[current] == drawn.tokens
    is_right[list(drawn.errors)] = False
    return current[is_right] + 1
