"""Every scheme as a row: the integers of the weight, what activations become, which layers, and what must hold.

W and A count bits: W8A8 multiplies int8 by int8. The 16 of W8A16 stands for the activations' own type, which is
float32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llm.base.errors import CheckpointError
from llm.quantization.quantizer import IntegerWeight


@dataclass(frozen=True)
class Scheme:
    """How a layer with integer weights computes.

    Attributes:
        name: as ModelSlim's description files spell it.
        kind: of the weight, "int8" or "int4" (`llm.kernels.weight.KINDS`).
        activations: what a GEMM makes of them (`llm.kernels.weight.ACTIVATIONS`).
        static: activations have one scale and offset for the layer; else each token has its own scale.
        layers: kinds of layers it serves.
        checks: what a weight must be like; each raises `CheckpointError`.
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
        """Raises `CheckpointError` for a weight that the scheme does not compute."""
        if weight.bits > self.bits:
            raise CheckpointError(f"{weight.bits}-bit weights do not fit the {self.name} kernel.")
        for check in self.checks:
            check(self, weight)


def _one_scale_per_row(scheme: Scheme, weight: IntegerWeight) -> None:
    """Whole sums are scaled: no groups along K, no zero points."""
    if weight.scale.shape[1] != 1 or weight.zero is not None:
        raise CheckpointError(
            f"{scheme.name} computes symmetric weights with one scale per row; this layer has groups of "
            f"{weight.group_size}{' and zero points' if weight.zero is not None else ''}."
        )


def _symmetric(scheme: Scheme, weight: IntegerWeight) -> None:
    if weight.zero is not None:
        raise CheckpointError("W4A8 computes symmetric weights; this layer has zero points.")


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
        # ModelSlim's PDMIX: static on the decoding machines of a split deployment, dynamic anywhere else, so also here.
        Scheme("W8A8_MIX", "int8", "int8", (_one_scale_per_row,)),
        Scheme("W8A8", "int8", "int8", (_one_scale_per_row, _static_input), static=True),
        # vllm-ascend's linear form leaves the activations in 16 bits; ours quantizes them, as the name says and as its
        # mixture-of-experts form does.
        Scheme("W4A8_DYNAMIC", "int4", "int8", (_symmetric,)),
        Scheme("W8A16", "int8", "float", layers=_TABLES),
        Scheme("W4A16", "int4", "float"),
    )
}
