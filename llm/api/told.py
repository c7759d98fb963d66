"""What a request has told so far, and what of it is to be told next.

Owns `output_kind`: all of the answer so far, what is new of it, or all of it once it has ended. What a pooling model
makes of a prompt is told once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llm.engine.output import PromptState
from llm.errors import LLMError
from llm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from llm.sampling_params import RequestOutputKind

Reading = Callable[[RequestOutput], None]


@dataclass
class Told:
    """A request, and how much of each of its completions was told.

    Attributes:
        read: what reads the whole of it; None: nothing does.
        texts: what streaming has given of each completion.
        told: tokens and characters of each that outputs have had.
        has_begun: nothing but an end has to be told at once.
    """

    state: PromptState
    kind: RequestOutputKind
    read: Reading | None = None
    texts: list[str] = field(default_factory=list)
    told: list[tuple[int, int]] = field(default_factory=list)
    has_begun: bool = False

    def __post_init__(self) -> None:
        self.texts = [""] * len(self.state.completions)
        self.told = [(0, 0)] * len(self.state.completions)
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
        if self.read is not None and output.finished:
            self.read(output)
        for index, own in enumerate(output.outputs):
            self._advance(index, own)
        return output

    def _is_new(self) -> bool:
        if self.state.finished or self.kind is RequestOutputKind.FINAL_ONLY:
            return self.state.finished
        pairs = zip(self.state.completions, self.told, strict=True)
        return any(completion.request.num_output_tokens > tokens for completion, (tokens, _) in pairs)

    def _advance(self, index: int, own: CompletionOutput) -> None:
        """Make a completion what is to be told of it."""
        pieces = self.state.completions[index].pieces
        self.texts[index] += "".join(pieces)
        pieces.clear()
        if own.finish_reason is None:
            own.text = self.texts[index]  # without what may yet be the start of a stop string
        tokens, characters = self.told[index]
        self.has_begun = self.has_begun or bool(own.token_ids)
        self.told[index] = len(own.token_ids), len(own.text)
        if self.kind is RequestOutputKind.DELTA:
            own.text, own.token_ids = own.text[characters:], own.token_ids[tokens:]
            own.logprobs = None if own.logprobs is None else own.logprobs[tokens:]


@dataclass
class Pooled:
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
