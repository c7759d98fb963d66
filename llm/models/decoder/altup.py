"""AltUp (alternating updates), which Gemma 3n has around its layers: several streams, of which a layer computes one.

The streams of a token are beside each other: float [N, inputs * H]. Products of streams and coefficients are PyTorch's
products and sums, element by element, so a token's bits are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llm.base.watch import Patchable
from llm.kernels.select import backend_of_construction
from llm.layers.linear import ReplicatedLinear
from llm.layers.moe import GateLinear
from llm.layers.norm import filled
from llm.models.decoder.part import BuildContext, NormConfig

# Of the squares of a projected stream, which is divided by its root.
_LEAST_MEAN = 1e-5


@dataclass(frozen=True)
class AltUpConfig:
    """`inputs` streams, of which layers compute `active`; its correction is scaled where a layer's embedding reads it
    if `scales`."""

    inputs: int
    active: int
    scales: bool
    norm: NormConfig


class AltUp(Patchable):
    """What is before and after one layer."""

    def __init__(self, config: AltUpConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        self.config, self.width = config, context.hidden_size
        count, dtype = config.inputs, context.options.params_dtype
        # Never quantized: they are of a few numbers.
        self.prediction_coefs = GateLinear(
            count, count * count, params_dtype=dtype, prefix=f"{prefix}.prediction_coefs", return_bias=False
        )
        self.correction_coefs = GateLinear(
            count, count, params_dtype=dtype, prefix=f"{prefix}.correction_coefs", return_bias=False
        )
        self.modality_router = GateLinear(
            self.width, count, params_dtype=dtype, prefix=f"{prefix}.modality_router", return_bias=False
        )
        self.router_norm = config.norm.build(self.width, context)
        self.correct_output_scale = filled(self.width, 0.0, dtype) if config.scales else None
        backend = backend_of_construction()
        self._multiply, self._soft_cap = backend.op("multiply"), backend.op("soft_cap")

    def predict(self, streams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each stream plus its own mixture of all of them."""
        count = self.config.inputs
        factors = self.prediction_coefs(self._modalities(streams[self.config.active]))
        found = []
        for index, stream in enumerate(streams):
            own = factors[:, index * count : (index + 1) * count]
            mixed = streams[0] * own[:, :1]
            for other in range(1, count):
                mixed = mixed + streams[other] * own[:, other : other + 1]
            found.append(mixed + stream)
        return found

    def correct(self, predicted: Sequence[torch.Tensor], computed: torch.Tensor) -> list[torch.Tensor]:
        """Each prediction plus a share of what the layer changed in the active one."""
        factors = self.correction_coefs(self._modalities(computed)) + 1.0
        change = computed + predicted[self.config.active] * -1.0
        return [stream + change * factors[:, index : index + 1] for index, stream in enumerate(predicted)]

    def for_embedding(self, corrected: Sequence[torch.Tensor]) -> torch.Tensor:
        """The active stream, as the layer's embedding is added to it."""
        active = corrected[self.config.active]
        scale = self.correct_output_scale
        return active if scale is None else self._multiply(active, scale.float().expand(active.shape))

    def _modalities(self, x: torch.Tensor) -> torch.Tensor:
        """tanh of a few logits, float32 [N, inputs]."""
        return self._soft_cap(self.modality_router(self.router_norm(x) * self.width**-1.0), 1.0)


class Projections(Patchable):
    """The streams that are not the first, each through a matrix of its own and as large as the first."""

    def __init__(self, count: int, context: BuildContext, prefix: str) -> None:
        super().__init__()
        hidden = context.hidden_size
        for index in range(count):
            matrix = ReplicatedLinear(
                hidden, hidden, bias=False, prefix=f"{prefix}.{index}", return_bias=False, **context.common
            )
            self.add_module(str(index), matrix)
        self._rms_norm = backend_of_construction().op("rms_norm")

    def forward(self, streams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """float [N, H] each: the first, then the others in order -> all of them."""
        first = streams[0]
        size = self._inverse(self._inverse(first))
        found = [first]
        for matrix, stream in zip(self.children(), streams[1:], strict=True):
            projected = matrix(stream)
            unit = self._inverse(projected).contiguous().clamp(max=_LEAST_MEAN**-0.5)
            found.append(projected * unit * size)
        return found

    def _inverse(self, x: torch.Tensor) -> torch.Tensor:
        """1 / sqrt(mean(x^2)), float32 [N, 1]: the norm multiplies a column of ones by it too. Of a column, 1 / |x|."""
        ones = torch.cat((x, x.new_ones(len(x), 1)), dim=-1)
        return self._rms_norm(ones, None, 1e-30, x.shape[1])[:, -1:]
