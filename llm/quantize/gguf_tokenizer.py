"""A tokenizer as GGUF metadata: the inverse of `llm/loading/gguf/tokenizer.py`.

Owns both kinds (byte-level BPE and SentencePiece's BPE), and the check that what is written splits text as the model's
own tokenizer does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from llm.base.types import JsonObject
from llm.errors import LLMError
from llm.loading.gguf.container import Value
from llm.loading.gguf.tokenizer import EXPRESSIONS, IGNORES_MERGES, read_tokenizer
from llm.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_IS_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Of pieces that no merge makes.
_NO_SCORE = -1e9
_PROBES = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void;",
    "  Two spaces,\ttabs\n\nand   lines \r\n end  ",
    "It's 12,345.678 and 2024-11-22; you're, we'll, I'D. x=3.14159+42e-7",
    "def main(args):\n    return {'a': [1, 2], \"b\": None}  # comment",
    "Straße naïve café Ελληνικά русский текст 中文字符 日本語 한국어 العربية",
    "emoji 🙂👩‍👩‍👧 and accents e\u0301 \u00a0nbsp, CamelCaseWords, HTTPServer_v2 ---!!!???",
    "",
    " ",
)


def tokenizer_metadata(tokenizer: Tokenizer, rows: int, path: Path) -> dict[str, Value]:
    """The keys of a tokenizer.

    Args:
        rows: of the embedding; ids without a token get one that no text becomes.
        path: of the file, for errors.

    Raises:
        LLMError: it is of a kind that GGUF has no form for, or would split text in another way.
    """
    text = tokenizer.to_json()
    if text is None:
        raise LLMError(f"the tokenizer in {tokenizer.folder} is in Python alone, and GGUF has no form for it.")
    saved: JsonObject = json.loads(text)
    model = saved["model"]
    if model["type"] != "BPE":
        raise LLMError(f"the tokenizer in {tokenizer.folder} is {model['type']}; only BPE is written in GGUF.")
    tokens, kinds = _vocabulary(saved, rows)
    found: dict[str, Value] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.asarray(kinds, np.int32),
    }
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    pre = _pre_tokenizer(saved)
    if pre is None:
        found |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": _scores(tokens, kinds, merges)}
        found["tokenizer.ggml.add_space_prefix"] = '"prepend' in text.lower() and '"never"' not in text
    else:
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
        found["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    found |= _special(tokenizer, tokens)
    _check(found, tokenizer, path)
    return found


def _vocabulary(saved: JsonObject, rows: int) -> tuple[list[str], list[int]]:
    """(token, tokenizer.ggml.token_type) of every id."""
    model, added = saved["model"], {token["id"]: token for token in saved["added_tokens"]}
    by_id = {index: token for token, index in model["vocab"].items()}
    by_id |= {index: token["content"] for index, token in added.items()}
    if max(by_id, default=0) >= rows:
        raise LLMError(f"the tokenizer has the id {max(by_id)}, and the model {rows} of them.")
    kinds = []
    for index in range(rows):
        token = by_id.get(index)
        if token is None:
            kinds.append(_UNUSED)
        elif token == model.get("unk_token"):
            kinds.append(_UNKNOWN)
        elif index in added:
            kinds.append(_CONTROL if added[index]["special"] else _USER_DEFINED)
        else:
            kinds.append(_BYTE if model.get("byte_fallback") and _IS_BYTE.fullmatch(token) else _NORMAL)
    return [by_id.get(index, f"[PAD{index}]") for index in range(rows)], kinds


def _pre_tokenizer(saved: JsonObject) -> str | None:
    """The name of the rule that splits text into words; None: SentencePiece, which has none."""
    steps = _steps(saved.get("pre_tokenizer"), "pretokenizers")
    if not steps or steps[-1]["type"] != "ByteLevel":
        return None
    ignores = bool(saved["model"].get("ignore_merges"))
    before = steps[:-1]
    if not before and steps[-1].get("use_regex", True) and not ignores:
        return "gpt-2"
    if [step["type"] for step in before] == ["Digits"] and not ignores:
        return "smollm"
    if {step["type"] for step in before} == {"Split"}:
        found = tuple(step["pattern"].get("Regex") for step in before)
        for name, known in EXPRESSIONS.items():
            if found in (known, (known,)) and (name in IGNORES_MERGES) == ignores:
                return name
    raise LLMError("this tokenizer splits text by a rule that has no name in GGUF that is known here.")


def _steps(part: JsonObject | None, key: str) -> list[Any]:
    if part is None:
        return []
    return cast("list[Any]", part[key]) if part["type"] == "Sequence" else [part]


def _scores(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[tuple[str, ...]]) -> np.ndarray:
    """The earlier a piece is merged, the higher: less the first of its merges."""
    place: dict[str, int] = {}
    for index, merge in enumerate(merges):
        place.setdefault("".join(merge), index)
    scores = [
        -float(place.get(token, -_NO_SCORE)) if kind == _NORMAL else 0.0
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    return np.asarray(scores, np.float32)


def _special(tokenizer: Tokenizer, tokens: Sequence[str]) -> dict[str, Value]:
    """Special tokens, whether they surround a text, and the chat template."""
    hf = tokenizer.huggingface()
    found: dict[str, Value] = {}
    for key, index in (("bos", hf.bos_token_id), ("unknown", hf.unk_token_id), ("padding", hf.pad_token_id)):
        if index is not None:
            found[f"tokenizer.ggml.{key}_token_id"] = int(index)
    ids = tokenizer.encode(["a"])[0]
    inner = tokenizer.encode_rendered(["a"])[0]
    bos, eos = hf.bos_token_id, hf.eos_token_id
    has_bos = bos is not None and ids[:1] == [bos] and inner[:1] != [bos]
    has_eos = eos is not None and ids[-1:] == [eos] and inner[-1:] != [eos]
    found |= {"tokenizer.ggml.add_bos_token": has_bos, "tokenizer.ggml.add_eos_token": has_eos}
    if isinstance(hf.chat_template, str):
        found["tokenizer.chat_template"] = hf.chat_template
    return found


def _check(found: dict[str, Value], tokenizer: Tokenizer, path: Path) -> None:
    """Raise `LLMError` unless the tokenizer that is read from these keys does what the model's does."""
    eos = tokenizer.huggingface().eos_token_id
    ends: dict[str, Value] = {} if eos is None else {"tokenizer.ggml.eos_token_id": int(eos)}
    read = Tokenizer(read_tokenizer(ends | found, path))
    kinds = cast(np.ndarray, found["tokenizer.ggml.token_type"])
    tokens = zip(cast("list[str]", found["tokenizer.ggml.tokens"]), kinds.tolist(), strict=True)
    texts = [*_PROBES, " and ".join(token for token, kind in tokens if kind in (_CONTROL, _USER_DEFINED))]
    for text in texts:
        mine, other = tokenizer.encode([text])[0], read.encode([text])[0]
        if mine != other or tokenizer.decode(mine) != read.decode(mine):
            raise LLMError(
                f"the tokenizer in {tokenizer.folder} splits text in a way that GGUF has no form for; save it as "
                "'compressed-tensors'."
            )
