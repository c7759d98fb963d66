"""Structured output as a logits processor: rows with a `Structure` sample only tokens that continue an answer.

Owns the state of the rows and the thread pool that computes masks. A mask depends on the row's own tokens alone. Its
computation starts in `update_state`, before the forward; `apply`, after the forward, waits for it.

Where the number of bytes that an answer still needs is known, a token is also masked if more bytes would be needed
after it than tokens are left. A byte needs one token at most. So if an answer fits the budget at the start, some token
always keeps it so, and the answer is complete within the budget.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from llm.sampling.logits_processors.interface import BatchUpdate, LogitsProcessor
from llm.sampling.logits_processors.state import process_dict_updates
from llm.sampling.structured.structure import Answer, Structure
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.config.engine import VllmConfig


@dataclass
class _Row:
    """A constrained batch row.

    Attributes:
        output_ids: live list of the output's token ids.
        budget: maximum number of generated tokens.
        answer: what the first `read` tokens came to; None until the first mask.
    """

    structure: Structure
    output_ids: list[int]
    budget: int
    answer: Answer | None = None
    read: int = 0
    allowed: Future[np.ndarray] | None = None

    def compute(self) -> np.ndarray:
        """bool [vocab], True for tokens that may come next."""
        if self.answer is None:
            self.answer = Answer(self.structure)
        for token in self.output_ids[self.read :]:
            self.answer.read(token)
        self.read = len(self.output_ids)
        return self.answer.allowed(self.budget - self.read - 1)


class StructuredOutputsLogitsProcessor(LogitsProcessor):
    """Attributes:
    row_errors: batch row -> why its mask could not be computed; the engine takes these after `apply`.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._max_model_len = vllm_config.model_config.max_model_len
        self._rows: dict[int, _Row] = {}
        self._pool: ThreadPoolExecutor | None = None
        self.row_errors: dict[int, Exception] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def is_idle(self) -> bool:
        return not self._rows

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._new_row)
        for row in self._rows.values():
            if row.allowed is None or row.read != len(row.output_ids):
                row.allowed = self._begin(row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, row in self._rows.items():
            try:
                allowed = row.allowed.result() if row.allowed is not None else row.compute()
            except Exception as error:  # ends this request alone
                self.row_errors[index] = error
                continue
            logits[index, torch.from_numpy(~allowed).to(logits.device)] = -math.inf
        return logits

    def end_call(self) -> None:
        """Shut the thread pool down: no row needs it."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _begin(self, row: _Row) -> Future[np.ndarray]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="llm-grammar")
        return self._pool.submit(row.compute)

    def _new_row(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _Row | None:
        structure = params.structure
        if structure is None:
            return None
        room = self._max_model_len - len(prompt_ids or [])
        budget = room if params.max_tokens is None else min(params.max_tokens, room)
        return _Row(structure, output_ids, budget)
