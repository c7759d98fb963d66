"""The built-in processors, on the interface that custom processors use.

Each keeps state for the batch rows that use it, and changes all of them with a few tensor operations. Index tensors are
rebuilt only when the rows change.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from llm.kernels.backend import Backend
from llm.kernels.reference.backend import REFERENCE
from llm.sampling.logits_processors.interface import BatchUpdate, LogitsProcessor
from llm.sampling.logits_processors.state import process_dict_updates
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.config.engine import VllmConfig

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
        self.device = device
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
        flat = torch.tensor(pairs, dtype=torch.long, device=self.device).reshape(-1, 2)
        return flat[:, 0], flat[:, 1]


class AllowedTokensLogitsProcessor(SparseLogitsProcessor[list[int]]):
    """`allowed_token_ids`: every other token gets -inf."""

    def new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> list[int] | None:
        return params.allowed_token_ids

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.changed:
            self._places = self.places(dict(self.rows))
            self._rows = torch.tensor(list(self.rows), dtype=torch.long, device=self.device)
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
            self._biases = torch.tensor(values, dtype=torch.float32, device=self.device)
            self.changed = False
        logits[self._places] += self._biases
        return logits


class MinPLogitsProcessor(SparseLogitsProcessor[float]):
    """`min_p`: tokens less likely than min_p times the likeliest get -inf; after the temperature."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool, backend: Backend = REFERENCE
    ) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._cut = backend.op("cut_below_largest")
        # By batch row; -inf: no min_p.
        self._log_min_p = torch.empty(0, device=device)

    def new_state(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> float | None:
        return params.min_p if params.min_p > 0.0 and not params.greedy else None

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.changed or len(self._log_min_p) != len(logits):
            self._log_min_p = torch.full((len(logits),), -math.inf, device=self.device)
            rows = torch.tensor(list(self.rows), dtype=torch.long, device=self.device)
            self._log_min_p[rows] = torch.tensor(list(self.rows.values()), device=self.device).log()
            self.changed = False
        return self._cut(logits, self._log_min_p)
