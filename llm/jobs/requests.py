"""Rows of a file as requests: the plain form, with a column or a template, and OpenAI's batch format.

Owns which fields there are, and what an answer becomes in the output. Unknown fields are refused.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from llm.base.errors import JobError, ValidationError, nearest
from llm.base.text import quote
from llm.base.types import JsonObject
from llm.inputs import LoRARequest
from llm.jobs.adapters import COLUMN, JobAdapters
from llm.jobs.answers import Ended
from llm.jobs.bodies import chat_body, completion_body, error_code, sampling_fields, shown_tools
from llm.sampling_params import SamplingParams

URLS = ("/v1/chat/completions", "/v1/completions")
_BATCH_KEYS = {"custom_id", "method", "url", "body"}
# Columns that an answer adds to its row.
ANSWER_COLUMNS = ("generated_text", "finish_reason", "num_prompt_tokens", "num_generated_tokens", "error")


class Asked(NamedTuple):
    """A row's request: a prompt, or a conversation with the renderer's arguments."""

    prompt: object
    params: SamplingParams
    messages: object = None
    chat: JsonObject = {}  # noqa: RUF012  never changed
    adapter: LoRARequest | None = None


@dataclass(frozen=True, kw_only=True)
class PlainForm:
    """Rows whose prompt is in a column, or made from columns by a template.

    A column `messages` has conversations. The output has the row's columns and `added`.
    """

    adapters: JobAdapters
    added: tuple[str, ...]
    column: str | None = None
    template: str | None = None

    def check(self, row: JsonObject) -> None:
        """Raise `JobError` if the columns do not fit."""
        clash = [name for name in self.added if name in row]
        if clash:
            raise JobError(f"the input has a column {quote(clash[0])}, which the output would replace; rename it.")
        for name in self._columns(row):
            if name not in row:
                raise JobError(f"the input has no column {quote(name)}; it has {', '.join(map(quote, row))}.")

    def identifier(self, row: JsonObject) -> str | None:
        return None

    def prompt_of(self, row: JsonObject) -> tuple[object, object]:
        """(prompt, messages), one of which is None."""
        if self.template is not None:
            return self.template.format_map(row), None
        (column,) = self._columns(row)
        return (None, row[column]) if column == "messages" else (row[column], None)

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
    """Plain rows of a model that generates."""

    params: SamplingParams
    added: tuple[str, ...] = ANSWER_COLUMNS

    def asked(self, row: JsonObject) -> Asked:
        """Raises `ValidationError` for an adapter that is not there."""
        prompt, messages = self.prompt_of(row)
        chat: JsonObject = {} if messages is None else {"add_generation_prompt": True}
        return Asked(prompt, self.params, messages, chat, self.adapter_of(row))

    def answer(self, row: JsonObject, ended: Ended, model: str) -> JsonObject:
        output = ended.output
        texts = [own.text for own in output.outputs]
        reasons = [own.finish_reason for own in output.outputs]
        several = self.params.n > 1
        values = (
            texts if several else texts[0],
            reasons if several else reasons[0],
            len(output.prompt_token_ids),
            sum(len(own.token_ids) for own in output.outputs),
            told_error(ended),
        )
        return row | dict(zip(self.added, values, strict=True))


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
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        message = f"template cannot be read ({error}); write {{column}} for a column and {{{{ for a brace."
        raise ValidationError(message, parameter="template", value=template) from error
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

    def check(self, row: JsonObject) -> None:
        """Raise `JobError` if the row has no id to answer to."""
        if not isinstance(row.get("custom_id"), str) or not row["custom_id"]:
            raise JobError("a row of a batch needs a custom_id, a text that no other row has.")

    def identifier(self, row: JsonObject) -> str | None:
        return row["custom_id"]

    def body_of(self, row: JsonObject, urls: Collection[str]) -> JsonObject:
        """The body of a row to one of `urls`; raises `ValidationError` for unknown fields and wrong values."""
        _check_keys("a row of a batch", row, _BATCH_KEYS)
        if row.get("method", "POST") != "POST":
            raise ValidationError("method must be 'POST'.", parameter="method", value=row.get("method"))
        if row.get("url") not in urls:
            raise ValidationError(f"url must be {' or '.join(urls)}.", parameter="url", value=row.get("url"))
        body = row.get("body")
        if not isinstance(body, dict):
            raise ValidationError("body must be an object.", parameter="body", value=body)
        return body

    def line(self, row: JsonObject, ended: Ended, body: JsonObject | None) -> JsonObject:
        """The line of the output; `body`: of the response, None: the row has an error."""
        key, error = ended.key[:24], ended.output.error
        line: JsonObject = {"id": f"batch_req_{key}", "custom_id": row["custom_id"]}
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
        return Asked(None, params, prompt, chat, adapter) if is_chat else Asked(prompt, params, adapter=adapter)

    def is_chat(self, row: JsonObject) -> bool:
        return row["url"] == URLS[0]

    def has_tools(self, row: JsonObject) -> bool:
        """Of a chat: whether the model was shown tools."""
        return shown_tools(row["body"]) is not None

    def answer(self, row: JsonObject, ended: Ended, model: str) -> JsonObject:
        """`ended`: of a chat, what the reply holds has been read."""
        if ended.output.error is not None:
            return self.line(row, ended, None)
        make = chat_body if row["url"] == URLS[0] else completion_body
        return self.line(row, ended, make(ended.output, ended.key, row["body"].get("model") or model))


def is_batch(row: JsonObject) -> bool:
    return "custom_id" in row and "body" in row


def _check_keys(what: str, given: Mapping[str, object], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise ValidationError(f"{what} has no field {quote(name)}.{nearest(name, known)}", parameter=name)
