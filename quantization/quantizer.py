"""Quantizing float weights: rounding to nearest for 8 bits, a search for the best clipping for 4 bits, and other forms.

Here is the arithmetic for static activations and with calibration; the kernels have the rest. It knows neither layers
nor files.

For 4 bits, calibration weights errors by activations and feeds rounding errors back (`quantize_weight`). It does not
scale channels as AWQ does (arXiv:2306.00978). Scales from mean activation magnitudes with searched exponents, folded
into the norms (folding into up_proj too was worse), were measured on the embedded model: calibrated on four draws of 12
chapters, evaluated on 30,000 tokens of other chapters. The table shows the increase in perplexity over unquantized,
with float32 scales.

           neither          scaling          feedback         both
    w4a16  1.04 to 1.16 %   1.01 to 1.09 %   0.45 to 0.73 %   0.54 to 0.72 %
    w4a8   1.54 to 1.70 %   1.49 to 1.62 %   0.85 to 1.03 %   0.87 to 1.18 %

On top of feedback, scaling changed log perplexity by -0.0006 to +0.0024, each +-0.0009: no gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from llm.base.library_settings import library_defaults
from llm.kernels.backend import Operation
from llm.kernels.reference import quantize_weight as reference
from llm.kernels.reference.linear import pack
from llm.kernels.reference.quantize_weight import (
    CLIP_SHARES,
    LARGEST_FLOAT8,
    best_scale_and_zero,
    code_limits,
    float8_scale,
    largest_of,
    level_of,
    place_of,
    quantize_groups,
    row_scale,
    shift_of,
)
from llm.kernels.reference.rotation import rotate
from llm.kernels.weight import eight_bits, steps_and_shifts

# This fraction of a second moment's mean diagonal is added to its diagonal. GPTQ adds 0.01, which is more than what
# most channels have beside a few large ones.
_DAMPING = 0.001
# Below it more than 1% of a weight's energy is error. SmolLM2-135M's perplexity changes by 15 to 29% in the forms whose
# layers are above it (w4a16 21.8 to 23.4 dB; symmetric groups of 32, Q4_0 and NF4 with medians of 21.6, 21.3 and 20.6),
# by 60% in MXFP4, all of whose layers are below it, and by 54% in symmetric groups of 128, where a quarter of them are.
FAR_DECIBELS = 20.0
_MOST_CODE = 15  # the most that a code of asymmetric integers is above the least one
# Columns whose mean square is less than this share of the median are taken to have so much: they may be unused.
_LEAST_SQUARES = 1 / 4096
# Columns are far apart where the mean of their inverse mean squares is more than so many times their geometric mean.
_FAR_APART = 2
# Elements that are rounded with feedback at a time: each of the columns costs some operations, whatever the rows.
_ROUNDED_ELEMENTS = 1 << 22
# Elements whose levels are looked for at a time.
_LEVELLED_ELEMENTS = 1 << 20
# Columns whose errors are spread as they arise, and from them to the later ones at once.
_BLOCK = 64


@dataclass
class IntegerWeight:
    """A quantized weight: W[n, k] = (q[n, k] - zero[n, g]) * scale[n, g] with g = k // group_size.

    With a minimum: code * scale[n, g] - minimum[n, g], where code is q + 16 of 8 bits, q + 8 of fewer. With a table:
    table[q[n, k] + 8] * scale[n, g]. With levels: v[n, k] * scale[n], where v is an integer of 8 bits.

    Attributes:
        q: int8 [N, K]; of 8-bit floats float8_e4m3fn.
        scale: float32 [N, G], [N, 1] with levels.
        zero: [N, G], whole numbers within the range of q; None: 0 everywhere.
        group_size: K for one scale per row.
        bits: the width of the values.
        input_scale, input_offset: of statically quantized activations, x ~ (q - offset) * scale.
        bias: float32 [N] that replaces the layer's bias, if the format stores the bias with the integers.
        minimum: float32 [N, G]; None: none.
        columns: int32 [K], the input that each column of q is multiplied by; None: each by its own.
        table: float32 [16], the values that 4 bits stand for; None: -8 to 7.
        rotation: what is said above is W rotated in blocks of so many columns (`llm.kernels.reference.rotation`); 0:
            it is W.
        levels: uint8 [N, G] in the place of a zero, as `llm.kernels.weight.Weight` has it; None: there is one level.
    """

    q: torch.Tensor
    scale: torch.Tensor
    group_size: int
    bits: int
    zero: torch.Tensor | None = None
    input_scale: float | None = None
    input_offset: int = 0
    bias: torch.Tensor | None = None
    minimum: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    table: torch.Tensor | None = None
    rotation: int = 0
    levels: torch.Tensor | None = None

    @property
    def groups(self) -> int:
        """Along K."""
        return self.scale.shape[1] if self.levels is None else self.levels.shape[1]

    def as_eight_bits(self) -> IntegerWeight:
        """A weight with levels as the integers of 8 bits that it stands for, by rows; others as they are."""
        if self.levels is None:
            return self
        values = eight_bits(self.q, self.levels, self.group_size)
        return replace(self, q=values, levels=None, group_size=values.shape[1], bits=8)

    def on_levels(self, group_size: int) -> IntegerWeight | None:
        """The inverse: integers of 8 bits by rows as 4 bits with levels, which stand for the same; None: they do not
        fit."""
        found = _on_levels(self.q, group_size)
        return None if found is None else replace(self, q=found[0], levels=found[1], group_size=group_size, bits=4)

    def to(self, device: torch.device) -> IntegerWeight:
        """Itself where all of it is there, else a copy."""
        names = ("q", "scale", "zero", "bias", "minimum", "columns", "table", "levels")
        parts = {name: getattr(self, name) for name in names}
        return replace(self, **{name: part.to(device) for name, part in parts.items() if part is not None})

    def dequantize(self) -> torch.Tensor:
        """W in float32."""
        kind = "float8" if self.q.is_floating_point() else "int4" if self.bits <= 4 else "int8"
        weight = pack(self.q, kind).scaled(
            self.scale, self.zero, self.group_size, self.minimum, self.columns, self.rotation, self.levels
        )
        return replace(weight, table=self.table).dequantize()


def _on_levels(values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes from -8 to 7 [N, K] and levels [N, K / size] that `eight_bits` makes int8 `values` [N, K] of; None: none.

    All that a group's level depends on is its least value, its largest, and what divides its values' distances.
    """
    codes, levels = torch.empty_like(values), values.new_empty(len(values), values.shape[1] // size, dtype=torch.uint8)
    rows = max(1, _LEVELLED_ELEMENTS // values.shape[1])
    for start in range(0, len(values), rows):
        groups = values[start : start + rows].unflatten(1, (-1, size)).to(torch.int16)
        low, high = groups.amin(dim=-1), groups.amax(dim=-1)
        divisor = groups - low[..., None]
        while divisor.shape[-1] > 1:  # halves, which share the middle of an odd number
            count = divisor.shape[-1]
            divisor = torch.gcd(divisor[..., : (count + 1) // 2], divisor[..., count // 2 :])
        kinds, which = ((low + 128).int() * 65536 + (high + 128).int() * 256 + divisor[..., 0]).unique(
            return_inverse=True
        )
        level = _level_of_kinds(kinds // 65536 - 128, kinds // 256 % 256 - 128, kinds % 256)
        if level is None:
            return None
        levels[start : start + rows] = found = level[which]
        step, shift = (part[..., None] for part in steps_and_shifts(found))
        codes[start : start + rows] = ((groups + shift) // step - 8).flatten(1).to(torch.int8)
    return codes, levels


def _level_of_kinds(low: torch.Tensor, high: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor | None:
    """uint8 [kinds]: a level on which groups of values from `low` to `high`, `divisor` apart, are codes of 4 bits."""
    found = torch.zeros_like(low, dtype=torch.uint8)
    every = torch.arange(256, dtype=torch.uint8)
    every = every[every % 16 > 0]
    for level, step, shift in zip(every.tolist(), *(part.tolist() for part in steps_and_shifts(every)), strict=True):
        fits = (divisor % step == 0) & ((low + shift) % step == 0)
        found[fits & (low + shift >= 0) & (high + shift <= _MOST_CODE * step)] = level
    return found if bool(found.all()) else None


@dataclass
class Quantized:
    """What `quantize_weight` returns.

    Attributes:
        q: int8 [N, K]; of 8-bit floats float8_e4m3fn.
        scale: float32 [N, K / group_size]; 1 for a group of zeros.
        signal, noise: sum of W^2, and of (W - q * scale)^2.
        minimum: float32 like scale, the minimum or zero point of `IntegerWeight`, or its levels; None: none.
    """

    q: torch.Tensor
    scale: torch.Tensor
    signal: float
    noise: float
    minimum: torch.Tensor | None = None


def quantize_weight(
    weight: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    search: bool,
    kernel: Operation = reference.quantize_weight,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    rotation: int = 0,
) -> Quantized:
    """Symmetric integers for a weight [N, K], one scale per row and group of `group_size` along K.

    As the operation `quantize_weight`, which `kernel` computes. `out`: where q and scale may be written.
    `rotation`: the rows are rotated in blocks of so many columns first.

    Raises:
        ValueError: a weight is not finite.
    """
    return Quantized(*kernel(weight, bits, group_size, search, out, rotation))


def quantize_with_feedback(
    weight: torch.Tensor,
    bits: int,
    group_size: int,
    moments: Sequence[torch.Tensor],
    *,
    form: str = "",
    rotation: int = 0,
) -> Quantized:
    """Integers of at most 4 bits, or floats of 8, for a weight [N, K], whose errors are compensated (GPTQ,
    arXiv:2210.17323).

    A column's error is weighted by its mean squared activation where scales and zero points are searched for, and each
    column's rounding error is compensated in the columns after it: from the groups, and within a group the columns,
    whose activations are largest to those whose are smallest, as the last have nothing to compensate theirs. The scales
    of a group are those of its columns as the errors before it have left them.

    Args:
        moments: mean of x x^T for consecutive runs of columns, float32 [B, B] each, together K columns.
        form: "": symmetric; "asymmetric": with zero points, which are the result's minima; "two_levels": with levels,
            which are in that place too; "float8". The second and the third are of 4 bits.
        rotation: the rows are rotated in blocks of so many columns first, as inputs will be.

    Raises:
        ValueError: a weight is not finite.
    """
    # PyTorch's threads would wait for each other after every column: minutes where other programs run.
    with library_defaults(num_threads=1):
        if rotation:
            moments = [rotate(rotate(moment, rotation).t(), rotation) for moment in moments]
        order = _order_of_rounding(moments, group_size)
        moments = [moment[each][:, each] for moment, each in zip(moments, order, strict=True)]
        starts = accumulate((len(each) for each in order), initial=0)
        columns = torch.cat([start + each for start, each in zip(starts, order, strict=False)])
        groups = columns[::group_size] // group_size
        feedback = [(_feedback(moment), moment.diagonal()) for moment in moments]
        dtype = torch.float8_e4m3fn if form == "float8" else torch.int8
        q, parts, signal, noise = torch.empty(weight.shape, dtype=dtype), [], 0.0, 0.0
        step = max(1, _ROUNDED_ELEMENTS // weight.shape[1])
        for start in range(0, len(weight), step):
            part = weight[start : start + step].float()
            if rotation:
                part = rotate(part, rotation)
            largest = largest_of(part.unflatten(1, (-1, group_size)))
            grid = _Grid(form, bits, row_scale(largest)[..., 0] if form == "two_levels" else None)
            rounded = _round_with_feedback(part[:, columns], group_size, grid, feedback)
            codes, scale, zero = (torch.empty_like(values) for values in rounded)
            for values, found, places in zip((codes, scale, zero), rounded, (columns, groups, groups), strict=True):
                values[:, places] = found
            q[start : start + step] = codes.to(dtype)
            parts.append((scale, zero) if grid.row_scale is None else (grid.row_scale, grid.levels(scale, zero)))
            value = (codes.unflatten(1, (-1, group_size)) - zero[..., None]) * scale[..., None]
            signal += float(part.square().sum())
            noise += float((part - value.flatten(1)).square_().sum())
    scale, zero = (torch.cat(each) for each in zip(*parts, strict=True))
    return Quantized(q, scale, signal, noise, None if form in ("", "float8") else zero)


@dataclass
class _Grid:
    """What the values of a group are rounded to: (code - zero) * scale, codes from `least` to `most`.

    Attributes:
        row_scale: of two levels of scales, [R, 1], which scales are multiples of; zero is not whole then.
    """

    form: str
    bits: int
    row_scale: torch.Tensor | None

    def found(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(scale, zero, least, most), each [G, R], of groups x [G * size, R] whose errors count weights [G, size]."""
        high, size = 2 ** (self.bits - 1) - 1, weights.shape[1]
        if self.form == "asymmetric":
            parts = [_asymmetric_columns(*each) for each in zip(x.split(size), weights, strict=True)]
            scale, zero = (torch.stack(part) for part in zip(*parts, strict=True))
            return scale, zero, torch.full_like(scale, -high - 1), torch.full_like(scale, high)
        groups = x.t().reshape(x.shape[1], -1, size)
        if self.form == "float8":
            scale = float8_scale(groups.abs().amax(dim=-1)).t()
            limit = torch.full_like(scale, LARGEST_FLOAT8)
            return scale, torch.zeros_like(scale), -limit, limit
        if self.row_scale is not None:
            step, place = level_of(groups / self.row_scale[..., None], weights)
            zero = shift_of(step, place) / step - 8
            limits = (limit - 8 for limit in code_limits(step, place))
            return tuple(part[..., 0].t() for part in (step * self.row_scale[..., None], zero, *limits))
        scale = quantize_groups(groups.contiguous(), self.bits, CLIP_SHARES, weights)[1].t()
        return scale, torch.zeros_like(scale), torch.full_like(scale, -high - 1), torch.full_like(scale, high)

    def levels(self, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Of scales and zeros [R, G] that `found` gave."""
        if self.row_scale is None:
            raise ValueError("there is one level of scales")
        step = (scale / self.row_scale).round()
        return (step + 16 * place_of(step, ((zero + 8) * step).round())).to(torch.uint8)


def quantize_weight_as(
    weight: torch.Tensor,
    form: str,
    group_size: int,
    *,
    kernel: Operation = reference.quantize_weight_as,
    out: reference.Parts | None = None,
    rotation: int = 0,
    input_squares: torch.Tensor | None = None,
) -> Quantized:
    """A weight in one of the other forms; as the operation `quantize_weight_as`, which `kernel` computes.

    Raises:
        ValueError: a weight is not finite, or too large for the form's scales.
    """
    q, scale, minimum, signal, noise = kernel(weight, form, group_size, out, rotation, input_squares)
    return Quantized(q, scale, signal, noise, minimum)


def guessed_input_squares(column_squares: torch.Tensor) -> torch.Tensor:
    """Mean squares of the inputs of a weight [N, K], where no texts show them: float32 [K], of which the median is 1.

    Columns of small weights are taken to be read by large inputs, as training leaves them: where a channel of the
    inputs is 50 times as large as the others, its weights are as much smaller. So the guess is one over the squares
    that the operation `column_squares` gives, of shares of each row's largest weight: a few rows of large weights say
    little of columns. (SmolLM2-135M's KL divergence in w4a8 is 0.124 by it, 0.194 by squares of the weights as they are
    to the power of 3/4, and 0.245 where nothing is compensated. Gains of the norms before a layer are a worse guess:
    those of Gemma are large where the residual stream is small.)
    """
    squares = column_squares.double()
    middle = squares.median()
    if middle == 0:
        return torch.ones_like(squares, dtype=torch.float32)
    return (middle / squares.clamp_min(_LEAST_SQUARES * middle)).float()


def are_far_apart(input_squares: torch.Tensor, rotation: int) -> bool:
    """Whether those of a block of columns differ so much that it makes most difference to compensate errors."""
    blocks = input_squares.view(-1, rotation)
    return bool((blocks.mean(dim=1) > _FAR_APART * blocks.log().mean(dim=1).exp()).any())


def _order_of_rounding(moments: Sequence[torch.Tensor], group_size: int) -> list[torch.Tensor]:
    """The columns of each run, int64, groups side by side, by falling mean squares of activations; as they are where
    groups reach over the end of a run."""
    if any(len(moment) % group_size for moment in moments):
        return [torch.arange(len(moment)) for moment in moments]
    found = []
    for moment in moments:
        counts = moment.diagonal().view(-1, group_size)
        within = counts.argsort(dim=1, descending=True, stable=True)
        groups = counts.sum(dim=1).argsort(descending=True, stable=True)
        found.append((groups[:, None] * group_size + within[groups]).flatten())
    return found


def _feedback(moment: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of a damped second moment, float32 [B, B]."""
    damped = moment.double()
    mean = damped.diagonal().mean()
    damped.diagonal().add_(_DAMPING * mean if mean > 0 else 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _round_with_feedback(
    part: torch.Tensor,
    group_size: int,
    grid: _Grid,
    feedback: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """part [R, K] -> (codes [R, K], scale and zero [R, G]), all float32.

    `feedback`: of each run of columns the factor that spreads errors, and how much a column's errors count.
    """

    def grid_of(first: int, end: int) -> None:
        """Find the scales and zero points of the groups in columns [first, end), as errors have left them."""
        weights = importance[first:end].view(-1, group_size)
        which = slice(first // group_size, end // group_size)
        for limit, values in zip((scale, zero, least, most), grid.found(x[first:end], weights), strict=True):
            limit[which] = values

    rows, columns = part.shape
    importance = torch.cat([counts for _, counts in feedback])
    x = part.t().contiguous()  # a column's values are side by side
    codes = torch.empty_like(x)
    scale, zero, least, most = x.new_zeros(4, columns // group_size, rows)
    # Groups that reach over the end of a run are searched for before any error.
    is_moving = all(len(factor) % group_size == 0 for factor, _ in feedback)
    if not is_moving:
        grid_of(0, columns)
    whole = zero.round()
    beside = zero - whole
    block, start = group_size if is_moving else _BLOCK, 0
    for factor, _ in feedback:
        width = len(factor)
        for first in range(0, width, block):
            end = min(first + block, width)
            if is_moving:
                grid_of(start + first, start + end)
                whole = zero.round()
                beside = zero - whole
            errors = x.new_empty(end - first, rows)
            for column in range(first, end):
                value, group = x[start + column], (start + column) // group_size
                code = value / scale[group]
                if grid.form == "float8":
                    code = code.clamp_(least[group], most[group]).to(torch.float8_e4m3fn).float()
                else:
                    code = code.add_(beside[group]).round_().add_(whole[group]).clamp_(least[group], most[group])
                codes[start + column] = code
                errors[column - first] = error = (value - (code - zero[group]) * scale[group]) / factor[column, column]
                x[start + column + 1 : start + end].addr_(factor[column, column + 1 : end], error, alpha=-1)
            x[start + end : start + width].addmm_(factor[first:end, end:].t(), errors, alpha=-1)
        start += width
    return codes.t(), scale.t().contiguous(), zero.t().contiguous()


def _asymmetric_columns(x: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One group of many rows, x [size, R]: the scale and zero point [R] of each, errors weighted by importance [size].

    Sums are over columns that lie side by side: a tenth of the time of `asymmetric_groups`.
    """
    counts = importance[:, None]
    weighted = x * counts

    def sums(step: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = (x / step).round_()
        codes = torch.maximum(torch.minimum(codes, _MOST_CODE - zero, out=codes), -zero, out=codes)
        return (codes * weighted).sum(dim=0), codes.square().mul_(counts).sum(dim=0)

    scale, zero = best_scale_and_zero(x.amin(dim=0), x.amax(dim=0), sums)
    return scale, zero - 8


def static_activation(low: float, high: float) -> tuple[float, int]:
    """(scale, offset) of activations seen in [low, high]: scale = (high - low) / 255 over a range that includes 0.

    x ~ (q - offset) * scale with q = round(x / scale) + offset (ModelSlim's asymmetric per-tensor form).
    """
    low, high = min(low, 0.0), max(high, 0.0)
    scale = float(torch.tensor((high - low) / 255.0, dtype=torch.float32)) or 1.0
    return scale, round(-low / scale) - 128


def signal_to_noise(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """10 log10(sum reference^2 / sum (reference - approximation)^2) in decibels; infinite when they are equal."""
    signal = float(reference.double().square().sum())
    return decibels(signal, float((reference.double() - approximation.double()).square().sum()))


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise); infinite without noise."""
    return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf


def far_layers(ratios: Sequence[tuple[str, float]]) -> list[str]:
    """A sentence if weights of some layers are so far from the unquantized ones that answers will change; else [].

    `ratios`: names of layers, and their weights' signal-to-noise in decibels.
    """
    far = [(ratio, name) for name, ratio in ratios if ratio < FAR_DECIBELS]
    if not far:
        return []
    ratio, name = min(far)
    return [
        f"{len(far)} of {len(ratios)} layers keep less than {FAR_DECIBELS:g} dB of their weights ({name} {ratio:.1f}), "
        "so answers will change; give more bits with bits=6 or layers={pattern: scheme}, or calibrate"
    ]
