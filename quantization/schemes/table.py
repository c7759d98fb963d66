"""All schemes with scales in one table: types of weight and activations, supported layers, and checks.

W and A are bits: W8A8 multiplies int8 by int8. The 16 of W8A16 means that activations are not quantized: they are
float32 on a CPU. FP8 says that 8 bits are a float, e4m3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llm.errors import CheckpointError
from llm.quantization.quantizer import IntegerWeight


@dataclass(frozen=True)
class Scheme:
    """How a layer with quantized weights computes.

    Attributes:
        name: as ModelSlim's description files spell it.
        kind: of the weight, "int8", "int4" or "float8" (`llm.kernels.weight.SCALED_KINDS`).
        activations: what the GEMM converts activations to (`llm.kernels.weight.ACTIVATIONS`).
        static: activations have one scale and offset per layer; else one scale per token.
        layers: the kinds of layers it supports.
        checks: requirements on a weight; each raises `CheckpointError`.
    """

    name: str
    kind: str
    activations: str
    checks: tuple[Callable[[Scheme, IntegerWeight], None], ...] = ()
    static: bool = False
    layers: tuple[str, ...] = ("linear",)

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8

    def check(self, weight: IntegerWeight) -> None:
        """Raise `CheckpointError` for a weight that the scheme does not support."""
        if weight.bits > self.bits:
            raise CheckpointError(f"{weight.bits}-bit weights do not fit the {self.name} kernel.")
        for check in self.checks:
            check(self, weight)


def _one_scale_per_row(scheme: Scheme, weight: IntegerWeight) -> None:
    """The int32 sum over all of K is scaled once: no groups along K, no zero points."""
    if weight.groups != 1 or weight.zero is not None or weight.minimum is not None:
        raise CheckpointError(
            f"{scheme.name} computes symmetric weights with one scale per row; this layer has groups of "
            f"{weight.group_size}{' and zero points' if weight.zero is not None else ''}."
        )


def _integers(scheme: Scheme, weight: IntegerWeight) -> None:
    if weight.table is not None:
        raise CheckpointError(f"{scheme.name} computes integers; this layer has values of a table.")
    if weight.groups > 1 and weight.group_size % 8:
        size = weight.group_size
        raise CheckpointError(
            f"{scheme.name} computes groups of a multiple of 8 columns; this layer has groups of {size}."
        )


def _static_input(scheme: Scheme, weight: IntegerWeight) -> None:
    if weight.input_scale is None or not weight.input_scale > 0:
        raise CheckpointError(f"{scheme.name} needs a positive input scale, got {weight.input_scale}.")
    if not -128 <= weight.input_offset <= 127:
        raise CheckpointError(f"{scheme.name} needs an input offset in [-128, 127], got {weight.input_offset}.")


_TABLES = ("linear", "embedding")

SCHEMES = {
    row.name: row
    for row in (
        Scheme("W8A8_DYNAMIC", "int8", "int8", (_one_scale_per_row,), layers=_TABLES),
        # ModelSlim's PDMIX: static on the decode machines of a disaggregated deployment, dynamic elsewhere, as here.
        Scheme("W8A8_MIX", "int8", "int8", (_one_scale_per_row,)),
        Scheme("W8A8", "int8", "int8", (_one_scale_per_row, _static_input), static=True),
        # vllm-ascend does not quantize activations in linear layers; we do, as the name says and as vllm-ascend does in
        # mixture-of-experts layers.
        Scheme("W4A8_DYNAMIC", "int4", "int8", (_integers,)),
        Scheme("W8A16", "int8", "float", layers=_TABLES),
        Scheme("W4A16", "int4", "float"),
        Scheme("W8A16_FP8", "float8", "float", layers=_TABLES),
    )
}
