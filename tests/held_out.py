"""Text that the embedded model was not trained on: every fifth of the held-out chapters.

`python tests/held_out.py` writes `fixtures/held_out.txt`. It needs the `bible` program of the Debian packages bible-kjv
and bible-kjv-text (King James Version, in the public domain). Chapters are separated by form feeds.
"""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parent / "fixtures" / "held_out.txt"
EVERY = 5


def texts() -> list[str]:
    return FILE.read_text("ascii").split("\f")


def from_the_bible() -> list[str]:
    from train_embedded import is_held_out, parse_chapters, read_text, render

    held = [chapter for chapter in parse_chapters(read_text()) if is_held_out(chapter)]
    return [render(chapter) for chapter in held[::EVERY]]


if __name__ == "__main__":
    FILE.write_text("\f".join(from_the_bible()), "ascii")
