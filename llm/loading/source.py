"""Where a model's parts come from: its configuration, its tensors, its tokenizer and its generation defaults.

Owns `ModelSource`, what start-up asks of a model wherever it lies, and `FolderSource`, a folder in Hugging Face's
layout. Decides nothing; how the parts are used is `llm.startup`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from llm.base.errors import CheckpointError
from llm.loading.checkpoint import Checkpoint, TensorInfo, read_json

_CONFIG_BYTES = 16 << 20


class Tensors(Protocol):
    """The weights of a source, read in one stream.

    Attributes:
        tensors: what the headers say of each tensor, by name.
        total_bytes: of all tensors.
    """

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def total_bytes(self) -> int: ...
    def stream(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class ModelSource(Protocol):
    """A model that can be loaded. It can be pickled: the runner that loads it may live in another process.

    Attributes:
        folder: where it lies; files beside the weights (descriptions of a quantization, the tokenizer's) are there.
    """

    @property
    def folder(self) -> Path: ...

    def config(self) -> Mapping[str, Any]:
        """Under the names of Hugging Face's config.json."""

    def tensors(self) -> Tensors:
        """Opened when first asked for, and then the same until `close`."""

    def tokenizer(self) -> Path:
        """What `llm.tokenizer.Tokenizer` opens."""

    def generation_defaults(self) -> Mapping[str, Any]:
        """Under the names of generation_config.json; empty when the model has none."""

    def close(self) -> None:
        """Let go of open files. Harmless when called again."""


class FolderSource:
    """A folder in Hugging Face's layout.

    Args:
        overrides: keys of config.json to replace; None as a value removes one.
    """

    def __init__(self, folder: Path, overrides: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self._overrides = dict(overrides or {})
        self._checkpoint: Checkpoint | None = None

    def config(self) -> Mapping[str, Any]:
        path = self.folder / "config.json"
        if not path.exists():
            raise CheckpointError(f"{self.folder} has no config.json; is it a Hugging Face model folder?")
        return {**read_json(path, limit_bytes=_CONFIG_BYTES), **self._overrides}

    def tensors(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = Checkpoint.open(self.folder)
        return self._checkpoint

    def tokenizer(self) -> Path:
        return self.folder

    def generation_defaults(self) -> Mapping[str, Any]:
        path = self.folder / "generation_config.json"
        return read_json(path, limit_bytes=_CONFIG_BYTES) if path.exists() else {}

    def close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None

    def __reduce__(self) -> tuple[Any, ...]:
        return FolderSource, (self.folder, self._overrides)
