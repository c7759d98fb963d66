"""The fewest tokens of a text: never more than the tokenizer gives, near it for words, and none where none is safe."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest
from embedded import GREEDY, assert_idle, open_llm
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from llm import LLM, PromptTooLongError, SamplingParams
from llm.engine import rows as rows_module
from llm.text import tokenizer as tokenizer_module
from llm.text.token_bound import TokenBound

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
# Pieces of two words, of a space and a line break, of halves of characters.
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("the", "Ġthe"), ("Ċ", "Ċ"), ("ä", "½"), ("e", "Ì")]


def byte_level(*steps: normalizers.Normalizer, added: tuple[AddedToken, ...] = ()) -> FastTokenizer:
    vocab = {letter: index for index, letter in enumerate([*LETTERS, *(a + b for a, b in MERGES)])}
    fast = FastTokenizer(models.BPE(vocab, MERGES))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if steps:
        fast.normalizer = normalizers.Sequence(list(steps))
    fast.add_tokens(list(added))
    return fast


def pieces(*steps: normalizers.Normalizer, byte_fallback: bool = True, missing: str = "") -> FastTokenizer:
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁the", "▁the"), ("你", "好"), ("▁", "▁")]
    own = ["<unk>", *(name for name in names if name != missing), *"▁the你好é", *(a + b for a, b in merges)]
    vocab = {piece: index for index, piece in enumerate(own)}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    fast = FastTokenizer(model)
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), *steps])
    return fast


SPELT_OUT = unicodedata.normalize("NFKC", "\ufdfa")  # four words, which may be one added token
GREEDY_TOKEN = AddedToken("<end here>", lstrip=True, rstrip=True)


def split(behavior: str) -> FastTokenizer:
    """Of a text with a letter at which it is split."""
    fast = byte_level()
    steps = [pre_tokenizers.Split("t", behavior), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    fast.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return fast


BOUNDED: dict[str, Callable[[], FastTokenizer]] = {
    "byte-level": byte_level,
    "composed": lambda: byte_level(normalizers.NFC(), added=(AddedToken("\ufdfa", normalized=True),)),
    "compatible": lambda: byte_level(normalizers.NFKC(), added=(AddedToken("\ufdfa", normalized=True),)),
    "added": lambda: byte_level(normalizers.Strip(), added=(GREEDY_TOKEN,)),
    "pieces": pieces,
    **{f"split, {kind}": partial(split, kind) for kind in ("isolated", "merged_with_previous", "merged_with_next")},
}
UNBOUNDED: dict[str, Callable[[], FastTokenizer]] = {
    "a letter missing": lambda: FastTokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS[1:])}, [])),
    "a byte missing": lambda: pieces(missing="<0xE4>"),
    "unknown characters fused": lambda: pieces(byte_fallback=False),
    "accents dropped": lambda: byte_level(normalizers.NFD(), normalizers.StripAccents()),
    "letters replaced": lambda: pieces(normalizers.Replace("the", "t")),
    "a pattern replaced": lambda: pieces(normalizers.Replace(Regex("e+"), "▁")),
    "spaces dropped": lambda: pieces(normalizers.Replace("\n", "")),
    "letters of bytes composed": lambda: byte_level(normalizers.ByteLevel(), normalizers.NFC()),
    "a split dropped": lambda: split("removed"),
    "words": lambda: FastTokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
}
WORDS = [
    "the",
    " ",
    "\n",
    "the the",
    "t",
    "你好",
    "é",
    "e\u0301",
    "\ufdfa",
    SPELT_OUT,
    "<end here>",
    "\u00a0",
    "\u3000",
    "▁",
    "\x1c",
    "Ω",
]


def bound_of(fast: FastTokenizer) -> TokenBound | None:
    return TokenBound.of(fast, tokenizer_module._bytes_of_letters)


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_text_has_fewer_tokens(kind: str) -> None:
    fast = BOUNDED[kind]()
    bound = bound_of(fast)
    assert bound is not None

    random = Random(kind)
    for _ in range(150):
        letters = "".join(chr(random.choice((random.randrange(128), random.randrange(0xD800)))) for _ in range(4))
        text = "".join(random.choices([*WORDS, letters], k=random.randrange(9)))
        assert bound.fewest(text) <= len(fast.encode(text).ids), text
    for word in WORDS:
        assert bound.fewest(word * 50) <= len(fast.encode(word * 50).ids), word


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_where_text_may_be_dropped_there_is_no_bound(kind: str) -> None:
    assert bound_of(UNBOUNDED[kind]()) is None


def test_the_bound_is_near_for_words_and_bytes() -> None:
    fast = byte_level()
    bound = bound_of(fast)
    assert bound is not None and bound.words == 2
    assert bound.fewest("the the\n" * 100) == 100  # of two words each
    assert bound.fewest("x" * 100) == 99  # the sum is rounded down
    assert bound.fewest(" \n\u3000" * 100) == 0
    composed = bound_of(byte_level(normalizers.NFC()))
    assert composed is not None and composed.fewest("e\u0301" * 100) == composed.fewest("\u0378" * 100) == 0
    assert composed.fewest("你" * 100) > 100


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=48) as llm:
        yield llm


def test_what_cannot_fit_is_refused_without_tokenizing_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_LONG_TEXT", 300)
    tokenized: list[str] = []
    tokenizer: Any = llm._preprocessor.tokenizer
    backend = tokenizer._backend
    encode = backend.encode

    def spied(texts: list[str], *rest: Any) -> Any:
        tokenized.extend(texts)
        return encode(texts, *rest)

    monkeypatch.setattr(backend, "encode", spied)
    long, near = "the king " * 100, "In the beginning"
    chat = [[{"role": "user", "content": text}] for text in (long, "hi")]
    for outputs in (
        llm.generate([long, near], GREEDY, use_tqdm=False, on_error="return"),
        llm.chat(chat, GREEDY, use_tqdm=False, on_error="return"),
        list(llm.generate_iter(iter([long, "hi"]), GREEDY, on_error="return", ordered=True)),
    ):
        error = outputs[0].error
        assert isinstance(error, PromptTooLongError) and error.num_tokens >= 200
        assert "has at least 2" in str(error) and long in str(outputs[0].prompt)
        assert (outputs[0].outputs[0].finish_reason, outputs[1].error) == ("error", None)
    assert not any(long in text for text in tokenized) and near in tokenized
    [skipped, _] = llm.chat(chat, GREEDY, use_tqdm=False, on_too_long="skip")
    assert skipped.outputs[0].finish_reason == "skipped" and not any(long in text for text in tokenized)
    # What is cut is tokenized, and what is cut fits.
    for options in ({"on_too_long": "truncate_left"}, {"tokenization_kwargs": {"truncate_prompt_tokens": 9}}):
        for outputs in (llm.generate([long], GREEDY, use_tqdm=False, **options), llm.chat(chat, GREEDY, **options)):
            assert outputs[0].error is None and outputs[0].outputs[0].token_ids
    [cut] = llm.generate(long, SamplingParams(max_tokens=2, truncate_prompt_tokens=5), use_tqdm=False)
    assert len(cut.prompt_token_ids) == 5
    assert_idle(llm)
