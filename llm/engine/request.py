"""One sequence on its way through the engine, and when it ends.

Owns token ids, counters and the stop rules. No tensors. A prompt with `n` completions is `n` requests.
"""

from __future__ import annotations

from enum import Enum, auto

from llm.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """A prompt being continued once.

    Attributes:
        token_ids: prompt, then what was generated.
        num_computed_tokens: leading tokens whose keys and values are (or, once this step has run, will be) cached.
        num_cached_tokens: of the prompt, how many came from the prefix cache at first admission.
        blocks: block ids per KV group, in order of position; owned by the block manager. 0: freed, out of the window.
        block_hashes: chain hashes of the full blocks so far; owned by the block manager.
        cache_key: extra bytes in the hash chain, so that only requests with equal keys share blocks; None: share none.
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
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.blocks: list[list[int]] = []
        self.block_hashes: list[bytes] = []
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

    def append(self, token: int) -> bool:
        """Add a sampled token; True when it ends the request (vLLM's order: EOS, stop ids, length)."""
        self.token_ids.append(token)
        if self.num_output_tokens >= self.params.min_tokens:
            if token in self.eos_token_ids:
                return self.finish("stop")
            if token in self.stop_token_ids:
                return self.finish("stop", token)
        if len(self.token_ids) >= self.max_total_tokens:
            return self.finish("length")
        return False

    def finish(self, reason: str, stop_reason: int | str | None = None) -> bool:
        self.finish_reason, self.stop_reason = reason, stop_reason
        return True
