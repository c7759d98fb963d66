"""The tensors of a PEFT adapter, by the module of the base model that they belong to.

adapter_model.safetensors is read strictly: every tensor belongs to a pair of matrices or is named in an error. Which
layer a module is in our model is `targets.py`'s.

adapter_config.json is read strictly: what changes the numbers is understood or refused by name.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from llm.base.text import list_names, quote, show
from llm.errors import CheckpointError, UnsupportedModelError
from llm.loading.checkpoint import Checkpoint, TensorInfo
from llm.loading.model_files import read_json
from llm.models.config_reader import ConfigReader
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


# --- The description, `adapter_config.json`. ---

FILE = "adapter_config.json"
_BYTES = 16 << 20
_MOST_RANK = 1 << 16
_MOST_PATTERN = 300

# Keys that say how an adapter was trained or where it may be applied: its tensors say which layers it changes.
_HARMLESS = frozenset(
    """
    peft_type base_model_name_or_path revision task_type inference_mode auto_mapping peft_version r lora_alpha
    lora_dropout target_modules exclude_modules fan_in_fan_out bias use_rslora modules_to_save init_lora_weights
    layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_config megatron_core loftq_config eva_config
    corda_config lora_ga_config use_dora qalora_group_size lora_bias runtime_config ensure_weight_tying
    target_parameters
    """.split()
)
# Starts for which PEFT changes the base model's weights too, so that the adapter does not belong to the checkpoint.
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
_LEAVES_BASE = ("gaussian", "eva", "orthogonal")

V = TypeVar("V", int, float)


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says.

    Attributes:
        base: the model that it was trained on; "" if it does not say.
        rank, alpha: of modules that the patterns do not name.
        rank_pattern, alpha_pattern: name or regular expression of a module -> its own.
        use_rslora: the scale is alpha / sqrt(rank) (arXiv:2312.03732), else alpha / rank.
        use_dora: a magnitude per output channel too (arXiv:2402.09353).
        bias: "none"; "all" or "lora_only": biases of the base model were trained too.
        fan_in_fan_out: the base model stores these weights as [K, N].
        lora_bias: the second matrix has a bias.
        target_parameters: ends of the paths of parameters that were adapted by themselves, as stacked experts are.
    """

    base: str = ""
    rank: int = 8
    alpha: float = 8.0
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    lora_bias: bool = False
    target_parameters: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Raises `CheckpointError` for a file that is missing, malformed, or asks for what is not computed."""
        raw = read_json(folder / FILE, limit_bytes=_BYTES)
        reader = ConfigReader(raw, FILE)
        try:
            return cls._of(reader)
        except UnsupportedModelError as error:
            raise CheckpointError(f"the adapter in {folder} cannot be used: {error}") from error

    @classmethod
    def _of(cls, reader: ConfigReader) -> AdapterConfig:
        kind = reader.string("peft_type", "LORA")
        if kind != "LORA":
            raise reader.error("peft_type", kind, "'LORA'; other kinds of adapters are not computed")
        started = reader.raw.get("init_lora_weights", True)
        if isinstance(started, str) and started.startswith(_CHANGES_BASE):
            right = (
                "a start that leaves the base model as it is; save the adapter with PEFT's "
                "path_initial_model_for_weight_conversion"
            )
            raise reader.error("init_lora_weights", started, right)
        if not isinstance(started, bool) and (not isinstance(started, str) or started.lower() not in _LEAVES_BASE):
            right = f"true, false, {', '.join(map(repr, _LEAVES_BASE))}: what another start does to the base is unknown"
            raise reader.error("init_lora_weights", started, right)
        bias = reader.string("bias", "none")
        if bias not in ("none", "all", "lora_only"):
            raise reader.error("bias", bias, "'none', 'all' or 'lora_only'")
        found = cls(
            base=reader.string("base_model_name_or_path", ""),
            rank=_rank(reader, "r", reader.integer("r", 8)),
            alpha=_alpha(reader, "lora_alpha", reader.number("lora_alpha", 8)),
            rank_pattern={key: _rank(reader, "rank_pattern", value) for key, value in _pattern(reader, "rank_pattern")},
            alpha_pattern={
                key: _alpha(reader, "alpha_pattern", value) for key, value in _pattern(reader, "alpha_pattern")
            },
            use_rslora=reader.boolean("use_rslora", False),
            use_dora=reader.boolean("use_dora", False),
            bias=bias,
            fan_in_fan_out=reader.boolean("fan_in_fan_out", False),
            lora_bias=reader.boolean("lora_bias", False),
            target_parameters=tuple(reader.names("target_parameters") or ()),
        )
        # Of what is not known, nothing that is off changes a number.
        unknown = sorted(
            key for key, value in reader.raw.items() if key not in _HARMLESS and value not in (False, [], {})
        )
        if unknown:
            raise UnsupportedModelError(
                f"{FILE} asks for {list_names(unknown)}, which is not computed; merge the adapter with PEFT "
                "(merge_and_unload) and load the model that is saved."
            )
        return found

    def parameters_of(self, module: str) -> list[str]:
        """The parameters of this module that `target_parameters` names, by PEFT's rule."""
        pairs = [(path, path.rpartition(".")[2]) for path in self.target_parameters]
        return sorted({name for path, name in pairs if f".{module}.{name}".endswith(f".{path}")})

    def rank_of(self, module: str) -> int:
        return _of_module(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor on the product of the module's two matrices."""
        rank = self.rank_of(module)
        return _of_module(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _of_module(pattern: Mapping[str, V], module: str, default: V) -> V:
    """PEFT's rule: the first key that the module's path ends with, by whole segments."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _pattern(reader: ConfigReader, key: str) -> list[tuple[str, object]]:
    found = list(reader.nested(key).items())
    for name, _ in found:
        if not _is_quick(name):
            right = "names of modules, or regular expressions with at most four repetitions and none of a group"
            raise reader.error(key, name, right)
    return found


def _is_quick(pattern: str) -> bool:
    """Whether the regular expression is valid and no text makes it take long."""
    if len(pattern) > _MOST_PATTERN or re.search(r"\)[*+{?]|\(\?|\\\d", pattern):
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return len(re.findall(r"(?<!\\)[*+{]", pattern)) <= 4


def _rank(reader: ConfigReader, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_RANK:
        raise reader.error(key, value, f"an integer from 1 to {_MOST_RANK}")
    return value


def _alpha(reader: ConfigReader, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e9:
        raise reader.error(key, value, "a finite number")
    return float(value)


def is_adapter(folder: Path) -> bool:
    return (folder / FILE).is_file()


def described(folder: Path) -> str:
    """What a folder that was passed as a model is, and the ways to use it."""
    base = ""
    with suppress(CheckpointError):  # the sentence is about the folder, not about its config
        base = AdapterConfig.read(folder).base
    model, path = show(base) if base else "its base model", show(str(folder))
    return (
        f"it holds an adapter{f' of {quote(base)}' if base else ''}; pass LLM({model}, merge_lora={path}), or "
        f"LLM({model}, enable_lora=True) and lora_request=LoRARequest('name', 1, {path}) in each call"
    )
