"""Weights as operations take them: immutable values with everything that a GEMM needs to know of them.

`Weight` is one matrix, `ExpertWeights` those of a mixture, `LoraTerms` what adapters add to the result of one layer. A
backend keeps the bits in a layout of its own by subclassing `Weight`; here a row is stored as it is, and of int4 two
values in a byte. A checkpoint format says where the parts of a weight lie, a scheme which of them there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar, cast

import torch

from llm.kernels.reference.rotation import check_block, rotate

FLOAT_KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# The kinds with scales, and the type that `Weight.unpack` gives of each. "float8" is e4m3fn without NaN.
SCALED_KINDS = {"int8": torch.int8, "int4": torch.int8, "float8": torch.float8_e4m3fn}
# As Kind and Activations (kernels/cpu), in order.
KINDS = (*FLOAT_KINDS.values(), *SCALED_KINDS)
ACTIVATIONS = ("float", "bfloat16", "int8")
# What codes are counted from, below 0: the middle of 5 and of 4 bits, so that products with minima lose no digits.
LEAST = {"int8": 16, "int4": 8}
# Sums of k products of two int8 stay within int32.
MAX_INTEGER_K = 1 << 17
# Codes that are checked at a time, within the caches.
_CHUNK = 1 << 17

W = TypeVar("W", bound="Weight")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix [n, k], and how a GEMM with it is computed.

    W[i, j] = w[i, j] of a float kind, w[i, j] * scale[i, g] of 8-bit floats with g = j // group_size. Of integers it is
    (w[i, j] - zero[i, g]) * scale[i, g], or table[w[i, j] + 8] * scale[i, g]. With minima it is code[i, j] *
    scale[i, g] - minimum[i, g], rounded once, where code is w + 8 of int4 and w + 16 of int8. With levels it is
    v[i, j] * scale[i], where v = (w + 8) * step - shift is an integer of 8 bits. With `columns` that is
    W[i, columns[j]]. Its tensors are those of the layer, so whoever frees or moves a layer's memory frees or moves the
    weight's.

    Attributes:
        data: the bits of w, in the layout of the backend that packed them.
        kind: what w is, of `KINDS`.
        scale: float [n, groups] of integers and 8-bit floats, [n, 1] with levels; None: not yet known, and nothing can
            be computed.
        zero: [n, groups], None: 0 everywhere.
        minimum: float [n, groups], in place of zero; None: none.
        group_size: columns that share a scale; 0: all of a row.
        table: float32 [16], the values that int4 stands for, in the place of -8 to 7; None: those.
        activations: "float": GEMMs read them as they are; "bfloat16": rounded to it, where w is exact in it and there
            are no levels; "int8": quantized, by each row's largest or by `input_scale`; for int4 without levels by the
            largest of each group of a row.
        input_scale: of static int8 activations, q = round(x / input_scale) + input_offset; 0: each row has its own.
        input_offset: a whole number in [-128, 127].
        bias: float [n], added to the GEMM's result; None: none.
        rotation: the block of columns in which W is rotated (`llm.kernels.reference.rotation`): what is said above is
            rotate(W), whose products are with rotated inputs; 0: none.
        columns: int32 [k] of integers, the input that each column of w is multiplied by, so that the columns of a
            group are side by side; None: each by its own.
        levels: uint8 [n, groups] of int4, in the place of zero: two levels of scales (QServe, arXiv:2405.04532). The
            low nibble is the step, the high one the place; shift = step * (place + 16) * 5 // 16. All values are
            integers of 8 bits, so that products are those of int8. None: there is one level.
        outputs: rows of the whole matrix, of which a rank has n; the order of a sum may be a function of them, but not
            of n, or bits would depend on the number of ranks. 0: n.

    Raises:
        ValueError: the parts do not fit each other, or no product is defined for them.
    """

    data: torch.Tensor
    kind: str
    n: int
    k: int
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    group_size: int = 0
    table: torch.Tensor | None = None
    activations: str = "float"
    input_scale: float = 0.0
    input_offset: int = 0
    bias: torch.Tensor | None = None
    minimum: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    rotation: int = 0
    levels: torch.Tensor | None = None
    outputs: int = 0

    def __post_init__(self) -> None:
        if not self.group_size:
            object.__setattr__(self, "group_size", max(1, self.k))
        if self.kind not in KINDS or self.activations not in ACTIVATIONS:
            raise ValueError(f"no weight is {self.kind!r} with {self.activations!r} activations")
        if self.is_float:
            _check_float(self)
        else:
            _check_scaled(self)
        if self.bias is not None and self.bias.shape != (self.n,):
            raise ValueError(f"one bias per output is needed, [{self.n}], got {list(self.bias.shape)}")

    @property
    def is_float(self) -> bool:
        return self.kind not in SCALED_KINDS

    @property
    def groups(self) -> int:
        """Along k, at least one."""
        return max(1, -(-self.k // self.group_size))

    @property
    def nbytes(self) -> int:
        """Of the packed bits alone."""
        return self.data.nbytes

    def memory(self) -> dict[str, torch.Tensor | None]:
        """What it is made of but for the bias, by the names of the buffers that a layer keeps it in."""
        scales = {"weight_scale": self.scale, "weight_zero": self.zero, "weight_minimum": self.minimum}
        more = {"weight_table": self.table, "weight_columns": self.columns, "weight_levels": self.levels}
        return {"packed_data": self.data, **scales, **more}

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Rows start to end - 1 of `unpack()`."""
        part = self.data[start:end]
        return _split_nibbles(part)[:, : self.k] if self.kind == "int4" else part

    def unpack(self) -> torch.Tensor:
        """w [n, k], bit for bit what was packed: of the type in `SCALED_KINDS`, else the floating type."""
        return self.rows(0, self.n)

    def integers(self, start: int, end: int) -> torch.Tensor:
        """What int8 activations are multiplied by, int8 [rows, k]: w, or v with levels."""
        values = self.rows(start, end)
        return values if self.levels is None else eight_bits(values, self.level_rows(start, end), self.group_size)

    def level_rows(self, start: int, end: int) -> torch.Tensor:
        """Levels of the rows start to end - 1, [rows, groups]."""
        if self.levels is None:
            raise ValueError("the weight has one level of scales")
        return self.levels[start:end]

    def dequantize(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """W in float32, rows start to end - 1."""
        end = self.n if end is None else end
        values = self.rows(start, end)
        if self.is_float:
            return values.float()
        values = self._scaled(values, start, end)
        if self.rotation:
            return rotate(values, self.rotation)
        return values if self.columns is None else values[:, self.columns.long().argsort()]

    def _scaled(self, values: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Integers [rows, k] as what they stand for, in the order of w."""
        if self.table is not None:
            values = self.table[values.long() + 8]
        if self.levels is not None:
            return dequantize(eight_bits(values, self.level_rows(start, end), self.group_size), self.scales[start:end])
        if self.minimum is not None:
            codes = values.to(torch.int16) + LEAST[self.kind]
            return _above_minimum(codes, self.scales[start:end], self.minimum[start:end], self.group_size)
        zero = None if self.zero is None else self.zero[start:end]
        return dequantize(values, self.scales[start:end], zero, self.group_size)

    @property
    def scales(self) -> torch.Tensor:
        """`scale`; ValueError where there is none."""
        if self.scale is None:
            raise ValueError(f"a weight of {self.kind} needs its scales")
        return self.scale

    def scaled(
        self: W,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        group_size: int = 0,
        minimum: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
        rotation: int = 0,
        levels: torch.Tensor | None = None,
    ) -> W:
        """The same bits with these scales, with zero points, minima or levels, and columns in an order or rotated."""
        return replace(
            self,
            scale=scale,
            zero=zero,
            group_size=group_size,
            minimum=minimum,
            columns=columns,
            rotation=rotation,
            levels=levels,
        )


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The matrices of a layer of experts, one pair per expert, all of one size. Their kinds may differ.

    Attributes:
        gate_up: [2I, H] each: the gate in rows 0 to I - 1, then the value; [I, H] of experts without a gate.
        down: [H, I] each.

    Raises:
        ValueError: there are none, or they do not fit each other.
    """

    gate_up: tuple[Weight, ...]
    down: tuple[Weight, ...]
    _derived: dict[object, object] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.gate_up or len(self.gate_up) != len(self.down):
            raise ValueError(f"each expert has two weights, got {len(self.gate_up)} and {len(self.down)}")
        inner, hidden = self.down[0].k, self.down[0].n
        rows = inner if self.gate_up[0].n == inner else 2 * inner
        for weights, shape in ((self.gate_up, (rows, hidden)), (self.down, (hidden, inner))):
            for weight in weights:
                if (weight.n, weight.k) != shape:
                    raise ValueError(f"experts have weights {list(shape)}, got {[weight.n, weight.k]}")

    @property
    def hidden_size(self) -> int:
        return self.down[0].n

    @property
    def is_gated(self) -> bool:
        return self.gate_up[0].n != self.down[0].k

    def derived(self, make: Callable[[ExpertWeights], T]) -> T:
        """`make(self)`, computed once: what a backend keeps of all of them together."""
        if make not in self._derived:
            self._derived[make] = make(self)
        return cast(T, self._derived[make])


@dataclass(frozen=True, eq=False)
class LoraTerm:
    """y[first : first + up.n] += scale * up(down(x)) for the tokens of the adapter in `slot`.

    Attributes:
        slot: of the adapter, at least 1.
        first: the first of its output channels; a fused layer has one term per matrix that the adapter changes.
        down: float [rank, K]; of an embedding [vocabulary, rank], whose rows are chosen by id.
        up: float [channels, rank], which may have a bias.
    """

    slot: int
    first: int
    down: Weight
    up: Weight
    scale: float


@dataclass(frozen=True, eq=False)
class LoraTerms:
    """The terms of one layer; those of one slot are for different channels.

    Attributes:
        width: output channels of the layer.
        is_lookup: `down` is read by id.

    Raises:
        ValueError: there are none, or they do not fit the layer or each other.
    """

    terms: tuple[LoraTerm, ...]
    width: int
    is_lookup: bool = False
    _derived: dict[object, object] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("no terms")
        inputs = self.inputs
        for term in self.terms:
            rank = term.down.k if self.is_lookup else term.down.n
            own = term.down.n if self.is_lookup else term.down.k
            fits = own == inputs and rank == term.up.k and 0 <= term.first <= self.width - term.up.n
            if not fits or term.slot < 1 or not (term.down.is_float and term.up.is_float):
                raise ValueError(
                    f"a term of slot {term.slot} from channel {term.first} with {[term.down.n, term.down.k]} and "
                    f"{[term.up.n, term.up.k]} does not fit {inputs} inputs and {self.width} channels"
                )
        spans = sorted((t.slot, t.first, t.first + t.up.n) for t in self.terms)
        if any(a[0] == b[0] and a[2] > b[1] for a, b in pairwise(spans)):
            raise ValueError("two terms of one slot have a channel in common")

    @property
    def inputs(self) -> int:
        """K; for an embedding the number of ids."""
        down = self.terms[0].down
        return down.n if self.is_lookup else down.k

    def derived(self, make: Callable[[LoraTerms], T]) -> T:
        """`make(self)`, computed once: what a backend keeps of all of them together."""
        if make not in self._derived:
            self._derived[make] = make(self)
        return cast(T, self._derived[make])


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, group_size: int | None = None
) -> torch.Tensor:
    """(w - zero) * scale in float32; weight [N, K], scale and zero [N, G] or [N]."""
    size = group_size or weight.shape[1]
    columns = torch.arange(weight.shape[1], device=weight.device) // size
    scale = scale.reshape(weight.shape[0], -1).float()
    values = weight.float()
    if zero is not None:
        values = values - zero.reshape(weight.shape[0], -1).float()[:, columns]
    return values * (scale if scale.shape[1] == 1 else scale[:, columns])


def eight_bits(codes: torch.Tensor, levels: torch.Tensor, group_size: int) -> torch.Tensor:
    """(w + 8) * step - shift, int8 [N, K]: w int8 [N, K], levels uint8 [N, G]."""
    step, shift = steps_and_shifts(levels)
    groups = codes.unflatten(1, (levels.shape[1], group_size))
    return ((groups + 8) * step[..., None] - shift[..., None]).to(torch.int8).flatten(1)


def steps_and_shifts(levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of levels uint8, int16 each."""
    step, place = (part.to(torch.int16) for part in (levels & 15, levels >> 4))
    return step, step * (place + 16) * 5 // 16


def _above_minimum(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, group_size: int) -> torch.Tensor:
    """codes * scale - minimum, rounded once to float32: codes [N, K], scale and minimum [N, G]."""
    columns = torch.arange(codes.shape[1], device=codes.device) // group_size
    return fused_multiply_add(codes.float(), scale.float()[:, columns], -minimum.float()[:, columns])


def kind_of(values: torch.Tensor, kind: str | None) -> str:
    """The kind that `values` [N, K] are packed as: of integers `kind` says it; ValueError where they are not of it."""
    if kind is None:
        kind = "float8" if values.dtype == torch.float8_e4m3fn else FLOAT_KINDS.get(values.dtype)
    fits = kind is not None and SCALED_KINDS.get(kind, values.dtype) == values.dtype
    if kind is None or not fits or values.dim() != 2 or (kind not in SCALED_KINDS and values.dtype == torch.int8):
        wanted = "float32, bfloat16 or float16" if kind is None else SCALED_KINDS.get(kind, kind)
        raise ValueError(f"a weight is {wanted} [N, K], got {values.dtype} {list(values.shape)}")
    if kind == "float8" and has_nan_codes(values):
        raise ValueError("the weight has values that are NaN")
    least, most = _bounds(values) if kind == "int4" and values.numel() else (0, 0)
    if least < -8 or most > 7:
        raise ValueError(f"int4 values lie in [-8, 7], got [{least}, {most}]")
    if kind in ("int8", "int4") and values.shape[1] > MAX_INTEGER_K:
        raise ValueError(f"K is {values.shape[1]}; beyond {MAX_INTEGER_K} a sum of products can leave int32")
    return kind


def has_nan_codes(values: torch.Tensor) -> bool:
    """True if a float8_e4m3fn is NaN, whose bits but the sign are all 1. On a CPU by NumPy, as `_bounds`."""
    codes = values.view(torch.uint8).flatten()
    if codes.device.type != "cpu":
        return bool((codes << 1 == 0xFE).any())
    return any((part.numpy() << 1).max() == 0xFE for part in codes.split(_CHUNK) if len(part))


def _bounds(values: torch.Tensor) -> tuple[int, int]:
    """The least and the largest. On a CPU by NumPy: PyTorch's OpenMP threads would spin beside the kernels' threads."""
    numbers = values.numpy() if values.device.type == "cpu" else values
    return int(numbers.min()), int(numbers.max())


def _check_float(weight: Weight) -> None:
    parts = (weight.scale, weight.zero, weight.minimum, weight.table, weight.columns, weight.levels)
    if any(part is not None for part in parts) or weight.rotation:
        raise ValueError(f"a {weight.kind} weight has no scales, and is not rotated")
    if weight.activations == "int8" or (weight.activations == "bfloat16" and weight.kind != "bfloat16"):
        raise ValueError(f"no product is defined of {weight.activations} activations with a {weight.kind} weight")


def _check_scaled(weight: Weight) -> None:
    shape = (weight.n, weight.groups)
    for name in ("scale", "zero", "minimum"):
        values, needed = getattr(weight, name), shape if weight.levels is None else (weight.n, 1)
        if values is not None and values.shape != needed:
            raise ValueError(
                f"{name} has shape {list(values.shape)}, groups of {weight.group_size} need {list(needed)}"
            )
    if weight.levels is not None:
        _check_levels(weight, weight.levels)
    shifted = [name for name in ("zero", "minimum", "table", "levels") if getattr(weight, name) is not None]
    if len(shifted) > 1 or (shifted and weight.kind == "float8"):
        what = "of 8-bit floats has neither" if weight.kind == "float8" else "has one of"
        raise ValueError(f"a weight {what} zero points, minima, a table and levels, got {' and '.join(shifted)}")
    if weight.table is not None:
        _check_table(weight)
    if weight.rotation:
        check_block(weight.rotation, weight.k)
        if weight.columns is not None or weight.input_scale:
            raise ValueError("a rotated weight has its columns in order, and activations with a scale for each row")
    if weight.columns is not None and not _is_permutation(weight.columns, weight.k):
        raise ValueError(f"columns are the numbers from 0 to {weight.k - 1} in some order")
    if weight.activations == "bfloat16" and (weight.levels is not None or not is_exact_in_bf16(weight.table)):
        what = "a table of other values" if weight.levels is None else "levels"
        raise ValueError(f"bfloat16 activations are multiplied by values of bfloat16, the weight has {what}")
    if weight.activations == "int8":
        _check_integer_product(weight)
    elif weight.input_scale or weight.input_offset:
        raise ValueError("only int8 activations have a scale and an offset")


def _check_table(weight: Weight) -> None:
    if weight.kind != "int4" or weight.table is None or weight.table.shape != (16,):
        raise ValueError(f"a table is of 16 values and of an int4 weight, got {weight.kind}")


def is_exact_in_bf16(table: torch.Tensor | None) -> bool:
    """Whether bfloat16 holds the values of a weight with scales; without a table they have at most 8 bits."""
    return table is None or torch.equal(table.bfloat16().float(), table)


def _check_levels(weight: Weight, levels: torch.Tensor) -> None:
    if levels.numel() < weight.n * weight.groups:
        raise ValueError(f"levels have shape {list(levels.shape)}, need {[weight.n, weight.groups]}")
    if weight.kind != "int4" or levels.dtype != torch.uint8:
        raise ValueError(f"levels are uint8 and of an int4 weight, got {levels.dtype} of {weight.kind}")
    if weight.k % weight.group_size or weight.group_size % 8:
        raise ValueError(
            f"groups with levels are of a multiple of 8 columns that divides their number, {weight.k}; got "
            f"{weight.group_size}"
        )


def _check_integer_product(weight: Weight) -> None:
    """Whole sums are scaled: one scale per row of int8 and with levels, else one per group of int4, with which zero
    points and minima go."""
    if weight.kind == "float8":
        raise ValueError("no product is defined of int8 activations with 8-bit floats")
    if weight.table is not None:
        raise ValueError("a product with int8 activations is of a weight without a table")
    if weight.kind == "int8" and (weight.zero is not None or weight.minimum is not None):
        raise ValueError("a product of int8 with int8 is of a weight without zero points and minima")
    if weight.kind == "int8" and weight.groups > 1:
        raise ValueError(f"a product of int8 with int8 needs one scale per row, got groups of {weight.group_size}")
    if weight.kind == "int4" and (weight.input_scale or weight.input_offset):
        raise ValueError("a product with int4 has one scale for each row of activations, got a static one")
    if not 0 <= weight.input_scale < math.inf:
        raise ValueError(f"input_scale must be positive, got {weight.input_scale}")
    if not -128 <= weight.input_offset <= 127 or (weight.input_offset and not weight.input_scale):
        raise ValueError(f"input_offset must be in [-128, 127] and have a scale, got {weight.input_offset}")


def _is_permutation(values: torch.Tensor, count: int) -> bool:
    expected = torch.arange(count, dtype=torch.int32, device=values.device)
    return values.dtype == torch.int32 and values.dim() == 1 and torch.equal(values.sort().values, expected)


def _split_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """int8 [N, B] -> int8 [N, 2B]: low nibble first, sign extended."""
    low = (packed << 4) >> 4
    return torch.stack((low, packed >> 4), dim=-1).flatten(1)


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in float32, rounded once; on Apple's GPUs as they do it.

    The product is exact in float64. The sum is rounded to odd in float64, so that rounding it to float32 gives the
    correctly rounded result (Boldo and Melquiond, 2008).
    """
    if a.device.type == "mps":  # which has no float64
        return torch.addcmul(c.float(), a.float(), b.float())
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = (total.view(torch.int64) & 1) == 0
    toward = torch.where(error > 0, torch.inf, -torch.inf)
    odd = torch.nextafter(total, toward)
    return torch.where((error != 0) & even & total.isfinite(), odd, total).float()
