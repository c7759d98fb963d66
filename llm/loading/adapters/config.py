"""adapter_config.json, read strictly: what changes the numbers is understood or refused by name.

Owns `AdapterConfig`. The tensors are in `folder.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from llm.base.text import list_names, quote, show
from llm.errors import CheckpointError, UnsupportedModelError
from llm.loading.model_files import read_json
from llm.models.config_reader import ConfigReader

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
