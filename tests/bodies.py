"""Bodies of OpenAI's protocol with something wrong in them, drawn at random; jobs and the endpoint are given them."""

from __future__ import annotations

import random
from typing import Any

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Who was the king?"}], "max_tokens": 2}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
# A field of a body or a row, and a value that is right.
FIELDS: dict[str, Any] = {
    **{"temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["a"], "seed": 3, "presence_penalty": 0.5},
    **{"frequency_penalty": 0.5, "logit_bias": {"5": 1}, "max_tokens": 2, "top_k": 3, "min_p": 0.1},
    **{"repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [3], "bad_words": ["the"]},
    **{"skip_special_tokens": False, "include_stop_str_in_output": True, "allowed_token_ids": [5, 6, 7]},
    **{"truncate_prompt_tokens": 3, "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 2},
    **{"tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": False, "reasoning_effort": "low"},
    **{"response_format": {"type": "text"}, "chat_template_kwargs": {"a": 1}, "add_generation_prompt": False},
    **{"continue_final_message": False, "model": "m", "user": "me", "stream": False, "metadata": {"a": "b"}},
    **{"echo": False, "suffix": "", "best_of": 1, "input": "And", "dimensions": 4, "encoding_format": "float"},
    **{"text_1": "a", "text_2": "b", "use_activation": True, "normalize": True, "lora_name": "a"},
}
ATOMS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 10**400, 0.5, -0.0, 1e308, float("nan"), float("-inf")),
    *("", " ", "And", "\ud83d", "\x00", "a" * 3000, "auto", "{", "[1", "null", "float", "json_object", "sampling"),
    *([], {}, [[]], [{}], [None], [1, 2], ["a", 1], [[1], ["a"]], {"": None}, {"type": "function"}),
    *({"role": "user"}, [{"role": "user", "content": None}], [{"role": 5, "content": 5}], [[CHAT["messages"][0]]] * 2),
    *({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, {"type": "json_object", "x": 1}),
)


def anything(draw: random.Random, value: Any, depth: int = 0) -> Any:
    """The value with something in it replaced, removed or added."""
    if depth > 3 or draw.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return draw.choice(ATOMS) if draw.random() < 0.7 else draw.choice([[value], {"a": value}, str(value)])
    if isinstance(value, list):
        place = draw.randrange(len(value))
        changed = anything(draw, value[place], depth + 1)
        return draw.choice([[*value[:place], changed, *value[place + 1 :]], [*value, changed], value[:place]])
    name = draw.choice(list(value))
    if draw.random() < 0.2:
        return {key: own for key, own in value.items() if key != name}
    return {**value, name: anything(draw, value[name], depth + 1)}


def body(draw: random.Random, own: dict[str, Any]) -> Any:
    """A body of some right fields, changed."""
    some = {name: FIELDS[name] for name in draw.sample(list(FIELDS), draw.randrange(4))}
    return anything(draw, {**own, **some}, draw.randrange(2))
