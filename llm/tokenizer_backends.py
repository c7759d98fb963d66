"""The libraries behind `Tokenizer`: tokenizers for a tokenizer.json, transformers for everything else.

Owns how their failures are told. tokenizers is Rust: where it gives up it panics, with an exception that no
`except Exception` catches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tokenizers import Tokenizer as FastTokenizer

from llm.base.checks import refuse
from llm.base.text import clip, show
from llm.base.types import JsonObject
from llm.errors import CheckpointError, OutOfMemoryError
from llm.loading.model_files import check_model_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        with self._cutting(cut, self.tokenizer.num_special_tokens_to_add(False) if special else 0) as fast:
            return [encoding.ids for encoding in fast.encode_batch(texts, add_special_tokens=special)]

    def encode_pairs(
        self, pairs: list[tuple[str, str]], cut: Truncation | None = None
    ) -> list[tuple[list[int], int | None]]:
        with self._cutting(cut, self.tokenizer.num_special_tokens_to_add(True)) as fast:
            return [(encoding.ids, _second(encoding.type_ids)) for encoding in fast.encode_batch(pairs)]

    @contextmanager
    def _cutting(self, cut: Truncation | None, special: int) -> Iterator[FastTokenizer]:
        """The tokenizer, which cuts texts during a call; `special`: tokens that it adds to each."""
        fast = self.tokenizer
        if cut is not None:
            _check_room(cut, special)
            fast.enable_truncation(cut.limit, direction=cut.side)
        try:
            with refusing_panics(self._folder):
                yield fast
        finally:
            fast.no_truncation()

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

    def vocab_size(self) -> int:
        return len(self.tokenizer)

    def encode(self, texts: list[str], special: bool, cut: Truncation | None = None) -> list[list[int]]:
        if not texts:
            return []
        options: dict[str, object] = {"add_special_tokens": special}
        side = self.tokenizer.truncation_side
        if cut is not None:
            _check_room(cut, self.tokenizer.num_special_tokens_to_add() if special else 0)
            options |= {"truncation": True, "max_length": cut.limit}
            self.tokenizer.truncation_side = cut.side
        try:
            with refusing_panics(self._folder):
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
        with refusing_panics(self._folder):
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


def _check_room(cut: Truncation, special: int) -> None:
    if cut.limit < special:
        right = f"at least {special}, as many as the tokenizer adds special tokens"
        refuse("the number of tokens that tokenization_kwargs cuts to", cut.limit, right)


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
