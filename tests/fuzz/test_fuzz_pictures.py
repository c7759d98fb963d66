"""Some of the hostile pictures of `python tests/fuzz/pictures.py`."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
import pictures

from llm.errors import ValidationError
from llm.text import images
from llm.text.videos import cell_videos, frames_of_url, read_video


def test_a_hostile_picture_is_read_or_refused_in_one_sentence() -> None:
    found = [pictures.fault(pictures.picture(seed)) for seed in range(120)]
    assert [wrong for _, wrong in found if wrong is not None] == []
    assert {outcome for outcome, _ in found} == {"read", "refused"}


def test_a_reader_that_lets_an_error_through_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(image: object) -> object:
        raise OSError("of Pillow")

    monkeypatch.setattr(images, "_upright", careless)
    monkeypatch.setattr(images, "bad_picture", lambda fault: ValidationError(f"{fault}\nand more"))
    assert any(wrong is not None for _, wrong in (pictures.fault(pictures.picture(seed)) for seed in range(8)))


def _encoded() -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


_GOOD = _encoded()
_KEYS = ("video", "metadata", "bytes", "path", "fps", "type", "url")
_LEAVES: tuple[Any, ...] = (
    *(None, "", "a", 5, 2.5, True, b"x", "0.png", "a\0b", "../x", "\ud800", "x" * 5000, float("nan"), 10**30),
    *("data:video/jpeg;base64,", f"data:video/jpeg;base64,{_GOOD},{_GOOD}", f"data:image/png;base64,{_GOOD}", _GOOD),
    *("data:video/mp4;base64,AA", "file:///etc/passwd", "http://a/b", "[", "{", '["a"]', '{"video": 5}'),
)


def _cell(draw: random.Random, depth: int = 0) -> Any:
    """What a cell of videos might hold."""
    kind = 0 if depth > 3 else draw.choice((0, 0, 1, 1, 2))
    if kind == 0:
        return draw.choice(_LEAVES)
    inner = [_cell(draw, depth + 1) for _ in range(draw.randrange(4))]
    return inner if kind == 1 else {draw.choice(_KEYS): item for item in inner}


def test_a_hostile_cell_of_videos_is_read_or_refused_in_one_sentence(tmp_path: Path) -> None:
    limits, outcomes = images.MediaLimits.of(None), set()
    draw = random.Random(5)
    for _ in range(2000):
        cell = _cell(draw)
        for read in (lambda: cell_videos(cell, tmp_path, limits), lambda: [frames_of_url(cell, limits)]):  # noqa: B023
            try:
                found = [read_video(video, limits) for video in read()]
                outcomes.add("read" if found else "nothing")
            except ValidationError as error:
                assert "\n" not in str(error)
                outcomes.add("refused")
    assert outcomes == {"read", "nothing", "refused"}
