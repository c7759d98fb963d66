"""A sampler that gives the tokens of an answer, for measurements of what depends on the text.

Owns the replacement. A logits processor could force tokens too, but the lines of a row with processors are verified one
after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from llm.sampling.logits_processors.pipeline import LogitsProcessors
from llm.sampling.sampler import Sampler, SamplerOutput, SamplingRows


class ForcedSampler(Sampler):
    """Computes tokens as `sampler` does, and replaces each by that of `answer` at its place."""

    def __init__(self, sampler: Sampler, answer: Sequence[int]) -> None:
        super().__init__(sampler.logprobs_mode, sampler.backend)
        self._answer = np.array(answer, dtype=np.int64)

    def likeliest(self, largest: torch.Tensor, tokens: torch.Tensor, params: SamplingRows) -> None:
        """None: tokens are replaced."""

    def __call__(
        self,
        logits: torch.Tensor,
        params: SamplingRows,
        rows: np.ndarray,
        outputs: np.ndarray,
        processors: LogitsProcessors | None = None,
        batch_size: int = 0,
    ) -> SamplerOutput:
        found = super().__call__(logits, params, rows, outputs, processors, batch_size)
        forced = self._answer[np.minimum(outputs, len(self._answer) - 1)]
        return replace(found, tokens=torch.from_numpy(forced).to(found.tokens.device))
