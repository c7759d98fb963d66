"""Choosing experts: the definition and the kernels against a float64 loop; ties, groups, NaN, a row's bits anywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernel_sets import ISAS, kernel_set, needs_compiler
from pages import normal

from llm.kernels.reference.experts import mix_two_experts, select_experts

pytestmark = pytest.mark.usefixtures("one_core")

BACKENDS = ["reference", *(pytest.param(isa, marks=needs_compiler) for isa in ISAS)]


def operation(name: str) -> Any:
    return select_experts if name == "reference" else kernel_set(name).op("select_experts")


def mixer(name: str) -> Any:
    return mix_two_experts if name == "reference" else kernel_set(name).op("mix_two_experts")


def chosen_64(
    line: torch.Tensor, top_k: int, scoring: str, bias: torch.Tensor | None, groups: int, topk_groups: int
) -> tuple[torch.Tensor, list[int]]:
    """The scores of one row in float64, and the ids: DeepSeek's rules, expert by expert."""
    scores = line.double().softmax(-1) if scoring == "softmax" else line.double().sigmoid()
    choice = (scores if bias is None else scores + bias.double()).tolist()
    size = len(choice) // groups
    best = [sum(sorted(choice[g * size : (g + 1) * size])[-(1 if bias is None else 2) :]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda group: (-best[group], group))[:topk_groups]
    allowed = [index for index in range(len(choice)) if index // size in kept]
    return scores, sorted(allowed, key=lambda index: (-choice[index], index))[:top_k]


RULES = [
    (7, 3, {}),
    (7, 7, {"renormalize": False}),
    (1, 1, {"scoring": "sigmoid", "renormalize": False}),
    (16, 4, {"scoring": "sigmoid", "groups": 4, "topk_groups": 2, "scale": 2.5, "bias": True}),
    (24, 5, {"groups": 3, "topk_groups": 2, "renormalize": False, "scale": 16.0}),
    (129, 8, {"bias": True}),
]


@pytest.mark.parametrize(("experts", "top_k", "rule"), RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_chooses_by_the_rules(backend: str, experts: int, top_k: int, rule: dict[str, Any]) -> None:
    rule = dict(rule)
    bias = normal(3, experts) if rule.pop("bias", False) else None
    logits = normal(experts, 9, experts) * 2
    weights, ids = operation(backend)(logits, top_k, bias=bias, **rule)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    for row, line in enumerate(logits):
        scores, expected = chosen_64(
            line, top_k, rule.get("scoring", "softmax"), bias, rule.get("groups", 1), rule.get("topk_groups", 1)
        )
        assert ids[row].tolist() == expected
        total = scores[expected].sum() if rule.get("renormalize", True) else 1.0
        wanted = scores[expected] / total * rule.get("scale", 1.0)
        assert torch.allclose(weights[row].double(), wanted, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equals_the_lower_ids_come_first(backend: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 1.0], [0.0] * 6])
    assert operation(backend)(logits, 4)[1].tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    grouped = operation(backend)(logits, 3, groups=3, topk_groups=2)[1]
    assert grouped.tolist() == [[1, 3, 0], [0, 1, 2]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_row_with_a_nan_spoils_itself_alone(backend: str, scoring: str) -> None:
    logits = normal(1, 5, 9)
    clean = operation(backend)(logits, 3, scoring)
    logits[2, 4] = torch.nan
    weights, ids = operation(backend)(logits, 3, scoring)
    others = [0, 1, 3, 4]
    assert torch.equal(weights[others], clean[0][others]) and torch.equal(ids[others], clean[1][others])
    assert weights[2].isnan().all() and ids[2].tolist() == [0, 1, 2]


@needs_compiler
@pytest.mark.parametrize("isa", ISAS)
def test_a_rows_bits_do_not_depend_on_the_others(isa: str) -> None:
    logits, bias = normal(7, 33, 20), normal(8, 20)
    select = operation(isa)
    weights, ids = select(logits, 6, "sigmoid", bias=bias, groups=4, topk_groups=3)
    for row in range(len(logits)):
        alone = select(logits[row : row + 1], 6, "sigmoid", bias=bias, groups=4, topk_groups=3)
        assert torch.equal(alone[0][0], weights[row]) and torch.equal(alone[1][0], ids[row])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "wrong", [{"top_k": 0}, {"top_k": 7}, {"scoring": "tanh"}, {"groups": 4}, {"groups": 2, "topk_groups": 3}]
)
def test_what_cannot_be_chosen_is_refused(backend: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        operation(backend)(torch.zeros(2, 6), **{"top_k": 2, **wrong})
    with pytest.raises(ValueError, match="one bias per expert"):
        operation(backend)(torch.zeros(2, 6), 2, bias=torch.zeros(5))


def mixed_64(line: torch.Tensor, jitter: float) -> tuple[list[float], list[int]]:
    """One row, in float64, expert by expert."""
    left, weights, ids = list(range(len(line))), [], []
    for _ in range(2):
        best = max(left, key=lambda index: (float(line[index]), -index))
        top = float(line[best])
        near = [i for i in left if top - float(line[i]) <= 2 * jitter * max(abs(float(line[i])), top)]
        weights.append(1.0 / sum(math.exp(float(line[i]) - top) for i in near))
        ids.append(best)
        left.remove(best)
    return weights, ids


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("experts", "jitter"), [(2, 0.3), (7, 0.01), (17, 0.3), (33, 2.0)])
def test_two_experts_are_mixed_by_the_rules(backend: str, experts: int, jitter: float) -> None:
    """Below zero too, where the magnitude is that of the farther one; two ties, and a row of zeros."""
    logits = normal(experts, 9, experts)
    logits[1] -= 5.0
    logits[2, :2] = 9.0
    logits[3] = 0.0
    weights, ids = mixer(backend)(logits, jitter)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    for row, line in enumerate(logits):
        expected = mixed_64(line, jitter)
        assert ids[row].tolist() == expected[1]
        assert torch.allclose(weights[row].double(), torch.tensor(expected[0]).double(), rtol=2e-6)
    other = mixed_64(logits[0], 5.0)[0]
    assert experts == 2 or jitter == 2.0 or not torch.allclose(weights[0].double(), torch.tensor(other).double())
    alone = [mixer(backend)(logits[row : row + 1], jitter) for row in range(len(logits))]
    if backend != "reference":
        assert torch.equal(torch.cat([weights for weights, _ in alone]), weights)
    with pytest.raises(ValueError, match="two of 1 experts"):
        mixer(backend)(logits[:, :1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_in_a_mixed_row_spoils_it_alone(backend: str) -> None:
    logits = normal(1, 4, 9)
    clean = mixer(backend)(logits, 0.3)
    logits[2, 4] = torch.nan
    weights, ids = mixer(backend)(logits, 0.3)
    assert weights[2].isnan().all() and ids[2].tolist() == [0, 1]
    others = [0, 1, 3]
    assert torch.equal(weights[others], clean[0][others]) and torch.equal(ids[others], clean[1][others])
