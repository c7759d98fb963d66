"""Some of the hostile pictures of `python tests/fuzz/pictures.py`."""

from __future__ import annotations

import pytest

pytest.importorskip("PIL")
import pictures

from llm.errors import ValidationError
from llm.text import images


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
