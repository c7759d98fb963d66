"""GPTQ (AutoGPTQ, GPTQModel): `quantization_config` or quantize_config.json -> bits and groups per layer.

`storage/words.py` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llm.base.text import show
from llm.errors import CheckpointError, UnsupportedModelError
from llm.quantization.configs.reader import Fields
from llm.quantization.configs.words import WordsConfig, group_size_of
from llm.quantization.matching import matches
from llm.quantization.storage.words import GPTQStorage

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
