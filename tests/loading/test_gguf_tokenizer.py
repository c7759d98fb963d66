"""Tokenizers out of GGUF metadata give the ids that the tokenizers they were written from give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import TokenType
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, normalizers, trainers
from tokenizers.models import BPE

from llm.errors import CheckpointError, UnsupportedModelError
from llm.loading.gguf.tokenizer import read_tokenizer
from llm.text.tokenizer import Tokenizer

TEXTS = ["low lower lowest", " two  spaces", "new\nline", "caf\u00e9 \u4e2d\U0001f600", "", "a<s>b", "1234 56"]
CORPUS = ["low lower lowest newer newest wide wider two spaces line new 1234 56"] * 20
PATH = Path("model.gguf")
METADATA = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


@pytest.fixture(scope="module", params=[True, False], ids=["llama", "gemma"])
def sentencepiece(request: pytest.FixtureRequest) -> tuple[FastTokenizer, dict]:
    """A tokenizer as transformers converts SentencePiece's (with a space in front, or without), and GGUF's metadata."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = FastTokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    in_front = [normalizers.Prepend("\u2581")] if request.param else []
    trained.normalizer = normalizers.Sequence([*in_front, normalizers.Replace(" ", "\u2581")])
    stripped = [decoders.Strip(" ", 1, 0)] if request.param else []
    trained.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    )
    vocabulary = trained.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    assert len(tokens) > len(special) + 20
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    kinds += [TokenType.NORMAL] * (len(tokens) - len(kinds))
    # Scores fall with the order in which pieces were learned.
    scores = -np.arange(len(tokens), dtype=np.float32)
    more = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores}
    more |= {"tokenizer.ggml.token_type": np.array(kinds, np.int32), "tokenizer.ggml.add_space_prefix": request.param}
    return FastTokenizer.from_str(trained.to_str()), METADATA | more


def test_sentencepiece_from_scores(sentencepiece: tuple[FastTokenizer, dict]) -> None:
    trained, metadata = sentencepiece
    ours = Tokenizer(read_tokenizer(metadata, PATH))
    theirs = FastTokenizer.from_str(trained.to_str())
    for text in TEXTS:
        if "<s>" not in text:
            ids = [1, *theirs.encode(text, add_special_tokens=False).ids]
            assert ours.encode([text]) == [ids]
            assert ours.decode(ids[1:]) == theirs.decode(ids[1:], skip_special_tokens=False)
    assert 1 in ours.encode_rendered(["a<s>b"])[0]
    assert len(ours.encode(["lowest"])[0]) < 6
    # The control: other scores are other merges.
    scores = metadata["tokenizer.ggml.scores"][::-1].copy()
    other = Tokenizer(read_tokenizer(metadata | {"tokenizer.ggml.scores": scores}, PATH))
    assert other.encode(TEXTS) != ours.encode(TEXTS)


def test_special_tokens_around_a_text(sentencepiece: tuple[FastTokenizer, dict]) -> None:
    _, metadata = sentencepiece
    flags = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    ids = Tokenizer(read_tokenizer(metadata | flags, PATH)).encode(["low"])[0]
    assert ids[0] != 1 and ids[-1] == 2
    found = read_tokenizer(metadata | {"tokenizer.chat_template": "{{ bos_token }}x"}, PATH)
    assert found.config["bos_token"] == "<s>" and found.config["chat_template"] == "{{ bos_token }}x"
    assert Tokenizer(found).render_chat([{"role": "user", "content": "a"}]) == "<s>x"


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 12345  x", ["it", "'s", " 12345", " ", " x"]),
        ("llama-bpe", "it's 12345  x", ["it", "'s", " ", "123", "45", " ", " x"]),
        ("qwen2", "it's 123  x", ["it", "'s", " ", "1", "2", "3", " ", " x"]),
        ("smollm", "ab12", ["ab", "1", "2"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-4o", "helloWorld 1234", ["hello", "World", " ", "123", "4"]),
        ("deepseek-v3", "ab \u4e2d\u6587x 1234 (y", ["ab", " ", "\u4e2d\u6587", "x", " ", "123", "4", " (", "y"]),
        ("deepseek-coder", "ab. 12\n", ["ab", ".", " ", "1", "2", "\n"]),
    ],
)
def test_texts_are_split_by_the_rule(pre: str, text: str, words: list[str]) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
    }
    splitter = read_tokenizer(metadata, PATH).tokenizer.pre_tokenizer
    assert splitter is not None
    pieces = splitter.pre_tokenize_str(text)
    assert [text[slice(*place)] for _, place in pieces] == words


def test_a_token_that_is_there_twice_is_refused(sentencepiece: tuple[FastTokenizer, dict]) -> None:
    tokens = list(sentencepiece[1]["tokenizer.ggml.tokens"])
    with pytest.raises(CheckpointError, match="tokens must be a list without repetitions"):
        read_tokenizer(sentencepiece[1] | {"tokenizer.ggml.tokens": [*tokens[:-1], tokens[-2]]}, PATH)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModelError, "of the kind 'bert'"),
        ({"tokenizer.ggml.tokens": []}, CheckpointError, "tokens must be a list of strings"),
        ({"tokenizer.ggml.tokens": ["a"] * 300}, CheckpointError, "token_type must be 300 numbers"),
        ({"tokenizer.ggml.scores": np.zeros(3, np.float32)}, CheckpointError, "scores must be"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, CheckpointError, "bos_token_id must be an id from 0 to"),
        ({"tokenizer.ggml.add_bos_token": 1}, CheckpointError, "add_bos_token must be true or false"),
    ],
)
def test_what_is_no_tokenizer(
    sentencepiece: tuple[FastTokenizer, dict], changes: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_tokenizer(sentencepiece[1] | changes, PATH)
