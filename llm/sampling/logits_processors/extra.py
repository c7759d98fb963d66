"""Processors that read `extra_args`: loaded by `LLM(logits_processors=[...])`, then used by requests that set their
arguments.

    llm = LLM(logits_processors=[NoRepeatNGramLogitsProcessor, EndThinkingLogitsProcessor])
    SamplingParams(extra_args={"no_repeat_ngram_size": 3})
    SamplingParams(extra_args={"max_thinking_tokens": 500, "end_thinking_token_ids": [151668]})
"""

from __future__ import annotations

import math

import torch

from llm.base.checks import check_integer, refuse
from llm.sampling.logits_processors.builtin import SparseLogitsProcessor
from llm.sampling_params import SamplingParams

_SIZE, _BUDGET, _END = "no_repeat_ngram_size", "max_thinking_tokens", "end_thinking_token_ids"


class _NGrams:
    """The tokens that followed each sequence of n - 1 tokens of a request, the prompt included."""

    def __init__(self, size: int, prompt_ids: list[int], output_ids: list[int]) -> None:
        self._size = size
        self._output = output_ids
        self._tokens = list(prompt_ids)
        self._read = 0
        self._followers: dict[tuple[int, ...], set[int]] = {}
        for end in range(1, len(prompt_ids) + 1):
            self._count(end)

    def barred(self) -> list[int]:
        """The tokens that would complete an n-gram a second time."""
        for token in self._output[self._read :]:
            self._tokens.append(token)
            self._count(len(self._tokens))
        self._read = len(self._output)
        last = tuple(self._tokens[len(self._tokens) - self._size + 1 :])
        return sorted(self._followers.get(last, ())) if len(self._tokens) >= self._size - 1 else []

    def _count(self, end: int) -> None:
        if end >= self._size:
            *before, token = self._tokens[end - self._size : end]
            self._followers.setdefault(tuple(before), set()).add(token)


class NoRepeatNGramLogitsProcessor(SparseLogitsProcessor[_NGrams]):
    """`extra_args["no_repeat_ngram_size"] = n`: no n tokens in a row appear twice in prompt and output together, as in
    transformers' processor of that name."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        size = (sampling_params.extra_args or {}).get(_SIZE)
        if size is not None:
            check_integer(f"extra_args[{_SIZE!r}]", size, 1)

    def new_state(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _NGrams | None:
        size = (params.extra_args or {}).get(_SIZE)
        return None if size is None else _NGrams(size, prompt_ids or [], output_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits[self.places({row: ngrams.barred() for row, ngrams in self.rows.items()})] = -math.inf
        return logits


class EndThinkingLogitsProcessor(SparseLogitsProcessor[tuple[int, list[int], list[int]]]):
    """`extra_args["max_thinking_tokens"] = n`, `["end_thinking_token_ids"] = [...]`: once the output has n tokens
    without the ids that end the thinking, those ids are forced; then generation continues."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        extra = sampling_params.extra_args or {}
        if _BUDGET not in extra and _END not in extra:
            return
        check_integer(f"extra_args[{_BUDGET!r}]", extra.get(_BUDGET), 0)
        ids = extra.get(_END)
        if not isinstance(ids, list) or not ids:
            refuse(f"extra_args[{_END!r}]", ids, "a list of token ids")
        for token in ids:
            check_integer(f"extra_args[{_END!r}]", token, 0)

    def new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> tuple[int, list[int], list[int]] | None:
        extra = params.extra_args or {}
        return (extra[_BUDGET], extra[_END], output_ids) if _BUDGET in extra else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (budget, end, output) in self.rows.items():
            if len(output) < budget or _contains(output, end):
                continue
            # How many of the end's ids the output already ends with, generated or forced.
            done = next(size for size in range(len(end) - 1, -1, -1) if output[len(output) - size :] == end[:size])
            kept = logits[row, end[done]].clone()
            logits[row] = -math.inf
            logits[row, end[done]] = kept
        return logits


def _contains(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[start : start + len(part)] == part for start in range(len(tokens) - len(part) + 1))
