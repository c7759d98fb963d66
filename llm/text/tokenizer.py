"""Text to token ids and back.

The `tokenizers` library reads a folder's tokenizer.json. Chat templates and tokenizers without that file use
transformers, which is imported only then. tokenizers is Rust: where it gives up it panics, with an exception that no
`except Exception` catches.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel

from llm.base.checks import refuse
from llm.base.locks import renewed_in_children
from llm.base.text import clip, show
from llm.base.types import JsonObject
from llm.errors import CheckpointError, OutOfMemoryError, ValidationError
from llm.inputs import ChatMessage
from llm.loading.model_files import check_model_file, check_small_files, read_json
from llm.text.token_bound import TokenBound

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The text of a token can depend on the tokens before it. The context is this many tokens with a text, searched among
# the last ones.
_CONTEXT_TOKENS = 6
_CONTEXT_SEARCH_TOKENS = 64
# Text that ends in U+FFFD may end inside a character. After this many tokens it is taken as a real U+FFFD.
_MAX_HELD_TOKENS = 16
_MAX_CONFIG_BYTES = 64 << 20
# `{% for part in message["content"] %}`, or a variable or attribute of that name.
_LOOPS_OVER_CONTENT = re.compile(r"{%-?\s*for\s[^%]*\bin\b[^%]*\bcontent\b[^%]*%}")


class Tokenizer:
    """The tokenizer of a model folder.

    Args:
        folder: holds tokenizer.json, tokenizer_config.json and optionally chat_template.jinja; or the tokenizer itself.
        chat_template: replaces the folder's own; text of a template, or the path of a file that holds it.

    Raises:
        CheckpointError: the folder has no tokenizer, or one that cannot be read.
        ValidationError: `chat_template` is neither the text of a template nor a readable file.
    """

    def __init__(self, folder: Path | TokenizerDefinition, chat_template: str | Path | None = None) -> None:
        self._definition = folder if isinstance(folder, TokenizerDefinition) else None
        self.folder = folder.path if isinstance(folder, TokenizerDefinition) else folder
        self._chat_template = None if chat_template is None else _template_text(chat_template)
        self._hf: PreTrainedTokenizerBase | None = None
        path = self.folder / "tokenizer_config.json"
        own = self._definition.config if self._definition is not None else {}
        self.config = read_json(path, limit_bytes=_MAX_CONFIG_BYTES) if path.exists() else own
        self._backend = self._open_backend()
        self._bytes = _TokenBytes(self._backend.fast)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._backend.vocab_size()

    @property
    def is_fast(self) -> bool:
        """True if the tokenizers library decodes, which never writes spaces between special tokens."""
        return isinstance(self._backend, FastBackend)

    def to_json(self) -> str | None:
        """The content of tokenizer.json, None for a tokenizer without one."""
        return None if self._backend.fast is None else definition_of(self._backend.fast, self.folder)

    def encode(self, texts: Sequence[str], cut: Truncation | None = None) -> list[list[int]]:
        """Ids of each text, with the special tokens that the model's tokenizer adds (a BOS, for example)."""
        return self._backend.encode(list(texts), True, cut)

    def encode_rendered(self, texts: Sequence[str], cut: Truncation | None = None) -> list[list[int]]:
        """Ids of texts that a chat template rendered; the template has added the special tokens."""
        return self._backend.encode(list(texts), False, cut)

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, found without tokenizing it; 0 where none is known."""
        return 0 if self._bound is None else self._bound.fewest(text)

    @functools.cached_property
    def _bound(self) -> TokenBound | None:
        fast = self._backend.fast if isinstance(self._backend, FastBackend) else None
        return None if fast is None else TokenBound.of(fast, _bytes_of_letters)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], cut: Truncation | None = None
    ) -> list[tuple[list[int], int | None]]:
        """Per pair of texts its ids, special tokens included, and where the second text begins.

        None: not known, or the tokenizer's files say that the model does not read it.
        """
        encoded, names = self._backend.encode_pairs(list(pairs), cut), self.config.get("model_input_names")
        if isinstance(names, list) and "token_type_ids" not in names:
            return [(ids, None) for ids, _ in encoded]
        return encoded

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens)

    def decode_continuation(self, prompt: Sequence[int], output: Sequence[int], skip_special_tokens: bool) -> str:
        """The text that `output` adds after `prompt`, including a leading space that only a continuation has.

        The same text as `stream` yields in pieces; decoded at once where that gives the same result.
        """
        context = self._context(prompt, skip_special_tokens)
        before = self.decode(context, skip_special_tokens)
        text = self.decode([*context, *output], skip_special_tokens)
        all_is_text = text.startswith(before) and "\ufffd" not in text
        if all_is_text and self._backend.fast is not None:  # a tokenizer in Python may drop bytes that are not text
            return text[len(before) :]
        stream = self.stream(context, skip_special_tokens)
        return "".join([*map(stream.push, output), stream.finish()])

    def stream(self, prompt: Sequence[int], skip_special_tokens: bool) -> TextStream:
        context = self._context(prompt, skip_special_tokens)
        return TextStream(self._backend, self._bytes, context, skip_special_tokens)

    def huggingface(self) -> PreTrainedTokenizerBase:
        """The same tokenizer as an object of transformers, for `apply_chat_template` and the rest of its interface."""
        if self._hf is None:
            hf = self._load_huggingface()
            if self._chat_template is not None:
                hf.chat_template = self._chat_template
            self._hf = hf
        return self._hf

    def render_chat(
        self, messages: list[ChatMessage], *, chat_template: str | Path | None = None, **options: Any
    ) -> str:
        """Render one conversation with the chat template, in an immutable sandbox.

        A template is a program that comes with the model: it can raise any exception.

        Raises:
            ValidationError: the tokenizer has no template and none is given.
        """
        from llm.text.chat_template import render

        hf = self.huggingface()
        if chat_template is None and not hf.chat_template:
            raise ValidationError(
                "this model's tokenizer has no chat template; pass chat_template= or use generate().",
                parameter="chat_template",
                value=None,
            )
        template = None if chat_template is None else _template_text(chat_template)
        if any(isinstance(message.get("content"), list) for message in messages):
            messages = _with_text_content(messages, hf.get_chat_template(template, options.get("tools")))
        return render(hf, messages, template, options)

    def template_text(self, chat_template: str | Path | None, has_tools: bool) -> str:
        """The template that `render_chat` renders with these arguments."""
        template = None if chat_template is None else _template_text(chat_template)
        return str(self.huggingface().get_chat_template(template, [] if has_tools else None))

    def _context(self, prompt: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """The last tokens of the prompt with a text."""
        near = prompt[-_CONTEXT_SEARCH_TOKENS:]
        return [token for token in near if self._bytes.get(token, skip_special_tokens) != b""][-_CONTEXT_TOKENS:]

    def _load_huggingface(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if self._definition is not None:
            with refusing_panics(self.folder):
                return PreTrainedTokenizerFast(tokenizer_object=self._definition.tokenizer, **self.config)
        fast = (self.folder / "tokenizer.json").exists()
        loader = PreTrainedTokenizerFast if fast else AutoTokenizer
        check_small_files(self.folder)  # transformers opens any file that is there
        # By default trust_remote_code asks on the terminal whether to run the folder's Python.
        with refusing_panics(self.folder):
            return loader.from_pretrained(str(self.folder), local_files_only=True, trust_remote_code=False)

    def _open_backend(self) -> Backend:
        if self._definition is not None:
            return FastBackend(self.folder, self._definition.tokenizer)
        if (self.folder / "tokenizer.json").exists():
            return FastBackend(self.folder)
        if (self.folder / "tekken.json").exists() and not (self.folder / "tokenizer.model").exists():
            raise CheckpointError(
                f"{self.folder} has tekken.json and no tokenizer.json, which is read here; download that too, or pass "
                "the folder or hub name of a model that has it as tokenizer=."
            )
        return HuggingFaceBackend(self.huggingface, self.folder)


class _TokenBytes:
    """The bytes of tokens that are bytes in any context, possibly only a part of a character.

    Two kinds of tokenizer have such tokens: byte-level BPE (GPT-2), where every token is a string over 256 letters, and
    SentencePiece with byte fallback, where 256 tokens are named <0x00> to <0xFF>.

    Attributes:
        stand_in: with byte fallback, a byte token that replaces any byte tokens in a context.
    """

    def __init__(self, fast: FastTokenizer | None) -> None:
        self._fast = fast
        self._byte_level = fast is not None and isinstance(fast.decoder, ByteLevel)
        self._special = set() if fast is None else {i for i, t in fast.get_added_tokens_decoder().items() if t.special}
        self._known: dict[int, bytes | None] = {}
        letter = None if fast is None else fast.token_to_id("<0x41>")
        falls_back = fast is not None and letter is not None and fast.decode([letter]) == "A"
        self.stand_in = letter if falls_back else None

    def get(self, token: int, skip_special_tokens: bool) -> bytes | None:
        """The token's bytes; b"" if it has no text; None if its text depends on the tokens before it."""
        if skip_special_tokens and token in self._special:
            return b""
        if token not in self._known:
            self._known[token] = self._look_up(token)
        return self._known[token]

    def _look_up(self, token: int) -> bytes | None:
        if self._fast is None:
            return None
        name = self._fast.id_to_token(token)
        if name is None:  # the model has more ids than its tokenizer
            return b""
        if self._byte_level:
            return _bytes_of_letters(name)
        is_byte = self.stand_in is not None and re.fullmatch("<0x[0-9A-F]{2}>", name)
        return bytes.fromhex(name[3:5]) if is_byte else None


class TextStream:
    """Incremental detokenization. Returned text is never taken back.

    Byte tokens go through an incremental UTF-8 decoder. Other tokens are decoded after a few preceding tokens, because
    their text can depend on them: a leading space is dropped at the beginning of a text.

    Attributes:
        text: all text returned so far.
    """

    def __init__(self, backend: Backend, token_bytes: _TokenBytes, context: Sequence[int], skip_special_tokens: bool):
        self.text = ""
        self._backend = backend
        self._bytes = token_bytes
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []  # tokens after the context whose text may end inside a character
        for token in context:
            self._decode(token)

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while the text ends inside a character."""
        return self._return(self._decode(token))

    def finish(self) -> str:
        """The text that was held back."""
        return self._return(self._release_held() + self._utf8.decode(b"", True))

    def _return(self, piece: str) -> str:
        # CPython extends a string in place if nothing else refers to it; `self.text += piece` would copy it each time.
        text, self.text = self.text, ""
        text += piece
        self.text = text
        return piece

    def _decode(self, token: int) -> str:
        data = self._bytes.get(token, self._skip)
        if data is None:
            return self._utf8.decode(b"", True) + self._decode_behind_context(token)
        if not data:
            return ""
        piece = self._release_held()
        if self._bytes.stand_in is not None:
            self._set_context([self._bytes.stand_in])
        return piece + self._utf8.decode(data)

    def _decode_behind_context(self, token: int) -> str:
        self._held.append(token)
        text = self._backend.decode([*self._context, *self._held], self._skip)
        inside_character = text.endswith("\ufffd") and len(self._held) < _MAX_HELD_TOKENS
        return "" if inside_character else self._release(text)

    def _release_held(self) -> str:
        return self._release(self._backend.decode([*self._context, *self._held], self._skip)) if self._held else ""

    def _release(self, text: str) -> str:
        """The text that the held tokens add; `text` is decoded from the context and the held tokens."""
        extends = text.startswith(self._context_text)
        piece = text[len(self._context_text) :] if extends else self._backend.decode(self._held, self._skip)
        self._set_context([*self._context, *self._held][-_CONTEXT_TOKENS:])
        self._held = []
        return piece

    def _set_context(self, tokens: list[int]) -> None:
        if tokens != self._context:
            self._context = tokens
            self._context_text = self._backend.decode(tokens, self._skip)


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: a printable byte is its own letter, the others are the letters from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


def _bytes_of_letters(name: str) -> bytes:
    """What a token of byte-level BPE stands for; added ones stand for their names."""
    known = all(letter in _BYTE_OF_LETTER for letter in name)
    return bytes(_BYTE_OF_LETTER[letter] for letter in name) if known else name.encode()


def _with_text_content(messages: list[ChatMessage], template: str) -> list[ChatMessage]:
    """Convert contents that are lists of parts to what the template expects.

    A template that loops over contents gets the parts. Any other gets their texts joined by line breaks, as in vLLM.

    Raises:
        ValidationError: a part is not text.
    """
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else []:
            is_known = isinstance(part, dict) and part.get("type") in ("text", "image", "video")
            if not is_known or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValidationError(
                    f"the content of a message must be a string or a list of {{'type': 'text', 'text': ...}}, got a "
                    f"part of type {kind!r}.",
                    parameter="messages",
                    value=kind,
                )
    if _LOOPS_OVER_CONTENT.search(template):
        return messages
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _template_text(template: str | Path) -> str:
    """A template given as text or as a path: a string with a brace or a line break is text."""
    if isinstance(template, str) and ("{" in template or "\n" in template):
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValidationError(
            f"chat_template must be the text of a template or the path of a readable file, got {str(template)!r}.",
            parameter="chat_template",
            value=template,
        ) from error


# --- Libraries that encode and decode. ---

_TOKENIZER_BYTES = 256 << 20
# A library that walks all ids up to the largest would take memory for each.
_LARGEST_ID = 1 << 24


class Truncation(NamedTuple):
    """Most tokens of a text, special ones included, and the side that is cut: "left" or "right"."""

    limit: int
    side: str


class Backend(Protocol):
    """A tokenizer. `fast`: the tokenizers library's object, None for a tokenizer in Python."""

    fast: FastTokenizer | None

    def vocab_size(self) -> int: ...
    def encode(self, texts: list[str], special: bool, cut: Truncation | None = None) -> list[list[int]]: ...
    def encode_pairs(
        self, pairs: list[tuple[str, str]], cut: Truncation | None = None
    ) -> list[tuple[list[int], int | None]]: ...
    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class TokenizerDefinition:
    """A tokenizer that is in no file of its own, such as one in a GGUF file.

    Attributes:
        path: of the file that it is in.
        tokenizer: the object of the tokenizers library.
        config: what tokenizer_config.json would hold: the special tokens and the chat template.
    """

    path: Path
    tokenizer: FastTokenizer
    config: JsonObject


class FastBackend:
    """A tokenizer of the tokenizers library: tokenizer.json, unless it is given.

    Several threads encode with it at once, so that nothing may change its settings: that would cut the texts of others,
    and wait for their end with Python's lock held.

    Raises:
        CheckpointError: the file cannot be read, or its rules fail on a text (a regular expression that never ends).
    """

    def __init__(self, folder: Path, tokenizer: FastTokenizer | None = None) -> None:
        self._folder = folder
        tokenizer = tokenizer or self._read(folder / "tokenizer.json")
        # A saved tokenizer can include training-time truncation and padding; prompts must not be cut or padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.fast: FastTokenizer | None = tokenizer
        self.tokenizer = tokenizer
        self._cutter: FastTokenizer | None = None
        self._lock = renewed_in_children(threading.Lock())  # of `_cutter`

    @staticmethod
    def _read(path: Path) -> FastTokenizer:
        check_model_file(path, limit_bytes=_TOKENIZER_BYTES)
        try:
            # tokenizer.json decides which special tokens are added. Like transformers 5, add_bos_token in
            # tokenizer_config.json is not read if there is a tokenizer.json.
            with refusing_panics(path.parent):
                return FastTokenizer.from_file(str(path))
        except CheckpointError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            reason = clip(str(error))
            raise CheckpointError(
                f"{path} is not a tokenizer that the tokenizers library can read: {reason}"
            ) from error

    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: list[str], special: bool, cut: Truncation | None = None) -> list[list[int]]:
        fast = self.tokenizer
        with refusing_panics(self._folder):
            if cut is None:
                return [encoding.ids for encoding in fast.encode_batch(texts, add_special_tokens=special)]
            room = _check_room(cut, fast.num_special_tokens_to_add(False) if special else 0)
            found = []
            for encoding in fast.encode_batch(texts, add_special_tokens=False):
                encoding.truncate(room, direction=cut.side)
                found.append(fast.post_process(encoding, None, special).ids)
            return found

    def encode_pairs(
        self, pairs: list[tuple[str, str]], cut: Truncation | None = None
    ) -> list[tuple[list[int], int | None]]:
        with self._cutting(cut) as fast, refusing_panics(self._folder):
            return [(encoding.ids, _second(encoding.type_ids)) for encoding in fast.encode_batch(pairs)]

    @contextmanager
    def _cutting(self, cut: Truncation | None) -> Iterator[FastTokenizer]:
        """The tokenizer; one that cuts pairs of texts is another, for one call at a time."""
        if cut is None:
            yield self.tokenizer
            return
        _check_room(cut, self.tokenizer.num_special_tokens_to_add(True))
        with self._lock:
            if self._cutter is None:
                self._cutter = FastTokenizer.from_str(self.tokenizer.to_str())
            self._cutter.enable_truncation(cut.limit, direction=cut.side)
            yield self._cutter

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        try:
            return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:  # without the context manager: called for every token
            _refuse_panic(error, self._folder)
            raise


def _code_of(folder: Path) -> str:
    """Why a tokenizer that a Python file of the folder computes is not loaded; "": it is none."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        code = settings["auto_map"]["AutoTokenizer"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    named = next((name for name in code if name), code) if isinstance(code, list) else code
    return f"it is the class {show(named)} in a file of the checkpoint, and code from a model folder is never run"


class HuggingFaceBackend:
    """A tokenizer without tokenizer.json, read by transformers.

    Args:
        load: gives transformers' object.
    """

    def __init__(self, load: Callable[[], PreTrainedTokenizerBase], folder: Path) -> None:
        self._folder = folder
        try:
            self.tokenizer = load()
            self._check_files(folder)
        except CheckpointError:
            raise
        # transformers raises whatever its files lead it to.
        except Exception as error:
            raise CheckpointError(
                f"{folder} has no tokenizer that can be loaded ({_code_of(folder) or type(error).__name__}); put a "
                "tokenizer.json there, pass tokenizer=, or use skip_tokenizer_init=True with token ids."
            ) from error
        self.fast: FastTokenizer | None = getattr(self.tokenizer, "backend_tokenizer", None)
        self._lock = renewed_in_children(threading.Lock())  # a call changes the tokenizer's settings

    def vocab_size(self) -> int:
        return len(self.tokenizer)

    def encode(self, texts: list[str], special: bool, cut: Truncation | None = None) -> list[list[int]]:
        if not texts:
            return []
        options: dict[str, object] = {"add_special_tokens": special}
        if cut is not None:
            _check_room(cut, self.tokenizer.num_special_tokens_to_add() if special else 0)
            options |= {"truncation": True, "max_length": cut.limit}
        with self._lock, refusing_panics(self._folder):
            side = self.tokenizer.truncation_side
            self.tokenizer.truncation_side = side if cut is None else cut.side
            try:
                return [list(ids) for ids in self.tokenizer(texts, **options)["input_ids"]]
            finally:
                self.tokenizer.truncation_side = side

    def encode_pairs(
        self, pairs: list[tuple[str, str]], cut: Truncation | None = None
    ) -> list[tuple[list[int], int | None]]:
        options: dict[str, object] = {"return_token_type_ids": True}
        if cut is not None:
            _check_room(cut, self.tokenizer.num_special_tokens_to_add(pair=True))
            options |= {"truncation": True, "max_length": cut.limit}
        with self._lock, refusing_panics(self._folder):
            found = self.tokenizer([first for first, _ in pairs], [second for _, second in pairs], **options)
        types = found.get("token_type_ids") or [[]] * len(pairs)
        return [(list(ids), _second(kinds)) for ids, kinds in zip(found["input_ids"], types, strict=True)]

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        with refusing_panics(self._folder):
            text = self.tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return str(text)

    def _check_files(self, folder: Path) -> None:
        """Raise FileNotFoundError if all vocabulary files are missing: transformers would make an empty tokenizer."""
        names = set(self.tokenizer.vocab_files_names.values())
        if names and not any((folder / name).exists() for name in names):
            raise FileNotFoundError(f"none of {sorted(names)}")


def _second(types: list[int]) -> int | None:
    """Where the tokens of type 1 begin; None: there are none."""
    return types.index(1) if 1 in types else None


def _check_room(cut: Truncation, special: int) -> int:
    """How many other tokens there is room for beside `special` ones."""
    if cut.limit < special:
        right = f"at least {special}, as many as the tokenizer adds special tokens"
        refuse("the number of tokens that tokenization_kwargs cuts to", cut.limit, right)
    return cut.limit - special


def definition_of(fast: FastTokenizer, folder: Path) -> str:
    """tokenizer.json as the library writes it, which takes memory for every id up to the largest.

    Raises:
        CheckpointError: an id is too large.
    """
    largest = max(fast.get_vocab(with_added_tokens=True).values(), default=0)
    if largest > _LARGEST_ID:
        raise CheckpointError(
            f"the tokenizer of {folder} has a token of id {largest}; the largest usable is {_LARGEST_ID}."
        )
    with refusing_panics(folder):
        return fast.to_str()


@contextmanager
def refusing_panics(folder: Path) -> Iterator[None]:
    """Raise `CheckpointError` where the tokenizers library panics."""
    try:
        yield
    except BaseException as error:
        _refuse_panic(error, folder)
        raise


def _refuse_panic(error: BaseException, folder: Path) -> None:
    """Panics are known by name: their class cannot be imported."""
    if type(error).__name__ == "PanicException":
        if "ThreadPoolBuildError" in str(error):
            raise OutOfMemoryError(
                "the tokenizer cannot start its threads: the system allows this process no more of them, or no more "
                "memory (ulimit -u, ulimit -v); raise the limit, or set RAYON_NUM_THREADS=1 in the environment."
            ) from error
        raise CheckpointError(f"the tokenizer of {folder} fails: {clip(str(error))}") from error
