"""Rows of a file as requests: the plain form, with a column or a template, and OpenAI's batch format.

Owns which fields there are, and what an answer becomes in the output. Unknown fields are refused.
"""

from __future__ import annotations

import dataclasses
import math
import re
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from llm.base.text import clip, list_names, quote
from llm.base.types import JsonObject
from llm.errors import ValidationError, nearest
from llm.inputs import LoRARequest
from llm.jobs.adapters import COLUMN, JobAdapters
from llm.jobs.answers import Ended
from llm.jobs.bodies import (
    PARAM_TYPES,
    chat_arguments,
    chat_body,
    chosen_tools,
    completion_body,
    error_code,
    sampling_fields,
    with_fields,
)
from llm.jobs.tables import Form
from llm.replies.calls import json_value
from llm.replies.choice import ToolChoice
from llm.sampling_params import SamplingParams

# In how a template writes a column: a width that may take gigabytes, or one that is another column.
_WIDE = re.compile(r"[{}]|\d{4}")
URLS = ("/v1/chat/completions", "/v1/completions")
# Columns with a row's own params.
PARAMS_COLUMN, EXTRA_COLUMN = "sampling_params", "extra_args"
_BATCH_KEYS = {"custom_id", "method", "url", "body"}
# Columns that an answer adds to its row, and their types; lists where there are several completions.
ANSWER_COLUMNS: dict[str, Form] = {
    "generated_text": str,
    "finish_reason": str,
    "num_prompt_tokens": int,
    "num_generated_tokens": int,
    "error": str,
}
# The same of conversations: what was read from the text, beside it.
_CALLS: Form = [{"id": str, "type": str, "function": {"name": str, "arguments": str}}]
_OF_REPLIES: dict[str, Form] = {"content": str, "reasoning": str, "tool_calls": _CALLS}
# Columns of a row with a conversation that say how it is answered; texts among them are JSON, as CSV has no objects.
_OF_CHAT = ("tools", "tool_choice", "chat_template_kwargs")


class Asked(NamedTuple):
    """A row's request: a prompt, or a conversation with the renderer's arguments and whether it calls functions."""

    prompt: object
    params: SamplingParams
    messages: object = None
    chat: JsonObject = {}  # noqa: RUF012  never changed
    adapter: LoRARequest | None = None
    choice: ToolChoice | None = None


@dataclass(frozen=True, kw_only=True)
class PlainForm:
    """Rows whose prompt is in a column, or made from columns by a template.

    A column `messages` has conversations. The output has the row's columns and those of `forms`.

    Attributes:
        row_params: columns with the names of parameters are parameters of their rows.
    """

    adapters: JobAdapters
    column: str | None = None
    template: str | None = None
    row_params: bool = False

    def fault(self, row: JsonObject) -> str | None:
        """Why the columns do not fit; None: they do."""
        clash = [name for name in self.forms(row) if name in row]
        if clash:
            return f"the input has a column {quote(clash[0])}, which the output would replace; rename it"
        missing = [name for name in self._columns(row) if name not in row]
        return f"the input has no column {quote(missing[0])}; it has {list_names(row)}" if missing else None

    def forms(self, row: JsonObject) -> dict[str, Form]:
        """The columns that an answer adds, and their types."""
        raise NotImplementedError

    def param_types(self) -> Mapping[str, str]:
        """The parameters that a row may have, and their types as they are annotated."""
        raise NotImplementedError

    def param_columns(self, row: JsonObject) -> list[str]:
        """The columns that have the names of parameters; those that the prompt is made of are none."""
        own = self._columns(row)
        return [name for name in row if name in self.param_types() and name not in own]

    def own_params(self, row: JsonObject) -> JsonObject:
        """What the row says of its parameters in such columns; an empty cell says nothing."""
        if not self.row_params:
            return {}
        found = {name: _cell(row[name], self.param_types()[name]) for name in self.param_columns(row)}
        return {name: value for name, value in found.items() if value is not None}

    def identifier(self, row: JsonObject) -> str | None:
        return None

    def prompt_of(self, row: JsonObject) -> tuple[object, object]:
        """(prompt, messages), one of which is None."""
        if self.template is not None:
            return self.template.format_map(row), None
        (column,) = self._columns(row)
        return (None, _data(row[column])) if column == "messages" else (row[column], None)

    def is_chat(self, row: JsonObject) -> bool:
        return self.template is None and self._columns(row) == ["messages"]

    def adapter_of(self, row: JsonObject) -> LoRARequest | None:
        return self.adapters.named(row.get(COLUMN), COLUMN)

    def _columns(self, row: JsonObject) -> list[str]:
        if self.template is not None:
            return template_columns(self.template)
        if self.column is not None:
            return [self.column]
        return ["messages"] if "messages" in row and "prompt" not in row else ["prompt"]


@dataclass(frozen=True, kw_only=True)
class PlainRows(PlainForm):
    """Plain rows of a model that generates.

    Attributes:
        base: what a row's own params are added to; None: `params`.
    """

    params: SamplingParams
    base: SamplingParams | None = None

    def param_types(self) -> Mapping[str, str]:
        return {name: kind for name, kind in PARAM_TYPES.items() if name != EXTRA_COLUMN}

    def forms(self, row: JsonObject) -> dict[str, Form]:
        several, found = self.params.n > 1, dict(ANSWER_COLUMNS)
        if self.is_chat(row):
            text, *others = ANSWER_COLUMNS.items()
            found = dict([text, *_OF_REPLIES.items(), *others])
        of_completion = {"generated_text", "finish_reason", *_OF_REPLIES}
        return {name: [form] if several and name in of_completion else form for name, form in found.items()}

    def asked(self, row: JsonObject) -> Asked:
        """Raises `ValidationError` for an adapter that is not there, or what is wrong of params and tools."""
        prompt, messages = self.prompt_of(row)
        params = self.params_of(row)
        if messages is None:
            return Asked(prompt, params, adapter=self.adapter_of(row))
        options = _options(row)
        choice, _ = chosen_tools(options)
        return Asked(None, params, messages, chat_arguments(options), self.adapter_of(row), choice)

    def params_of(self, row: JsonObject) -> SamplingParams:
        """Those of the job, with the row's own in columns `sampling_params` and `extra_args`, and in `own_params`."""
        fields = self.own_params(row)
        for name in (PARAMS_COLUMN, EXTRA_COLUMN):
            given = _data(row.get(name))
            if given is None:
                continue
            if not isinstance(given, Mapping):
                raise ValidationError(f"{name} of a row must be an object of fields.", parameter=name)
            own = {name: given} if name == EXTRA_COLUMN else {str(key): value for key, value in given.items()}
            twice = next((key for key, value in own.items() if value is not None and key in fields), None)
            if twice is not None:
                raise ValidationError(f"{twice} of a row must be given once.", parameter=twice)
            fields |= {key: value for key, value in own.items() if value is not None}
        if not fields:
            return self.params
        return with_fields(self.base or self.params, fields, PARAMS_COLUMN)

    def chosen(self, row: JsonObject) -> tuple[ToolChoice, bool] | None:
        """Of a conversation, the choice and whether the model was shown tools; None: it is none."""
        if not self.is_chat(row):
            return None
        choice, tools = chosen_tools(_options(row))
        return choice, tools is not None

    def answer(self, row: JsonObject, ended: Ended, model: str) -> JsonObject:
        """`ended`: of a conversation, what the reply holds has been read."""
        output = ended.output
        values: JsonObject = {
            "generated_text": [own.text for own in output.outputs],
            "finish_reason": [own.finish_reason for own in output.outputs],
            "content": [own.content for own in output.outputs],
            "reasoning": [own.reasoning for own in output.outputs],
            "tool_calls": [[call.to_dict() for call in own.tool_calls] or None for own in output.outputs],
            "num_prompt_tokens": len(output.prompt_token_ids),
            "num_generated_tokens": sum(len(own.token_ids) for own in output.outputs),
            "error": told_error(ended),
        }
        one = self.params.n == 1
        found = {name: values[name] for name in self.forms(row)}
        return row | {name: value[0] if one and isinstance(value, list) else value for name, value in found.items()}


def _cell(value: object, annotated: str) -> object:
    """The value of a parameter in a column: CSV has texts, and pandas writes floats, with NaN for nothing."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return int(value) if annotated.startswith("int") and value.is_integer() else value
    if not isinstance(value, str) or value == "":
        return None if value == "" else value
    if annotated.startswith("bool"):
        return {"true": True, "false": False}.get(value.lower(), value)
    if "str" in annotated and value[0] not in "[{":  # stop, bad_words
        return value
    found = json_value(value)
    return value if found is None else found


def _options(row: JsonObject) -> JsonObject:
    """What a row with a conversation says of its answer, as data."""
    return {**row, **{name: _data(row[name]) for name in _OF_CHAT if name in row}}


def _data(value: object) -> object:
    """An object or a list that is written as JSON, as data; an empty text, as CSV writes nothing, is None."""
    if not isinstance(value, str):
        return value
    return json_value(value) if value[:1] in ("[", "{") else value or None


def told_error(ended: Ended) -> str | None:
    """What a plain row says of its error."""
    error = ended.output.error
    return None if error is None else f"{error_code(error)}: {error}"


def template_columns(template: str) -> list[str]:
    """The columns that a template names.

    Raises:
        ValidationError: it is damaged, or looks into a value.
    """
    try:
        fields = [field[1:] for field in string.Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        message = f"template cannot be read ({error}); write {{column}} for a column and {{{{ for a brace."
        raise ValidationError(message, parameter="template", value=template) from error
    names = [str(name) for name, _, _ in fields]
    for name, spec, conversion in fields:
        if _WIDE.search(spec or "") or conversion not in (None, "s", "r", "a"):
            written = f"{{{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}"
            raise ValidationError(
                f"template may say how a column is written with a width or a precision up to 999, got {clip(written)}.",
                parameter="template",
                value=template,
            )
    for name in names:
        if not name or not name.replace("_", "").replace(" ", "").replace("-", "").isalnum():
            raise ValidationError(
                f"template must name columns, as in {{question}}, got {quote(name)}.", parameter="template", value=name
            )
    return names


@dataclass(frozen=True, kw_only=True)
class BatchForm:
    """Lines of OpenAI's batch format."""

    adapters: JobAdapters

    def fault(self, row: JsonObject) -> str | None:
        """Why the row has no id to answer to; None: it has one."""
        if not isinstance(row.get("custom_id"), str) or not row["custom_id"]:
            return "a row of a batch needs a custom_id, a text that no other row has"
        return None

    def identifier(self, row: JsonObject) -> str | None:
        return row["custom_id"]

    def body_of(self, row: JsonObject, urls: Collection[str]) -> JsonObject:
        """The body of a row to one of `urls`, without members that are null, which ask for nothing.

        Raises:
            ValidationError: a field is unknown or wrong.
        """
        _check_keys("a row of a batch", row, _BATCH_KEYS)
        if row.get("method", "POST") != "POST":
            raise ValidationError("method must be 'POST'.", parameter="method", value=row.get("method"))
        if row.get("url") not in urls:
            raise ValidationError(f"url must be {' or '.join(urls)}.", parameter="url", value=row.get("url"))
        body = row.get("body")
        if not isinstance(body, dict):
            raise ValidationError("body must be an object.", parameter="body", value=body)
        return {name: value for name, value in body.items() if value is not None}

    def line(self, row: JsonObject, ended: Ended, body: JsonObject | None) -> JsonObject:
        """The line of the output; `body`: of the response, None: the row has an error."""
        key, error = ended.key[:24], ended.output.error
        line: JsonObject = {"id": f"batch_req_{key}", "custom_id": row.get("custom_id")}
        if error is not None:
            return {**line, "response": None, "error": {"code": error_code(error), "message": str(error)}}
        return {**line, "response": {"status_code": 200, "request_id": f"req_{key}", "body": body}, "error": None}


@dataclass(frozen=True, kw_only=True)
class BatchRows(BatchForm):
    """Completions and chat completions; `params` are the defaults of a body's fields."""

    params: SamplingParams

    def asked(self, row: JsonObject) -> Asked:
        """Raises `ValidationError` for unknown fields and wrong values."""
        body = self.body_of(row, URLS)
        is_chat = row["url"] == URLS[0]
        fields, chat, prompt = sampling_fields(body, is_chat)
        params = dataclasses.replace(self.params, **fields)
        adapter = self.adapters.named(body.get("model"), "model")
        if not is_chat:
            return Asked(prompt, params, adapter=adapter)
        return Asked(None, params, prompt, chat, adapter, chosen_tools(body)[0])

    def chosen(self, row: JsonObject) -> tuple[ToolChoice, bool] | None:
        """As `PlainRows.chosen`."""
        if row["url"] != URLS[0]:
            return None
        choice, tools = chosen_tools(row["body"])
        return choice, tools is not None

    def answer(self, row: JsonObject, ended: Ended, model: str) -> JsonObject:
        """`ended`: of a chat, what the reply holds has been read."""
        if ended.output.error is not None:
            return self.line(row, ended, None)
        output, model, chosen = ended.output, row["body"].get("model") or model, self.chosen(row)
        if chosen is None:
            return self.line(row, ended, completion_body(output, ended.key, model))
        asked = self.asked(row).params.logprobs
        return self.line(row, ended, chat_body(output, ended.key, model, chosen[0], asked))


def is_batch(row: JsonObject) -> bool:
    return "body" in row and ("custom_id" in row or "url" in row)


def _check_keys(what: str, given: Mapping[str, object], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise ValidationError(f"{what} has no field {quote(name)}.{nearest(name, known)}", parameter=name)
