"""The messages between this program and a replica; `SCHEMA` has every class that is in one.

- To a replica: load ReplicaArgs; rows [SentRequest]; abort [request id]; reset number; call MethodCall.
- From a replica: loaded ReplicaLoaded; step StepReport; error StepError; result MethodResult.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from llm.config.compilation import CompilationConfig, CompilationMode
from llm.config.engine import LLMArgs, ReasoningConfig, SpeculativeConfig
from llm.engine.boundary import AttentionCost, LayerReport, ModelCost
from llm.engine.request import Request
from llm.engine.stats import EngineStats
from llm.engine.step import Adapter, PoolingRow, RowImage, RowImages, RunnerOutput
from llm.explain import Explanation, Part
from llm.inputs import LoRARequest
from llm.pooling_params import PoolerConfig
from llm.sampling.logprobs import TokenLogprobs
from llm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from llm.workers.messages import Schema


@dataclass(frozen=True)
class ReplicaArgs:
    """What a replica loads, with every number decided that depends on the machine.

    Attributes:
        shared_weights: the descriptor of the file in which it shares its weights; None: it has its own.
    """

    engine: LLMArgs
    shared_weights: int | None = None


@dataclass(frozen=True)
class ReplicaLoaded:
    """What a replica has found out while it loaded the model.

    Attributes:
        invariant, reasons, num_blocks, kv_cache_memory_bytes, seconds: of its config, and of its start.
        drafts: it drafts tokens.
        shared_bytes: of its weights, those that it shares.
    """

    invariant: bool
    reasons: dict[str, str]
    num_blocks: int
    kv_cache_memory_bytes: int
    drafts: bool
    seconds: dict[str, float]
    shared_bytes: int = 0


@dataclass(frozen=True)
class SentImage:
    """A `RowImage`; `inputs` of the vision tower in place of what makes them."""

    key: bytes
    places: np.ndarray
    inputs: dict[str, torch.Tensor]


@dataclass(frozen=True)
class SentRequest:
    """A request that a replica is to compute: new, or one that another replica has begun.

    Attributes:
        token_ids: the prompt's, and those that are known of the answer.
        images: with `reserved` and `spans` of `RowImages`; (): the prompt has none.
        others: as in `Request`.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    sample_index: int
    prompt_logprobs_from: int
    max_total_tokens: int
    cache_key: bytes | None
    priority: int
    pooling: PoolingRow | None
    adapter: Adapter | None
    images: tuple[SentImage, ...] = ()
    reserved: np.ndarray | None = None
    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, request: Request) -> SentRequest:
        given = request.images
        images = () if given is None else given.images
        return cls(
            request.request_id,
            list(request.token_ids),
            request.num_prompt_tokens,
            request.params,
            request.seed,
            request.sample_index,
            request.prompt_logprobs_from,
            request.max_total_tokens,
            request.cache_key,
            request.rank[0],
            request.pooling,
            request.adapter,
            tuple(SentImage(item.key, item.places, item.load()) for item in images),
            None if given is None else given.reserved,
            () if given is None else given.spans,
        )

    def request(self, eos_token_ids: frozenset[int]) -> Request:
        """The request without the tokens of its answer."""
        made = Request(
            self.request_id,
            self.token_ids[: self.num_prompt_tokens],
            self.params,
            seed=self.seed,
            sample_index=self.sample_index,
            max_total_tokens=self.max_total_tokens,
            eos_token_ids=eos_token_ids,
            cache_key=self.cache_key,
            pooling=self.pooling,
            adapter=self.adapter,
            priority=self.priority,
            images=self._row_images(),
        )
        made.prompt_logprobs_from = self.prompt_logprobs_from
        return made

    def _row_images(self) -> RowImages | None:
        if self.reserved is None:
            return None
        made = tuple(RowImage(item.key, item.places, _given(item.inputs)) for item in self.images)
        return RowImages(made, self.reserved, self.spans)


@dataclass(frozen=True)
class EndedRow:
    """Counts of a request that has ended in a replica, as in `Request`."""

    num_preemptions: int
    num_drafted_tokens: int
    num_accepted_tokens: int


@dataclass
class StepReport:
    """A step of a replica.

    Attributes:
        result: its tokens, cut where a request has ended.
        started: request id -> its cached tokens, of those that a step computed first.
        computed: request id -> the tokens that are computed of it, of those whose prompt is not.
        ended: of those that have ended in this step.
        stats: its counts.
        kv_cache_used: as in `LLMStats`.
    """

    result: RunnerOutput
    started: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    ended: dict[str, EndedRow] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)
    kv_cache_used: float = 0.0


@dataclass(frozen=True)
class StepError:
    """A step failed, and the replica has dropped every request; `reset` is the number of the last reset."""

    reset: int
    error: Exception


@dataclass(frozen=True)
class MethodCall:
    """A call of a method of `Runner`."""

    number: int
    method: str
    args: tuple[object, ...] = ()


@dataclass(frozen=True)
class MethodResult:
    """`value`, or the error that the method raised, of the call of this number."""

    number: int
    value: object = None
    error: Exception | None = None


def _given(inputs: Mapping[str, torch.Tensor]) -> _Inputs:
    return _Inputs(dict(inputs))


@dataclass(frozen=True)
class _Inputs:
    values: dict[str, torch.Tensor]

    def __call__(self) -> dict[str, torch.Tensor]:
        return self.values


def _names(kind: type[SamplingParams] | type[StructuredOutputsParams], *others: str) -> tuple[str, ...]:
    return (*(item.name for item in fields(kind)), *others)


SCHEMA = Schema(
    [
        *(
            ReplicaArgs,
            ReplicaLoaded,
            SentImage,
            SentRequest,
            EndedRow,
            StepReport,
            StepError,
            MethodCall,
            MethodResult,
        ),
        *(LLMArgs, CompilationConfig, CompilationMode, ReasoningConfig, SpeculativeConfig, PoolerConfig),
        *(PoolingRow, Adapter, LoRARequest, RunnerOutput, TokenLogprobs, RepetitionDetectionParams, RequestOutputKind),
        *(Explanation, Part, ModelCost, AttentionCost, LayerReport, EngineStats),
    ],
    {
        # Without what is compiled of `structured_outputs`: a replica compiles it again.
        SamplingParams: _names(
            *(SamplingParams, "_origins", "all_stop_token_ids", "bad_words_token_ids", "thinking_token_ids")
        ),
        # Without the pydantic model, which another process may not be able to import; answers are parsed here.
        StructuredOutputsParams: _names(StructuredOutputsParams),
    },
)
