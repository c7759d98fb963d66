"""Matrix products with integer weights, quantized activations, and the packing of the weights: in plain PyTorch.

Owns the definition of each operation; `kernels/cpu` has the same names and gives the same bits for every integer
product (the float-activation products agree to rounding). Packing here is the plainest there is: the rows as they are,
and int4 with two values in a byte.

Notation: M rows (tokens), N outputs, K inputs, G = K / group_size groups along K.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

# Integer products run as float32 GEMMs over this many k at a time: 1024 * 128 * 128 = 2**24, so every partial sum is
# exact in any order. (torch._int_mm saturates on processors whose int8 instructions do.)
_EXACT_K = 1024
# Rows of a weight are widened this many elements at a time, so that the float32 copy stays in the cache.
_WIDEN_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, k] as the kernels read it.

    Attributes:
        data: the stored bytes.
        kind: "int8", "int4" (half a byte each) or "float" (the type of `data`).
        rounds_input: products read their activations rounded to bfloat16; for a bfloat16 weight.
    """

    data: torch.Tensor
    n: int
    k: int
    kind: str
    rounds_input: bool = field(default=False, kw_only=True)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def unpack(self) -> torch.Tensor:
        """The weight [n, k], bit for bit what was packed: int8 for "int8" and "int4", else the floating type."""
        return self.rows(0, self.n)

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Rows start to end - 1 of `unpack()`."""
        part = self.data[start:end]
        return _split_nibbles(part)[:, : self.k] if self.kind == "int4" else part


def pack_int8(weight: torch.Tensor) -> PackedWeight:
    """int8 [N, K] -> packed."""
    _check_weight(weight, torch.int8)
    return PackedWeight(weight.contiguous(), weight.shape[0], weight.shape[1], "int8")


def pack_int4(weight: torch.Tensor) -> PackedWeight:
    """int8 [N, K] with values in [-8, 7] -> packed, two values in a byte: the low nibble is the even k."""
    _check_weight(weight, torch.int8)
    if weight.numel() and (weight.min() < -8 or weight.max() > 7):
        raise ValueError(f"int4 values lie in [-8, 7], got [{int(weight.min())}, {int(weight.max())}]")
    even, odd = weight[:, 0::2], weight[:, 1::2]
    packed = even & 15
    packed[:, : odd.shape[1]] |= odd << 4
    return PackedWeight(packed.contiguous(), weight.shape[0], weight.shape[1], "int4")


def pack_float(weight: torch.Tensor, reuse: bool = False) -> PackedWeight:
    """float32, bfloat16 or float16 [N, K] -> packed, in its type; `reuse`: the weight's memory may be taken over."""
    if not weight.is_floating_point():
        raise ValueError(f"pack_float takes a floating type, got {weight.dtype}")
    _check_weight(weight, weight.dtype)
    return PackedWeight(weight.contiguous(), weight.shape[0], weight.shape[1], "float")


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row by its largest element.

    scale = max|x| / 127 and q = clamp(round_half_even(x / scale), -128, 127); a row whose scale is 0 has q = 0. A row
    with a NaN or an infinity has a scale that is NaN or infinite, which the product passes on.

    Shapes: x float32 [M, K] -> q int8 [M, K], scale float32 [M].
    """
    scale = x.abs().amax(dim=-1) / 127.0 if x.shape[-1] else x.new_zeros(x.shape[0])
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
    return _to_int8(x / divisor[:, None]), scale


def quantize_static(x: torch.Tensor, scale: float, offset: int) -> torch.Tensor:
    """q = clamp(round_half_even(x / scale) + offset, -128, 127) with the float32 value of `scale`; float32 -> int8."""
    return _to_int8(torch.round(x / torch.tensor(scale, dtype=torch.float32)) + offset)


def linear_w8a8_dynamic(
    x: torch.Tensor, packed: PackedWeight, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y[m, n] = (float(sum_k q[m, k] w[n, k]) * xs[m]) * scale[n] + bias[n], with (q, xs) = quantize_per_token(x).

    Each operation is rounded, in this order. Shapes: x float32 [M, K], packed int8 [N, K], scale float32 [N], bias
    float [N] or None, y float32 [M, N].
    """
    q, xs = quantize_per_token(x)
    out = int_matmul(q, packed).float()
    return _add_bias(out.mul_(xs[:, None]).mul_(scale), bias)


def linear_w8a8_static(
    x: torch.Tensor,
    packed: PackedWeight,
    weight_scale: torch.Tensor,
    input_scale: float,
    input_offset: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = float(sum_k (q[m, k] - offset) w[n, k]) * (input_scale * weight_scale[n]) + bias[n], q = quantize_static(x).

    The sum is exact in int32. Shapes: x float32 [M, K], packed int8 [N, K], weight_scale float32 [N], y float32 [M, N].
    """
    acc = int_matmul(quantize_static(x, input_scale, input_offset), packed)
    if input_offset:
        acc -= input_offset * row_sums(packed)
    factor = torch.tensor(input_scale, dtype=torch.float32) * weight_scale
    return _add_bias(acc.float().mul_(factor), bias)


def linear_w4a8(
    x: torch.Tensor, packed: PackedWeight, scale: torch.Tensor, group_size: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y[m, n] = (sum_g float(sum_{k in g} q[m, k] w[n, k]) * scale[n, g]) * xs[m] + bias[n], (q, xs) = per token.

    Groups are added in order of g, each by one fused multiply-add. Shapes: x float32 [M, K], packed int4 [N, K], scale
    float32 [N, G], y float32 [M, N].
    """
    _check_groups(packed, scale, group_size)
    q, xs = quantize_per_token(x)
    out = torch.zeros(x.shape[0], packed.n)
    for group in range(scale.shape[1]):
        start = group * group_size
        acc = int_matmul(q, packed, start, min(start + group_size, packed.k))
        out = fused_multiply_add(acc.float(), scale[:, group], out)
    return _add_bias(out.mul_(xs[:, None]), bias)


def linear_w8a16(
    x: torch.Tensor,
    packed: PackedWeight,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W^T + bias with W[n, k] = (w[n, k] - zero[n, g]) * scale[n, g], activations as they are.

    Shapes: x float32 [M, K], packed int8 or int4 [N, K], scale float32 [N, G], zero [N, G] of any type or None for 0,
    y float32 [M, N].
    """
    _check_groups(packed, scale, group_size)
    out = x.new_empty(x.shape[0], packed.n)
    step = _rows_at_once(packed.k)
    for start in range(0, packed.n, step):
        end = min(start + step, packed.n)
        zeros = None if zero is None else zero[start:end]
        weight = dequantize(packed.rows(start, end), scale[start:end], zeros, group_size)
        torch.mm(x, weight.t(), out=out[:, start:end])
    return _add_bias(out, bias)


def linear_w4a16(
    x: torch.Tensor,
    packed: PackedWeight,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `linear_w8a16`, with an int4 weight."""
    return linear_w8a16(x, packed, scale, zero, group_size, bias)


def embedding_int8(token_ids: torch.Tensor, packed: PackedWeight, scale: torch.Tensor) -> torch.Tensor:
    """Rows of an int8 table: y[i, h] = float(w[ids[i], h]) * scale[ids[i]].

    Shapes: ids int64 [L], packed int8 [V, H], scale float32 [V], y float32 [L, H].
    """
    return packed.data[token_ids].float().mul_(scale[token_ids][:, None])


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, group_size: int | None = None
) -> torch.Tensor:
    """(w - zero) * scale in float32; weight [N, K], scale and zero [N, G] or [N]."""
    size = group_size or weight.shape[1]
    columns = torch.arange(weight.shape[1]) // size
    scale = scale.reshape(weight.shape[0], -1).float()
    values = weight.float()
    if zero is not None:
        values = values - zero.reshape(weight.shape[0], -1).float()[:, columns]
    return values * (scale if scale.shape[1] == 1 else scale[:, columns])


def int_matmul(q: torch.Tensor, packed: PackedWeight, start: int = 0, end: int | None = None) -> torch.Tensor:
    """sum over k in [start, end) of q[m, k] * w[n, k], exact in int32; q int8 [M, K] -> [M, N]."""
    end = packed.k if end is None else end
    out = torch.zeros(q.shape[0], packed.n, dtype=torch.int32)
    step = _rows_at_once(packed.k)
    for row in range(0, packed.n, step):
        weight = packed.rows(row, min(row + step, packed.n))
        for k in range(start, end, _EXACT_K):
            last = min(k + _EXACT_K, end)
            out[:, row : row + step] += (q[:, k:last].float() @ weight[:, k:last].float().t()).to(torch.int32)
    return out


def row_sums(packed: PackedWeight) -> torch.Tensor:
    """sum_k w[n, k], int32 [N]."""
    return packed.unpack().sum(dim=1, dtype=torch.int32)


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in float32, rounded once.

    The product is exact in float64. The sum is rounded to odd there, which makes the second rounding, to float32, the
    only one that counts (Boldo and Melquiond, 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = (total.view(torch.int64) & 1) == 0
    toward = torch.where(error > 0, torch.inf, -torch.inf)
    odd = torch.nextafter(total, toward)
    return torch.where((error != 0) & even & total.isfinite(), odd, total).float()


def _to_int8(x: torch.Tensor) -> torch.Tensor:
    return torch.round(x).nan_to_num_(nan=0.0).clamp_(-128, 127).to(torch.int8)


def _split_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """int8 [N, B] -> int8 [N, 2B]: low nibble first, sign extended."""
    low = (packed << 4) >> 4
    return torch.stack((low, packed >> 4), dim=-1).flatten(1)


def _rows_at_once(columns: int) -> int:
    return max(1, _WIDEN_ELEMENTS // max(1, columns))


def _add_bias(out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return out if bias is None else out.add_(bias.float())


def _check_weight(weight: torch.Tensor, dtype: torch.dtype) -> None:
    if weight.dim() != 2 or weight.dtype != dtype:
        raise ValueError(f"a weight is {dtype} [N, K], got {weight.dtype} {list(weight.shape)}")


def _check_groups(packed: PackedWeight, scale: torch.Tensor, group_size: int) -> None:
    groups = -(-packed.k // group_size)
    if scale.shape != (packed.n, groups):
        raise ValueError(f"scale has shape {list(scale.shape)}, groups of {group_size} need {[packed.n, groups]}")
