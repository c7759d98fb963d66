"""The choice of experts in groups, against transformers' routers of DeepSeek V2 and V3."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from llm.layers.moe import GroupedTopk
from op_cases.base import Case, Inputs, normal

EXPERTS, K, GROUPS, BEST, SCALE = 12, 4, 4, 2, 2.5
NUMBERS: dict[str, Any] = {
    **{"hidden_size": EXPERTS, "num_attention_heads": 1, "n_routed_experts": EXPERTS, "num_experts_per_tok": K},
    **{"n_group": GROUPS, "topk_group": BEST, "routed_scaling_factor": SCALE},
}
BIAS = torch.linspace(-0.3, 0.4, EXPERTS)[torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(0))]


def logits(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    return (normal(rows, EXPERTS, dtype=torch.float32, generator=generator, scale=2.0),)


def case(router: Any, bias: torch.Tensor | None, scoring: str, renormalize: bool) -> Case:
    """transformers' router has the identity for its weight: hidden states are logits."""
    router.weight.data = torch.eye(EXPERTS)

    def build(dtype: torch.dtype) -> nn.Module:
        return GroupedTopk(K, renormalize, GROUPS, BEST, scoring, SCALE, e_score_correction_bias=bias)

    def reference(op: Any, x: torch.Tensor) -> Any:
        _, weights, ids = router(x.float())
        # transformers' are in no order, ours by falling score of choice.
        scores = x.softmax(-1) if scoring == "softmax" else x.sigmoid() + BIAS
        order = scores.gather(1, ids).argsort(dim=-1, descending=True)

        def same(actual: torch.Tensor) -> None:
            assert torch.equal(actual, ids.gather(1, order))

        return weights.gather(1, order).double(), same

    return Case(build, logits, reference, 2e-6, torch.float32)


def third_version() -> nn.Module:
    router = DeepseekV3TopkRouter(DeepseekV3Config(**NUMBERS))
    router.e_score_correction_bias.copy_(BIAS)
    return router


GROUPED: dict[str, list[Case]] = {
    "grouped_topk": [
        case(
            DeepseekV2TopkRouter(DeepseekV2Config(**NUMBERS, topk_method="group_limited_greedy")),
            None,
            "softmax",
            False,
        ),
        case(third_version(), BIAS, "sigmoid", True),
    ]
}
