"""Conversations as they are asked: their prompts, what constrains the replies, and how these are read.

`LLM.chat`, `LLM.stream_chat` and `AsyncLLM.chat` have it in common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from llm.base.types import JsonObject
from llm.engine.preprocess import Preprocessor
from llm.engine.prompts import ParsedPrompt
from llm.inputs import TokensPrompt
from llm.outputs import RequestOutput
from llm.sampling_params import SamplingParams
from llm.text.replies import Outputs, ReplyReader, ToolChoice

ManyParams = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True)
class Conversations:
    """Conversations, ready to be generated.

    Attributes:
        params: with what constrains the replies.
    """

    prompts: Sequence[ParsedPrompt]
    params: ManyParams
    _reader: ReplyReader
    _choice: ToolChoice

    def read(self, outputs: Outputs) -> Outputs:
        """`outputs`, with `content`, `reasoning` and `tool_calls`."""
        return self._reader.read(outputs, self._choice)

    def read_one(self, output: RequestOutput) -> None:
        self._reader.read([output], self._choice)

    def before(self, tell: Callable[[RequestOutput], object] | None) -> Callable[[RequestOutput], object] | None:
        """`tell`, with outputs that have been read."""
        return self._reader.before(tell, self._choice)


@dataclass(frozen=True)
class ChatOptions:
    """What a chat is given beside its conversations: the arguments of `LLM.chat`, in its order."""

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: list[JsonObject] | None
    chat_template_kwargs: Mapping[str, object] | None
    tokenization_kwargs: Mapping[str, object] | None
    tool_parser: str | None = "auto"
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool = True
    mm_processor_kwargs: Mapping[str, object] | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ChatOptions:
        """Of a method's `locals()`; those that it does not have keep their defaults."""
        return cls(**{item.name: arguments[item.name] for item in fields(cls) if item.name in arguments})

    def prompts(self, preprocessor: Preprocessor, messages: object) -> list[TokensPrompt]:
        """The prompts of conversations, and nothing else of them."""
        kwargs, rendering = self.chat_template_kwargs or {}, self._rendering(self.tools)
        return preprocessor.render_chat(messages, rendering, kwargs, self.tokenization_kwargs)

    def conversations(
        self,
        preprocessor: Preprocessor,
        messages: object,
        params: ManyParams,
        default: Callable[[], SamplingParams],
        on_too_long: str = "error",
    ) -> Conversations:
        """Render conversations.

        Raises:
            ValidationError: a conversation or an argument is wrong.
        """
        choice, shown = ToolChoice.of(self.tool_choice, self.parallel_tool_calls, self.tools)
        rendering, kwargs = self._rendering(shown), self.chat_template_kwargs or {}
        prompts = preprocessor.chat_prompts(
            messages, rendering, kwargs, self.tokenization_kwargs, on_too_long, params, default, choice
        )
        prompts = cast("list[ParsedPrompt]", preprocessor.with_processor_options(prompts, self.mm_processor_kwargs))
        has_tools = shown is not None
        reader = preprocessor.reply_reader(self.chat_template, self.tool_parser, has_tools, choice.forces)
        return Conversations(prompts, choice.constrained(params, reader.writing, default), reader, choice)

    def _rendering(self, tools: list[JsonObject] | None) -> JsonObject:
        """What the renderer is given by name."""
        return {
            "chat_template": self.chat_template,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "tools": tools,
        }


@dataclass(frozen=True)
class ChatPrompt:
    """One conversation in the place of a prompt."""

    messages: object
    options: ChatOptions
