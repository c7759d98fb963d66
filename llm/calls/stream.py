"""Answers while they are generated: the streams of `LLM`, and the outputs of `AsyncLLM` and `LLMEngine` after a step.

Between two pieces a stream is suspended and other calls may run; if the caller leaves it early, its request is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm.calls.arguments import give_adapters
from llm.engine.interrupt import InterruptGuard
from llm.engine.output import PromptState
from llm.engine.rows import Row
from llm.errors import GenerationInterrupted, LLMError, ValidationError
from llm.inputs import LoRARequest
from llm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from llm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from llm.llm import LLM

Reading = Callable[[RequestOutput], None]


@dataclass
class OngoingRequest:
    """A request, and how much of each of its completions was returned: by `kind` all of the answer so far, what is new
    of it, or all of it once it has ended.

    Attributes:
        read: what reads the whole of it, and what is certain of a part; None: nothing does.
        texts: what streaming has of each completion.
        given: tokens and characters of each that outputs have had.
        has_begun: of what follows, only the end is returned at once.
    """

    state: PromptState
    kind: RequestOutputKind
    read: Reading | None = None
    texts: list[str] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)
    has_begun: bool = False

    def __post_init__(self) -> None:
        self.texts = [""] * len(self.state.completions)
        self.given = [(0, 0)] * len(self.state.completions)
        self.has_begun = self.kind is RequestOutputKind.FINAL_ONLY

    def is_due(self, is_time: bool) -> bool:
        """Whether to tell it now: a beginning and an end at once, else when it is time."""
        return is_time or not self.has_begun or self.state.finished

    def next_output(self, name: str) -> RequestOutput | None:
        """What there is to tell now, of the request that the caller calls `name`; None: nothing."""
        if not self._is_new():
            return None
        output = self.state.output()
        output.request_id = name
        is_whole = self.kind is not RequestOutputKind.DELTA
        if self.read is not None and output.finished and not is_whole:
            self.read(output)
        for index, own in enumerate(output.outputs):
            self._advance(index, own)
        if self.read is not None and is_whole:
            self.read(output)
        return output

    def _is_new(self) -> bool:
        if self.state.finished or self.kind is RequestOutputKind.FINAL_ONLY:
            return self.state.finished
        pairs = zip(self.state.completions, self.given, strict=True)
        return any(completion.request.num_output_tokens > tokens for completion, (tokens, _) in pairs)

    def _advance(self, index: int, own: CompletionOutput) -> None:
        """Cut a completion to what is to be returned of it."""
        pieces = self.state.completions[index].pieces
        self.texts[index] += "".join(pieces)
        pieces.clear()
        if own.finish_reason is None:
            own.text = self.texts[index]  # without what may yet be the start of a stop string
        tokens, characters = self.given[index]
        self.has_begun = self.has_begun or bool(own.token_ids)
        self.given[index] = len(own.token_ids), len(own.text)
        if self.kind is RequestOutputKind.DELTA:
            own.text, own.token_ids = own.text[characters:], own.token_ids[tokens:]
            own.logprobs = None if own.logprobs is None else own.logprobs[tokens:]


@dataclass
class PooledRequest:
    """A prompt of a pooling model.

    Attributes:
        make: its output, once it was computed.
    """

    state: PromptState
    make: Callable[[PromptState], PoolingRequestOutput[PoolingOutput]]

    def is_due(self, is_time: bool) -> bool:
        return self.state.finished

    def next_output(self, name: str) -> PoolingRequestOutput[PoolingOutput] | LLMError:
        """Its output; an error if it has ended without one."""
        if self.state.completions[0].request.pooled is None:
            return LLMError("the request was aborted before it was computed.")
        output = self.make(self.state)
        output.request_id = name
        return output


class ChatStream(Iterator[str]):
    """The pieces of one reply. Closing or dropping it ends the request.

    Attributes:
        output: the whole, read as `LLM.chat` reads it, after the last piece; None before.
    """

    def __init__(self, states: Generator[PromptState, None, None], read: Reading | None = None) -> None:
        self.output: RequestOutput | None = None
        self._states = states
        self._read = read
        self._pieces: list[str] = []
        self._error: Exception | None = None

    def __next__(self) -> str:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            state = next(self._states)
            self._pieces, self._error = state.completions[0].pieces, state.completions[0].request.error
            if state.finished:
                self.output = state.output()
                if self._read is not None:
                    self._read(self.output)
        return self._pieces.pop(0)

    def close(self) -> None:
        self._states.close()


def stream_text(
    llm: LLM, prompt: object, sampling_params: SamplingParams | None, lora_request: LoRARequest | None
) -> Iterator[str]:
    """The text of one prompt's completion, piece by piece."""
    yield from ChatStream(stream_states(llm, prompt, sampling_params, lora_request))


def stream_states(
    llm: LLM,
    prompt: object,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    lora_request: LoRARequest | None,
) -> Generator[PromptState, None, None]:
    """The state of one prompt, whenever there is new text, and once at the end."""
    state: PromptState | None = None
    try:
        with InterruptGuard() as guard, llm._exclusive():
            engine = llm._begin()
            rows = llm._preprocessor.rows(prompt, sampling_params, llm.get_default_sampling_params)
            row = _only_row(rows, makes_text=llm._preprocessor.tokenizer is not None)
            give_adapters(engine, [row], lora_request)
            state = engine.add(row, streaming=True)
        while not guard.requested and not state.finished:
            with InterruptGuard() as guard, llm._exclusive():
                engine = llm._begin()
                if not state.finished:
                    engine.step()
            if state.completions[0].pieces and not guard.requested:
                yield state
        llm._open_engine().end_call()
        if guard.requested:
            raise GenerationInterrupted([state.last_output()])
        if state.completions[0].request.finish_reason == "abort":
            llm._open_engine()
            raise LLMError("the stream was dropped because another call on this LLM failed; start it again.")
        yield state
    finally:
        if state is not None:
            llm._drop(state)


def _only_row(rows: list[Row], *, makes_text: bool) -> Row:
    if len(rows) != 1:
        raise ValidationError(
            f"stream takes one prompt, got {len(rows)}; use generate() for many.", parameter="prompt", value=len(rows)
        )
    if rows[0].params.n != 1:
        raise ValidationError(
            f"stream takes n=1, got {rows[0].params.n}; use generate() for more.", parameter="n", value=rows[0].params.n
        )
    if not (makes_text and rows[0].params.detokenize):
        why = "with detokenize=False" if makes_text else "without a tokenizer"
        raise ValidationError(f"stream yields text, and there is none {why}; use generate().", parameter="detokenize")
    return rows[0]
