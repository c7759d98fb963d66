"""Reads replies: which form a model writes them in is found in its chat template.

Owns what is reasoning. `text` stays as it was generated; what is read from it is beside it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from llm.base.checks import check_choice
from llm.config.engine import ReasoningConfig
from llm.outputs import CompletionOutput, RequestOutput
from llm.replies.calls import Call, ToolCall
from llm.replies.choice import ToolChoice
from llm.replies.forms import ALIASES, FORMS, Writing, begins_of_calls, form_of
from llm.replies.harmony import read_harmony
from llm.tokenizer import Tokenizer

logger = logging.getLogger("llm")

Outputs = TypeVar("Outputs", bound=Iterable[RequestOutput])

# The texts around reasoning; those count whose end is in the template.
_REASONING = (
    *(("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")),
    ("<longcat_think>", "</longcat_think>"),
)


@dataclass(frozen=True)
class ReplyReader:
    """Fills `content`, `reasoning` and `tool_calls` of completions.

    Attributes:
        form: of tool calls; None: they are not read.
        writing: how a call that must happen is written; None: as JSON.
        around: the texts around reasoning; None: it is not read.
    """

    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    form: str | None
    writing: Writing | None
    around: tuple[str, str] | None

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        template: str,
        tool_parser: str | None,
        has_tools: bool,
        reasoning: ReasoningConfig | None,
        forces: bool = False,
    ) -> ReplyReader:
        """`tool_parser`: a form; "auto": the template's, if there are tools; None: calls are not read.

        `forces`: the reply must be a call.
        """
        if tool_parser is not None:
            check_choice("tool_parser", tool_parser, ["auto", *FORMS, *ALIASES])
        form = None if tool_parser is None else ALIASES.get(tool_parser, tool_parser)
        if tool_parser == "auto":
            form = form_of(template)
            if form is None and has_tools and not forces:
                logger.warning("how this model writes tool calls is not known: they stay in the text; see tool_parser.")
            form = form if has_tools or form == "gpt_oss" else None
        around = next((pair for pair in _REASONING if pair[1] in template), None)
        if reasoning is not None and reasoning.reasoning_end_str:
            around = reasoning.reasoning_start_str, reasoning.reasoning_end_str
        writing = None if form is None else FORMS[form].write(template)
        return cls(tokenizer, eos_token_ids, form, writing, around)

    def read(self, outputs: Outputs, choice: ToolChoice) -> Outputs:
        for output in outputs:
            for own in output.outputs:
                self._read(output, own, choice)
        return outputs

    def before(
        self, tell: Callable[[RequestOutput], object] | None, choice: ToolChoice
    ) -> Callable[[RequestOutput], object] | None:
        """`tell`, with outputs that have been read."""
        return None if tell is None else lambda output: tell(self.read([output], choice)[0])

    def _read(self, output: RequestOutput, own: CompletionOutput, choice: ToolChoice) -> None:
        raw = self._raw(output, own)
        reasoning: str | None = None
        calls: list[Call] = []
        if choice.forces:
            rest, calls = "", self._calls(raw, choice)[1] or choice.calls(raw)
        elif self.form == "gpt_oss":
            rest, reasoning, calls = read_harmony(raw)
        else:
            reasoning, rest = self._split(output.prompt or "", raw)
            rest, calls = self._calls(rest, choice)
            if not calls and reasoning is not None and self.around is not None and self.around[1] not in raw:
                reasoning, calls = self._calls(reasoning, choice)  # a call ends reasoning that nothing else ended
                reasoning = reasoning.strip("\n") if calls else reasoning
        self._warn_of_unread(raw, calls, choice)
        calls = calls if choice.is_parallel else calls[:1]
        own.reasoning = reasoning
        own.tool_calls = [ToolCall(name, given, f"call{index:05d}") for index, (name, given) in enumerate(calls)]
        own.content = own.text
        if calls or reasoning is not None or (self.form == "gpt_oss" and not choice.forces):
            own.content = self._without_special(rest).strip()

    def _calls(self, text: str, choice: ToolChoice) -> tuple[str, list[Call]]:
        """(the text without its calls, the calls)."""
        if self.form == "gpt_oss":
            rest, _, calls = read_harmony(text)
            return rest, calls
        return (text, []) if self.form is None else FORMS[self.form].read(text, choice.functions)

    def _warn_of_unread(self, raw: str, calls: list[Call], choice: ToolChoice) -> None:
        if self.form is None or calls:
            return
        begin = next((begin for begin in begins_of_calls(choice.functions) if begin in raw), None)
        if begin is not None:
            _warn_once(begin, self.form)

    def _raw(self, output: RequestOutput, own: CompletionOutput) -> str:
        """The text with special tokens, which mark calls in many forms, but without the one that ended it."""
        if isinstance(own.stop_reason, str):
            return own.text
        tokens = list(own.token_ids)
        if (
            own.finish_reason == "stop"
            and tokens
            and (tokens[-1] in self.eos_token_ids or tokens[-1] == own.stop_reason)
        ):
            tokens.pop()
        return self.tokenizer.decode_continuation(output.prompt_token_ids, tokens, False) if tokens else ""

    def _split(self, prompt: str, raw: str) -> tuple[str | None, str]:
        """(reasoning or None, the rest). It may begin in the prompt, and may not have ended yet."""
        if self.around is None:
            return None, raw
        start, end = self.around
        inside, tag, rest = raw.partition(end)
        begins = inside.lstrip().startswith(start) or prompt.rstrip().endswith(start)
        if not tag and not begins:
            return None, raw
        return inside.lstrip().removeprefix(start).strip("\n"), rest.lstrip("\n")

    def _without_special(self, text: str) -> str:
        for token in self.tokenizer.huggingface().all_special_tokens:
            text = text.replace(token, "")
        return text


@functools.lru_cache(maxsize=64)
def _warn_once(begin: str, form: str) -> None:
    logger.warning(
        "a reply has %r, as tool calls have, and is no call in the form %s: it stays in the text; see tool_parser.",
        begin,
        form,
    )
