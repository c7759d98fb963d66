"""Videos for the towers: frames of one size, or patches of several frames each, and the text that stands for them.

transformers' processors of videos need torchvision, which is no dependency here. What they compute is short: frames
are resized by PyTorch's own resampling of bytes, which is what torchvision calls, so that the pixels are equal; the
text is that of transformers' processor class.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from llm.base.text import show
from llm.base.types import JsonObject
from llm.errors import UnsupportedModelError
from llm.models.transformers_backend.skeleton import Theirs
from llm.models.vision.inputs import Processed, Timing, check_options, processing, resized

if TYPE_CHECKING:
    from PIL.Image import Image

_CLIP = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_ALL = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_center_crop": False,
    "crop_size": None,
    "resample": 3,
}
_PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "cap_pixels_per_frame": None}
_MOST_OF_SMOLVLM = 4096


@dataclass(frozen=True)
class _Form:
    """What a class of transformers does with a video.

    Attributes:
        defaults: the settings that a model's files may change.
        budget: of the pixels in `size`: of a "frame" or of the "video"; "": frames have the size `size`.
    """

    defaults: Mapping[str, Theirs]
    budget: str = ""


_FORMS = {
    "Qwen2VLVideoProcessor": _Form(
        {
            **_ALL,
            **_PATCHES,
            **_CLIP,
            "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
            "max_video_tokens": 128000,
        },
        "frame",
    ),
    "Qwen3VLVideoProcessor": _Form(
        {
            **_ALL,
            **_PATCHES,
            **_HALF,
            "patch_size": 16,
            "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
            "max_video_tokens": 768,
        },
        "video",
    ),
    "Glm4vVideoProcessor": _Form(
        {**_ALL, **_PATCHES, **_CLIP, "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}},
        "video",
    ),
    "LlavaOnevisionVideoProcessor": _Form({**_ALL, **_CLIP, "size": {"height": 384, "width": 384}}),
    "InternVLVideoProcessor": _Form({**_ALL, **_CLIP, "size": {"height": 384, "width": 384}}),
    "LlavaNextVideoVideoProcessor": _Form(
        {
            **_ALL,
            **_CLIP,
            "size": {"shortest_edge": 224},
            "do_center_crop": True,
            "crop_size": {"height": 224, "width": 224},
        }
    ),
    "SmolVLMVideoProcessor": _Form(
        {
            **_ALL,
            **_HALF,
            "resample": 1,
            "size": {"longest_edge": 4 * 364},
            "max_image_size": {"longest_edge": 364},
            "video_sampling": None,
        }
    ),
}
_FORMS["Glm46VVideoProcessor"] = _FORMS["Glm4vVideoProcessor"]
_BY_FAMILY = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "exaone4_5"), "Qwen2VLVideoProcessor"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "Qwen3VLVideoProcessor"),
    **dict.fromkeys(("glm4v", "glm4v_moe"), "Glm4vVideoProcessor"),
    **dict.fromkeys(("glm46v", "glm_ocr"), "Glm46VVideoProcessor"),
    "llava_onevision": "LlavaOnevisionVideoProcessor",
    "llava_next_video": "LlavaNextVideoVideoProcessor",
    "internvl": "InternVLVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
}
_SMALL_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()


class VideoProcessor:
    """Makes a tower's inputs of a video.

    Args:
        family: the model_type.
        theirs: transformers' processor of the model, which writes the text.
        settings: the decoded files of the model's processors: of all, of images, of videos; {} where there is none.

    Raises:
        UnsupportedModelError: videos of this family are not read.

    Attributes:
        placeholder: the text that stands for a video in a prompt, one token.
    """

    def __init__(self, family: str, theirs: Theirs, settings: Sequence[JsonObject]) -> None:
        whole, images, videos = settings
        nested = whole.get("video_processor")
        own = nested if isinstance(nested, Mapping) else videos or images
        name = str(own.get("video_processor_type", ""))
        form = _FORMS.get(name or _BY_FAMILY.get(family, ""))
        self.placeholder: str = getattr(theirs, "video_token", "") or ""
        if form is None or not self.placeholder:
            raise UnsupportedModelError(f"videos of {show(family)} are not read; pass their frames as images.")
        self._family, self._form = family, form
        known = {key: value for key, value in own.items() if key in form.defaults and value is not None}
        self.settings: dict[str, Theirs] = {**form.defaults, **known}
        edges = {"shortest_edge": own.get("min_pixels"), "longest_edge": own.get("max_pixels")}
        if form.budget:  # of first releases
            self.settings["size"] = {**self.settings["size"], **{key: edge for key, edge in edges.items() if edge}}
        sampling = self.settings.pop("video_sampling", None)
        if isinstance(sampling, Mapping) and "size" not in known and "video_size" in sampling:
            self.settings["size"] = sampling["video_size"]
        self._theirs = theirs

    @property
    def options(self) -> frozenset[str]:
        """The names of the settings that a prompt may change."""
        return frozenset(self.settings)

    def process(self, frames: Sequence[Image], timing: Timing, options: Mapping[str, object]) -> Processed:
        """Frames of one size in the RGB mode.

        Raises:
            ValidationError: they cannot be resized so, or an option is none.
        """
        check_options(options, self.settings.keys(), " of videos")
        size = "x".join(map(str, frames[0].size))
        with processing(f"the video ({len(frames)} frames of {size})"):
            settings = {**self.settings, **options}
            pixels = self._pixels(torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])), settings)
            found = self._patches(pixels, settings) if self._form.budget else {"pixel_values_videos": pixels[None]}
            text = self._text(found, timing, settings)
        if self._family == "internvl":
            found = {"pixel_values": pixels}
        if self._family == "smolvlm":
            mask = torch.ones(1, len(pixels), *pixels.shape[-2:], dtype=torch.int64)
            found = {"pixel_values": pixels[None], "pixel_attention_mask": mask}
        if self._family == "qwen2_5_vl":
            fps = _metadata(timing).sampled_fps
            found["second_per_grid_ts"] = torch.tensor([settings["temporal_patch_size"] / fps])
        return Processed(found, text)

    def _pixels(self, frames: torch.Tensor, settings: Mapping[str, Theirs]) -> torch.Tensor:
        """uint8 [frames, H, W, 3] -> float32 [frames, 3, H', W'], normalised."""
        pixels = frames.permute(0, 3, 1, 2).contiguous()
        if settings["do_resize"]:
            for size in self._sizes(len(pixels), pixels.shape[2], pixels.shape[3], settings):
                pixels = resized(pixels, size, int(settings["resample"]))
        if settings["do_center_crop"]:
            pixels = _cropped(pixels, settings["crop_size"]["height"], settings["crop_size"]["width"])
        factor = settings["rescale_factor"]
        if settings["do_normalize"]:
            by = 1.0 / factor if settings["do_rescale"] else 1.0
            mean, std = (torch.tensor(settings[key]) * by for key in ("image_mean", "image_std"))
            return pixels.float().sub_(mean[:, None, None]).div_(std[:, None, None])
        return pixels.float() * factor if settings["do_rescale"] else pixels.float()

    def _sizes(self, count: int, height: int, width: int, settings: Mapping[str, Theirs]) -> list[tuple[int, int]]:
        """(height, width) of frames, one after the other: SmolVLM's are resized twice."""
        size = settings["size"]
        if self._form.budget:
            return [self._within_budget(count, height, width, settings)]
        if self._family == "smolvlm":
            square = settings["max_image_size"]["longest_edge"]
            first = _longest(height, width, size["longest_edge"]) if "longest_edge" in size else _exact(size)
            return [first, (square, square)]
        if "shortest_edge" in size:
            edge = size["shortest_edge"]
            short, long = sorted((height, width))
            other = int(edge * long / short)
            return [(other, edge) if width <= height else (edge, other)]
        return [_exact(size)]

    def _within_budget(self, count: int, height: int, width: int, settings: Mapping[str, Theirs]) -> tuple[int, int]:
        size, patches = settings["size"], settings["temporal_patch_size"]
        factor = settings["patch_size"] * settings["merge_size"]
        least, most = size["shortest_edge"], size["longest_edge"]
        tokens, caps = settings.get("max_video_tokens", 0), settings["cap_pixels_per_frame"]
        if self._form.budget == "frame":
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

            if caps:
                share = int(tokens * factor * factor * 0.9) * patches // count
                most = max(min(most, share), int(least * 1.05))
            found = smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most)
        else:
            from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as of_video

            if caps:
                most = max(min(tokens * factor * factor, most // count), int(least * 1.05)) * count
            found = of_video(
                num_frames=count,
                height=height,
                width=width,
                temporal_factor=patches,
                factor=factor,
                min_pixels=least,
                max_pixels=most,
            )
        return int(found[0]), int(found[1])

    def _patches(self, pixels: torch.Tensor, settings: Mapping[str, Theirs]) -> dict[str, torch.Tensor]:
        """float32 [frames, 3, H, W] -> patches of several frames, those that are merged next to each other."""
        patch, merge, frames = (int(settings[key]) for key in ("patch_size", "merge_size", "temporal_patch_size"))
        lacking = -len(pixels) % frames
        pixels = torch.cat([pixels, pixels[-1:].expand(lacking, -1, -1, -1)])
        times, high, wide = len(pixels) // frames, pixels.shape[2] // patch, pixels.shape[3] // patch
        cut = pixels.view(times, frames, 3, high // merge, merge, patch, wide // merge, merge, patch)
        cut = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(times * high * wide, 3 * frames * patch * patch)
        return {"pixel_values_videos": cut, "video_grid_thw": torch.tensor([[times, high, wide]])}

    def _text(self, found: Mapping[str, torch.Tensor], timing: Timing, settings: Mapping[str, Theirs]) -> str:
        theirs = copy.copy(self._theirs)  # threads have settings of their own
        theirs.video_processor = SimpleNamespace(**settings)
        key = "pixel_values" if self._family == "smolvlm" else "pixel_values_videos"
        given: dict[str, Theirs] = {**found, key: found["pixel_values_videos"], "video_metadata": [_metadata(timing)]}
        text: str = theirs.replace_video_token(given, 0)
        return text


def _metadata(timing: Timing) -> Theirs:
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(
        total_num_frames=timing.total,
        fps=timing.fps,
        duration=timing.duration,
        frames_indices=list(timing.indices),
    )


def _cropped(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The middle; black where the frame is smaller."""
    high, wide = pixels.shape[-2:]
    more, further = max(0, height - high), max(0, width - wide)
    pixels = F.pad(pixels, (further // 2, (further + 1) // 2, more // 2, (more + 1) // 2))
    high, wide = pixels.shape[-2:]
    top, left = round((high - height) / 2.0), round((wide - width) / 2.0)
    return pixels[..., top : top + height, left : left + width]


def _exact(size: Mapping[str, int]) -> tuple[int, int]:
    return size["height"], size["width"]


def _longest(height: int, width: int, edge: int) -> tuple[int, int]:
    """SmolVLM's: the longer side is `edge`, the other is even."""
    edge = min(_MOST_OF_SMOLVLM, edge)
    ratio = width / height
    if width >= height:
        other = int(edge / ratio)
        return max(1, other + other % 2), edge
    other = int(edge * ratio)
    return edge, max(1, other + other % 2)


def in_words(number: int) -> str:
    """An English numeral, as num2words writes it; up to 9,999."""
    if number < 20:
        return _SMALL_NUMBERS[number]
    if number < 100:
        ones = number % 10
        return _TENS[number // 10] + (f"-{_SMALL_NUMBERS[ones]}" if ones else "")
    base, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    most, rest = divmod(number, base)
    joined = "" if not rest else f"{' and' if rest < 100 else ','} {in_words(rest)}"
    return f"{in_words(most)} {name}{joined}"
