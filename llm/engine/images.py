"""Pictures in prompts: read, processed, and counted against the prompt's placeholders, before anything runs.

A picture stands in a prompt as a run of tokens. Blocks of the KV cache find them by reserved ids, made of the SHA-256
of pixels and settings: everything else that schedules, counts or shares tokens needs to know nothing of pictures.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import NoReturn

import numpy as np
import torch

from llm.base.text import show
from llm.base.types import JsonObject
from llm.config.engine import EngineArgs
from llm.engine.prompts import ParsedPrompt, PromptMedia
from llm.engine.rows import Row
from llm.engine.step import RowImage, RowImages
from llm.errors import LLMError, ValidationError
from llm.loading.model_files import check_small_files, read_json
from llm.models.vision.both_ways import sees_both_ways, spans_of
from llm.models.vision.processor import FILES, PictureProcessor, Processed
from llm.text.images import NAME, MediaLimits, Picture, bad_picture, from_url, read_picture
from llm.text.tokenizer import Tokenizer

# Ids from here on are no vocabulary's.
RESERVED = 1 << 62
# Of processed pictures that are kept until their prompt runs; others are processed again.
_KEPT_BYTES = 1 << 30
_KEPT_UUIDS = 1 << 16
_THREADS = 4
# Keys of config.json with the tokens that stand for images, or begin one.
_TOKENS = ("image_token_id", "image_token_index", "boi_token_index")
_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class _Read:
    """A picture that was read and processed."""

    picture: Picture
    key: bytes
    text: str
    ids: list[int]


class PromptImages:
    """What a model with a vision tower makes of the pictures of prompts.

    Args:
        folder: the model's, with the files of its processor.
        config: the decoded config.json.
        options: `mm_processor_kwargs` of all prompts.
    """

    def __init__(
        self,
        folder: Path,
        config: JsonObject,
        make_tokenizer: Callable[[], Tokenizer] | None,
        limits: MediaLimits,
        options: Mapping[str, object],
    ) -> None:
        self._folder, self._config, self._make_tokenizer = folder, config, make_tokenizer
        self.limits = limits
        self._options = dict(options)
        self._has_axes = "mrope_section" in json.dumps(config, default=str)
        self._both_ways = sees_both_ways(config)
        text = config.get("text_config")
        window = text.get("sliding_window") if isinstance(text, Mapping) else None
        self._window = window if isinstance(window, int) else 0
        self._kept: OrderedDict[bytes, Processed] = OrderedDict()
        self._kept_bytes = 0
        self._lock = Lock()
        self._uuids: OrderedDict[str, Picture] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    @cached_property
    def processor(self) -> PictureProcessor:
        """Raises `ValidationError` where there is none."""
        if self._make_tokenizer is None:
            raise ValidationError("images need a tokenizer: skip_tokenizer_init=True.", parameter=NAME)
        try:
            settings = {name: self._settings(name) for name in FILES}
            check_small_files(self._folder)
            return PictureProcessor(self._folder, self._config, self._make_tokenizer().huggingface(), settings)
        except LLMError as error:
            raise ValidationError(str(error), parameter=NAME) from error

    def _settings(self, name: str) -> JsonObject:
        path = self._folder / name
        return read_json(path, limit_bytes=_CONFIG_BYTES) if path.exists() else {}

    def tokens_of(self, width: int, height: int) -> int:
        """How many tokens an image of this size has in a prompt."""
        from PIL import Image

        self.limits.check_size(width, height)
        return len(self.processor.ids(self.processor.process(Image.new("RGB", (width, height)), self._options).text))

    def start(self, media: PromptMedia) -> Future[list[_Read]]:
        """Read and process the pictures of a prompt, in a thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="llm-images")
        return self._pool.submit(self._read_all, media)

    def prompt_of_row(self, prompt: object, sources: list[object]) -> object:
        """A job's prompt with images, which stand before its text if that says no place for them."""
        if not isinstance(prompt, str):
            raise bad_picture(f"the prompt of a row with images must be a text, got {type(prompt).__name__}")
        mark = self.processor.placeholder
        text = prompt if mark in prompt else mark * len(sources) + prompt
        return {"prompt": text, "multi_modal_data": {"image": sources}}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def ids_of_text(self, text: str, read: Sequence[_Read], *, plain: bool) -> list[int]:
        """Of a prompt's text, with the tokens of pictures in the places of their placeholders.

        plain: the text has its special tokens.
        """
        self._check_count(text.count(self.processor.placeholder), len(read))
        return self.processor.whole_ids(text, [item.text for item in read], plain=plain)

    def ids_of(self, token_ids: Sequence[int], read: Sequence[_Read]) -> list[int]:
        """The same of token ids, where each picture is one placeholder; or all of its tokens already."""
        processor, wanted = self.processor, sum(self._count(item) for item in read)
        places = [index for index, token in enumerate(token_ids) if token == processor.placeholder_id]
        if len(places) != len(read) and token_ids.count(processor.token_id) == wanted:
            return list(token_ids)
        self._check_count(len(places), len(read))
        found, start = [], 0
        for place, item in zip(places, read, strict=True):
            found += [*token_ids[start:place], *item.ids]
            start = place + 1
        return [*found, *token_ids[start:]]

    def row_images(self, token_ids: Sequence[int], read: Sequence[_Read], options: Mapping[str, object]) -> RowImages:
        """Where the pictures are in the prompt's tokens.

        Raises:
            ValidationError: the tokens of the pictures are not those in the prompt.
        """
        ids = np.array(token_ids, dtype=np.int64)
        places = np.flatnonzero(ids == self.processor.token_id)
        counts = [self._count(item) for item in read]
        if len(places) != sum(counts):
            raise bad_picture(
                f"the prompt has {len(places)} tokens for images and its {len(read)} images need {sum(counts)}"
            )
        reserved, images, start = np.zeros(len(ids), dtype=np.int64), [], 0
        for item, count in zip(read, counts, strict=True):
            own = places[start : start + count]
            reserved[own] = reserved_ids(item.key, count)
            images.append(RowImage(item.key, own, partial(self._inputs, item.picture, len(read), dict(options))))
            start += count
        if self._has_axes:
            self._check_apart(images)
        spans = spans_of(self._both_ways, places, len(ids))
        longest = max((end - first for first, end in spans), default=0)
        if self._window and longest > self._window:
            raise bad_picture(
                f"{longest} tokens of the prompt see each other in both directions, and the model's window has "
                f"{self._window}; pass smaller images"
            )
        if self._both_ways == "prompt" and images:  # what a token sees depends on all of the prompt
            whole = hashlib.sha256(reserved.tobytes() + ids.tobytes()).digest()
            reserved = reserved_ids(whole, len(ids))
        return RowImages(tuple(images), reserved, spans)

    def check_none(self, token_ids: Sequence[int]) -> None:
        """Raises `ValidationError` for a prompt without pictures that has tokens of some."""
        for own in filter(None, map(self._config.get, _TOKENS)):
            if own in token_ids:
                raise bad_picture(
                    f"the prompt has {token_ids.count(own)} of the model's tokens for images (id {own}) and no image; "
                    "pass it in multi_modal_data, or leave the placeholder out"
                )

    def _check_apart(self, images: Sequence[RowImage]) -> None:
        for first, second in pairwise(images):
            if first.places[-1] + 1 == second.places[0]:
                raise bad_picture(
                    "two images of the prompt have no token between them, which this model's positions need; write the "
                    "tokens that its chat template puts around an image"
                )

    def options_of(self, media: PromptMedia) -> dict[str, object]:
        return {**self._options, **media.options}

    def _count(self, item: _Read) -> int:
        return item.ids.count(self.processor.token_id)

    def _check_count(self, placeholders: int, pictures: int) -> None:
        if placeholders != pictures:
            raise bad_picture(
                f"the prompt has {placeholders} of the placeholder {show(self.processor.placeholder)} and "
                f"{pictures} image{'' if pictures == 1 else 's'}; it must have one for each"
            )

    def _read_all(self, media: PromptMedia) -> list[_Read]:
        self.limits.check_count("image", len(media.images))
        options, found = self.options_of(media), []
        for index, source in enumerate(media.images):
            try:
                found.append(self._read(source, media.uuid(index), options, len(media.images)))
            except ValidationError as error:
                where = f"image {index}: " if len(media.images) > 1 else ""
                raise ValidationError(f"{where}{error}", parameter=NAME) from error
        return found

    def _read(self, source: object, uuid: str | None, options: Mapping[str, object], count: int) -> _Read:
        picture, image = self._known(uuid), None
        if source is not None:
            before = picture
            picture, image = read_picture(source, self.limits)
            if before is not None and before.digest != picture.digest:
                raise bad_picture(f"the uuid {show(uuid)} was that of another image before")
        if picture is None:
            _refuse_nothing(uuid)
        if uuid is not None:
            self._remember(uuid, picture)
        key = self._key(picture, count, options)
        processed = self._found(key)
        if processed is None:
            image = picture.open(self.limits) if image is None else image
            processed = self.processor.process(image, options, count)
            self._keep(key, processed)
        read = _Read(picture, key, processed.text, self.processor.ids(processed.text))
        if not self._count(read):
            raise bad_picture(
                f"{self._config.get('model_type')} is not read: its processor writes no token where features would be"
            )
        return read

    def _key(self, picture: Picture, count: int, options: Mapping[str, object]) -> bytes:
        alone = count == 1
        return hashlib.sha256(picture.digest + self.processor.digest_of({**options, " alone": alone})).digest()

    def _inputs(self, picture: Picture, count: int, options: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """Of the tower; made again if they are not kept."""
        processed = self._found(self._key(picture, count, options))
        return (processed or self.processor.process(picture.open(self.limits), options, count)).inputs

    def _found(self, key: bytes) -> Processed | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def _keep(self, key: bytes, processed: Processed) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = processed
            self._kept_bytes += processed.nbytes
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes

    def _known(self, uuid: str | None) -> Picture | None:
        with self._lock:
            return None if uuid is None else self._uuids.get(uuid)

    def _remember(self, uuid: str, picture: Picture) -> None:
        with self._lock:
            self._uuids[uuid] = picture
            if len(self._uuids) > _KEPT_UUIDS:
                self._uuids.popitem(last=False)


def images_of(folder: Path, config: JsonObject, args: EngineArgs) -> PromptImages | None:
    """What reads pictures for the model in this folder; None: it has no vision tower. Raises `ValidationError` for
    limits."""
    limits = MediaLimits.of(args.limit_mm_per_prompt, args.allowed_local_media_path)
    if not isinstance(config.get("vision_config"), Mapping):
        return None
    make = None if args.skip_tokenizer_init else partial(Tokenizer, folder, args.chat_template)
    return PromptImages(folder, config, make, limits, args.mm_processor_kwargs or {})


def without_images(
    conversation: Sequence[JsonObject], images: PromptImages | None
) -> tuple[list[JsonObject], PromptMedia | None]:
    """A conversation with `{"type": "image"}` in the places of its images, and these; None: it has none.

    Raises:
        ValidationError: a part is no image, or is one where the model reads none.
    """
    sources: list[object] = []
    uuids: list[str | None] = []

    def part_of(part: object) -> object:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _NOT_READ:
            raise ValidationError(
                f"a part of type {kind!r} is not read; of a video pass the frames, as parts of type 'image_pil'.",
                parameter="messages",
            )
        if not isinstance(part, Mapping) or kind not in ("image_url", "image_pil", "image"):
            return part
        if images is None:
            raise ValidationError(f"{NO_TOWER}.", parameter="messages")
        uuid = part.get("uuid")
        if not isinstance(uuid, str | None):
            raise bad_picture(f"the uuid of an image must be a string, got {type(uuid).__name__}")
        sources.append(_source_of(part.get(kind), str(kind), uuid, images.limits))
        uuids.append(uuid)
        return {"type": "image", "text": images.processor.placeholder}

    found = []
    for message in conversation:
        content = message.get("content")
        parts = [part_of(part) for part in content] if isinstance(content, list | tuple) else content
        found.append({**message, "content": parts} if "content" in message else dict(message))
    if not sources:
        return found, None
    return found, PromptMedia(sources, tuple(uuids) if any(uuids) else (), is_rendered=True)


_NOT_READ = ("video", "video_url", "input_audio", "audio", "audio_url", "image_embeds", "file")
NO_TOWER = "this model reads no images: its checkpoint has no vision tower"


def _source_of(value: object, kind: str, uuid: str | None, limits: MediaLimits) -> object:
    if kind == "image_url" and value is not None:
        return from_url(value.get("url") if isinstance(value, Mapping) else value, limits)
    if value is None and uuid is None:
        raise bad_picture(f"a part of type {kind!r} must have the image under {kind!r}")
    return from_url(value, limits) if isinstance(value, str) else value


def with_images(messages: Sequence[JsonObject], sources: Sequence[object]) -> list[JsonObject]:
    """A conversation with images before the text of its first message of a user."""
    parts: list[object] = [{"type": "image_pil", "image_pil": source} for source in sources]
    found, is_placed = [], False
    for message in messages:
        if not is_placed and message.get("role") == "user":
            content, is_placed = message.get("content"), True
            listed = content if isinstance(content, list) else [{"type": "text", "text": content}]
            message = {**message, "content": [*parts, *listed]}
        found.append(message)
    if not is_placed:
        raise ValidationError("a conversation with images needs a message of the user.", parameter="messages")
    return found


class PicturesOfCall:
    """The pictures of a call's prompts. `plain`: their texts have their special tokens.

    Attributes:
        parsed: the prompts, with the tokens of pictures in the places of placeholders; or with an error.
    """

    def __init__(self, images: PromptImages | None, parsed: Sequence[ParsedPrompt], *, plain: bool = False) -> None:
        self._images, self._plain = images, plain
        self._read: dict[int, list[_Read]] = {}
        self.parsed = list(parsed)
        asked = {index: item.media for index, item in enumerate(parsed) if item.media is not None and not item.error}
        if images is None:
            for index in asked:
                self._refuse(index, bad_picture(NO_TOWER))
            return
        started = {index: images.start(media) for index, media in asked.items()}
        for index, future in started.items():
            try:
                self._take(images, index, asked[index], future.result())
            except ValidationError as error:
                self._refuse(index, error)

    def _take(self, images: PromptImages, index: int, media: PromptMedia, read: list[_Read]) -> None:
        item = self.parsed[index]
        self._read[index] = read
        if item.token_ids is not None:
            self.parsed[index] = item._replace(token_ids=images.ids_of(item.token_ids, read))
        elif item.text is not None:
            plain = self._plain or media.is_rendered
            self.parsed[index] = item._replace(token_ids=images.ids_of_text(item.text, read, plain=plain))

    def _refuse(self, index: int, error: ValidationError) -> None:
        self.parsed[index] = self.parsed[index]._replace(token_ids=[], error=error)

    def give(self, row: Row, index: int) -> None:
        """Tell the row of its pictures. Raises `ValidationError`."""
        media = self.parsed[index].media
        if self._images is None:
            return
        if media is None:
            self._images.check_none(row.token_ids)
            return
        if row.num_dropped_tokens:
            raise bad_picture("a prompt with images cannot be cut; raise max_model_len, or pass smaller images")
        row.images = self._images.row_images(row.token_ids, self._read[index], self._images.options_of(media))


def _refuse_nothing(uuid: str | None) -> NoReturn:
    if uuid is None:
        raise bad_picture("an image is None, which only one with a uuid of multi_modal_uuids may be")
    raise bad_picture(f"an image is None, and no image with the uuid {show(uuid)} came before")


def reserved_ids(key: bytes, count: int) -> np.ndarray:
    """int64 [count], of 62 bits each: together they are the key."""
    stream = hashlib.shake_256(key).digest(8 * count)
    return (np.frombuffer(stream, dtype="<u8") % RESERVED + RESERVED).astype(np.int64)


def no_images(media: Iterable[PromptMedia | None], what: str) -> None:
    """Raise `ValidationError` if a prompt has media."""
    if any(item is not None for item in media):
        raise bad_picture(f"{what} takes no images; LLM.generate and LLM.chat do")
