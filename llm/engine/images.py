"""Pictures in prompts: read, processed, and counted against the prompt's placeholders, before anything runs.

A picture stands in a prompt as a run of tokens. Blocks of the KV cache find them by reserved ids, made of the SHA-256
of pixels and settings: everything else that schedules, counts or shares tokens needs to know nothing of pictures.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from threading import Condition, Lock
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np
import torch

from llm.base.text import show
from llm.base.types import JsonObject
from llm.config.engine import EngineArgs
from llm.engine.image_embeds import EMBEDS, ImageEmbeds, embeds_of
from llm.engine.prompts import ParsedPrompt, PromptMedia
from llm.engine.rows import Row
from llm.engine.step import RowImage, RowImages
from llm.errors import LLMError, ValidationError
from llm.loading.model_files import check_small_files, read_json
from llm.models.vision.both_ways import sees_both_ways, spans_of
from llm.models.vision.processor import FILES, PictureProcessor, Processed
from llm.models.vision.tower import tower_has_axes
from llm.text.images import NAME, MediaLimits, Picture, bad_picture, from_url, read_picture
from llm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")
logger = logging.getLogger("llm")

# Of a picture whose tokens show what stands around and between them.
_USUAL_SIZE = (448, 336)
# Ids from here on are no vocabulary's.
RESERVED = 1 << 62
# Of pictures that are processed before their prompts run.
_AHEAD_BYTES = 1 << 29
_KEPT_UUIDS = 1 << 16
_KEPT_TEXTS = 1 << 14
_TAKEN = 1 << 12
_THREADS = 4
# Keys of config.json with the tokens that stand for images, or begin one.
_TOKENS = ("image_token_id", "image_token_index", "boi_token_index")
_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class _Read:
    """A picture that was read. `text`, `ids`: what stands for it in the prompt; `source`: what features are made of.

    text: None: not known, of features that the user computed.
    """

    source: Picture | ImageEmbeds
    key: bytes
    text: str | None
    ids: list[int]


class PromptImages:
    """What a model with a vision tower makes of the pictures of prompts.

    Args:
        folder: the model's, with the files of its processor.
        config: the decoded config.json.
        options: `mm_processor_kwargs` of all prompts.
        hidden_size: of the language model.
    """

    def __init__(
        self,
        folder: Path,
        config: JsonObject,
        make_tokenizer: Callable[[], Tokenizer] | None,
        limits: MediaLimits,
        options: Mapping[str, object],
        hidden_size: int = 0,
    ) -> None:
        self._folder, self._config, self._make_tokenizer = folder, config, make_tokenizer
        self.limits = limits
        self._options = dict(options)
        self._both_ways = sees_both_ways(config)
        self._hidden_size = hidden_size
        deep = config["vision_config"].get("deepstack_visual_indexes") or ()
        self._depth = len(deep) if isinstance(deep, list | tuple) else 0
        text = config.get("text_config")
        window = text.get("sliding_window") if isinstance(text, Mapping) else None
        self._window = window if isinstance(window, int) else 0
        self._texts: OrderedDict[tuple[tuple[int, int], bytes], str] = OrderedDict()
        self._lock = Lock()
        self._uuids: OrderedDict[str, Picture] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._ahead = Ahead(self._submit)

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

    @cached_property
    def _has_axes(self) -> bool:
        return tower_has_axes(str(self._config.get("model_type")))

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
        return self._submit(partial(self._read_all, media))

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="llm-images")
            return self._pool.submit(work)

    def prompt_of_row(self, prompt: object, sources: list[object]) -> object:
        """A job's prompt with images, which stand before its text if that says no place for them."""
        if not isinstance(prompt, str):
            raise bad_picture(f"the prompt of a row with images must be a text, got {type(prompt).__name__}")
        mark = self.processor.placeholder
        text = prompt if mark in prompt else mark * len(sources) + prompt
        return {"prompt": text, "multi_modal_data": {"image": sources}}

    def close(self) -> None:
        self._ahead.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def ids_of_text(self, text: str, read: Sequence[_Read], *, plain: bool) -> list[int]:
        """Of a prompt's text, with the tokens of pictures in the places of their placeholders.

        plain: the text has its special tokens.
        """
        self._check_count(text.count(self.processor.placeholder), len(read))
        return self.processor.whole_ids(text, self._texts_of(read), plain=plain)

    def _texts_of(self, read: Sequence[_Read]) -> list[str]:
        texts = [item.text for item in read if item.text is not None]
        if len(texts) < len(read):
            kind = self._config.get("model_type")
            raise bad_picture(
                f"{kind} has other tokens between those of an image: with image_embeds pass prompt_token_ids that have "
                "all tokens of the images"
            )
        return texts

    def ids_of(self, token_ids: Sequence[int], read: Sequence[_Read]) -> list[int]:
        """The same of token ids, where each picture is one placeholder; or all of its tokens already."""
        processor, wanted = self.processor, sum(self._count(item) for item in read)
        places = [index for index, token in enumerate(token_ids) if token == processor.placeholder_id]
        is_own = processor.token_id == processor.placeholder_id  # then one is both
        if token_ids.count(processor.token_id) == wanted and not (is_own and wanted == len(read)):
            return list(token_ids)
        self._check_count(len(places), len(read))
        self._texts_of(read)
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
            images.append(RowImage(item.key, own, self._loading(item, dict(options))))
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
                own = self._read_embeds(source) if isinstance(source, ImageEmbeds) else None
                found.append(own or self._read(source, media.uuid(index), options))
            except ValidationError as error:
                where = f"image {index}: " if len(media.images) > 1 else ""
                raise ValidationError(f"{where}{error}", parameter=NAME) from error
        return found

    def _read(self, source: object, uuid: str | None, options: Mapping[str, object]) -> _Read:
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
        settings = self.processor.digest_of(options)
        key = hashlib.sha256(picture.digest + settings).digest()
        text = self._text_of(picture, image, key, settings, options)
        return self._checked(_Read(picture, key, text, self.processor.ids(text)))

    def _text_of(
        self, picture: Picture, image: Image | None, key: bytes, settings: bytes, options: Mapping[str, object]
    ) -> str:
        """What stands for the picture in a prompt: pictures of one size have the same."""
        place = picture.size, settings
        with self._lock:
            text = self._texts.get(place)
        if text is None:
            processed = self.processor.process(picture.open(self.limits) if image is None else image, options)
            self._ahead.keep(key, processed)
            text = processed.text
            with self._lock:
                self._texts[place] = text
                if len(self._texts) > _KEPT_TEXTS:
                    self._texts.popitem(last=False)
        return text

    def _read_embeds(self, embeds: ImageEmbeds) -> _Read:
        """Features that the user computed, each in the place of one of the model's tokens for images."""
        embeds.check(self._hidden_size, self._depth)
        if self._has_axes and embeds.grid is None:
            raise bad_picture("image_embeds of this model need image_grid_thw: its tokens have three positions")
        count = len(embeds.rows)
        if self._around is None:
            return _Read(embeds, embeds.key, None, [self.processor.token_id] * count)
        text = self._token.join([self._around[0], *[""] * (count - 1), self._around[1]])
        return _Read(embeds, embeds.key, text, self.processor.ids(text))

    @cached_property
    def _token(self) -> str:
        found = self.processor.text_of_id(self.processor.token_id)
        if self.processor.ids(found) != [self.processor.token_id]:
            raise bad_picture("image_embeds are not read: the model's token for images has no text")
        return found

    @cached_property
    def _around(self) -> tuple[str, str] | None:
        """What stands before and after a picture's tokens; None: there is something between them too."""
        from PIL import Image

        text = self.processor.process(Image.new("RGB", _USUAL_SIZE), self._options).text
        first, *between, last = text.split(self._token)
        return None if any(between) else (first, last)

    def _checked(self, read: _Read) -> _Read:
        if not self._count(read):
            raise bad_picture(
                f"{self._config.get('model_type')} is not read: its processor writes no token where features would be"
            )
        return read

    def _loading(self, item: _Read, options: Mapping[str, object]) -> Callable[[], dict[str, torch.Tensor]]:
        """What makes the tower's inputs; begun before its prompt runs, where memory allows."""
        source = item.source
        if isinstance(source, ImageEmbeds):
            return source.inputs

        def processed() -> Processed:
            found = self.processor.process(source.open(self.limits), options)
            if found.text != item.text:
                raise LLMError(f"the processor cuts images of {source.size} in more than one way.")
            return found

        self._ahead.want(item.key, processed)
        return lambda: self._ahead.take(item.key, processed).inputs

    def _known(self, uuid: str | None) -> Picture | None:
        with self._lock:
            return None if uuid is None else self._uuids.get(uuid)

    def _remember(self, uuid: str, picture: Picture) -> None:
        with self._lock:
            self._uuids[uuid] = picture
            if len(self._uuids) > _KEPT_UUIDS:
                self._uuids.popitem(last=False)


class Ahead:
    """Pictures that are processed in threads before their prompts run, in the order of these, in bounded memory.

    Args:
        submit: runs work in a thread.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], object]) -> None:
        self._submit = submit
        self._lock = Condition()
        self._wanted: OrderedDict[bytes, Callable[[], Processed]] = OrderedDict()
        self._running: set[bytes] = set()
        self._kept: OrderedDict[bytes, Processed] = OrderedDict()
        self._bytes = 0
        self._taken: OrderedDict[bytes, None] = OrderedDict()  # whose features the runner may still have

    def want(self, key: bytes, work: Callable[[], Processed]) -> None:
        with self._lock:
            if not any(key in known for known in (self._kept, self._running, self._taken)):
                self._wanted[key] = work
        self._start()

    def keep(self, key: bytes, processed: Processed) -> None:
        """What was processed already, if there is room."""
        with self._lock:
            if key not in self._kept and self._bytes < _AHEAD_BYTES:
                self._add(key, processed)

    def take(self, key: bytes, work: Callable[[], Processed]) -> Processed:
        """The picture, which is not kept any longer; processed now if it is not yet."""
        with self._lock:
            while key in self._running:
                self._lock.wait()
            found = self._kept.pop(key, None)
            self._wanted.pop(key, None)
            self._taken[key] = None
            if len(self._taken) > _TAKEN:
                self._taken.popitem(last=False)
            if found is not None:
                self._bytes -= found.nbytes
            elif self._kept and self._bytes >= _AHEAD_BYTES:  # what prompts that were dropped left behind
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        self._start()
        return work() if found is None else found

    def close(self) -> None:
        with self._lock:
            self._wanted.clear()
            self._kept.clear()
            self._bytes = 0

    def _start(self) -> None:
        with self._lock:
            while self._wanted and len(self._running) < _THREADS and self._bytes < _AHEAD_BYTES:
                key, work = self._wanted.popitem(last=False)
                self._running.add(key)
                self._submit(partial(self._process, key, work))

    def _process(self, key: bytes, work: Callable[[], Processed]) -> None:
        processed = None
        try:
            processed = work()
        except LLMError:  # `take` meets it again
            logger.debug("a picture was not processed ahead", exc_info=True)
        finally:
            with self._lock:
                self._running.discard(key)
                if processed is not None:
                    self._add(key, processed)
                self._lock.notify_all()
        self._start()

    def _add(self, key: bytes, processed: Processed) -> None:
        self._kept[key] = processed
        self._bytes += processed.nbytes


def images_of(folder: Path, config: JsonObject, args: EngineArgs, hidden_size: int = 0) -> PromptImages | None:
    """What reads pictures for the model in this folder; None: it has no vision tower. Raises `ValidationError` for
    limits."""
    limits = MediaLimits.of(args.limit_mm_per_prompt, args.allowed_local_media_path)
    if not isinstance(config.get("vision_config"), Mapping):
        return None
    make = None if args.skip_tokenizer_init else partial(Tokenizer, folder, args.chat_template)
    return PromptImages(folder, config, make, limits, args.mm_processor_kwargs or {}, hidden_size)


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
        if not isinstance(part, Mapping) or kind not in ("image_url", "image_pil", "image", EMBEDS):
            return part
        if images is None:
            raise ValidationError(f"{NO_TOWER}.", parameter="messages")
        uuid = part.get("uuid")
        if not isinstance(uuid, str | None):
            raise bad_picture(f"the uuid of an image must be a string, got {type(uuid).__name__}")
        if kind == EMBEDS:
            sources.append(_one_embeds(part.get(kind)))
        else:
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


_NOT_READ = ("video", "video_url", "input_audio", "audio", "audio_url", "file")
NO_TOWER = "this model reads no images: its checkpoint has no vision tower"


def _one_embeds(value: object) -> ImageEmbeds:
    found = embeds_of(value if isinstance(value, Mapping) else {EMBEDS: value})
    if len(found) != 1:
        raise bad_picture(f"a part of type {EMBEDS!r} must have the features of one image, has those of {len(found)}")
    return found[0]


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
