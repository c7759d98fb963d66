"""A family's processor of transformers, one picture at a time: pixels for the tower, and the tokens in its place.

transformers' processor classes want a tokenizer, an image processor and often one of videos, which needs torchvision.
Here each is put together from the parts that a picture needs, all of them PIL's and NumPy's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from llm.base.text import clip, show
from llm.base.types import JsonObject
from llm.errors import UnsupportedModelError, ValidationError
from llm.models.transformers_backend.skeleton import Theirs
from llm.models.vision.inputs import TOKENS, Processed, Timing, check_options, processing
from llm.models.vision.replacements import (
    idefics2_processor,
    llama4_image_processor,
    minicpm_processor,
    pixtral_processor,
)
from llm.models.vision.video import VideoProcessor, in_words, seconds_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
IMAGE, VIDEO = "image", "video"
# Sub-processors whose settings are in processor_config.json, and its other keys that are no argument.
_NO_ARGUMENTS = frozenset(
    "processor_class auto_map image_processor video_processor feature_extractor audio_processor tokenizer "
    "chat_template audio_tokenizer".split()
)
# What a processor returns beside a tower's inputs.
_NOT_FOR_TOWERS = frozenset("rows cols num_crops num_patches num_tokens".split())


class PictureProcessor:
    """The processor of a model folder.

    Args:
        config: the decoded config.json.
        tokenizer: of the same model.
        settings: the decoded `FILES`, by name; {} for one that is not there.

    Raises:
        UnsupportedModelError: transformers has no such processor, or it needs more than PIL.

    Attributes:
        placeholder: the text that stands for a picture in a prompt; one token, `placeholder_id`.
        token_id: of the tokens in whose places a picture's features are.
        indicators: other tokens of a picture whose features its tower makes too; of Ovis 2.
    """

    def __init__(
        self, folder: Path, config: JsonObject, tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, JsonObject]
    ) -> None:
        self._family = str(config.get("model_type", "?"))
        self._files = [settings[name] for name in FILES]
        self._theirs = _build(folder, self._family, settings, tokenizer)
        self._tokenizer = tokenizer
        self.placeholder: str = self._placeholder()
        (self.placeholder_id,) = self.ids(self.placeholder)
        own = config.get("image_token_id", config.get("image_token_index"))
        self.token_id = own if isinstance(own, int) else getattr(self._theirs, "image_token_id", self.placeholder_id)
        video = config.get("video_token_id", config.get("video_token_index"))
        self._video_token_id = video if isinstance(video, int) else self.token_id
        more = config.get("visual_indicator_token_ids")
        self.indicators: tuple[int, ...] = tuple(more) if isinstance(more, list) else ()
        self.settings = json.dumps([self._family, settings], sort_keys=True, default=str)

    def ids(self, text: str) -> list[int]:
        """Of a text that has its special tokens already."""
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    @cached_property
    def videos(self) -> VideoProcessor:
        """Raises `UnsupportedModelError` where videos of this family are not read."""
        return VideoProcessor(self._family, self._theirs, self._files)

    @property
    def feature_ids(self) -> frozenset[int]:
        """The tokens that have features."""
        return frozenset({self.token_id, self._video_token_id})

    def token_id_in(self, ids: Sequence[int], kind: str) -> int:
        """Of the tokens with features in what stands for a picture or a video."""
        own = self.token_id if kind == IMAGE else self._video_token_id
        return own if own in ids else self.token_id

    def indicators_beside(self, token_id: int) -> tuple[int, ...]:
        """The other tokens with features of what has features in the places of `token_id`."""
        return self.indicators if token_id == self.token_id else ()

    def before(self, number: int, options: Mapping[str, object]) -> str:
        """What stands in a prompt before the text of its picture, or its video, of this number, from 0.

        options: `mm_processor_kwargs`.
        """
        own = getattr(self._theirs, "before", None)
        found: str = "" if own is None else own(number, options.get("use_image_id"))
        return found

    def with_durations(self, text: str, timings: Sequence[Timing]) -> str:
        """A prompt with the seconds of its videos in the places that the chat template of HyperCLOVA X leaves.

        Raises:
            ValidationError: there are not as many.
        """
        mark = getattr(self._theirs, "video_duration_token", None)
        if not isinstance(mark, str) or mark not in text or not timings:
            return text
        first, *others = text.split(mark)
        if len(others) != len(timings):
            raise ValidationError(
                f"the prompt has {len(others)} of {mark} and {len(timings)} videos; it must have as many, or none.",
                parameter="multi_modal_data",
            )
        return first + "".join(seconds_of(timing) + part for timing, part in zip(timings, others, strict=True))

    def placeholder_of(self, kind: str) -> str:
        return self.placeholder if kind == IMAGE else self.videos.placeholder

    def kinds_in(self, text: str, kinds: Collection[str]) -> list[str]:
        """Of the placeholders in a text, in their order; placeholders of other kinds are text."""
        by_text = {self.placeholder_of(kind): kind for kind in kinds}
        return [by_text[found] for found in re.findall("|".join(map(re.escape, by_text)), text)] if kinds else []

    def whole_ids(self, text: str, texts: Sequence[str], kinds: Sequence[str], *, plain: bool) -> list[int]:
        """Of a prompt with as many placeholders as there are `texts`, which stand for pictures and videos.

        kinds: of the placeholders, in their order.
        plain: the prompt has its special tokens.
        """
        from PIL import Image

        blank = [Image.new("RGB", (1, 1))] * kinds.count(IMAGE)
        options = {"format": False, "images_kwargs": {}} if self._family == "got_ocr2" else {}
        _, (whole,), *_ = self._theirs.prepare_inputs_layout(images=blank or None, text=[text], **options)
        parts = re.split("|".join(re.escape(self.placeholder_of(kind)) for kind in set(kinds)), whole)
        expanded = parts[0] + "".join(own + part for own, part in zip(texts, parts[1:], strict=True))
        if self._family == "idefics2":
            expanded = self._theirs.joined(expanded)
        found: list[int] = self._tokenizer(expanded, add_special_tokens=not plain)["input_ids"]
        return found

    def digest_of(self, options: Mapping[str, object]) -> bytes:
        """Of everything besides a picture that its features depend on."""
        return hashlib.sha256(
            f"{self.settings}{json.dumps(dict(options), sort_keys=True, default=str)}".encode()
        ).digest()

    def text_of_id(self, token_id: int) -> str:
        found: Theirs = self._tokenizer.convert_ids_to_tokens(token_id)
        return found if isinstance(found, str) else ""

    def process(self, picture: Image, options: Mapping[str, object]) -> Processed:
        """A picture in the RGB mode.

        Args:
            options: `mm_processor_kwargs`.

        Raises:
            ValidationError: the processor cannot take the picture, or an option.
        """
        check_options(options, self.options_of(IMAGE))
        with processing(f"the image ({'x'.join(map(str, picture.size))})"):
            whole = self._theirs._merge_kwargs(
                self._theirs.valid_processor_kwargs,
                tokenizer_init_kwargs=self._tokenizer.init_kwargs,
                **dict(options),
            )
            makes = self._theirs._process_images
            merged = {name: whole[name] for name in inspect.signature(makes).parameters if name in whole}
            merged |= {**whole["images_kwargs"], "return_tensors": "pt"}
            found, texts = makes([picture], **merged)
        unused = {*self._theirs.unused_input_names, *_NOT_FOR_TOWERS}
        inputs = {name: _tensor(value) for name, value in found.items() if name not in unused}
        if self.indicators:
            ids = np.array(self.ids(texts[0]))
            inputs[TOKENS] = torch.from_numpy(ids[np.isin(ids, (self.token_id, *self.indicators))])
        return Processed({name: value for name, value in inputs.items() if value.numel()}, texts[0])

    def options_of(self, kind: str) -> frozenset[str]:
        """The names of the settings of pictures, or of videos; () if these are not read."""
        if kind == VIDEO:
            try:
                return self.videos.options
            except UnsupportedModelError:
                return frozenset()
        from transformers.processing_utils import ImagesKwargs

        of_class = self._theirs.valid_processor_kwargs.__annotations__.get("images_kwargs", ImagesKwargs)
        of_images = getattr(self._theirs.image_processor, "valid_kwargs", of_class)
        return frozenset({*of_class.__annotations__, *of_images.__annotations__}) - {"return_tensors", "device"}

    def _placeholder(self) -> str:
        for name in ("image_placeholder_token", "image_token", "boi_token"):
            found = getattr(self._theirs, name, None)
            if isinstance(found, str) and len(self.ids(found)) == 1:
                return found
        raise UnsupportedModelError(f"the processor of {self._family} has no token that stands for an image.")


def _build(folder: Path, family: str, settings: Mapping[str, JsonObject], tokenizer: PreTrainedTokenizerBase) -> Theirs:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    names = [found["processor_class"] for found in settings.values() if found.get("processor_class")]
    names += [PROCESSOR_MAPPING_NAMES[family]] if family in PROCESSOR_MAPPING_NAMES else []
    theirs = next(filter(None, (_class_of(_text(name), processor_class_from_name) for name in names)), None)
    if theirs is None:
        raise UnsupportedModelError(f"transformers has no processor for images of model_type {show(family)}.")
    try:
        own = {"image_processor": _image_processor(folder, family), "tokenizer": tokenizer}
        parts = {name: own.get(name) for name in theirs.get_attributes()}
        arguments = {key: value for key, value in settings[FILES[0]].items() if key not in _NO_ARGUMENTS}
        module = sys.modules[theirs.__module__]
        if getattr(module, "num2words", True) is None:  # counts the frames of a video in words
            module.num2words = in_words  # type: ignore[attr-defined]
        return _without_videos(theirs)(**parts, **arguments)
    except (ImportError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UnsupportedModelError(
            f"the image processor of {family} cannot be built: {clip(' '.join(str(error).split()), 300)}"
        ) from error


def _image_processor(folder: Path, family: str) -> Theirs:
    """Of Pillow and NumPy; some families have one of torchvision alone."""
    from transformers import AutoImageProcessor

    if family == "llama4":
        return llama4_image_processor().from_pretrained(str(folder), local_files_only=True)
    try:
        return AutoImageProcessor.from_pretrained(
            str(folder), backend="pil", local_files_only=True, trust_remote_code=False
        )
    except (ValueError, ImportError) as error:
        if importlib.util.find_spec("torchvision") is not None:
            raise
        raise ImportError("transformers has it for torchvision alone, which is not installed") from error


def _class_of(name: str, theirs: Callable[[str], Theirs]) -> Theirs:
    if name == "PixtralProcessor":
        return pixtral_processor()
    own = {"Idefics2Processor": idefics2_processor, "MiniCPMV4_6Processor": minicpm_processor}.get(name)
    return theirs(name) if own is None else own(theirs(name))


def _text(name: object) -> str:
    return name if isinstance(name, str) else str(name[0] if isinstance(name, list | tuple) else name)


def _without_videos(theirs: type) -> type:
    """The class, whose parts may be missing."""

    def check(self: object, name: str, argument: object) -> object:
        return None if argument is None else theirs.check_argument_for_proper_class(self, name, argument)  # type: ignore[attr-defined]

    return type(theirs.__name__, (theirs,), {"check_argument_for_proper_class": check})


def _tensor(value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return torch.stack(value) if len({item.shape for item in value}) == 1 else value[0][None]
    return torch.as_tensor(np.asarray(value))
