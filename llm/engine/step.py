"""What engine and runner exchange in a step: the scheduler's plan and the runner's answer, plain data.

A row with T known tokens, of which the last is not in the KV cache yet, and two drafts:

    plan     num_scheduled_tokens = 3, draft_token_ids = [d0, d1]
    runner   computes positions T - 1, T, T + 1 in one forward; samples at T - 1; if that gave d0, samples at T; ...
    answer   sampled_token_ids = [d0, x]: d0 was accepted; x was sampled where d1 had been drafted

Afterwards the KV cache holds all known tokens except x, as after two steps without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from llm.inputs import LoRARequest
from llm.inside.request import Part
from llm.sampling.logprobs import TokenLogprobs
from llm.sampling_params import SamplingParams


@dataclass(frozen=True)
class PoolingRow:
    """What a pooling model makes of one prompt.

    Attributes:
        kind: "LAST", "CLS" or "MEAN"; "ALL": every token has its own result.
        activates: normalise a vector, or turn logits into probabilities.
        dimensions: channels of a vector that are kept; None: all.
        first: the first token of a mean.
        second_text: where the second text of a pair begins; None: there is none.
    """

    kind: str
    activates: bool
    dimensions: int | None = None
    first: int = 0
    second_text: int | None = None


@dataclass(frozen=True, eq=False)
class RowImage:
    """A picture in a prompt.

    Attributes:
        key: of its features: of its pixels and of everything that they are made of besides the weights.
        places: int64, the positions in the prompt of the tokens that get its features, in order.
        load: makes the inputs of the vision tower.
    """

    key: bytes
    places: np.ndarray
    load: Callable[[], dict[str, torch.Tensor]]

    def __reduce__(self) -> tuple[object, ...]:
        return _loaded_image, (self.key, self.places, self.load())


def _loaded_image(key: bytes, places: np.ndarray, inputs: dict[str, torch.Tensor]) -> RowImage:
    return RowImage(key, places, lambda: inputs)


@dataclass(frozen=True, eq=False)
class RowImages:
    """The pictures of a prompt.

    Attributes:
        reserved: int64 [prompt tokens], ids that no vocabulary has, made of the picture's key, in the places of its
            tokens; 0 elsewhere. Blocks are found by them: two pictures of one size share none.
        spans: (first, end) of runs of tokens that see each other in both directions; a step computes all of one.
    """

    images: tuple[RowImage, ...]
    reserved: np.ndarray
    spans: tuple[tuple[int, int], ...] = ()

    def content(self, token_ids: Sequence[int], start: int) -> list[int]:
        """The ids of the tokens from `start` on, reserved ones in the places of pictures."""
        own = self.reserved[start : start + len(token_ids)].tolist()
        own += [0] * (len(token_ids) - len(own))
        return [reserved or token for reserved, token in zip(own, token_ids, strict=True)]

    def whole(self, start: int, end: int) -> int:
        """Where a step from `start` on that would end before `end` must end, so that no span is cut: before one or
        behind it."""
        cut = next(((first, last) for first, last in self.spans if first < end < last), None)
        return end if cut is None else cut[0] if cut[0] > start else cut[1]


@dataclass
class NewRow:
    """A request that enters the runner's batch: new, or resumed after preemption (then `token_ids` has outputs too).

    Attributes:
        blocks, slot, restored_slot: as in `Request`.
        prompt_logprobs_from: the first prompt position whose next token still needs a logprob; the prompt's length if
            none does.
        pooling: of a pooling model's row; None: the row generates.
        adapter, adapter_slot: as in `Request`; the runner loads the adapter into the slot if it is not there.
        images: None: the prompt has none.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    blocks: list[list[int]]
    slot: int
    restored_slot: int
    params: SamplingParams
    seed: int
    sample_index: int
    prompt_logprobs_from: int
    pooling: PoolingRow | None = None
    adapter: Adapter | None = None
    adapter_slot: int = 0
    images: RowImages | None = None


@dataclass
class SchedulerOutput:
    """One step's work.

    Attributes:
        num_scheduled_tokens: request id -> tokens to compute now, drafts included, in the order of scheduling.
        new_rows: requests that enter the batch this step.
        new_blocks: request id -> block ids per group appended to the table of a request already in the batch.
        removed: requests that left the batch since the last step (finished, aborted or preempted).
        draft_token_ids: request id -> drafts to verify after its last known token, which is computed in this step too.
        snapshots: (from, to) pairs of slots whose recurrent states are copied after the forward pass.
        goes_on: every batch row samples a token in this step, and most are expected to compute it in the next: a runner
            may start that before it is planned, and before it has read the tokens.
    """

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: dict[str, list[list[int]]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    snapshots: list[tuple[int, int]] = field(default_factory=list)
    goes_on: bool = False


@dataclass
class RunnerOutput:
    """What a step produced.

    Attributes:
        sampled_token_ids: request id -> the tokens it sampled, accepted drafts first. Requests that sampled none are
            absent: they are in prefill, or ended with an error.
        logprobs: request id -> one `TokenLogprobs` per sampled token, for requests that asked.
        prompt_logprobs: request id -> one `TokenLogprobs` per prompt token that follows one computed in this step.
        prompt_scores: request id -> the logprobs of `prompt_logprob_token_ids` at those of these tokens that have some.
        errors: request id -> why no token could be sampled after those in `sampled_token_ids`: its own processor
            raised, or no token was left. A `LogitsProcessorError` fails the call, unless all requests that it is
            reported for ended with an earlier token.
        draft_token_ids: request id -> drafts for its next step.
        pooled: request id -> the result of a pooling model's row, which it ends: float32 [size] or [tokens, size].
        activations: request id -> what was captured in this step: (site, positions, values).
        model_seconds: time in forward, LM head and sampler.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_scores: dict[str, list[list[float]]] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    pooled: dict[str, np.ndarray] = field(default_factory=dict)
    activations: dict[str, list[Part]] = field(default_factory=dict)
    model_seconds: float = 0.0


NO_SLOT = 0


@dataclass(frozen=True)
class Adapter:
    """An adapter whose files were checked against the model.

    Attributes:
        request: as the user named it.
        digest: of its files; adapters of equal digest are one, whatever their names are.
    """

    request: LoRARequest
    digest: str
