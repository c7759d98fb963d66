"""What compressed-tensors says of a group's weights and of its activations, and its names for common groups."""

from __future__ import annotations

from dataclasses import dataclass

from llm.base.text import clip, show
from llm.errors import CheckpointError, UnsupportedModelError
from llm.quantization.configs.reader import Fields

SOURCE = "compressed-tensors"
# Keys of a group's weights and activations. Those that matter only while quantizing are accepted and not read.
_ARGS_KEYS = frozenset(
    """num_bits type symmetric group_size strategy block_structure dynamic actorder observer observer_kwargs scale_dtype
    zp_dtype""".split()
)


@dataclass(frozen=True)
class QuantizationArgs:
    """The fields of compressed_tensors.quantization.QuantizationArgs that loading needs; `dynamic` may be "local"."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str = "tensor"
    dynamic: bool | str = False
    actorder: str | None = None
    block: tuple[int, int] | None = None

    @classmethod
    def parse(cls, group: Fields, key: str) -> QuantizationArgs | None:
        given = group.part(key, _ARGS_KEYS)
        if given is None:
            return None
        size = given.optional_integer("group_size")
        strategy = clip(
            given.string("strategy", "tensor" if size is None else "channel" if size == -1 else "group"), 40
        )
        if strategy == "group" and (size is None or size < 1):
            raise CheckpointError(f"{given.where} has strategy 'group' and group_size {size}.")
        dynamic = given.given.get("dynamic", False)
        actorder = given.given.get("actorder")
        return cls(
            given.integer("num_bits", 8),
            clip(given.string("type", "int"), 40),
            given.boolean("symmetric", True),
            size,
            strategy,
            clip(dynamic, 40) if isinstance(dynamic, str) else given.boolean("dynamic", False),
            # The first releases of compressed-tensors wrote true for "group".
            "group" if actorder is True else None if actorder is False else given.optional_string("actorder"),
            _block(given) if strategy == "block" else None,
        )

    @property
    def kind(self) -> str:
        """A key of `_FORMATS`, or what there is none of."""
        return self.type if self.type == "int" else f"{self.type}{self.num_bits}"


def _block(given: Fields) -> tuple[int, int]:
    """[rows, columns], or "128x128"."""
    value = given.given.get("block_structure")
    parts = value.split("x") if isinstance(value, str) and len(value) < 40 else value
    if isinstance(parts, list) and len(parts) == 2:
        sizes = [
            int(item) if isinstance(item, int) or (isinstance(item, str) and item.isdecimal()) else 0 for item in parts
        ]
        if all(1 <= size < 1 << 20 for size in sizes):
            return sizes[0], sizes[1]
    raise given.error("block_structure", "the rows and columns of a block")


_FLOATS: dict[str, dict[str, object]] = {
    "FP8": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "FP8_DYNAMIC": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "FP8_BLOCK": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "MXFP8": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
    "MXFP8A16": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
    "MXFP4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "MXFP4A16": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "NVFP4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "NVFP4A16": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "W4AFP8": {"num_bits": 4, "group_size": 128, "strategy": "group"},
}
_INT8_TOKEN: dict[str, object] = {"num_bits": 8, "strategy": "token", "dynamic": True}
_INT8_PRESET: dict[str, object] = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": _INT8_TOKEN}


def preset(name: str) -> dict[str, object]:
    """A preset of compressed_tensors.quantization.quant_scheme; groups of integers are of 128.

    Activations of floats are left out: they are not quantized here.
    """
    if name in ("W8A8", "INT8"):
        return dict(_INT8_PRESET)
    if name == "UNQUANTIZED":
        return {}
    if name in _FLOATS:
        return {"weights": _FLOATS[name]}
    integer = {f"W{bits}A{act}" for bits in range(2, 9) for act in (8, 16)} | {"W4A16_ASYM"}
    if name not in integer:
        raise UnsupportedModelError(
            f"{SOURCE}: the preset {show(name)} is not computed; computed are "
            f"{', '.join(sorted(integer))}, INT8, {', '.join(_FLOATS)}."
        )
    weights = {"num_bits": int(name[1]), "group_size": 128, "strategy": "group", "symmetric": name != "W4A16_ASYM"}
    return {"weights": weights, "input_activations": _INT8_TOKEN if name.endswith("A8") else None}
