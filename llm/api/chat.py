"""The methods of `LLM` that answer conversations.

Owns rendering them with the model's chat template; `generate` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from llm.api.adapters import LoRARequests
from llm.api.asking import ChatOptions, Rendering
from llm.api.checks import Priority, check_asks_nothing
from llm.api.generation import OnOutput
from llm.api.host import Host
from llm.base.bar import UseTqdm
from llm.base.checks import known_names
from llm.base.types import JsonObject
from llm.config.arguments import CALLS
from llm.inputs import TokensPrompt
from llm.outputs import RequestOutputs
from llm.sampling_params import SamplingParams


class ChatHost(Host, Protocol):
    def generate(
        self,
        prompts: object,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: Priority = None,
        on_error: str = "raise",
        on_too_long: str = "error",
        on_interrupt: str = "raise",
        on_output: OnOutput | None = None,
    ) -> RequestOutputs: ...


class Chat:
    @known_names("LLM.chat", CALLS)
    def chat(
        self: ChatHost,
        messages: Sequence[object],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        lora_request: LoRARequests = None,
        priority: Priority = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        mm_processor_kwargs: None = None,
        on_error: str = "raise",
        on_too_long: str = "error",
        on_interrupt: str = "raise",
        on_output: OnOutput | None = None,
        tool_parser: str | None = "auto",
        tool_choice: str | JsonObject | None = None,
        parallel_tool_calls: bool = True,
    ) -> RequestOutputs:
        """Answer one conversation (a list of `{"role", "content"}`), or each of a list of conversations.

        The chat template renders them, with `chat_template_kwargs`, to prompts for `generate`. Replies have `content`,
        `reasoning` and, with `tools`, `tool_calls`, in the form (`tool_parser`) that the template teaches.
        `tool_choice` is OpenAI's: of "required" or a function the reply is JSON of the schemas, without reasoning."""
        check_asks_nothing(
            mm_processor_kwargs=mm_processor_kwargs, chat_template_content_format=chat_template_content_format
        )
        self._open_engine()
        rendering = Rendering(chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs)
        options = ChatOptions(rendering, tools, tool_choice, parallel_tool_calls, tool_parser, tokenization_kwargs)
        default = self.get_default_sampling_params
        asked = options.ask(self._preprocessor, messages, sampling_params, default, on_too_long)
        outputs = self.generate(
            asked.prompts,
            asked.params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            on_error=on_error,
            on_too_long=on_too_long,
            on_interrupt=on_interrupt,
            on_output=asked.before(on_output),
        )
        return asked.read(outputs)

    @known_names("LLM.render_chat", CALLS)
    def render_chat(
        self: Host,
        messages: Sequence[object],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> list[TokensPrompt]:
        """The prompts that `chat` passes to `generate`, one per conversation; `stream` also accepts one."""
        self._open_engine()
        options = Rendering(chat_template, add_generation_prompt, continue_final_message).options(tools)
        return self._preprocessor.render_chat(messages, options, chat_template_kwargs or {}, tokenization_kwargs)
