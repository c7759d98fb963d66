"""In the places of transformers' processors that import torchvision, or take all pictures of a prompt at once."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from llm.models.transformers_backend.skeleton import Theirs
from llm.models.vision.inputs import resized


def idefics2_processor(theirs: Theirs) -> type:
    """transformers' Idefics2Processor, which writes the text of all pictures of a prompt at once."""

    class Idefics2Processor(theirs):
        def replace_image_token(self, image_inputs: Theirs, image_idx: int, **_: object) -> str:
            one = f"{self.fake_image_token}{self.image_token * self.image_seq_len}{self.fake_image_token}"
            return self.joined(one * image_inputs["pixel_values"].shape[1])

        def joined(self, text: str) -> str:
            """One token, not two, between pictures; a word behind one begins with a space."""
            mark = str(self.fake_image_token)
            return re.sub(rf"{re.escape(mark)}(?=[^\s<])", f"{mark} ", text.replace(mark * 2, mark))

    return Idefics2Processor


def pixtral_processor() -> type:
    """In the place of transformers' PixtralProcessor, whose module imports torchvision.

    A picture is its rows of tokens, each with a token that breaks it, the last with one that ends the picture.
    """
    from transformers import ProcessorMixin

    class PixtralProcessor(ProcessorMixin):
        def __init__(
            self,
            image_processor: Theirs = None,
            tokenizer: Theirs = None,
            patch_size: int = 16,
            spatial_merge_size: int = 1,
            chat_template: str | None = None,
            image_token: str = "[IMG]",
            image_break_token: str = "[IMG_BREAK]",
            image_end_token: str = "[IMG_END]",
            **_: object,
        ) -> None:
            super().__init__(image_processor, tokenizer, chat_template=chat_template)
            self.patch = patch_size * spatial_merge_size
            self.image_token, self.breaks, self.ends = image_token, image_break_token, image_end_token
            self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)

        def _process_images(self, images: Theirs, **merged: Theirs) -> tuple[Theirs, list[str]]:
            return super()._process_images(images, **{**merged, "patch_size": self.patch})

        def replace_image_token(self, image_inputs: Theirs, image_idx: int, **_: object) -> str:
            height, width = (int(size) // self.patch for size in image_inputs["image_sizes"][image_idx])
            return (self.image_token * width + self.breaks) * (height - 1) + self.image_token * width + self.ends

    return PixtralProcessor


def minicpm_processor(theirs: Theirs) -> type:
    """transformers' MiniCPMV4_6Processor, which numbers the pictures of a prompt, for pictures alone."""

    class MiniCPMV4_6Processor(theirs):
        # Its settings are read where the processor is made.
        video_processor = property(lambda _: SimpleNamespace(slice_mode=False, downsample_mode="16x"), lambda *_: None)

        def before(self, number: int, wanted: bool | None) -> str:
            if not (self.default_use_image_id if wanted is None else wanted):
                return ""
            return f"{self.image_id_start_token}{number}{self.image_id_end_token}"

    return MiniCPMV4_6Processor


def llama4_image_processor() -> Theirs:
    """In the place of transformers' Llama4ImageProcessor.

    A picture keeps its shape in the canvas of square tiles that fits it best; behind the tiles, if there are several,
    comes the whole picture as one. Pixels are computed in bfloat16, as the model was trained.
    """
    from transformers.image_processing_backends import PilBackend
    from transformers.image_processing_utils import BatchFeature
    from transformers.processing_utils import ImagesKwargs

    class Llama4ImageProcessorKwargs(ImagesKwargs, total=False):
        max_patches: int
        resize_to_max_canvas: bool

    class Llama4ImageProcessor(PilBackend):
        resample = 2
        image_mean, image_std = [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]
        size: ClassVar = {"height": 336, "width": 336}
        do_resize = do_rescale = do_normalize = do_convert_rgb = True
        max_patches, resize_to_max_canvas = 16, False
        valid_kwargs = Llama4ImageProcessorKwargs

        def _preprocess(self, images: list[np.ndarray], *_: Theirs, **settings: Theirs) -> BatchFeature:
            size = settings["size"]
            if size.height != size.width or not settings["do_resize"]:
                raise ValueError("Llama 4 cuts images into square tiles: size and do_resize must allow it")
            cut = [_tiles(torch.from_numpy(image)[None], size.height, settings) for image in images]
            pixels = torch.cat([_in_bfloat16(tiles, settings) for tiles, _ in cut])
            return BatchFeature({"pixel_values": pixels, "aspect_ratios": torch.tensor([shape for _, shape in cut])})

    return Llama4ImageProcessor


def _tiles(pixels: torch.Tensor, edge: int, settings: dict[str, Theirs]) -> tuple[torch.Tensor, tuple[int, int]]:
    """uint8 [1, 3, H, W] -> uint8 [N, 3, edge, edge], and the rows and columns of tiles."""
    largest, resample = settings["resize_to_max_canvas"], settings["resample"]
    high, wide = best_canvas((pixels.shape[2], pixels.shape[3]), edge, settings["max_patches"], largest)
    fitted = _fitted(pixels, high * edge, wide * edge, None if largest else edge)
    inside = resized(pixels, fitted, resample)
    canvas = F.pad(inside, (0, wide * edge - inside.shape[3], 0, high * edge - inside.shape[2]))
    tiles = canvas.view(3, high, edge, wide, edge).permute(1, 3, 0, 2, 4).reshape(-1, 3, edge, edge)
    whole = [resized(pixels, (edge, edge), resample)] if len(tiles) > 1 else []
    return torch.cat([tiles, *whole]), (high, wide)


def best_canvas(size: tuple[int, int], edge: int, most: int, largest: bool) -> tuple[int, int]:
    """(rows, columns) of up to `most` square tiles for a picture: those that enlarge it least, or shrink it least where
    none enlarges it; of these the fewest.

    size: (height, width) of the picture.
    largest: those that enlarge it most.
    """
    shapes = torch.tensor([(high, wide) for high in range(1, most + 1) for wide in range(1, most // high + 1)])
    scales = (shapes * edge / torch.tensor(size)).amin(1)
    above = scales[scales >= 1]
    chosen = scales.max() if largest or not len(above) else above.min()
    fitting = shapes[scales == chosen]
    high, wide = fitting[fitting.prod(1).argmin()].tolist()
    return high, wide


def _fitted(pixels: torch.Tensor, high: int, wide: int, edge: int | None) -> tuple[int, int]:
    """(height, width) of a picture in a canvas; one smaller than a tile of this edge is enlarged to no more."""
    height, width = pixels.shape[2:]
    # Ratios to a canvas are rounded to float32 in transformers, and those to other sizes are not.
    limits: list[Theirs] = [torch.tensor(high), torch.tensor(wide)]
    if edge is not None:
        limits = [min(max(own, edge), limit) for own, limit in zip((height, width), limits, strict=True)]
    down, across = limits[0] / height, limits[1] / width
    if across < down:
        return max(1, min(math.floor(height * across), int(limits[0]))), int(limits[1])
    return int(limits[0]), max(1, min(math.floor(width * down), int(limits[1])))


def _in_bfloat16(tiles: torch.Tensor, settings: dict[str, Theirs]) -> torch.Tensor:
    rescales, normalizes = settings["do_rescale"], settings["do_normalize"]
    pixels = tiles.bfloat16() if rescales and normalizes else tiles.float()
    if rescales:
        pixels = pixels * settings["rescale_factor"]
    if not normalizes:
        return pixels
    mean, std = (torch.tensor(settings[key], dtype=pixels.dtype)[:, None, None] for key in ("image_mean", "image_std"))
    return (pixels - mean) / std
