"""A request's state in the engine, and the rules by which it ends. A prompt with `n` completions is `n` requests."""

from __future__ import annotations

import traceback
from enum import Enum, auto
from typing import TypeVar

import numpy as np

from llm.engine.step import NO_SLOT, Adapter, PoolingRow, RowImages
from llm.outputs import RequestStateStats
from llm.sampling_params import RepetitionDetectionParams, SamplingParams

AnError = TypeVar("AnError", bound=BaseException)


class RequestStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """One completion of a prompt.

    Attributes:
        token_ids: prompt tokens, then generated tokens.
        num_computed_tokens: leading tokens whose keys and values are in the KV cache; updated after each step.
        draft_token_ids: drafts, verified in the next step that computes the last known token.
        num_cached_tokens: how many prompt tokens came from the prefix cache at first admission.
        blocks: block ids per KV group, in order of position; owned by the block manager. 0: freed, outside the window.
        slot: index of its recurrent states; owned by the block manager. 0: it has none.
        restored_slot: the snapshot that its states start from; 0: from zeros.
        block_hashes: chain hashes of the full blocks so far; owned by the block manager.
        num_findable_blocks: leading blocks that are in the prefix cache; owned by the block manager.
        cache_key: extra bytes in the hash chain, so that only requests with equal keys share blocks; None: share none.
        prompt_logprobs_from: the first prompt position whose next token still needs a logprob; the prompt's length if
            none does. Only the first completion of a prompt computes them.
        pooling: what a pooling model makes of the prompt; None: the prompt is continued.
        pooled: that result, once there.
        adapter: what is added to the model's layers for it; None: nothing is.
        adapter_slot: where the runner has its adapter while the request runs; owned by the scheduler. 0: it has none.
        images: the prompt's; None: it has none.
        metrics: its timestamps; the engine says when it was queued.
        error: the error behind `finish_reason="error"`.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        sample_index: int,
        max_total_tokens: int,
        eos_token_ids: frozenset[int],
        cache_key: bytes | None,
        pooling: PoolingRow | None = None,
        adapter: Adapter | None = None,
        priority: int = 0,
        images: RowImages | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.sample_index = sample_index
        self.max_total_tokens = max_total_tokens
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.cache_key = cache_key
        self.pooling = pooling
        self.pooled: np.ndarray | None = None
        self.adapter, self.adapter_slot = adapter, NO_SLOT
        self.images = images
        self.rank = (priority, 0)  # by which a scheduler with priorities orders; it sets the second
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.draft_token_ids: list[int] = []
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.num_drafted_tokens = self.num_accepted_tokens = 0
        self.blocks: list[list[int]] = []
        self.slot = self.restored_slot = 0
        self.block_hashes: list[bytes] = []
        self.num_findable_blocks = 0
        first = 0 if params.prompt_logprobs is not None else params.prompt_logprob_start or 0
        is_scored = params.scores_prompt and sample_index == 0 and first < len(prompt_token_ids) - 1
        self.prompt_logprobs_from = first if is_scored else len(prompt_token_ids)
        self.metrics = RequestStateStats()
        self.error: Exception | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_cached_tokens(self) -> int:
        """How many leading tokens may come from the prefix cache. It has no logits, so tokens that still need prompt
        logprobs must be computed, and those of a request that looks inside the model."""
        if self.params.skip_reading_prefix_cache or self.params.inside is not None:
            return 0
        return self.num_tokens if self.prompt_logprobs_from >= self.num_prompt_tokens else self.prompt_logprobs_from

    def append(self, token: int) -> bool:
        """Append a sampled token; True if it ends the request (in vLLM's order: EOS, stop ids, length).

        An answer of `structured_outputs` that its last allowed token closes has ended by itself.
        """
        self.token_ids.append(token)
        if self.num_output_tokens >= self.params.min_tokens:
            if token in self.eos_token_ids:
                return self.finish("stop")
            if token in self.stop_token_ids:
                return self.finish("stop", token)
        if len(self.token_ids) >= self.max_total_tokens:
            structure = self.params.structure
            closed = structure is not None and structure.is_closed(self.output_token_ids)
            return self.finish("stop" if closed else "length")
        rule = self.params.repetition_detection
        if rule is not None and self.num_output_tokens >= self.params.min_tokens:
            longest = rule.max_pattern_size * rule.min_count
            tail = self.token_ids[max(self.num_prompt_tokens, len(self.token_ids) - longest) :]
            return repeats(tail, rule) and self.finish("repetition")
        return False

    def fail(self, error: Exception) -> None:
        """End the request with an error, kept without its frames: they would keep tensors and processors alive."""
        self.error = without_frames(error)
        self.finish("error")

    def finish(self, reason: str, stop_reason: int | str | None = None) -> bool:
        self.finish_reason, self.stop_reason = reason, stop_reason
        return True


class RowTraceback(Exception):
    """The traceback of an error that ended a request, as text: the `__cause__` of the exception in its output."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def without_frames(error: AnError) -> AnError:
    """The exception with its traceback as text, which `raise` shows and which keeps no object alive."""
    if error.__traceback__ is None:  # made by the sampler, never raised
        return error
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    error.__traceback__ = error.__context__ = None
    error.__cause__ = RowTraceback(text)
    return error


def repeats(tokens: list[int], rule: RepetitionDetectionParams) -> bool:
    """True if `tokens` end with `min_count` copies of a pattern of an allowed size."""
    for size in range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1):
        tail = tokens[-size * rule.min_count :]
        if len(tail) == size * rule.min_count and tail == tail[-size:] * rule.min_count:
            return True
    return False
