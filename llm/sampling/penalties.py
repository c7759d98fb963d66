"""Repetition, frequency and presence penalties.

Owns the token counts of each request. Only the logits of counted tokens are changed, so the cost of a step grows with
the length of the requests, not with the vocabulary. With v the logit, in vLLM's order (the first is CTRL's,
arXiv:1909.05858, the others OpenAI's):

    v = v / repetition if v > 0 else v * repetition     for tokens of the prompt or the output
    v = v - frequency * (count in the output)
    v = v - presence                                    for tokens of the output
"""

from __future__ import annotations

import numpy as np
import torch

from llm.sampling.logits_processors.builtin import SparseLogitsProcessor
from llm.sampling_params import SamplingParams


class _Seen:
    """The distinct tokens of one request and their counts in its output.

    Attributes:
        ids, counts: over-allocated arrays; the first `size` entries are in use.
        penalties: repetition, frequency, presence.
    """

    def __init__(self, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]) -> None:
        self.penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        # Only the repetition penalty reads the prompt.
        prompt = np.unique(np.array(prompt_ids if params.repetition_penalty != 1.0 else [], dtype=np.int64))
        self.size = len(prompt)
        self.ids = np.zeros(self.size + 64, dtype=np.int64)
        self.ids[: self.size] = prompt
        self.counts = np.zeros(len(self.ids), dtype=np.float32)
        self._place = {token: place for place, token in enumerate(prompt.tolist())}
        self._output = output_ids
        self._read = 0

    def catch_up(self) -> None:
        """Count the tokens generated since the last call."""
        for token in self._output[self._read :]:
            place = self._place.setdefault(token, self.size)
            if place == self.size:
                self._append(token)
            self.counts[place] += 1.0
        self._read = len(self._output)

    def _append(self, token: int) -> None:
        if self.size == len(self.ids):
            self.ids = np.concatenate((self.ids, np.zeros_like(self.ids)))
            self.counts = np.concatenate((self.counts, np.zeros_like(self.counts)))
        self.ids[self.size] = token
        self.size += 1


class PenaltiesLogitsProcessor(SparseLogitsProcessor[_Seen]):
    """The three penalties, for the batch rows that have any."""

    def new_state(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _Seen | None:
        if params.repetition_penalty == 1.0 and params.frequency_penalty == 0.0 and params.presence_penalty == 0.0:
            return None
        return _Seen(params, prompt_ids or [], output_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        seen = list(self.rows.values())
        for row in seen:
            row.catch_up()
        sizes = [row.size for row in seen]
        rows = self._tensor(np.repeat(np.array(list(self.rows)), sizes))
        ids = self._tensor(np.concatenate([row.ids[: row.size] for row in seen]))
        counts = self._tensor(np.concatenate([row.counts[: row.size] for row in seen]))
        penalties = np.array([row.penalties for row in seen], dtype=np.float32)
        repetition, frequency, presence = (self._tensor(column) for column in np.repeat(penalties, sizes, axis=0).T)
        values = logits[rows, ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        # A masked token stays masked: -inf - 0 * x is -inf, and a count is never infinite.
        values -= frequency * counts
        values -= presence * (counts > 0)
        logits[rows, ids] = values
        return logits

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
