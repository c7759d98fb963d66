"""`thinking_token_budget`: after so many tokens of reasoning the tokens that end it are forced.

Owns where a row's reasoning begins and ends, and which tokens a model marks that with.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from llm.base.checks import refuse
from llm.sampling.logits_processors.builtin import SparseLogitsProcessor
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.config.engine import ReasoningConfig
    from llm.tokenizer import Tokenizer

_TEXTS = ("<think>", "</think>")  # where LLM(reasoning_config=) names no others


class Section:
    """The reasoning of one row: from the ids of its start to the ids of its end, in prompt or output.

    A start inside a section is text of it. In a prompt the last start counts, as earlier ones may be quoted.

    Args:
        budget: most tokens of a section.
        output_ids: live list of the output's token ids, which only grows.
    """

    def __init__(
        self, budget: int, start: list[int], end: list[int], prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        self._budget, self._start, self._end = budget, start, end
        self._output = output_ids
        self._read = 0
        opened, closed = _after_last(prompt_ids, start), _after_last(prompt_ids, end)
        # Where the section's first token stands in the output, below 0 in the prompt; None outside of a section.
        self._opened = opened - len(prompt_ids) if opened > closed else None

    def forced(self) -> int | None:
        """The one token that may come next, None if any may."""
        output, end = self._output, self._end
        while self._read < len(output):
            self._read += 1
            if self._opened is None:
                self._opened = self._read if _stands_before(self._read, output, self._start) else None
            elif _stands_before(self._read, output, end):
                self._opened = None
        if self._opened is None or len(output) - self._opened < self._budget:
            return None
        written = range(min(len(end) - 1, len(output) - max(0, self._opened)), -1, -1)
        return end[next(count for count in written if _stands_before(len(output), output, end[:count]))]


class ThinkingBudgetLogitsProcessor(SparseLogitsProcessor[Section]):
    def new_state(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> Section | None:
        budget, ids = params.thinking_token_budget, params.thinking_token_ids
        if budget is None or budget == -1 or ids is None:
            return None
        return Section(budget, *ids, prompt_ids or [], output_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, section in self.rows.items():
            token = section.forced()
            if token is not None:
                logits[row] = -math.inf
                logits[row, token] = 0.0
        return logits


def find_thinking_ids(
    params: SamplingParams, tokenizer: Tokenizer | None, config: ReasoningConfig | None
) -> tuple[list[int], list[int]] | None:
    """The ids that begin and end reasoning, None if the params set no budget; raises `ValidationError` without any."""
    name, budget = "thinking_token_budget", params.thinking_token_budget
    if budget is None or budget == -1:
        return None
    if params.structured_outputs is not None:
        refuse(name, budget, "None with structured_outputs, which constrain from the first token: nothing is reasoned")
    if tokenizer is None:
        refuse(name, budget, "None with skip_tokenizer_init=True, as the tokenizer knows the tokens of reasoning")
    named = ("", "") if config is None else (config.reasoning_start_str, config.reasoning_end_str)
    texts = [text or default for text, default in zip(named, _TEXTS, strict=True)]
    start, end = tokenizer.encode_rendered(texts)
    if not all(len(ids) == 1 or (ids and text) for ids, text in zip((start, end), named, strict=True)):
        right = f"None with this model, whose tokenizer has no tokens {' and '.join(texts)}; name its own with "
        refuse(name, budget, f"{right}LLM(reasoning_config={{'reasoning_start_str': ..., 'reasoning_end_str': ...}})")
    return start, end


def _stands_before(place: int, tokens: list[int], part: list[int]) -> bool:
    return place >= len(part) and tokens[place - len(part) : place] == part


def _after_last(tokens: list[int], part: list[int]) -> int:
    """The place after the last occurrence of `part`, -1 without one."""
    return next((place for place in range(len(tokens), 0, -1) if _stands_before(place, tokens, part)), -1)
