"""Rows of a file for a model that pools: plain ones, OpenAI's `/v1/embeddings`, vLLM's `/classify` and `/score`.

Owns which fields there are, and what a vector, classes or a score become in the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from llm.base.checks import check_choice
from llm.base.types import JsonObject
from llm.engine.boundary import PoolingPlan
from llm.errors import ValidationError
from llm.inputs import LoRARequest
from llm.jobs.adapters import JobAdapters
from llm.jobs.answers import Ended, base64_of
from llm.jobs.bodies import check_fields
from llm.jobs.requests import BatchForm, PlainForm, told_error
from llm.jobs.tables import Form
from llm.pooling_params import PoolingParams

# Columns of a pair of texts, of a plain row and of a body.
PAIR = ("text_1", "text_2")
_URLS = {
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
_MOST_INPUTS = 2048  # of a body, as OpenAI's
# Columns that an answer adds to its row, and their types.
_ADDED: dict[str, dict[str, Form]] = {
    "embed": {"embedding": [float], "num_prompt_tokens": int, "error": str},
    "classify": {"label": str, "probabilities": [float], "num_prompt_tokens": int, "error": str},
    "score": {"score": float, "num_prompt_tokens": int, "error": str},
}


class Wanted(NamedTuple):
    """What a row asks for: a prompt, or with `second` a pair of texts."""

    prompt: object
    params: PoolingParams
    second: str | None = None
    adapter: LoRARequest | None = None


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
        )

    def param_types(self) -> Mapping[str, str]:
        return {item.name: str(item.type) for item in dataclasses.fields(PoolingParams) if item.name in _FIELDS}

    def forms(self, row: JsonObject) -> dict[str, Form]:
        return _ADDED[self.task]

    def asked(self, row: JsonObject) -> list[Wanted]:
        """Raises `ValidationError` for what is no text, and for an adapter that is not there."""
        adapter, params = self.adapter_of(row), dataclasses.replace(self.params, **self.own_params(row))
        if self.task == "score":
            first, second = (_text(name, row[name]) for name in PAIR)
            return [Wanted(first, params, second, adapter)]
        prompt, messages = self.prompt_of(row)
        if messages is not None:
            raise ValidationError("messages are for models that generate; name a column of texts.", parameter="column")
        return [Wanted(prompt, params, None, adapter)]

    def answer(self, row: JsonObject, ended: Ended, model: str) -> JsonObject:
        told = _told(self.task, ended.values, self.plan)
        values = (*told, len(ended.output.prompt_token_ids), told_error(ended))
        return row | dict(zip(self.forms(row), values, strict=True))

    def _columns(self, row: JsonObject) -> list[str]:
        return [*PAIR] if self.task == "score" else super()._columns(row)


@dataclass(frozen=True, kw_only=True)
class BatchVectors(BatchForm):
    """Embeddings, classes or scores; `params` are the defaults of a body's fields."""

    params: PoolingParams
    plan: PoolingPlan

    def asked(self, row: JsonObject) -> list[Wanted]:
        """One for each input; raises `ValidationError` for unknown fields and wrong values."""
        body = self.body_of(row, [url for task in tasks_of(self.plan) for url in _URLS[task]])
        task = _task(row)
        own = PAIR if task == "score" else ("input", *(["encoding_format"] if task == "embed" else []))
        check_fields(body, (*own, *_FIELDS, *_NO_EFFECT), _NEUTRAL)
        check_choice("encoding_format", body.get("encoding_format", "float"), ("float", "base64"))
        given = {name: body[name] for name in _FIELDS if name in body}
        params = dataclasses.replace(self.params, **given)
        adapter = self.adapters.named(body.get("model"), "model")
        if task == "score":
            first, second = (_text(name, body.get(name)) for name in PAIR)
            return [Wanted(first, params, second, adapter)]
        return [Wanted(prompt, params, None, adapter) for prompt in _inputs(body.get("input"))]

    def answer(self, row: JsonObject, ended: Ended, model: str) -> JsonObject:
        if ended.values is None:
            return self.line(row, ended, None)
        task, body = _task(row), row["body"]
        values = ended.values.reshape(1 if task == "score" else len(_inputs(body["input"])), -1)
        items = [self._item(task, own, body.get("encoding_format") == "base64") for own in values]
        count = len(ended.output.prompt_token_ids)
        response: JsonObject = {
            "id": f"{_IDS[task]}-{ended.key[:24]}",
            "object": "list",
            "created": 0,
            "model": body.get("model") or model,
            "data": [{"index": index, **item} for index, item in enumerate(items)],
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
        return self.line(row, ended, response)

    def _item(self, task: str, values: np.ndarray, is_coded: bool) -> JsonObject:
        """An item of `data`."""
        told = _told(task, values, self.plan)
        if task == "embed":
            return {"object": "embedding", "embedding": base64_of(values) if is_coded else told[0]}
        if task == "score":
            return {"object": "score", "score": told[0]}
        return {"label": told[0], "probs": told[1], "num_classes": len(values)}


def _task(row: JsonObject) -> str:
    return next(task for task, urls in _URLS.items() if row["url"] in urls)


def _told(task: str, values: np.ndarray | None, plan: PoolingPlan) -> tuple[object, ...]:
    """What the output has of a result; None for each where there is none."""
    if values is None:
        return (None,) * (2 if task == "classify" else 1)
    if task == "embed":
        return (values.tolist(),)
    return (float(values[0]),) if task == "score" else (plan.labels[int(values.argmax())], values.tolist())


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
