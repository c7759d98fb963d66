"""Videos from what users pass: the frames, each a picture, and when they were taken."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

from llm.base.text import clip, show
from llm.errors import ValidationError, nearest
from llm.models.vision.inputs import Timing
from llm.text.images import (
    MOST_FRAMES,
    NAME,
    Foreign,
    MediaLimits,
    Picture,
    bad_picture,
    cell_images,
    from_base64,
    from_url,
    read_picture,
)

if TYPE_CHECKING:
    from PIL.Image import Image

# Of all frames together.
MOST_PIXELS = 1 << 28
# vLLM's names of what is known of a video beside its frames; the last two say how these were chosen.
_KEYS = ("fps", "duration", "total_num_frames", "frames_indices", "video_backend", "do_sample_frames")
# vLLM's URL of frames, and the frames per second that it takes these to be.
_FRAMES_URL = "data:video/jpeg;base64"
_FPS_OF_URL = 2.0
VIDEO_KEYS = ("video", "metadata")
NO_FILES = "files of videos are not read: pass the list of the frames, such as ffmpeg -i FILE -vf fps=2 %04d.jpg writes"


def timing_of(given: object, frames: int) -> Timing:
    """From what a user passes beside so many frames. Raises `ValidationError`."""
    if not isinstance(given, Mapping | None):
        raise bad_picture(f"the metadata of a video must be a dict such as {{'fps': 2.0}}, got {show(given)}")
    known = {key: value for key, value in (given or {}).items() if value is not None}
    for key in known:
        if key not in _KEYS:
            hint = nearest(str(key), _KEYS)
            raise bad_picture(f"the metadata of a video has no key {key!r}; it takes {', '.join(_KEYS)}{hint}")
    if known.get("do_sample_frames"):
        raise bad_picture("do_sample_frames must be False: all frames that are passed are read")
    indices = _indices(known.get("frames_indices"), frames)
    total = known.get("total_num_frames", indices[-1] + 1)
    if type(total) is not int or total <= indices[-1]:
        raise bad_picture(f"total_num_frames must be more than the last of the frames, got {show(total)}")
    return Timing(_positive(known, "fps"), indices, total, _positive(known, "duration"))


def _positive(known: Mapping[str, object], key: str) -> float | None:
    value = known.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < float("inf"):
        raise bad_picture(f"{key} of a video must be a positive number, got {show(value)}")
    return float(value)


def _indices(given: Foreign, frames: int) -> tuple[int, ...]:
    if given is None:
        return tuple(range(frames))
    listed = given.tolist() if hasattr(given, "tolist") else given
    right = isinstance(listed, list | tuple) and all(type(index) is int and index >= 0 for index in listed)
    if not right or len(listed) != frames or list(listed) != sorted(listed):
        raise bad_picture(f"frames_indices must be {frames} rising integers, one for each frame")
    return tuple(listed)


@dataclass(frozen=True)
class Frames:
    """A video as the user passed it."""

    sources: list[object]
    metadata: object = None


@dataclass(frozen=True)
class Video:
    """A video whose frames were read once.

    Attributes:
        digest: SHA-256 of all frames' pixels and of their timing.
    """

    frames: tuple[Picture, ...]
    timing: Timing
    digest: bytes

    @property
    def size(self) -> tuple[object, ...]:
        """Two videos with this in common have the same tokens."""
        return (*self.frames[0].size, self.timing)

    def open(self, limits: MediaLimits) -> list[Image]:
        return [frame.open(limits) for frame in self.frames]


def read_video(given: Frames, limits: MediaLimits) -> tuple[Video, list[Image]]:
    """Raises `ValidationError` for frames that are none, too many, or of several sizes."""
    count = len(given.sources)
    _check_count(count, limits)
    frames: list[Picture] = []
    images: list[Image] = []
    for index, source in enumerate(given.sources):
        try:
            frame, image = read_picture(source, limits)
            if count * image.width * image.height > MOST_PIXELS:
                raise bad_picture(f"{count} frames of {image.width}x{image.height} are more than {MOST_PIXELS} pixels")
            if frames and frame.size != frames[0].size:
                sizes = " and ".join("x".join(map(str, size)) for size in (frames[0].size, frame.size))
                raise bad_picture(f"the frames of a video must have one size, have {sizes}")
        except ValidationError as error:
            raise ValidationError(f"frame {index}: {error}", parameter=NAME) from error
        frames.append(frame)
        images.append(image)
    timing = timing_of(given.metadata, count)
    head = json.dumps([timing.fps, timing.indices, timing.total, timing.duration]).encode()
    digest = hashlib.sha256(b"video" + head + b"".join(frame.digest for frame in frames)).digest()
    return Video(tuple(frames), timing, digest), images


def list_videos(given: object) -> list[object]:
    """What `multi_modal_data` has under "video": frames, or (frames, metadata), or a list of such; None where a uuid
    names one. Raises `ValidationError` for what is none."""
    if given is None:
        return []
    if isinstance(given, list) and given and all(item is None or _is_video(item) for item in given):
        return [None if item is None else frames_of(item) for item in given]
    return [frames_of(given)]


def frames_of(given: object, limits: MediaLimits | None = None) -> Frames:
    """limits: frames that are strings are URLs in a conversation."""
    if isinstance(given, Frames):
        return given
    metadata: object = None
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping | None):
        given, metadata = given
    batch: Foreign = given
    if isinstance(given, str | bytes) or not (isinstance(given, Sequence) or getattr(batch, "ndim", 0) == 4):
        raise bad_picture(
            f"a video must be the list of its frames, or (frames, metadata), got {type(given).__name__}; {NO_FILES}"
        )
    sources = list(batch)
    if limits is not None:
        _check_count(len(sources), limits)
        sources = _each(sources, lambda source: from_url(source, limits) if isinstance(source, str) else source)
    return Frames(sources, metadata)


def frames_of_url(url: object, limits: MediaLimits) -> Frames:
    """The frames of `data:video/jpeg;base64,FRAME,FRAME,...`, two of each second, as in vLLM."""
    if not isinstance(url, str):
        raise bad_picture(f"the URL of a video must be a string, got {type(url).__name__}")
    head, comma, data = url.partition(",")
    if not comma or head.lower() != _FRAMES_URL:
        raise bad_picture(
            f"the URL of a video must be {_FRAMES_URL},FRAME,FRAME,... with frames in base64, got "
            f"{show(clip(url, 60))}; {NO_FILES}"
        )
    _check_count(data.count(",") + 1, limits)
    return Frames(_each(data.split(","), from_base64), {"fps": _FPS_OF_URL})


def cell_videos(value: object, folder: Path, limits: MediaLimits) -> list[Frames]:
    """The videos in a cell of a table: the list of the frames of one, each as `cell_images` takes images; vLLM's URL of
    frames; an object with such a list as "video" and with "metadata"; or a list of such videos.

    folder: as for `cell_images`.
    """
    if value is None or value == "":
        return []
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, str) and value[:5].lower() == "data:":
        return [frames_of_url(value, limits)]
    if isinstance(value, Mapping) and "video" in value:
        unknown = next((key for key, own in value.items() if key not in VIDEO_KEYS and own is not None), None)
        if unknown is not None:
            raise bad_picture(f"a video has the keys {', '.join(VIDEO_KEYS)}, got {show(unknown)}")
        found = cell_videos(value["video"], folder, limits)
        if len(found) != 1:
            raise bad_picture('"video" must have the frames of one video')
        metadata = value.get("metadata")
        return found if metadata is None else [Frames(found[0].sources, metadata)]
    if not isinstance(value, list | tuple):
        got = show(clip(value, 60)) if isinstance(value, str) else type(value).__name__
        raise bad_picture(f"a video must be the list of its frames, got {got}; {NO_FILES}")
    if value and all(map(_is_cell_of_video, value)):
        return [video for item in value for video in cell_videos(item, folder, limits)]
    _check_count(len(value), limits)

    def frame(item: object) -> object:
        found = cell_images(item, folder, limits)
        if len(found) != 1:
            raise bad_picture("it must be one image, and is none" if not found else "it must be one image")
        return found[0]

    return [Frames(_each(value, frame))]


def _is_cell_of_video(item: object) -> bool:
    """Whether an item of a list is a video, and no frame."""
    is_url = isinstance(item, str) and item[: len(_FRAMES_URL)].lower() == _FRAMES_URL
    return is_url or isinstance(item, list | tuple) or (isinstance(item, Mapping) and "video" in item)


def _each(frames: Iterable[Foreign], read: Callable[[Foreign], object]) -> list[object]:
    """What `read` makes of each frame; its errors say which."""
    found = []
    for index, frame in enumerate(frames):
        try:
            found.append(read(frame))
        except ValidationError as error:
            raise ValidationError(f"frame {index}: {error}", parameter=NAME) from error
    return found


def _check_count(count: int, limits: MediaLimits) -> None:
    most = limits.frames or MOST_FRAMES
    if not count:
        raise bad_picture("a video must have frames, got none")
    if count > most:
        raise bad_picture(f"the video has {count} frames and at most {most} are read")


def _is_video(item: Foreign) -> bool:
    """Whether an item of a list is a video, and no frame."""
    return isinstance(item, list | tuple | Frames) or getattr(item, "ndim", 0) == 4
