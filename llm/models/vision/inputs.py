"""What a tower gets of a picture or a video, and which of its tokens see each other in both directions.

Pictures are resized by PyTorch's own resampling of bytes, which is what torchvision calls: the pixels are equal. The
Lanczos filter is Pillow's where PyTorch has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from llm.base.text import clip
from llm.base.types import JsonObject
from llm.errors import ValidationError, nearest

Inputs = dict[str, torch.Tensor]
# Among these: the ids of a picture's tokens that have features, where its tower makes those of several ids.
TOKENS = "feature_token_ids"
# Of a video, bool: which of its features have tokens.
KEPT = "video_compression_mask"


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


def sees_both_ways(config: JsonObject) -> str:
    """ "images": the tokens of a picture do; "prompt": all of a prompt with pictures (a prefix language model);
    "windows": those of a picture, in layers with a window alone; "": none do. `config`: the decoded config.json."""
    text = config.get("text_config")
    gemma4 = text.get("use_bidirectional_attention") if isinstance(text, Mapping) else None
    if config.get("model_type") in ("gemma4", "gemma4_unified"):
        return "windows" if gemma4 == "vision" else ""
    return {"gemma3": "images", "shieldgemma2": "images", "paligemma": "prompt"}.get(str(config.get("model_type")), "")


def spans_of(kind: str, places: np.ndarray, length: int) -> tuple[tuple[int, int], ...]:
    """(first, end) of each run. places: int64, increasing, the positions of pictures' tokens in a prompt."""
    if not kind or not len(places):
        return ()
    if kind == "prompt":
        return ((0, length),)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)


# Pillow's numbers -> PyTorch's names.
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_TORCH_HAS_LANCZOS = hasattr(torch.ops.aten, "_upsample_lanczos2d_aa")  # since PyTorch 2.12


def resized(pixels: torch.Tensor, size: tuple[int, int], resample: int) -> torch.Tensor:
    """uint8 [N, 3, H, W] -> [N, 3, *size].

    resample: Pillow's number of a filter, as in preprocessor_config.json.
    """
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    mode = _FILTERS[resample]
    if mode == "nearest":
        return F.interpolate(pixels, size, mode="nearest")
    if mode == "lanczos" and not _TORCH_HAS_LANCZOS:
        return _by_pillow(pixels, size, resample)
    return F.interpolate(pixels, size, mode=mode, align_corners=False, antialias=True)


def _by_pillow(pixels: torch.Tensor, size: tuple[int, int], resample: int) -> torch.Tensor:
    """As `resized`. Pillow rounds its weights otherwise than PyTorch: a byte may differ by 2."""
    from PIL import Image

    height, width = size
    pictures = [Image.fromarray(each).resize((width, height), resample) for each in pixels.permute(0, 2, 3, 1).numpy()]
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2).contiguous()
