"""Outputs from the plain data that `llm.output_formats` makes of them. A journal's lines are checked first."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from llm import errors
from llm.base.text import clip, show
from llm.base.types import JsonObject
from llm.errors import LLMError
from llm.inputs import LoRARequest
from llm.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput, StructuredOutcome
from llm.sampling_params import SamplingParams


def output_from_json(data: JsonObject, params: SamplingParams | None) -> RequestOutput:
    """The output that `output_as_json` wrote, without its metrics; `params` are the prompt's."""
    scores = data.get("prompt_token_id_logprobs")
    return RequestOutput(
        data["request_id"],
        data["prompt"],
        data["prompt_token_ids"],
        [_completion(own, params) for own in data["outputs"]],
        data["finished"],
        data["num_cached_tokens"],
        data["seed"],
        _positions(data["prompt_logprobs"], params is not None and params.flat_logprobs),
        params,
        index=data["index"],
        num_dropped_tokens=data["num_dropped_tokens"],
        prompt_token_id_logprobs=None if scores is None else np.array(scores, dtype=np.float32),
        lora_request=None if data.get("lora_request") is None else LoRARequest(**data["lora_request"]),
    )


# What `output_as_json` writes: a type, (type or None), [of each], {member: form}. Other members are not looked at.
_ERROR = {"type": str, "message": str}
_TOKEN = {"token_id": int, "logprob": float, "rank": (int,), "decoded_token": (str,)}
_LOGPROBS = ([([_TOKEN],)],)
_COMPLETION = {
    **{"index": int, "text": str, "token_ids": [int], "cumulative_logprob": (float,), "logprobs": _LOGPROBS},
    **{"finish_reason": (str,), "stop_reason": (int, str), "error": (_ERROR,), "structured": (dict,)},
}
_OUTPUT = {
    **{"request_id": str, "index": int, "prompt": (str,), "prompt_token_ids": [int], "outputs": [_COMPLETION]},
    **{"finished": bool, "num_cached_tokens": (int,), "seed": (int,), "prompt_logprobs": _LOGPROBS},
    **{"num_dropped_tokens": int, "params": (dict,), "lora_request": (dict,)},
}


def check_output(data: object) -> None:
    """Raise `ValueError` for data that `output_from_json` cannot read, with the member that is wrong."""
    check_form(data, _OUTPUT, "the output")
    try:
        output_from_json(cast("JsonObject", data), None)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the output cannot be read ({clip(str(error))})") from error


def check_form(value: object, form: object, name: str) -> None:
    """Raise `ValueError` if a value is not of a form, as in the tables above."""
    if isinstance(form, tuple):
        if value is not None and not any(_fits(value, own) for own in form):
            check_form(value, form[0], name)
    elif isinstance(form, list):
        _check_type(value, list, name)
        if not all(type(item) is form[0] for item in cast("list[object]", value)):
            for place, item in enumerate(cast("list[object]", value)):
                check_form(item, form[0], f"{name}[{place}]")
    elif isinstance(form, dict):
        _check_type(value, dict, name)
        for member, own in form.items():
            if member not in cast("JsonObject", value):
                raise ValueError(f"{name} has no {member}")
            check_form(cast("JsonObject", value)[member], own, f"{name}.{member}")
    elif isinstance(form, type):
        _check_type(value, form, name)


def _fits(value: object, form: object) -> bool:
    try:
        check_form(value, form, "")
    except ValueError:
        return False
    return True


def _check_type(value: object, kind: type, name: str) -> None:
    right = (int, float) if kind is float else kind
    if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} is {show(value)}")


def error_from_json(data: JsonObject | None) -> Exception | None:
    """An exception of this package's type of that name, else an `LLMError`."""
    if data is None:
        return None
    kind = getattr(errors, data["type"], LLMError)
    is_known = isinstance(kind, type) and issubclass(kind, LLMError)
    error: Exception = kind(data["message"]) if is_known else LLMError(data["message"])
    vars(error).update({name: value for name, value in data.items() if name not in ("type", "message")})
    return error


def _completion(data: JsonObject, params: SamplingParams | None) -> CompletionOutput:
    structured = data["structured"]
    asked = None if params is None else params.structured_outputs
    is_data = asked is not None and structured is not None and structured["complete"]
    flat = params is not None and params.flat_logprobs
    return CompletionOutput(
        data["index"],
        data["text"],
        data["token_ids"],
        data["cumulative_logprob"],
        _positions(data["logprobs"], flat),
        data["finish_reason"],
        data["stop_reason"],
        error_from_json(data["error"]),
        None if structured is None else StructuredOutcome(**structured),
        asked.parse(data["text"]) if asked is not None and is_data else None,
    )


def _positions(data: list[list[JsonObject] | None] | None, flat: bool) -> Any:
    if data is None:
        return None
    positions = [None if position is None else dict(map(_token, position)) for position in data]
    if not flat:
        return positions
    found = FlatLogprobs()
    for position in positions:
        found.append(position)
    return found


def _token(data: JsonObject) -> tuple[int, Logprob]:
    return data["token_id"], Logprob(data["logprob"], data["rank"], data["decoded_token"])
