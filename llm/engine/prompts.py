"""The forms in which users pass prompts, conversations and `tokenization_kwargs`, as texts and token ids.

What needs a model (tokenizer, vocabulary, context length) is checked in `preprocess.py` and `rows.py`.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import NamedTuple, NoReturn

from llm.base.checks import check_flag, check_integer, refuse
from llm.base.suggestions import NOT_TEXT
from llm.base.text import show
from llm.base.types import JsonObject
from llm.engine.image_embeds import embeds_of, is_embeds
from llm.errors import ValidationError, nearest
from llm.text.images import list_images
from llm.text.tokenizer import Truncation
from llm.text.videos import list_videos


@dataclass(frozen=True)
class PromptMedia:
    """What a prompt has besides its text.

    Attributes:
        images: as the user passed them; None where `uuids` name one that came before.
        uuids: the user's names of them; (): none are named.
        videos, video_uuids: the same of videos.
        options: `mm_processor_kwargs`.
        is_rendered: the prompt's text has its special tokens.
    """

    images: list[object]
    uuids: tuple[str | None, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    is_rendered: bool = False
    videos: list[object] = field(default_factory=list)
    video_uuids: tuple[str | None, ...] = ()


class ParsedPrompt(NamedTuple):
    """A prompt's text, and its token ids or None if the text is not tokenized yet.

    Only prompts with equal `cache_salt` share cached prefixes. One with an `error` is not run, and has no tokens.
    """

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None
    error: ValidationError | None = None
    num_dropped_tokens: int = 0
    media: PromptMedia | None = None


def list_prompts(prompts: object) -> list[object]:
    """One prompt or many, as a list. A string, dict or list of integers is one prompt; a table's column is a list."""
    prompts = _plain(_column(prompts))
    if isinstance(prompts, str | Mapping) or _is_token_list(prompts):
        return [prompts]
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes | bytearray):
        return list(prompts)
    refuse("prompts", type(prompts).__name__, "a string, token ids, a dict, or a list of those")


def iterate_prompts(prompts: object) -> Iterator[object]:
    """As `list_prompts`, for any iterable, which is read as it is iterated; of a text file the lines."""
    prompts = _column(prompts)
    if isinstance(prompts, io.TextIOBase):
        return (line.removesuffix("\n") for line in prompts)
    if isinstance(prompts, Iterable) and not isinstance(prompts, Sequence | Mapping) and not hasattr(prompts, "tolist"):
        return iter(prompts)
    return iter(list_prompts(prompts))


def list_conversations(messages: object) -> list[list[JsonObject]]:
    """One conversation or many, as a list of them; raises `ValidationError`."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        _refuse_messages(f"it is of type {type(messages).__name__!r}")
    listed = [messages] if messages and all(isinstance(message, Mapping) for message in messages) else messages
    return [_read_conversation(item, index) for index, item in enumerate(listed)]


def _read_conversation(item: object, index: int) -> list[JsonObject]:
    if not isinstance(item, list | tuple) or not all(isinstance(message, Mapping) for message in item):
        _refuse_messages(f"number {index} is of type {type(item).__name__!r}")
    if not item:
        _refuse_messages(f"conversation {index} is empty")
    for message in item:
        for key in ("role", "content") if message.get("role") in ("user", "system") else ("role",):
            if key not in message:
                _refuse_messages(f"a message of conversation {index} has no {key!r}")
    return [dict(message) for message in item]


def _refuse_messages(fault: str) -> NoReturn:
    raise ValidationError(
        f"messages must be a list of {{'role': ..., 'content': ...}}, or a list of such lists: {fault}.",
        parameter="messages",
    )


def _column(value: object) -> object:
    """The column "prompt" of a table of pandas, polars, pyarrow or datasets, or its only one. Else the value."""
    names = getattr(value, "column_names", None) or getattr(value, "columns", None)
    if names is None or isinstance(value, Mapping) or not hasattr(value, "__getitem__"):
        return value
    names = [str(name) for name in names]
    if "prompt" in names or len(names) == 1:
        return value["prompt" if "prompt" in names else names[0]]
    refuse(
        "prompts", f"a table with the columns {', '.join(names[:8])}", 'a table with a column "prompt", or one column'
    )


def _plain(value: object) -> object:
    """One-dimensional arrays, series, columns and tensors as lists, and pyarrow's scalars as Python's; anything else
    (such as 2-D token ids) unchanged."""
    if hasattr(value, "to_pylist"):  # pyarrow
        return value.to_pylist()
    if hasattr(value, "as_py"):
        return value.as_py()
    if hasattr(value, "to_list") and not hasattr(value, "tolist"):  # polars
        return value.to_list()
    return value.tolist() if hasattr(value, "tolist") and getattr(value, "ndim", None) == 1 else value


def _is_token_list(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_integer(item) for item in value)


def _is_integer(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def parse_prompt(prompt: object) -> ParsedPrompt:
    """Parse one prompt; raises `ValidationError` if it is none."""
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        return ParsedPrompt(check_text(prompt), None)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    if isinstance(prompt, list | tuple):
        return ParsedPrompt(None, _token_ids("a prompt", prompt))
    raise _bad_prompt("a prompt", type(prompt).__name__, "a string, a list of token ids, or a dict")


def _parse_mapping(prompt: Mapping[str, object]) -> ParsedPrompt:
    if "role" in prompt:
        raise ValidationError(
            "a chat message is no prompt; pass the conversation to LLM.chat.", parameter="prompts", value=prompt
        )
    given = {key for key, value in prompt.items() if value is not None}
    unknown = sorted(map(str, given - {"prompt", "prompt_token_ids", "cache_salt", *_MEDIA_KEYS}))
    if unknown and unknown[0] in NOT_TEXT:
        raise ValidationError(
            f"{unknown[0]!r} in a prompt is refused: {NOT_TEXT[unknown[0]]}.", parameter="prompts", value=unknown[0]
        )
    if unknown:
        raise _bad_prompt("the keys of a prompt", unknown[0], "'prompt' or 'prompt_token_ids' and no other")
    text, token_ids = prompt.get("prompt"), _plain(prompt.get("prompt_token_ids"))
    if text is not None and not isinstance(text, str):
        raise _bad_prompt("'prompt'", type(text).__name__, "a string")
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise _bad_prompt("'cache_salt'", type(salt).__name__, "a string that is not empty")
    media = _parse_media(prompt)
    if token_ids is not None:
        return ParsedPrompt(text, _token_ids("'prompt_token_ids'", token_ids), salt, media=media)
    if text is None:
        raise _bad_prompt("the keys of a prompt", "a dict without text and ids", "'prompt' or 'prompt_token_ids'")
    return ParsedPrompt(check_text(text), None, salt, media=media)


def with_processor_options(prompts: object, options: object) -> object:
    """The prompts, with a call's `mm_processor_kwargs` where they have images; their own come before it."""
    if options is None:
        return prompts
    if not isinstance(options, Mapping):
        refuse("mm_processor_kwargs", options, "a dict of the image processor's arguments, or None")
    found: list[object] = []
    for prompt in list_prompts(prompts):
        item = prompt
        if isinstance(prompt, ParsedPrompt) and prompt.media is not None:
            item = prompt._replace(media=replace(prompt.media, options={**options, **prompt.media.options}))
        elif isinstance(prompt, Mapping) and prompt.get("multi_modal_data") is not None:
            own = prompt.get("mm_processor_kwargs")
            if isinstance(own, Mapping | None):
                item = {**prompt, "mm_processor_kwargs": {**options, **(own or {})}}
        found.append(item)
    return found


_MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
_NOT_READ = "images and the frames of videos are read, and nothing else"


def _parse_media(prompt: Mapping[str, object]) -> PromptMedia | None:
    data, uuids, options = (prompt.get(key) for key in _MEDIA_KEYS)
    for key, value in zip(_MEDIA_KEYS, (data, uuids, options), strict=True):
        if value is not None and not isinstance(value, Mapping):
            raise _bad_prompt(f"{key!r} in a prompt", type(value).__name__, "a dict such as {'image': ...}")
    given = {key: value for key, value in (data or {}).items() if value is not None}  # type: ignore[attr-defined]
    names = dict(uuids or {})  # type: ignore[call-overload]
    for key in (*given, *names):
        if key not in ("image", "video"):
            raise _bad_prompt("the keys of 'multi_modal_data'", repr(key), f"'image' and 'video': {_NOT_READ}")
    images: list[object] = []
    for item in list_images(given.get("image")):
        images += embeds_of(item) if isinstance(item, Mapping) and is_embeds(item) else [item]
    images, named = _named("image", images, names.get("image"))
    videos, named_videos = _named("video", list_videos(given.get("video")), names.get("video"))
    if not images and not videos:
        return None
    return PromptMedia(images, named, dict(options or {}), videos=videos, video_uuids=named_videos)  # type: ignore[call-overload]


def _named(kind: str, items: list[object], names: object) -> tuple[list[object], tuple[str | None, ...]]:
    """The items, None in the places of those that have a uuid alone, and the uuids."""
    listed = [names] if isinstance(names, str) else list(names or ())  # type: ignore[call-overload]
    if not all(isinstance(item, str | None) for item in listed):
        raise _bad_prompt("'multi_modal_uuids'", show(names), f"a string or None for each {kind}")
    if listed and not items:
        items = [None] * len(listed)
    if listed and len(listed) != len(items):
        raise _bad_prompt("'multi_modal_uuids'", f"{len(listed)}", f"as many as there are {kind}s ({len(items)})")
    return items, tuple(listed)


def _token_ids(name: str, value: object) -> list[int]:
    if not isinstance(value, list | tuple):
        raise _bad_prompt(name, type(value).__name__, "a list of integers")
    for item in value:
        if not _is_integer(item):
            raise _bad_prompt(name, f"a list with a {type(item).__name__}", "a string or a list of token ids")
    return [int(item) for item in value]


def check_text(text: str) -> str:
    """`text`; raises for unpaired surrogates, as in strings from file names or broken decoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at position {error.start}"
        raise _bad_prompt("a prompt", found, "text that UTF-8 can express") from None
    return text


def _bad_prompt(what: str, value: object, right: str) -> ValidationError:
    return ValidationError(f"{what} must be {right}, got {value}.", parameter="prompts", value=value)


_NAME = "tokenization_kwargs"
_KEYS = ("add_special_tokens", "truncation", "max_length", "truncate_prompt_tokens", "truncation_side")
_INSTEAD = "tokenize with LLM.get_tokenizer() and pass token ids for anything else"


# --- How texts become ids. ---


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
