"""Quantization of activations to 8-bit floats (e4m3, arXiv:2209.05433), with scales per group of elements."""

from __future__ import annotations

from typing import NamedTuple

import torch

from llm.base.custom_op import CustomOp
from llm.errors import ValidationError

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
# A group of zeros or of tiny values must not divide by zero.
_SMALLEST_SCALE = 1.0 / (FP8_MAX * 512.0)


class GroupShape(NamedTuple):
    """Rows and columns that share a scale; -1: all."""

    row: int
    col: int


PER_TENSOR = GroupShape(-1, -1)
PER_TOKEN = GroupShape(1, -1)
PER_CHANNEL = GroupShape(-1, 1)


@CustomOp.register("quant_fp8")
class QuantFP8(CustomOp):
    """x [M, K] -> (q float8_e4m3fn [M, K], scale float32), x ~ q * scale, q = round(x / scale) within +-448.

    The scale has an entry per group, [M / row, K / col]: [1, 1] per tensor, [M, 1] per token, [1, K] per channel,
    [M, K / g] for groups of g along a row.

    Args:
        static: the scale is given to `forward`; False: it is the largest magnitude of each group over 448.
        group_shape: (rows, columns) that share a scale; `PER_TENSOR`, `PER_TOKEN`, `PER_CHANNEL`, or (1, g).
        num_token_padding: q gets at least this many rows, the added ones zero; None: no more than x has.
        column_major_scales: the scale is stored column by column; its shape and values are the same.
        use_ue8m0: dynamic scales are rounded up to powers of two.
    """

    def __init__(
        self,
        static: bool,
        group_shape: tuple[int, int] = PER_TENSOR,
        num_token_padding: int | None = None,
        column_major_scales: bool = False,
        use_ue8m0: bool = False,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.group_shape = GroupShape(*group_shape)
        if any(size != -1 and size < 1 for size in self.group_shape):
            raise ValidationError(
                f"group_shape={tuple(group_shape)} must be numbers of rows and columns, or -1 for all of them.",
                parameter="group_shape",
                value=group_shape,
            )
        if static and use_ue8m0:
            raise ValidationError(
                "use_ue8m0=True rounds dynamic scales; with static=True the scale is what forward is given.",
                parameter="use_ue8m0",
                value=use_ue8m0,
            )
        self.static = static
        self.num_token_padding = num_token_padding
        self.column_major_scales = column_major_scales
        self.use_ue8m0 = use_ue8m0

    def forward_native(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, scale_ub: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x float [M, K]; `scale`: static only, a scalar or an entry per group; `scale_ub`: dynamic only, scalar float,
        an upper bound on the magnitude that scales are computed from (larger values saturate).

        Raises:
            ValueError: a scale is missing, not wanted or of the wrong shape; groups do not divide x.
        """
        self._check_arguments(x, scale, scale_ub)
        groups = self._groups(x)
        if scale is None:
            scale = self._dynamic_scale(groups, scale_ub)
        else:
            scale = scale.float().reshape(self._scale_shape(groups, scale))
        quantized = (groups / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8).reshape(x.shape)
        return self._padded(quantized), scale.t().contiguous().t() if self.column_major_scales else scale

    def _check_arguments(self, x: torch.Tensor, scale: torch.Tensor | None, scale_ub: torch.Tensor | None) -> None:
        if x.dim() != 2:
            raise ValueError(f"quant_fp8 takes x of two dimensions, got shape {list(x.shape)}.")
        if self.static != (scale is not None):
            raise ValueError(
                "a static quant_fp8 needs a scale." if self.static else "a dynamic quant_fp8 takes no scale."
            )
        if self.static and scale_ub is not None:
            raise ValueError("scale_ub bounds dynamic scales; this quant_fp8 is static.")

    def _groups(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [M / row, row, K / col, col]."""
        sizes = []
        for total, size in zip(x.shape, self.group_shape, strict=True):
            size = max(total, 1) if size == -1 else size
            if total % size:
                raise ValueError(f"groups of {tuple(self.group_shape)} do not divide x of shape {list(x.shape)}.")
            sizes += [total // size, size]
        # Without rows, per tensor and per channel still have scales: of one empty group.
        if not x.shape[0] and self.group_shape.row == -1:
            sizes[:2] = [1, 0]
        return x.float().reshape(sizes)

    def _dynamic_scale(self, groups: torch.Tensor, scale_ub: torch.Tensor | None) -> torch.Tensor:
        if groups.numel():
            largest = groups.abs().amax(dim=(1, 3))
        else:
            largest = groups.new_zeros(groups.shape[0], groups.shape[2])
        if scale_ub is not None:
            largest = torch.minimum(largest, scale_ub.to(largest))
        scale = (largest / FP8_MAX).clamp_(min=_SMALLEST_SCALE)
        return torch.exp2(torch.ceil(torch.log2(scale))) if self.use_ue8m0 else scale

    def _scale_shape(self, groups: torch.Tensor, scale: torch.Tensor) -> tuple[int, int]:
        shape = (groups.shape[0], groups.shape[2])
        if scale.numel() == 1:
            return (1, 1)
        if scale.numel() != shape[0] * shape[1]:
            raise ValueError(f"scale has shape {list(scale.shape)}, the groups need {list(shape)}.")
        return shape

    def _padded(self, quantized: torch.Tensor) -> torch.Tensor:
        missing = (self.num_token_padding or 0) - quantized.shape[0]
        if missing <= 0:
            return quantized
        return torch.cat((quantized, torch.zeros(missing, quantized.shape[1], device=quantized.device).to(FP8)))
