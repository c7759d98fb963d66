"""`llm.explain()` and `python -m llm explain`: what runs and why. And that switching operations changes no token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from embedded import PROMPTS, open_llm, run, tokens
from kernel_sets import has_compiler, has_kernels
from torch import nn

from llm import LLM
from llm.base.custom_op import CustomOp, PluggableLayer, op_registry_oot
from llm.cli import main
from llm.config import EngineConfig
from llm.config.compilation import CompilationConfig
from llm.errors import EngineClosedError, ValidationError
from llm.explain import HEADINGS, Explanation, Part, explain_model, paths_in_short
from llm.layers.activation import SiluAndMul
from llm.layers.norm import RMSNorm
from llm.runner.inspection import what_varies


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(speculative_config="auto") as llm:
        yield llm


@pytest.fixture(autouse=True)
def replacements() -> Iterator[None]:
    before = dict(op_registry_oot)
    yield
    op_registry_oot.clear()
    op_registry_oot.update(before)


def parts_of(llm: LLM, kind: str) -> dict[str, Part]:
    return {part.name: part for part in llm.explain().parts if part.kind == kind}


def test_every_operation_of_the_model_is_there(llm: LLM) -> None:
    model = llm._engine.runner.model  # type: ignore[union-attr]
    expected = [type(module).__name__ for module in model.modules() if isinstance(module, CustomOp)]
    found = parts_of(llm, "CustomOp")
    assert sum(part.count for part in found.values()) == len(expected) > 0
    assert {part.implementation for part in found.values()} == set(expected)
    assert {"rms_norm", "rotary_embedding", "silu_and_mul"} <= set(found)
    assert all(part.runs.startswith("forward_") and part.reason for part in found.values())


def test_every_quant_method_of_the_model_is_there(llm: LLM) -> None:
    model = llm._engine.runner.model  # type: ignore[union-attr]
    expected = sum(hasattr(module, "quant_method") for module in model.modules())
    found = parts_of(llm, "quant method")
    assert sum(part.count for part in found.values()) == expected > 0
    assert all(part.runs == "unquantized" and part.reason for part in found.values())


def test_the_config_is_the_reason() -> None:
    with open_llm(compilation_config={"custom_ops": ["-rms_norm", "-gelu_new"]}) as llm:
        found = parts_of(llm, "CustomOp")
        assert found["rms_norm"].reason == "disabled by -rms_norm"
        assert found["rms_norm"].runs == "forward_native"
        assert not found["silu_and_mul"].reason.startswith("disabled")
        assert llm.explain().unused == ("gelu_new",)
        assert str(llm.explain()).splitlines()[-1].startswith("custom_ops names gelu_new: this model has no")
        assert "custom_ops               -rms_norm,-gelu_new,all" in repr(llm.config)  # as vLLM appends it
        given = CompilationConfig(custom_ops=("-rms_norm", "-gelu_new"))
        assert llm.config.compilation_config == given.with_base_mode() != given


class Kernel(nn.Module):
    """A quant method's layer, without the rest."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.quant_method = type("W8A8Method", (), attributes)()


class Plain(PluggableLayer):
    """A layer that is not registered."""


def test_schemes_layers_and_their_reasons() -> None:
    model = nn.ModuleList(
        [
            Kernel(scheme="W8A8", reason="layer is listed", source="config.json"),
            Kernel(),
            Plain(),
            SiluAndMul(),
            Plain(),
        ]
    )
    config = EngineConfig(None, None, None, "cpu", False)  # type: ignore[arg-type]
    found = explain_model(model, config).parts
    assert found == (
        Part("CustomOp", "silu_and_mul", 1, "SiluAndMul", "forward_native", "made outside of an LLM, native"),
        Part("PluggableLayer", "Plain", 2, "Plain", "forward", "in-tree"),
        Part("quant method", "Kernel", 1, "W8A8Method", "W8A8", "layer is listed, config.json; 0"),
        Part("quant method", "Kernel", 1, "W8A8Method", "unquantized", "no quantization asked for; 1"),
    )


def test_a_shared_module_is_counted_once() -> None:
    shared = SiluAndMul()
    config = EngineConfig(None, None, None, "cpu", False)  # type: ignore[arg-type]
    assert [part.count for part in explain_model(nn.ModuleList([shared, shared]), config).parts] == [1]


def test_as_text_and_as_html() -> None:
    explanation = Explanation((Part("CustomOp", "a<b", 2, "C", "forward_cpu", "cpu kernel"),), ("x",))
    lines = str(explanation).splitlines()
    assert lines[0].split() == list(HEADINGS)
    assert lines[1].split() == ["CustomOp", "a<b", "2", "C", "forward_cpu", "cpu", "kernel"]
    assert repr(explanation) == str(explanation)
    markup = explanation._repr_html_()
    assert "<td>a&lt;b</td><td>2</td>" in markup
    assert markup.count("<th>") == len(HEADINGS)
    assert "custom_ops names x" in markup


def test_on_the_command_line(capsys: pytest.CaptureFixture[str], llm: LLM) -> None:
    assert main(["explain"]) == 0
    assert capsys.readouterr().out == f"{llm.explain()}\n"


@pytest.mark.parametrize(
    "options",
    [
        ["--compilation-config", '{"custom_ops": ["none", "+rms_norm"]}'],
        ["--compilation_config.custom_ops", '["none,+rms_norm"]'],
        ["--compilation-config.custom_ops", "none,+rms_norm"],
    ],
)
def test_custom_ops_on_the_command_line(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert main(["explain", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    (norm,) = [line for line in lines if " rms_norm " in line]
    (silu,) = [line for line in lines if " silu_and_mul " in line]
    assert "disabled" not in norm
    assert silu.endswith("disabled by none")


@pytest.mark.parametrize(
    "options",
    [
        ["--compilation-config", "9"],
        ["--compilation-config", "{"],
        ["--compilation-config.custom_ops", "none,all"],
        ["--compilation-config.custom_ops", "+made_up"],
        ["--compilation-config.custom_ops", "none", "--compilation-config", "3"],
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert main(["explain", *options]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_explain_of_a_closed_llm() -> None:
    with open_llm() as llm:
        pass
    with pytest.raises(EngineClosedError):
        llm.explain()


@pytest.mark.parametrize(
    "custom_ops", [["none"], ["all"], "none,+rms_norm", "-silu_and_mul,-rotary_embedding", "none,+gelu_new"]
)
def test_turning_operations_on_and_off_changes_no_token(llm: LLM, custom_ops: Any) -> None:
    with open_llm(compilation_config={"custom_ops": custom_ops}) as other:
        assert tokens(run(other, PROMPTS)) == tokens(run(llm, PROMPTS))


@pytest.mark.skipif(not has_kernels(), reason="without compiled kernels nothing is invariant")
def test_what_else_computes_is_not_called_invariant(llm: LLM) -> None:
    def varies(other: LLM) -> str | None:
        return what_varies(other._engine.runner.model)  # type: ignore[union-attr]

    assert varies(llm) is None
    with open_llm(compilation_config={"custom_ops": ["-rms_norm"]}) as off:
        assert varies(off) == "rms_norm is disabled by -rms_norm: PyTorch's own operations compute it"
        assert off.config.invariant is False

    @CustomOp.register_oot
    class Mine(SiluAndMul):
        def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward_native(x)

    with open_llm() as replaced:
        assert varies(replaced) == f"replaced from {__name__}: Mine"
        assert replaced.config.invariant is False


def test_a_wrong_operation_would_be_seen(llm: LLM) -> None:
    """The control of the test above: an operation that computes something else changes tokens."""

    @CustomOp.register_oot(name="SiluAndMul")
    class Wrong(SiluAndMul):
        def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
            return -self.forward_native(x)

    with open_llm() as other:
        assert tokens(run(other, PROMPTS)) != tokens(run(llm, PROMPTS))


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValidationError, match="Did you mean 'rms_norm'") as error:
        LLM(compilation_config={"custom_ops": ["+rmsnorm"]})
    assert error.value.parameter == "custom_ops"


CELL = """
import torch
from llm.layers.custom_op import CustomOp
from llm.layers.norm import RMSNorm

calls = []

@CustomOp.register_oot
class MyNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        calls.append(x.shape)
        return self.forward_native(x, residual)
"""


def test_from_a_notebook_cell(llm: LLM) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for _ in range(2):  # cells are run again
        exec(CELL, namespace)
    with open_llm() as other:
        assert tokens(run(other, PROMPTS)) == tokens(run(llm, PROMPTS))
        (norm,) = [part for part in other.explain().parts if part.name == "rms_norm"]
    assert namespace["calls"]
    assert norm.implementation == "MyNorm"
    assert norm.runs == "forward_oot"
    assert norm.reason == "replaced from __main__: MyNorm; oot kernel"
    assert issubclass(namespace["MyNorm"], RMSNorm)


def test_a_mixed_quantization_names_its_layers() -> None:
    asked = {"scheme": "w8a8", "layers": {"*.1.mlp.down_proj": "w4a16"}, "ignore": ["*.3.*"], "lm_head": None}
    with open_llm(quantization=asked) as llm:
        parts = [part for part in llm.explain().parts if part.kind == "quant method"]
    rows = {part.reason.partition("; ")[2]: part for part in parts}
    down = rows["model.layers.1.mlp.down_proj"]
    assert (down.count, down.runs) == (1, "W4A16") and "quantization='w8a8'" in down.reason
    assert rows["model.layers.0-2.self_attn.o_proj, model.layers.0,2.mlp.down_proj"].count == 5
    assert rows["model.layers.3.self_attn.qkv_proj"].reason.startswith("in the ignore list, quantization='w8a8'")
    assert rows["model.embed_tokens"].reason.startswith("lm_head=None, quantization='w8a8'")
    assert len(rows) == len(parts) == 8


def test_paths_that_differ_in_a_number_are_one() -> None:
    paths = ["head", "l.0.a", "l.1.a", "l.3.a", "l.4.a", "l.7.a", "l.1.b", "e.0.x.5"]
    assert paths_in_short(paths) == "head, l.0-1,3-4,7.a, l.1.b, e.0.x.5"


@pytest.mark.parametrize("quantization", [None, "w4a8"])
def test_what_computes_a_quantized_layer_is_said(quantization: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for isa, computes in (("none", "PyTorch"), ("plain", "cpu kernel plain")):
        if isa != "none" and not has_compiler():
            continue
        monkeypatch.setenv("LLM_CPU_ISA", isa)
        with open_llm(load_format="dummy", quantization=quantization) as llm:
            parts = [part for part in llm.explain().parts if part.kind == "quant method"]
        assert all(part.reason.partition(";")[0].split(", ")[-1] == computes for part in parts)
        assert all(("quantized on load" in part.reason) == (quantization is not None) for part in parts)
