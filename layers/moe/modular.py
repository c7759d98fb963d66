"""Experts in three parts that can be swapped: tokens are prepared, experts compute, results are brought back.

Owns `FusedMoEModularMethod` and the interfaces of its parts, under vLLM's names. Its parts as they are do what
`UnquantizedFusedMoEMethod` does, with the same bits.
"""

from __future__ import annotations

import torch

from llm.base.custom_op import CustomOp
from llm.kernels.backend import Operations
from llm.layers.moe.method import ExpertLayer, ExpertsMethod


class FusedMoEPrepareAndFinalize:
    """What happens to tokens before and after the experts; as it is, nothing. One that sends them to the ranks that
    hold their experts overrides both.

    Attributes:
        invariant: a token's bits do not depend on the others.
    """

    invariant = True

    def prepare(
        self, layer: ExpertLayer, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, object]:
        """x float32 [N, H], weights float32 and ids int64 [N, K] -> the same of the M rows to compute here, and
        whatever `finalize` needs to know."""
        return x, topk_weights, topk_ids, None

    def finalize(self, layer: ExpertLayer, y: torch.Tensor, state: object) -> torch.Tensor:
        """The experts' sums float32 [M, H] -> [N, H]."""
        return y


class FusedMoEExperts:
    """What computes the rows that were prepared; as it is, the operation `experts`.

    Attributes:
        invariant: a token's bits do not depend on the others.
    """

    invariant = True

    def apply(
        self,
        method: ExpertsMethod,
        ops: Operations,
        layer: ExpertLayer,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """x [M, H], weights and ids [M, K] -> the weighted sum of each row's experts, [M, H]; called by `method`."""
        return method.sum_of_experts(ops, layer, x, topk_weights, topk_ids)


@CustomOp.register("modular_fused_moe")
class FusedMoEModularMethod(ExpertsMethod):
    """The method of a layer of experts, in parts.

    A quantization config returns one from `get_quant_method` for a layer whose `quant_kind` is "moe", or it is set as
    the layer's `quant_method`. The weights are those of the layer's experts, however these are quantized.

    Args:
        prepare_finalize, fused_experts: the parts; None: as they are.
    """

    def __init__(
        self,
        prepare_finalize: FusedMoEPrepareAndFinalize | None = None,
        fused_experts: FusedMoEExperts | None = None,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.prepare_finalize = prepare_finalize or FusedMoEPrepareAndFinalize()
        self.fused_experts = fused_experts or FusedMoEExperts()
        self.invariant = self.invariant and self.prepare_finalize.invariant and self.fused_experts.invariant

    def compute(
        self, ops: Operations, layer: ExpertLayer, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        x, topk_weights, topk_ids, state = self.prepare_finalize.prepare(layer, x, topk_weights, topk_ids)
        y = self.fused_experts.apply(self, ops, layer, x, topk_weights, topk_ids)
        return self.prepare_finalize.finalize(layer, y, state)

    def extra_repr(self) -> str:
        return f"{type(self.prepare_finalize).__name__}, {type(self.fused_experts).__name__}"
