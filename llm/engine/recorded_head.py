"""The LM head of recorded steps: from the hidden states that one leaves to the logits, and the likeliest tokens.

Owns the calls, recorded once like those of the layers (`llm.engine.replay`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from llm.kernels.backend import Backend, NotRecordable, Program

# Logits of one recorded step, in bytes. With more of them Python's share of a step is small.
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Scores:
    """The logits of a step's lines; the next step like it overwrites them.

    Attributes:
        logits: float32 [L, vocab].
        largest, tokens: float32 [L] and int64 [L], the largest logit of each line and its token, as of `argmax`.
    """

    logits: torch.Tensor
    largest: torch.Tensor
    tokens: torch.Tensor


class RecordedHead:
    """Computes the logits of `hidden`, float32 [L, H], which is always the same memory.

    Args:
        compute_logits: float32 [L, H] -> float32 [L, vocab_size].
    """

    def __init__(
        self,
        backend: Backend,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        hidden: torch.Tensor,
    ) -> None:
        self._program: Program | None = None
        if 4 * vocab_size * len(hidden) > _MOST_BYTES:
            return
        try:
            with backend.record() as program:
                logits = compute_logits(hidden)
                largest, tokens = backend.op("argmax")(logits)
        except NotRecordable:
            return
        self._program, self._scores = program, Scores(logits, largest, tokens)

    def run(self) -> Scores | None:
        """None: no kernels compute all of it, or it is too large."""
        return self._scores if self._program is not None and self._program.run() else None
