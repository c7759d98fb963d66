"""The built-in processors, on the interface that custom processors use.

Each keeps state for the batch rows that use it, and changes all of them with a few tensor operations. Index tensors are
rebuilt only when the rows change.

The last two are not loaded by themselves: `LLM(logits_processors=[NoRepeatNGramLogitsProcessor, ...])`, then
`SamplingParams(extra_args={"no_repeat_ngram_size": 3})`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from llm.base.checks import check_integer, refuse
from llm.kernels.backend import Backend
from llm.kernels.reference.backend import REFERENCE
from llm.sampling.logits_processors.interface import BatchUpdate, LogitsProcessor, process_dict_updates, to_device
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.config.engine import ReasoningConfig, VllmConfig
    from llm.text.tokenizer import Tokenizer


T = TypeVar("T")
# (batch rows, token ids) of logits to change, both int64 [n]
Places = tuple[torch.Tensor, torch.Tensor]


class SparseLogitsProcessor(LogitsProcessor, Generic[T]):
    """Base of processors with state for some rows: implement `new_state`, `apply` and `is_argmax_invariant`.

    Attributes:
        rows: batch row -> its state.
        changed: True if `rows` changed since `apply` last set it to False.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.device, self.is_pin_memory = device, is_pin_memory
        self.rows: dict[int, T] = {}
        self.changed = True

    @abstractmethod
    def new_state(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> T | None:
        """The state of a new row, None if it does not use this processor."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self.rows, batch_update, self.new_state):
            self.changed = True

    def is_idle(self) -> bool:
        return not self.rows

    def is_argmax_invariant(self) -> bool:
        return False

    def places(self, ids_of: dict[int, Sequence[int]], vocab: int | None = None) -> Places:
        """Flatten row -> token ids. Ids of `vocab` and above are dropped (a config can name such an EOS)."""
        pairs = [(row, token) for row, ids in ids_of.items() for token in ids if vocab is None or token < vocab]
        flat = self._tensor(np.array(pairs, dtype=np.int64).reshape(-1, 2))
        return flat[:, 0], flat[:, 1]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device, self.is_pin_memory)


class AllowedTokensLogitsProcessor(SparseLogitsProcessor[list[int]]):
    """`allowed_token_ids`: every other token gets -inf."""

    def new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> list[int] | None:
        return params.allowed_token_ids

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.changed:
            self._places = self.places(dict(self.rows))
            self._rows = self._tensor(np.array(list(self.rows), dtype=np.int64))
            self.changed = False
        kept = logits[self._places]
        logits.index_fill_(0, self._rows, -math.inf)
        logits[self._places] = kept
        return logits


class BadWordsLogitsProcessor(SparseLogitsProcessor[tuple[list[list[int]], list[int]]]):
    """`bad_words`: the last token of a word gets -inf where the output ends with the tokens before it."""

    def new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> tuple[list[list[int]], list[int]] | None:
        return (params.bad_words_token_ids, output_ids) if params.bad_words_token_ids else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        barred: dict[int, Sequence[int]] = {
            row: [word[-1] for word in words if len(word) == 1 or output[1 - len(word) :] == word[:-1]]
            for row, (words, output) in self.rows.items()
        }
        logits[self.places(barred)] = -math.inf
        return logits


class MinTokensLogitsProcessor(SparseLogitsProcessor[tuple[int, list[int], list[int]]]):
    """`min_tokens`: tokens that would end the request get -inf until enough tokens are generated."""

    def new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> tuple[int, list[int], list[int]] | None:
        if len(output_ids) >= params.min_tokens or not params.all_stop_token_ids:
            return None
        return params.min_tokens, output_ids, sorted(params.all_stop_token_ids)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        super().update_state(batch_update)
        for row in [row for row, (minimum, output, _) in self.rows.items() if len(output) >= minimum]:
            del self.rows[row]
            self.changed = True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.changed:
            self._places = self.places({row: ids for row, (_, _, ids) in self.rows.items()}, logits.shape[-1])
            self.changed = False
        logits[self._places] = -math.inf
        return logits


class LogitBiasLogitsProcessor(SparseLogitsProcessor[dict[int, float]]):
    """`logit_bias`: a value added to single logits."""

    def new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> dict[int, float] | None:
        return params.logit_bias or None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.changed:
            self._places = self.places({row: list(biases) for row, biases in self.rows.items()})
            values = [value for biases in self.rows.values() for value in biases.values()]
            self._biases = self._tensor(np.array(values, dtype=np.float32))
            self.changed = False
        logits[self._places] += self._biases
        return logits


class MinPLogitsProcessor(SparseLogitsProcessor[float]):
    """`min_p`: tokens less likely than min_p times the likeliest get -inf; after the temperature."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool, backend: Backend = REFERENCE
    ) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._cut = backend.ops.cut_below_largest
        # By batch row; -inf: no min_p.
        self._log_min_p = torch.empty(0, device=device)

    def new_state(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> float | None:
        return params.min_p if params.min_p > 0.0 and not params.greedy else None

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.changed or len(self._log_min_p) != len(logits):
            offsets = torch.full((len(logits),), -math.inf, device="cpu")
            offsets[list(self.rows)] = torch.tensor(list(self.rows.values()), device="cpu").log()
            self._log_min_p = self._tensor(offsets.numpy())
            self.changed = False
        return self._cut(logits, self._log_min_p)


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
    """`thinking_token_budget`: after so many tokens of reasoning the tokens that end it are forced."""

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
    """Repetition, frequency and presence penalties, for the batch rows that have any.

    Only the logits of counted tokens are changed, so the cost of a step grows with the length of the requests, not with
    the vocabulary. With v the logit, in vLLM's order (the first is CTRL's, arXiv:1909.05858, the others OpenAI's):

        v = v / repetition if v > 0 else v * repetition     for tokens of the prompt or the output
        v = v - frequency * (count in the output)
        v = v - presence                                    for tokens of the output
    """

    def new_state(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _Seen | None:
        if params.repetition_penalty == 1.0 and params.frequency_penalty == 0.0 and params.presence_penalty == 0.0:
            return None
        return _Seen(params, prompt_ids or [], output_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        seen = list(self.rows.values())
        if not seen:
            return logits
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
