"""Replies: the reasoning and the tool calls in them, whether they must call (`tool_choice`), and replies in histories.

Which form a model writes is found in its chat template. `text` stays as it was generated; what is read from it is
beside it. A reply that must call is the calls and nothing else, in the form that the template teaches. Where no form is
known, or a schema cannot be kept in it, it is JSON, as in vLLM: a list of `{"name", "parameters"}` where a call is
required, the arguments alone where the function is named.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from llm.base.checks import check_choice, check_flag
from llm.base.text import quote, show
from llm.base.types import JsonObject
from llm.config.engine import ReasoningConfig
from llm.errors import ValidationError, nearest
from llm.outputs import CompletionOutput, RequestOutput, ToolCall
from llm.sampling_params import SamplingParams, StructuredOutputsParams
from llm.text.open_calls import closed
from llm.text.tokenizer import Tokenizer
from llm.text.tool_calls import Call, call_of, json_object, json_value
from llm.text.tool_forms import ALIASES, FORMS, CannotWrite, Writing, begins_of_calls, form_of

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
        if own.finish_reason is None:
            own.reasoning, own.content, begun = self._certain(output, own, choice)
            own.tool_calls = _numbered(begun, choice)
            return
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
        own.reasoning = reasoning
        own.tool_calls = _numbered(calls, choice)
        own.content = own.text
        if calls or reasoning is not None or (self.form == "gpt_oss" and not choice.forces):
            own.content = self._without_special(rest).strip()

    def _certain(
        self, output: RequestOutput, own: CompletionOutput, choice: ToolChoice
    ) -> tuple[str | None, str, list[Call]]:
        """(reasoning, content, calls) of a reply that goes on, as far as what comes cannot change them; the arguments
        of the last call may go on. What may yet become a call is none, and no content.
        """
        if self.form is None and self.around is None and not choice.forces:
            return None, own.text, []
        raw = self._raw(output, own)
        while raw and len(self._without_special(raw)) > len(own.text):
            raw = raw[:-1]  # the start of a character or of a stop string
        if choice.forces:
            return None, "", self._begun(raw, choice)
        if self.form == "gpt_oss":
            calls = self._begun(raw, choice)
            content, reasoning, _ = read_harmony(_whole_messages(raw))
            return (None if reasoning is None else reasoning.rstrip()), self._without_special(content).strip(), calls
        reasoning, rest = self._split(output.prompt or "", raw)
        if self.around is not None:
            start, end = self.around
            if reasoning is not None and end not in raw:
                return self._before_calls(reasoning, end).rstrip("\n"), "", []
            if reasoning is None and start.startswith(raw.strip()):
                return None, "", []
        if reasoning is None and self.form is None:
            return None, own.text, []
        content, calls = self._without_special(self._before_calls(rest)), self._begun(rest, choice)
        if reasoning is not None:
            return reasoning, content.strip(), calls
        return None, "" if content[:1].isspace() else content.rstrip(), calls  # with a call it is stripped

    def _begun(self, text: str, choice: ToolChoice) -> list[Call]:
        """The calls of a reply that goes on; the last one as far as it is written."""

        def read(text: str) -> list[Call]:
            found = self._calls(text, choice)[1]
            return found or (choice.calls(text) if choice.forces else [])

        start = 0 if choice.forces else len(self._before_calls(text))
        if start == len(text):
            return []
        whole = read(text)
        for candidate in closed(text, start, self.form is not None and FORMS[self.form].writes_python):
            found = read(candidate)
            if len(found) > len(whole) and found[: len(whole)] == whole:
                name, arguments = found[-1]
                if arguments and name in choice.functions:
                    return found
        return whole

    def _before_calls(self, text: str, *others: str) -> str:
        """What stands before anything that may be the beginning of a call, or of one of `others`."""
        begins = set(others)
        if self.form is not None:
            begins |= {*FORMS[self.form].begins, *_OPENINGS}
        return text[: min(map(partial(_may_begin, text), begins), default=len(text))]

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


def _numbered(calls: Sequence[Call], choice: ToolChoice) -> list[ToolCall]:
    kept = calls if choice.is_parallel else calls[:1]
    return [ToolCall(name, given, f"call{index:05d}") for index, (name, given) in enumerate(kept)]


def _may_begin(text: str, begin: str) -> int:
    """Where `begin` is in the text, or may be once more of it is there."""
    found = text.find(begin)
    if found >= 0:
        return found
    ends = (size for size in range(min(len(begin), len(text)), 0, -1) if text.endswith(begin[:size]))
    return len(text) - next(ends, 0)


@functools.lru_cache(maxsize=64)
def _warn_once(begin: str, form: str) -> None:
    logger.warning(
        "a reply has %r, as tool calls have, and is no call in the form %s: it stays in the text; see tool_parser.",
        begin,
        form,
    )


# --- gpt-oss's channels. ---

# Of lists, objects and marks, in which calls may come whatever their form.
_OPENINGS = ("{", "[", "<|", "<｜")  # noqa: RUF001
_ENDS = ("<|end|>", "<|call|>", "<|return|>")


def read_harmony(text: str) -> tuple[str, str | None, list[tuple[str, JsonObject]]]:
    """(content, reasoning or None, calls) of gpt-oss's reply, which goes on after `<|start|>assistant`.

    It is messages with channels, of which "analysis" is reasoning and a recipient is a function.
    """
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, JsonObject]] = []
    for message in text.split("<|start|>"):
        head, tag, body = message.partition("<|message|>")
        if not tag:
            content.append(head)
            continue
        for end in _ENDS:
            body = body.partition(end)[0]
        arguments = json_object(body) if "to=functions." in head else None
        name = head.partition("to=functions.")[2].partition("<|")[0].split()[:1]
        if arguments is not None and name:
            calls.append((name[0], arguments))
        elif head.partition("<|channel|>")[2].startswith("analysis") and "to=" not in head:
            reasoning.append(body)
        else:
            content.append(body)
    return "\n".join(filter(None, content)), "\n".join(reasoning) if reasoning else None, calls


def _whole_messages(text: str) -> str:
    """The messages of a reply of gpt-oss that goes on, without a header that has not ended and without a call."""
    start = text.rfind("<|start|>")
    head, tag, body = text[max(start, 0) :].partition("<|message|>")
    if not tag or "to=functions." in head:
        return text[: max(start, 0)]
    end = min(_may_begin(body, mark) for mark in (*_ENDS, "<|start|>"))
    return text[: max(start, 0)] + head + tag + body[:end]


# --- What `tool_choice` asks for. ---

_CLOSED: JsonObject = {"additionalProperties": False}
_NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, **_CLOSED}
_DEFINITIONS = ("$defs", "definitions")
_OF_DATA = ("const", "enum", "default", "examples")  # their values are no schemas


@dataclass(frozen=True)
class ToolChoice:
    """A choice.

    Attributes:
        kind: "none", "auto", "required" or "named".
        name: of the function, if it is named; else "".
        is_parallel: False: a reply has one call at most.
        functions: the schema of each function's arguments, by its name.
    """

    kind: str = "auto"
    name: str = ""
    is_parallel: bool = True
    functions: Mapping[str, JsonObject] = field(default_factory=dict)

    @classmethod
    def of(cls, given: object, parallel: object, tools: object) -> tuple[ToolChoice, list[JsonObject] | None]:
        """The choice, and the tools that the chat template shows the model; None: it shows none.

        Raises:
            ValidationError: one of them is wrong, or a call is wanted of a function that is not there.
        """
        if parallel is not None:
            check_flag("parallel_tool_calls", parallel)
        if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools)):
            raise ValidationError("tools must be a list of objects.", parameter="tools", value=tools)
        name = _named(given)
        if name is None and given not in (None, "auto", "none", "required"):
            right = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"
            raise ValidationError(f"tool_choice must be {right}, got {show(given)}.", parameter="tool_choice")
        kind = "named" if name else str(given or "auto")
        functions = _functions(tools or [], strict=kind in ("named", "required"))
        choice = cls(kind, name or "", parallel is not False, functions)
        if choice.forces:
            choice._check_functions(list(functions))
        return choice, None if choice.kind == "none" or not tools else tools

    @property
    def forces(self) -> bool:
        """True if the reply is a call, and nothing else."""
        return self.kind in ("required", "named")

    def structured(self, writing: Writing | None) -> StructuredOutputsParams | None:
        """What constrains the reply; None: nothing does."""
        if not self.forces:
            return None
        named = {self.name: self.functions[self.name]} if self.kind == "named" else self.functions
        if writing is not None:
            try:
                made = writing.format(named, self.is_parallel and self.kind == "required")
                return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": made})
            except CannotWrite:
                pass
        return StructuredOutputsParams(
            json=named[self.name] if self.kind == "named" else _required(named, self.is_parallel)
        )

    def constrained(
        self,
        params: SamplingParams | Sequence[SamplingParams] | None,
        writing: Writing | None,
        default: Callable[[], SamplingParams],
    ) -> SamplingParams | Sequence[SamplingParams] | None:
        """`params`, or the default ones, with `structured`; what is none is left to who checks it.

        Raises:
            ValidationError: they have a constraint of their own.
        """
        structured = self.structured(writing)
        if structured is None:
            return params
        params = default() if params is None else params
        if isinstance(params, list | tuple):
            return [_with(own, structured) for own in params]
        return _with(params, structured) if isinstance(params, SamplingParams) else params

    def constrained_row(self, params: SamplingParams, writing: Writing | None) -> SamplingParams:
        """As `constrained`, of one row."""
        structured = self.structured(writing)
        return params if structured is None else _with(params, structured)

    def calls(self, text: str) -> list[Call]:
        """The calls of a reply that had to call, as JSON; none if it is not complete."""
        if self.kind == "named":
            arguments = json_object(text)
            return [] if arguments is None else [(self.name, arguments)]
        items = json_value(text)
        found = [call_of(item) for item in items] if isinstance(items, list) else []
        return [] if None in found else [call for call in found if call is not None]

    def _check_functions(self, names: list[str]) -> None:
        if not names:
            raise ValidationError("tools must be given where tool_choice asks for a call.", parameter="tools")
        if self.name and self.name not in names:
            hint = nearest(self.name, names)
            message = f"tool_choice names {quote(self.name)}, which is none of the tools.{hint}"
            raise ValidationError(message, parameter="tool_choice", value=self.name)


def _with(params: SamplingParams, structured: StructuredOutputsParams) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        return params
    if params.structured_outputs is not None:
        message = "structured_outputs must be None where tool_choice asks for a call: the call is the constraint."
        raise ValidationError(message, parameter="structured_outputs")
    return dataclasses.replace(params, structured_outputs=structured)


def _named(given: object) -> str | None:
    function = given.get("function") if isinstance(given, Mapping) and given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and name else None


def _functions(tools: Sequence[JsonObject], strict: bool) -> dict[str, JsonObject]:
    """The schema of each function's arguments, by its name; not `strict`: tools of another form are left out."""
    found: dict[str, JsonObject] = {}
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name or name in found:
            if not strict:
                continue
            message = "tools must be functions with names of their own: {'type': 'function', 'function': {'name': ...}}"
            raise ValidationError(f"{message}, got {show(tool)}.", parameter="tools")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            if not strict:
                continue
            message = f"the parameters of the tool {quote(name)} must be a JSON schema, an object, got "
            raise ValidationError(f"{message}{show(parameters)}.", parameter="tools")
        found[name] = _NO_PARAMETERS if parameters is None else {"type": "object", **parameters}
    return found


def _required(functions: Mapping[str, JsonObject], is_parallel: bool) -> JsonObject:
    """A list of at least one call. References begin at the root, so definitions of all functions move there."""
    definitions: JsonObject = {}
    choices: list[JsonObject] = []
    for index, (name, schema) in enumerate(functions.items()):
        place = f"tool{index}"
        for keyword in _DEFINITIONS:
            own = schema.get(keyword)
            if isinstance(own, Mapping):
                definitions |= {f"{place}.{keyword}.{key}": _moved(item, place) for key, item in own.items()}
        definitions[place] = _moved({key: item for key, item in schema.items() if key not in _DEFINITIONS}, place)
        properties = {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}}
        choices.append({"type": "object", "properties": properties, "required": list(properties), **_CLOSED})
    several: JsonObject = {} if is_parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **several, "items": {"anyOf": choices}, "$defs": definitions}


def _moved(schema: object, place: str) -> object:
    """The schema with its references to where `_required` puts what they name."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: item if key in _OF_DATA else _moved(item, place) for key, item in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        head, keyword, name = target[1:].split("/", 2) if target.count("/") > 1 else ("", "", "")
        inside = not head and keyword in _DEFINITIONS
        moved["$ref"] = f"#/$defs/{place}.{keyword}.{name}" if inside else f"#/$defs/{place}{target[1:]}"
    return moved


def readable(conversation: Sequence[JsonObject]) -> list[JsonObject]:
    """Messages as OpenAI writes them, made what chat templates read: arguments as an object, and a content.

    Raises `ValidationError`: a content is None without tool calls, or a call has no function's name.
    """
    return [_readable(message) for message in conversation]


def _readable(message: JsonObject) -> JsonObject:
    calls = message.get("tool_calls")
    if not calls:
        if message.get("content", "") is None:
            raise ValidationError(
                f"the content of a message must be a text, got None in one of the role {message['role']!r} without "
                "tool_calls.",
                parameter="messages",
            )
        return {name: value for name, value in message.items() if name != "tool_calls" or value is not None}
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise ValidationError("tool_calls of a message must be a list of calls.", parameter="messages", value=calls)
    content = message.get("content")
    return {**message, "content": "" if content is None else content, "tool_calls": [_call(item) for item in calls]}


def _call(given: object) -> JsonObject:
    call = given.to_dict() if isinstance(given, ToolCall) else given
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValidationError(
            "tool_calls of a message must be ToolCalls, or {'function': {'name': ..., 'arguments': ...}}.",
            parameter="messages",
        )
    arguments = json_object(function.get("arguments", {}))
    kept = function.get("arguments") if arguments is None else arguments
    return {**call, "function": {**function, "arguments": kept}}


def tools_as_text(tools: Sequence[JsonObject], choice: ToolChoice) -> str:
    """The tools of a reply that must call, for a model whose template shows none."""
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    if choice.kind == "named":
        asked = f"Answer with the arguments of a call of {choice.name}, as JSON, and nothing else."
    else:
        asked = 'Answer with a JSON list of calls, [{"name": ..., "parameters": {...}}], and nothing else.'
    return "\n".join(["You can call these functions:", *lines, asked])


def with_text(conversation: Sequence[JsonObject], text: str, role: str) -> list[JsonObject]:
    """The conversation with a text in its first message of the role: after a system message, before another's.

    Where the conversation does not begin with a system message, it gets one.
    """
    messages = list(conversation)
    if role == "system" and (not messages or messages[0].get("role") != "system"):
        return [{"role": "system", "content": text}, *messages]
    for place, message in enumerate(messages):
        if message.get("role") == role:
            content = message.get("content") or ""
            own: list[object] = content if isinstance(content, list) else [{"type": "text", "text": content}]
            part = {"type": "text", "text": text}
            parts = [*own, part] if role == "system" else [part, *own]
            texts = [item.get("text") for item in parts if isinstance(item, Mapping)]
            joined = "\n\n".join(item for item in texts if isinstance(item, str) and item)
            messages[place] = {**message, "content": parts if isinstance(content, list) else joined}
            break
    return messages
