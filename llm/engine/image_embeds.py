"""Features that the user computed, in the place of a picture: `{"image_embeds": ...}`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llm.text.images import bad_picture

GRID = "image_grid_thw"
EMBEDS = "image_embeds"


@dataclass(frozen=True)
class ImageEmbeds:
    """The features of one picture.

    Attributes:
        rows: float32 [tokens, width]; wider than the hidden size with those of further layers behind (DeepStack).
        grid: (frames, patches high, patches wide), which models need whose tokens have three positions.
    """

    rows: torch.Tensor
    grid: tuple[int, int, int] | None = None

    @property
    def key(self) -> bytes:
        """SHA-256 of everything in it."""
        head = f"{EMBEDS} {tuple(self.rows.shape)} {self.grid}".encode()
        return hashlib.sha256(head + self.rows.numpy().tobytes()).digest()

    def inputs(self) -> dict[str, torch.Tensor]:
        """What a tower's inputs are for a picture."""
        grid = {} if self.grid is None else {GRID: torch.tensor([self.grid])}
        return {EMBEDS: self.rows, **grid}

    def check(self, hidden_size: int, depth: int) -> None:
        """Raises `ValidationError` if the width is none of the model's, with `depth` further layers."""
        width = self.rows.shape[1]
        if width not in {hidden_size, hidden_size * (1 + depth)}:
            deep = f", or {hidden_size * (1 + depth)} with those of further layers" if depth else ""
            raise bad_picture(f"image_embeds have {width} channels and the model has {hidden_size}{deep}")


def is_embeds(value: object) -> bool:
    return isinstance(value, Mapping) and EMBEDS in value


def embeds_of(given: Mapping[str, object]) -> list[ImageEmbeds]:
    """One for each picture.

    Args:
        given: "image_embeds", floats [tokens, width] of one picture, [pictures, tokens, width], or a list of the first;
            and, for models that need it, "image_grid_thw" [pictures, 3]. With several grids [tokens, width] has all
            pictures, one after the other.

    Raises:
        ValidationError: shapes that do not fit, or values that are not finite.
    """
    unknown = sorted(map(str, given.keys() - {EMBEDS, GRID}))
    if unknown:
        raise bad_picture(f"features of images have the keys {EMBEDS!r} and {GRID!r}, got {unknown[0]!r}")
    grids = None if given.get(GRID) is None else _tensor(given[GRID], GRID).reshape(-1, 3).long().tolist()
    value = given[EMBEDS]
    parts = [_rows(part) for part in value] if isinstance(value, list | tuple) else _parts(value, grids)
    if grids is not None and len(grids) != len(parts):
        raise bad_picture(f"{GRID} has {len(grids)} rows and {EMBEDS} are those of {len(parts)} images")
    return [ImageEmbeds(part, None if grids is None else tuple(grids[index])) for index, part in enumerate(parts)]


def _parts(value: object, grids: list[list[int]] | None) -> list[torch.Tensor]:
    whole = _tensor(value, EMBEDS)
    if whole.dim() == 3:
        return [_rows(part) for part in whole]
    if grids is None or len(grids) < 2:
        return [_rows(whole)]
    patches = [math.prod(grid) for grid in grids]
    if not sum(patches) or any(count * len(whole) % sum(patches) for count in patches):
        raise bad_picture(f"{EMBEDS} have {len(whole)} tokens, which cannot be those of {GRID} {grids}")
    return [_rows(part) for part in whole.split([count * len(whole) // sum(patches) for count in patches])]


def _rows(value: object) -> torch.Tensor:
    rows = _tensor(value, EMBEDS)
    if rows.dim() != 2 or not rows.numel() or not rows.is_floating_point():
        raise bad_picture(f"{EMBEDS} of an image must be floats [tokens, channels], has shape {list(rows.shape)}")
    rows = rows.float().contiguous()
    if not bool(torch.isfinite(rows).all()):
        raise bad_picture(f"{EMBEDS} have values that are not finite")
    return rows


def _tensor(value: Any, name: str) -> torch.Tensor:
    if isinstance(value, str | bytes):
        raise bad_picture(f"{name} must be a tensor or an array; a pickled one is not read")
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise bad_picture(f"{name} must be a tensor or an array, got {type(value).__name__}") from error
