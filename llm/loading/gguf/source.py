"""A model in one GGUF file, or in the parts of a split one.

`GgufSource` is the twin of `FolderSource`.

Three differences from a Hugging Face checkpoint are undone here. GGUF stores the experts of a layer as one tensor of
three dimensions: each has its own, a view. It splits the projection behind the latents of DeepSeek by heads, one part
transposed: joined, as floats, which is how latent attention reads it. It drops a dimension of one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from llm.base.text import list_names, quote
from llm.base.types import JsonObject
from llm.errors import CheckpointError
from llm.kernels.reference.gguf_blocks import BLOCKS, decode
from llm.loading.checkpoint import TensorInfo
from llm.loading.gguf.container import GgufFile, GgufTensor, Metadata, read_header
from llm.loading.gguf.metadata import DTYPE_KEY, Header, config_of
from llm.loading.gguf.names import ROPE_TENSORS, Family, as_trained, family_of, hugging_face_name
from llm.loading.gguf.tokenizer import read_tokenizer
from llm.text.tokenizer import TokenizerDefinition

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII)
_MOST_ROPE_VALUES = 1 << 13


class GgufTensors:
    """The tensors of all parts under Hugging Face's names: floats, or raw rows of blocks, uint8 [N, bytes of a row].

    A tensor is a view into a private mapping of its file, as those of `llm.loading.checkpoint`.
    """

    def __init__(self, places: Mapping[str, TensorPlace], family: Family, heads: int, kv_heads: int) -> None:
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
        named = files[0].metadata.get(DTYPE_KEY)
        dtype = named if isinstance(named, str) else _float_type(list(tensors.values()))
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


# --- Where each tensor is. ---

_STACK = re.compile(r"(.+\.experts)\.(gate_proj|up_proj|down_proj)\.(weight|bias)", re.ASCII)
_LATENT = re.compile(r"(.+)\.(kv_b_proj|k_b_proj|v_b_proj)\.weight", re.ASCII)
_MOST_PLACES = 1 << 19
# Names' ends -> the dimension of one that GGUF drops: of a matrix of one row, of the channels' own filters.
_DROPPED = {"shared_expert_gate.weight": 0, "conv.conv.weight": 1}
Mapped = Callable[[Path], torch.Tensor]


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor of the checkpoint is: a tensor of the file, one expert's part of it, or two tensors joined.

    Attributes:
        tensor: of the file; of two, what latents are compared with, [heads, latent, key].
        expert: whose part; None: it is no stack.
        values: [heads, value, latent], the second of two; None: there is one.
        is_float: blocks are read as floats.
    """

    tensor: GgufTensor
    expert: int | None = None
    values: GgufTensor | None = None
    is_float: bool = False

    @property
    def type(self) -> str:
        """As `GGUFConfig` needs it."""
        return "F32" if self.is_float else self.tensor.type

    def info(self, name: str) -> TensorInfo:
        dtype = torch.float32 if self.is_float else BLOCKS[self.tensor.type].dtype
        return TensorInfo(name, dtype or torch.uint8, self._shape(name, dtype is not None), self.tensor.file)

    def read(self, name: str, mapped: Mapped) -> torch.Tensor:
        """Floats, or raw rows of blocks, uint8 [N, bytes of a row]: a view into the file's mapping where it can be."""
        if self.values is not None:
            keys = dequantized(self.tensor, mapped).transpose(1, 2)
            return torch.cat((keys, dequantized(self.values, mapped)), dim=1).flatten(0, 1)
        if self.is_float:
            return dequantized(self.tensor, mapped)
        found = raw_values(self.tensor, mapped, self.expert)
        return found.view(self._shape(name, BLOCKS[self.type].dtype is not None))

    def _shape(self, name: str, is_dense: bool) -> tuple[int, ...]:
        shape = self.tensor.shape if is_dense else (*self.tensor.shape[:-1], self.tensor.row_bytes)
        if self.values is not None:
            heads, latent, key = self.tensor.shape
            return heads * (key + self.values.shape[1]), latent
        for end, axis in _DROPPED.items():
            if name.endswith(end) and len(shape) == axis + 1:
                return *shape[:axis], 1, *shape[axis:]
        return shape if self.expert is None else shape[1:]


def placed(files: list[GgufFile], family: Family, experts: int) -> dict[str, TensorPlace]:
    """Every tensor of the files under Hugging Face's names.

    Args:
        experts: of a layer, which the tensors that stack them must have.

    Raises:
        CheckpointError: two tensors of one name, another number of experts, or one part of a projection.
    """
    found: dict[str, TensorPlace] = {}
    parts: dict[str, dict[str, GgufTensor]] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in ROPE_TENSORS:
                continue
            name = hugging_face_name(tensor.name, family)
            latent = _LATENT.fullmatch(name)
            if latent is not None and latent[2] != "kv_b_proj":
                parts.setdefault(latent[1], {})[latent[2]] = tensor
                continue
            for each, place in _places(name, tensor, experts, latent is not None):
                if each in found:
                    raise CheckpointError(f"{file.path} has the tensor {quote(tensor.name)} twice.")
                found[each] = place
                if len(found) > _MOST_PLACES:
                    raise CheckpointError(f"{file.path} has more than {_MOST_PLACES} matrices of experts.")
    for path, both in parts.items():
        found[f"{path}.kv_b_proj.weight"] = _joined(path, both)
    return found


def _places(name: str, tensor: GgufTensor, experts: int, is_latent: bool) -> Iterator[tuple[str, TensorPlace]]:
    stack = _STACK.fullmatch(name)
    if stack is None:
        yield name, TensorPlace(tensor, is_float=is_latent and BLOCKS[tensor.type].dtype is None)
        return
    if len(tensor.shape) != (3 if stack[3] == "weight" else 2) or tensor.shape[0] != experts:
        raise CheckpointError(
            f"{tensor.file}: {quote(tensor.name)} has the shape {list(tensor.shape)}, and the model {experts} experts."
        )
    for index in range(experts):
        yield f"{stack[1]}.{index}.{stack[2]}.{stack[3]}", TensorPlace(tensor, index)


def _joined(path: str, both: dict[str, GgufTensor]) -> TensorPlace:
    keys, values = both.get("k_b_proj"), both.get("v_b_proj")
    if keys is None or values is None:
        raise CheckpointError(f"{path} has one of attn_k_b and attn_v_b in this GGUF file, and needs both.")
    fits = len(keys.shape) == len(values.shape) == 3
    if not fits or keys.shape[0] != values.shape[0] or keys.shape[1] != values.shape[2]:
        raise CheckpointError(
            f"{keys.file}: {quote(keys.name)} {list(keys.shape)} does not fit {quote(values.name)} "
            f"{list(values.shape)}."
        )
    return TensorPlace(keys, values=values, is_float=True)


def raw_values(tensor: GgufTensor, mapped: Mapped, expert: int | None = None) -> torch.Tensor:
    """What the file holds: floats, or bytes [..., bytes of a row]; of one expert's part where the tensor is a stack."""
    start, size, shape = tensor.start, tensor.nbytes, tensor.shape
    if expert is not None:
        size, shape = size // shape[0], shape[1:]
        start += expert * size
    raw = mapped(tensor.file)[start : start + size]
    if raw.numel() != size:
        raise CheckpointError(f"{tensor.file} has become shorter since its header was read.")
    dtype = BLOCKS[tensor.type].dtype
    if dtype is None:
        return raw.view(*shape[:-1], tensor.row_bytes)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(shape)


def dequantized(tensor: GgufTensor, mapped: Mapped) -> torch.Tensor:
    """float32, what the tensor's blocks stand for."""
    raw, block = raw_values(tensor, mapped), BLOCKS[tensor.type]
    if block.dtype is not None:
        return raw.float()
    decoded = decode(raw.view(-1, tensor.row_bytes), block)
    groups = decoded.scale.shape[1]
    q = decoded.q.view(len(decoded.q), groups, -1)
    values = torch.tensor(block.table, dtype=torch.float32)[q.long() + 8] if block.table else q.float()
    values = values * decoded.scale[..., None]
    if decoded.minimum is not None:
        values = values - decoded.minimum[..., None]
    return values.view(tensor.shape)
