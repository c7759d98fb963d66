"""Videos for the towers: frames of one size, or patches of several frames each, and the text that stands for them.

transformers' processors of videos need torchvision, which is no dependency here. What they compute is short: frames
are resized by PyTorch's own resampling of bytes, which is what torchvision calls, so that the pixels are equal; the
text is that of transformers' processor class.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
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
from llm.models.vision.inputs import KEPT, Inputs, Processed, Timing, check_options, processing, resized

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
_PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
_CAP: dict[str, Theirs] = {"cap_pixels_per_frame": None}
_MOST_OF_SMOLVLM = 4096
# Tokens of VideoLLaMA 3 stay where the pixels of a frame differ from those of the frame before it by more, in steps of
# normalised values of 1/255.
_LEAST_CHANGE = 0.1
# What the text of a video is made of beside its tower's inputs.
_ForText = dict[str, Theirs]


@dataclass(frozen=True)
class _Form:
    """What a class of transformers does with a video.

    Attributes:
        defaults: the settings that a model's files may change.
        budget: of the pixels in `size`: of a "frame", of the "video", or of the video in equal "shares"; "": frames
            have the size `size`.
        make: of uint8 [frames, 3, H, W], where it is none of these: a tower's inputs.
    """

    defaults: Mapping[str, Theirs]
    budget: str = ""
    make: Callable[[torch.Tensor, Mapping[str, Theirs], Theirs], tuple[Inputs, _ForText]] | None = None


def _of_gemma4(frames: torch.Tensor, settings: Mapping[str, Theirs], theirs: Theirs) -> tuple[Inputs, _ForText]:
    """Patches of each frame with their places in it, behind them as many of zeros as it could have more."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    patch, kernel, tokens = (settings[key] for key in ("patch_size", "pooling_kernel_size", "max_soft_tokens"))
    if tokens not in _TOKENS_OF_GEMMA4:
        raise ValueError(f"max_soft_tokens must be one of {_TOKENS_OF_GEMMA4}, got {tokens}")
    most = tokens * kernel**2
    if settings["do_resize"]:
        height, width = frames.shape[-2:]
        frames = resized(
            frames, get_aspect_ratio_preserving_size(height, width, patch, most, kernel), int(settings["resample"])
        )
    pixels = _normalised(frames, settings)
    count, _, height, width = pixels.shape
    high, wide = height // patch, width // patch
    cut = pixels.view(count, 3, high, patch, wide, patch).permute(0, 2, 4, 3, 5, 1).reshape(count, high * wide, -1)
    places = torch.stack([torch.arange(wide).repeat(high), torch.arange(high).repeat_interleave(wide)], -1)
    lacking = max(0, most - high * wide)
    found = {
        "pixel_values_videos": F.pad(cut, (0, 0, 0, lacking)),
        "video_position_ids": F.pad(places.expand(count, -1, -1), (0, 0, 0, lacking), value=-1),
        "num_frames_per_video": torch.tensor([count]),
    }
    return found, {"num_soft_tokens_per_video": [high * wide // kernel**2]}


def _of_minicpm(frames: torch.Tensor, settings: Mapping[str, Theirs], theirs: Theirs) -> tuple[Inputs, _ForText]:
    """Of each frame the whole and, if it is large, slices of it, as patches one beside the other."""
    if settings["stack_frames"] != 1:
        raise ValueError("stack_frames must be 1: which frames are stacked is chosen where a video is sampled")
    sizes, size, patch = theirs.image_processor, tuple(frames.shape[-2:]), settings["patch_size"]
    given = (settings["scale_resolution"], patch, settings["downsample_mode"])
    grid, parts = None, [frames]
    if settings["do_resize"]:
        if settings["slice_mode"]:
            grid = sizes.get_sliced_grid(size, settings["max_slice_nums"], settings["scale_resolution"])
        whole = sizes.find_best_resize(size, *given, allow_upscale=grid is None)
        parts = [resized(frames, whole, int(settings["resample"]))]
    if grid is not None:
        larger = sizes.get_refine_size(size, grid, *given, allow_upscale=True)
        enlarged = resized(frames, larger, int(settings["resample"]))
        rows = enlarged.split(larger[0] // grid[0], 2)
        parts += [part for row in rows for part in row.split(larger[1] // grid[1], 3)]
    cut, shapes = [], []
    for part in parts:
        count, _, height, width = part.shape
        shape = height // patch, width // patch
        pixels = _normalised(part, settings).view(count, 3, shape[0], patch, shape[1], patch)
        cut.append(pixels.permute(0, 1, 3, 2, 4, 5).reshape(count, 3, patch, -1))
        shapes.append(shape)
    found = {
        "pixel_values_videos": torch.cat([own[index] for index in range(len(frames)) for own in cut], -1)[None],
        "target_sizes_videos": torch.tensor(shapes * len(frames), dtype=torch.int32),
    }
    grids = np.array([(0, 0) if grid is None else tuple(grid)] * len(frames))
    return found, {"grids_videos": grids, "num_frames_per_video": [len(frames)]}


_TOKENS_OF_GEMMA4 = (70, 140, 280, 560, 1120)
_FORMS = {
    "Qwen2VLVideoProcessor": _Form(
        {
            **_ALL,
            **_PATCHES,
            **_CAP,
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
            **_CAP,
            **_HALF,
            "patch_size": 16,
            "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
            "max_video_tokens": 768,
        },
        "video",
    ),
    "Glm4vVideoProcessor": _Form(
        {
            **_ALL,
            **_PATCHES,
            **_CAP,
            **_CLIP,
            "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
        },
        "video",
    ),
    "VideoLlama3VideoProcessor": _Form(
        {
            **_ALL,
            **_PATCHES,
            **_HALF,
            "temporal_patch_size": 1,
            "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
            "use_token_compression": True,
        },
        "shares",
    ),
    "Gemma4VideoProcessor": _Form(
        {
            **_ALL,
            "image_mean": (0.0, 0.0, 0.0),
            "image_std": (1.0, 1.0, 1.0),
            "patch_size": 16,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 3,
        },
        make=_of_gemma4,
    ),
    "MiniCPMV4_6VideoProcessor": _Form(
        {
            **_ALL,
            **_HALF,
            "patch_size": 14,
            "max_slice_nums": 9,
            "scale_resolution": 448,
            "slice_mode": True,
            "stack_frames": 1,
            "downsample_mode": "16x",
            "use_image_id": None,
        },
        make=_of_minicpm,
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
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "exaone4_5", "hyperclovax_vision_v2"), "Qwen2VLVideoProcessor"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "Qwen3VLVideoProcessor"),
    **dict.fromkeys(("glm4v", "glm4v_moe"), "Glm4vVideoProcessor"),
    **dict.fromkeys(("glm46v", "glm_ocr"), "Glm46VVideoProcessor"),
    "llava_onevision": "LlavaOnevisionVideoProcessor",
    "llava_next_video": "LlavaNextVideoVideoProcessor",
    "internvl": "InternVLVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
    "video_llama_3": "VideoLlama3VideoProcessor",
    "gemma4": "Gemma4VideoProcessor",
    "minicpmv4_6": "MiniCPMV4_6VideoProcessor",
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
        return frozenset(self.settings) - {"downsample_mode"}  # which the tower is built for

    @property
    def writes_pixels(self) -> bool:
        """Whether the text of a video depends on its pixels, and not on their number alone."""
        return "use_token_compression" in self.settings

    def process(self, frames: Sequence[Image], timing: Timing, options: Mapping[str, object]) -> Processed:
        """Frames of one size in the RGB mode.

        Raises:
            ValidationError: they cannot be resized so, or an option is none.
        """
        check_options(options, self.options, " of videos")
        size = "x".join(map(str, frames[0].size))
        with processing(f"the video ({len(frames)} frames of {size})"):
            settings = {**self.settings, **options}
            given = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames]))
            found, more = self._inputs(given.permute(0, 3, 1, 2).contiguous(), timing, settings)
            text = self._text({**found, **more}, timing, settings)
        return Processed(found, text)

    def _inputs(self, frames: torch.Tensor, timing: Timing, settings: Mapping[str, Theirs]) -> tuple[Inputs, _ForText]:
        """Of uint8 [frames, 3, H, W]."""
        if self._form.make is not None:
            return self._form.make(frames, settings, self._theirs)
        pixels = self._pixels(frames, settings)
        if self._family == "internvl":
            return {"pixel_values": pixels}, {"pixel_values_videos": pixels[None]}
        if self._family == "smolvlm":
            mask = torch.ones(1, len(pixels), *pixels.shape[-2:], dtype=torch.int64)
            return {"pixel_values": pixels[None], "pixel_attention_mask": mask}, {}
        if not self._form.budget:
            return {"pixel_values_videos": pixels[None]}, {}
        found = self._patches(pixels, settings)
        if self._family == "qwen2_5_vl":
            fps = _metadata(timing).sampled_fps
            found["second_per_grid_ts"] = torch.tensor([settings["temporal_patch_size"] / fps])
        if "use_token_compression" in settings:
            merge = settings["merge_size"]
            found["video_merge_sizes"] = torch.tensor([merge])
            found[KEPT] = _changed(
                found["pixel_values_videos"], found["video_grid_thw"][0], merge, bool(settings["use_token_compression"])
            )
        return found, {}

    def _pixels(self, pixels: torch.Tensor, settings: Mapping[str, Theirs]) -> torch.Tensor:
        """uint8 [frames, 3, H, W] -> float32 [frames, 3, H', W'], normalised."""
        if settings["do_resize"]:
            for size in self._sizes(len(pixels), pixels.shape[2], pixels.shape[3], settings):
                pixels = resized(pixels, size, int(settings["resample"]))
        if settings["do_center_crop"]:
            pixels = _cropped(pixels, settings["crop_size"]["height"], settings["crop_size"]["width"])
        return _normalised(pixels, settings)

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
        tokens, caps = settings.get("max_video_tokens", 0), settings.get("cap_pixels_per_frame")
        if self._form.budget in ("frame", "shares"):
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

            if self._form.budget == "shares":
                most //= count
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
        more = {}
        if "slice_mode" in settings:
            theirs.video_slice_mode = settings["slice_mode"]
            more["video_token_divisor"] = 4 if settings["downsample_mode"] == "4x" else 16
        text: str = theirs.replace_video_token({**found, "video_metadata": [_metadata(timing)]}, 0, **more)
        return text


def _metadata(timing: Timing) -> Theirs:
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(
        total_num_frames=timing.total,
        fps=timing.fps,
        duration=timing.duration,
        frames_indices=list(timing.indices),
    )


def seconds_of(timing: Timing) -> str:
    """How long a video is, as a number in a prompt."""
    known = timing.total / (timing.fps or 24) if timing.duration is None else timing.duration
    return json.dumps(round(float(known), 2))


def _normalised(pixels: torch.Tensor, settings: Mapping[str, Theirs]) -> torch.Tensor:
    """uint8 [N, 3, H, W] -> float32."""
    factor = settings["rescale_factor"]
    if settings["do_normalize"]:
        by = 1.0 / factor if settings["do_rescale"] else 1.0
        mean, std = (torch.tensor(settings[key]) * by for key in ("image_mean", "image_std"))
        return pixels.float().sub_(mean[:, None, None]).div_(std[:, None, None])
    return pixels.float() * factor if settings["do_rescale"] else pixels.float()


def _changed(patches: torch.Tensor, grid: torch.Tensor, merge: int, drops: bool) -> torch.Tensor:
    """bool [tokens]: those of the first frame, and of others where they differ from the frame before; one at least.

    patches: float32 [tokens * merge * merge, channels].
    drops: False: all are kept.
    """
    times, high, wide = grid.tolist()
    tokens = patches.view(times, high // merge * (wide // merge), -1)
    kept = torch.ones(tokens.shape[:2], dtype=torch.bool)
    if drops and times > 1:
        kept[1:] = (tokens[1:] - tokens[:-1]).abs().mean(-1) * 255 > _LEAST_CHANGE
        kept[:, 0] |= ~kept.any(1)
    return kept.flatten()


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
