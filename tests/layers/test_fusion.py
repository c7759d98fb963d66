"""Operations that the product after them computes: the same tokens and logprobs, and whoever watches or replaces one of
the two sees what is seen without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from embedded import engine_of, open_llm, run
from kernel_sets import has_kernels, needs_compiler
from tiny_models import TINY_MODELS, make_prompts, tiny_checkpoint
from torch import nn

from llm import LLM, SamplingParams
from llm.base.custom_op import CustomOp
from llm.base.replacement import op_registry_oot
from llm.bench.profile import Profile, profile
from llm.kernels.reference.rows import Rows
from llm.layers.activation import SiluAndMul
from llm.layers.fusion import Fusion, fusions
from llm.layers.linear import RowParallelLinear
from llm.layers.norm import RMSNorm
from llm.models.blocks import GatedMLP
from llm.quantization.schemes.w8a8 import W8A8Dynamic

pytestmark = [needs_compiler, pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")]
PROMPTS = [[5, 300, 301, 17], [9], list(range(100, 141))]
PARAMS = SamplingParams(max_tokens=7, temperature=0, logprobs=3, ignore_eos=True)
CALIBRATION = ["In the beginning God created the heaven and the earth."]


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    """Tokens and logprobs."""
    return [
        (item.token_ids, [[entry.logprob for entry in position.values()] for position in item.logprobs])
        for output in run(llm, prompts, PARAMS)
        for item in output.outputs
    ]


@contextmanager
def nothing_fused() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fusion, "refusal", lambda *_: "a test forbids it")
        yield


def layer_of(llm: LLM) -> Any:
    return engine_of(llm).runner.model.model.layers[0]


def fused(llm: LLM) -> dict[str, str]:
    """What each pair of the first layer is: "act_fn" -> "" when it is fused, else why not."""
    layer = layer_of(llm)
    return {fusion.op: fusion.refusal(block) or "" for block in (layer, layer.mlp) for fusion in fusions(block)}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(quantization="w8a8") as opened:
        yield opened


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with open_llm(quantization="w8a8") as opened, nothing_fused():
        return answers(opened)


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_static", "w4a8", "w8a16", None])
def test_fused_models_answer_as_others(scheme: str | None) -> None:
    """Prompts, decoding steps, and decoding steps that are repeated without Python."""
    calibration = CALIBRATION if scheme == "w8a8_static" else None
    with open_llm(quantization=scheme, calibration=calibration) as one:
        has_tiles = layer_of(one).mlp.down_proj.quant_method.kernel == "cpu kernel amx"
        is_fused = has_tiles if scheme is None else scheme != "w8a16"  # the embedded model's weights are bfloat16
        assert set(fused(one).values()) == {"" if is_fused else "the product reads rows from memory"}
        first = answers(one)
        runner: Any = engine_of(one).runner
        assert answers(one) == first
        assert runner.replay.refusal is None and runner.replay._steps
    with open_llm(quantization=scheme, calibration=calibration) as other, nothing_fused():
        assert answers(other) == first


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "gpt2", "opt"])
def test_families_with_other_norms_and_activations(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, prompts = tiny_checkpoint(name, tmp_path_factory), make_prompts(TINY_MODELS[name])
    options: dict[str, Any] = {"skip_tokenizer_init": True, "quantization": "w8a8", "max_model_len": 60}
    with LLM(folder, **options) as one:
        assert "" in fused(one).values()
        found = answers(one, prompts)
    with LLM(folder, **options) as other, nothing_fused():
        assert answers(other, prompts) == found


def test_a_defect_in_what_a_product_computes_is_seen(monkeypatch: pytest.MonkeyPatch, expected: list[Any]) -> None:
    """The control: an activation of the other half."""
    with open_llm(quantization="w8a8") as one:
        assert answers(one) == expected
    monkeypatch.setattr(SiluAndMul, "kernel_name", "mul_and_silu")
    monkeypatch.setattr(SiluAndMul, "__init__", swapped)
    with open_llm(quantization="w8a8") as other:
        assert answers(other) != expected


def swapped(self: Any) -> None:
    """As SiluAndMul's constructor, the operation alone unchanged."""
    super(SiluAndMul, self).__init__()
    self.kernel = self.kernels.op("silu_and_mul")


def test_explain_says_what_is_fused(llm: LLM) -> None:
    reasons = {part.name: part.reason for part in llm.explain().parts}
    layers = len(engine_of(llm).runner.kv_caches)
    assert reasons["rms_norm"].endswith(f", {2 * layers} fused into gate_up_proj, qkv_proj")
    assert reasons["silu_and_mul"].endswith(", fused into down_proj")
    assert reasons["rotary_embedding"].endswith(", fused into the KV cache's kernel")
    with open_llm(quantization="w8a8", compilation_config={"custom_ops": ["-rms_norm"]}) as other:
        found = [part.reason for part in other.explain().parts if part.name == "rms_norm"]
        assert found == ["disabled by -rms_norm"]


# Who watches or replaces


def pre_hook(layer: Any, seen: list[Any]) -> Any:
    return layer.mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))


def hook_on_the_operation(layer: Any, seen: list[Any]) -> Any:
    return layer.mlp.act_fn.register_forward_hook(lambda _, inputs, output: seen.append(output))


def hook_on_a_block(layer: Any, seen: list[Any]) -> Any:
    return layer.self_attn.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))


def hook_on_everything(layer: Any, seen: list[Any]) -> Any:
    return nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0]) if module is layer.mlp else None
    )


@pytest.mark.parametrize("watch", [pre_hook, hook_on_the_operation, hook_on_a_block, hook_on_everything])
def test_hooks_see_tensors(watch: Callable[..., Any], llm: LLM, expected: list[Any]) -> None:
    seen: list[Any] = []
    handle = watch(layer_of(llm), seen)
    try:
        assert answers(llm) == expected
    finally:
        handle.remove()
    assert seen and all(isinstance(item, torch.Tensor) for item in seen)
    assert not any(fused(llm).values())


class Wrapper(nn.Module):
    """As adapters wrap a layer."""

    def __init__(self, base: Any, seen: list[Any]) -> None:
        super().__init__()
        self.base = base
        self.seen = seen

    def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        self.seen.append(x)
        return self.base(x, *others)


@pytest.mark.parametrize("path", ["mlp.down_proj", "mlp.act_fn", "mlp.gate_up_proj", "mlp", "self_attn"])
def test_wrapped_layers_see_tensors(path: str, expected: list[Any]) -> None:
    seen: list[Any] = []
    with open_llm(quantization="w8a8") as other:
        parent, _, name = path.rpartition(".")
        owner = layer_of(other).get_submodule(parent)
        setattr(owner, name, Wrapper(getattr(owner, name), seen))
        engine_of(other).runner.replay = None  # it holds the modules it began with
        assert answers(other) == expected
    assert seen and all(isinstance(item, torch.Tensor) for item in seen)


@pytest.mark.parametrize(
    "path",
    [
        "mlp.down_proj.forward",
        "mlp.act_fn.forward",
        "mlp.act_fn._forward_method",
        "mlp.down_proj.quant_method.apply",
        "self_attn.forward",
    ],
)
def test_functions_put_in_place_of_methods_see_tensors(path: str, expected: list[Any]) -> None:
    """On one instance."""
    seen: list[Any] = []
    with open_llm(quantization="w8a8") as other:
        owner = layer_of(other)
        *names, last = path.split(".")
        for name in names:
            owner = getattr(owner, name)
        original = getattr(owner, last)
        setattr(owner, last, functools.wraps(original)(lambda *given: (seen.extend(given), original(*given))[1]))
        assert answers(other) == expected
    assert seen and not any(isinstance(item, Rows) for item in seen)


def test_replaced_operations_and_schemes_see_tensors(monkeypatch: pytest.MonkeyPatch, expected: list[Any]) -> None:
    """A plugin's norm and linear layer, an operation that is off, a scheme of the user's own."""
    before = dict(op_registry_oot)
    try:

        @CustomOp.register_oot(name="RMSNorm")
        class Norm(RMSNorm):
            def forward_oot(self, *given: Any) -> Any:
                return self.forward_cpu(*given)

        @RowParallelLinear.register_oot
        class Linear(RowParallelLinear):
            def forward(self, x: torch.Tensor) -> Any:
                assert isinstance(x, torch.Tensor)
                return super().forward(x)

        with open_llm(quantization="w8a8") as other:
            assert set(fused(other)) == {"input_layernorm", "norm_before_mlp", "act_fn"}
            assert all(fused(other).values())
            assert answers(other) == expected
    finally:
        op_registry_oot.clear()
        op_registry_oot.update(before)

    def multiply(self: Any, layer: Any, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(rows, torch.Tensor)
        return self._linear(rows, layer.packed_weight, layer.weight_scale[:, 0], bias)

    monkeypatch.setattr(W8A8Dynamic, "_multiply", multiply)
    with open_llm(quantization="w8a8") as other:
        assert set(fused(other).values()) == {"the product reads rows from memory"}
        assert answers(other) == expected


def test_a_block_of_the_user_s_own_is_not_given_rows(monkeypatch: pytest.MonkeyPatch, expected: list[Any]) -> None:
    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(hidden * 1.0)))

    monkeypatch.setattr(GatedMLP, "forward", forward)
    with open_llm(quantization="w8a8") as other:
        assert answers(other) == expected


def test_a_weight_that_is_replaced_later_counts(llm: LLM) -> None:
    norm = layer_of(llm).input_layernorm
    x = torch.randn(3, norm.hidden_size)
    qkv = layer_of(llm).self_attn.qkv_proj
    kept = norm.weight
    with torch.inference_mode():
        for other in (nn.Parameter(kept * 2, requires_grad=False), nn.Parameter(kept.float() * 3, requires_grad=False)):
            qkv(layer_of(llm).attention_input(x))
            norm.weight = other
            assert torch.equal(qkv(layer_of(llm).attention_input(x)), qkv(norm(x)))
            norm.weight.data = other.data / 2
            assert torch.equal(qkv(layer_of(llm).attention_input(x)), qkv(norm(x)))
    norm.weight = kept


def test_who_comes_later_is_seen(expected: list[Any]) -> None:
    """What was found is looked at again when something is watched, replaced, or put back."""
    with open_llm(quantization="w8a8") as other:
        engine_of(other).runner.replay = None
        assert answers(other) == expected and not any(fused(other).values())
        mlp, seen = layer_of(other).mlp, []
        kept, method = mlp.down_proj, mlp.down_proj.quant_method
        handle = mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        mlp.down_proj = Wrapper(kept, seen)
        assert answers(other) == expected
        handle.remove()
        mlp.down_proj = kept
        kept.quant_method = Method(method, seen)
        assert answers(other) == expected
        kept.quant_method = method
        count = len(seen)
        assert count and all(isinstance(item, torch.Tensor) for item in seen)
        assert answers(other) == expected and len(seen) == count
        with torch.inference_mode():
            assert isinstance(mlp.activated(torch.randn(3, 2 * kept.input_size)), Rows)
            assert isinstance(layer_of(other).mlp_input(torch.randn(3, kept.output_size)), Rows)


class Method:
    """As adapters put a method of their own before a layer's."""

    def __init__(self, base: Any, seen: list[Any]) -> None:
        self.base = base
        self.seen = seen

    def apply(self, layer: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        self.seen.append(x)
        return self.base.apply(layer, x, *others)


def test_what_does_not_fit_is_computed_apart(llm: LLM) -> None:
    """Other types, more dimensions, views: as the operation alone takes them."""
    mlp = layer_of(llm).mlp
    x = torch.randn(3, 2 * mlp.down_proj.input_size)
    with torch.inference_mode():
        assert isinstance(mlp.activated(x), Rows)
        for other in (x.bfloat16(), x[None], torch.cat((x, x), dim=1)[:, : x.shape[1]]):
            assert torch.equal(mlp.activated(other), mlp.act_fn(other))


def test_the_profile_shows_what_is_fused(llm: LLM) -> None:
    def watch() -> Profile:
        return profile(engine_of(llm), lambda: answers(llm))

    rows = {row.name: row for row in watch().rows}
    layers = len(engine_of(llm).runner.kv_caches)
    down = next(row for name, row in rows.items() if name.startswith("silu_and_mul + linear down_proj"))
    assert down.prefill.calls % layers == 0 and down.prefill.work.operations > 0
    assert "silu_and_mul" not in rows and not any(name.startswith("linear down_proj") for name in rows)
    found = watch()
    assert sum(row.seconds for row in found.rows) == pytest.approx(found.seconds, rel=1e-3)
    with nothing_fused():
        apart = {row.name: row for row in watch().rows}
    assert "silu_and_mul" in apart and any(name.startswith("linear down_proj") for name in apart)
