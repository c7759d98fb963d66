"""Packing, the GEMM and the embedding for weights of any kind, quantization of activations, and what adapters
add, in plain PyTorch.

The GEMMs of `kernels/cpu` give the same bits for quantized activations, and agree to rounding for float activations.
`pack` keeps the rows as they are, and puts two int4 values in a byte.

Notation: M rows (tokens), N outputs, K inputs, G groups along K.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from llm.kernels.reference.rotation import rotate
from llm.kernels.weight import LEAST, LoraTerm, LoraTerms, Weight, fused_multiply_add, kind_of

# An integer GEMM runs as float32 GEMMs over this many k at a time: 1024 * 128 * 128 = 2**24, so every partial sum is
# exact in any order. (torch._int_mm saturates on processors whose int8 instructions do.)
_EXACT_K = 1024
# Weights are converted to float32 this many elements at a time, so that the copy stays in the cache.
_WIDEN_ELEMENTS = 1 << 20
_WIDEN_ON_DEVICE = 1 << 26


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row by its largest element.

    scale = max|x| / 127 and q = clamp(round_half_even(x / scale), -128, 127); a row whose scale is 0 has q = 0. A NaN
    or infinity in a row makes its scale NaN or infinite, and then all outputs of the row are NaN.

    Shapes: x float32 [M, K] -> q int8 [M, K], scale float32 [M].
    """
    scale = x.abs().amax(dim=-1) / 127.0 if x.shape[-1] else x.new_zeros(x.shape[0])
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
    return _to_int8(x / divisor[:, None]), scale


def quantize_static(x: torch.Tensor, scale: float, offset: int) -> torch.Tensor:
    """q = clamp(round_half_even(x / scale) + offset, -128, 127) with the float32 value of `scale`; float32 -> int8."""
    return _to_int8(torch.round(x / torch.tensor(scale, dtype=torch.float32)) + offset)


def int_matmul(q: torch.Tensor, weight: Weight, start: int = 0, end: int | None = None) -> torch.Tensor:
    """sum over k in [start, end) of q[m, k] * w[n, k], exact in int32; q int8 [M, K] -> [M, N]."""
    end = weight.k if end is None else end
    out = q.new_zeros(q.shape[0], weight.n, dtype=torch.int32)
    step = rows_at_once(weight.k, q.device)
    for row in range(0, weight.n, step):
        w = weight.integers(row, min(row + step, weight.n))
        for k in range(start, end, _EXACT_K):
            last = min(k + _EXACT_K, end)
            out[:, row : row + step] += (q[:, k:last].float() @ w[:, k:last].float().t()).to(torch.int32)
    return out


def row_sums(weight: Weight) -> torch.Tensor:
    """sum_k w[n, k], int32 [N]."""
    return weight.integers(0, weight.n).sum(dim=1, dtype=torch.int32)


def rows_at_once(columns: int, device: torch.device) -> int:
    """Rows of a weight that are converted to float32 at a time."""
    most = _WIDEN_ELEMENTS if device.type == "cpu" else _WIDEN_ON_DEVICE
    return max(1, most // max(1, columns))


def _to_int8(x: torch.Tensor) -> torch.Tensor:
    return torch.round(x).nan_to_num_(nan=0.0).clamp_(-128, 127).to(torch.int8)


def pack(values: torch.Tensor, kind: str | None = None, reuse: bool = False) -> Weight:
    """float32, bfloat16, float16, float8_e4m3fn, or int8 [N, K] with `kind` "int8" or "int4" -> a weight with these
    values.

    `reuse`: the weight may keep the values' memory.
    """
    kind = kind_of(values, kind)
    data = values.contiguous()
    if kind == "int4":
        odd = values[:, 1::2]
        data = (values[:, 0::2] & 15).contiguous()
        data[:, : odd.shape[1]] |= odd << 4
    return Weight(data, kind, *values.shape)


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """y = x W^T + bias, with x converted as `weight.activations` says.

    "float": x as it is; "bfloat16": x rounded. "int8": with (q, xs) = quantize_per_token(x), of int4 without levels for
    the columns of each group by themselves, each operation rounded and in this order:

    - int8 and, with v in the place of w, int4 with levels:
      y[m, n] = (float(sum_k q[m, k] w[n, k]) * xs[m]) * scale[n] + bias[n]; with q = quantize_static(x)
      y = float(sum_k (q[m, k] - input_offset) w[n, k]) * (input_scale * scale[n]) + bias[n], NaN if x[m] is not finite;
    - int4: y[m, n] = sum_g fma(float(sum_{k in g} q[m, k] w[n, k]) * xs[m, g], scale[n, g], .) + bias[n], groups in
      order; with zero points or minima each is followed by fma(offset[n, g], xs[m, g] * float(sum_{k in g} q[m, k]),
      .), where offset = -zero * scale or 8 * scale - minimum.

    For a rotated weight x is rotated first, and then rounded or quantized. Sums of integers are exact. Shapes: x float
    [..., K] -> [..., N] of its type; integers are rounded from float32.
    """
    if x.shape[-1] != weight.k:
        raise ValueError(f"activations are float32 [..., {weight.k}], got {x.dtype} {list(x.shape)}")
    dtype, bias = x.dtype, None if weight.bias is None else weight.bias.to(x.dtype)
    if weight.activations == "bfloat16":
        if weight.rotation:
            x, weight = rotate(x, weight.rotation), replace(weight, rotation=0)
        x = x.bfloat16().to(dtype)
    if weight.is_float and weight.data.dtype == x.dtype:
        return F.linear(x, weight.unpack(), bias)  # that of another backend is in panels
    if weight.activations == "int8":
        x = x.float()
    if weight.activations == "int8" and weight.columns is not None:
        x = x[..., weight.columns.long()]
    if weight.activations == "int8" and weight.rotation:
        x = rotate(x, weight.rotation)
    whole = _int4 if weight.kind == "int4" and weight.levels is None else _int8
    product = whole if weight.activations == "int8" else _float
    out = product(x.reshape(x.shape[:-1].numel(), weight.k), weight)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], weight.n).to(dtype)


def embedding(token_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Rows of W: ids int64 [...] -> float32 [..., K]; IndexError for an id outside [0, N)."""
    ids = token_ids.flatten()
    if type(weight) is not Weight:  # of another backend, in its layout
        return weight.dequantize()[ids].view(*token_ids.shape, weight.k)
    is_byte = weight.data.dtype.itemsize == 1  # PyTorch looks up no 8-bit floats
    data = F.embedding(ids, weight.data.view(torch.uint8) if is_byte else weight.data).view(weight.data.dtype)
    if weight.is_float:
        return data.float().view(*token_ids.shape, weight.k)
    parts = (weight.scale, weight.zero, weight.minimum, weight.levels)
    scale, zero, minimum, levels = (None if values is None else values[ids] for values in parts)
    picked = replace(weight, data=data, n=len(ids), scale=scale, zero=zero, minimum=minimum, levels=levels, bias=None)
    return picked.dequantize().view(*token_ids.shape, weight.k)


def _float(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.n)
    step = rows_at_once(weight.k, x.device)
    for start in range(0, weight.n, step):
        end = min(start + step, weight.n)
        torch.mm(x, weight.dequantize(start, end).to(x.dtype).t(), out=out[:, start:end])
    return out


def _int8(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    scale = weight.scales[:, 0].float()
    if not weight.input_scale:
        q, xs = quantize_per_token(x)
        return int_matmul(q, weight).float().mul_(xs[:, None]).mul_(scale)
    sums = int_matmul(quantize_static(x, weight.input_scale, weight.input_offset), weight)
    if weight.input_offset:
        sums -= weight.input_offset * row_sums(weight)
    one = 1 + (0 * x).sum(dim=1, keepdim=True)  # NaN of a row that holds an infinity or a NaN
    return sums.float().mul_(one).mul_(torch.tensor(weight.input_scale, dtype=torch.float32) * scale)


def _int4(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    out = x.new_zeros(x.shape[0], weight.n)
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    for group in range(weight.groups):
        part = slice(group * weight.group_size, min((group + 1) * weight.group_size, weight.k))
        q[:, part], xs = quantize_per_token(x[:, part])
        sums, scale = int_matmul(q, weight, part.start, part.stop), weight.scales[:, group].float()
        out = fused_multiply_add(sums.float() * xs[:, None], scale, out)
        offset = _offset(weight, group, scale)
        if offset is not None:
            inputs = xs * q[:, part].sum(dim=1, dtype=torch.int32).float()
            out = fused_multiply_add(inputs[:, None].expand_as(out), offset, out)
    return out


def _offset(weight: Weight, group: int, scale: torch.Tensor) -> torch.Tensor | None:
    """What each value of a group is beside w * scale, float32 [N]; None: nothing."""
    if weight.minimum is not None:
        return scale * LEAST["int4"] - weight.minimum[:, group].float()
    return None if weight.zero is None else 0 - weight.zero[:, group].float() * scale


def lora(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, terms: LoraTerms) -> torch.Tensor:
    """y[t] += scale * up(down(x[t])) for each term and the tokens in its slot; returns y, which is changed.

    The product with `up`, its bias included, is multiplied by the scale, and then added: each is rounded by itself.

    Shapes: y float32 [..., width], x float32 [..., K], slots int64 [tokens], 0: no adapter.
    """
    rows, flat = y.view(-1, terms.width), x.reshape(-1, terms.inputs)
    check_slots(rows, flat, slots)
    for term in terms.terms:
        tokens = tokens_of(slots, term.slot)
        products = linear(linear(flat[tokens], term.down), term.up)
        add_products(rows, slots, term, tokens, products)
    return y


def lora_embedding(y: torch.Tensor, token_ids: torch.Tensor, slots: torch.Tensor, terms: LoraTerms) -> torch.Tensor:
    """The same where down(x) is the row of `down` of each token's id: token_ids int64 [...].

    Raises:
        IndexError: an id that `down` does not have.
    """
    rows, ids = y.view(-1, terms.width), token_ids.flatten()
    check_slots(rows, ids, slots)
    if len(ids) and ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < terms.inputs:
        raise IndexError(f"token ids must be in [0, {terms.inputs}), got {int(ids.min())} to {int(ids.max())}")
    for term in terms.terms:
        tokens = tokens_of(slots, term.slot)
        products = linear(embedding(ids[tokens], term.down), term.up)
        add_products(rows, slots, term, tokens, products)
    return y


def tokens_of(slots: torch.Tensor, slot: int) -> torch.Tensor | slice:
    """Those of a slot; on a device, whose answer the host would have to wait for, all of them."""
    return (slots == slot).nonzero(as_tuple=True)[0] if slots.device.type == "cpu" else slice(None)


def add_products(
    rows: torch.Tensor, slots: torch.Tensor, term: LoraTerm, tokens: torch.Tensor | slice, products: torch.Tensor
) -> None:
    """Add the products of these tokens to those of them that are in the term's slot."""
    added = products * term.scale
    if isinstance(tokens, slice):
        added = torch.where((slots == term.slot)[:, None], added, 0)
    rows[tokens, term.first : term.first + term.up.n] += added.to(rows.dtype)


def check_slots(rows: torch.Tensor, inputs: torch.Tensor, slots: torch.Tensor) -> None:
    if slots.dtype != torch.int64 or slots.dim() != 1 or not len(slots) == len(rows) == len(inputs):
        raise ValueError(f"{len(rows)} results of {len(inputs)} tokens need one slot each, got {list(slots.shape)}")
