"""Bodies of OpenAI's chat completions and completions: requests as sampling params, outputs as responses.

Owns the names of the fields. `created` is 0, so that a job's output depends on nothing but its input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate

from llm.base.errors import ValidationError, nearest
from llm.base.text import quote, show
from llm.base.types import JsonObject
from llm.outputs import CompletionOutput, Logprob, RequestOutput
from llm.replies.choice import ToolChoice
from llm.sampling_params import SamplingParams
from llm.structured_params import StructuredOutputsParams

_SAMPLING = (
    "temperature top_p n stop seed presence_penalty frequency_penalty logit_bias max_tokens top_k min_p "
    "repetition_penalty min_tokens ignore_eos stop_token_ids skip_special_tokens include_stop_str_in_output bad_words "
    "allowed_token_ids truncate_prompt_tokens"
).split()
_CHAT = "tools add_generation_prompt continue_final_message chat_template_kwargs".split()
_OF_CHAT = (
    *("messages", "max_completion_tokens", "logprobs", "top_logprobs", "response_format", "tool_choice"),
    *("parallel_tool_calls", "reasoning_effort", *_CHAT),
)
_OF_COMPLETIONS = ("prompt", "logprobs", "echo", "suffix", "best_of")
# Said by clients, and without effect on an answer.
_NO_EFFECT = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Taken only with a value that asks for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stream": (False, None),
    "stream_options": (None,),
    "echo": (False, None),
    "suffix": (None, ""),
    "best_of": (None, 1),
}
_FINISH = {"stop": "stop", "length": "length", "repetition": "stop"}


def sampling_fields(body: Mapping[str, object], is_chat: bool) -> tuple[JsonObject, JsonObject, object]:
    """(fields of SamplingParams, arguments of the chat template's renderer, messages or prompt).

    Raises:
        ValidationError: a field is unknown or has a value that is not supported.
    """
    own = _OF_CHAT if is_chat else _OF_COMPLETIONS
    known = (*_SAMPLING, *own, *_NO_EFFECT, *_NEUTRAL)
    for name, value in body.items():
        if name not in known:
            raise ValidationError(f"body has no field {quote(name)} here.{nearest(name, known)}", parameter=name)
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise ValidationError(f"{name} must be {_NEUTRAL[name][0]!r}, got {show(value)}.", parameter=name)
    asked = own[0]
    if body.get(asked) is None:
        raise ValidationError(f"body has no {asked}.", parameter=asked)
    given = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    fields: JsonObject = dict(given)
    if not is_chat:
        if body.get("logprobs") is not None:
            fields["logprobs"] = body["logprobs"]
        return fields, {}, _one_prompt(body["prompt"])
    if body.get("max_completion_tokens") is not None:
        fields["max_tokens"] = body["max_completion_tokens"]
    if body.get("logprobs"):
        fields["logprobs"] = body.get("top_logprobs") or 0
    choice, tools = chosen_tools(body)
    structured, of_call = _structured(body.get("response_format")), choice.structured(tools)
    if structured is not None and of_call is not None:
        message = "response_format must be left out where tool_choice asks for a call: the call is the answer."
        raise ValidationError(message, parameter="response_format")
    if structured is not None or of_call is not None:
        fields["structured_outputs"] = structured or of_call
    return fields, chat_arguments(body), body["messages"]


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


def chat_body(output: RequestOutput, key: str, model: str, choice: ToolChoice) -> JsonObject:
    choices = [
        {
            "index": own.index,
            "message": _message(own),
            "logprobs": None if own.logprobs is None else {"content": [_chat_token(item) for item in own.logprobs]},
            "finish_reason": _finish_of_chat(own, choice),
        }
        for own in output.outputs
    ]
    return _body(output, f"chatcmpl-{key[:24]}", "chat.completion", model, choices)


def _message(own: CompletionOutput) -> JsonObject:
    """What was read from the reply, under OpenAI's names; `reasoning` is vLLM's."""
    message = own.to_message()
    return message if own.reasoning is None else {**message, "reasoning": own.reasoning}


def _finish_of_chat(own: CompletionOutput, choice: ToolChoice) -> str | None:
    """Of a call of the named function it is "stop", as in OpenAI's API and vLLM."""
    reason = _FINISH.get(own.finish_reason or "", own.finish_reason)
    return "tool_calls" if own.tool_calls and reason == "stop" and choice.kind != "named" else reason


def completion_body(output: RequestOutput, key: str, model: str) -> JsonObject:
    choices = [
        {
            "index": own.index,
            "text": own.text,
            "logprobs": _completion_logprobs(own),
            "finish_reason": _FINISH.get(own.finish_reason or "", own.finish_reason),
        }
        for own in output.outputs
    ]
    return _body(output, f"cmpl-{key[:24]}", "text_completion", model, choices)


def _body(output: RequestOutput, name: str, kind: str, model: str, choices: list[JsonObject]) -> JsonObject:
    prompt, generated = len(output.prompt_token_ids), sum(len(own.token_ids) for own in output.outputs)
    usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    return {"id": name, "object": kind, "created": 0, "model": model, "choices": choices, "usage": usage}


def _chat_token(position: dict[int, Logprob]) -> JsonObject:
    """The sampled token, which is the first, and the most likely ones."""
    tokens = [_token(item) for item in position.values()]
    ranked = sorted(position.values(), key=lambda item: item.rank or 0)
    return {**tokens[0], "top_logprobs": [_token(item) for item in ranked] if len(tokens) > 1 else []}


def _token(item: Logprob) -> JsonObject:
    text = item.decoded_token or ""
    return {"token": text, "logprob": max(item.logprob, -9999.0), "bytes": list(text.encode())}


def _completion_logprobs(own: CompletionOutput) -> JsonObject | None:
    if own.logprobs is None:
        return None
    sampled = [next(iter(position.values())) for position in own.logprobs]
    texts = [item.decoded_token or "" for item in sampled]
    return {
        "tokens": texts,
        "token_logprobs": [max(item.logprob, -9999.0) for item in sampled],
        "top_logprobs": [
            {item.decoded_token or "": max(item.logprob, -9999.0) for item in position.values()}
            for position in own.logprobs
        ],
        "text_offset": [0, *accumulate(map(len, texts))][: len(texts)],
    }
