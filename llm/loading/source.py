"""Where a model's parts come from: its configuration, its tensors, its tokenizer and its generation defaults.

`ModelSource` is the interface that start-up reads a model through, `FolderSource` a folder in Hugging Face's layout.
Decides nothing: `llm.setup` uses the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from llm.base.text import show
from llm.base.types import JsonObject
from llm.errors import CheckpointError, ValidationError, nearest
from llm.loading.checkpoint import Checkpoint, TensorInfo
from llm.loading.model_files import read_json
from llm.loading.resolve import of_folder
from llm.text.tokenizer import TokenizerDefinition

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_CONFIG_BYTES = 16 << 20


class Tensors(Protocol):
    """The weights of a source, read as one stream.

    Attributes:
        tensors: name, dtype and shape of each tensor, by name.
        total_bytes: the size of all tensors.
    """

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def total_bytes(self) -> int: ...
    def stream(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class ModelSource(Protocol):
    """A model that can be loaded. It can be pickled: the runner that loads it may live in another process.

    Attributes:
        folder: the folder of the files beside the weights (quantization description, tokenizer).
    """

    @property
    def folder(self) -> Path: ...

    def config(self) -> JsonObject:
        """The configuration, with the keys of Hugging Face's config.json."""

    def tensors(self) -> Tensors:
        """The weights, opened at the first call; later calls return the same object until `close`."""

    def tokenizer(self) -> Path | TokenizerDefinition:
        """The folder that `llm.text.tokenizer.Tokenizer` opens, or the tokenizer itself."""

    def generation_defaults(self) -> JsonObject:
        """Generation defaults, with the keys of generation_config.json; empty if the model has none."""

    def close(self) -> None:
        """Close open files. May be called again."""

    def with_overrides(self, overrides: Mapping[str, object]) -> ModelSource:
        """The same model with keys of its configuration replaced; None as a value removes one."""


class FolderSource:
    """A folder in Hugging Face's layout.

    Args:
        overrides: keys of config.json to replace; None as a value removes one.
    """

    def __init__(self, folder: Path, overrides: Mapping[str, object] | None = None) -> None:
        self.folder = folder
        self._overrides: JsonObject = dict(overrides or {})
        self._checkpoint: Checkpoint | None = None

    def config(self) -> JsonObject:
        path = self.folder / "config.json"
        if not path.exists():
            raise CheckpointError(f"{self.folder} has no config.json; {of_folder(self.folder)}")
        return {**read_json(path, limit_bytes=_CONFIG_BYTES), **self._overrides}

    def tensors(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = Checkpoint.open(self.folder)
        return self._checkpoint

    def tokenizer(self) -> Path:
        return self.folder

    def generation_defaults(self) -> JsonObject:
        path = self.folder / "generation_config.json"
        return read_json(path, limit_bytes=_CONFIG_BYTES) if path.exists() else {}

    def close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None

    def with_overrides(self, overrides: Mapping[str, object]) -> FolderSource:
        return FolderSource(self.folder, overrides)

    def __reduce__(self) -> tuple[type[FolderSource], tuple[Path, JsonObject]]:
        return FolderSource, (self.folder, self._overrides)


class UpdatedSource:
    """A model some of whose tensors are replaced by others of the same names, shapes and types.

    Raises:
        ValidationError: a name is not of the model's, or a tensor has another shape, or floats for stored codes.
    """

    def __init__(self, source: ModelSource, replaced: Mapping[str, torch.Tensor]) -> None:
        self._source, self._replaced = source, dict(replaced)
        known = source.tensors().tensors
        for name, tensor in self._replaced.items():
            if name not in known:
                raise ValidationError(
                    f"the checkpoint has no tensor {show(name)}.{nearest(str(name), known)}", parameter="tensors"
                )
            dtype = known[name].dtype
            is_codes = not dtype.is_floating_point or dtype.itemsize == 1
            if isinstance(tensor, torch.Tensor) and is_codes and tensor.dtype != dtype:
                raise ValidationError(
                    f"{name} is stored as codes, {str(dtype).removeprefix('torch.')}, and got {tensor.dtype}: pass "
                    "codes, and scales under their names; or load_weights(path) from another checkpoint; or open a "
                    "float checkpoint with quantization=, whose updates are quantized.",
                    parameter="tensors",
                )
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != tuple(known[name].shape):
                got = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ValidationError(
                    f"{name} must be a tensor of shape {list(known[name].shape)}, got {got}.", parameter="tensors"
                )
            self._replaced[name] = tensor.detach().to("cpu", known[name].dtype, copy=True)

    @property
    def folder(self) -> Path:
        return self._source.folder

    def updated(self, replaced: Mapping[str, torch.Tensor]) -> UpdatedSource:
        """With these replaced too."""
        return UpdatedSource(self._source, {**self._replaced, **replaced})

    def config(self) -> JsonObject:
        return self._source.config()

    def tensors(self) -> UpdatedTensors:
        return UpdatedTensors(self._source.tensors(), self._replaced)

    def tokenizer(self) -> Path | TokenizerDefinition:
        return self._source.tokenizer()

    def generation_defaults(self) -> JsonObject:
        return self._source.generation_defaults()

    def close(self) -> None:
        self._source.close()

    def with_overrides(self, overrides: Mapping[str, object]) -> ModelSource:
        return UpdatedSource(self._source.with_overrides(overrides), self._replaced)


class UpdatedTensors:
    """The tensors of an `UpdatedSource`."""

    def __init__(self, tensors: Tensors, replaced: Mapping[str, torch.Tensor]) -> None:
        self._tensors, self._replaced = tensors, replaced

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors.tensors

    @property
    def total_bytes(self) -> int:
        return self._tensors.total_bytes

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.stream():
            yield name, self._replaced.get(name, tensor)

    def parts(self, names: Sequence[Sequence[str]]) -> Tensors:
        """These alone, in this order; of a source that is no folder all, in its own."""
        if not isinstance(self._tensors, Checkpoint | UpdatedTensors):
            return self
        return UpdatedTensors(self._tensors.parts(names), self._replaced)


Overrides = Mapping[str, object] | Callable[["PretrainedConfig"], "PretrainedConfig"] | None


def resolve_overrides(given: Overrides, raw: JsonObject) -> JsonObject:
    """Keys to replace in `raw`, the decoded config.json; raises `ValidationError` if a callable returns no config."""
    if not callable(given):
        return dict(given or {})
    from transformers import PretrainedConfig

    config = _config_class(raw).from_dict(dict(raw))
    before = config.to_dict()
    changed = given(config)
    if not isinstance(changed, PretrainedConfig):
        raise ValidationError(
            f"hf_overrides must be a callable that returns the config it was given, got {type(changed).__name__}.",
            parameter="hf_overrides",
            value=given,
        )
    return _changes(before, changed.to_dict(), raw)


def _config_class(raw: JsonObject) -> type[PretrainedConfig]:
    from transformers import CONFIG_MAPPING, PretrainedConfig

    known = raw.get("model_type")
    return CONFIG_MAPPING[known] if isinstance(known, str) and known in CONFIG_MAPPING else PretrainedConfig


def _changes(before: JsonObject, after: JsonObject, raw: JsonObject) -> JsonObject:
    """The keys whose values differ; None for one that is gone. Of a nested object, what `raw` has and its changes."""
    found: JsonObject = {}
    for key in before | after:
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        nested = raw.get(key)
        if isinstance(old, dict) and isinstance(new, dict) and isinstance(nested, dict):
            new = {**nested, **_changes(old, new, nested)}
        found[key] = new
    return found
