"""Text to ids and back: streams never take a character back, and give the text that is decoded at once.

The tokenizers are the embedded model's and small ones made here: byte-level (GPT-2), SentencePiece's BPE with byte
fallback (Llama 2), WordPiece (BERT), and two that transformers reads from a folder without tokenizer.json.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from embedded import open_llm, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import llm
from llm import SamplingParams
from llm.errors import CheckpointError, ValidationError
from llm.text import tokenizer as tokenizer_module
from llm.text.tokenizer import TextStream, Tokenizer, Truncation, _TokenBytes

TINY = Path(llm.__file__).parent / "assets" / "tiny"
CORPUS = ["the quick brown fox", "你好世界 你好吗", "🙂🙃🙂 👩‍👩‍👧 e\u0301 naïve", "the fox, the fox's 好 🙂"]
SPECIAL = ["<s>", "</s>"]
REPLACED = "\ufffd"
FULLWIDTH = "\uff5ccall\uff5c"  # outside the alphabet of byte-level tokenizers
# Longer than any context that is kept, of 4 bytes each: a context that begins inside a character must not be seen.
EMOJI = "🙂🙃👍🎉🙂🙃👍🎉"


def byte_level() -> FastTokenizer:
    """Trained a little, so that some tokens are several characters and some the end of one and the start of another."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator(CORPUS, trainer)
    fast.add_tokens(["<tool>", FULLWIDTH])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return fast


def byte_fallback() -> FastTokenizer:
    """As Llama 2's: what has no token of its own is spelt in bytes, and a text's first space is dropped."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abtheo", "é", "你", REPLACED]
    merges = [("▁", "a"), ("▁", "t"), ("t", "h"), ("▁t", "h"), ("▁th", "e"), ("b", "o")]
    vocab = {piece: index for index, piece in enumerate([*pieces, *map("".join, merges)])}
    fast = FastTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.add_special_tokens(["<unk>", *SPECIAL])
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return fast


def word_piece() -> FastTokenizer:
    pieces = ["[UNK]", *SPECIAL, "the", "fox", "qu", "##ick", "##s", ",", ".", "'", "s", "你", "好", "##们", "é"]
    fast = FastTokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    fast.add_special_tokens(["[UNK]", *SPECIAL])
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    return fast


def gpt2_files(folder: Path) -> None:
    """vocab.json and merges.txt, no tokenizer.json."""
    byte_level().model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))


def byt5_files(folder: Path) -> None:
    """A tokenizer in Python without any file: every byte is a token."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))


def tiny_files(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)


def fast_files(make: Callable[[], FastTokenizer]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        make().save(str(folder / "tokenizer.json"))

    return write


KINDS: dict[str, Callable[[Path], None]] = {
    "tiny": tiny_files,
    "byte-level": fast_files(byte_level),
    "byte-fallback": fast_files(byte_fallback),
    "word-piece": fast_files(word_piece),
    "gpt2": gpt2_files,
    "byt5": byt5_files,
}
with_tokenizer_json = pytest.mark.parametrize("kind", ["tiny", "byte-level", "byte-fallback", "word-piece"])
every_kind = pytest.mark.parametrize("kind", list(KINDS))


@lru_cache
def loaded(kind: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        KINDS[kind](Path(folder))
        tokenizer = Tokenizer(Path(folder))
        tokenizer.huggingface()  # while its files are there
        return tokenizer


def texts() -> st.SearchStrategy[str]:
    """What breaks detokenizers: several bytes a character, several characters a glyph, spaces, special tokens."""
    parts = [
        "🙂",
        "👩‍👩‍👧",
        "🇫🇷",
        "e\u0301",
        "你好",
        "한국",
        "\u0627",
        " ",
        "  ",
        "\n",
        "the",
        "a",
        "<s>",
        "<tool>",
        FULLWIDTH,
        "'s",
        ".",
    ]
    return st.lists(st.sampled_from(parts) | st.text(max_size=4), max_size=12).map("".join)


def token_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of anything, and more of the first 300, which are bytes wherever there are byte tokens. Some are beyond the
    vocabulary: a model can have more rows than its tokenizer has tokens."""
    beyond = 3 if tokenizer._backend.fast is not None else -1  # those in Python need not know what to do
    return st.lists(
        st.integers(0, tokenizer.vocab_size + beyond) | st.integers(0, min(300, tokenizer.vocab_size + beyond)),
        max_size=24,
    )


def stream_pieces(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> list[str]:
    """All pieces, the held back rest last."""
    stream = tokenizer.stream(prompt, skip)
    pieces = []
    for token in output:
        pieces.append(stream.push(token))
        assert stream.text == "".join(pieces)
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    return pieces


@every_kind
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=80)
def test_a_stream_gives_the_text_that_is_decoded_at_once(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = loaded(kind)
    prompt, output = data.draw(token_ids(tokenizer), "prompt"), data.draw(token_ids(tokenizer), "output")
    pieces = stream_pieces(tokenizer, prompt, output, skip)
    assert "".join(pieces) == tokenizer.decode_continuation(prompt, output, skip)


def check_stream_of_text(tokenizer: Tokenizer, ids: list[int], cut: int, skip: bool) -> None:
    """`ids` are of real text: after its prompt each character must come, whole, with its last token."""
    whole, before = tokenizer.decode(ids, skip), tokenizer.decode(ids[:cut], skip)
    if not whole.startswith(before):
        return  # cut inside a character
    stream = tokenizer.stream(ids[:cut], skip)
    for count in range(cut, len(ids)):
        assert REPLACED not in stream.push(ids[count])
        so_far = tokenizer.decode(ids[: count + 1], skip)
        assert whole.startswith(before + stream.text)
        assert before + stream.text == so_far or not whole.startswith(so_far)
    assert stream.finish() == ""
    assert before + stream.text == whole


@every_kind
@given(text=texts().filter(lambda text: REPLACED not in text), cut=st.integers(0, 60), skip=st.booleans())
@settings(max_examples=60)
def test_real_text_is_streamed_character_by_character(kind: str, text: str, cut: int, skip: bool) -> None:
    tokenizer = loaded(kind)
    check_stream_of_text(tokenizer, tokenizer.encode_rendered([text])[0], cut, skip)


LONG_RUNS = [EMOJI, "你好吗" * 5, "a" + EMOJI + " the " + EMOJI, "the, é" + "e\u0301" * 9]
long_runs = pytest.mark.parametrize("text", LONG_RUNS, ids=["emoji", "cjk", "mixed", "combining"])


@every_kind
@long_runs
def test_long_runs_of_bytes_are_streamed_character_by_character(kind: str, text: str) -> None:
    tokenizer = loaded(kind)
    (ids,) = tokenizer.encode_rendered(["the a" + text])
    for cut in range(len(ids)):
        check_stream_of_text(tokenizer, ids, cut, True)


def test_a_fixed_number_of_tokens_is_no_context_for_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above, and the reason of `_TokenBytes`: a context can begin inside a character."""
    tokenizer = loaded("byte-fallback")
    prompt, ids = tokenizer.encode_rendered(["the a", "the a" + EMOJI])
    check_stream_of_text(tokenizer, ids, len(prompt), True)
    monkeypatch.setattr(tokenizer._bytes, "get", lambda token, skip: None)
    with pytest.raises(AssertionError):
        check_stream_of_text(tokenizer, ids, len(prompt), True)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "gpt2"])
@given(data=st.data())
@settings(max_examples=60)
def test_bytes_that_are_no_text_are_replaced_as_python_replaces_them(kind: str, data: st.DataObject) -> None:
    tokenizer = loaded(kind)
    raw = data.draw(st.lists(st.sampled_from([b"\x80", b"\xe4", b"\xbd\xa0", b"\xf0\x9f", b"\x99\x82", b"\xff", b"."])))
    ids = [byte_token(kind, byte) for byte in b"".join(raw)]
    assert tokenizer.decode_continuation([], ids, True) == b"".join(raw).decode("utf-8", "replace")


def byte_token(kind: str, byte: int) -> int:
    """The token that is this byte alone."""
    tokenizer = loaded(kind)
    fast = tokenizer._backend.fast
    assert fast is not None
    letters = {value: letter for letter, value in tokenizer_module._BYTE_OF_LETTER.items()}
    found = fast.token_to_id(f"<0x{byte:02X}>" if kind == "byte-fallback" else letters[byte])
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_stream_goes_on_after_bytes_that_are_no_text(kind: str) -> None:
    tokenizer = loaded(kind)
    ids = [*(byte_token(kind, byte) for byte in "好".encode() + b"\xe4\xbd"), *tokenizer.encode_rendered(["the a"])[0]]
    pieces = stream_pieces(tokenizer, tokenizer.encode(["a"])[0], ids, True)
    assert pieces[2] == "好"
    assert "".join(pieces) == f"好{REPLACED}" + {"byte-level": "the a", "byte-fallback": " the a"}[kind]
    assert pieces[-1] == ""


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_character_that_the_prompt_began_is_completed(kind: str) -> None:
    tokenizer = loaded(kind)
    first, second, third = (byte_token(kind, byte) for byte in "好".encode())
    prompt = [*tokenizer.encode(["the"])[0], first]
    assert stream_pieces(tokenizer, prompt, [second, third], True) == ["", "好", ""]
    assert tokenizer.decode_continuation(prompt, [second, third], True) == "好"


@every_kind
def test_what_a_token_costs_does_not_grow_with_the_output(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No decode of the whole; not even when all of it is no text."""
    tokenizer = loaded(kind)
    decoded: list[int] = []
    honest = tokenizer._backend.decode

    def counted(ids: list[int], skip: bool) -> str:
        decoded.append(len(ids))
        return honest(ids, skip)

    monkeypatch.setattr(tokenizer._backend, "decode", counted)
    random = Random(0)
    anything = [random.randrange(tokenizer.vocab_size) for _ in range(300)]
    for output in (anything, [min(200, tokenizer.vocab_size - 1)] * 300, [1] * 300):
        stream = tokenizer.stream(anything, False)
        decoded.clear()
        for token in output:
            stream.push(token)
        stream.finish()
        assert len(decoded) <= 3 * len(output) + 3
        assert max(decoded, default=0) <= 32


def test_skipped_special_tokens_leave_no_trace() -> None:
    tokenizer = loaded("byte-fallback")
    a, end = tokenizer.encode_rendered(["a"])[0][0], 2
    raw = [byte_token("byte-fallback", byte) for byte in "好".encode()]
    pieces = stream_pieces(tokenizer, [a], [end, a, end, raw[0], end, *raw[1:], end], True)
    assert pieces == ["", " a", "", "", "", "", "好", "", ""]
    # Not even as the end of a prompt: what follows is still no beginning of a text.
    assert stream_pieces(tokenizer, [a] + [end] * 20, [a], True) == [" a", ""]
    assert "</s>" in tokenizer.decode_continuation([a], [end, a], False)


@with_tokenizer_json
@given(text=texts(), data=st.data())
@settings(max_examples=40)
def test_ids_and_text_are_those_of_transformers(kind: str, text: str, data: st.DataObject) -> None:
    """Against PreTrainedTokenizerFast on the same file."""
    tokenizer = loaded(kind)
    theirs = tokenizer.huggingface()
    ids = theirs(text)["input_ids"]
    assert tokenizer.encode([text, text]) == [ids, ids]
    assert tokenizer.encode_rendered([text]) == [theirs(text, add_special_tokens=False)["input_ids"]]
    anything = [token for token in data.draw(token_ids(tokenizer)) if token < tokenizer.vocab_size]
    for skip in (True, False):
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        assert tokenizer.decode(anything, skip) == theirs.decode(anything, **options)
    assert tokenizer.vocab_size == len(theirs)


def test_a_tokenizer_without_tokenizer_json_is_read_by_transformers() -> None:
    from_files, fast = loaded("gpt2"), loaded("byte-level")
    for text in CORPUS:
        assert from_files.encode_rendered([text]) == fast.encode_rendered([text])
    assert loaded("byt5").encode_rendered(["é"]) == [[0xC3 + 3, 0xA9 + 3]]
    assert loaded("byt5").encode([]) == []


def test_texts_are_cut_in_one_thread_and_not_in_another() -> None:
    """The cut of one call changes no setting that another call, at the same time, depends on."""
    tokenizer, text = Tokenizer(TINY), "In the beginning God created the heaven and the earth. " * 20
    whole, pair = tokenizer.encode([text])[0], tokenizer.encode_pairs([(text, text)])[0]
    cut, ends = Truncation(9, "left"), threading.Event()
    last = tokenizer.encode_pairs([(text, text)], cut)[0][0][-1]
    assert last == pair[0][-1] != tokenizer.encode_pairs([(text, text)], Truncation(9, "right"))[0][0][-1]
    wrong: list[object] = []

    def cuts() -> None:
        while not ends.is_set():
            if (
                len(tokenizer.encode([text], cut)[0]) != 9
                or len(tokenizer.encode_pairs([(text, text)], cut)[0][0]) != 9
            ):
                wrong.append("cut")

    thread = threading.Thread(target=cuts)
    thread.start()
    for _ in range(200):
        if tokenizer.encode([text])[0] != whole or tokenizer.encode_pairs([(text, text)])[0] != pair:
            wrong.append("whole")
    ends.set()
    thread.join()
    assert not wrong


@pytest.mark.parametrize("what", ["truncation", "padding"])
def test_truncation_and_padding_of_the_file_are_switched_off(what: str, tmp_path: Path) -> None:
    fast = byte_level()
    text = "a text that is seen nowhere else, so that it takes many tokens"
    plain = fast.encode(text).ids
    fast.enable_truncation(4) if what == "truncation" else fast.enable_padding(length=99)
    fast.save(str(tmp_path / "tokenizer.json"))
    length = len(FastTokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text))
    assert length == {"truncation": 4, "padding": 99}[what] and 4 < len(plain) < 99
    assert Tokenizer(tmp_path).encode([text, "a"])[0] == plain


class _Bytes:
    """A tokenizer whose tokens are bytes, and which replaces what is no text."""

    fast = None

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


@given(
    text=st.text(st.sampled_from("aé你🙂\ufffd"), max_size=12), prompt=st.text(st.sampled_from("aé你🙂"), max_size=4)
)
def test_characters_of_any_number_of_tokens_come_whole(text: str, prompt: str) -> None:
    """Of a tokenizer that says nothing of its bytes. U+FFFD is a character like any other."""
    stream = TextStream(cast(Any, _Bytes()), _TokenBytes(None), list(prompt.encode()), True)
    ids = list(text.encode())
    pieces = [stream.push(token) for token in ids]
    assert "".join([*pieces, stream.finish()]) == stream.text == text
    assert all(REPLACED not in piece or REPLACED in text for piece in pieces)
    if REPLACED not in text:
        assert [piece for piece in pieces if piece] == list(text)


def test_the_tokens_of_a_character_are_shown_as_what_they_complete() -> None:
    """In logprobs: nothing, nothing, nothing, the character."""
    text = "a🙂é你🙃 b"
    with open_llm(max_model_len=64) as llm:
        output = run(llm, text, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    positions = output.prompt_logprobs
    assert positions is not None and positions[0] is None and len(positions) > len(text) + 6
    shown = [item[token].decoded_token for item, token in zip(positions[1:], output.prompt_token_ids[1:], strict=True)]
    assert text.endswith("".join(shown)) and len("".join(shown)) >= len(text) - 1
    assert {"🙂", "🙃", "你"} <= set(shown)


@pytest.mark.parametrize("adds", [True, False], ids=["file adds BOS", "file adds none"])
@pytest.mark.parametrize("asked", [None, True, False])
def test_tokenizer_json_says_whether_a_bos_is_added(adds: bool, asked: bool | None, tmp_path: Path) -> None:
    """`add_bos_token` in tokenizer_config.json changes nothing beside a tokenizer.json, as in transformers 5."""
    fast = byte_level()
    if not adds:
        fast.post_processor = processors.ByteLevel()
    fast.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizerFast"}
    asked_config = {} if asked is None else {"add_bos_token": asked}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | asked_config))
    tokenizer = Tokenizer(tmp_path)
    (ids,) = tokenizer.encode(["the"])
    assert (ids[0] == 0) is adds
    assert ids == tokenizer.huggingface()("the")["input_ids"]
    assert tokenizer.encode_rendered(["the"])[0] == ids[adds:]


def refuse(folder: Path, *words: str) -> None:
    """Open the folder, which must fail with one printable sentence that holds the words."""
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(folder)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000
    for word in (str(folder), *words):
        assert word in message


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path, "put a tokenizer.json there", "skip_tokenizer_init=True")


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff\xfe\x00", b'{"model": {"type": "Unheard"}}'])
def test_a_corrupt_tokenizer_json_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    refuse(tmp_path, "tokenizer.json", "is not a tokenizer")


def test_a_corrupt_tokenizer_config_is_refused(tmp_path: Path) -> None:
    tiny_files(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    refuse(tmp_path, "tokenizer_config.json")


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GPT2Tokenizer", "BertTokenizer"])
def test_a_class_whose_vocabulary_is_missing_is_refused(name: str, tmp_path: Path) -> None:
    """transformers would make an empty tokenizer of it, which encodes every text to nothing."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    refuse(tmp_path, "put a tokenizer.json there")


def test_python_in_the_folder_is_neither_run_nor_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: Any) -> str:
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    refuse(tmp_path, "put a tokenizer.json there")
    assert not (tmp_path / "ran").exists()


CHAT = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {{ x }}!"}]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A tokenizer with a BOS and no template."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    yield tmp_path


def test_the_folders_template_renders_all_roles_and_its_text_is_data(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHAT)
    tokenizer = Tokenizer(folder)
    rendered = tokenizer.render_chat(CONVERSATION, add_generation_prompt=True)
    assert rendered == "<s>[system]Be brief.[user]Hi {{ x }}![assistant]"
    assert tokenizer.render_chat(CONVERSATION).endswith("!")
    # The template has written the BOS: encoding must not add a second.
    assert tokenizer.encode_rendered([rendered])[0].count(0) == 1
    assert tokenizer.encode([rendered])[0].count(0) == 2


def test_the_embedded_models_template_renders_a_conversation() -> None:
    tokenizer = Tokenizer(TINY)
    rendered = tokenizer.render_chat([{"role": "user", "content": "Who was Moses?"}], add_generation_prompt=True)
    assert "Who was Moses?" in rendered
    assert tokenizer.decode(tokenizer.encode_rendered([rendered])[0], False) == rendered


def test_a_template_given_replaces_the_folders(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("the folder's")
    (folder / "other.jinja").write_text("from a file: {{ messages[0].content }}")
    text = "as text: {{ messages[0].content }}"
    assert Tokenizer(folder, text).render_chat(CONVERSATION) == "as text: Be brief."
    for path in (folder / "other.jinja", str(folder / "other.jinja")):
        assert Tokenizer(folder, path).render_chat(CONVERSATION) == "from a file: Be brief."
        assert Tokenizer(folder).render_chat(CONVERSATION, chat_template=path) == "from a file: Be brief."
    assert Tokenizer(folder, "x {{ 1 }}").render_chat(CONVERSATION, chat_template=text) == "as text: Be brief."


def test_a_folder_with_tekken_json_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has tekken.json and no tokenizer.json, which is read here; download"):
        Tokenizer(tmp_path)


def test_no_template_is_refused_unless_the_call_brings_one(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    with pytest.raises(ValidationError, match="no chat template") as caught:
        tokenizer.render_chat(CONVERSATION)
    assert caught.value.parameter == "chat_template"
    assert tokenizer.render_chat(CONVERSATION, chat_template="{{ messages[1].role }}") == "user"


@pytest.mark.parametrize("template", ["no/such/file.jinja", "", "."])
def test_a_template_that_is_neither_text_nor_a_file_is_refused(template: str, folder: Path) -> None:
    """Taken for text, a mistyped path would become every prompt."""
    for call in (
        lambda: Tokenizer(folder, template),
        lambda: Tokenizer(folder).render_chat(CONVERSATION, chat_template=template),
    ):
        with pytest.raises(ValidationError, match="chat_template must be") as caught:
            call()
        assert caught.value.parameter == "chat_template"


@pytest.mark.parametrize("template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"])
def test_templates_run_in_an_immutable_sandbox(template: str, folder: Path) -> None:
    from jinja2.exceptions import SecurityError

    with pytest.raises(SecurityError):
        Tokenizer(folder, template).render_chat(CONVERSATION)
