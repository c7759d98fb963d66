"""The tokenizer in GGUF metadata, as an object of the tokenizers library.

Our families have two kinds: byte-level BPE (`gpt2`), whose text is split by the regular expression that
`tokenizer.ggml.pre` names, and SentencePiece's BPE (`llama`), whose merges follow from the pieces' scores.

The second half writes a tokenizer of either kind (byte-level BPE, SentencePiece's BPE) as metadata, and checks that
what is written splits text as the model's own tokenizer does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from llm.base.text import clip, list_names, show
from llm.base.types import JsonObject
from llm.errors import CheckpointError, LLMError, UnsupportedModelError
from llm.loading.gguf.container import Value
from llm.text.tokenizer import Tokenizer, TokenizerDefinition

_SPACE = "\u2581"
# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_MOST_MERGES = 1 << 22

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_TEKKEN = _CASED % ("", "", r"\p{N}")
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
# DeepSeek's, one after the other: digits, Chinese and Japanese, and the rest.
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
# tokenizer.ggml.pre -> the expression, or several; None: GPT-2's own. "digits": single digits are split off first.
EXPRESSIONS: Mapping[str, str | tuple[str, ...] | None] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jina-es", "jina-de"), None),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), "digits"),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "deepseek-coder": _DEEPSEEK_CODER,
}
# A word that is a token as a whole is taken as it is, whatever the merges say.
IGNORES_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "tekken")
_ADDS_BOS = ("llama-bpe", "llama3", "llama-v3", "lfm2", "tekken")


def read_tokenizer(metadata: Mapping[str, Value], path: Path) -> TokenizerDefinition:
    """Raises `CheckpointError` for metadata that is no tokenizer, `UnsupportedModelError` for an unknown kind."""
    return TokenizerDefinition(path, *_Reader(metadata).read())


class _Reader:
    """The keys under `tokenizer.ggml`."""

    def __init__(self, metadata: Mapping[str, Value]) -> None:
        self._metadata = metadata
        self._kind = self._known("model", "is of the kind", ("gpt2", "llama"))
        self._pre = self._known("pre", "splits text by the rule", EXPRESSIONS, "gpt-2") if self._kind == "gpt2" else ""
        self._tokens = self._strings("tokens")
        if not self._tokens:
            raise self._error("tokens", "a list of strings")
        types = self._metadata.get("tokenizer.ggml.token_type")
        self._types = types.tolist() if isinstance(types, np.ndarray) else [_NORMAL] * len(self._tokens)
        if len(self._types) != len(self._tokens):
            raise self._error("token_type", f"{len(self._tokens)} numbers, one for each token")

    def read(self) -> tuple[FastTokenizer, JsonObject]:
        try:
            tokenizer = self._byte_level() if self._kind == "gpt2" else self._sentencepiece()
            tokenizer.add_tokens(self._added())
            self._add_special(tokenizer)
        except CheckpointError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"the tokenizer of this GGUF file is not usable: {clip(str(error))}.") from error
        return tokenizer, self._config()

    def _byte_level(self) -> FastTokenizer:
        merges = [_pair(line) for line in self._strings("merges")]
        tokenizer = FastTokenizer(BPE(self._vocabulary(), merges, ignore_merges=self._pre in IGNORES_MERGES))
        expression = EXPRESSIONS[self._pre]
        if expression is None or expression == "digits":
            level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            digits = [pre_tokenizers.Digits(individual_digits=True)] if expression else []
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, level]) if digits else level
        else:
            several = (expression,) if isinstance(expression, str) else expression
            splits = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in several]
            level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
        if self._pre in ("qwen2", "deepseek-r1-qwen"):
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> FastTokenizer:
        scores = self._metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, np.ndarray) or len(scores) != len(self._tokens):
            raise self._error("scores", f"{len(self._tokens)} numbers, one for each token")
        unknown = next((token for token, kind in zip(self._tokens, self._types, strict=True) if kind == _UNKNOWN), None)
        vocabulary = self._vocabulary()
        model = BPE(
            vocabulary,
            _merges_by_score(self._tokens, scores.tolist(), vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in self._types,
        )
        tokenizer = FastTokenizer(model)
        # Gemma's vocabulary has pieces of several spaces and none is put in front.
        has_prefix = self._flag("add_space_prefix", True)
        steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if has_prefix else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
        ends: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
        )
        return tokenizer

    def _vocabulary(self) -> dict[str, int]:
        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        if len(vocabulary) != len(self._tokens):
            raise self._error("tokens", "a list without repetitions")
        return vocabulary

    def _added(self) -> list[AddedToken]:
        """Control tokens, and tokens that are matched before the text is split."""
        kinds = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
        return [
            AddedToken(token, special=kinds[kind], normalized=False)
            for token, kind in zip(self._tokens, self._types, strict=True)
            if kind in kinds and token
        ]

    def _add_special(self, tokenizer: FastTokenizer) -> None:
        """BOS and EOS around a text, as the file asks."""
        bos, eos = self._token("bos"), self._token("eos")
        adds_bos = bos is not None and self._flag("add_bos_token", self._kind == "llama" or self._pre in _ADDS_BOS)
        adds_eos = eos is not None and self._flag("add_eos_token", False)
        first = [bos] if bos is not None and adds_bos else []
        last = [eos] if eos is not None and adds_eos else []
        if first or last:
            ids = [(token, self._tokens.index(token)) for token in dict.fromkeys(first + last)]
            single, pair = [*first, "$A", *last], [*first, "$A", *last, *first, "$B", *last]
            tokenizer.post_processor = processors.TemplateProcessing(single, pair, ids)

    def _config(self) -> JsonObject:
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        config: JsonObject = {ours: self._token(key) for key, ours in names.items() if self._token(key) is not None}
        template = self._metadata.get("tokenizer.chat_template")
        config["clean_up_tokenization_spaces"] = False
        return config | ({"chat_template": template} if isinstance(template, str) else {})

    def _known(self, key: str, what: str, known: Iterable[str], default: str | None = None) -> str:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, str) or value not in known:
            raise UnsupportedModelError(
                f"the tokenizer of this GGUF file {what} {show(value)}, which is not known "
                f"({list_names(known, 40)} are); "
                "pass tokenizer= with the folder or the hub name of the model's own."
            )
        return value

    def _token(self, key: str) -> str | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self._tokens):
            raise self._error(f"{key}_token_id", f"an id from 0 to {len(self._tokens) - 1}")
        return self._tokens[value]

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self._error(key, "true or false")
        return value

    def _strings(self, key: str) -> Sequence[str]:
        value = self._metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(value, list) or len(value) > _MOST_MERGES:
            raise self._error(key, "a list of strings")
        return value

    def _error(self, key: str, right: str) -> CheckpointError:
        return CheckpointError(f"GGUF metadata: tokenizer.ggml.{key} must be {right}.")


def _pair(line: str) -> tuple[str, str]:
    first, space, second = line.partition(" ")
    if not space:
        raise CheckpointError(f"GGUF metadata: the merge {show(line)} must be two tokens with a space between.")
    return first, second


def _merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose piece has the best score: the same as merges in that order."""
    found: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for index, (token, score) in enumerate(zip(tokens, scores, strict=True)):
        for cut in range(1, min(len(token), 64)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((-score, index, left, right, (token[:cut], token[cut:])))
    return [pair for *_, pair in sorted(found)]


# --- Writing. ---

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
