"""Parts of the layer of experts that others bring: its method in parts, places of experts, transformers' blocks,
methods of quantization plugins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import engine_of, open_llm
from kernel_sets import has_kernels
from pages import normal
from tiny_models import TINY_MODELS, config_of, one_thread, randomise, tiny_checkpoint
from torch import nn

from llm import SamplingParams
from llm.base.construction import constructing_for
from llm.errors import UnsupportedModelError, ValidationError
from llm.layers.moe import (
    FusedMoE,
    FusedMoEExperts,
    FusedMoEModularMethod,
    FusedMoEPrepareAndFinalize,
    TransformersFusedMoE,
)
from llm.loading.loader import process_weights
from llm.platforms.cpu import CpuPlatform
from llm.quantization import registry
from llm.quantization.base import FusedMoEMethodBase, QuantizationConfig
from llm.quantization.registry import register_quantization_config
from llm.quantization.unquantized import new_parameter
from llm.runner.inspection import what_varies

E, K, H, INNER = 6, 3, 40, 24
TOLERANCE = 0.0 if has_kernels() else 1e-5
PROMPTS: Any = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10]}, {"prompt_token_ids": [200, 3]}]
PARAMS = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(), torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("mixtral", tmp_path_factory)


def layer() -> FusedMoE:
    with constructing_for(CpuPlatform()):
        made = FusedMoE(E, K, H, INNER, torch.float32)
    for index, parameter in enumerate(made.parameters()):
        parameter.data.copy_(normal(index, *parameter.shape) / parameter.shape[-1] ** 0.5)
    process_weights(made)
    return made


@pytest.mark.parametrize("unknown", [{"renormalise": False}, {"quant_confg": 5}, {"enable_eplb_": True}])
def test_an_unknown_keyword_is_refused(unknown: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(unknown))):
        FusedMoE(E, K, H, INNER, **unknown)


def test_documented_keywords_are_used_or_refused() -> None:
    FusedMoE(E, K, H, INNER, enable_eplb=False, router_logits_dtype=torch.float32)
    for more in ({"enable_eplb": True}, {"router_logits_dtype": torch.bfloat16}):
        with pytest.raises(ValidationError) as error:
            FusedMoE(E, K, H, INNER, **more)
        assert error.value.parameter == next(iter(more))
    router: Any = FusedMoE(E, K, H, INNER, None, True, False, True, 3, 1).router
    assert (router.renormalize, router.num_expert_group, router.topk_group) == (False, 3, 1)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(torch.allclose(first, second, rtol=0, atol=TOLERANCE))


def answers(llm: Any) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


class ByFirstExpert(FusedMoEPrepareAndFinalize):
    """Tokens in the order of their first expert, and a copy of the last one, as if it came from another rank."""

    undoes = True

    def prepare(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any) -> Any:
        order = topk_ids[:, 0].argsort()
        order = torch.cat((order, order[-1:]))
        return x[order], topk_weights[order], topk_ids[order], order[:-1].argsort()

    def finalize(self, layer: Any, y: torch.Tensor, state: Any) -> torch.Tensor:
        return y[state] if self.undoes else y[:-1]


class OneByOne(FusedMoEExperts):
    invariant = False

    def apply(self, method: Any, ops: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any) -> torch.Tensor:
        rows = []
        for row, ids in enumerate(topk_ids.tolist()):
            terms = [topk_weights[row, slot] * layer.experts[index](x[row : row + 1]) for slot, index in enumerate(ids)]
            rows.append(terms[0] + terms[1] + terms[2])
        return torch.cat(rows)


def test_the_parts_of_the_modular_method_are_swapped() -> None:
    made, x, logits = layer(), normal(1, 17, H), normal(2, 17, E)
    y = made(x, logits)
    with constructing_for(CpuPlatform()):
        parts = [(None, None), (ByFirstExpert(), None), (None, OneByOne())]
        methods = [FusedMoEModularMethod(*pair) for pair in parts]
    for method in methods:
        made.quant_method = method
        assert same(made(x, logits), y)
    assert [method.invariant for method in methods] == [has_kernels(), has_kernels(), False]
    assert what_varies(made) == "FusedMoEModularMethod has no invariant kernel" or not has_kernels()
    made.quant_method = methods[1]
    methods[1].prepare_finalize.undoes = False  # type: ignore[attr-defined]
    assert not same(made(x, logits), y)
    assert "ByFirstExpert, FusedMoEExperts" in str(made)


def test_a_script_swaps_the_method_of_a_running_model(folder: Path) -> None:
    """What `apply_model` makes is bound as the model's own layers are."""

    def swap(model: Any) -> list[FusedMoEModularMethod]:
        methods = []
        for module in model.modules():
            if isinstance(module, FusedMoE):
                module.quant_method = FusedMoEModularMethod(ByFirstExpert())
                methods.append(module.quant_method)
        return methods

    with open_llm(folder, skip_tokenizer_init=True) as llm:
        expected = answers(llm)
        [methods] = llm.apply_model(swap)
        assert methods and {method.binding.method == "forward_cpu" for method in methods} == {has_kernels()}
        assert answers(llm) == expected or not has_kernels()
        methods[0].prepare_finalize.undoes = False  # type: ignore[attr-defined]
        assert answers(llm) != expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_definition_computes_with_packed_weights(folder: Path, dtype: str) -> None:
    """vLLM's `custom_ops` "none": the loop over experts reads weights that the kernels' backend packed."""
    found = []
    for ops in ("all", "none"):
        more: Any = {"compilation_config": {"custom_ops": [ops]}, "dtype": dtype}
        with open_llm(folder, skip_tokenizer_init=True, **more) as llm:
            method = next(module for module in engine_of(llm).runner.model.modules() if isinstance(module, FusedMoE))
            assert (method.quant_method.binding.method == "forward_native") == (ops == "none" or not has_kernels())
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            found.append([output.outputs[0].logprobs[0] for output in outputs])
    for kernels, definition in zip(*found, strict=True):
        assert kernels.keys() == definition.keys()
        assert all(abs(kernels[token].logprob - definition[token].logprob) < 1e-3 for token in kernels)


def test_permuted_experts_give_the_same_bits() -> None:
    made, x, logits = layer(), normal(3, 19, H), normal(4, 19, E)
    y, first = made(x, logits), made.experts[0]
    made.place_experts([3, 0, 5, 1, 4, 2])
    assert made.placed_experts[3] is first is made.experts[0]
    assert same(made(x, logits), y)
    hook = first.register_forward_hook(lambda *_: None)  # one by one
    assert same(made(x, logits), y)
    hook.remove()
    made._map.clear()  # ids that nobody translates
    assert not same(made(x, logits), y)
    made.place_experts(None)
    assert same(made(x, logits), y)
    for wrong in ([0, 1], [0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6]):
        with pytest.raises(ValidationError, match="logical_to_physical_map must be a permutation of 0 to 5"):
            made.place_experts(wrong)


def test_a_balancer_moves_experts_between_calls(folder: Path) -> None:
    """Loads are of the experts as the router numbers them, wherever they lie. Steps are recorded as before."""
    with open_llm(folder, skip_tokenizer_init=True, enable_prefix_caching=False) as llm:
        runner = engine_of(llm).runner
        layers = [module for module in runner.model.modules() if isinstance(module, FusedMoE)]
        before, loads = answers(llm), []
        for places in (None, [6, 5, 4, 3, 2, 1, 0]):
            for moved in layers:
                moved.place_experts(places)
            if has_kernels():
                runner.recorded._steps.clear()  # the recorded ones would be replayed
            assert answers(llm) == before or not has_kernels()
            assert not has_kernels() or runner.recorded._steps
            runner.start_counting_experts()
            assert answers(llm) == before or not has_kernels()
            loads.append(runner.stop_counting_experts())
        for moved in layers:
            moved.place_experts(None)
        assert answers(llm) == before or not has_kernels()  # with steps that were recorded in the other order
        assert loads[0] == loads[1] and all(tokens != tokens[::-1] for tokens in loads[0].values())


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "granitemoe"])
def test_a_block_of_transformers_computes_with_it(name: str) -> None:
    """Concatenated, or transposed and interleaved with biases and a clamp of its own."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(
        config_of(TINY_MODELS[name]), dtype=torch.float32, experts_implementation="eager"
    ).eval()
    randomise(model, 0)
    ids = torch.arange(3, 40)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    blocks = [module for module in model.modules() if hasattr(module, "experts")]
    assert len(blocks) == 2
    for block in blocks:
        with constructing_for(CpuPlatform()):
            ours = TransformersFusedMoE.of(block.experts, 3)
        ours.load_experts(block.experts)
        process_weights(ours)
        block.experts = ours
    found = model(input_ids=ids, use_cache=False).logits
    assert (found - expected).abs().max() < 1e-4
    for expert in blocks[1].experts.experts[1:]:
        expert.gate_up_proj.weight.zero_()
    assert (model(input_ids=ids, use_cache=False).logits - expected).abs().max() > 1e-2


def test_blocks_that_compute_otherwise_are_refused() -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(config_of(TINY_MODELS["mixtral"]))
    experts = model.model.layers[0].mlp.experts
    experts.config.hidden_act = "tanh"
    with pytest.raises(UnsupportedModelError, match=r"MixtralExperts of transformers has the activation 'tanh'; comp"):
        TransformersFusedMoE.of(experts, 2)
    experts.has_gate = False
    with pytest.raises(UnsupportedModelError, match="has no gate"):
        TransformersFusedMoE.of(experts, 2)


class StackedInt8(FusedMoEMethodBase):
    """A plugin's: stacked weights, rounded to int8 with one scale for each expert."""

    scheme = "STACKED_INT8"
    invariant = True

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Any,
    ) -> None:
        shapes = {"w13": (2 * intermediate_size_per_partition, hidden_size)}
        shapes["w2"] = (hidden_size, intermediate_size_per_partition)
        for name, shape in shapes.items():
            data = torch.empty(num_experts, *shape, dtype=params_dtype)
            setattr(layer, f"{name}_weight", new_parameter(data, weight_loader))

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in ("w13", "w2"):
            weight = getattr(layer, f"{name}_weight").float()
            scale = weight.abs().amax(dim=(1, 2), keepdim=True) / 127
            rounded = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
            setattr(layer, f"{name}_weight", rounded)
            setattr(layer, f"{name}_scale", nn.Parameter(scale, requires_grad=False))

    def apply(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any) -> torch.Tensor:
        w13, w2 = layer.w13_weight * layer.w13_scale, layer.w2_weight * layer.w2_scale
        y = torch.zeros_like(x)
        for row, ids in enumerate(topk_ids.tolist()):
            for slot, index in enumerate(ids):
                gate, up = (w13[index] @ x[row]).chunk(2)
                y[row] += topk_weights[row, slot] * (w2[index] @ (nn.functional.silu(gate) * up))
        return y


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_plugin_configs", {})

    @register_quantization_config("stacked_int8")
    class StackedConfig(QuantizationConfig):
        def get_name(self) -> str:
            return "stacked_int8"

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            return StackedInt8() if layer.quant_kind == "moe" else None

    @register_quantization_config("in_parts")
    class PartsConfig(StackedConfig):
        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            return FusedMoEModularMethod() if layer.quant_kind == "moe" else None


@pytest.mark.usefixtures("plugin")
def test_a_plugins_method_holds_the_experts_itself(folder: Path) -> None:
    """Filled from a checkpoint with a tensor per expert; near what the float experts compute."""
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        plain: Any = engine_of(llm).runner.model.model.layers[0].mlp.experts
        x, logits = normal(1, 5, plain.hidden_size), normal(2, 5, plain.num_experts)
        wanted, nbytes = plain(x, logits), sum(report.bytes_after for report in engine_of(llm).runner.layer_reports())
    with open_llm(folder, quantization="stacked_int8", skip_tokenizer_init=True) as llm:
        layer: Any = engine_of(llm).runner.model.model.layers[0].mlp.experts
        assert not layer.experts and layer.w13_weight.dtype == torch.int8
        assert (layer(x, logits) - wanted).abs().max() < 0.03 * wanted.abs().max()
        assert (layer(x, logits.roll(1, dims=1)) - wanted).abs().max() > 0.3 * wanted.abs().max()
        reports = [report for report in engine_of(llm).runner.layer_reports() if report.kind == "moe"]
        assert [report.scheme for report in reports] == ["STACKED_INT8"] * 2
        assert sum(report.bytes_after for report in reports) < nbytes
        assert "STACKED_INT8" in str(llm.explain())
        answers(llm)
        engine_of(llm).runner.cost()


@pytest.mark.usefixtures("plugin")
def test_a_plugins_method_in_parts_keeps_the_bits(folder: Path) -> None:
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        expected = answers(llm)
    with open_llm(folder, quantization="in_parts", skip_tokenizer_init=True) as llm:
        assert answers(llm) == expected or not has_kernels()
        assert llm.config.invariant is has_kernels()


def test_a_method_of_another_kind_is_refused() -> None:
    class Config(QuantizationConfig):
        def get_name(self) -> str:
            return "wrong"

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            return object()

    with pytest.raises(TypeError, match=r"a\.b: object is not a FusedMoEMethodBase"):
        FusedMoE(E, K, H, INNER, quant_config=Config(), prefix="a.b")
    stacked = new_parameter(torch.zeros(2, 4, 3), print)
    with pytest.raises(ValueError, match=r"has shape \[3, 3\], the model needs \[2, 3\] of it"):
        layer().weight_loader(stacked, torch.zeros(3, 3), "w1:1")
    with pytest.raises(ValueError, match="is of expert 2, the model has 2"):
        layer().weight_loader(stacked, torch.zeros(2, 3), "w3:2")
    assert layer().weight_loader(stacked, torch.ones(2, 3), "w3:1") == 6
    assert stacked[1, 2:].all() and not stacked[1, :2].any() and not stacked[0].any()
