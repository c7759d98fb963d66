"""How many tokens a text has at least, without tokenizing it: a text that cannot fit is refused at once.

The bound is the larger of two, both true for any way to cut a text into tokens of the vocabulary:
- Each byte of the text is in one token, and no text has fewer tokens than the sum over its bytes of 1 / (length of the
  longest token with this byte), because the bytes of one token add up to 1 at most.
- Where no token has parts of more than m words, no text has fewer tokens than its words / m.

White space counts as nothing: some tokenizers drop it, and some tokens take all that is beside them. Tokenizers that
may drop anything else, or give many unknown characters one token, have no bound.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer

from llm.base.types import JsonObject

_SPACE = "▁"  # SentencePiece's
_BLANKS = b" \t\n\r\v\f"
_OTHER_BLANKS = re.compile(r"[^\S \t\n\r\v\f]+")
Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
_FORMS: tuple[Form, ...] = ("NFC", "NFD", "NFKC", "NFKD")
# Steps that drop nothing but white space, and of which only the normal forms change the rest.
_STEPS = {*_FORMS, "ByteLevel", "Strip", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits"}
# Steps that write a space as another character, and where that is.
_SPACES = {"Prepend": "prepend", "Replace": "content", "Metaspace": "replacement"}
_SPLITS = ("Split", "Punctuation")
# The shares are summed in float64.
_ROUNDING = 1 - 1e-9


@dataclass(frozen=True)
class TokenBound:
    """What the bound needs of a tokenizer.

    Attributes:
        shares: of each byte, 1 / the length of the longest token that has it.
        words: m, the most words that a token has parts of.
        forms: Unicode normal forms that a text is brought to; texts that have them already are bounded.
        is_byte_level: False: U+2581 stands for a space.
    """

    shares: NDArray[np.float64]
    words: int
    forms: tuple[Form, ...]
    is_byte_level: bool

    @classmethod
    def of(cls, fast: FastTokenizer, bytes_of: Callable[[str], bytes]) -> TokenBound | None:
        """None: there is no bound.

        Args:
            bytes_of: the bytes that a token of byte-level BPE stands for, by its name.
        """
        before, within = _steps(fast.normalizer), _steps(fast.pre_tokenizer)
        levels = [index for index, step in enumerate([*before, *within]) if step["type"] == "ByteLevel"]
        is_byte_level = bool(levels)
        if len(levels) > 1 or any(level < len(before) - 1 for level in levels):  # what follows would see its letters
            return None
        if not all(_keeps(step, is_byte_level) for step in (*before, *within)):
            return None
        if not _knows_every_byte(fast, is_byte_level) or not _keeps_all(fast):
            return None
        added = [token.content for token in fast.get_added_tokens_decoder().values()]
        if fast.normalizer is not None:
            added += [fast.normalizer.normalize_str(content) for content in added]
        names = fast.get_vocab(with_added_tokens=False)
        pieces = [_plain(content, is_byte_level) for content in added]
        pieces += map(bytes_of, names) if is_byte_level else (_plain(name, False) for name in names)
        words = max(len(piece.split()) for piece in pieces)
        forms = tuple(form for form in _FORMS if form in [step["type"] for step in before])
        return cls(1 / _longest_with(pieces), max(words, 1), forms, is_byte_level)

    def fewest(self, text: str) -> int:
        """No way to tokenize `text` gives fewer tokens; 0 where nothing is known."""
        if any(not unicodedata.is_normalized(form, text) for form in self.forms):
            return 0
        # A Unicode newer than Python's may normalize what it added.
        if self.forms and not text.isascii() and any(unicodedata.category(letter) == "Cn" for letter in set(text)):
            return 0
        data = _OTHER_BLANKS.sub("", text if self.is_byte_level else text.replace(_SPACE, "")).encode()
        counts = np.bincount(np.frombuffer(data.translate(None, _BLANKS), np.uint8), minlength=256)
        return max(int(counts @ self.shares * _ROUNDING), -(-_count_words(data) // self.words))


def _steps(part: Normalizer | PreTokenizer | None) -> list[JsonObject]:
    """The steps of a normalizer or pre-tokenizer as tokenizer.json has them, in order."""
    found: list[JsonObject] = []
    waiting: list[JsonObject] = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting[:0] = step.get("normalizers") or step.get("pretokenizers") or []
        else:
            found.append(step)
    return found


def _keeps(step: JsonObject, is_byte_level: bool) -> bool:
    """True if a step drops nothing but white space, and changes nothing else but by a normal form."""
    kind = step["type"]
    if kind in _SPLITS:
        return bool(step["behavior"] != "Removed")
    if kind not in _SPACES:
        return kind in _STEPS
    written = step[_SPACES[kind]]
    given = step["pattern"].get("String", "x") if kind == "Replace" else " "
    return not is_byte_level and bool(written) and not written.strip(f"{_SPACE} ") and given.isspace()


def _knows_every_byte(fast: FastTokenizer, is_byte_level: bool) -> bool:
    """True if no text is unknown to the model: unknown characters may be dropped, or share a token."""
    model = fast.model
    if not isinstance(model, BPE) or not (is_byte_level or model.byte_fallback):
        return False
    names = ByteLevel.alphabet() if is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    return all(model.token_to_id(name) is not None for name in names)


def _keeps_all(fast: FastTokenizer) -> bool:
    """True if what is put around a text does not replace it."""
    plain, whole = (fast.encode("a b", add_special_tokens=special).ids for special in (False, True))
    return len(whole) >= len(plain)


def _plain(name: str, is_byte_level: bool) -> bytes:
    return (name if is_byte_level else name.replace(_SPACE, " ")).encode()


def _longest_with(pieces: Iterable[bytes]) -> NDArray[np.float64]:
    """By byte, the length of the longest piece that has it, without white space; at least 1."""
    longest = [1] * 256
    for piece in pieces:
        solid = piece.translate(None, _BLANKS)
        for byte in set(solid):
            longest[byte] = max(longest[byte], len(solid))
    return np.array(longest, np.float64)


def _count_words(data: bytes) -> int:
    """Runs of what is not ASCII white space."""
    is_solid = np.ones(256, bool)
    is_solid[list(_BLANKS)] = False
    solid = is_solid[np.frombuffer(data, np.uint8)]
    return int(np.count_nonzero(solid[1:] & ~solid[:-1])) + int(bool(solid[:1].any()))
