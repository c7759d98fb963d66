"""What a tower gets of a picture or a video."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Processed:
    """A picture or a video for a tower.

    Attributes:
        inputs: of the tower, by transformers' names; first dimension: this picture alone.
        text: what stands for it in a prompt, made of special tokens.
    """

    inputs: Inputs
    text: str

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.inputs.values())


@dataclass(frozen=True)
class Timing:
    """When the frames of a video were taken.

    Attributes:
        fps: frames per second of the whole video; None: not known.
        indices: the frames' numbers in it.
        total: how many frames it has.
        duration: its seconds; None: not known.
    """

    fps: float | None
    indices: tuple[int, ...]
    total: int
    duration: float | None = None
