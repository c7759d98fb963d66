"""A model in one GGUF file, or in the parts of a split one.

Owns `GgufSource`, the twin of `FolderSource`, and what the files of a split model must agree on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from llm.base.text import list_names
from llm.base.types import JsonObject
from llm.errors import CheckpointError
from llm.kernels.reference.gguf_blocks import BLOCKS
from llm.loading.checkpoint import TensorInfo
from llm.loading.gguf.container import GgufFile, GgufTensor, read_header
from llm.loading.gguf.keys import Metadata
from llm.loading.gguf.metadata import Header, config_of
from llm.loading.gguf.names import ROPE_TENSORS, Family, as_trained, family_of
from llm.loading.gguf.places import Place, placed, raw_values
from llm.loading.gguf.tokenizer import read_tokenizer
from llm.tokenizer_backends import TokenizerDefinition

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII)
_MOST_ROPE_VALUES = 1 << 13


class GgufTensors:
    """The tensors of all parts under Hugging Face's names: floats, or raw rows of blocks, uint8 [N, bytes of a row].

    A tensor is a view into a private mapping of its file, as those of `llm.loading.checkpoint`.
    """

    def __init__(self, places: Mapping[str, Place], family: Family, heads: int, kv_heads: int) -> None:
        self._family, self._heads, self._kv_heads = family, heads, kv_heads
        self._places = places
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: place.info(name) for name, place in places.items()}
        )
        self.total_bytes = sum(info.nbytes for info in self.tensors.values())

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, file by file."""
        mapped: dict[Path, torch.Tensor] = {}

        def mapping(file: Path) -> torch.Tensor:
            if file not in mapped:
                mapped.clear()  # of one file at a time
                mapped[file] = _mapping(file)
            return mapped[file]

        for name, place in self._places.items():
            values = place.read(name, mapping)
            yield name, as_trained(name, values, self._family, self._heads, self._kv_heads)


class GgufSource:
    """A model whose configuration, tokenizer and weights are in GGUF.

    Args:
        path: the file; of a split model any of its parts.
        overrides: keys of config.json to replace; None as a value removes one.
    """

    def __init__(self, path: Path, overrides: Mapping[str, object] | None = None) -> None:
        self.path = path
        self.folder = path.parent
        self._overrides: JsonObject = dict(overrides or {})
        self._files: list[GgufFile] | None = None

    def config(self) -> JsonObject:
        files = self._opened()
        tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
        table = tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise CheckpointError(f"{self.path} has no embedding (token_embd.weight) of two dimensions.")
        ropes = {name: _small(tensors[name]) for name in ROPE_TENSORS if name in tensors}
        dtype = _float_type(list(tensors.values()))
        biases = ("blk.0.attn_q.bias" in tensors, "blk.0.ffn_up.bias" in tensors)
        header = Header(files[0].metadata, table.shape[0], "output.weight" in tensors, *biases, ropes, dtype)
        config = config_of(header)
        family = family_of(files[0].metadata.get("general.architecture"))
        types = {name: place.type for name, place in placed(files, family, _experts(files[0])).items()}
        if any(BLOCKS[kind].dtype is None for kind in types.values()):
            config["quantization_config"] = {"quant_method": "gguf", "types": types}
        return {**config, **self._overrides}

    def tensors(self) -> GgufTensors:
        files = self._opened()
        config = self.config()
        family = family_of(files[0].metadata.get("general.architecture"))
        heads = (config["num_attention_heads"], config["num_key_value_heads"])
        return GgufTensors(placed(files, family, _experts(files[0])), family, *heads)

    def tokenizer(self) -> TokenizerDefinition:
        return read_tokenizer(self._opened()[0].metadata, self.path)

    def generation_defaults(self) -> JsonObject:
        """GGUF has none; the ids that end an answer are in `config`."""
        return {}

    def close(self) -> None:
        """Headers stay: they hold no file."""

    def with_overrides(self, overrides: Mapping[str, object]) -> GgufSource:
        source = GgufSource(self.path, overrides)
        source._files = self._files
        return source

    def __reduce__(self) -> tuple[type[GgufSource], tuple[Path, JsonObject]]:
        return GgufSource, (self.path, self._overrides)

    def _opened(self) -> list[GgufFile]:
        if self._files is None:
            self._files = [read_header(path) for path in parts_of(self.path)]
            _check_parts(self._files)
        return self._files


def part_names(path: Path) -> list[Path]:
    """The files of the model that `path` belongs to, by its name; raises `CheckpointError` for an impossible one."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    count = int(named[3])
    if not 1 <= int(named[2]) <= count:
        raise CheckpointError(f"{path} is named part {int(named[2])} of {count}.")
    return [path.with_name(f"{named[1]}-{number:05d}-of-{named[3]}.gguf") for number in range(1, count + 1)]


def parts_of(path: Path) -> list[Path]:
    """All files of the model that `path` belongs to; raises `CheckpointError` when one is missing."""
    parts = part_names(path)
    if len(parts) == 1:
        return parts
    if not parts[-1].exists():
        raise CheckpointError(f"{path} is a part of a split model, and {parts[-1].name} is missing beside it.")
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise CheckpointError(f"{path} is a part of a split model, and beside it are missing {list_names(missing)}.")
    return parts


def _check_parts(files: list[GgufFile]) -> None:
    """That each file is the part that its name says, of one model."""
    for number, file in enumerate(files):
        count = file.metadata.get("split.count", 1)
        if count != len(files) and not (len(files) == 1 and count == 0):
            raise CheckpointError(f"{file.path} is of a model in {count} parts, and its name says {len(files)}.")
        if len(files) > 1 and file.metadata.get("split.no") != number:
            raise CheckpointError(f"{file.path} is not part {number + 1}, as its name says.")
    expected = files[0].metadata.get("split.tensors.count")
    held = sum(len(file.tensors) for file in files)
    if len(files) > 1 and expected is not None and expected != held:
        raise CheckpointError(f"{files[0].path} promises {expected} tensors, and the parts hold {held}.")


def _experts(file: GgufFile) -> int:
    """Of a layer; 0: it has none."""
    return Metadata(file.metadata).integer("expert_count", 0)


def _mapping(file: Path) -> torch.Tensor:
    """The file's bytes, copied on write: it takes no memory before it is written to."""
    try:
        return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{file} cannot be mapped into memory.") from error


def _small(tensor: GgufTensor) -> list[float]:
    """The values of a rope tensor."""
    if BLOCKS[tensor.type].dtype is None or len(tensor.shape) != 1 or tensor.shape[0] > _MOST_ROPE_VALUES:
        raise CheckpointError(f"{tensor.file}: {tensor.name} must be at most {_MOST_ROPE_VALUES} floats.")
    values: list[float] = raw_values(tensor, _mapping).float().tolist()
    return values


def _float_type(tensors: list[GgufTensor]) -> str:
    """The floating type that most bytes of matrices are in; float16, the type of the scales, where there are none."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        dtype = BLOCKS[tensor.type].dtype
        if dtype is not None and len(tensor.shape) > 1:
            sizes[str(dtype).removeprefix("torch.")] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float16"
