"""Mixtures of experts at world size one: the layer, its routers and its methods, as loops over tokens in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from llm.layers.moe import (
    ExpertsMethod,
    FusedMoE,
    FusedMoEModularMethod,
    GateLinear,
    SparseMixer,
    TopKRouter,
    TransformersFusedMoE,
    UnquantizedFusedMoEMethod,
)
from op_cases.base import Case, Inputs, normal
from op_cases.linear import linear_reference, rows_of

E, K, H, INNER = 5, 3, 22, 13


def logits(rows: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return normal(rows, E, dtype=torch.float32, generator=generator, scale=2.0)


def select_64(router: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token, expert by expert."""
    weights, ids = torch.zeros(len(logits), router.top_k).double(), torch.zeros(len(logits), router.top_k).long()
    for row, line in enumerate(logits.double()):
        scores = line.softmax(-1) if router.scoring_func == "softmax" else line.sigmoid()
        order = sorted(range(len(scores)), key=lambda index, of=scores: (-of[index], index))[: router.top_k]
        total = scores[order].sum() if router.renormalize else 1.0
        weights[row], ids[row] = scores[order] / total * router.routed_scaling_factor, torch.tensor(order)
    return weights, ids


def expert_64(expert: Any, x: torch.Tensor) -> torch.Tensor:
    """transformers' MixtralBlockSparseTop2MLP."""
    gate, up = linear_reference(expert.gate_up_proj, x).chunk(2, dim=-1)
    return linear_reference(expert.down_proj, nn.functional.silu(gate) * up)


def sum_64(layer: FusedMoE, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(len(x), H).double()
    for row in range(len(x)):
        for weight, index in zip(weights[row], ids[row].tolist(), strict=True):
            y[row] += weight * expert_64(layer.experts[index], x[row])
    return y


def layer(dtype: torch.dtype, **more: Any) -> FusedMoE:
    return FusedMoE(E, K, H, INNER, dtype, **more)


def layer_case(**more: Any) -> Case:
    def inputs(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return normal(rows, H, dtype=torch.float32, generator=generator), logits(rows, dtype, generator)

    def reference(op: Any, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        return sum_64(op, x, *select_64(op.router, router_logits))

    return Case(lambda dtype: layer(dtype, **more), inputs, reference, 1e-5, torch.float32)


def router_case(**more: Any) -> Case:
    def inputs(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return (logits(rows, dtype, generator),)

    def reference(op: Any, x: torch.Tensor) -> Any:
        weights, ids = select_64(op, x)

        def same(actual: torch.Tensor) -> None:
            assert torch.equal(actual, ids)

        return weights, same

    def build(dtype: torch.dtype) -> nn.Module:
        return TopKRouter(K, **more)

    return Case(build, inputs, reference, 2e-6, torch.float32)


def mixer_case(jitter: float) -> Case:
    def inputs(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return normal(rows, H, dtype=torch.float32, generator=generator), logits(rows, dtype, generator)

    def reference(op: Any, hidden: torch.Tensor, x: torch.Tensor) -> Any:
        weights, ids = sparsemixer(x, jitter, training=False)

        def same(actual: torch.Tensor) -> None:
            assert torch.equal(actual, ids)

        return weights, same

    return Case(lambda dtype: SparseMixer(jitter), inputs, reference, 2e-6, torch.float32)


def method_case(kind: type[ExpertsMethod]) -> Case:
    """The layer whose experts it computes is an argument, and float32."""

    def inputs(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        owner = layer(torch.float32)
        for parameter in owner.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(rows)]) if rows else None
        x = normal(rows, H, dtype=torch.float32, generator=generator)
        weights = normal(rows, K, dtype=torch.float32, generator=generator)
        return owner, x, weights, torch.empty(0, K, dtype=torch.int64) if ids is None else ids

    def reference(op: Any, owner: FusedMoE, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return sum_64(owner, x, weights, ids)

    return Case(lambda dtype: kind(), inputs, reference, 1e-5, torch.float32)


def given_case() -> Case:
    """Who goes where is given."""

    def inputs(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        ids = torch.rand(rows, E, generator=generator).argsort(dim=-1)[:, :K]
        weights = normal(rows, K, dtype=torch.float32, generator=generator)
        return normal(rows, H, dtype=torch.float32, generator=generator), ids, weights

    def reference(op: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return sum_64(op, x, weights, ids)

    return Case(lambda dtype: TransformersFusedMoE(E, K, H, INNER, dtype), inputs, reference, 1e-5, torch.float32)


MOE: dict[str, list[Case]] = {
    "fused_moe": [layer_case(), layer_case(has_bias=True, renormalize=False, scoring_func="sigmoid")],
    "unquantized_fused_moe": [method_case(UnquantizedFusedMoEMethod)],
    "modular_fused_moe": [method_case(FusedMoEModularMethod)],
    "transformers_fused_moe": [given_case()],
    "topk_router": [router_case(), router_case(renormalize=False, scoring_func="sigmoid", routed_scaling_factor=2.5)],
    "sparse_mixer": [mixer_case(0.01), mixer_case(0.3)],
    "gate_linear": [
        Case(
            lambda dtype: GateLinear(45, 38, True, params_dtype=dtype, return_bias=False),
            rows_of(45),
            linear_reference,
            1e-5,
            torch.float32,
        )
    ],
}
