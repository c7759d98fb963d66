"""Quantizing an unquantized checkpoint while it is loaded: which layer gets which scheme, and its weight.

`RECIPES` has the names that `LLM(quantization=...)` takes; `OnlineConfig` reads them and the dict form; `share` gives
more bits to some layers; `QuantizeOnLoad` quantizes each tensor directly from the file's memory map into its rows of
the integer weight, without a float copy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from llm.base.checks import as_list
from llm.base.text import show
from llm.errors import CheckpointError, ValidationError, nearest
from llm.kernels.reference.quantize_weight import GROUP, HAVE_MINIMA, HAVE_ZEROS, SUPER_BLOCK, Parts
from llm.kernels.reference.rotation import block_for
from llm.kernels.select import backend_of_construction
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase
from llm.quantization.description import agreed, columns_of, matches
from llm.quantization.packing import doubled_fp4, nf4
from llm.quantization.quantizer import (
    IntegerWeight,
    Quantized,
    are_far_apart,
    decibels,
    guessed_input_squares,
    quantize_weight,
    quantize_weight_as,
    quantize_with_feedback,
    static_activation,
)
from llm.quantization.registry import get_scheme
from llm.quantization.schemes import SCHEMES
from llm.quantization.storage import StreamedStorage
from llm.quantization.unquantized import left_alone


@dataclass(frozen=True)
class Recipe:
    """One name of `quantization=`: the scheme, its bits, the default group size (None: per row) and the LM head's.

    `form`: of `quantize_weight_as`; "": symmetric integers. `fixed`: its format has this group size alone. `rotates`:
    weights and activations are rotated in blocks before they are rounded. `unrotated`: the form where they are not.
    `can_rotate`: they are where that is asked for, or texts calibrate it.
    """

    scheme: str
    bits: int
    group_size: int | None
    lm_head: str
    form: str = ""
    fixed: bool = False
    rotates: bool = False
    unrotated: str = ""
    can_rotate: bool = False

    @property
    def is_compensated(self) -> bool:
        """Calibration makes its weights more accurate."""
        return compensates(self.bits, self.form)


RECIPES: dict[str, Recipe] = {
    "w8a8": Recipe("W8A8_DYNAMIC", 8, None, "w8a8", rotates=True),
    "w8a8_static": Recipe("W8A8", 8, None, "w8a8"),
    "w8a16": Recipe("W8A16", 8, None, "w8a16"),
    "w4a8": Recipe("W4A8_DYNAMIC", 4, 32, "w8a8", "two_levels", rotates=True, unrotated="asymmetric"),
    "w4a16": Recipe("W4A16", 4, 32, "w8a16", "asymmetric", can_rotate=True),
    "fp8": Recipe("W8A16_FP8", 8, None, "w8a16", "float8"),
    "mxfp4": Recipe("W4A16", 4, 32, "w8a16", "mxfp4", fixed=True),
    "nf4": Recipe("W4A16", 4, 64, "w8a16", "nf4"),
    "q8_0": Recipe("W8A16", 8, GROUP, "q8_0", "q8_0", fixed=True),
    "q4_0": Recipe("W4A16", 4, GROUP, "q8_0", "q4_0", fixed=True),
    "q4_k": Recipe("W4A16", 4, GROUP, "q8_0", "q4_k", fixed=True),
}
_LM_HEAD = "lm_head"
_LM_HEAD_SCHEMES = ("W8A8_DYNAMIC", "W8A16", "W8A16_FP8")
# Their kernels scale whole sums: no groups.
_PER_ROW_SCHEMES = ("W8A8_DYNAMIC", "W8A8")
_KEYS = ("scheme", "bits", "group_size", "layers", "ignore", "lm_head", "calibration", "rotate", "symmetric", "tower")
# Where bits alone are named: of the schemes of 4 bits the smallest, so that as many bytes have more layers of 8.
_SCHEME_OF_BITS = "w4a8"
# What reasons begin with.
ON_LOAD = "quantized on load"
_SMALLEST_GROUP = 8
_BUDGET_GROUP = 16
_MORE_BITS = 8
# Of GGUF, whose groups have one size.
_BLOCKS = ("q8_0", "q4_0", "q4_k")
# Of a float32 scale, or minimum, or of a scale and a zero point in 16 bits, for each 32 weights.
_SCALE_BYTES = 4 / 32


@dataclass(frozen=True)
class _Choice:
    """What one layer is given; shards of a fused layer compare by it.

    `asked`: the group size is the user's. `why`: of a recipe that is neither the user's pattern's nor the default.
    """

    recipe: str
    group_size: int | None
    asked: bool
    why: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.recipe if self.group_size is None else f"{self.recipe} in groups of {self.group_size}"


@dataclass
class OnlineConfig(QuantizationConfig):
    """Schemes by pattern over an unquantized model.

    Attributes:
        scheme: a key of `RECIPES` for all linear layers.
        group_size: for layers that no pattern names; None: the recipe's own.
        layers: (pattern, recipe, group size) in order; the first that matches a layer is used.
        ignore: patterns of layers that stay as they are.
        lm_head: a key of `RECIPES` with 8 bits for the LM head and a tied embedding; None: left as it is.
        lm_head_asked: it is the user's.
        bits: the most that the codes of all linear layers have on average, 8 in some and 4 in others; None: not asked.
        eight_bits: path of a layer -> why it has 8 bits where it would have 4 and no pattern names it.
        calibration: texts that are run through the unquantized model first.
        own_texts: it writes them itself: calibration="auto".
        rotate: whether weights and activations are rotated, of w8a8, w4a8 and w4a16; None: those of w8a8 and w4a8 are,
            and those of w4a16 where texts calibrate it.
        symmetric: whether 4-bit integers that have zero points, or two levels of scales, by default are without.
        tower: a key of `RECIPES` with 8 bits for the linear layers of a vision tower; None: these stay floats.
        statistics: what they showed, by layer; set before the model is built.
    """

    scheme: str
    group_size: int | None = None
    layers: tuple[tuple[str, str, int | None], ...] = ()
    ignore: tuple[str, ...] = ()
    lm_head: str | None = None
    lm_head_asked: bool = False
    bits: float | None = None
    eight_bits: dict[str, str] = field(default_factory=dict)
    calibration: tuple[str, ...] = ()
    own_texts: bool = False
    rotate: bool | None = None
    symmetric: bool = False
    tower: str | None = None
    statistics: InputStatistics = field(default_factory=lambda: HeldStatistics())
    _unused: set[str] = field(default_factory=set)
    # While layers are counted for `bits`.
    _units: dict[str, Unit] | None = None

    @property
    def multiplies_integers(self) -> bool:
        """Most layers round their inputs to 8 bits."""
        return SCHEMES[RECIPES[self.scheme].scheme].activations == "int8"

    def __post_init__(self) -> None:
        self._unused = {*(pattern for pattern, _, _ in self.layers), *self.ignore}

    @classmethod
    def parse(cls, asked: str | Mapping[str, Any], calibration: Sequence[str] | None = None) -> OnlineConfig:
        """From what the user passed as `quantization=`; raises `ValidationError` for what is not understood."""
        given = {"scheme": asked} if isinstance(asked, str) else dict(asked)
        unknown = [show(key) for key in given if key not in _KEYS]
        if unknown:
            hint = nearest(unknown[0].strip("'"), _KEYS)
            raise _wrong(asked, f"has the key {unknown[0]}; it takes {', '.join(_KEYS)}.{hint}")
        if given.get("bits") is not None:
            given.setdefault("scheme", _SCHEME_OF_BITS)
        if "scheme" not in given:
            raise _wrong(asked, f"has no 'scheme', for the layers that no pattern names; known: {', '.join(RECIPES)}.")
        if calibration and given.get("calibration"):
            raise _wrong(asked, "has calibration texts of its own; pass them here or as calibration=, not both.")
        scheme = _recipe(given["scheme"], asked)
        texts = given.get("calibration", calibration)
        own_texts = isinstance(texts, str) and texts == "auto"
        texts = () if own_texts else _texts(texts)
        layers = _layers(given.get("layers", {}), asked)
        is_static = any(RECIPES[name].scheme == "W8A8" for name in (scheme, *(item[1] for item in layers)))
        if is_static and not (texts or own_texts):
            raise _wrong(asked, "uses w8a8_static, which needs calibration=[texts] to fix the activations' scales.")
        group_size = _group_size(given.get("group_size"), scheme, asked)
        lm_head = _eight_bits(given.get("lm_head", RECIPES[scheme].lm_head), asked, "lm_head")
        rotate: Any = given.get("rotate")
        symmetric: Any = given.get("symmetric", False)
        for key, value in (("rotate", rotate), ("symmetric", symmetric)):
            if not isinstance(value, bool) and (key, value) != ("rotate", None):
                raise _wrong(asked, f"has {key}={show(value)}; it is True or False.")
        return cls(
            scheme,
            group_size,
            layers,
            _patterns(given.get("ignore", ()), asked, "ignore"),
            lm_head,
            "lm_head" in given,
            _bits(given.get("bits"), scheme, asked),
            calibration=texts,
            own_texts=own_texts,
            rotate=rotate,
            symmetric=symmetric,
            tower=_eight_bits(given.get("tower"), asked, "tower"),
        )

    @property
    def of_tower(self) -> OnlineConfig | None:
        """For the vision tower, which texts calibrate nothing of; None: it is not quantized."""
        return None if self.tower is None else OnlineConfig(self.tower, rotate=self.rotate)

    @property
    def uses_calibration(self) -> bool:
        """Whether there are texts and a layer that they make a difference to."""
        recipes = [RECIPES[name] for name in (self.scheme, *(item[1] for item in self.layers))]
        matters = any(recipe.is_compensated or recipe.scheme == "W8A8" for recipe in recipes)
        return (bool(self.calibration) or self.own_texts) and matters

    def get_name(self) -> str:
        return self.scheme

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        kind = getattr(layer, "quant_kind", "")
        names = self.checkpoint_names(prefix)
        if kind == "linear":
            choice = agreed(prefix, names, lambda name: self._choose(name, prefix))
        elif kind == "embedding" and getattr(layer, "is_lm_head", False):
            # A tied table is the LM head too, whatever its path.
            ignored = [self._is_ignored(prefix, prefix), self._is_ignored(_LM_HEAD, _LM_HEAD)]
            given = None if any(ignored) else self.lm_head
            choice = _Choice(given, RECIPES[given].group_size, False) if given else None
        else:
            return None
        if choice is None:
            reason = "lm_head=None" if kind == "embedding" and not self.lm_head else "in the ignore list"
            return left_alone(kind, f"quantization={self.scheme!r}", reason)
        if RECIPES[choice.recipe].form in _BLOCKS and columns_of(layer) % GROUP:
            reason = f"blocks of {GROUP} do not divide its {columns_of(layer)} columns"
            return left_alone(kind, f"quantization={self.scheme!r}", reason)
        if self._units is not None and kind == "linear":
            is_named = any(self._named(name, prefix) for name in names)
            add_layer(self._units, prefix, layer, RECIPES[choice.recipe].bits if is_named else 0)
        return self._method(layer, kind, prefix, choice)

    def check_used(self) -> None:
        if self._unused:
            names = ", ".join(repr(pattern) for pattern in sorted(self._unused))
            raise ValidationError(
                f"quantization names layers that this model does not have: {names}; a pattern is a linear layer's "
                "dotted path, a glob with *, or re:<regular expression>. Whether the LM head (tied or not) is "
                "quantized is said by lm_head.",
                parameter="quantization",
                value=sorted(self._unused),
            )

    def expected_bytes(self, tensors: Sequence[tuple[tuple[int, ...], int]]) -> int:
        """About what a checkpoint's tensors, (shape, bytes) each, will take: rather too much than too little.

        The largest matrix, which is the embedding, counts as it is: it may not be quantized. Three dimensions are a
        stack of matrices.
        """
        names = (self.scheme, *(recipe for _, recipe, _ in self.layers))
        bits = self.bits or max(RECIPES[name].bits for name in names)
        matrices = [(nbytes, shape) for shape, nbytes in tensors if len(shape) in (2, 3)]
        table = max((item for item in matrices if len(item[1]) == 2), default=None)
        whole = sum(nbytes for shape, nbytes in tensors if len(shape) not in (2, 3))
        if table is not None:
            matrices.remove(table)
            whole += table[0]
        parts = 2 if any(RECIPES[name].form in HAVE_MINIMA for name in names) else 1
        per_weight = bits / 8 + _SCALE_BYTES * parts
        return whole + round(sum(min(nbytes, math.prod(shape) * per_weight) for nbytes, shape in matrices))

    def _choose(self, name: str, prefix: str) -> _Choice | None:
        if self._is_ignored(name, prefix):
            return None
        named = self._named(name, prefix)
        if named is not None:
            return named
        default = RECIPES[self.scheme]
        if default.bits <= 4 and prefix in self.eight_bits:
            return _Choice(default.lm_head, RECIPES[default.lm_head].group_size, False, self.eight_bits[prefix])
        return _Choice(self.scheme, self.group_size or self._default_group(default), self.group_size is not None)

    def _default_group(self, recipe: Recipe) -> int | None:
        """Within a budget two levels of scales are of half as many columns: a byte more for each 32 weights is worth
        more than as many bytes of layers with 8 bits."""
        has_levels = recipe.form == "two_levels" and self.rotate is not False and not self.symmetric
        return _BUDGET_GROUP if self.bits is not None and has_levels else recipe.group_size

    def _named(self, name: str, prefix: str) -> _Choice | None:
        """By the first of the user's patterns that matches."""
        for pattern, recipe, group_size in self.layers:
            if self._matches(name, prefix, pattern):
                return _Choice(recipe, group_size or RECIPES[recipe].group_size, group_size is not None)
        return None

    def share_bits(self, construct: Callable[[], object]) -> None:
        """Choose the layers that have 8 bits: as many as `bits` allows.

        Args:
            construct: makes the model with this config; it needs no memory of its own.

        Raises:
            ValidationError: the layers that the user gave 8 bits have more than that already.
        """
        if self.bits is None:
            return
        self.eight_bits.clear()
        units: dict[str, Unit] = {}
        self._units = units
        construct()
        self._units = None
        shared = share(list(units.values()), self.bits, RECIPES[self.scheme].bits)
        if shared is None:
            raise ValidationError(
                f"quantization: layers names so many layers of 8 bits that bits={self.bits:g} is exceeded; raise bits, "
                "or name fewer.",
                parameter="quantization",
                value=self.bits,
            )
        self.eight_bits |= dict.fromkeys(shared.paths, f"within bits={self.bits:g}")
        self.summary = f"bits={self.bits:g}, {shared}"

    def end_loading(self) -> None:
        self.statistics.release()

    def asks_group_size(self, prefix: str) -> bool:
        """Whether the group size of a linear layer is the user's."""
        choices = [self._choose(name, prefix) for name in self.checkpoint_names(prefix)]
        return any(choice is not None and choice.asked for choice in choices)

    def _is_ignored(self, name: str, prefix: str) -> bool:
        return any([self._matches(name, prefix, pattern) for pattern in self.ignore])

    def _matches(self, name: str, prefix: str, pattern: str) -> bool:
        """A pattern may name a shard as the checkpoint does, or the fused layer."""
        found = matches(name, pattern) or matches(prefix, pattern)
        if found:
            self._unused.discard(pattern)
        return found

    def _method(self, layer: Any, kind: str, prefix: str, choice: _Choice) -> QuantizeMethodBase:
        columns = columns_of(layer)
        name, instead = choice.recipe, ""
        if name == "q4_k" and columns % SUPER_BLOCK:
            name, instead = "q4_0", f", as blocks of {SUPER_BLOCK} do not divide {columns} columns"
        recipe = RECIPES[name]
        size, note = _fitting_group(choice, columns, prefix)
        static = recipe.scheme == "W8A8"
        form = "" if self.symmetric and recipe.bits == 4 and recipe.form in INTEGERS else recipe.form
        rotation = block_for(columns) if self._rotates(recipe) and form == recipe.form else 0
        if rotation:
            note += f", rotated in blocks of {rotation}"
        elif form:
            form = recipe.unrotated or form
        if form == "two_levels":
            note += ", on two levels of scales"
        if form in HAVE_ZEROS:
            note += ", with zero points"
        statistics = partial(self.statistics.of, prefix) if prefix in self.statistics else None
        storage = QuantizeOnLoad(recipe.bits, size, statistics, static, form, rotation)
        reason = f"{ON_LOAD}: {name}{note}{instead}{choice.why and f', {choice.why}'}"
        method: QuantizeMethodBase = get_scheme(recipe.scheme, kind)(storage, f"quantization={self.scheme!r}", reason)
        method.summary = choice.why and f"{name} {choice.why}"
        return method

    def _rotates(self, recipe: Recipe) -> bool:
        """Whether its weights are rotated, and so its activations."""
        if self.rotate is None:
            return recipe.rotates or (recipe.can_rotate and self.uses_calibration)
        return self.rotate and (recipe.rotates or recipe.can_rotate)


def _fitting_group(choice: _Choice, columns: int, prefix: str) -> tuple[int, str]:
    """The group size for a layer of `columns`, and a note where it is not the one chosen."""
    size = choice.group_size
    if size is None:
        return columns, ""
    if columns % size == 0:
        return size, f", groups of {size}"
    if choice.asked:
        raise ValidationError(
            f"group_size={size} does not divide the {columns} columns of {prefix}; leave it out, or pass a divisor.",
            parameter="quantization",
            value=size,
        )
    fitting = math.gcd(size, columns)
    if fitting >= _SMALLEST_GROUP:
        return fitting, f", groups of {fitting} ({size} does not divide {columns} columns)"
    return columns, f", per row (groups of {size} do not divide {columns} columns)"


def _recipe(name: Any, asked: Any) -> str:
    if isinstance(name, str) and name.lower() in RECIPES:
        return name.lower()
    hint = nearest(name, RECIPES) if isinstance(name, str) else ""
    raise _wrong(asked, f"names the scheme {show(name)}; known: {', '.join(RECIPES)}.{hint}")


def _bits(value: Any, scheme: str, asked: Any) -> float | None:
    if value is None:
        return None
    least = RECIPES[scheme].bits
    if least == _MORE_BITS:
        four = ", ".join(name for name, recipe in RECIPES.items() if recipe.bits < _MORE_BITS)
        raise _wrong(asked, f"has bits beside {scheme}, which has {least} in every layer; bits is for {four}.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _MORE_BITS:
        raise _wrong(asked, f"has bits={show(value)}; it is a number from {least} to {_MORE_BITS}.")
    return float(value)


def _eight_bits(given: Any, asked: Any, key: str) -> str | None:
    if given is None or given is False:
        return None
    name = given.lower() if isinstance(given, str) else ""
    if name not in RECIPES or RECIPES[name].scheme not in _LM_HEAD_SCHEMES:
        what = {"lm_head": "the LM head", "tower": "the vision tower"}[key]
        raise _wrong(asked, f"has {key}={show(given)}; {what} can be 'w8a8', 'w8a16', 'fp8', 'q8_0' or None.")
    return name


def _layers(given: Any, asked: Any) -> tuple[tuple[str, str, int | None], ...]:
    if not isinstance(given, Mapping):
        raise _wrong(asked, "has 'layers' that is no dict of pattern -> scheme.")
    result = []
    for pattern in _patterns(list(given), asked, "layers"):
        value = given[pattern]
        options = {"scheme": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else {}
        if not options or set(options) - {"scheme", "group_size"}:
            raise _wrong(
                asked,
                f"gives {show(pattern)} the value {show(value)}; use a scheme, or scheme and group_size; layers in "
                "'ignore' are not quantized.",
            )
        recipe = _recipe(options.get("scheme"), asked)
        result.append((pattern, recipe, _group_size(options.get("group_size"), recipe, asked)))
    return tuple(result)


def _patterns(given: Any, asked: Any, key: str) -> tuple[str, ...]:
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise _wrong(asked, f"has {key}={show(given)}; it takes a list of patterns.")
    patterns = [given] if isinstance(given, str) else as_list("quantization", given, "a dict with a list of patterns")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise _wrong(asked, f"has the pattern {show(pattern)}, which is no string.")
        try:
            matches("", pattern)
        except CheckpointError as error:  # what a checkpoint's pattern would be refused for
            raise _wrong(asked, f"cannot be used: {error}") from error
    return tuple(patterns)


def _group_size(value: Any, recipe: str, asked: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 2 <= value < 2**31:
        raise _wrong(asked, f"has group_size={show(value)}; it is a whole number of at least 2.")
    fixed = RECIPES[recipe].group_size if RECIPES[recipe].fixed else value
    if value != fixed:
        raise _wrong(asked, f"has group_size={value} for {recipe}, whose groups are of {fixed}; leave group_size out.")
    if RECIPES[recipe].scheme in _PER_ROW_SCHEMES:
        raise _wrong(asked, f"has group_size={value} for {recipe}, which has one scale per row; leave group_size out.")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [None] if isinstance(value, str) else as_list("calibration", value, "a list of texts")
    if not all(isinstance(text, str) and text for text in texts):
        message = f"calibration takes a list of texts, none of them empty, or 'auto', got {show(value)}."
        raise ValidationError(message, parameter="calibration", value=value)
    return tuple(texts)


def _wrong(asked: Any, what: str) -> ValidationError:
    return ValidationError(f"quantization={show(asked)} {what}", parameter="quantization", value=asked)


# `quantization={"bits": 4.5}`: which linear layers have 8 bits where the others have 4, within a size. The order was
# measured on SmolLM2-135M: the divergence of its answers with one layer at a time in 4 bits, per weight of that layer.
# Errors of the weights say nothing: they are 22.5 to 23.3 dB in every layer. What reads the stream for attention
# suffers eight times as much as the others, what writes to it in the first three and the last two of 30 blocks (where
# the largest activations arise and leave) ten times. Filled in this order, a budget loses as much as filled by the
# measured divergences, or less.

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERT = re.compile(r"\.experts\.\d+(?=\.)")
# The last part of the path of what makes queries, keys or values, alone or together.
_ATTENDS = re.compile(r"(.*_)?(q|k|v|qkv|kv|qk|query|key|value)(_.*)?|c_attn|wqkv", re.IGNORECASE)
# Of what writes to the stream: after attention, and after a wider layer, which its shape shows too.
_AFTER_ATTENTION = re.compile(r"o_proj|out_proj|c_proj|dense|wo", re.IGNORECASE)
_DOWN = re.compile(r"down_proj|w2|fc2|fc_out|dense_4h_to_h", re.IGNORECASE)
# Of the blocks, those whose writing layers come first, from both ends.
_FIRST_BLOCKS, _LAST_BLOCKS = 1 / 10, 1 / 15


@dataclass
class Unit:
    """Layers that share a choice: one linear layer, or the same one of all experts of a layer.

    Attributes:
        key: their dotted path, with * for the expert.
        wide: they have more columns than rows.
        bits: of the codes, where the user chose them; 0: to be chosen.
        paths: their dotted paths.
        weights: how many weights they have together.
    """

    key: str
    wide: bool
    bits: int
    paths: list[str] = field(default_factory=list)
    weights: int = 0

    @property
    def block(self) -> int:
        """The number of the decoder's layer that they lie in."""
        found = _NUMBER.search(self.key)
        return int(found[0]) if found else 0


@dataclass(frozen=True)
class Shared:
    """What `share` chose.

    Attributes:
        units: those that have 8 bits by the choice.
        bits: of all codes, on average.
    """

    units: tuple[Unit, ...]
    bits: float

    @property
    def paths(self) -> list[str]:
        """Of the layers with 8 bits."""
        return [path for unit in self.units for path in unit.paths]

    def __str__(self) -> str:
        """E.g. "codes of linear layers have 4.496 bits on average: 8 in model.layers.{0-3,29}.self_attn.qkv_proj"."""
        blocks: dict[str, list[int]] = {}
        for unit in self.units:
            blocks.setdefault(_NUMBER.sub("#", unit.key, count=1), []).append(unit.block)
        named = [key.replace("#", _spans(numbers)) for key, numbers in blocks.items()]
        chosen = f": 8 in {', '.join(named)}" if named else ""
        return f"codes of linear layers have {self.bits:.3f} bits on average{chosen}"


def add_layer(units: dict[str, Unit], path: str, layer: Any, bits: int) -> None:
    """Count a linear layer; `bits`: as in `Unit`."""
    rows, columns = sum(layer.output_sizes), layer.input_size
    key = _EXPERT.sub(".experts.*", path)
    if bits:
        key = f"{key} ({bits} bits)"  # some experts may be named and others not
    unit = units.setdefault(key, Unit(key, columns > rows, bits))
    unit.paths.append(path)
    unit.weights += rows * columns


def share(units: Sequence[Unit], bits: float, fewer: int) -> Shared | None:
    """Give 8 bits to the units that need them most until all have `bits` on average, and `fewer` to the others.

    None: those with bits of their own have more than that already.
    """
    weights = sum(unit.weights for unit in units)
    blocks = 1 + max((unit.block for unit in units), default=0)
    free = [unit for unit in units if not unit.bits]
    left = bits * weights - sum((unit.bits or fewer) * unit.weights for unit in units)
    if left < 0:
        return None
    chosen = []
    for unit in sorted(free, key=lambda unit: _order(unit, blocks)):
        cost = (_MORE_BITS - fewer) * unit.weights
        if cost <= left:
            left -= cost
            chosen.append(unit)
    return Shared(tuple(chosen), bits - left / max(1, weights))


def _order(unit: Unit, blocks: int) -> tuple[int, int]:
    """Less comes first."""
    name = unit.key.rpartition(".")[2]
    block, from_end = unit.block, blocks - 1 - unit.block
    attends = _ATTENDS.fullmatch(name) is not None
    is_down = not attends and (unit.wide or _DOWN.fullmatch(name) is not None)
    writes = is_down or _AFTER_ATTENTION.fullmatch(name) is not None
    is_early = block < max(1, round(blocks * _FIRST_BLOCKS))
    is_late = from_end < max(1, round(blocks * _LAST_BLOCKS))
    if writes and (is_early or is_late):
        return 0, block
    if attends:
        return 1, block
    if block == 0 or from_end == 0:
        return 2, block
    return (3 if is_down else 4), block


def _spans(numbers: Sequence[int]) -> str:
    """Several as {0-2,29}."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return parts[0] if len(spans) == 1 and spans[0][0] == spans[0][1] else f"{{{','.join(parts)}}}"


# --- What calibration showed. ---

# The forms of plain integers: symmetric ones, those with a zero point, and those on two levels of scales.
INTEGERS = ("", "asymmetric", "two_levels")
# Of the forms whose codes are no integers.
_TABLES = {"mxfp4": doubled_fp4, "nf4": nf4}


def compensates(bits: int, form: str) -> bool:
    """Whether rounding errors of a form are fed back by what calibration showed."""
    return form == "float8" or (bits <= 4 and form in INTEGERS)


@dataclass
class ActivationStatistics:
    """Statistics of a layer's inputs during calibration.

    Attributes:
        low, high: the smallest and the largest value.
        moments: mean of x x^T for runs of at most 1024 input channels, float32 [B, B] each.
        rows: number of tokens of this layer; the other fields may be of all experts of a layer together.
    """

    low: float
    high: float
    moments: list[torch.Tensor]
    rows: int = 1


class InputStatistics(Protocol):
    """Statistics of the inputs of linear layers, by dotted path.

    Attributes:
        in_order: they are computed while the model is read, layer by layer: those of a decoder's layer are gone once
            those of a later one are asked for.
    """

    in_order: bool

    def __contains__(self, path: object) -> bool: ...
    def of(self, path: str) -> ActivationStatistics: ...
    def release(self) -> None:
        """Called when a model was read; the next one may be read later."""


class HeldStatistics(dict[str, ActivationStatistics]):
    """All at once."""

    in_order = False

    def of(self, path: str) -> ActivationStatistics:
        return self[path]

    def release(self) -> None:
        """A model may be read again with them."""


class QuantizeOnLoad(StreamedStorage):
    """A weight stored as float [N, K].

    Args:
        bits: 8 (rounding to nearest) or 4 (integers: with a search for the best clipping).
        group_size: columns that share a scale; must divide K.
        statistics: gives those of the layer's inputs while it is read; they weight the errors of 4-bit weights.
        static_input: fix the activations' scale and offset from `statistics`.
        form: of `quantize_weight_as`; "": symmetric integers.
        rotation: of integers of 8 bits, also by two levels: the block of columns in which the weight is rotated first;
            0: none.

    Attributes:
        signal_to_noise: of the integers against the float weight, in decibels; valid after loading.
    """

    on_load = True

    def __init__(
        self,
        bits: int,
        group_size: int,
        statistics: Callable[[], ActivationStatistics] | None = None,
        static_input: bool = False,
        form: str = "",
        rotation: int = 0,
    ) -> None:
        super().__init__(bits, group_size, form in HAVE_MINIMA)
        self.form = form
        self.rotation = rotation
        self._statistics = statistics
        self.static_input = static_input
        self.search = bits <= 4
        self._ops = backend_of_construction().ops
        self._signal = self._noise = 0.0
        self._input_squares: torch.Tensor | None = None

    def see(self, loaded: torch.Tensor) -> None:
        """Of rotated columns errors are compensated by what the columns show, where no texts do."""
        fits = self.rotation and self.form in ("two_levels", "asymmetric") and self.rotation % self.group_size == 0
        if fits and not self.compensates and loaded.shape[-1] == self._columns:
            guess = guessed_input_squares(self._ops.column_squares(loaded))
            # The form that has no kernel takes long.
            if self.form == "two_levels" or are_far_apart(guess, self.rotation):
                self._input_squares = guess

    @property
    def compensates(self) -> bool:
        """Whether rounding errors are fed back by what calibration showed."""
        return self._statistics is not None and compensates(self.bits, self.form)

    @property
    def signal_to_noise(self) -> float:
        return decibels(*self.energies)

    @property
    def energies(self) -> tuple[float, float]:
        """The sums of squares of the weight, and of its error."""
        return self._signal, self._noise

    def fill(self, weight: IntegerWeight, rows: slice, loaded: torch.Tensor, shard: int) -> None:
        shape = (rows.stop - rows.start, self._columns)
        if loaded.shape != shape:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {list(shape)}")
        q, scale = weight.q[rows], weight.scale[rows]
        if not self.compensates:  # which is computed by what calibration showed, on the host
            loaded = loaded.to(weight.q.device)
        third = next((part for part in (weight.zero, weight.minimum, weight.levels) if part is not None), None)
        result = self.quantized(loaded, (q, scale, None if third is None else third[rows]))
        self._input_squares = None  # of this tensor alone
        if result.q is not q:
            q.copy_(result.q)
            scale.copy_(result.scale)
            if third is not None and result.minimum is not None:
                third[rows] = result.minimum
        self._signal += result.signal
        self._noise += result.noise

    def quantized(self, loaded: torch.Tensor, out: Parts) -> Quantized:
        """`out`: q, scale, and minimum or zero point of these rows; the result's may be others."""
        if self._statistics is not None and self.compensates:
            moments = self._statistics().moments
            return quantize_with_feedback(
                *(loaded, self.bits, self.group_size, moments), form=self.form, rotation=self.rotation
            )
        if self.form:
            return quantize_weight_as(
                *(loaded, self.form, self.group_size),
                kernel=self._ops.quantize_weight_as,
                out=out,
                rotation=self.rotation,
                input_squares=None if self._input_squares is None else self._input_squares.to(loaded.device),
            )
        return quantize_weight(
            loaded,
            self.bits,
            self.group_size,
            search=self.search,
            kernel=self._ops.quantize_weight,
            out=out[:2],
            rotation=self.rotation,
        )

    def again(self, weight: IntegerWeight) -> IntegerWeight:
        """A quantized weight's values, quantized as a checkpoint's are, but not seen: ranks have some rows each."""
        values = self._values_of(weight)
        self._sizes, self._columns, self._device = [len(values)], values.shape[1], values.device
        found = self._allocated()
        self.fill(found, slice(0, len(values)), values, 0)
        found.bias = weight.bias
        return found

    def _values_of(self, weight: IntegerWeight) -> torch.Tensor:
        """`weight.dequantize()`: all rows of an embedding table, where its columns are in order."""
        if weight.columns is not None or weight.levels is not None:
            return weight.dequantize()
        kind = "float8" if weight.q.is_floating_point() else "int4" if weight.bits <= 4 else "int8"
        packed = self._ops.pack(weight.q, kind).scaled(
            weight.scale, weight.zero, weight.group_size, weight.minimum, rotation=weight.rotation
        )
        every = torch.arange(packed.n, device=weight.q.device)
        values: torch.Tensor = self._ops.embedding(every, replace(packed, table=weight.table))
        return values

    def _allocated(self) -> IntegerWeight:
        weight = super()._allocated()
        weight.rotation = self.rotation
        if self.form in HAVE_ZEROS:
            weight.zero = torch.empty_like(weight.scale)
        if self.form == "two_levels":
            weight.levels = torch.empty_like(weight.scale, dtype=torch.uint8)
            weight.scale = weight.scale.new_empty(len(weight.q), 1)
        if self.form == "float8":
            weight.q = weight.q.view(torch.float8_e4m3fn)
        if self.form in _TABLES:
            weight.table = _TABLES[self.form]()
        return weight

    def finish(self, weight: IntegerWeight) -> None:
        if self.static_input and self._statistics is not None:
            found = self._statistics()
            weight.input_scale, weight.input_offset = static_activation(found.low, found.high)
