"""Outputs as plain data for JSON.

Owns the form, which `llm.outputs_read` reads. `json.dumps` takes it as it is; floats come back bit for bit.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llm.base.text import show
from llm.base.types import JsonObject
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from llm.outputs import CompletionOutput, Logprob, RequestOutput


def output_as_json(output: RequestOutput) -> JsonObject:
    """Everything about one prompt but the times, so that equal answers are equal text; logprobs are a list of tokens
    per position."""
    return {
        "request_id": output.request_id,
        "index": output.index,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [_completion(own) for own in output.outputs],
        "finished": output.finished,
        "num_cached_tokens": output.num_cached_tokens,
        "num_dropped_tokens": output.num_dropped_tokens,
        "seed": output.seed,
        "prompt_logprobs": _positions(output.prompt_logprobs),
        "params": None if output.params is None else params_as_json(output.params),
        "lora_request": None if output.lora_request is None else dataclasses.asdict(output.lora_request),
    }


def params_as_json(params: SamplingParams) -> JsonObject:
    """The fields that differ from their defaults."""
    fields = ((item.name, getattr(params, item.name), item.default) for item in dataclasses.fields(params))
    return {name: plain(value) for name, value, default in fields if value != default and value != []}


def plain(value: object) -> object:
    """Data for JSON; what is none by its `repr`, shortened."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain_fields(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "model_json_schema"):  # pydantic
        return plain(value.model_json_schema())
    return value if value is None or isinstance(value, str | int | float | bool) else show(value)


def error_as_json(error: Exception | None) -> JsonObject | None:
    if error is None:
        return None
    kept = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float)}
    return {"type": type(error).__name__, "message": str(error), **kept}


def _plain_fields(value: DataclassInstance) -> JsonObject:
    return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}


def _completion(own: CompletionOutput) -> JsonObject:
    return {
        "index": own.index,
        "text": own.text,
        "token_ids": own.token_ids,
        "cumulative_logprob": own.cumulative_logprob,
        "logprobs": _positions(own.logprobs),
        "finish_reason": own.finish_reason,
        "stop_reason": own.stop_reason,
        "error": error_as_json(own.error),
        "structured": None if own.structured is None else dataclasses.asdict(own.structured),
    }


def _positions(positions: Sequence[dict[int, Logprob] | None] | None) -> list[list[JsonObject] | None] | None:
    if positions is None:
        return None
    return [None if position is None else [_token(*item) for item in position.items()] for position in positions]


def _token(token_id: int, item: Logprob) -> JsonObject:
    return {"token_id": token_id, "logprob": item.logprob, "rank": item.rank, "decoded_token": item.decoded_token}
