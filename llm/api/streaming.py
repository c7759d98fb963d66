"""The methods of `LLM` that stream an answer.

Owns the life cycle of a stream: between two pieces it is suspended and other calls may run; if the caller leaves it
early, its request is dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Protocol

from llm.api.adapters import give_adapters
from llm.api.asking import ChatOptions, Rendering
from llm.api.host import Host
from llm.base.checks import known_names
from llm.base.suggestions import ASKS_NOTHING
from llm.base.types import JsonObject
from llm.config.arguments import CALLS
from llm.engine.interrupt import InterruptGuard
from llm.engine.output import PromptState
from llm.engine.rows import Row
from llm.errors import GenerationInterrupted, LLMError, ValidationError
from llm.inputs import LoRARequest
from llm.outputs import RequestOutput
from llm.sampling_params import SamplingParams

_ELSEWHERE = {
    **CALLS,
    **{name: instead for name, (_, instead) in ASKS_NOTHING.items()},
    "tokenization_kwargs": "tokenize with LLM.get_tokenizer() and pass token ids",
}


class StreamingHost(Host, Protocol):
    """Attributes:
    _dropped: the prompts of streams that were left early, to be aborted when no call is running.
    """

    _dropped: list[PromptState]

    def stream_state(
        self,
        prompt: object,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Generator[PromptState, None, None]: ...
    def _abort_if_idle(self) -> None: ...
    def _drop(self, *states: PromptState) -> None: ...


class ChatStream(Iterator[str]):
    """The pieces of one reply. Closing or dropping it ends the request.

    Attributes:
        output: the whole, read as `LLM.chat` reads it, after the last piece; None before.
    """

    def __init__(self, states: Generator[PromptState, None, None], read: Callable[[RequestOutput], None]) -> None:
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
                self._read(self.output)
        return self._pieces.pop(0)

    def close(self) -> None:
        self._states.close()


class Streaming:
    @known_names("LLM.stream", {**_ELSEWHERE, "use_tqdm": "a stream shows no bar"})
    def stream(
        self: StreamingHost,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[str]:
        """Yield the completion's text piece by piece. Leaving the loop early drops the request and frees its blocks.

        Other calls may run while the stream is suspended. Raises as `generate`, and the error that ended the request if
        there is one; `n` must be 1.
        """
        for state in self.stream_state(prompt, sampling_params, lora_request=lora_request):
            pieces = state.completions[0].pieces
            while pieces:
                yield pieces.pop(0)
            error = state.completions[0].request.error
            if error is not None:
                raise error

    @known_names("LLM.stream_chat", {**CALLS, "use_tqdm": "a stream shows no bar"})
    def stream_chat(
        self: StreamingHost,
        messages: Sequence[object],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        tool_parser: str | None = "auto",
        tool_choice: str | JsonObject | None = None,
        parallel_tool_calls: bool = True,
    ) -> ChatStream:
        """As `stream`, for one conversation; the arguments are those of `chat`. After the last piece, `output` of what
        is returned has `content`, `reasoning` and `tool_calls`; the pieces are all that is generated."""
        self._open_engine()
        rendering = Rendering(chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs)
        options = ChatOptions(rendering, tools, tool_choice, parallel_tool_calls, tool_parser, tokenization_kwargs)
        asked = options.ask(self._preprocessor, messages, sampling_params, self.get_default_sampling_params)
        return ChatStream(self.stream_state(asked.prompts, asked.params, lora_request=lora_request), asked.read_one)

    @known_names("LLM.stream_state", _ELSEWHERE)
    def stream_state(
        self: StreamingHost,
        prompt: object,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Generator[PromptState, None, None]:
        """As `stream`, but yields the prompt's state whenever there is new text, and once at the end."""
        state: PromptState | None = None
        try:
            with InterruptGuard() as guard, self._exclusive():
                engine = self._begin()
                rows = self._preprocessor.rows(prompt, sampling_params, self.get_default_sampling_params)
                row = _only_row(rows, makes_text=self._preprocessor.tokenizer is not None)
                give_adapters(engine, [row], lora_request)
                state = engine.add(row, streaming=True)
            while not guard.requested and not state.finished:
                with InterruptGuard() as guard, self._exclusive():
                    engine = self._begin()
                    if not state.finished:
                        engine.step()
                if state.completions[0].pieces and not guard.requested:
                    yield state
            self._open_engine().end_call()
            if guard.requested:
                raise GenerationInterrupted([state.last_output()])
            if state.completions[0].request.finish_reason == "abort":
                self._open_engine()
                raise LLMError("the stream was dropped because another call on this LLM failed; start it again.")
            yield state
        finally:
            if state is not None:
                self._drop(state)

    # A method whose names are bound here: at interpreter exit this module's own may be gone before the last stream is.
    def _drop(self: StreamingHost, *states: PromptState, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """End a stream's requests. A generator can be collected during any call, so aborting them may have to wait."""
        if is_exiting() or all(state.finished for state in states):
            return
        self._dropped.extend(states)
        with InterruptGuard() as guard:
            self._abort_if_idle()
        if guard.requested:
            raise KeyboardInterrupt


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
