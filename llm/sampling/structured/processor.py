"""Structured output as a logits processor: rows with a `Structure` sample only tokens that continue an answer.

A thread pool computes the masks. A mask depends on the row's own tokens alone. Its
computation starts in `update_state`, before the forward; `apply`, after the forward, waits for it.

Where a mask leaves one token and that token has been drafted, the mask after it is computed too, and so on: the tokens
up to there are known before the forward. A processor that comes later may still let another token be sampled. Then the
answer is read anew from its tokens.

Where the number of bytes that an answer still needs is known, a token is also masked if more bytes would be needed
after it than tokens are left. A byte needs one token at most. So if an answer fits the budget at the start, some token
always keeps it so, and the answer is complete within the budget.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from llm.sampling.logits_processors.interface import BatchUpdate, LogitsProcessor, process_dict_updates, to_device
from llm.sampling.structured.structure import ConstrainedAnswer, Structure
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.config.engine import VllmConfig


@dataclass(frozen=True)
class _Masks:
    """`barred[i]`: bool [vocab], True for tokens that may not follow the output and `forced[:i]`."""

    barred: list[np.ndarray]
    forced: list[int]


@dataclass
class _Row:
    """A constrained batch row.

    Attributes:
        output_ids: live list of the output's token ids.
        budget: maximum number of generated tokens.
        answer: what the first `read` tokens and those `ahead` came to; None until the first mask.
        ahead: drafted tokens to which there is no alternative.
        barred: after the first `read` tokens, and after each of those `ahead`.
        masks: computed for the first `asked` tokens; `looked`: and for drafts.
    """

    structure: Structure
    output_ids: list[int]
    budget: int
    answer: ConstrainedAnswer | None = None
    read: int = 0
    ahead: list[int] = field(default_factory=list)
    barred: list[np.ndarray] = field(default_factory=list)
    masks: Future[_Masks] | None = None
    asked: int = 0
    looked: bool = False

    def compute(self, drafts: Sequence[int] = (), after: Future[_Masks] | None = None) -> _Masks:
        """The mask of the next token, and of those that it forces among the `drafts`; `after`: once that is done."""
        if after is not None:
            after.exception()  # waits
        answer = self._follow()
        if not self.barred:
            self.barred = [self._mask(answer)]
        try:
            while len(self.ahead) < len(drafts) and self._forces(drafts[len(self.ahead)]):
                answer.read(drafts[len(self.ahead)])
                self.ahead.append(drafts[len(self.ahead)])
                self.barred.append(self._mask(answer))
        except Exception:  # is raised again when the answer has got there
            self.answer = None
        forced = [token for token, draft in zip(self.ahead, drafts, strict=False) if token == draft]
        return _Masks(list(self.barred), forced[: len(self.barred) - 1])

    def _follow(self) -> ConstrainedAnswer:
        """The answer after all output tokens."""
        new = self.output_ids[self.read :]
        known = len(self.ahead)
        if self.answer is None or new[:known] != self.ahead[: len(new)]:
            self.answer, self.read, self.ahead, self.barred = ConstrainedAnswer(self.structure), 0, [], []
            new, known = list(self.output_ids), 0
        for token in new[known:]:
            self.answer.read(token)
        count = len(new)
        self.read, self.ahead, self.barred = self.read + count, self.ahead[count:], self.barred[count:]
        return self.answer

    def _mask(self, answer: ConstrainedAnswer) -> np.ndarray:
        return ~answer.allowed(self.budget - self.read - len(self.ahead) - 1)

    def _forces(self, token: int) -> bool:
        barred = self.barred[-1]
        return not barred[token] and int(np.count_nonzero(barred)) == len(barred) - 1


class StructuredOutputsLogitsProcessor(LogitsProcessor):
    """Attributes:
    row_errors: batch row -> why its mask could not be computed; the engine takes these after `apply`.
    drafts: batch row -> the tokens drafted for it, of the next `update_state`.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._is_pin_memory = is_pin_memory
        self._max_model_len = vllm_config.model_config.max_model_len
        self._rows: dict[int, _Row] = {}
        self._pool: ThreadPoolExecutor | None = None
        self.row_errors: dict[int, Exception] = {}
        self.drafts: Mapping[int, Sequence[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def is_idle(self) -> bool:
        return not self._rows

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._new_row)
        for index, row in self._rows.items():
            drafts = self.drafts.get(index, ())
            if row.masks is None or row.asked != len(row.output_ids) or (drafts and not row.looked):
                row.asked, row.looked = len(row.output_ids), bool(drafts)
                row.masks = self._start(row, drafts)

    def forced(self, index: int) -> list[int]:
        """The next tokens of a batch row, as far as they were drafted and there is no alternative to them."""
        row = self._rows.get(index)
        if row is None or row.masks is None or not row.looked or row.asked != len(row.output_ids):
            return []
        return [] if row.masks.exception() is not None else row.masks.result().forced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, row in self._rows.items():
            try:
                masks = row.masks.result() if row.masks is not None else row.compute()
            except Exception as error:  # ends this request alone
                self.row_errors[index] = error
                continue
            barred = to_device(masks.barred[len(row.output_ids) - row.asked], logits.device, self._is_pin_memory)
            logits[index].masked_fill_(barred, -math.inf)
        return logits

    def end_call(self) -> None:
        """Shut the thread pool down: no row needs it."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _start(self, row: _Row, drafts: Sequence[int]) -> Future[_Masks]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="llm-grammar")
        return self._pool.submit(row.compute, drafts, row.masks)

    def _new_row(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _Row | None:
        structure = params.structure
        if structure is None:
            return None
        room = self._max_model_len - len(prompt_ids or [])
        budget = room if params.max_tokens is None else min(params.max_tokens, room)
        return _Row(structure, output_ids, budget)
