"""The layer of experts: edges of routing, one call or one by one, a token's bits in any batch, routers of plugins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_sets import has_kernels
from pages import normal
from tiny_models import one_thread

from llm.base import custom_op as replacement
from llm.base.construction import constructing_for
from llm.base.custom_op import Binding, CustomOp
from llm.config.compilation import CompilationConfig
from llm.errors import ValidationError
from llm.layers.moe import FusedMoE, GateLinear, TopKRouter
from llm.loading.loader import process_weights
from llm.platforms.cpu import CpuPlatform
from llm.runner.inspection import what_varies

E, K, H, INNER = 6, 3, 40, 24
TOLERANCE = 0.0 if has_kernels() else 1e-5


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(), torch.inference_mode():
        yield


def layer(top_k: int = K, dtype: torch.dtype = torch.float32, ops: tuple[str, ...] = (), **more: Any) -> FusedMoE:
    with constructing_for(CpuPlatform(), CompilationConfig(custom_ops=ops)):
        made = FusedMoE(E, top_k, H, INNER, dtype, **more)
    for index, (name, parameter) in enumerate(made.named_parameters()):
        assert name.split(".")[0] in map(str, range(E))
        parameter.data.copy_(normal(index, *parameter.shape) / parameter.shape[-1] ** 0.5)
    process_weights(made)
    return made


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(torch.allclose(first, second, rtol=0, atol=TOLERANCE, equal_nan=True))


def one_by_one(made: FusedMoE, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Token by token, each of its experts called by itself; their sum in the order of the slots."""
    weights, ids = made.router(logits)
    rows = []
    for row in range(len(x)):
        total = None
        for weight, index in zip(weights[row], ids[row].tolist(), strict=True):
            term = weight * made.experts[index](x[row : row + 1])
            total = term if total is None else total + term
        rows.append(total)
    return torch.cat(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "more", [{}, {"dtype": torch.bfloat16}, {"activation": "gelu_tanh", "has_bias": True}, {"activation": "swigluoai"}]
)
def test_one_call_is_what_the_experts_are_one_by_one(more: dict[str, Any]) -> None:
    made = layer(**more)
    x, logits = normal(1, 17, H), normal(2, 17, E)
    y = made(x, logits)
    assert made.expert_weights() is not None or not has_kernels()
    expected = one_by_one(made, x, logits)
    assert torch.allclose(y, expected, atol=1e-6) if more.get("activation") == "swigluoai" else same(y, expected)
    assert not same(made(x, logits.roll(1, dims=-1)), expected)


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    made, x, logits = layer(), normal(3, 33, H), normal(4, 33, E)
    y = made(x, logits)
    assert all(same(made(x[row : row + 1], logits[row : row + 1])[0], y[row]) for row in range(len(x)))
    order = torch.randperm(len(x))
    assert same(made(x[order], logits[order]), y[order])


def test_edges_of_routing() -> None:
    """Ties, all tokens to one expert and so others without a token, one token, no token."""
    made, x = layer(top_k=1), normal(5, 9, H)
    tied = torch.zeros(9, E)
    assert same(made(x, tied), made.experts[0](x))
    last = tied.index_fill(1, torch.tensor([E - 1]), 1.0)
    assert same(made(x, last), made.experts[E - 1](x))
    assert made(x[:0], tied[:0]).shape == (0, H)


def test_every_expert_for_every_token() -> None:
    made, x, logits = layer(top_k=E), normal(6, 4, H), normal(7, 4, E)
    assert same(made(x, logits), one_by_one(made, x, logits))
    weights, ids = made.router(logits)
    assert ids.sort(dim=-1).values.tolist() == [list(range(E))] * 4
    assert torch.allclose(weights.sum(dim=-1), torch.ones(4))


def test_nan_logits_spoil_their_token_alone() -> None:
    made, x, logits = layer(), normal(8, 5, H), normal(9, 5, E)
    clean = made(x, logits)
    logits[3, 2] = torch.nan
    spoiled = made(x, logits)
    assert spoiled[3].isnan().all()
    others = [0, 1, 2, 4]
    assert same(spoiled[others], clean[others])


def test_modules_apply_still_works() -> None:
    """The method has an `apply` of its own, and is a module."""
    made, seen = layer(), []
    made.apply(lambda module: seen.append(type(module).__name__))
    assert "UnquantizedFusedMoEMethod" in seen and seen.count("Expert") == E


def test_a_hooked_expert_is_called_by_itself() -> None:
    made, x, logits = layer(), normal(10, 12, H), normal(11, 12, E)
    y, seen = made(x, logits), []
    hook = made.experts[2].down_proj.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    assert same(made(x, logits), y)
    assert seen == [int((made.router(logits)[1] == 2).sum())]
    hook.remove()
    assert same(made(x, logits), y) and len(seen) == 1


@pytest.mark.parametrize("more", [{}, {"activation": "relu2_no_mul"}, {"dtype": torch.bfloat16}])
def test_stacked_weights_as_vllm_names_them(more: dict[str, Any]) -> None:
    made = layer(**more)
    first = "up_proj" if "activation" in more else "gate_up_proj"
    assert made.w13_weight.shape == (E, INNER if "activation" in more else 2 * INNER, H)
    assert made.w2_weight.shape == (E, H, INNER)
    made.place_experts([5, 4, 3, 2, 1, 0])
    x = normal(20, 1, H)
    for index in range(E):
        given = getattr(made.experts[index], first)
        torch.testing.assert_close(x @ made.w13_weight[index].t(), given(x), rtol=1e-4, atol=1e-5)
    assert not any(name.startswith("w13") for name, _ in made.named_parameters())
    with pytest.raises(AttributeError, match="no attribute 'w14_weight'"):
        made.w14_weight  # noqa: B018


def test_turned_off_the_layer_computes_the_same() -> None:
    """It is made of other operations: `unquantized_fused_moe` is the one that computes."""
    x, logits = normal(10, 12, H), normal(11, 12, E)
    on, off = layer(), layer(ops=("-fused_moe",))
    assert off.binding == Binding("forward_native", "disabled by -fused_moe", is_off=True)
    assert on.binding == Binding("forward_native", "a layer of other operations")
    assert torch.equal(on(x, logits), off(x, logits))
    assert what_varies(on) == what_varies(off)
    reason = str(what_varies(layer(ops=("-unquantized_fused_moe",))))
    assert "unquantized_fused_moe is disabled" in reason or not has_kernels()
    with constructing_for(CpuPlatform(), CompilationConfig.of({"mode": 3, "custom_ops": ["none"]})):
        assert not FusedMoE(E, K, H, INNER).binding.compiled


@pytest.mark.parametrize("method", ["forward", "forward_oot", "forward_cpu"])
def test_a_plugin_replaces_the_layer_by_any_forward(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(replacement, "op_registry_oot", {})
    theirs = type("Theirs", (FusedMoE,), {method: lambda self, x, logits: -x})
    CustomOp.register_oot(theirs, name="FusedMoE")
    made, x = layer(), normal(10, 2, H)
    assert torch.equal(made(x, normal(11, 2, E)), -x) and made.binding.method == method
    assert "replaced from" in str(what_varies(made))


def test_weights_on_the_input() -> None:
    made, x = layer(top_k=1, apply_router_weight_on_input=True, renormalize=False), normal(12, 5, H)
    logits = normal(13, 5, E)
    weights, ids = made.router(logits)
    expected = torch.cat([made.experts[ids[row, 0]](x[row : row + 1] * weights[row]) for row in range(5)])
    assert same(made(x, logits), expected)
    with pytest.raises(ValidationError, match="top_k must be 1"):
        layer(apply_router_weight_on_input=True)


def test_a_routing_function_of_ones_own() -> None:
    def first_experts(hidden: Any, logits: Any, topk: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.arange(topk).expand(len(hidden), -1)
        return torch.full(ids.shape, 0.5 if renormalize else 1.0), ids

    made, x = layer(custom_routing_function=first_experts, top_k=2), normal(14, 3, H)
    assert same(made(x, normal(15, 3, E)), 0.5 * made.experts[0](x) + 0.5 * made.experts[1](x))
    # Whether its bits depend on the batch nobody knows.
    assert what_varies(made) == "a custom_routing_function chooses experts"
    assert what_varies(layer()) is None or not has_kernels()


def test_the_router_is_a_layer_that_a_plugin_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "op_registry_oot", {})

    @TopKRouter.register_oot
    class LastExperts(TopKRouter):
        def forward_cpu(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ids = torch.arange(E - self.top_k, E).expand(len(logits), -1).contiguous()
            return torch.ones(ids.shape), ids

    class Acme(CpuPlatform):
        plugin = "acme"

    with constructing_for(Acme()):
        made = FusedMoE(E, K, H, INNER)
    assert type(made.router) is LastExperts


def test_the_gate_is_never_quantized_nor_rounded() -> None:
    with constructing_for(CpuPlatform(), may_round=True):
        gate = GateLinear(
            H, E, correction_bias=True, params_dtype=torch.bfloat16, quant_config=Refusing(), return_bias=False
        )
    gate.weight.data.copy_(normal(1, E, H))
    process_weights(gate)
    assert gate.packed_weight is None or gate.packed_weight.activations == "float"
    bias = gate.e_score_correction_bias
    assert bias is not None and bias.dtype == torch.float32
    loader: Any = bias.weight_loader  # type: ignore[attr-defined]
    assert loader(bias, torch.arange(float(E))[None], None) == E and bias.tolist() == list(range(E))
    with pytest.raises(ValueError, match=r"has shape \[1, 7\]"):
        loader(bias, torch.zeros(1, 7), None)


class Refusing:
    """Is never asked."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"top_k": 0}, "top_k must be from 1"),
        ({"top_k": E + 1}, "top_k must be from 1"),
        ({"activation": "tanh"}, "activation must be one of 'silu', "),
        ({"scoring_func": "tanh"}, "scoring_func must be 'softmax' or"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        layer(**wrong)
