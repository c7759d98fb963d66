"""Rows of a file as requests: plain ones with a column or a template, OpenAI's batch format, texts to pool.

Which fields there are, and what an answer becomes in the output. Unknown fields are refused.
"""

from __future__ import annotations

import dataclasses
import math
import re
import string
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llm.base.checks import check_choice, refuse
from llm.base.text import clip, list_names, quote, show
from llm.base.types import JsonObject
from llm.calls.chat import ChatOptions, ChatPrompt
from llm.engine.pooling_rows import Scored, is_content
from llm.errors import ValidationError, nearest
from llm.inputs import LoRARequest
from llm.jobs.bodies import (
    PARAM_TYPES,
    chat_arguments,
    chat_body,
    check_fields,
    chosen_tools,
    completion_body,
    error_code,
    sampling_fields,
    with_fields,
)
from llm.jobs.journal import Ended, base64_of
from llm.jobs.tables import Form
from llm.pooling_params import PoolingParams
from llm.runner.pooler import PoolingPlan
from llm.sampling_params import SamplingParams
from llm.text.replies import ToolChoice
from llm.text.tool_calls import json_value

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
_OF_CHAT = ("tools", "tool_choice", "chat_template_kwargs", "mm_processor_kwargs")


class RowRequest(NamedTuple):
    """A row's request: a prompt, or a conversation with the renderer's arguments and whether it calls functions."""

    prompt: object
    params: SamplingParams
    messages: object = None
    chat: JsonObject = {}  # noqa: RUF012  never changed
    adapter: LoRARequest | None = None
    choice: ToolChoice | None = None
    media: tuple[object, object] = (None, None)  # the cells that have images and videos


@dataclass(frozen=True, kw_only=True)
class PlainForm:
    """Rows whose prompt is in a column, or made from columns by a template.

    A column `messages` has conversations. The output has the row's columns and those of `forms`.

    Attributes:
        row_params: columns with the names of parameters are parameters of their rows.
        image_column, video_column: have images and videos; None: rows have none.
        folder: of the input, where relative paths of images begin.
    """

    adapters: JobAdapters
    column: str | None = None
    template: str | None = None
    row_params: bool = False
    image_column: str | None = None
    video_column: str | None = None
    folder: Path = Path()

    def fault(self, row: JsonObject) -> str | None:
        """Why the columns do not fit; None: they do."""
        clash = [name for name in self.forms(row) if name in row]
        if clash:
            return f"the input has a column {quote(clash[0])}, which the output would replace; rename it"
        own = [*self._columns(row), *self.media_columns()]
        missing = [name for name in own if name not in row]
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

    def media_columns(self) -> list[str]:
        return [name for name in (self.image_column, self.video_column) if name is not None]

    def media_of(self, row: JsonObject) -> tuple[object, object]:
        """The cells with a row's images and its videos."""
        images, videos = (None if name is None else row.get(name) for name in (self.image_column, self.video_column))
        return images, videos

    def without_bytes(self, row: JsonObject) -> JsonObject:
        """For the output: without images and videos that are no text and no paths."""
        media = self.media_columns()
        return {name: value for name, value in row.items() if name not in media or not _has_bytes(value)}

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

    def request(self, row: JsonObject) -> RowRequest:
        """Raises `ValidationError` for an adapter that is not there, or what is wrong of params and tools."""
        prompt, messages = self.prompt_of(row)
        params = self.params_of(row)
        media = self.media_of(row)
        if messages is None:
            return RowRequest(prompt, params, adapter=self.adapter_of(row), media=media)
        options = _options(row)
        choice, _ = chosen_tools(options)
        return RowRequest(None, params, messages, chat_arguments(options), self.adapter_of(row), choice, media)

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
            "error": error_of(ended),
        }
        one = self.params.n == 1
        found = {name: values[name] for name in self.forms(row)}
        row = self.without_bytes(row)
        return row | {name: value[0] if one and isinstance(value, list) else value for name, value in found.items()}


def _has_bytes(value: object) -> bool:
    """Whether a cell of images has their files in it, and not as a text."""
    if isinstance(value, list | tuple):
        return any(map(_has_bytes, value))
    if isinstance(value, Mapping):
        return any(map(_has_bytes, value.values()))
    return not isinstance(value, str | int | float | None)


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


def error_of(ended: Ended) -> str | None:
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

    def request(self, row: JsonObject) -> RowRequest:
        """Raises `ValidationError` for unknown fields and wrong values."""
        body = self.body_of(row, URLS)
        is_chat = row["url"] == URLS[0]
        fields, chat, prompt = sampling_fields(body, is_chat)
        params = dataclasses.replace(self.params, **fields)
        adapter = self.adapters.named(body.get("model"), "model")
        if not is_chat:
            return RowRequest(prompt, params, adapter=adapter)
        return RowRequest(None, params, prompt, chat, adapter, chosen_tools(body)[0])

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
        num_logprobs = self.request(row).params.logprobs
        return self.line(row, ended, chat_body(output, ended.key, model, chosen[0], num_logprobs))


def is_batch(row: JsonObject) -> bool:
    return "body" in row and ("custom_id" in row or "url" in row)


def _check_keys(what: str, given: Mapping[str, object], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise ValidationError(f"{what} has no field {quote(name)}.{nearest(name, known)}", parameter=name)


COLUMN = "lora_name"


@dataclass(frozen=True)
class JobAdapters:
    """The adapters of a job.

    Attributes:
        modules: by the name that a row gives; {}: rows name none.
        every: the adapter of all rows; None: none.
        base: names of the model itself.
    """

    modules: Mapping[str, LoRARequest] = field(default_factory=dict)
    every: LoRARequest | None = None
    base: tuple[str, ...] = ()

    @classmethod
    def of(cls, lora_modules: object, lora_request: object, base: tuple[str, ...]) -> JobAdapters:
        """From the arguments of `LLM.run`.

        Raises:
            ValidationError: one is wrong, or both are given.
        """
        if lora_request is not None and not isinstance(lora_request, LoRARequest):
            refuse(
                "lora_request", lora_request, "one LoRARequest for all rows, or None; rows name those of lora_modules"
            )
        if lora_request is not None and lora_modules:
            refuse("lora_request", lora_request.lora_name, "None where lora_modules is given")
        if not isinstance(lora_modules, Mapping | None):
            refuse("lora_modules", lora_modules, "a dict from the names of adapters to their folders, or None")
        modules = {}
        for number, (name, path) in enumerate((lora_modules or {}).items(), 1):
            if not isinstance(name, str) or not isinstance(path, str | Path) or name in base:
                refuse("lora_modules", {name: path}, "names, none of them the model's, and folders of adapters")
            modules[name] = LoRARequest(name, number, str(path))
        return cls(modules, lora_request, base)

    def all(self) -> list[LoRARequest]:
        return [*self.modules.values(), *([] if self.every is None else [self.every])]

    def named(self, name: object, field: str) -> LoRARequest | None:
        """The adapter of a row that gives this name; None: it has none.

        Raises:
            ValidationError: there is no adapter of that name.
        """
        if not self.modules:
            return self.every
        if name is None or name == "" or name in self.base:
            return None
        if not isinstance(name, str) or name not in self.modules:
            known = [*self.base[:1], *self.modules]
            raise ValidationError(
                f"{field} must be the model, {self.base[0]!r}, or one of lora_modules, "
                f"{', '.join(map(repr, self.modules))}; got {show(name)}.{nearest(str(name), known)}",
                parameter=field,
                value=name,
            )
        return self.modules[name]


# --- Models that pool. ---

# Columns of a pair of texts, of a plain row and of a body.
PAIR = ("text_1", "text_2")
POOLING_URLS = {
    "embed": ("/v1/embeddings",),
    "classify": ("/classify", "/v1/classify"),
    "score": ("/score", "/v1/score"),
}
_IDS = {"embed": "embd", "classify": "classify", "score": "score"}
_FIELDS = ("dimensions", "truncate_prompt_tokens", "use_activation", "normalize")
_NO_EFFECT = ("model", "user", "request_id")
# As in `llm.jobs.bodies`.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "encoding_format": ("float",),
    "embed_dtype": ("float32",),
    "priority": (0,),
}
# Of a body with a conversation; and what an embedder's may have besides.
_OF_CHATS = (
    *("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "mm_processor_kwargs"),
)
_CODED = {"embed": ("encoding_format",)}
_MOST_INPUTS = 2048  # of a body, as OpenAI's
# Columns that an answer adds to its row, and their types.
_ADDED: dict[str, dict[str, Form]] = {
    "embed": {"embedding": [float], "num_prompt_tokens": int, "error": str},
    "classify": {"label": str, "probabilities": [float], "num_prompt_tokens": int, "error": str},
    "score": {"score": float, "num_prompt_tokens": int, "error": str},
}


class Wanted(NamedTuple):
    """What a row asks for: a prompt, or with `second` a pair of texts.

    Attributes:
        media: the cells that have images and videos.
    """

    prompt: object
    params: PoolingParams
    second: Scored | None = None
    adapter: LoRARequest | None = None
    media: tuple[object, object] = (None, None)


def tasks_of(plan: PoolingPlan) -> tuple[str, ...]:
    """What the model does with a row; "score" of a pair of texts."""
    if plan.task == "embed":
        return ("embed",)
    return ("classify", "score") if plan.size == 1 else ("classify",)


@dataclass(frozen=True, kw_only=True)
class PlainVectors(PlainForm):
    """Plain rows. Those of a cross-encoder are pairs of texts, in columns `text_1` and `text_2`, if they have these."""

    params: PoolingParams
    plan: PoolingPlan
    task: str

    @classmethod
    def of(
        cls,
        first: JsonObject,
        plan: PoolingPlan,
        params: PoolingParams,
        adapters: JobAdapters,
        column: str | None,
        template: str | None,
        row_params: bool,
        image_column: str | None = None,
        video_column: str | None = None,
        folder: Path = Path(),
    ) -> PlainVectors:
        """`first`: a row, whose columns say whether there are pairs."""
        pairs = "score" in tasks_of(plan) and all(name in first for name in PAIR)
        task = "score" if pairs else tasks_of(plan)[0]
        return cls(
            params=params,
            plan=plan,
            task=task,
            adapters=adapters,
            column=column,
            template=template,
            row_params=row_params,
            image_column=image_column,
            video_column=video_column,
            folder=folder,
        )

    def param_types(self) -> Mapping[str, str]:
        return {item.name: str(item.type) for item in dataclasses.fields(PoolingParams) if item.name in _FIELDS}

    def forms(self, row: JsonObject) -> dict[str, Form]:
        return _ADDED[self.task]

    def request(self, row: JsonObject) -> list[Wanted]:
        """Raises `ValidationError` for what is no text, and for an adapter that is not there."""
        adapter, params = self.adapter_of(row), dataclasses.replace(self.params, **self.own_params(row))
        if self.task == "score":
            first, second = (_text(name, row[name]) for name in PAIR)
            return [Wanted(first, params, second, adapter)]
        prompt, messages = self.prompt_of(row)
        if messages is not None:
            raise ValidationError("messages are for models that generate; name a column of texts.", parameter="column")
        return [Wanted(prompt, params, None, adapter, self.media_of(row))]

    def answer(self, row: JsonObject, ended: Ended, model: str) -> JsonObject:
        values_out = _output_values(self.task, ended.values, self.plan)
        values = (*values_out, len(ended.output.prompt_token_ids), error_of(ended))
        return self.without_bytes(row) | dict(zip(self.forms(row), values, strict=True))

    def _columns(self, row: JsonObject) -> list[str]:
        return [*PAIR] if self.task == "score" else super()._columns(row)


@dataclass(frozen=True, kw_only=True)
class BatchVectors(BatchForm):
    """Embeddings, classes or scores; `params` are the defaults of a body's fields."""

    params: PoolingParams
    plan: PoolingPlan

    def request(self, row: JsonObject) -> list[Wanted]:
        """One for each input; raises `ValidationError` for unknown fields and wrong values."""
        body = self.body_of(row, [url for task in tasks_of(self.plan) for url in POOLING_URLS[task]])
        task, is_chat = task_of(row["url"]), "messages" in body
        own = PAIR if task == "score" else (*(_OF_CHATS if is_chat else ("input",)), *_CODED.get(task, ()))
        neutral = {**_NEUTRAL, "add_special_tokens": (False,)} if is_chat else _NEUTRAL
        check_fields(body, (*own, *_FIELDS, *_NO_EFFECT), neutral)
        check_choice("encoding_format", body.get("encoding_format", "float"), ("float", "base64"))
        given = {name: body[name] for name in _FIELDS if name in body}
        params = dataclasses.replace(self.params, **given)
        adapter = self.adapters.named(body.get("model"), "model")
        if task == "score":
            first, second = (_side(name, body.get(name)) for name in PAIR)
            return [Wanted(first, params, second, adapter)]
        return [Wanted(prompt, params, None, adapter) for prompt in _prompts(body)]

    def answer(self, row: JsonObject, ended: Ended, model: str) -> JsonObject:
        if ended.values is None:
            return self.line(row, ended, None)
        task, body = task_of(row["url"]), row["body"]
        values = ended.values.reshape(num_prompts(row), -1)
        model, is_coded = body.get("model") or model, body.get("encoding_format") == "base64"
        count = len(ended.output.prompt_token_ids)
        return self.line(row, ended, self.response(task, values, ended.key, model, count, is_coded))

    def response(
        self, task: str, values: Iterable[np.ndarray], key: str, model: str, num_tokens: int, is_coded: bool = False
    ) -> JsonObject:
        """The body of an answer; `values`: of each input."""
        items = [self._item(task, own, is_coded) for own in values]
        return {
            "id": f"{_IDS[task]}-{key[:24]}",
            "object": "list",
            "created": 0,
            "model": model,
            "data": [{"index": index, **item} for index, item in enumerate(items)],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _item(self, task: str, values: np.ndarray, is_coded: bool) -> JsonObject:
        """An item of `data`."""
        values_out = _output_values(task, values, self.plan)
        if task == "embed":
            return {"object": "embedding", "embedding": base64_of(values) if is_coded else values_out[0]}
        if task == "score":
            return {"object": "score", "score": values_out[0]}
        return {"label": values_out[0], "probs": values_out[1], "num_classes": len(values)}


def task_of(url: str) -> str:
    return next(task for task, urls in POOLING_URLS.items() if url in urls)


def _output_values(task: str, values: np.ndarray | None, plan: PoolingPlan) -> tuple[object, ...]:
    """What the output has of a result; None for each where there is none."""
    if values is None:
        return (None,) * (2 if task == "classify" else 1)
    if task == "embed":
        return (values.tolist(),)
    return (float(values[0]),) if task == "score" else (plan.labels[int(values.argmax())], values.tolist())


def _side(name: str, given: object) -> Scored:
    """Of a pair in a body."""
    return given if is_content(given) else _text(name, given)


def _prompts(body: JsonObject) -> list[object]:
    """Of a body with `input`, or with `messages`, which are one prompt."""
    if "messages" not in body:
        return _inputs(body.get("input"))
    chat = chat_arguments({"add_generation_prompt": False, **body})
    options = ChatOptions(
        None,
        chat["add_generation_prompt"],
        chat["continue_final_message"],
        None,
        chat.get("chat_template_kwargs"),
        None,
        mm_processor_kwargs=chat.get("mm_processor_kwargs"),
    )
    return [ChatPrompt(body["messages"], options)]


def _text(name: str, given: object) -> str:
    if not isinstance(given, str):
        raise ValidationError(f"{name} must be a text; write a row for each pair.", parameter=name, value=given)
    return given


def num_prompts(row: JsonObject) -> int:
    """How many prompts a row of a file has, whatever they are."""
    body = row.get("body")
    return len(_listed(body.get("input"))) if isinstance(body, Mapping) else 1


def _inputs(given: object) -> list[object]:
    """The prompts of an `input`: a text, a list of token ids, or a list of one or the other."""
    if given == []:
        raise ValidationError("input is an empty list; give it at least one text.", parameter="input", value=given)
    found = _listed(given)
    if len(found) > _MOST_INPUTS:
        raise ValidationError(
            f"input has {len(found)} texts and may have {_MOST_INPUTS}; write several rows.",
            parameter="input",
            value=len(found),
        )
    if not all(isinstance(item, str) for item in found) and not all(map(_is_ids, found)):
        right = "one text, one list of token ids, or a list of texts or of such lists"
        raise ValidationError(f"input must be {right}.", parameter="input", value=given)
    return found


def _listed(given: object) -> list[object]:
    return given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]


def _is_ids(given: object) -> bool:
    return isinstance(given, list) and all(isinstance(item, int) for item in given)
