"""The tensors of a PEFT adapter, by the module of the base model that they belong to.

Owns reading adapter_model.safetensors strictly: every tensor belongs to a pair of matrices or is named in an error.
Which layer a module is in our model is `targets.py`'s.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from llm.base.text import list_names, quote
from llm.errors import CheckpointError
from llm.loading.adapters.config import AdapterConfig, is_adapter
from llm.loading.checkpoint import Checkpoint, TensorInfo
from llm.models.interface import Cut

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_CHUNK = 1 << 20
_KEPT = 4  # tensors of all experts: two pairs of a layer
# The end of a tensor's name -> what it is of its module.
_PARTS = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_B.bias": "up_bias",
    "lora_embedding_A": "down",
    "lora_embedding_B": "up",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}


@dataclass(frozen=True)
class ExpertPart:
    """One expert's matrices in a pair of tensors of all experts, see `experts.py`.

    Attributes:
        index, count: of the expert, and how many there are.
        is_exchanged: the first tensor is over the channels, and the second over the inputs.
        is_turned, cut, place: how the checkpoint stores one expert's parameter, into what it is cut, and which one.
        channels, inputs: of the matrix.
    """

    index: int
    count: int
    is_exchanged: bool
    is_turned: bool
    cut: Cut
    place: int
    channels: int
    inputs: int

    def of(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(down [rank, inputs], up [channels, rank])."""
        down = first.unflatten(0, (self.count, -1))[self.index]
        up = second.unflatten(1, (-1, self.count))[:, :, self.index]
        if self.is_exchanged:
            down, up = up.t(), down.t()
        _, rows = list(self.cut(up.t() if self.is_turned else up))[self.place]
        return down.contiguous(), rows.contiguous()


@dataclass(frozen=True)
class Pair:
    """The tensors of one module.

    Attributes:
        name: of the module in the base model.
        down, up: their names in the file: [rank, K] and [N, rank].
        is_lookup: of an embedding table; then K is the number of ids.
        up_bias, magnitude: "": there is none.
        key: what the patterns of the configuration are compared with.
        part: the tensors are of all experts, and this is one of them; None: they are of this module alone.
    """

    name: str
    down: str
    up: str
    is_lookup: bool
    up_bias: str = ""
    magnitude: str = ""
    key: str = ""
    part: ExpertPart | None = None


class AdapterFolder:
    """An adapter in PEFT's layout.

    Attributes:
        config: adapter_config.json.
        pairs: by the name of the module.
        replaced: the other tensors, trained copies of the base model's, by their names there.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `CheckpointError` for files that are missing, malformed, or no LoRA adapter."""
        self.folder = folder
        if not is_adapter(folder):
            raise CheckpointError(f"{folder} is no adapter: it has no adapter_config.json")
        self.config = AdapterConfig.read(folder)
        self._checkpoint = Checkpoint.of_file(_weights(folder))
        self._last: dict[str, torch.Tensor] = {}
        by_module: dict[str, dict[str, str]] = {}
        self.replaced: dict[str, str] = {}
        for name in self._checkpoint.tensors:
            if not name.startswith(_PREFIX):
                raise CheckpointError(f"{folder}: the tensor {quote(name)} is not named as PEFT names an adapter's")
            self._sort(name, by_module)
        self.pairs = {module: self._pair(module, parts) for module, parts in by_module.items()}
        # PEFT saves the embedding and the LM head that it adapts as well: a copy of the base model's.
        copies = {f"{_PREFIX}{module}.base_layer.weight" for module in self.pairs}
        self.replaced = {name: tensor for name, tensor in self.replaced.items() if tensor not in copies}
        if not self.pairs:
            raise CheckpointError(f"{folder} is no LoRA adapter: {WEIGHTS} has no pair of matrices")

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._checkpoint.tensors

    def load(self, name: str) -> torch.Tensor:
        return self._checkpoint.load(name)

    def close(self) -> None:
        self._checkpoint.close()

    def __enter__(self) -> AdapterFolder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _sort(self, name: str, by_module: dict[str, dict[str, str]]) -> None:
        short = name.removeprefix(_PREFIX)
        for ending, part in _PARTS.items():
            if short.endswith(f".{ending}"):
                by_module.setdefault(short.removesuffix(f".{ending}"), {})[ending if part == "down" else part] = name
                return
        if ".lora_" in short:
            raise CheckpointError(
                f"{self.folder}: the tensor {quote(name)} is of a kind of adapter that is not computed"
            )
        self.replaced[short.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = name

    def _pair(self, module: str, parts: Mapping[str, str]) -> Pair:
        is_lookup = "lora_embedding_A" in parts
        down, up = parts.get("lora_embedding_A" if is_lookup else "lora_A.weight"), parts.get("up")
        if down is None or up is None:
            raise CheckpointError(f"{self.folder}: {quote(module)} has one of its two matrices, and needs both")
        return Pair(module, down, up, is_lookup, parts.get("up_bias", ""), parts.get("magnitude", ""), module)

    def check_shapes(self, pair: Pair, inputs: int, channels: int) -> None:
        """Raise `CheckpointError` unless the matrices are floats that fit a layer [channels, inputs]."""
        rank, part = self.config.rank_of(pair.key), pair.part
        if part is not None:
            if (part.inputs, part.channels) != (inputs, channels):
                raise CheckpointError(
                    f"the adapter in {self.folder} does not fit this model: {quote(pair.name)} is {part.channels} by "
                    f"{part.inputs} in it, the model has {channels} by {inputs}."
                )
            return
        wanted = {pair.down: (rank, inputs), pair.up: (channels, rank), pair.up_bias: (channels,)}
        for name, shape in wanted.items():
            if not name:
                continue
            info = self.tensors[name]
            if info.shape != shape:
                base = f"; it was trained for {quote(self.config.base)}" if self.config.base else ""
                raise CheckpointError(
                    f"the adapter in {self.folder} does not fit this model: {quote(name)} has shape "
                    f"{list(info.shape)}, the model and rank {rank} need {list(shape)}{base}."
                )
            if not info.dtype.is_floating_point or info.dtype.itemsize < 2:
                raise CheckpointError(
                    f"{self.folder}: {quote(name)} is {info.dtype}; adapters are floats of 16 bits or more."
                )

    def matrices(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(down, up, the bias of up) as stored, in a type that the kernels read; 64 bits become 32."""
        if pair.part is None:
            down, up = self.load(pair.down), self.load(pair.up)
        else:
            down, up = pair.part.of(self._kept(pair.down), self._kept(pair.up))
        down, up = _narrow(down), _narrow(up)
        for name, tensor in ((pair.down, down), (pair.up, up)):
            if not tensor.isfinite().all():
                raise CheckpointError(f"{self.folder}: {quote(name)} has values that are not finite.")
        return down, up, self.load(pair.up_bias).float() if pair.up_bias else None

    def _kept(self, name: str) -> torch.Tensor:
        """A tensor of all experts, which is kept until those of the next layer are read."""
        if name not in self._last:
            if len(self._last) == _KEPT:
                self._last.clear()
            self._last[name] = self.load(name)
        return self._last[name]

    def digest(self) -> str:
        """SHA-256 of both files: adapters with the same digest give the same answers."""
        found = hashlib.sha256()
        for path in (self.folder / "adapter_config.json", self.folder / WEIGHTS):
            with open(path, "rb") as file:
                while chunk := file.read(_CHUNK):
                    found.update(chunk)
            found.update(b"|")
        return found.hexdigest()


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _weights(folder: Path) -> Path:
    path = folder / WEIGHTS
    if os.path.isfile(path):
        return path
    others = [name for name in ("adapter_model.bin", "adapter_model.pt") if os.path.isfile(folder / name)]
    if others:
        raise CheckpointError(
            f"{folder} holds {list_names(others)} and no {WEIGHTS}; such files can run code when they are read, so "
            "convert it once, elsewhere, with peft: PeftModel.from_pretrained(model, folder).save_pretrained(new)."
        )
    raise CheckpointError(f"{folder} has no {WEIGHTS}")
