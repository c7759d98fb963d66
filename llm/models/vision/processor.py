"""A family's processor of transformers, one picture at a time: pixels for the tower, and the tokens in its place.

transformers' processor classes want a tokenizer, an image processor and often one of videos, which needs torchvision.
Here each is put together from the parts that a picture needs, all of them PIL's and NumPy's.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from llm.base.text import clip, show
from llm.base.types import JsonObject
from llm.errors import UnsupportedModelError, ValidationError, nearest
from llm.models.transformers_backend.skeleton import Theirs

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

FILES = ("processor_config.json", "preprocessor_config.json")
# Sub-processors whose settings are in processor_config.json, and its other keys that are no argument.
_NO_ARGUMENTS = frozenset(
    "processor_class auto_map image_processor video_processor feature_extractor audio_processor tokenizer "
    "chat_template audio_tokenizer".split()
)
# What a processor returns beside a tower's inputs.
_NOT_FOR_TOWERS = frozenset("rows cols num_crops num_patches num_tokens".split())

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Processed:
    """A picture for a tower.

    Attributes:
        inputs: of the tower, by transformers' names; first dimension: this picture alone.
        text: what stands for it in a prompt, made of special tokens.
    """

    inputs: Inputs
    text: str

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.inputs.values())


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
        token_id: of the tokens in whose places features are.
    """

    def __init__(
        self, folder: Path, config: JsonObject, tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, JsonObject]
    ) -> None:
        self._family = str(config.get("model_type", "?"))
        self._theirs = _build(folder, self._family, settings, tokenizer)
        self._tokenizer = tokenizer
        self.placeholder: str = self._placeholder()
        (self.placeholder_id,) = self.ids(self.placeholder)
        own = config.get("image_token_id", config.get("image_token_index"))
        self.token_id = own if isinstance(own, int) else getattr(self._theirs, "image_token_id", self.placeholder_id)
        self.settings = json.dumps([self._family, settings], sort_keys=True, default=str)

    def ids(self, text: str) -> list[int]:
        """Of a text that has its special tokens already."""
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def whole_ids(self, text: str, texts: Sequence[str], *, plain: bool) -> list[int]:
        """Of a prompt with as many placeholders as there are `texts`, which stand for pictures.

        plain: the prompt has its special tokens.
        """
        from PIL import Image

        blank = [Image.new("RGB", (1, 1))] * len(texts)
        options = {"format": False, "images_kwargs": {}} if self._family == "got_ocr2" else {}
        _, (whole,), *_ = self._theirs.prepare_inputs_layout(images=blank, text=[text], **options)
        parts = whole.split(self.placeholder)
        expanded = parts[0] + "".join(own + part for own, part in zip(texts, parts[1:], strict=True))
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
        known = self._known_options()
        for name in options:
            if name not in known:
                listed = ", ".join(sorted(known))
                raise ValidationError(
                    f"mm_processor_kwargs has no key {name!r}; it takes {listed}.{nearest(name, known)}",
                    parameter="mm_processor_kwargs",
                )
        try:
            merged = self._theirs._merge_kwargs(
                self._theirs.valid_processor_kwargs,
                tokenizer_init_kwargs=self._tokenizer.init_kwargs,
                **dict(options),
            )["images_kwargs"]
            merged["return_tensors"] = "pt"
            found, texts = self._theirs._process_images([picture], **merged)
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, NotImplementedError) as error:
            reason = clip(" ".join(str(error).split()), 200) or type(error).__name__
            size = "x".join(map(str, picture.size))
            raise ValidationError(
                f"the image ({size}) cannot be processed: {reason}",
                parameter="multi_modal_data",
            ) from error
        unused = {*self._theirs.unused_input_names, *_NOT_FOR_TOWERS}
        inputs = {name: _tensor(value) for name, value in found.items() if name not in unused}
        return Processed({name: value for name, value in inputs.items() if value.numel()}, texts[0])

    def _known_options(self) -> frozenset[str]:
        """The names of a picture's settings."""
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
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    names = [found["processor_class"] for found in settings.values() if found.get("processor_class")]
    names += [PROCESSOR_MAPPING_NAMES[family]] if family in PROCESSOR_MAPPING_NAMES else []
    theirs = next(filter(None, (_class_of(_text(name), processor_class_from_name) for name in names)), None)
    if theirs is None:
        raise UnsupportedModelError(f"transformers has no processor for images of model_type {show(family)}.")
    try:
        images = AutoImageProcessor.from_pretrained(
            str(folder), backend="pil", local_files_only=True, trust_remote_code=False
        )
        own = {"image_processor": images, "tokenizer": tokenizer}
        parts = {name: own.get(name) for name in theirs.get_attributes()}
        arguments = {key: value for key, value in settings[FILES[0]].items() if key not in _NO_ARGUMENTS}
        module = sys.modules[theirs.__module__]
        if getattr(module, "num2words", True) is None:  # counts frames in words, which nothing here has
            module.num2words = str  # type: ignore[attr-defined]
        return _without_videos(theirs)(**parts, **arguments)
    except (ImportError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UnsupportedModelError(
            f"the image processor of {family} cannot be built: {clip(' '.join(str(error).split()), 300)}"
        ) from error


def _class_of(name: str, theirs: Callable[[str], Theirs]) -> Theirs:
    return pixtral_processor() if name == "PixtralProcessor" else theirs(name)


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
