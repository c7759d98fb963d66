"""Which tensors of GGUF files make each tensor of a Hugging Face checkpoint, and its values.

Owns three differences. GGUF stores the experts of a layer as one tensor of three dimensions: here each has its own,
a view. It splits the projection behind the latents of DeepSeek by heads, one part transposed: joined here, as floats,
which is how latent attention reads it. It drops a dimension of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from llm.base.text import quote
from llm.errors import CheckpointError
from llm.kernels.reference.gguf_blocks import BLOCKS, decode
from llm.loading.checkpoint import TensorInfo
from llm.loading.gguf.container import GgufFile, GgufTensor
from llm.loading.gguf.names import ROPE_TENSORS, Family, hugging_face_name

_STACK = re.compile(r"(.+\.experts)\.(gate_proj|up_proj|down_proj)\.(weight|bias)", re.ASCII)
_LATENT = re.compile(r"(.+)\.(kv_b_proj|k_b_proj|v_b_proj)\.weight", re.ASCII)
_MOST_PLACES = 1 << 19
# Names' ends -> the dimension of one that GGUF drops: of a matrix of one row, of the channels' own filters.
_DROPPED = {"shared_expert_gate.weight": 0, "conv.conv.weight": 1}
Mapped = Callable[[Path], torch.Tensor]


@dataclass(frozen=True)
class Place:
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


def placed(files: list[GgufFile], family: Family, experts: int) -> dict[str, Place]:
    """Every tensor of the files under Hugging Face's names.

    Args:
        experts: of a layer, which the tensors that stack them must have.

    Raises:
        CheckpointError: two tensors of one name, another number of experts, or one part of a projection.
    """
    found: dict[str, Place] = {}
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


def _places(name: str, tensor: GgufTensor, experts: int, is_latent: bool) -> Iterator[tuple[str, Place]]:
    stack = _STACK.fullmatch(name)
    if stack is None:
        yield name, Place(tensor, is_float=is_latent and BLOCKS[tensor.type].dtype is None)
        return
    if len(tensor.shape) != (3 if stack[3] == "weight" else 2) or tensor.shape[0] != experts:
        raise CheckpointError(
            f"{tensor.file}: {quote(tensor.name)} has the shape {list(tensor.shape)}, and the model {experts} experts."
        )
    for index in range(experts):
        yield f"{stack[1]}.{index}.{stack[2]}.{stack[3]}", Place(tensor, index)


def _joined(path: str, both: dict[str, GgufTensor]) -> Place:
    keys, values = both.get("k_b_proj"), both.get("v_b_proj")
    if keys is None or values is None:
        raise CheckpointError(f"{path} has one of attn_k_b and attn_v_b in this GGUF file, and needs both.")
    fits = len(keys.shape) == len(values.shape) == 3
    if not fits or keys.shape[0] != values.shape[0] or keys.shape[1] != values.shape[2]:
        raise CheckpointError(
            f"{keys.file}: {quote(keys.name)} {list(keys.shape)} does not fit {quote(values.name)} "
            f"{list(values.shape)}."
        )
    return Place(keys, values=values, is_float=True)


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
