"""GPTQ (AutoGPTQ, GPTQModel) and AWQ (AutoAWQ, llm-awq): unsigned integers in 32-bit words, groups with zero points.

`quantization_config`, quantize_config.json (GPTQ) or quant_config.json (AWQ) say the bits and groups per layer; a layer
is quantized if the checkpoint has integers for it. A value is (q - zero) * scale, both q and zero unsigned. All tensors
are transposed: inputs first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from llm.base.text import show
from llm.errors import CheckpointError, UnsupportedModelError
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase, WeightLoader
from llm.quantization.description import Fields, agreed, columns_of, matches
from llm.quantization.packing import packed_words, unpack_awq, unpack_from_int32
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.registry import get_scheme
from llm.quantization.schemes import SCHEMES, IntegerMethod
from llm.quantization.storage import NOT_0, Ready, WeightStorage, group_loader, order_of_groups
from llm.quantization.unquantized import left_alone

_WHERE = "gptq: quantization_config"
BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class _Rule:
    """An entry of `dynamic`: `+:` or no prefix changes the settings of layers, `-:` leaves them as they are."""

    pattern: str
    excludes: bool
    bits: int
    group_size: int


class WordsConfig(QuantizationConfig):
    """Integers in 32-bit words, with float activations.

    Which layers have them is seen in the checkpoint; what its description says of it, in lists and patterns that each
    program writes in its own way, is needed for random weights alone.
    """

    _shapes: Mapping[str, tuple[int, ...]] | None = None

    @abstractmethod
    def described(self, name: str) -> bool:
        """Whether the description has the layer quantized."""

    @abstractmethod
    def bits_and_group(self, name: str) -> tuple[int, int]:
        """(bits, group size, -1 for all columns) of a quantized layer."""

    @abstractmethod
    def storage(self, bits: int, group_size: int | None) -> WeightStorage: ...

    def describe_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        kind = getattr(layer, "quant_kind", "")
        if kind not in ("linear", "embedding"):
            return None
        if kind == "embedding" and (not getattr(layer, "is_lm_head", False) or prefix != _LM_HEAD):
            return left_alone(kind, self.get_name(), "an embedding")
        found = agreed(prefix, self.checkpoint_names(prefix), self._find)
        if found is None:
            return left_alone(kind, self.get_name(), "no integers in the checkpoint" if self._shapes else "left out")
        bits, group_size = found
        columns = columns_of(layer)
        if group_size > columns:
            raise CheckpointError(f"{prefix} has {columns} columns, and groups are of {group_size}.")
        size = None if group_size == -1 else group_size
        scheme = "W4A16" if bits <= 4 else "W8A16"
        reason = f"{bits} bits, {'one scale per row' if size is None else f'groups of {size}'}"
        storage = self.storage(bits, size)
        if kind == "embedding":
            return IntegerMethod(SCHEMES[scheme], storage, self.get_name(), reason)
        method: QuantizeMethodBase = get_scheme(scheme, kind)(storage, self.get_name(), reason)
        return method

    def _find(self, name: str) -> tuple[int, int] | None:
        has = self.described(name) if self._shapes is None else f"{name}.qweight" in self._shapes
        return self.bits_and_group(name) if has else None

    def ignores_zeros(self, name: str) -> bool:
        """Some programs write a bias for every layer."""
        return name.endswith(".bias") and f"{name.removesuffix('.bias')}.qweight" in (self._shapes or {})


class GPTQConfig(WordsConfig):
    """Raises `UnsupportedModelError` for what is not computed.

    Attributes:
        v2: zero points are stored as they are; else less 1.
        by_gptqmodel: GPTQModel wrote the checkpoint.
        scattered: `g_idx` says the group of each input.
        blocks: the endings of the layers that are quantized; (): all.
    """

    def __init__(
        self,
        bits: int,
        group_size: int,
        *,
        v2: bool = False,
        by_gptqmodel: bool = False,
        scattered: bool = False,
        lm_head: bool = False,
        rules: tuple[_Rule, ...] = (),
        blocks: tuple[str, ...] = (),
    ) -> None:
        self.bits, self.group_size = bits, group_size
        self.v2, self.by_gptqmodel, self.scattered, self.lm_head = v2, by_gptqmodel, scattered, lm_head
        self.rules, self.blocks = rules, blocks

    def get_name(self) -> str:
        return "gptq"

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantize_config.json"]

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> GPTQConfig:
        given = Fields(config, _WHERE)
        stored = given.string("checkpoint_format", "") or given.string("format", "") or "gptq"
        if stored not in _FORMATS or given.given.get("is_marlin_format") is True:
            _refuse(f"the checkpoint_format {show(stored)} is not read; read are {', '.join(_FORMATS)}")
        if given.string("pack_dtype", "int32") != "int32":
            _refuse(f"values packed in {show(given.given['pack_dtype'])} are not read, only in int32")
        for key in ("rotation", "adapter"):
            if given.given.get(key):
                _refuse(f"{key} {show(given.given[key])} is not computed")
        meta = given.part("meta")
        quantizer = None if meta is None else meta.given.get("quantizer")
        bits, group_size = _bits(given, 4), group_size_of(given, "group_size", 128)
        return cls(
            bits,
            group_size,
            v2=stored == "gptq_v2",
            by_gptqmodel="gptqmodel" in str(quantizer),
            scattered=given.boolean("desc_act", False),
            lm_head=given.boolean("lm_head", False),
            rules=_rules(given, bits, group_size),
            blocks=_blocks(given),
        )

    def describe_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().describe_tensors(shapes)
        layers = [name.removesuffix(".qweight") for name in shapes if name.endswith(".qweight")] * self.scattered
        for layer in layers:
            if f"{layer}.g_idx" not in shapes and self.bits_and_group(layer)[1] != -1:
                raise CheckpointError(
                    f"gptq: desc_act is true, and there is no {layer}.g_idx, which says the group of each input."
                )

    def described(self, name: str) -> bool:
        if name == "lm_head":
            return self.lm_head
        rule = self._rule(name)
        if rule is not None:
            return not rule.excludes
        return not self.blocks or name.endswith(self.blocks)

    def bits_and_group(self, name: str) -> tuple[int, int]:
        rule = self._rule(name)
        return (self.bits, self.group_size) if rule is None or rule.excludes else (rule.bits, rule.group_size)

    def has_four_bits(self) -> bool:
        return min(self.bits, *(rule.bits for rule in self.rules if not rule.excludes), 8) <= 4

    def storage(self, bits: int, group_size: int | None) -> GPTQStorage:
        return GPTQStorage(bits, group_size, not self.v2, self.by_gptqmodel)

    def _rule(self, name: str) -> _Rule | None:
        return next((rule for rule in self.rules if matches(name, f"re:{rule.pattern}")), None)


def _bits(given: Fields, default: int) -> int:
    bits = given.integer("bits", default)
    if bits not in BITS:
        _refuse(f"weights of {bits} bits are not computed, only of {', '.join(map(str, BITS))}")
    return bits


def _rules(given: Fields, bits: int, group_size: int) -> tuple[_Rule, ...]:
    """In their order: the first that matches a layer from its start is used."""
    dynamic = given.part("dynamic")
    if dynamic is None:
        return ()
    found = []
    for pattern in dynamic.given:
        own = Fields(dynamic.given[pattern], f"{_WHERE}.dynamic.{show(pattern)}")
        excludes = pattern.startswith("-:")
        body = pattern[2:] if pattern.startswith(("+:", "-:")) else pattern
        found.append(_Rule(body, excludes, _bits(own, bits), group_size_of(own, "group_size", group_size)))
    return tuple(found)


def _blocks(given: Fields) -> tuple[str, ...]:
    """`modules_in_block_to_quantize`: lists of lists, or one list."""
    value = given.given.get("modules_in_block_to_quantize", [])
    lists = value if isinstance(value, list) else None
    if lists is None:
        raise given.error("modules_in_block_to_quantize", "a list of lists of names")
    names = [name for item in lists for name in (item if isinstance(item, list) else [item])]
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{_WHERE}: modules_in_block_to_quantize holds {show(names)}, must hold names.")
    return tuple(f".{name}" for name in names)


def _refuse(what: str) -> None:
    raise UnsupportedModelError(f"gptq: {what}.")


_LM_HEAD = "lm_head"


def group_size_of(given: Fields, key: str, default: int) -> int:
    """Of at least 1, or -1."""
    size = given.integer(key, default)
    if size < 1 and size != -1:
        raise given.error(key, "at least 1, or -1 for one scale per row")
    return size


_AWQ = "awq: quantization_config"


class AWQConfig(WordsConfig):
    """4 bits with zero points, packed for `gemm`. Raises `UnsupportedModelError` for anything else.

    Attributes:
        left_out: parts of the names of layers that are not quantized.
    """

    def __init__(self, group_size: int, left_out: tuple[str, ...] = ()) -> None:
        self.group_size = group_size
        self.left_out = left_out

    def get_name(self) -> str:
        return "awq"

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quant_config.json"]

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> AWQConfig:
        given = Fields(config, _AWQ)
        bits = given.integer("w_bit" if "w_bit" in given.given else "bits", 4)
        version = given.string("version", "gemm")
        if bits != 4:
            _refuse_awq(f"weights of {bits} bits are not computed, only of 4")
        if version.lower() != "gemm":
            _refuse_awq(f"the version {show(version)} is not read, only 'gemm'")
        if not given.boolean("zero_point", True):
            _refuse_awq("weights without zero points (zero_point false) are not read")
        size = group_size_of(given, "q_group_size" if "q_group_size" in given.given else "group_size", 128)
        return cls(size, given.names("modules_to_not_convert"))

    def described(self, name: str) -> bool:
        return name != "lm_head" and not any(part in name for part in self.left_out)

    def bits_and_group(self, name: str) -> tuple[int, int]:
        return 4, self.group_size

    def storage(self, bits: int, group_size: int | None) -> AWQStorage:
        return AWQStorage(group_size)


def _refuse_awq(what: str) -> None:
    raise UnsupportedModelError(f"awq: {what}; use the unquantized checkpoint with quantization='w4a16'.")


# --- Storage. ---

# What is added to the words of zero points that are stored less 1, by bits: 1 to every value. The borrow of a zero
# point of 0 was taken from the next value, and so the carry goes there.
_ONES = {2: (0x55555555,), 4: (0x11111111,), 8: (0x01010101,)}
# Values of 3 bits straddle words: they are added to one by one, but GPTQModel subtracts these words when it saves.
_GPTQMODEL_3_BITS = (0x24924924, 0x92492492, 0x49249249)


class _WordStorage(WeightStorage):
    """`scales` float [G, N] and `qzeros` int32 [G, words], beside `qweight`.

    Args:
        bits: of each value.
        group_size: columns that share a scale; None: all.
    """

    def __init__(self, bits: int, group_size: int | None) -> None:
        super().__init__()
        self.bits = bits
        self.group_size = group_size

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        self._sizes, self._columns = sizes, columns
        self._size = self.group_size or columns
        self._shard_ids: tuple[str | int, ...] = tuple(getattr(layer, "shard_ids", ()))
        rows, groups = sum(sizes), -(-columns // self._size)
        words = packed_words(rows, self.bits)
        if any(size * self.bits % 32 for size in sizes):
            raise CheckpointError(
                f"{getattr(layer, 'prefix', 'a layer')} has {sizes} outputs, whose {self.bits}-bit zero points do not "
                "fill whole words of 32 bits."
            )
        places = {"output_dim": 1, "input_dim": 0}
        self._add_weight(layer, loader, rows, words, places)
        self.add(layer, "qzeros", torch.empty(groups, words, dtype=torch.int32), loader, **places)
        self.add(layer, "scales", torch.empty(groups, rows), loader, NOT_0, **places)

    def _add_weight(
        self, layer: nn.Module, loader: WeightLoader, rows: int, words: int, places: dict[str, int]
    ) -> None:
        raise NotImplementedError

    def _weight(self, q: torch.Tensor, zero: torch.Tensor, layer: nn.Module) -> IntegerWeight:
        """From q int8 [K, N] and zero int8 [G, N], each less 2 ** (bits - 1)."""
        scale = self.take(layer, "scales").float()
        held = zero.t().contiguous() if zero.any() else None
        return IntegerWeight(q.t().contiguous(), scale.t().contiguous(), self._size, self.bits, held)


class GPTQStorage(_WordStorage):
    """`qweight` int32 [K * bits / 32, N] and `g_idx` int32 [K], the group of each input; without it groups are runs.

    Args:
        stored_less_one: zero points are stored less 1, as all but `gptq_v2` checkpoints have them.
        by_gptqmodel: GPTQModel wrote them.
    """

    def __init__(self, bits: int, group_size: int | None, stored_less_one: bool, by_gptqmodel: bool) -> None:
        super().__init__(bits, group_size)
        self._less_one = stored_less_one
        self._added = _GPTQMODEL_3_BITS if by_gptqmodel and bits == 3 else _ONES.get(bits)

    def _add_weight(
        self, layer: nn.Module, loader: WeightLoader, rows: int, words: int, places: dict[str, int]
    ) -> None:
        data = torch.empty(packed_words(self._columns, self.bits), rows, dtype=torch.int32)
        self.add(layer, "qweight", data, loader, **places)
        # Of each shard: those of a fused layer must be equal.
        data = torch.empty(len(self._sizes), self._columns, dtype=torch.int32)
        self.add(layer, "g_idx", data, group_loader(self._columns, self._shard_ids), optional=True, any_dtype=True)

    def read(self, layer: nn.Module) -> IntegerWeight:
        rows, groups = sum(self._sizes), -(-self._columns // self._size)
        zero = self._zeros(self.take(layer, "qzeros"), (groups, rows))
        q = unpack_from_int32(self.take(layer, "qweight"), self.bits, (self._columns, rows), dim=0)
        order = self._order(layer)
        weight = self._weight(q if order is None else q[order], zero, layer)
        weight.columns = None if order is None else order.int()
        return weight

    def _zeros(self, stored: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """int8 [G, N], less 2 ** (bits - 1)."""
        if self._less_one and self._added is not None:
            words = torch.tensor(self._added).repeat(-(-stored.shape[1] // len(self._added)))[: stored.shape[1]]
            stored = (stored.long() + words).to(torch.int32)  # keeps the low 32 bits
        zero = unpack_from_int32(stored, self.bits, shape)
        if self._less_one and self._added is None:
            half = 1 << (self.bits - 1)
            zero = (zero + half + 1) % (2 * half) - half
        return zero

    def _order(self, layer: nn.Module) -> torch.Tensor | None:
        """The inputs, group after group; None where they are in their own order."""
        if not self.was_loaded(layer, "g_idx"):
            return None
        return order_of_groups(self.take(layer, "g_idx"), self._size, "g_idx")


class AWQStorage(_WordStorage):
    """`qweight` int32 [K, N / 8] in AWQ's order of columns, which `qzeros` have as well."""

    def __init__(self, group_size: int | None) -> None:
        super().__init__(4, group_size)

    def _add_weight(
        self, layer: nn.Module, loader: WeightLoader, rows: int, words: int, places: dict[str, int]
    ) -> None:
        data = torch.empty(self._columns, words, dtype=torch.int32)
        self.add(layer, "qweight", data, loader, **places)

    def read(self, layer: nn.Module) -> IntegerWeight:
        q, zero = (unpack_awq(self.take(layer, name)) for name in ("qweight", "qzeros"))
        return self._weight(q, zero, layer)
