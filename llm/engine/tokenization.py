"""`tokenization_kwargs`: how the texts of one call become token ids.

Owns its keys: those of transformers' tokenizers and of vLLM that change a text's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from llm.base.checks import check_flag, check_integer, refuse
from llm.errors import ValidationError, nearest
from llm.tokenizer_backends import Truncation

_NAME = "tokenization_kwargs"
_KEYS = ("add_special_tokens", "truncation", "max_length", "truncate_prompt_tokens", "truncation_side")
_INSTEAD = "tokenize with LLM.get_tokenizer() and pass token ids for anything else"


@dataclass(frozen=True)
class Tokenization:
    """`add_special_tokens`: None: as the call does by itself. `truncation`: None: nothing is cut."""

    add_special_tokens: bool | None = None
    truncation: Truncation | None = None

    @classmethod
    def of(cls, given: object, max_model_len: int) -> Tokenization:
        """From what the user passed; a key whose value is None counts as absent."""
        if given is not None and not isinstance(given, Mapping):
            refuse(_NAME, given, "a dict or None")
        options = {key: value for key, value in (given or {}).items() if value is not None}
        for key in options.keys() - set(_KEYS):
            hint = nearest(str(key), _KEYS)
            raise ValidationError(
                f"{_NAME} has no key {key!r}; it takes {', '.join(_KEYS)}; {_INSTEAD}.{hint}", parameter=_NAME
            )
        special = options.get("add_special_tokens")
        if special is not None:
            check_flag(f"{_NAME}['add_special_tokens']", special)
        limit = _limit(options, max_model_len - 1)
        side = options.get("truncation_side", "left")
        if side not in ("left", "right"):
            _refuse_key("truncation_side", side, "'left', which cuts the first tokens, or 'right'")
        return cls(special, None if limit is None else Truncation(limit, side))

    def cut(self, token_ids: list[int]) -> list[int]:
        """Ids that were not made from text here."""
        if self.truncation is None:
            return token_ids
        limit, side = self.truncation
        return token_ids[-limit:] if side == "left" else token_ids[:limit]


def _limit(options: Mapping[str, object], longest: int) -> int | None:
    """Most tokens of a prompt, None if it is not cut; `longest` leaves room for one token."""
    own, truncates = options.get("truncate_prompt_tokens"), options.get("truncation", False)
    if not isinstance(truncates, bool):
        _refuse_key("truncation", truncates, "True or False")
    if "max_length" in options and not truncates:
        _refuse_key("max_length", options["max_length"], "given together with truncation=True")
    if own is not None and truncates:
        _refuse_key("truncate_prompt_tokens", own, "left out where truncation is given")
    name, most = ("max_length", options.get("max_length", longest)) if truncates else ("truncate_prompt_tokens", own)
    if most is None:
        return None
    if most == -1 and name == "truncate_prompt_tokens":
        return longest
    check_integer(f"{_NAME}[{name!r}]", most, 1)
    return most if isinstance(most, int) else None


def _refuse_key(key: str, value: object, right: str) -> NoReturn:
    refuse(f"{_NAME}[{key!r}]", value, right)
