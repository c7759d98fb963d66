"""Pictures in prompts: read, processed, and counted against the prompt's placeholders, before anything runs.

A picture stands in a prompt as a run of tokens. Blocks of the KV cache find them by reserved ids, made of the SHA-256
of pixels and settings: everything else that schedules, counts or shares tokens needs to know nothing of pictures.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from threading import Condition, Lock
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np
import torch

from llm.base.text import show
from llm.base.types import JsonObject
from llm.config.engine import LLMArgs
from llm.engine.image_embeds import EMBEDS, ImageEmbeds, embeds_of
from llm.engine.prompts import ParsedPrompt, PromptMedia
from llm.engine.rows import Row
from llm.engine.step import RowImage, RowImages
from llm.errors import LLMError, UnsupportedModelError, ValidationError
from llm.loading.model_files import check_small_files, read_json
from llm.models.vision.inputs import Processed, sees_both_ways, spans_of
from llm.models.vision.processor import FILES, IMAGE, VIDEO, PictureProcessor
from llm.models.vision.tower import tower_has_axes
from llm.text.images import NAME, MediaLimits, Picture, bad_picture, from_url, read_picture
from llm.text.tokenizer import Tokenizer
from llm.text.videos import Frames, Video, frames_of, frames_of_url, read_video

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
# Keys of config.json with the tokens that stand for images and videos, or begin one.
_TOKENS = {
    **dict.fromkeys(("image_token_id", "image_token_index", "boi_token_index"), "image"),
    **dict.fromkeys(("video_token_id", "video_token_index"), "video"),
}
_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class _Read:
    """A picture or a video that was read.

    Attributes:
        source: what features are made of.
        text, ids: what stands for it in the prompt; text is None where it is not known, of features that the user
            computed.
        token_id: of those of `ids` that have features; indicators: the others.
        options: `mm_processor_kwargs`.
    """

    kind: str
    source: Picture | Video | ImageEmbeds
    key: bytes
    text: str | None
    ids: list[int]
    token_id: int
    options: Mapping[str, object] = field(default_factory=dict)
    indicators: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return self.count_in(self.ids)

    def count_in(self, ids: Sequence[int]) -> int:
        return sum(ids.count(token) for token in (self.token_id, *self.indicators))


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
        self._texts: OrderedDict[tuple[tuple[object, ...], bytes], str] = OrderedDict()
        self._lock = Lock()
        self._uuids: OrderedDict[str, Picture | Video] = OrderedDict()
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

    def placeholder_of(self, kind: str) -> str:
        """Raises `ValidationError` where the kind is not read."""
        try:
            return self.processor.placeholder_of(kind)
        except UnsupportedModelError as error:
            raise ValidationError(str(error), parameter=NAME) from error

    def wrapped(self, kind: str) -> str:
        """The placeholder, with the tokens that chat templates put around it where config.json names these."""
        names = [f"{own}_{place}_token_id" for place in ("start", "end") for own in (kind, "vision")]
        around = [self._config.get(first, self._config.get(second)) for first, second in (names[:2], names[2:])]
        first, last = (self.processor.text_of_id(token) if isinstance(token, int) else "" for token in around)
        mark = self.placeholder_of(kind)
        return f"{first}{mark}{last}" if first and last else mark

    def start(self, media: PromptMedia) -> Future[list[_Read]]:
        """Read and process the pictures of a prompt, in a thread."""
        return self._submit(partial(self._read_all, media))

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="llm-images")
            return self._pool.submit(work)

    def prompt_of_row(self, prompt: object, sources: list[object], videos: Sequence[Frames] = ()) -> object:
        """A job's prompt with images and videos, which stand before its text if that says no place for them."""
        if not isinstance(prompt, str):
            raise bad_picture(f"the prompt of a row with images must be a text, got {type(prompt).__name__}")
        text = prompt
        for kind, given in ((VIDEO, videos), (IMAGE, sources)):
            if given and self.placeholder_of(kind) not in prompt:
                text = self.wrapped(kind) * len(given) + text
        return {"prompt": text, "multi_modal_data": {IMAGE: sources, VIDEO: list(videos) or None}}

    def close(self) -> None:
        self._ahead.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def ids_of_text(self, text: str, read: Sequence[_Read], *, plain: bool) -> tuple[list[int], list[_Read]]:
        """Of a prompt's text, with the tokens of pictures in the places of their placeholders; and these in their
        order.

        plain: the text has its special tokens.
        """
        text = self.processor.with_durations(
            text, [item.source.timing for item in read if isinstance(item.source, Video)]
        )
        kinds = self.processor.kinds_in(text, {item.kind for item in read})
        ordered = self._ordered(read, kinds)
        return self.processor.whole_ids(text, self._texts_of(ordered), kinds, plain=plain), ordered

    def _texts_of(self, read: Sequence[_Read]) -> list[str]:
        before = self._before(read)
        texts = [text + item.text for text, item in zip(before, read, strict=True) if item.text is not None]
        if len(texts) < len(read):
            kind = self._config.get("model_type")
            raise bad_picture(
                f"{kind} has other tokens between those of an image: with image_embeds pass prompt_token_ids that have "
                "all tokens of the images"
            )
        return texts

    def _before(self, read: Sequence[_Read]) -> list[str]:
        """What stands before the text of each, which are in the order of the prompt."""
        seen = Counter[str]()
        found = []
        for item in read:
            found.append(self.processor.before(seen[item.kind], item.options))
            seen[item.kind] += 1
        return found

    def ids_of(self, token_ids: Sequence[int], read: Sequence[_Read]) -> tuple[list[int], list[_Read]]:
        """The same of token ids, where each picture is one placeholder; or all of its tokens already."""
        asked = {item.kind for item in read}
        by_id = {self._placeholder_id(kind): kind for kind in asked}
        wanted: dict[int, int] = {}
        counts: dict[int, int] = {}
        for item in read:
            wanted[item.token_id] = wanted.get(item.token_id, 0) + item.count
            counts[item.token_id] = item.count_in(token_ids)
        one_each = set(wanted) == set(by_id) and sum(wanted.values()) == len(read)  # then a placeholder is both
        if not one_each and counts == wanted:
            if len(wanted) < len(asked):
                raise bad_picture(
                    "images and videos of this model have the same tokens: pass a text, or ids with a placeholder each"
                )
            return list(token_ids), list(read)
        places = [index for index, token in enumerate(token_ids) if token in by_id]
        ordered = self._ordered(read, [by_id[token_ids[place]] for place in places])
        self._texts_of(read)
        found, start = [], 0
        for place, item, before in zip(places, ordered, self._before(ordered), strict=True):
            found += [*token_ids[start:place], *self.processor.ids(before), *item.ids]
            start = place + 1
        return [*found, *token_ids[start:]], ordered

    def _placeholder_id(self, kind: str) -> int:
        (found,) = self.processor.ids(self.processor.placeholder_of(kind))
        return found

    def _ordered(self, read: Sequence[_Read], kinds: Sequence[str]) -> list[_Read]:
        """As the placeholders are, which have these kinds. Raises `ValidationError` unless each has one."""
        for kind in dict.fromkeys(item.kind for item in read):
            count, wanted = kinds.count(kind), sum(item.kind == kind for item in read)
            if count != wanted:
                raise bad_picture(
                    f"the prompt has {count} of the placeholder {show(self.processor.placeholder_of(kind))} and "
                    f"{_counted(wanted, kind)}; it must have one for each"
                )
        left = {kind: iter([item for item in read if item.kind == kind]) for kind in set(kinds)}
        return [next(left[kind]) for kind in kinds]

    def row_images(self, token_ids: Sequence[int], read: Sequence[_Read]) -> RowImages:
        """Where the pictures are in the prompt's tokens.

        Args:
            read: in the order of the prompt.

        Raises:
            ValidationError: the tokens of the pictures are not those in the prompt.
        """
        ids = np.array(token_ids, dtype=np.int64)
        left = {
            token: np.flatnonzero(np.isin(ids, (token, *self.processor.indicators_beside(token))))
            for token in self.processor.feature_ids
        }
        for token, own in left.items():
            wanted = sum(item.count for item in read if item.token_id == token)
            if len(own) and not wanted:
                _refuse_tokens(len(own), self._kind_of(token), token)
            if len(own) != wanted:
                kind = next(item.kind for item in read if item.token_id == token)
                listed = _counted(sum(item.token_id == token for item in read), kind)
                raise bad_picture(f"the prompt has {len(own)} tokens for {kind}s and its {listed} need {wanted}")
        reserved, images = np.zeros(len(ids), dtype=np.int64), []
        for item in read:
            own, left[item.token_id] = np.split(left[item.token_id], [item.count])
            reserved[own] = reserved_ids(item.key, item.count)
            images.append(RowImage(item.key, own, self._loading(item)))
        places = np.flatnonzero(reserved)
        if self._has_axes:
            self._check_apart(ids, images)
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

    def _kind_of(self, token: int) -> str:
        return next((kind for key, kind in _TOKENS.items() if self._config.get(key) == token), IMAGE)

    def check_none(self, token_ids: Sequence[int]) -> None:
        """Raises `ValidationError` for a prompt without pictures that has tokens of some."""
        for key, kind in _TOKENS.items():
            own = self._config.get(key)
            if own and own in token_ids:
                _refuse_tokens(token_ids.count(own), kind, own)

    def _check_apart(self, ids: np.ndarray, images: Sequence[RowImage]) -> None:
        for first, second in pairwise(images):
            if first.places[-1] + 1 == second.places[0] and ids[first.places[0]] == ids[second.places[0]]:
                raise bad_picture(
                    "two images of the prompt have no token between them, which this model's positions need; write the "
                    "tokens that its chat template puts around an image"
                )

    def _options_for(self, kind: str, media: PromptMedia) -> dict[str, object]:
        """The `mm_processor_kwargs` of one kind; those of the other are left out, where there is something of it."""
        others = self.processor.options_of(VIDEO if kind == IMAGE else IMAGE) - self.processor.options_of(kind)
        both = bool(media.images and media.videos)
        given = {**self._options, **media.options}
        return {
            name: value for name, value in given.items() if name not in others or (name in media.options and not both)
        }

    def _read_all(self, media: PromptMedia) -> list[_Read]:
        found: list[_Read] = []
        for kind, sources, uuids in ((IMAGE, media.images, media.uuids), (VIDEO, media.videos, media.video_uuids)):
            self.limits.check_count(kind, len(sources))
            options = self._options_for(kind, media) if sources else {}
            for index, source in enumerate(sources):
                try:
                    if isinstance(source, ImageEmbeds):
                        found.append(self._read_embeds(source))
                    else:
                        found.append(self._read(kind, source, uuids[index] if uuids else None, options))
                except ValidationError as error:
                    where = f"{kind} {index}: " if len(sources) > 1 else ""
                    raise ValidationError(f"{where}{error}", parameter=NAME) from error
        return found

    def _read(self, kind: str, source: object, uuid: str | None, options: Mapping[str, object]) -> _Read:
        picture, content = self._known(uuid), None
        if source is not None:
            before = picture
            picture, content = self._opened(source)
            if before is not None and before.digest != picture.digest:
                raise bad_picture(f"the uuid {show(uuid)} was that of another {kind} before")
        if picture is None or isinstance(picture, Video) != (kind == VIDEO):
            _refuse_nothing(kind, uuid)
        if uuid is not None:
            self._remember(uuid, picture)
        settings = self.processor.digest_of(options)
        key = hashlib.sha256(picture.digest + settings).digest()
        text = self._text_of(picture, content, key, settings, options)
        ids = self.processor.ids(text)
        token = self.processor.token_id_in(ids, kind)
        read = _Read(kind, picture, key, text, ids, token, options, self.processor.indicators_beside(token))
        return self._checked(read)

    def _opened(self, source: object) -> tuple[Picture | Video, Image | list[Image]]:
        if not isinstance(source, Frames):
            return read_picture(source, self.limits)
        try:
            self.processor.videos  # before frames are decoded  # noqa: B018
        except LLMError as error:
            raise ValidationError(str(error), parameter=NAME) from error
        return read_video(source, self.limits)

    def _processed(
        self, picture: Picture | Video, content: Image | list[Image] | None, options: Mapping[str, object]
    ) -> Processed:
        content = picture.open(self.limits) if content is None else content
        if isinstance(picture, Video) and isinstance(content, list):
            return self.processor.videos.process(content, picture.timing, options)
        return self.processor.process(content, options)  # type: ignore[arg-type]

    def _text_of(
        self,
        picture: Picture | Video,
        content: Image | list[Image] | None,
        key: bytes,
        settings: bytes,
        options: Mapping[str, object],
    ) -> str:
        """What stands for the picture in a prompt: pictures of one size have the same."""
        of_pixels = isinstance(picture, Video) and self.processor.videos.writes_pixels
        place = (picture.digest,) if of_pixels else picture.size, settings
        with self._lock:
            text = self._texts.get(place)
        if text is None:
            processed = self._processed(picture, content, options)
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
        if self.processor.indicators:
            raise bad_picture("image_embeds of this model are not read: its tower makes more than an image's features")
        if self._has_axes and embeds.grid is None:
            raise bad_picture("image_embeds of this model need image_grid_thw: its tokens have three positions")
        count, token = len(embeds.rows), self.processor.token_id
        if self._around is None:
            return _Read(IMAGE, embeds, embeds.key, None, [token] * count, token)
        text = self._token.join([self._around[0], *[""] * (count - 1), self._around[1]])
        return _Read(IMAGE, embeds, embeds.key, text, self.processor.ids(text), token)

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
        if not read.count:
            raise bad_picture(
                f"{self._config.get('model_type')} is not read: its processor writes no token where features would be"
            )
        return read

    def _loading(self, item: _Read) -> Callable[[], dict[str, torch.Tensor]]:
        """What makes the tower's inputs; begun before its prompt runs, where memory allows."""
        source = item.source
        if isinstance(source, ImageEmbeds):
            return source.inputs

        def processed() -> Processed:
            found = self._processed(source, None, item.options)
            if found.text != item.text:
                raise LLMError(f"the processor cuts images of {source.size} in more than one way.")
            return found

        self._ahead.want(item.key, processed)
        return lambda: self._ahead.take(item.key, processed).inputs

    def _known(self, uuid: str | None) -> Picture | Video | None:
        with self._lock:
            return None if uuid is None else self._uuids.get(uuid)

    def _remember(self, uuid: str, picture: Picture | Video) -> None:
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


def images_of(folder: Path, config: JsonObject, args: LLMArgs, hidden_size: int = 0) -> PromptImages | None:
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
    sources: dict[str, list[object]] = {IMAGE: [], VIDEO: []}
    uuids: dict[str, list[str | None]] = {IMAGE: [], VIDEO: []}

    def part_of(part: object) -> object:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _NOT_READ:
            raise ValidationError(f"a part of type {kind!r} is not read: images and videos are.", parameter="messages")
        if not isinstance(part, Mapping) or kind not in ("image_url", "image_pil", IMAGE, EMBEDS, *_VIDEOS):
            return part
        if images is None:
            raise ValidationError(f"{NO_TOWER}.", parameter="messages")
        uuid = part.get("uuid")
        if not isinstance(uuid, str | None):
            raise bad_picture(f"the uuid of an image must be a string, got {type(uuid).__name__}")
        own = VIDEO if kind in _VIDEOS else IMAGE
        uuids[own].append(uuid)
        if kind == EMBEDS:
            sources[own].append(_one_embeds(part.get(kind)))
        elif own == VIDEO:
            sources[own].append(_frames_of_part(part, str(kind), uuid, images.limits))
        else:
            sources[own].append(_source_of(part.get(kind), str(kind), uuid, images.limits))
        return {"type": own, "text": images.placeholder_of(own)}

    found = []
    for message in conversation:
        content = message.get("content")
        parts = [part_of(part) for part in content] if isinstance(content, list | tuple) else content
        found.append({**message, "content": parts} if "content" in message else dict(message))
    if not any(sources.values()):
        return found, None
    named = {kind: tuple(given) if any(given) else () for kind, given in uuids.items()}
    return found, PromptMedia(
        sources[IMAGE], named[IMAGE], is_rendered=True, videos=sources[VIDEO], video_uuids=named[VIDEO]
    )


def content_prompt(parts: object, images: PromptImages | None) -> ParsedPrompt:
    """The prompt of vLLM's `{"content": [part, ...]}`: its images and videos, and below them its texts.

    Raises:
        ValidationError: a part is no text, image or video.
    """
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    if not isinstance(parts, list | tuple) or not parts:
        raise bad_picture("'content' must be a list of parts such as {'type': 'text', 'text': ...}, not empty")
    [message], media = without_images([{"content": parts}], images)
    marks, texts = [], []
    for part in message["content"]:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else ("text", part)
        if kind not in ("text", IMAGE, VIDEO) or not isinstance(text, str):
            raise bad_picture(f"a part of 'content' must be a text, an image or a video, got one of type {show(kind)}")
        if kind == "text":
            texts.append(text)
        elif images is not None:
            marks.append(images.wrapped(kind))
    return ParsedPrompt("\n".join([*marks, *texts]), None, media=media and replace(media, is_rendered=False))


def joined_media(first: PromptMedia | None, second: PromptMedia | None) -> PromptMedia | None:
    """The images and videos of two texts, one behind the other in a prompt that has its special tokens."""
    given = [media for media in (first, second) if media is not None]
    if not given:
        return None
    images = [item for media in given for item in _with_uuids(media.images, media.uuids)]
    videos = [item for media in given for item in _with_uuids(media.videos, media.video_uuids)]
    return PromptMedia(
        [source for source, _ in images],
        tuple(uuid for _, uuid in images),
        {name: value for media in given for name, value in media.options.items()},
        is_rendered=True,
        videos=[source for source, _ in videos],
        video_uuids=tuple(uuid for _, uuid in videos),
    )


def _with_uuids(sources: Sequence[object], uuids: Sequence[str | None]) -> list[tuple[object, str | None]]:
    return list(zip(sources, uuids or [None] * len(sources), strict=True))


_NOT_READ = ("input_audio", "audio", "audio_url", "file")
_VIDEOS = (VIDEO, "video_url")
NO_TOWER = "this model reads no images: its checkpoint has no vision tower"


def _one_embeds(value: object) -> ImageEmbeds:
    found = embeds_of(value if isinstance(value, Mapping) else {EMBEDS: value})
    if len(found) != 1:
        raise bad_picture(f"a part of type {EMBEDS!r} must have the features of one image, has those of {len(found)}")
    return found[0]


def _frames_of_part(part: Mapping[str, object], kind: str, uuid: str | None, limits: MediaLimits) -> Frames | None:
    value, metadata = part.get(kind), part.get("metadata")
    known = ("type", kind, "metadata", "uuid")
    unknown = next((key for key, own in part.items() if key not in known and own is not None), None)
    if unknown is not None:
        raise bad_picture(
            f"a part of type {kind!r} has no key {show(unknown)}; it takes {kind}, uuid, and metadata such as "
            "{'fps': 2.0}"
        )
    if value is None and uuid is not None:
        return None
    if value is None:
        raise bad_picture(f"a part of type {kind!r} must have the video under {kind!r}")
    if kind == VIDEO and not isinstance(value, str):
        frames = frames_of(value, limits)
    else:
        frames = frames_of_url(value.get("url") if isinstance(value, Mapping) else value, limits)
    return frames if metadata is None else Frames(frames.sources, metadata)


def _source_of(value: object, kind: str, uuid: str | None, limits: MediaLimits) -> object:
    if kind == "image_url" and value is not None:
        return from_url(value.get("url") if isinstance(value, Mapping) else value, limits)
    if value is None and uuid is None:
        raise bad_picture(f"a part of type {kind!r} must have the image under {kind!r}")
    return from_url(value, limits) if isinstance(value, str) else value


def with_images(
    messages: Sequence[JsonObject], sources: Sequence[object], videos: Sequence[Frames] = ()
) -> list[JsonObject]:
    """A conversation with images, and behind them videos, before the text of its first message of a user."""
    parts: list[object] = [{"type": "image_pil", "image_pil": source} for source in sources]
    parts += [{"type": VIDEO, VIDEO: video} for video in videos]
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
    """The pictures of a call's prompts.

    Args:
        plain: the prompts' texts have their special tokens.

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
            ids, self._read[index] = images.ids_of(item.token_ids, read)
            self.parsed[index] = item._replace(token_ids=ids)
        elif item.text is not None:
            plain = self._plain or media.is_rendered
            ids, self._read[index] = images.ids_of_text(item.text, read, plain=plain)
            self.parsed[index] = item._replace(token_ids=ids)

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
        row.images = self._images.row_images(row.token_ids, self._read[index])


def _refuse_nothing(kind: str, uuid: str | None) -> NoReturn:
    if uuid is None:
        raise bad_picture(f"{_an(kind)} is None, which only one with a uuid of multi_modal_uuids may be")
    raise bad_picture(f"{_an(kind)} is None, and no {kind} with the uuid {show(uuid)} came before")


def _refuse_tokens(count: int, kind: str, token: int) -> NoReturn:
    raise bad_picture(
        f"the prompt has {count} of the model's tokens for {kind}s (id {token}) and no {kind}; pass it in "
        "multi_modal_data, or leave the placeholder out"
    )


def _an(kind: str) -> str:
    return f"an {kind}" if kind == IMAGE else f"a {kind}"


def _counted(count: int, kind: str) -> str:
    return f"{count} {kind}{'' if count == 1 else 's'}"


def reserved_ids(key: bytes, count: int) -> np.ndarray:
    """int64 [count], of 62 bits each: together they are the key."""
    stream = hashlib.shake_256(key).digest(8 * count)
    return (np.frombuffer(stream, dtype="<u8") % RESERVED + RESERVED).astype(np.int64)


def no_images(media: Iterable[PromptMedia | None], what: str) -> None:
    """Raise `ValidationError` if a prompt has media."""
    if any(item is not None for item in media):
        raise bad_picture(f"{what} takes no images; LLM.generate and LLM.chat do")
