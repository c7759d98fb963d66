"""Convolutions over images and video: one GEMM if patches do not overlap, as in patch embeddings."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from llm.base.custom_op import CustomOp
from llm.errors import ValidationError

Sizes = int | tuple[int, ...]


class ConvLayerBase(CustomOp):
    """x float [B, in_channels, *space] -> [B, out_channels, *space'], computed in float32, returned in x's type.

    Arguments are those of torch.nn.Conv2d and Conv3d; `padding_mode` is "zeros". The weight is
    [out_channels, in_channels / groups, *kernel_size]. `enable_linear` is True if kernel and stride are equal and there
    is no padding, dilation or grouping: then each patch is a row of one GEMM.

    Args:
        params_dtype: of weight and bias; None: torch's default.
    """

    num_dim: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | Literal["same", "valid"] = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        params_dtype: torch.dtype | None = None,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if padding_mode != "zeros":
            raise ValidationError(
                f"padding_mode={padding_mode!r} is not supported; use 'zeros'.",
                parameter="padding_mode",
                value=padding_mode,
            )
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if groups < 1 or channels % groups:
                raise ValidationError(
                    f"groups={groups} does not divide {name}={channels}.", parameter="groups", value=groups
                )
        self.kernel_size = self._per_dimension("kernel_size", kernel_size)
        self.stride = self._per_dimension("stride", stride)
        self.dilation = self._per_dimension("dilation", dilation)
        self.padding = padding if isinstance(padding, str) else self._per_dimension("padding", padding)
        self.groups = groups
        pads = self.padding != "valid" and self.padding != (0,) * self.num_dim
        dilates = self.dilation != (1,) * self.num_dim
        self.enable_linear = self.kernel_size == self.stride and groups == 1 and not pads and not dilates
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_channels, dtype=params_dtype), requires_grad=False) if bias else None

    def _per_dimension(self, name: str, value: Sizes) -> tuple[int, ...]:
        values = (value,) * self.num_dim if isinstance(value, int) else tuple(value)
        if len(values) != self.num_dim:
            raise ValidationError(f"{name}={value} must have {self.num_dim} numbers.", parameter=name, value=value)
        return values

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != self.num_dim + 2:
            raise ValueError(f"{self.name} takes x of {self.num_dim + 2} dimensions, got shape {list(x.shape)}.")
        weight = self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        compute = self._multiply if self.enable_linear else self._convolve
        return compute(x.float(), weight, bias).to(x.dtype)

    def extra_repr(self) -> str:
        way = "as a matrix product" if self.enable_linear else f"padding={self.padding}, dilation={self.dilation}"
        return f"weight={list(self.weight.shape)}, stride={self.stride}, {way}"

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Each patch as a row of one GEMM; a remainder at the far edges is in no patch, as in a convolution."""
        counts = [size // kernel for size, kernel in zip(x.shape[2:], self.kernel_size, strict=True)]
        pairs = list(zip(counts, self.kernel_size, strict=True))
        for dim, (count, kernel) in enumerate(pairs, start=2):
            x = x.narrow(dim, 0, count * kernel)
        x = x.reshape(*x.shape[:2], *(size for pair in pairs for size in pair))  # [B, C, n1, k1, n2, k2 ...]
        places = range(2, 2 + 2 * self.num_dim, 2)
        x = x.permute(0, *places, 1, *(place + 1 for place in places))
        rows = x.reshape(x.shape[0], *counts, x.shape[1 + self.num_dim] * math.prod(self.kernel_size))
        return F.linear(rows, weight.flatten(1), bias).movedim(-1, 1)

    def _convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        convolution = F.conv2d if self.num_dim == 2 else F.conv3d
        return convolution(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


@CustomOp.register("conv2d")
class Conv2dLayer(ConvLayerBase):
    """x [B, in_channels, H, W]."""

    num_dim = 2


@CustomOp.register("conv3d")
class Conv3dLayer(ConvLayerBase):
    """x [B, in_channels, T, H, W]."""

    num_dim = 3
