"""Outputs from the plain data that `llm.outputs_json` makes of them.

Owns the way back.
"""

from __future__ import annotations

from typing import Any

from llm.base import errors
from llm.base.errors import LLMError
from llm.base.types import JsonObject
from llm.inputs import LoRARequest
from llm.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput, StructuredOutcome
from llm.sampling_params import SamplingParams


def output_from_json(data: JsonObject, params: SamplingParams | None) -> RequestOutput:
    """The output that `output_as_json` wrote, without its metrics; `params` are the prompt's."""
    return RequestOutput(
        data["request_id"],
        data["prompt"],
        data["prompt_token_ids"],
        [_completion_from(own, params) for own in data["outputs"]],
        data["finished"],
        data["num_cached_tokens"],
        data["seed"],
        _positions_from(data["prompt_logprobs"], params is not None and params.flat_logprobs),
        params,
        index=data["index"],
        num_dropped_tokens=data["num_dropped_tokens"],
        lora_request=None if data.get("lora_request") is None else LoRARequest(**data["lora_request"]),
    )


def error_from_json(data: JsonObject | None) -> Exception | None:
    """An exception of this package's type of that name, else an `LLMError`."""
    if data is None:
        return None
    kind = getattr(errors, data["type"], LLMError)
    is_known = isinstance(kind, type) and issubclass(kind, LLMError)
    error: Exception = kind(data["message"]) if is_known else LLMError(data["message"])
    vars(error).update({name: value for name, value in data.items() if name not in ("type", "message")})
    return error


def _completion_from(data: JsonObject, params: SamplingParams | None) -> CompletionOutput:
    structured = data["structured"]
    asked = None if params is None else params.structured_outputs
    is_data = asked is not None and structured is not None and structured["complete"]
    flat = params is not None and params.flat_logprobs
    return CompletionOutput(
        data["index"],
        data["text"],
        data["token_ids"],
        data["cumulative_logprob"],
        _positions_from(data["logprobs"], flat),
        data["finish_reason"],
        data["stop_reason"],
        error_from_json(data["error"]),
        None if structured is None else StructuredOutcome(**structured),
        asked.parse(data["text"]) if asked is not None and is_data else None,
    )


def _positions_from(data: list[list[JsonObject] | None] | None, flat: bool) -> Any:
    if data is None:
        return None
    positions = [None if position is None else dict(map(_token_from, position)) for position in data]
    if not flat:
        return positions
    found = FlatLogprobs()
    for position in positions:
        found.append(position)
    return found


def _token_from(data: JsonObject) -> tuple[int, Logprob]:
    return data["token_id"], Logprob(data["logprob"], data["rank"], data["decoded_token"])
