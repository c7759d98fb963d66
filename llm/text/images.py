"""Pictures from what users pass: files, bytes, PIL images, arrays, tensors; as PIL images in the RGB mode.

Every limit is checked before memory is allocated: compressed bytes, pixels, frames. A picture that cannot be read is
one sentence. Pillow is needed, `pip install 'offline-llm[vision]'`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import io
import json
import os
import re
import stat
import struct
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from llm.base.checks import check_integer, refuse
from llm.base.text import clip, show
from llm.errors import ValidationError

if TYPE_CHECKING:
    from PIL.Image import Image

# The type of Pillow's and NumPy's objects.
Foreign: TypeAlias = Any

NAME = "multi_modal_data"
MOST_BYTES = 64 << 20
MOST_PIXELS = 1 << 26
MOST_FRAMES = 4096
# Longer URLs are looked at as data alone; a path is no longer than this.
_MOST_PATH = 4096
# Base64 of the smallest files is longer; so are few paths that have its letters alone.
_LEAST_BASE64 = 512
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
# Pillow's other readers are rarely used, and some run other programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "AVIF")
_WHITE = (255, 255, 255, 255)
# Pillow's images may not be decoded by two threads at once; an image has the lock of its id.
_LOCKS = tuple(Lock() for _ in range(64))


@dataclass(frozen=True)
class MediaLimits:
    """`limit_mm_per_prompt` and where local files may be.

    Attributes:
        counts: most items of a prompt, by "image" and "video"; no entry: no limit.
        width, height: most pixels of a picture's side; None: no limit but that of `MOST_PIXELS`.
        frames: most frames of a video; None: `MOST_FRAMES`.
        folder: files named by URLs in conversations must be below it; None: there are none.
    """

    counts: Mapping[str, int]
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    folder: Path | None = None

    @classmethod
    def of(cls, given: object, folder: str | Path | None = None) -> MediaLimits:
        """Raises `ValidationError` for what is no such limit."""
        name = "limit_mm_per_prompt"
        place = None
        if folder:
            place = Path(folder).expanduser().resolve()
            if not place.is_dir():
                refuse("allowed_local_media_path", str(folder), "a folder")
        if given is None:
            return cls({}, folder=place)
        if not isinstance(given, Mapping):
            refuse(name, given, "a dict such as {'image': 4}")
        counts: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for kind, limit in given.items():
            if kind not in ("image", "video"):
                refuse(name, kind, "of 'image' and 'video'")
            options = limit if isinstance(limit, Mapping) else {"count": limit}
            for key, value in options.items():
                if key not in ("count", "width", "height", *(("num_frames",) if kind == "video" else ())):
                    refuse(f"{name}[{kind!r}]", key, "count, width, height, or num_frames of a video")
                check_integer(f"{name}[{kind!r}][{key!r}]", value, 0 if key == "count" else 1)
                if key == "count":
                    counts[kind] = value
                else:
                    sizes[key] = min(value, sizes.get(key, value))
        return cls(counts, sizes.get("width"), sizes.get("height"), sizes.get("num_frames"), place)

    def check_count(self, kind: str, count: int) -> None:
        limit = self.counts.get(kind)
        if limit is not None and count > limit:
            raise bad_picture(f"the prompt has {count} {kind}s and limit_mm_per_prompt allows {limit}")

    def check_size(self, width: int, height: int) -> None:
        """Before pixels are decoded."""
        if width < 1 or height < 1:
            raise bad_picture(f"the image has no pixels ({width}x{height})")
        if width * height > MOST_PIXELS:
            raise bad_picture(f"the image has {width}x{height} pixels and at most {MOST_PIXELS} are read")
        most = self.width or width, self.height or height
        if width > most[0] or height > most[1]:
            raise bad_picture(
                f"the image has {width}x{height} pixels and limit_mm_per_prompt allows {most[0]}x{most[1]}"
            )


@dataclass(frozen=True)
class Picture:
    """A picture whose pixels were read once. `source` is what they are read from again; user's objects must not change.

    Attributes:
        digest: SHA-256 of size and pixels in the RGB mode.
    """

    source: object
    digest: bytes
    size: tuple[int, int]

    def open(self, limits: MediaLimits) -> Image:
        """The pixels, mode RGB. Raises `ValidationError` if they are others than they were."""
        image = read_image(self.source, limits)
        if digest_of(image) != self.digest:
            raise bad_picture("the image is another one than when the call began; its file or array was changed")
        return image


def read_picture(source: object, limits: MediaLimits) -> tuple[Picture, Image]:
    """Raises `ValidationError`."""
    image = read_image(source, limits)
    return Picture(source, digest_of(image), image.size), image


def digest_of(image: Image) -> bytes:
    width, height = image.size
    return hashlib.sha256(struct.pack("<qq", width, height) + image.tobytes()).digest()


def require_pillow() -> Foreign:
    """The module PIL.Image."""
    try:
        import PIL.Image
    except ImportError as error:
        raise ValidationError(
            "images need Pillow, which is not installed: pip install 'offline-llm[vision]'.", parameter=NAME
        ) from error
    return PIL.Image


def read_image(source: object, limits: MediaLimits) -> Image:
    """A picture in the RGB mode, upright, on white where it is transparent.

    Args:
        source: a PIL image, a path, the bytes of a file or a BytesIO, an array or tensor [H, W], [H, W, C] or
            [C, H, W] of uint8 or of floats from 0 to 1, with 1, 3 or 4 channels.

    Raises:
        ValidationError: it is none, is damaged, too large or has several frames.
    """
    module = require_pillow()
    if isinstance(source, module.Image):
        limits.check_size(*source.size)
        with _LOCKS[id(source) % len(_LOCKS)], _one_sentence():
            _check_frames(source, "the copy() of a frame")
            return _upright(source)
    if isinstance(source, io.BytesIO):
        source = source.getvalue()
    if isinstance(source, bytes | bytearray | memoryview):
        return _decode(io.BytesIO(bytes(source)), len(source), limits)
    if isinstance(source, str | os.PathLike):
        return _read_file(Path(source), limits)
    if hasattr(source, "detach") and hasattr(source, "numpy"):
        tensor: Foreign = source.detach().cpu()
        source = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(source, np.ndarray):
        return _of_array(source, limits)
    raise bad_picture(f"an image must be a PIL image, a path, bytes, an array or a tensor, got {type(source).__name__}")


def bad_picture(fault: str) -> ValidationError:
    return ValidationError(f"{fault}.", parameter=NAME)


def from_url(url: object, limits: MediaLimits) -> object:
    """What `read_image` reads, of a URL in a conversation: `data:` or a file below `allowed_local_media_path`."""
    if not isinstance(url, str):
        raise bad_picture(f"the URL of an image must be a string, got {type(url).__name__}")
    if url[:5].lower() == "data:":
        return from_base64(url)
    scheme, mark, rest = url.partition("://")
    if mark and scheme.lower() != "file":
        raise bad_picture(
            f"the image {show(clip(url, 100))} is on a network, from which nothing is fetched; pass a data: URL, or a "
            "file below allowed_local_media_path"
        )
    return local_file(_unquoted(rest) if mark else url, limits)


def _unquoted(path: str) -> str:
    from urllib.parse import unquote

    return unquote(path.removeprefix("localhost"))


def local_file(name: str, limits: MediaLimits) -> Path:
    """The file `name`, which must be below `allowed_local_media_path`; relative names begin there."""
    if limits.folder is None:
        raise bad_picture(
            f"the image {show(clip(name, 100))} is a local file, and LLM(allowed_local_media_path=...) names no folder "
            "for such files"
        )
    path = _joined(limits.folder, name)
    if not path.is_relative_to(limits.folder):
        raise bad_picture(f"the image {show(clip(name, 100))} is not below allowed_local_media_path, {limits.folder}")
    return path


def _joined(folder: Path, name: str) -> Path:
    """Without links and dots; raises `ValidationError` for what no file can be called."""
    try:
        if len(name) > _MOST_PATH or "\0" in name:
            raise ValueError("too long, or with a null")
        return Path(os.path.realpath(folder / name))
    except (OSError, ValueError) as error:  # half a surrogate pair, too many links
        raise bad_picture("the name of an image's file is none") from error


def from_base64(text: str) -> bytes:
    """The bytes of a `data:` URL, or of base64 alone. Raises `ValidationError`."""
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise bad_picture("the data: URL of an image must be data:image/...;base64,...")
    if len(text) > MOST_BYTES * 4 // 3 + 4:
        raise bad_picture(f"the image has {len(text) * 3 // 4} bytes and at most {MOST_BYTES} are read")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_picture(f"the base64 of an image cannot be decoded ({error})") from error


def _read_file(path: Path, limits: MediaLimits) -> Image:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise bad_picture(f"the image {show(str(path))} is no file")
            return _decode(file, status.st_size, limits)
    except (OSError, ValueError) as error:
        if isinstance(error, ValidationError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise bad_picture(f"the image {show(str(path))} cannot be read ({reason})") from error


def _decode(file: Foreign, size: int, limits: MediaLimits) -> Image:
    module = require_pillow()
    if size > MOST_BYTES:
        raise bad_picture(f"the image has {size} bytes and at most {MOST_BYTES} are read")
    with _WITHOUT_WARNINGS, _one_sentence():
        module.init()
        with module.open(file, formats=[name for name in _FORMATS if name in module.OPEN]) as image:
            limits.check_size(*image.size)
            _check_frames(image, "its frames as images")
            image.load()
            return _upright(image)


class _WithoutWarnings:
    """Hides Python's warnings until the last thread in it has left: `warnings.catch_warnings` is for one thread."""

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0
        self._hidden = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._hidden = warnings.catch_warnings()
                self._hidden.__enter__()
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._hidden.__exit__(None, None, None)


_WITHOUT_WARNINGS = _WithoutWarnings()


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """Turns whatever Pillow's readers raise, which meet any bytes, into a `ValidationError`."""
    try:
        yield
    except ValidationError:
        raise
    except Exception as error:
        reason = clip(" ".join(str(error).split()), 120) or type(error).__name__
        if "BytesIO" in reason or isinstance(error, require_pillow().UnidentifiedImageError):
            reason = f"it is none of {', '.join(_FORMATS)}"
        raise bad_picture(f"the image cannot be decoded ({reason})") from error


def _check_frames(image: Foreign, instead: str) -> None:
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # a photo with its preview
        raise bad_picture(f"the image has {frames} frames and must have one; pass {instead}")


def _upright(image: Foreign) -> Image:
    """Mode RGB, turned as EXIF says."""
    from PIL import ImageOps

    module = require_pillow()
    turned = ImageOps.exif_transpose(image) or image
    if turned.mode == "RGB" and "transparency" not in turned.info:
        return turned if type(turned) is module.Image else turned.copy()
    if turned.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in turned.info:
        clear = turned.convert("RGBA")
        white = module.new("RGBA", clear.size, _WHITE)
        return module.alpha_composite(white, clear).convert("RGB")
    if turned.mode.startswith("I;16") or turned.mode == "I":
        return _of_deep(np.asarray(turned))
    if turned.mode == "F":
        raise bad_picture("an image of floats (mode F) has no known range; pass uint8")
    return turned.convert("RGB")


def _of_deep(values: np.ndarray) -> Image:
    """Of 16 bits: the upper 8."""
    lowest, highest = int(values.min()), int(values.max())
    if lowest < 0 or highest > 65535:
        raise bad_picture(f"an image of integers must have values from 0 to 65535, has {lowest} to {highest}")
    image: Image = require_pillow().fromarray((values.astype(np.uint32) >> 8).astype(np.uint8), "L").convert("RGB")
    return image


def _of_array(values: np.ndarray, limits: MediaLimits) -> Image:
    shape = values.shape
    if values.ndim == 3 and shape[2] not in (1, 3, 4) and shape[0] in (1, 3, 4):
        values = values.transpose(1, 2, 0)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in (3, 4)):
        raise bad_picture(f"an image as an array must be [H, W], [H, W, C] or [C, H, W], has shape {list(shape)}")
    limits.check_size(values.shape[1], values.shape[0])
    if values.dtype == np.bool_:
        values = values.astype(np.uint8) * 255
    elif np.issubdtype(values.dtype, np.floating):
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise bad_picture("an image of floats must have values from 0 to 1")
        values = np.rint(values * 255).astype(np.uint8)
    elif values.dtype == np.uint16 and values.ndim == 2:
        return _of_deep(values)
    elif values.dtype != np.uint8:
        raise bad_picture(f"an image as an array must be uint8 or floats from 0 to 1, is {values.dtype}")
    return _upright(require_pillow().fromarray(np.ascontiguousarray(values)))


def cell_images(value: object, folder: Path, limits: MediaLimits) -> list[object]:
    """The images in a cell of a table: paths, `data:` URLs or base64, bytes, what datasets make of images; or a list.

    folder: relative paths begin there; paths must be below it, or below `allowed_local_media_path`.
    """
    if value is None or (isinstance(value, str | bytes) and not value):
        return []
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list | tuple):
        return [image for item in value for image in cell_images(item, folder, limits)]
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        return cell_images(value.get("bytes") or value.get("path"), folder, limits)
    if not isinstance(value, str):
        return [value]
    if value[:5].lower() == "data:":
        return [from_base64(value)]
    if len(value) > _MOST_PATH or (len(value) > _LEAST_BASE64 and _BASE64.fullmatch(value)):
        return [from_base64(value)]
    if value[:7].lower() == "file://":
        value = _unquoted(value[7:])
    path = _joined(folder, value)
    below = (folder.resolve(), *(() if limits.folder is None else (limits.folder,)))
    if not any(path.is_relative_to(place) for place in below):
        raise bad_picture(
            f"the image {show(clip(value, 100))} is not below {folder}, where the input is; "
            "LLM(allowed_local_media_path=...) names another folder"
        )
    return [path]


def list_images(given: object) -> list[object]:
    """What `multi_modal_data` has under "image": one, or a list of them."""
    if given is None:
        return []
    if isinstance(given, list | tuple):
        return list(given)
    batch: Foreign = given
    return list(batch) if getattr(batch, "ndim", 0) == 4 else [given]
