"""Bodies of OpenAI's chat completions and completions: requests as sampling params, outputs as responses.

`created` is 0, so that a job's output depends on nothing but its input.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from llm.base.checks import check_flag, check_integer
from llm.base.text import quote, show
from llm.base.types import JsonObject
from llm.errors import ValidationError, nearest
from llm.outputs import CompletionOutput, Logprob, RequestOutput
from llm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from llm.text.replies import ToolChoice

# Fields of `SamplingParams`, and their types as they are annotated; a body has all but those that the protocol has in
# another form, or that are Python's.
PARAM_TYPES = {item.name: str(item.type) for item in dataclasses.fields(SamplingParams)}
_NOT_IN_BODIES = {
    *("logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids"),
    *("flat_logprobs", "detokenize", "output_kind", "skip_reading_prefix_cache", "logits_processors"),
}
_SAMPLING = [name for name in PARAM_TYPES if name not in _NOT_IN_BODIES]
_XARGS = "vllm_xargs"  # vLLM's name of `extra_args` in a body
_CHAT = "tools add_generation_prompt continue_final_message chat_template_kwargs mm_processor_kwargs".split()
_OF_CHAT = (
    *("messages", "max_completion_tokens", "logprobs", "top_logprobs", "response_format", "tool_choice"),
    *("parallel_tool_calls", "reasoning_effort", *_CHAT),
)
_OF_COMPLETIONS = ("prompt", "logprobs", "response_format")
# Said by clients, and without effect on an answer.
_NO_EFFECT = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "request_id", "cache_salt"),
)
# Taken with the values that they have by default in OpenAI's API or in vLLM's, which ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
_NEUTRAL_OF_CHAT: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
}
_NEUTRAL_OF_COMPLETIONS: dict[str, tuple[object, ...]] = {"add_special_tokens": (True,)}
_FINISH = {"stop": "stop", "length": "length", "repetition": "stop"}


def sampling_fields(body: Mapping[str, object], is_chat: bool) -> tuple[JsonObject, JsonObject, object]:
    """(fields of SamplingParams, arguments of the chat template's renderer, messages or prompt).

    Args:
        body: without members that are null.

    Raises:
        ValidationError: a field is unknown or has a value that is not supported.
    """
    own = _OF_CHAT if is_chat else _OF_COMPLETIONS
    neutral = _NEUTRAL | (_NEUTRAL_OF_CHAT if is_chat else _NEUTRAL_OF_COMPLETIONS)
    check_fields(body, (*_SAMPLING, _XARGS, *own, *_NO_EFFECT), neutral)
    if own[0] not in body:
        raise ValidationError(f"body has no {own[0]}.", parameter=own[0])
    given = {name: body[name] for name in _SAMPLING if name in body}
    if _XARGS in body:
        if "extra_args" in body:
            raise ValidationError("extra_args must be left out where vllm_xargs is given.", parameter=_XARGS)
        given["extra_args"] = body[_XARGS]
    fields = as_fields(given)
    if not is_chat:
        if "logprobs" in body:
            fields["logprobs"] = body["logprobs"]
        _constrain(fields, {"response_format": _structured(body.get("response_format"))})
        return fields, {}, _one_prompt(body["prompt"])
    if "max_completion_tokens" in body:
        if body.get("max_tokens", body["max_completion_tokens"]) != body["max_completion_tokens"]:
            raise ValidationError(
                "max_tokens must be left out where max_completion_tokens is given.", parameter="max_tokens"
            )
        fields["max_tokens"] = body["max_completion_tokens"]
    if "logprobs" in body or body.get("top_logprobs"):
        fields["logprobs"] = _num_logprobs(body)
    others = {
        "response_format": _structured(body.get("response_format")),
        "tool_choice": chosen_tools(body)[0].forces or None,
    }
    _constrain(fields, others)
    return fields, chat_arguments(body), body["messages"]


def _constrain(fields: JsonObject, others: Mapping[str, object]) -> None:
    """Make of `others`, and of `structured_outputs` itself, the one constraint that there may be."""
    request = {"structured_outputs": fields.pop("structured_outputs", None), **others}
    constraints = {name: value for name, value in request.items() if value is not None}
    if len(constraints) > 1:
        first, second = list(constraints)[:2]
        hint = ": the call is the answer" if second == "tool_choice" else ""
        what = "asks for a call" if second == "tool_choice" else "is given"
        raise ValidationError(f"{first} must be left out where {second} {what}{hint}.", parameter=first)
    if constraints:
        (given_one,) = constraints.values()
        fields["structured_outputs"] = None if given_one is True else given_one  # the call is the constraint


def check_fields(body: Mapping[str, object], known: Sequence[str], neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raise `ValidationError` for a field that is not known.

    Args:
        neutral: fields that may have these values alone, which ask for nothing.
    """
    for name, value in body.items():
        if name in known:
            continue
        if name not in neutral:
            hint = nearest(name, (*known, *neutral))
            raise ValidationError(f"body has no field {quote(name)} here.{hint}", parameter=name)
        if value not in neutral[name]:
            right = " or ".join(repr(own) for own in neutral[name])
            raise ValidationError(f"{name} must be {right}, got {show(value)}.", parameter=name)


def _num_logprobs(body: Mapping[str, object]) -> int | None:
    """`SamplingParams.logprobs` of a chat."""
    is_asked, count = body.get("logprobs", False), body.get("top_logprobs", 0)
    check_flag("logprobs", is_asked)
    check_integer("top_logprobs", count, -1)
    if count and not is_asked:
        raise ValidationError("logprobs must be true where top_logprobs is given.", parameter="logprobs")
    return count if is_asked and isinstance(count, int) else None


def as_fields(given: Mapping[str, object]) -> JsonObject:
    """JSON's values as fields of SamplingParams: objects as what they describe."""
    fields: JsonObject = dict(given)
    if "logit_bias" in fields:
        fields["logit_bias"] = _bias(fields["logit_bias"])
    kinds = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}
    for name, kind in kinds.items():
        value = fields.get(name)
        if isinstance(value, Mapping):
            fields[name] = kind(**{str(key): item for key, item in value.items() if item is not None})
    return fields


def with_fields(params: SamplingParams, given: Mapping[str, object], parameter: str) -> SamplingParams:
    """`params` with a row's own; those that are None are not given, as tables have all fields in all rows.

    Raises:
        ValidationError: one is unknown or wrong.
    """
    for name in given:
        if name not in PARAM_TYPES:
            message = f"SamplingParams has no field {quote(name)}.{nearest(str(name), PARAM_TYPES)}"
            raise ValidationError(message, parameter=parameter, value=name)
    fields = as_fields({name: value for name, value in given.items() if value is not None})
    if fields.get("n", params.n) != params.n:
        raise ValidationError("n must be the same for all rows.", parameter=parameter, value=fields["n"])
    return dataclasses.replace(params, **fields)


def chosen_tools(given: Mapping[str, object]) -> tuple[ToolChoice, list[JsonObject] | None]:
    """What a body or a row says of tools: the choice, and the tools that the chat template shows the model.

    Raises:
        ValidationError: `tool_choice`, `parallel_tool_calls` or `tools` is wrong.
    """
    return ToolChoice.of(given.get("tool_choice"), given.get("parallel_tool_calls"), given.get("tools"))


def chat_arguments(given: Mapping[str, object]) -> JsonObject:
    """What the chat template's renderer gets of a body or a row."""
    chat: JsonObject = {"add_generation_prompt": True, "continue_final_message": False}
    chat |= {name: given[name] for name in _CHAT if name != "tools" and given.get(name) is not None}
    tools = chosen_tools(given)[1]
    if tools is not None:
        chat["tools"] = tools
    if given.get("reasoning_effort") is not None:  # some templates read it
        own = chat.get("chat_template_kwargs") or {}
        chat["chat_template_kwargs"] = {"reasoning_effort": given["reasoning_effort"], **own}
    return chat


def _bias(given: object) -> dict[int, float] | None:
    try:
        return SamplingParams.from_optional(logit_bias=given).logit_bias
    except (TypeError, ValueError, AttributeError) as error:
        raise ValidationError(
            f"logit_bias must be an object from token id to number, got {show(given)}.", parameter="logit_bias"
        ) from error


def _one_prompt(given: object) -> object:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        return given[0]
    if isinstance(given, list) and any(not isinstance(item, int) for item in given):
        raise ValidationError(
            "prompt must be one text or one list of token ids; write a row for each.", parameter="prompt"
        )
    return given


def _structured(given: object) -> StructuredOutputsParams | None:
    kind = given.get("type") if isinstance(given, dict) else None
    if given is None or kind == "text":
        return None
    if isinstance(given, dict) and kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    named = given.get("json_schema") if isinstance(given, dict) else None
    if kind == "json_schema" and isinstance(named, dict) and isinstance(named.get("schema"), dict):
        return StructuredOutputsParams(json=named["schema"])
    raise ValidationError(
        f"response_format must be of type text, json_object or json_schema with a schema, got {show(given)}.",
        parameter="response_format",
    )


def error_code(error: Exception) -> str:
    """The error's type as OpenAI writes codes: `prompt_too_long` for PromptTooLongError."""
    name = type(error).__name__.removesuffix("Error")
    return re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower()


def chat_body(output: RequestOutput, key: str, model: str, choice: ToolChoice, num_logprobs: int | None) -> JsonObject:
    """`num_logprobs`: of the likeliest tokens at each position; None or -1: all that there are."""
    choices = [
        {
            "index": own.index,
            "message": _message(own),
            "logprobs": chat_logprobs(own, num_logprobs),
            "finish_reason": finish_of_chat(own, choice),
        }
        for own in output.outputs
    ]
    return _body(output, f"chatcmpl-{key[:24]}", "chat.completion", model, choices)


def _message(own: CompletionOutput) -> JsonObject:
    """What was read from the reply, under OpenAI's names; `reasoning` is vLLM's."""
    message = own.to_message()
    return message if own.reasoning is None else {**message, "reasoning": own.reasoning}


def finish_of_chat(own: CompletionOutput, choice: ToolChoice) -> str | None:
    """Of a call of the named function it is "stop", as in OpenAI's API and vLLM."""
    reason = _FINISH.get(own.finish_reason or "", own.finish_reason)
    return "tool_calls" if own.tool_calls and reason == "stop" and choice.kind != "named" else reason


def completion_body(output: RequestOutput, key: str, model: str) -> JsonObject:
    choices = [completion_choice(own) for own in output.outputs]
    return _body(output, f"cmpl-{key[:24]}", "text_completion", model, choices)


def completion_choice(own: CompletionOutput) -> JsonObject:
    return {
        "index": own.index,
        "text": own.text,
        "logprobs": completion_logprobs(own),
        "finish_reason": _FINISH.get(own.finish_reason or "", own.finish_reason),
    }


def _body(output: RequestOutput, name: str, kind: str, model: str, choices: list[JsonObject]) -> JsonObject:
    prompt, generated = len(output.prompt_token_ids), sum(len(own.token_ids) for own in output.outputs)
    usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    return {"id": name, "object": kind, "created": 0, "model": model, "choices": choices, "usage": usage}


def chat_logprobs(own: CompletionOutput, count: int | None) -> JsonObject | None:
    if own.logprobs is None:
        return None
    return {"content": [_chat_token(position, count) for position in own.logprobs], "refusal": None}


def _chat_token(position: dict[int, Logprob], count: int | None) -> JsonObject:
    """The sampled token, which is the first, and the likeliest ones; it is among these if it is one of them."""
    sampled, *others = position.values()
    top = others if count is not None and len(others) == count != -1 else [sampled, *others]
    ranked = sorted(top, key=lambda item: item.rank or 0)
    return {**_token(sampled), "top_logprobs": [_token(item) for item in ranked]}


def _token(item: Logprob) -> JsonObject:
    text = item.decoded_token or ""
    return {"token": text, "logprob": finite(item.logprob), "bytes": list(text.encode())}


def finite(logprob: float) -> float:
    """JSON has no -Infinity: OpenAI's value for a token that is very unlikely."""
    return max(logprob, -9999.0)


def completion_logprobs(own: CompletionOutput) -> JsonObject | None:
    if own.logprobs is None:
        return None
    sampled = [next(iter(position.values())) for position in own.logprobs]
    texts = [item.decoded_token or "" for item in sampled]
    return {
        "tokens": texts,
        "token_logprobs": [finite(item.logprob) for item in sampled],
        "top_logprobs": [
            {item.decoded_token or "": finite(item.logprob) for item in position.values()} for position in own.logprobs
        ],
        "text_offset": text_offsets(own.text, texts),
    }


def text_offsets(text: str, tokens: Sequence[str]) -> list[int]:
    """Where each token starts in the text. What is not in it, such as the token that ended it, has no width.

    A tokenizer may leave a token's first space out where the token stands alone.
    """
    offsets, end = [], 0
    for token in tokens:
        start = text.find(token, end, end + len(token) + 1)
        offsets.append(end if start < 0 else start)
        end = end if start < 0 else start + len(token)
    return offsets
