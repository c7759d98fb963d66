"""Hostile pictures: each is read, or refused in one sentence, in bounded time and memory.

    python tests/fuzz/pictures.py [--count 2000] [--seed 0]

Files of every format are damaged: bytes changed, cut, repeated, sizes in headers made huge; and there are forms that no
camera writes: palettes with transparency, 16 bits, CMYK, one pixel, EXIF that lies, animations, text, other formats.
"""

from __future__ import annotations

import argparse
import io
import random
import resource
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from llm.errors import ValidationError
from llm.text.images import MOST_PIXELS, MediaLimits, read_picture

LIMITS = MediaLimits({}, folder=Path("/"))
# A picture of the most pixels takes some of these while it is converted.
_MOST_BYTES = 4 * MOST_PIXELS * 4
_MOST_SECONDS = 10.0
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
_MODES = {
    "PNG": ("RGB", "RGBA", "P", "L", "LA", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "TIFF": ("RGB", "CMYK", "F"),
}


def whole(rng: random.Random, kind: str) -> bytes:
    """A file of this format."""
    width, height = rng.choice(((1, 1), (3, 200), (17, 23), (64, 64)))
    values = np.random.default_rng(rng.getrandbits(32)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image: Image.Image = Image.fromarray(values)
    mode = rng.choice(_MODES.get(kind, ("RGB",)))
    if mode == "I;16":
        image = Image.fromarray(values[:, :, 0].astype(np.uint16) * 257)
    elif mode != "RGB":
        image = image.convert(mode)
    more: dict[str, Any] = {}
    if mode == "P" and rng.random() < 0.5:
        more["transparency"] = rng.randrange(256)
    if kind in ("GIF", "WEBP", "PNG", "TIFF") and rng.random() < 0.15 and mode == "RGB":
        more |= {"save_all": True, "append_images": [image.rotate(180)] * rng.randint(1, 3)}
    if kind == "JPEG" and rng.random() < 0.5:
        exif = Image.Exif()
        exif[0x0112] = rng.choice((0, 1, 3, 6, 8, 9, 65535))
        more["exif"] = exif
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def _flipped(rng: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 3, 30))):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _repeated(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + data[place : place + 64] * rng.randint(2, 500) + data[place:]


def _huge(rng: random.Random, data: bytes) -> bytes:
    """Numbers of the header made large: sizes, counts, offsets."""
    found, order = bytearray(data), rng.choice("<>")
    place = rng.randrange(max(1, min(len(found), 64) - 4))
    struct.pack_into(f"{order}I", found, place, rng.choice((0, 1 << 14, 1 << 20, 1 << 31, (1 << 32) - 1)))
    return bytes(found)


def bomb(rng: random.Random, data: bytes) -> bytes:
    """A PNG of many pixels in few bytes, with right checksums."""
    side = rng.choice((1 << 13, 1 << 14, 1 << 16, 1 << 30))

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _text(rng: random.Random, data: bytes) -> bytes:
    return rng.choice((b"", b"no picture", b"%!PS-Adobe-3.0\n%%BoundingBox: 0 0 9 9\n", b"<svg></svg>", b"\x00" * 99))


def _same(rng: random.Random, data: bytes) -> bytes:
    return data


HARMS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_flipped, _flipped, _cut, _repeated, _huge, _huge, bomb, _text, _same),
)


def picture(seed: int) -> bytes:
    rng = random.Random(seed)
    return rng.choice(HARMS)(rng, whole(rng, rng.choice(FORMATS)))


def fault(data: bytes) -> tuple[str, str | None]:
    """("read" or "refused", what is wrong with how it was; None: nothing)."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found, image = read_picture(data, LIMITS)
        outcome = "read"
        if image.mode != "RGB" or found.open(LIMITS).tobytes() != image.tobytes():
            return outcome, "read twice it is another picture"
    except ValidationError as error:
        outcome, said = "refused", str(error)
        if "\n" in said or len(said) > 400 or not said.endswith("."):
            return outcome, f"no sentence: {said!r}"
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}"
    seconds, grown = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if seconds > _MOST_SECONDS:
        return outcome, f"it took {seconds:.0f} s"
    if grown * 1024 > _MOST_BYTES:
        return outcome, f"it took {grown >> 10} MiB"
    return outcome, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    outcomes: Counter[str] = Counter()
    bad = 0
    for seed in range(given.seed, given.seed + given.count):
        outcome, wrong = fault(picture(seed))
        outcomes[outcome] += 1
        if wrong is not None:
            bad += 1
            print(f"seed {seed}: {wrong}")
    print(f"{dict(outcomes)}, {bad} wrong")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
