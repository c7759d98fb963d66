"""Plugins of quantization: registering, precedence, claiming a checkpoint, and the loader they share with the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import PROMPTS, copy_model, engine_of, open_llm, python, run, tokens
from torch import nn

from llm import LLM
from llm.errors import CheckpointError, LLMError, ValidationError
from llm.platforms.cpu import CpuPlatform
from llm.quantization import registry
from llm.quantization.base import FusedMoEMethodBase, KVCacheMethod, LinearMethodBase, QuantizationConfig, WeightLoader
from llm.quantization.on_load import RECIPES, QuantizeOnLoad
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.schemes import SCHEMES, IntegerMethod
from llm.quantization.unquantized import new_parameter
from llm.setup import build as startup


@pytest.fixture(autouse=True)
def _own_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_plugin_configs", {})
    monkeypatch.setattr(registry, "_plugin_schemes", {})
    yield


class SignMethod(LinearMethodBase):
    """Weights become their signs times the mean magnitude of a row."""

    scheme = "SIGN"

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: WeightLoader,
    ) -> None:
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        layer.weight = new_parameter(data, weight_loader, output_dim=0, input_dim=1)

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.data.float()
        layer.weight = nn.Parameter(weight.sign() * weight.abs().mean(1, keepdim=True), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, bias)


class SignConfig(QuantizationConfig):
    claims: str | None = None

    def get_name(self) -> str:
        return "sign"

    def get_quant_method(self, layer: nn.Module, prefix: str) -> SignMethod | None:
        return SignMethod() if getattr(layer, "quant_kind", "") == "linear" and "mlp" in prefix else None

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None) -> str | None:
        return cls.claims if hf_quant_cfg.get("quant_method") == "theirs" else None


class Device(CpuPlatform):
    """A CPU that says it computes in two types and has a capability, as a GPU does."""

    capability: tuple[int, int] | None = None

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return torch.float32, torch.bfloat16

    def get_device_capability(self) -> tuple[int, int] | None:
        return self.capability

    def get_device_name(self) -> str:
        return "Gadget 9"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    made.name = "gadget"
    monkeypatch.setattr(startup, "select_platform", lambda device: (made, "a test"))
    return made


@pytest.mark.parametrize(
    ("dtypes", "said"),
    [
        (
            [torch.bfloat16, torch.float16],
            "takes activations of bfloat16 or float16.*gadget.*float32; pass dtype='bfloat16'",
        ),
        ([torch.float16], "takes activations of float16, and those on gadget are float32; use another quantization"),
    ],
)
def test_activations_that_a_method_does_not_take_are_refused(
    device: Device, monkeypatch: pytest.MonkeyPatch, dtypes: list[torch.dtype], said: str
) -> None:
    registry.register_quantization_config("sign")(SignConfig)
    monkeypatch.setattr(SignConfig, "get_supported_act_dtypes", classmethod(lambda cls: dtypes))
    with pytest.raises(ValidationError, match=f"quantization='sign' {said}") as error, open_llm(quantization="sign"):
        pass
    assert error.value.parameter == "quantization"


def test_the_least_capability_of_a_method(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register_quantization_config("sign")(SignConfig)
    monkeypatch.setattr(SignConfig, "get_min_capability", classmethod(lambda cls: 80))
    device.capability = (7, 5)
    said = r"quantization='sign' needs a device of capability 8\.0, and Gadget 9 has 7\.5; use another quantization"
    with pytest.raises(ValidationError, match=said), open_llm(quantization="sign"):
        pass
    for enough in ((8, 0), (9, 0), None):  # None: a device without such a number
        device.capability = enough
        with open_llm(quantization="sign") as llm:
            assert llm.config.model_config.quantization == "sign"


@pytest.mark.parametrize("kind", ["nonsense", "Linear", "", None, ["linear"]])
def test_a_scheme_for_an_unknown_kind_of_layer_is_refused(kind: Any) -> None:
    with pytest.raises(
        ValidationError, match=r"kind=.* is not known.*Known: linear, embedding, moe, attention"
    ) as error:
        registry.register_scheme("MINE", kind)(SignMethod)
    assert (error.value.parameter, error.value.value) == ("kind", kind)
    assert registry._plugin_schemes == {}


@pytest.mark.parametrize("kind", ["linear", "embedding", "moe", "attention"])
def test_a_scheme_for_a_known_kind_is_taken(kind: str) -> None:
    registry.register_scheme("MINE", kind)(SignMethod)
    assert registry.get_scheme("MINE", kind) is SignMethod


def test_a_plugin_quantizes_an_ordinary_checkpoint() -> None:
    registry.register_quantization_config("sign")(SignConfig)
    with open_llm(quantization="sign") as llm:
        layers = engine_of(llm).runner.model.model.layers
        assert layers[0].mlp.gate_up_proj.weight.unique(dim=1).shape == (1024, 256)
        assert len(layers[0].mlp.gate_up_proj.weight[5].abs().unique()) == 1
        assert layers[0].self_attn.o_proj.quant_method.scheme == ""
        assert llm.config.model_config.quantization == "sign"
        assert llm.config.reasons["quantization"] == "asked for"
        with open_llm() as plain:
            answers = tokens(run(llm, PROMPTS))
            assert all(answers) and answers != tokens(run(plain, PROMPTS))  # signs alone say something else
    with open_llm(quantization=SignConfig()) as llm:
        assert engine_of(llm).runner.model.model.layers[0].mlp.down_proj.quant_method.scheme == "SIGN"


def test_a_plugin_claims_a_checkpoint_and_others_contradict_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_model(tmp_path / "model", config={"quantization_config": {"quant_method": "theirs"}})
    with pytest.raises(LLMError, match=r"quantized as 'theirs' .*, which is not computed"):
        LLM(folder)
    registry.register_quantization_config("sign")(SignConfig)
    monkeypatch.setattr(SignConfig, "claims", "sign")
    with open_llm(folder) as llm:
        assert llm.config.reasons["quantization"] == "claimed by the plugin for 'sign'"
        assert engine_of(llm).runner.model.model.layers[0].mlp.down_proj.quant_method.scheme == "SIGN"
    with pytest.raises(ValidationError, match=r"contradicts the checkpoint: it is quantized as 'sign'"):
        LLM(folder, quantization="w8a8")


def test_a_plugin_replaces_a_built_in_format_and_a_recipe() -> None:
    assert registry.get_quantization_config("modelslim") is registry.get_quantization_config("ascend")
    registry.register_quantization_config("compressed-tensors")(SignConfig)
    registry.register_quantization_config("w8a8")(SignConfig)
    assert registry.get_quantization_config("compressed-tensors") is SignConfig
    assert registry.quantization_methods()[0] == "compressed-tensors"
    with open_llm(quantization="w8a8") as llm:
        assert engine_of(llm).runner.model.model.layers[0].mlp.down_proj.quant_method.scheme == "SIGN"


def test_what_cannot_be_registered() -> None:
    with pytest.raises(ValidationError, match="takes a subclass of QuantizationConfig"):
        registry.register_quantization_config("bad")(dict)
    registry.register_scheme("W8A16", "linear")(SignMethod)
    registry.register_scheme("W8A16", "linear")(SignMethod)  # a cell that is run again
    with pytest.raises(LLMError, match=r"W8A16 linear layers is already registered: .*SignMethod; .*SignConfig cannot"):
        registry.register_scheme("W8A16", "linear")(SignConfig)
    with pytest.raises(ValidationError, match=r"quantization='ascent' is not known. Did you mean 'ascend'\?"):
        registry.get_quantization_config("ascent")


def test_a_plugins_scheme_comes_before_the_built_in_one() -> None:
    """In a process of its own: registering is for good."""
    script = """
from llm.quantization.registry import get_scheme, register_scheme, scheme_types
class Mine: pass
register_scheme("W8A8_DYNAMIC", "linear")(Mine)
assert get_scheme("W8A8_DYNAMIC", "linear") is Mine
assert get_scheme("W8A8_DYNAMIC", "embedding").args[0].name == "W8A8_DYNAMIC"
assert scheme_types("linear")[0] == "W8A8_DYNAMIC" and scheme_types("linear").count("W8A8_DYNAMIC") == 1
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr


def test_a_registered_scheme_serves_modelslim_checkpoints(tmp_path: Path) -> None:
    """The description names the type; the scheme comes from the plugin, the storage and the loader are ours."""

    @registry.register_scheme("W8A8_LOUD", "linear")
    class Loud(IntegerMethod):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(replace(SCHEMES["W8A8_DYNAMIC"], name="W8A8_LOUD"), *arguments)

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return 2 * super().apply(layer, x, bias)

    with open_llm(quantization={"scheme": "w8a8", "rotate": False}) as llm:
        llm.save_quantized(tmp_path / "saved", "modelslim")
        x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
        plain = engine_of(llm).runner.model.model.layers[0].mlp.gate_up_proj(x)
    path = tmp_path / "saved" / "quant_model_description.json"
    types = json.loads(path.read_text())
    loud = {name: "W8A8_LOUD" if "layers" in name and kind == "W8A8_DYNAMIC" else kind for name, kind in types.items()}
    path.write_text(json.dumps(loud))
    with open_llm(tmp_path / "saved") as llm:
        layer = engine_of(llm).runner.model.model.layers[0].mlp.gate_up_proj
        assert layer.quant_method.scheme == "W8A8_LOUD"
        assert torch.equal(layer(x), 2 * plain)


def test_explain_shows_scheme_source_and_reason() -> None:
    with open_llm(quantization={"scheme": "w8a8", "ignore": ["*.o_proj"]}) as llm:
        shown = str(llm.explain())
    assert "W8A8_DYNAMIC" in shown and "quantized on load: w8a8" in shown and "quantization='w8a8'" in shown
    assert "unquantized" in shown


def test_the_protocol_has_its_place_for_experts_and_caches() -> None:
    assert FusedMoEMethodBase.__abstractmethods__ == {"create_weights", "apply"}
    assert KVCacheMethod.__abstractmethods__ == {"create_weights"}


def test_quantizing_refuses_a_tensor_of_another_shape() -> None:
    storage = QuantizeOnLoad(RECIPES["w8a8"].bits, 4)
    layer = nn.Module()
    storage.create(layer, [2], 4, torch.float32, lambda *_: 0, lambda weight: None)
    weight = torch.ones(2, 4)
    assert layer.weight.weight_loader(layer.weight, weight, None) == 8  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match="shape"):
        layer.weight.weight_loader(layer.weight, torch.ones(2, 3), None)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("size", [8, 12, 24])
def test_groups_have_a_multiple_of_8_columns_and_whole_rows_any_number(size: int) -> None:
    scheme = SCHEMES["W4A8_DYNAMIC"]
    codes = torch.zeros(3, 2 * size, dtype=torch.int8)
    scheme.check(IntegerWeight(codes[:, :size], torch.ones(3, 1), size, 4))
    groups = IntegerWeight(codes, torch.ones(3, 2), size, 4)
    if size % 8:
        with pytest.raises(CheckpointError, match=f"this layer has groups of {size}"):
            scheme.check(groups)
    else:
        scheme.check(groups)
