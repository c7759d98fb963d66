"""Text the embedded model has never seen: every fifth of the chapters its recipe holds out of training.

`fixtures/held_out.txt` is written by `python tests/held_out.py`, which needs what the recipe needs (`train.py`: the
`bible` program of the Debian packages bible-kjv and bible-kjv-text, King James Version, in the public domain). Chapters
are separated by form feeds.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "fixtures" / "held_out.txt"
RECIPE = Path(__file__).parent.parent / "llm" / "assets" / "tiny" / "train.py"
EVERY = 5


def texts() -> list[str]:
    return FILE.read_text("ascii").split("\f")


def from_the_recipe() -> list[str]:
    spec = importlib.util.spec_from_file_location("tiny_recipe", RECIPE)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(RECIPE)
    recipe: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = recipe
    spec.loader.exec_module(recipe)
    held = [chapter for chapter in recipe.parse_chapters(recipe.read_text()) if recipe.is_held_out(chapter)]
    return [recipe.render(chapter) for chapter in held[::EVERY]]


if __name__ == "__main__":
    FILE.write_text("\f".join(from_the_recipe()), "ascii")
