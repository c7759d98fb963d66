"""The tokenizer in GGUF metadata, as an object of the tokenizers library.

Owns both kinds that our families have: byte-level BPE (`gpt2`), whose text is split by the regular expression that
`tokenizer.ggml.pre` names, and SentencePiece's BPE (`llama`), whose merges follow from the pieces' scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from llm.base.text import clip, list_names, show
from llm.base.types import JsonObject
from llm.errors import CheckpointError, UnsupportedModelError
from llm.loading.gguf.container import Value
from llm.tokenizer_backends import TokenizerDefinition

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
