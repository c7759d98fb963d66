"""What the methods of `LLM` return: plain data, under vLLM's names, that never references the engine.

Keeping an output (in a notebook's `Out[3]`, say) or pickling it keeps no model alive. `llm.output_formats` makes JSON,
tables and HTML of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar, overload

import numpy as np

from llm import output_formats
from llm.base.optional import optional_package
from llm.base.types import JsonObject
from llm.base.vllm_paths import missing_names
from llm.inputs import LoRARequest
from llm.inside.capture import Activations
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import pandas
    import pyarrow
    import torch


@dataclass
class Logprob:
    """The log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm, float32 log-softmax of the raw logits.
        rank: 1 for the likeliest token of the vocabulary.
        decoded_token: the token as text, None without a tokenizer. If several tokens form one character, the token
            that completes it has the character and the others have "".
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class FlatLogprobs(MutableSequence[dict[int, Logprob]]):
    """Logprobs of all positions in flat lists, for `flat_logprobs=True`; indexed like a list of dicts. Positions can be
    appended, and not changed (TypeError).

    Position i is `start_indices[i] : end_indices[i]` of `token_ids`, `logprobs`, `ranks` and `decoded_tokens`. The
    range of a prompt's first token is empty.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, position: dict[int, Logprob] | None) -> None:
        """Append one position; None has no tokens."""
        self.start_indices.append(len(self.token_ids))
        for token, item in (position or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(item.logprob)
            self.ranks.append(item.rank)
            self.decoded_tokens.append(item.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def append_fast(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Append one position from the lists of its tokens, which are as long."""
        self.start_indices.append(len(self.token_ids))
        for token, logprob, rank, text in zip(token_ids, logprobs, ranks, decoded_tokens, strict=False):
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            self.ranks.append(rank)
            self.decoded_tokens.append(text)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[dict[int, Logprob] | None]) -> None:
        for position in list(positions):
            self.append(position)

    def __setitem__(self, index: int | slice, value: object) -> NoReturn:
        raise TypeError("positions of FlatLogprobs cannot be replaced.")

    def __delitem__(self, index: int | slice) -> NoReturn:
        raise TypeError("positions of FlatLogprobs cannot be deleted.")

    def insert(self, index: int, value: dict[int, Logprob]) -> NoReturn:
        raise TypeError("positions can only be appended to FlatLogprobs.")

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        if isinstance(index, slice):
            part = FlatLogprobs()
            for position in range(*index.indices(len(self))):
                part.append(self[position])
            return part
        return {
            self.token_ids[item]: Logprob(self.logprobs[item], self.ranks[item], self.decoded_tokens[item])
            for item in range(self.start_indices[index], self.end_indices[index])
        }


@dataclass
class StructuredOutcome:
    """The outcome of `structured_outputs`.

    Attributes:
        complete: True if the completion is a complete answer.
        guaranteed: True if completeness was guaranteed before the start, whatever tokens are drawn.
        reason: why it was not guaranteed, or "".
    """

    complete: bool
    guaranteed: bool
    reason: str = ""


@dataclass
class ToolCall:
    """A call of a function, which the caller may execute.

    Attributes:
        arguments: as the model wrote them; they are not checked against the function's schema.
        id: "call00000" and so on, by place in the reply.
    """

    name: str
    arguments: JsonObject
    id: str = ""

    def to_dict(self) -> JsonObject:
        """As OpenAI writes it, in an assistant's message."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass
class CompletionOutput:
    """One completion of one prompt.

    Attributes:
        index: index among the prompt's `n` completions.
        text: the generated text ("" with `detokenize=False`).
        token_ids: the generated ids, including a stop token.
        cumulative_logprob: sum over the generated tokens; None unless logprobs were requested.
        logprobs: per generated token a dict from id to `Logprob`, the sampled token first.
        finish_reason: "stop", "length", "repetition", "abort", "error"; "interrupted": Ctrl-C ended it, and text and
            tokens are those so far; "skipped": its prompt is too long (`on_too_long="skip"`).
        stop_reason: the stop string or stop token id that ended it; None for EOS and length.
        error: with finish_reason "error" or "skipped", the exception; `raise` it for the traceback.
        structured: the outcome of `structured_outputs`; None without.
        activations: what its `Capture` asked for; None without. It is in no table and no JSON.
        content: of a reply of `LLM.chat`, the text without reasoning and tool calls.
        reasoning: of such a reply; None: there is none.
        tool_calls: of such a reply.
        parsed: a complete JSON answer as data (`StructuredOutputsParams.parse`); else None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    structured: StructuredOutcome | None = None
    parsed: object = field(default=None, compare=False)
    content: str | None = field(default=None, compare=False)
    reasoning: str | None = field(default=None, compare=False)
    tool_calls: list[ToolCall] = field(default_factory=list, compare=False)
    activations: Activations | None = field(default=None, compare=False, repr=False)

    def to_message(self) -> JsonObject:
        """The reply as a message for the next conversation, as OpenAI writes it."""
        content = self.text if self.content is None else self.content
        message: JsonObject = {"role": "assistant", "content": content}
        if self.tool_calls:
            message |= {"content": content or None, "tool_calls": [call.to_dict() for call in self.tool_calls]}
        return message

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class LoglikelihoodOutput:
    """The log-likelihood of a continuation.

    Attributes:
        prompt_token_ids: the tokens before the continuation.
        token_ids: the scored tokens.
        logprob: the sum of `logprobs`.
        logprobs: natural logarithm of each token's probability, given all tokens before it.
        is_greedy: True if each token was the likeliest.
        num_cached_tokens: leading tokens taken from the prefix cache.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprob: float
    logprobs: list[float]
    is_greedy: bool
    num_cached_tokens: int = 0


@dataclass
class ChoiceOutput:
    """The likeliest of a prompt's choices; lists are in the order of the choices.

    Attributes:
        label: the likeliest choice; of equals, the first.
        index: of that among the choices.
        probability: of that.
        probabilities: they sum to 1.
        logprobs: the log-likelihood of each choice after the prompt; not normalized.
        num_tokens: how many tokens of each were scored.
        num_cached_tokens: how many leading tokens of each row came from the prefix cache.
    """

    label: str
    index: int
    probability: float
    choices: list[str]
    probabilities: list[float]
    logprobs: list[float]
    num_tokens: list[int]
    num_cached_tokens: list[int]


@dataclass
class PerplexityOutput:
    """The perplexity of some texts; `float(output)` is `output.perplexity`.

    Attributes:
        perplexity: of all texts together, exp(-logprob / num_tokens).
        per_text: of each text.
        logprob: the sum over all scored tokens.
        num_tokens: number of scored tokens.
    """

    perplexity: float
    per_text: list[float]
    logprob: float
    num_tokens: int

    def __float__(self) -> float:
        return self.perplexity


@dataclass
class RequestStateStats:
    """When things happened to a request; of `n` completions, to the first.

    Attributes:
        num_generation_tokens: of the completion.
        num_preemptions: how often it lost its blocks and was computed again.
        num_drafted_tokens: drafts of speculative decoding that were verified.
        num_accepted_tokens: those that were right: as many steps were saved.
        arrival_time: when it was queued, as `time.time()`.
        queued_ts: when it was queued, as `time.monotonic()`, as all below; 0.0: not yet.
        scheduled_ts: when it was first computed.
        first_token_ts: when it got its first token.
        last_token_ts: when it got its last token.
    """

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0

    @property
    def first_token_latency(self) -> float:
        """Seconds from the queue to the first token."""
        return max(0.0, self.first_token_ts - self.queued_ts)

    @property
    def queue_seconds(self) -> float:
        """From the queue to its first step."""
        return max(0.0, self.scheduled_ts - self.queued_ts)

    @property
    def seconds(self) -> float:
        """From the queue to the last token."""
        return max(0.0, self.last_token_ts - self.queued_ts)

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first; 0.0 with fewer than two, or if they came in one step."""
        seconds = self.last_token_ts - self.first_token_ts
        return (self.num_generation_tokens - 1) / seconds if seconds > 0 else 0.0

    def add_tokens(self, count: int, now: float) -> None:
        self.num_generation_tokens += count
        self.first_token_ts = self.first_token_ts or now
        self.last_token_ts = now


# Outputs in the text of a list of them.
_MOST_SHOWN = 20
_OF_COMPLETIONS = frozenset(item.name for item in fields(CompletionOutput)) - {"error", "structured", "parsed"}


@dataclass(frozen=True)
class TokenView:
    """The tokens of an output: HTML in a notebook, a table of text elsewhere."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


class Exports:
    """The tables of an output, or of a list of them. `llm.output_formats` makes them."""

    def _listed(self) -> Sequence[RequestOutput]:
        raise NotImplementedError

    def to_pandas(self) -> pandas.DataFrame:
        """A row per completion; the columns are those of `llm.output_formats.COLUMNS`."""
        return output_formats.to_pandas(self._listed())

    def to_arrow(self) -> pyarrow.Table:
        """As `to_pandas`, an Arrow table."""
        return output_formats.to_arrow(self._listed())

    def to_parquet(self, path: str | Path) -> Path:
        """Write `to_arrow()` to a file; returns its path."""
        return output_formats.write_parquet(self._listed(), path)

    def to_jsonl(self, path: str | Path) -> Path:
        """Write everything about each prompt as a line of JSON, logprobs included; returns the file's path."""
        return output_formats.write_jsonl(self._listed(), path)


@dataclass
class RequestOutput(Exports):
    """Everything about one prompt. `to_dict()` is plain data; `to_pandas()` and the others make tables.

    Attributes:
        request_id: unique within the engine.
        prompt: the text, None if token ids were given.
        prompt_token_ids: the ids that were computed, special tokens included.
        outputs: `n` completions, by index.
        finished: True in the outputs of `generate`.
        num_cached_tokens: prompt tokens taken from the prefix cache.
        seed: the seed of the draws, given or derived; with it the request can be replayed alone.
        prompt_logprobs: per prompt token a dict from id to `Logprob`, the prompt's own token first; None for the first
            token. None as a whole unless requested.
        prompt_token_id_logprobs: float32 [rows, ids], the logprobs of `prompt_logprob_token_ids`; -inf for -1. Outputs
            are compared without it.
        params: the parameters in effect, seed and max_tokens included. `print` shows the origin of each. Passed to
            `generate` with the same prompt, they give the same answer.
        metrics: when things happened, and how fast; equal answers are equal whatever it is. None: it was not run.
        index: its place among the prompts of the call.
        lora_request: the adapter that it was computed with.
        num_dropped_tokens: how many tokens `on_too_long` or `truncate_prompt_tokens` cut from the prompt.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    seed: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None = None
    prompt_token_id_logprobs: np.ndarray | None = field(default=None, compare=False, kw_only=True)
    params: SamplingParams | None = None
    metrics: RequestStateStats | None = field(default=None, compare=False)
    index: int = 0
    num_dropped_tokens: int = 0
    lora_request: LoRARequest | None = None

    def to_dict(self) -> JsonObject:
        """Plain data that `json.dumps` takes, logprobs included."""
        return output_formats.output_as_json(self)

    def show(self) -> TokenView:
        """Its tokens, tinted by their probability if logprobs were asked for, with the alternatives on hover; in a
        notebook HTML, else text."""
        return TokenView(*output_formats.token_view(self))

    def _repr_html_(self) -> str:
        return output_formats.token_view(self)[0]

    def _listed(self) -> Sequence[RequestOutput]:
        return [self]

    @property
    def error(self) -> Exception | None:
        """The error of its prompt, or the first of a completion; None if there is none."""
        return next((own.error for own in self.outputs if own.error is not None), None)

    @property
    def activations(self) -> Activations | None:
        """`activations` of the first completion."""
        return self.outputs[0].activations if self.outputs else None

    @property
    def parsed(self) -> object:
        """`parsed` of the first completion."""
        return self.outputs[0].parsed if self.outputs else None

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> object:
            where = f"; its completions have: outputs[0].{name}" if name in _OF_COMPLETIONS else ""
            raise AttributeError(f"RequestOutput has no {name!r}{where}.")


class RequestOutputs(list[RequestOutput], Exports):
    """The outputs of a call: a list, with `to_pandas()` and the other ways out; a table in a notebook."""

    def to_dict(self) -> list[JsonObject]:
        return [output.to_dict() for output in self]

    def __repr__(self) -> str:
        if len(self) <= _MOST_SHOWN:
            return super().__repr__()
        first = ", ".join(map(repr, self[:_MOST_SHOWN]))
        return f"[{first}, ... {len(self) - _MOST_SHOWN:,} more]"

    def _repr_html_(self) -> str:
        return output_formats.outputs_table(self)

    def _listed(self) -> Sequence[RequestOutput]:
        return self


@dataclass
class BeamSearchSequence:
    """One sequence found by a search.

    Attributes:
        orig_prompt: the prompt as it was passed.
        tokens: the prompt's ids and the generated ones, without the EOS unless `include_stop_str_in_output`.
        logprobs: per generated token, an EOS included, the logprobs that the search considered.
        cum_logprob: sum over the generated tokens, an EOS included.
        score: `cum_logprob` / (number of generated tokens, an EOS included) ** length_penalty.
        text: `tokens` as text; None without a tokenizer.
        finish_reason: "stop" or "length".
        stop_reason: the id of the EOS that ended it, None for "length".
    """

    orig_prompt: object
    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float = 0.0


@dataclass
class BeamSearchOutput:
    """A prompt's sequences, the best score first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


@dataclass
class PoolingOutput:
    """What was made of one prompt's hidden states. `data`: float32 [size], or [tokens, size]."""

    data: torch.Tensor


@dataclass
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The classes of one prompt.

    Attributes:
        probs: the probability of each class; logits with `use_activation=False`.
        labels: the classes' names.
    """

    probs: list[float]
    labels: list[str] = field(default_factory=list)

    @property
    def num_classes(self) -> int:
        return len(self.probs)

    @property
    def label(self) -> str | None:
        """The name of the likeliest class, None if the model names none."""
        best = max(range(len(self.probs)), key=self.probs.__getitem__)
        return self.labels[best] if self.labels else None


@dataclass
class ScoringOutput:
    """How well two texts fit each other."""

    score: float


@dataclass
class RerankResult:
    """A document of `LLM.rerank`, as it was passed; `index`: its place among the documents."""

    index: int
    document: str | Mapping[str, object]
    relevance_score: float


AnyOutput = PoolingOutput | EmbeddingOutput | ClassificationOutput | ScoringOutput
D = TypeVar("D", bound=AnyOutput, covariant=True)


@dataclass
class PoolingRequestOutput(Generic[D]):
    """The result of one prompt, or of one pair of texts.

    Attributes:
        request_id: unique within the engine.
        outputs: what was computed.
        prompt_token_ids: the ids that were computed, special tokens included.
        num_cached_tokens: prompt tokens taken from the prefix cache.
        finished: True.
        index: its place among the prompts of the call.
        num_dropped_tokens: how many tokens `truncate_prompt_tokens` cut.
    """

    request_id: str
    outputs: D
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    index: int = 0
    num_dropped_tokens: int = 0

    def to_numpy(self) -> np.ndarray:
        """float32: the vector, the probabilities, the tokens' vectors, or the score as an array without dimensions."""
        return _array(self.outputs)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The vector of one prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The classes of one prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of one pair of texts."""


R = TypeVar("R", bound="PoolingRequestOutput[AnyOutput]")


class PoolingRequestOutputs(list[R]):
    """The outputs of a call: a list, with `to_numpy()` and `to_pandas()`."""

    def to_numpy(self) -> np.ndarray:
        """float32 [prompts, size], or [prompts] of scores.

        Raises:
            ValueError: vectors of tokens, whose numbers differ; take each output's own `to_numpy()`.
        """
        arrays = [output.to_numpy() for output in self]
        if len({array.shape for array in arrays}) > 1:
            raise ValueError("the outputs have different shapes; take each output's own to_numpy().")
        return np.stack(arrays) if arrays else np.zeros((0, 0), dtype=np.float32)

    def to_pandas(self) -> pandas.DataFrame:
        """A row per prompt: `index`, `num_prompt_tokens`, and `embedding`, `score` or the classes by name."""
        frames = optional_package("pandas", "pandas")
        columns: dict[str, list[object]] = {
            "index": [output.index for output in self],
            "num_prompt_tokens": [len(output.prompt_token_ids) for output in self],
        }
        for output in self:
            for name, value in _columns(output.outputs).items():
                columns.setdefault(name, []).append(value)
        return frames.DataFrame(columns)


def _array(output: AnyOutput) -> np.ndarray:
    if isinstance(output, PoolingOutput):
        return output.data.numpy()
    if isinstance(output, EmbeddingOutput):
        return np.array(output.embedding, dtype=np.float32)
    if isinstance(output, ClassificationOutput):
        return np.array(output.probs, dtype=np.float32)
    return np.array(output.score, dtype=np.float32)


def _columns(output: AnyOutput) -> dict[str, object]:
    if isinstance(output, EmbeddingOutput):
        return {"embedding": np.array(output.embedding, dtype=np.float32)}
    if isinstance(output, ScoringOutput):
        return {"score": output.score}
    if isinstance(output, ClassificationOutput):
        names: Sequence[str] = output.labels or [f"LABEL_{index}" for index in range(len(output.probs))]
        return {"label": output.label, **dict(zip(names, output.probs, strict=True))}
    return {"data": output.data.numpy()}


@dataclass
class Metric:
    """`labels` tell metrics of one name apart."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counts in an order. No metric here is one; scripts import it."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """What is so now."""

    value: float


@dataclass
class Histogram(Metric):
    """How many values there were, their sum, and how many were at most each bound; the last bound is "+Inf"."""

    count: int
    sum: float
    buckets: dict[str, int]


if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
