"""The choice of experts of DeepSeek V2 and V3: of the groups that experts lie in, only the best take part."""

from __future__ import annotations

import torch

from llm.base.checks import refuse
from llm.base.custom_op import CustomOp
from llm.kernels.backend import Operations
from llm.layers.kernel_op import KernelOp


@CustomOp.register("grouped_topk")
class GroupedTopk(KernelOp):
    """The experts of each token: logits float32 [N, E] -> (weights float32 [N, K], ids int64 [N, K]).

    A group counts as its best expert; with `e_score_correction_bias` as the sum of its two best, and experts are chosen
    by score plus bias. A weight is the score without it. Of equals the lower index comes first, of groups and experts.

    Args:
        topk: K.
        renormalize: the weights of a token sum to `routed_scaling_factor`.
        num_expert_group, topk_group: experts lie in so many runs, of which the best `topk_group` take part; 0: one.
        scoring_func: "softmax" or "sigmoid" of the logits.
        routed_scaling_factor: on the weights.
        e_score_correction_bias: float32 [E].
    """

    operations = ("select_experts",)

    def __init__(
        self,
        topk: int,
        renormalize: bool,
        num_expert_group: int = 0,
        topk_group: int = 0,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        *,
        e_score_correction_bias: torch.Tensor | None = None,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if scoring_func not in ("softmax", "sigmoid"):
            refuse("scoring_func", scoring_func, "'softmax' or 'sigmoid'")
        self.topk = topk
        self.renormalize = renormalize
        self.num_expert_group = num_expert_group or 1
        self.topk_group = topk_group or 1
        self.scoring_func = scoring_func
        self.routed_scaling_factor = routed_scaling_factor
        # In a list: the parameter is the gate's, and is registered there.
        self._correction = [e_score_correction_bias]

    def compute(self, ops: Operations, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.select_experts(
            logits,
            self.topk,
            self.scoring_func,
            self.renormalize,
            self._correction[0],
            self.num_expert_group,
            self.topk_group,
            self.routed_scaling_factor,
        )

    def extra_repr(self) -> str:
        groups = f"{self.topk_group} of {self.num_expert_group} groups"
        return f"topk={self.topk}, {groups}, {self.scoring_func}, renormalize={self.renormalize}"
