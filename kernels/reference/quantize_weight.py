"""Quantizing float weights in plain PyTorch: to integers with a scale per row and group of columns, and to other forms,
8-bit floats, FP4, NF4 and GGUF's blocks.

`kernels/cpu` gives the same bits. Sums have an order of their own, because the scale of 4 bits depends on them, and
PyTorch's depends on the processor. Scales of GGUF's blocks are what a block can store: float16, or in Q4_K the product
of a float16 and an integer from 0 to 63.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from llm.base.library_settings import library_defaults
from llm.kernels.reference.rotation import rotate

NOT_FINITE = "holds NaN or infinite values and cannot be quantized"
# Scales tried for a group, as fractions of the scale that clips nothing. Clipping the largest weights a little costs
# less than a coarser grid for all others, the more so the larger the group.
CLIP_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
# A weight is quantized this many elements at a time: a CPU's cache holds the temporaries, and a device has few calls.
_INTEGER_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 24
# On a device, where errors are compensated: some thousand launches for each part.
_COMPENSATED_CHUNK = 1 << 26
# Of the order of sums: sums side by side, those added at once, and how many stripes are summed before their sums are.
_STRIPE, _VECTOR, _RUN, _LEVELS = 32, 8, 16, 4


def quantize_weight(
    weight: torch.Tensor,
    bits: int,
    group_size: int,
    search: bool,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    rotation: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """A float weight [N, K] -> (q int8 [N, K], scale float32 [N, K / group_size], sum of W^2, sum of (W - q scale)^2).

    Rounds to nearest with scale = max|w| / (2**(bits - 1) - 1), 1 for a group of zeros. `search` tries several smaller
    scales per group, refits each by least squares to the integers it gives, rounds it to bfloat16, and keeps the scale
    with the least squared error. `out` is written to, and returned, as q and scale. `rotation`: the rows are rotated in
    blocks of so many columns first (`rotation.rotate`), and so is the weight that q and scale stand for.

    Raises:
        ValueError: a weight is not finite.
    """
    rows, columns = weight.shape
    q, scale = out or (
        weight.new_empty(rows, columns, dtype=torch.int8),
        weight.new_empty(rows, columns // group_size, dtype=torch.float32),
    )
    step = max(1, (_INTEGER_CHUNK if weight.device.type == "cpu" else _DEVICE_CHUNK) // max(1, columns))
    signal = noise = 0.0
    for start in range(0, rows, step):
        part = weight[start : start + step].float().contiguous()
        if rotation:
            part = rotate(part, rotation)
        part = part.view(-1, columns // group_size, group_size)
        part_q, part_scale = quantize_groups(part, bits, CLIP_SHARES if search else (1.0,))
        q[start : start + step] = part_q.view(-1, columns)
        scale[start : start + step] = part_scale
        signal += float(part.square().sum())
        noise += float(torch.addcmul(part, part_q.float(), part_scale[..., None], value=-1).square_().sum())
    return q, scale, signal, noise


def quantize_groups(
    x: torch.Tensor, bits: int, shares: tuple[float, ...], importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x float32 [R, G, size] -> (q int8 of the same shape, scale [R, G]). Errors are weighted by `importance`."""
    high = 2 ** (bits - 1) - 1
    largest = largest_of(x)
    full = torch.where(largest == 0, torch.ones_like(largest), largest / high)
    if len(shares) == 1:
        return torch.round(x / full).clamp_(-high, high).to(torch.int8), full[..., 0]
    best_error = torch.full_like(full, torch.inf)
    best_q, best_scale = torch.zeros_like(x), full.clone()
    for share in shares:
        q = torch.round(x / (full * share)).clamp_(-high - 1, high)
        weighted = q if importance is None else q * importance
        norm = ordered_sum(weighted * q)
        # 16 bits: beside 4 bits for each of 32 weights, 32 would be a fifth of all that a token reads.
        scale = torch.where(norm > 0, ordered_sum(weighted * x) / norm, full).bfloat16().float()
        error = torch.addcmul(x, q, scale, value=-1).square_()
        error = ordered_sum(error if importance is None else error * importance)
        better = (error < best_error) & (scale > 0)
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_q = torch.where(better, q, best_q)
    return best_q.to(torch.int8), best_scale[..., 0]


def largest_of(groups: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each group, [..., 1]. Raises ValueError: a value is not finite."""
    largest = groups.abs().amax(dim=-1, keepdim=True)
    if not largest.isfinite().all():
        raise ValueError(NOT_FINITE)
    return largest


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """The sums over the last dimension, which stays with size 1, in one order on every processor.

    That is the order of PyTorch's own sums with vectors of 8: 32 sums side by side, from stripes of 32. Runs of 16
    stripes are summed by themselves, and runs of 16 such sums again. Then the 32 are added as vectors of 8, after the
    vectors that fill no stripe, and at last what fills no vector and the 8, one after the other.
    """
    stripes = x.shape[-1] // _STRIPE
    levels = [x.new_zeros(*x.shape[:-1], _STRIPE) for _ in range(_LEVELS)]
    for count in range(1, stripes + 1):
        levels[0] = levels[0] + x[..., (count - 1) * _STRIPE : count * _STRIPE]
        size = _RUN
        for level in range(1, _LEVELS):
            if count % size:
                break
            levels[level] = levels[level] + levels[level - 1]
            levels[level - 1] = torch.zeros_like(levels[0])
            size *= _RUN
    first, *others = (levels[0] + levels[1] + levels[2] + levels[3]).split(_VECTOR, dim=-1)
    rest = x[..., stripes * _STRIPE :]
    vectors = rest.shape[-1] // _VECTOR
    for vector in [*rest[..., : vectors * _VECTOR].split(_VECTOR, dim=-1), *others]:
        if vector.shape[-1]:
            first = first + vector
    total = torch.zeros_like(first[..., :1])
    for value in [*rest[..., vectors * _VECTOR :].split(1, dim=-1), *first.split(1, dim=-1)]:
        if value.shape[-1]:
            total = total + value
    return total


# --- The forms. ---

# The forms that have C++ kernels, by their numbers there.
FORMS = ("float8", "mxfp4", "nf4", "q8_0", "q4_0", "q4_k", "asymmetric", "two_levels")
# Those with a minimum for each group, and with a zero point in its place.
HAVE_MINIMA, HAVE_ZEROS = ("q4_k",), ("asymmetric",)
# Columns of a group of GGUF's blocks, and of a block of Q4_K: 8 groups, whose scales and minima share a float16 each.
GROUP, SUPER_BLOCK = 32, 256
# NormalFloat4 (QLoRA, arXiv:2305.14314): quantiles of a normal distribution over [-1, 1], 0 among them.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BEYOND = "holds values beyond the range of the blocks' float16 scales"

LARGEST_FLOAT8 = 448.0
_LARGEST_FP4 = 6.0
_LARGEST_EXPONENT = 2
# Of a float32's bits.
_SIGN_BIT, _EXPONENT_BITS, _EXPONENT_STEP, _ONE = -(1 << 31), 0xFF << 23, 1 << 23, 127 << 23
# So that half of a scale is still a byte of MXFP4, and above it nothing is infinite.
_EXPONENTS = (-126, 100)
_MOST_CODE = 15
_MOST_LEVEL = 63
# What the largest code stands for, tried for each group: a little less than the range clips, a little more shifts.
_RANGES = tuple(_MOST_CODE + 0.1 * step for step in range(-10, 11, 2))
# So that scales and minima are within float16's range.
_LARGEST = 65504.0 * _MOST_LEVEL
_NEAR = tuple((first, second) for first in (0, -1, 1) for second in (0, -1, 1))
# Of shares that are squared: sums of 128 rows are below 2^31.
_LARGEST_SHARE = 2047.0
# Columns of the smallest group whose errors are compensated.
_LEAST_GROUP = 8
# A smaller number is no divisor: its inverse, or what it is multiplied by, might be infinite.
_LEAST_DIVISOR = 2.0**-100
# A weight is quantized this many elements at a time: a CPU's cache; on devices each operation is a launch.
_FORM_CHUNK = 1 << 18

# Of asymmetric integers: steps that are tried, as shares of the one that clips nothing, and how far beside the best.
_STEPS, _BESIDE = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75), 0.025

# Of two levels of scales: steps that are tried, beside the whole number above the one that clips nothing, and places,
# beside the one that centres a group; places in a step, and the first one.
_NEAR_STEP, _NEAR_PLACE = (1, 0, -1, -2), (0, -1, 1)
_MOST_STEP, _PLACES, _FIRST_PLACE = 15, 3.2, 16
# Of integers of 8 bits.
_LOWEST, _HIGHEST = -128, 127

# q, scale, and minimum, zero point or levels.
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass
class _Rounded:
    """Of groups [R, G, size]: their codes, their scales and minima (or zero points, or levels) [R, G, 1], the values
    that these stand for. With levels there is one scale for each row, [R, 1, 1]."""

    codes: torch.Tensor
    scale: torch.Tensor
    values: torch.Tensor
    minimum: torch.Tensor | None = None


def quantize_weight_as(
    weight: torch.Tensor,
    form: str,
    group_size: int,
    out: Parts | None = None,
    rotation: int = 0,
    input_squares: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float, float]:
    """A float weight [N, K] -> (q [N, K], scale, minimum, both float32 [N, K / group_size], signal, noise).

    signal: the sum of W^2; noise: of (W - its quantized value)^2. minimum: None but for "q4_k"; of "asymmetric" it is
    the zero point, of "two_levels" the levels of `Weight`, beside a scale [N, 1]. q is float8_e4m3fn for "float8", else
    int8. `out` is written to, and returned, as q, scale and minimum. `rotation`: the rows are rotated in blocks of so
    many columns first (`rotation.rotate`), and so is the weight that the result stands for. `input_squares`, of
    "two_levels" and "asymmetric": float32 [K], mean squares of the inputs before they are rotated, uncorrelated, for
    which errors are compensated; see `_Compensated`.

    - "float8": e4m3, rounded to nearest even; the largest magnitude of a group is 448 times its scale.
    - "mxfp4": codes of e2m1 less 8. Of the two powers of two that the largest magnitude lies between, the one of the
      smaller squared error; the smaller one clips values beyond 6 times it. The scale is half of it: a table of whole
      numbers is looked up faster.
    - "nf4": codes of NormalFloat4 less 8, the nearest in value; the scale is the largest magnitude.
    - "asymmetric": W ~ (q - zero) * scale, q and zero in [-8, 7]: see `asymmetric_groups`.
    - "two_levels": W ~ ((q + 8) * step - shift) * scale with a scale for each row; see `level_of`.
    - "q8_0", "q4_0", "q4_k": see the functions. Groups are of 32, in "q4_k" 8 of them.

    Raises:
        ValueError: a weight is not finite, or too large for the form's scales.
    """
    rows, columns = weight.shape
    q, scale, minimum = out or empty(form, rows, columns, group_size)
    if input_squares is not None:
        check_input_squares(input_squares, columns, group_size, rotation)
    signal = noise = 0.0
    on_device = _DEVICE_CHUNK if input_squares is None else _COMPENSATED_CHUNK
    step = max(1, (_FORM_CHUNK if weight.device.type == "cpu" else on_device) // max(1, columns))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        values = rotate(weight[part], rotation) if rotation else weight[part].float()
        groups = values.unflatten(1, (-1, group_size))
        largest = largest_of(groups)
        if input_squares is None:
            found = _ROUND[form](groups, largest)
        else:
            with library_defaults(num_threads=1):  # threads would wait for each other after every column
                found = _round_with_compensation(form, groups, largest, input_squares.view(-1, rotation))
        q[part], scale[part] = found.codes.to(q.dtype).reshape(-1, columns), found.scale[..., 0]
        if minimum is not None and found.minimum is not None:
            minimum[part] = found.minimum[..., 0]
        signal += float(groups.square().sum())
        noise += float((groups - found.values).square().sum())
    return q, scale, minimum, signal, noise


def empty(form: str, rows: int, columns: int, group_size: int, device: torch.device | None = None) -> Parts:
    """q, scale and minimum of `quantize_weight_as`."""
    dtype = torch.float8_e4m3fn if form == "float8" else torch.int8
    q = torch.empty(rows, columns, dtype=dtype, device=device)
    scale = torch.empty(rows, columns // group_size, device=device)
    if form == "two_levels":
        return q, scale.new_empty(rows, 1), torch.empty_like(scale, dtype=torch.uint8)
    return q, scale, torch.empty_like(scale) if form in HAVE_MINIMA + HAVE_ZEROS else None


def float8_scale(largest: torch.Tensor) -> torch.Tensor:
    """Of groups whose largest magnitudes these are."""
    return torch.where(largest == 0, torch.ones_like(largest), largest / LARGEST_FLOAT8)


def _round_float8(groups: torch.Tensor, largest: torch.Tensor) -> _Rounded:
    scale = float8_scale(largest)
    codes = (groups / scale).clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn)
    return _Rounded(codes, scale, codes.float() * scale)


def _round_mxfp4(groups: torch.Tensor, largest: torch.Tensor) -> _Rounded:
    exponent = (torch.frexp(largest)[1] - 1 - _LARGEST_EXPONENT).clamp_(*_EXPONENTS)
    scales = [torch.ldexp(torch.ones_like(largest), power) for power in (exponent, exponent + 1)]
    tried = [_nearest_fp4(groups / scale) for scale in scales]
    errors = [
        ordered_sum(torch.addcmul(groups, value, scale, value=-1).square_())
        for value, scale in zip(tried, scales, strict=True)
    ]
    first = errors[0] <= errors[1]
    scale, value = (torch.where(first, pair[0], pair[1]) for pair in (scales, tried))
    return _Rounded(_codes_of_fp4(value) - 8, 0.5 * scale, value * scale)


def _nearest_fp4(x: torch.Tensor) -> torch.Tensor:
    """The nearest value of e2m1; halfway the one with the even code; beyond 6 it is 6."""
    x = x.clamp(-_LARGEST_FP4, _LARGEST_FP4).add_(0.0)  # -0 + 0 is 0
    # Neighbours below 2 differ by a half, above it by half of the power of two below them.
    power = (x.view(torch.int32) & _EXPONENT_BITS).clamp_(min=_ONE)
    step = power.sub_(_EXPONENT_STEP).view(torch.float32)
    return (x / step).round_().mul_(step)


def _codes_of_fp4(values: torch.Tensor) -> torch.Tensor:
    """The codes of values of e2m1, int8; that of -0 is 8."""
    bits = values.view(torch.int32)
    # From 1 on a code is the exponent and the first bit of the mantissa; below it there are 0 and a half.
    codes = ((bits & ~_SIGN_BIT) >> 22) - ((_ONE >> 22) - 2)
    codes = torch.where(codes < 2, (values.abs() * 2).to(torch.int32), codes)
    return (codes + 8 * (bits < 0)).to(torch.int8)


def _round_nf4(groups: torch.Tensor, largest: torch.Tensor) -> _Rounded:
    table = torch.tensor(NF4, device=groups.device)
    scale = torch.where(largest == 0, torch.ones_like(largest), largest)
    x = groups / scale
    codes = torch.zeros_like(x, dtype=torch.int8)
    # Comparisons of a part in the L2 cache are faster than `torch.bucketize`.
    for border in ((table[1:] + table[:-1]) / 2).tolist():
        codes += (x > border).view(torch.int8)
    return _Rounded(codes - 8, scale, table[codes.int()] * scale)


def _round_q8_0(groups: torch.Tensor, largest: torch.Tensor) -> _Rounded:
    """Rounds to nearest, halves away from zero."""
    scale = largest / 127
    x = groups * _inverse(scale)
    # As ggml-quants.c and `gguf` round: the magnitude's floor, plus one where twice the rest reaches one.
    magnitude = x.abs()
    floor = magnitude.floor()
    codes = torch.copysign(floor + ((magnitude - floor) * 2).floor(), x)
    return _stored(codes, scale)


def _round_q4_0(groups: torch.Tensor, largest: torch.Tensor) -> _Rounded:
    """The value of the largest magnitude, the first of several, becomes -8."""
    scale = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True)) / -8
    codes = torch.trunc(groups * _inverse(scale) + 8.5).clamp_(0, _MOST_CODE) - 8
    return _stored(codes, scale)


def _stored(codes: torch.Tensor, scale: torch.Tensor) -> _Rounded:
    scale = _half(scale)
    return _Rounded(codes, scale, codes * scale)


def _round_q4_k(groups: torch.Tensor, largest: torch.Tensor) -> _Rounded:
    """Codes from 0 to 15 less 8, and a minimum for each group: W = code * scale - minimum.

    For each group several ranges are tried, and refitted by least squares to the codes that they give. Rounded to
    levels of the block's two float16, the neighbouring levels are tried too; the least squared error wins.
    """
    if (largest > _LARGEST).any():
        raise ValueError(BEYOND)
    x = groups.reshape(-1, SUPER_BLOCK // GROUP, GROUP)
    codes, scale, minimum = _on_levels(x, *_best_lines(x))
    values = codes * scale - minimum
    scale, minimum = (part.view(*groups.shape[:2], 1) for part in (scale, minimum))
    return _Rounded((codes - 8).view_as(groups), scale, values.view_as(groups), minimum)


def _best_lines(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, minimum) [B, 8, 1] of each group, real numbers: x ~ code * scale - minimum, both at least 0."""
    low = x.amin(dim=-1, keepdim=True).clamp_(max=0.0)
    per_span = _inverse(x.amax(dim=-1, keepdim=True).clamp_(min=0.0) - low)
    total = ordered_sum(x)
    best = torch.full_like(low, torch.inf)
    scale, minimum = torch.zeros_like(low), -low
    for most in _RANGES:
        codes = ((x - low) * (most * per_span)).round_().clamp_(0, _MOST_CODE)
        fit_scale, fit_minimum = _fitted(codes, x, total)
        error = ordered_sum((x + fit_minimum - codes * fit_scale).square_())
        better = error < best
        best = torch.where(better, error, best)
        scale, minimum = torch.where(better, fit_scale, scale), torch.where(better, fit_minimum, minimum)
    return scale, minimum


def _fitted(codes: torch.Tensor, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Least squares of x ~ code * scale - minimum; a negative minimum is 0."""
    count = x.shape[-1]
    ones = codes.sum(dim=-1, keepdim=True)
    squares, products = codes.square().sum(dim=-1, keepdim=True), ordered_sum(codes * x)
    determinant = count * squares - ones.square()
    scale = (count * products - ones * total) * _inverse(determinant)
    minimum = (ones * products - squares * total) * _inverse(determinant)
    through_zero = (minimum < 0) | (determinant <= 0)
    scale = torch.where(through_zero, products * _inverse(squares), scale).clamp_(min=0.0)
    return scale, torch.where(through_zero, torch.zeros_like(minimum), minimum)


def _on_levels(
    x: torch.Tensor, step: torch.Tensor, least: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [B, 8, 32], scale and minimum [B, 8, 1]) where both are a level from 0 to 63 of the block's float16."""
    unit, base = (_half(part.amax(dim=1, keepdim=True) / _MOST_LEVEL) for part in (step, least))
    level, floor = ((part * _inverse(whole)).round_() for part, whole in ((step, unit), (least, base)))
    best = torch.full_like(step, torch.inf)
    codes, scale, minimum = torch.zeros_like(x), torch.zeros_like(step), torch.zeros_like(least)
    for up, down in _NEAR:
        tried_scale = (level + up).clamp(0, _MOST_LEVEL) * unit
        tried_minimum = (floor + down).clamp(0, _MOST_LEVEL) * base
        tried = ((x + tried_minimum) * _inverse(tried_scale)).round_().clamp_(0, _MOST_CODE)
        error = ordered_sum((x + tried_minimum - tried * tried_scale).square_())
        better = error < best
        best = torch.where(better, error, best)
        codes, scale = torch.where(better, tried, codes), torch.where(better, tried_scale, scale)
        minimum = torch.where(better, tried_minimum, minimum)
    return codes, scale, minimum


def _round_asymmetric(groups: torch.Tensor, largest: torch.Tensor) -> _Rounded:
    codes, scale, zero = asymmetric_groups(groups)
    return _Rounded(codes, scale, (codes - zero) * scale, zero)


def asymmetric_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [R, G, size] -> (codes of the same shape, scale and zero [R, G, 1]), codes and zero whole, from -8 to 7.

    W ~ (code - zero) * scale. Errors are weighted by |x| and the root of the group's mean square, because large weights
    are multiplied with large inputs.
    """
    # PyTorch rounds square roots of float32 wrongly now and then; by way of float64 they are right.
    importance = x.abs() + (ordered_sum(x.square()) / x.shape[-1]).double().sqrt().float()

    def sums(step: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = _from_zero(x, step, zero)
        weighted = codes * importance
        return ordered_sum(weighted * x), ordered_sum(weighted * codes)

    scale, zero = best_scale_and_zero(x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True), sums)
    return _from_zero(x, scale, zero) + (zero - 8), scale, zero - 8


def best_scale_and_zero(
    low: torch.Tensor,
    high: torch.Tensor,
    sums: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of groups with values from `low` to `high`: (scale, in bfloat16's values, and the whole code of 0, 0 to 15).

    Several steps are tried with the zero point that centres the group's range, then at the best of them the zero points
    beside it, and the steps beside it; each is refitted by least squares to the codes that it gives, and so is at last
    the best scale.

    Args:
        sums: (step, zero) -> the sums over a group of code * x and of code * code, each weighted by how much an error
            of x counts; `code` is x / step, rounded and clamped to -zero .. 15 - zero.
    """
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    full = high / _MOST_CODE - low / _MOST_CODE  # in this order infinite for no range
    full = torch.where(full > 0, full, torch.ones_like(full))
    middle = 0.5 * high + 0.5 * low
    least, best, share = torch.full_like(full, torch.inf), full, torch.ones_like(full)
    zero = _centred(middle, full)

    def tried(step: torch.Tensor, at: torch.Tensor, of: torch.Tensor) -> None:
        nonlocal least, best, zero, share
        products, norm = sums(step, at)
        scale = torch.where(norm > 0, products / norm, step).bfloat16().float()
        error = torch.where(scale > 0, scale * (scale * norm - (products + products)), torch.inf)
        better = error < least
        least, best = torch.where(better, error, least), torch.where(better, scale, best)
        zero, share = torch.where(better, at, zero), torch.where(better, of, share)

    for each in _STEPS:
        step = full * each
        tried(step, _centred(middle, step), torch.full_like(full, each))
    step, at, of = full * share, zero, share
    for beside in (-1.0, 1.0):
        tried(step, (at + beside).clamp(0, _MOST_CODE), of)
    at, of = zero, share
    for beside in (-_BESIDE, _BESIDE):
        tried(full * (of + beside), at, of + beside)
    tried(best, zero, share)
    return best, zero


def _round_two_levels(groups: torch.Tensor, largest: torch.Tensor) -> _Rounded:
    scale = row_scale(largest)
    step, place = level_of(groups / scale)
    codes = codes_on_levels(groups / scale, step, place)
    values = (codes + 8) * step - shift_of(step, place)
    return _Rounded(codes, scale, values * scale, (step + 16 * place).to(torch.uint8))


def check_input_squares(squares: torch.Tensor, columns: int, group_size: int, rotation: int) -> None:
    """ValueError for those that do not fit."""
    if squares.shape != (columns,) or squares.dtype != torch.float32 or not squares.is_contiguous():
        raise ValueError(f"input_squares are float32 {[columns]}, got {squares.dtype} {list(squares.shape)}")
    if rotation == 0 or rotation % group_size or group_size % _LEAST_GROUP:
        raise ValueError(
            f"groups of {group_size} do not divide blocks of {rotation}, in which errors are compensated, or are no "
            f"multiple of {_LEAST_GROUP}"
        )


def _round_with_compensation(
    form: str, groups: torch.Tensor, largest: torch.Tensor, input_squares: torch.Tensor
) -> _Rounded:
    """As without, but what rounding does to a column is made up for in the columns after it in its block, as by GPTQ
    (arXiv:2210.17323). The scales of a group are those of its columns as the errors before it have left them.

    `input_squares`: [blocks, B], of columns that are not correlated before they are rotated.
    """
    rows, _, size = groups.shape
    scale = row_scale(largest) if form == "two_levels" else None
    original = groups.flatten(1) if scale is None else groups.flatten(1) / scale[..., 0]
    # A column's values are side by side: [B, rows, blocks].
    x = original.view(rows, *input_squares.shape).permute(2, 0, 1).contiguous()
    done = _Compensated(form, size, x, torch.empty_like(x), torch.empty_like(x), _shares(1 / input_squares.t()))
    done.round(slice(0, len(x)))
    codes, values = (part.permute(1, 2, 0).reshape_as(groups) for part in (done.codes, done.values))
    # [rows, blocks, groups of a block, 1]
    steps, others = (torch.stack(part, dim=2).reshape(rows, -1, 1) for part in zip(*done.grids, strict=True))
    if scale is None:
        return _Rounded(codes, steps, values, others)
    return _Rounded(codes, scale, values * scale, others.to(torch.uint8))


@dataclass
class _Compensated:
    """Blocks of columns while they are rounded, [B, rows, blocks]: what is left of them, codes and their values.

    Rotated, the inverse of the inputs' moments is H diag(spectrum) H = [[A, C], [C, A]], of which A and C commute.
    Errors e of the first half of the columns, which are compensated within it, are best made up for by taking e C / A
    from the second half; so the moments of the first half are those of A, of the second A - C^2 / A, which are again of
    this form. Their spectra are the means, arithmetic and harmonic, of the halves of the spectrum.

    Attributes:
        shares: of `_shares`.
        grids: scale and zero point of each group, or step and level, [rows, blocks].
    """

    form: str
    group_size: int
    x: torch.Tensor
    codes: torch.Tensor
    values: torch.Tensor
    shares: dict[int, torch.Tensor]
    grids: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    # Of the group that is being rounded: its step, zero point or shift, the step's inverse, the least and largest code.
    _grid: tuple[torch.Tensor, ...] = ()

    def round(self, columns: slice) -> None:
        count = columns.stop - columns.start
        if count == self.group_size:
            self._find_grid(columns)
        if count == 1:
            self._round_column(columns.start)
            return
        half = count // 2
        first, second = slice(columns.start, columns.start + half), slice(columns.start + half, columns.stop)
        error = self.x[first].clone()
        self.round(first)
        self.x[second] -= _spread(error - self.values[first], self.shares[count][columns.start // count])
        self.round(second)

    def _find_grid(self, columns: slice) -> None:
        moved = self.x[columns].permute(1, 2, 0).contiguous()
        if self.form == "asymmetric":
            step, zero = (part[..., 0] for part in asymmetric_groups(moved)[1:])
            other = zero + 8
            self._grid = step, other, _inverse(step), -other, _MOST_CODE - other
            self.grids.append((step, zero))
        else:
            step, place = (part[..., 0] for part in level_of(moved))
            self._grid = step, shift_of(step, place), 1 / step, *code_limits(step, place)
            self.grids.append((step, step + 16 * place))

    def _round_column(self, column: int) -> None:
        step, other, inverse, least, most = self._grid
        x = self.x[column]
        code = _nearest_code(x if self.form == "asymmetric" else x + other, inverse, least, most)
        if self.form == "asymmetric":
            self.codes[column], self.values[column] = code + (other - 8), code * step
        else:
            self.codes[column], self.values[column] = code - 8, code * step - other


def _shares(spectrum: torch.Tensor) -> dict[int, torch.Tensor]:
    """spectrum [B, blocks] -> for each number of columns that are halved, [B / columns, columns / 2, blocks]: what
    errors of the first half are spread by, of each such run of columns."""
    found, runs = {}, spectrum[None]
    while (count := runs.shape[1]) > 1:
        low, high = runs.split(count // 2, dim=1)
        mean = 0.5 * (low + high)
        found[count] = (low - high) / mean / count
        runs = torch.stack((mean, low / mean * high), dim=1).view(-1, count // 2, spectrum.shape[1])
    return found


def _spread(x: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """H diag(shares) H x, H = `hadamard` * sqrt(len(x)): sums in the first half of the rows of x, differences in the
    second, and so on in each half; with shares [len(x), blocks] backwards from the smallest."""

    def turned(x: torch.Tensor, stride: int) -> torch.Tensor:
        pairs = x.view(-1, 2, stride, *x.shape[1:])
        return torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1).view(x.shape)

    strides = [1 << bit for bit in range(len(x).bit_length() - 1)]
    for stride in reversed(strides):
        x = turned(x, stride)
    x = x * shares[:, None]
    for stride in strides:
        x = turned(x, stride)
    return x


def column_squares(weight: torch.Tensor) -> torch.Tensor:
    """The sums of each column's squares over the rows of a weight [N, K], int64 [K], exact in any order.

    What is squared is a row's value as a share of the row's largest magnitude, which counts as 2047, rounded to whole.

    Raises:
        ValueError: a weight is not finite.
    """
    total = torch.zeros(weight.shape[1], dtype=torch.int64, device=weight.device)
    chunk = _FORM_CHUNK if weight.device.type == "cpu" else _DEVICE_CHUNK
    for part in weight.split(max(1, chunk // max(1, weight.shape[1]))):
        largest = largest_of(part.float())
        units = torch.where(largest > _LEAST_DIVISOR, torch.full_like(largest, _LARGEST_SHARE) / largest, 0)
        total += (part.float() * units).round_().square_().sum(dim=0, dtype=torch.float64).long()
    return total


def row_scale(largest: torch.Tensor) -> torch.Tensor:
    """Of rows with two levels of scales, [R, 1, 1], from the largest magnitudes of their groups [R, G, 1]."""
    scale = largest.amax(dim=1, keepdim=True) / _HIGHEST
    return torch.where(scale > _LEAST_DIVISOR, scale, torch.ones_like(scale))


def level_of(x: torch.Tensor, importance: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups x [R, G, size], divided by their rows' scales -> step (1 to 15) and place (0 to 15), whole, [R, G, 1].

    x ~ (code + 8) * step - shift, where `shift_of` the two is whole too and the result an integer of 8 bits. Four steps
    are tried about the one that clips nothing, each with the three places about the one that centres the group's range;
    the least squared error wins, weighted by `importance`, which broadcasts.
    """
    low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    first, middle = ((high - low) * (1 / _MOST_CODE)).ceil(), 0.5 * (high + low)
    least, best, at = torch.full_like(low, torch.inf), torch.ones_like(low), torch.zeros_like(low)
    for near in _NEAR_STEP:
        step = (first + near).clamp_(1, _MOST_STEP)
        centre = ((0.5 * _MOST_CODE - middle * (1 / step)) * _PLACES).round_() - _FIRST_PLACE
        for beside in _NEAR_PLACE:
            place = (centre + beside).clamp_(0, _MOST_CODE)
            moved = x + shift_of(step, place)
            error = (_whole_codes(moved, step, place) * step - moved).square_()
            error = ordered_sum(error if importance is None else error * importance)
            better = error < least
            least = torch.where(better, error, least)
            best, at = torch.where(better, step, best), torch.where(better, place, at)
    return best, at


def shift_of(step: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """What a group's values are moved up by: about 5 to 10 steps, in 16 places."""
    return (step * (place + _FIRST_PLACE) / _PLACES).floor()


def place_of(step: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The first place with this shift."""
    return (shift * _PLACES / step).ceil() - _FIRST_PLACE


def codes_on_levels(x: torch.Tensor, step: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The codes, from -8 to 7, whose values (`level_of`) are nearest to x and have 8 bits."""
    return _whole_codes(x + shift_of(step, place), step, place) - 8


def _whole_codes(moved: torch.Tensor, step: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    least, most = code_limits(step, place)
    return _nearest_code(moved, 1 / step, least, most)


def code_limits(step: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes from 0 to 15 whose values have 8 bits: the least and the largest."""
    shift = shift_of(step, place)
    least = ((shift + _LOWEST) * (1 / step)).ceil().clamp_(min=0)
    return least, ((shift + _HIGHEST) / step).floor().clamp_(max=_MOST_CODE)


def _centred(middle: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """The code of 0, from 0 to 15, where the codes' middle is that of the group's range."""
    return (0.5 * _MOST_CODE - middle * _inverse(step)).round_().clamp_(0, _MOST_CODE)


def _from_zero(x: torch.Tensor, step: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Codes from 0 to 15, less `zero`."""
    return _nearest_code(x, _inverse(step), -zero, _MOST_CODE - zero)


def _nearest_code(x: torch.Tensor, inverse: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """x over a step, whose inverse is given, rounded and cut."""
    return torch.maximum(torch.minimum((x * inverse).round_(), most), least)


def _inverse(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() > _LEAST_DIVISOR, 1 / x, torch.zeros_like(x))


def _half(values: torch.Tensor) -> torch.Tensor:
    """Rounded to float16."""
    rounded = values.half()
    if not rounded.isfinite().all():
        raise ValueError(BEYOND)
    return rounded.float()


_ROUND = {
    "float8": _round_float8,
    "mxfp4": _round_mxfp4,
    "nf4": _round_nf4,
    "q8_0": _round_q8_0,
    "q4_0": _round_q4_0,
    "q4_k": _round_q4_k,
    "asymmetric": _round_asymmetric,
    "two_levels": _round_two_levels,
}
