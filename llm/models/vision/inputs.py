"""What a tower gets of a picture or a video."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from llm.base.text import clip
from llm.errors import ValidationError, nearest

Inputs = dict[str, torch.Tensor]
# Among these: the ids of a picture's tokens that have features, where its tower makes those of several ids.
TOKENS = "feature_token_ids"


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


def check_options(options: Mapping[str, object], known: Set[str], of: str = "") -> None:
    """Raises `ValidationError` for one of `mm_processor_kwargs` that is not known."""
    for name in options:
        if name not in known:
            listed = ", ".join(sorted(known))
            raise ValidationError(
                f"mm_processor_kwargs has no key {name!r}{of}; it takes {listed}.{nearest(name, known)}",
                parameter="mm_processor_kwargs",
            )


@contextmanager
def processing(what: str) -> Iterator[None]:
    """Inside, what transformers' code raises of a picture or a video, or of its options, is one sentence about it."""
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, NotImplementedError) as error:
        reason = clip(" ".join(str(error).split()), 200) or type(error).__name__
        raise ValidationError(f"{what} cannot be processed: {reason}", parameter="multi_modal_data") from error
