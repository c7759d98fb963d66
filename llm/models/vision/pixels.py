"""Pictures resized by PyTorch's own resampling of bytes, which is what torchvision calls: the pixels are equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Pillow's numbers -> PyTorch's names.
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def resized(pixels: torch.Tensor, size: tuple[int, int], resample: int) -> torch.Tensor:
    """uint8 [N, 3, H, W] -> [N, 3, *size].

    resample: Pillow's number of a filter, as in preprocessor_config.json.
    """
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    mode = _FILTERS[resample]
    if mode == "nearest":
        return F.interpolate(pixels, size, mode="nearest")
    return F.interpolate(pixels, size, mode=mode, align_corners=False, antialias=True)
