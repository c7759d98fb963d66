"""From what the user passed to rows that are known to be good.

Owns the normalisation of prompts and parameters and every check that needs the model: all rows are judged before any
work starts, and one error tells of all that are bad.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm.config import ModelConfig
from llm.errors import ValidationError
from llm.sampling_params import SamplingParams
from llm.tokenizer import Tokenizer


@dataclass
class Row:
    """One prompt, ready to be added to the engine. `params` is a copy of the caller's."""

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    seed: int


class Preprocessor:
    """Turns prompts and params into rows.

    Args:
        tokenizer: None when the engine was built with `skip_tokenizer_init=True`.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._calls = 0

    def rows(self, prompts: Any, params: Any, default: Callable[[], SamplingParams]) -> list[Row]:
        """Validate and tokenize all prompts; raises `ValidationError` that names every bad row."""
        listed = list_prompts(prompts)
        return self.tokenized(self._tokenize(listed), params, default)

    def tokenized(
        self, prompts: list[tuple[str | None, list[int]]], params: Any, default: Callable[[], SamplingParams]
    ) -> list[Row]:
        """The same for prompts that are (text or None, token ids)."""
        per_row = _per_row_params(params, len(prompts), default)
        call, self._calls = self._calls, self._calls + 1
        rows = []
        problems: dict[int, ValidationError] = {}
        for index, ((text, token_ids), given) in enumerate(zip(prompts, per_row, strict=True)):
            try:
                own = given.clone()
                self._check(token_ids, own)
                seed = own.seed if own.seed is not None else derive_seed(self.config.seed, call, index)
                rows.append(Row(text, token_ids, own, seed))
            except ValidationError as error:
                problems[index] = error
        _raise_problems(problems, len(prompts))
        return rows

    def _tokenize(self, prompts: list[Any]) -> list[tuple[str | None, list[int]]]:
        """All texts in one call of the tokenizer."""
        parsed = [_parse(index, prompt) for index, prompt in enumerate(prompts)]
        texts = [text for text, token_ids in parsed if token_ids is None and text is not None]
        if texts and self.tokenizer is None:
            raise ValidationError(
                "text prompts need a tokenizer, and skip_tokenizer_init=True left it out; pass prompt_token_ids.",
                parameter="prompts",
                value=None,
            )
        encoded = iter(self.tokenizer.encode(texts) if self.tokenizer is not None else [])
        return [(text, next(encoded) if token_ids is None else token_ids) for text, token_ids in parsed]

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        self._check_prompt(token_ids)
        vocab = self.config.vocab_size
        for token in params.stop_token_ids or ():
            if token >= vocab:
                raise _bad("stop_token_ids", token, f"below the vocabulary size {vocab}")
        limit = self.config.max_logprobs
        if params.logprobs is not None and limit != -1 and not 0 <= params.logprobs <= limit:
            raise _bad("logprobs", params.logprobs, f"at most max_logprobs ({limit})")
        if params.stop_strings and self.tokenizer is None:
            raise _bad("stop", params.stop, "empty with skip_tokenizer_init=True; use stop_token_ids")
        room = self.config.max_model_len - len(token_ids)
        if params.min_tokens > room:
            raise _bad("min_tokens", params.min_tokens, f"at most the room that the prompt leaves ({room})")

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise ValidationError("the prompt is empty; it needs at least one token.", parameter="prompts", value=[])
        limit = self.config.max_model_len
        if len(token_ids) >= limit:
            raise ValidationError(
                f"the prompt has {len(token_ids)} tokens and max_model_len is {limit}, which must hold at least one "
                "generated token too; shorten it or raise max_model_len.",
                parameter="prompts",
                value=len(token_ids),
            )
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self.config.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ValidationError(
                f"token id {wrong} is outside the vocabulary, 0 to {self.config.vocab_size - 1}.",
                parameter="prompts",
                value=wrong,
            )


def derive_seed(engine_seed: int, call: int, row: int) -> int:
    """The seed of a row that was given none: a function of the engine's seed, the call's number and the row's."""
    digest = hashlib.sha256(f"{engine_seed}/{call}/{row}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def list_prompts(prompts: Any) -> list[Any]:
    """One prompt or many, as a list: a string, a dict or a list of integers is one."""
    if isinstance(prompts, str | Mapping) or _is_token_list(prompts):
        return [prompts]
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes | bytearray):
        return list(prompts)
    raise _bad("prompts", type(prompts).__name__, "a string, token ids, a dict, or a list of those")


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_integer(item) for item in value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse(index: int, prompt: Any) -> tuple[str | None, list[int] | None]:
    """(text, token ids): ids None when the text is still to be tokenized."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        return _parse_mapping(index, prompt)
    if isinstance(prompt, list | tuple) and all(_is_integer(item) for item in prompt):
        return None, list(prompt)
    raise _bad(f"prompts[{index}]", type(prompt).__name__, "a string, a list of token ids, or a dict")


def _parse_mapping(index: int, prompt: Mapping[str, Any]) -> tuple[str | None, list[int] | None]:
    unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
    if unknown:
        raise _bad(f"prompts[{index}]", unknown[0], "a dict with 'prompt' or 'prompt_token_ids' and no other key")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise _bad(f"prompts[{index}]['prompt']", type(text).__name__, "a string")
    if token_ids is None:
        if text is None:
            raise _bad(f"prompts[{index}]", sorted(prompt), "a dict with 'prompt' or 'prompt_token_ids'")
        return text, None
    if not isinstance(token_ids, list | tuple) or not all(_is_integer(item) for item in token_ids):
        raise _bad(f"prompts[{index}]['prompt_token_ids']", type(token_ids).__name__, "a list of integers")
    return text, list(token_ids)


def _per_row_params(params: Any, count: int, default: Callable[[], SamplingParams]) -> list[SamplingParams]:
    if params is None:
        params = default()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise _bad("sampling_params", type(params).__name__, "a SamplingParams, a list of them, or None")
    if len(params) != count:
        raise _bad("sampling_params", f"{len(params)} of them", f"one, or as many as there are prompts ({count})")
    return list(params)


def _raise_problems(problems: dict[int, ValidationError], count: int) -> None:
    if not problems:
        return
    index, first = next(iter(problems.items()))
    where = f"prompt {index}: " if count > 1 else ""
    others = ", ".join(map(str, list(problems)[1:11])) + (", ..." if len(problems) > 11 else "")
    more = f" (also bad: {others})" if len(problems) > 1 else ""
    raise ValidationError(f"{where}{first}{more}", parameter=first.parameter, value=first.value) from first


def _bad(name: str, value: Any, right: str) -> ValidationError:
    return ValidationError(f"{name} must be {right}, got {value!r}.", parameter=name, value=value)
