"""`llm.kernels.torch_ops`: layers are traced whole, with the bits of their kernels, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from embedded import engine_of, open_llm
from kernel_sets import has_kernels, needs_compiler
from pages import normal
from tiny_models import one_thread
from torch.utils._python_dispatch import TorchDispatchMode

from llm.kernels import torch_ops
from llm.kernels.cpu.packed import PanelWeight
from llm.kernels.select import backend_for
from llm.platforms import select_platform

pytestmark = [needs_compiler, pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")]
N, K = 5, 24
TABLE = normal(7, 9, 8)
INTEGERS = torch.randint(-8, 8, (N, K), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
SCALE = normal(8, N, 1).abs() + 0.1
GROUPED = normal(9, 3, N).abs().t() + 0.1
X = normal(0, 3, 2 * K)[:, :K]  # rows are apart

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **{name: (X,) for name in torch_ops.PLAIN},
    "rms_norm": (X, normal(1, K), 1e-6, None, 1.0),
    "add_rms_norm": (X, X + 1, normal(1, K).bfloat16(), 1e-6, 7),
    "layer_norm": (X, normal(1, K), normal(2, K), 1e-6),
    "add_layer_norm": (X, X + 1, normal(1, K), normal(2, K), 1e-6),
    "rotary_embedding": (torch.tensor([8, 0, 3]), X, X[:, :8], TABLE, 8, False),
    "gelu_and_mul": (X, "tanh"),
    "gelu": (X, "none"),
}
# What products are made with: values, kind, scale, zero, group size, and the other parts.
WEIGHTS: dict[str, tuple[Any, ...]] = {
    "float32": (normal(3, N, K), None, None, None, 0, {"bias": normal(4, N)}),
    "bfloat16, rounded": (normal(3, N, K).bfloat16(), None, None, None, 0, {"activations": "bfloat16"}),
    "w8a8": (INTEGERS, "int8", SCALE, None, 0, {"activations": "int8", "bias": normal(4, N)}),
    "w8a8, static": (
        *(INTEGERS, "int8", SCALE, None, 0),
        {"activations": "int8", "input_scale": 0.05, "input_offset": -3},
    ),
    "w4a8": (INTEGERS, "int4", GROUPED, None, 8, {"activations": "int8"}),
    "w8a16": (INTEGERS, "int8", GROUPED, GROUPED.round(), 8, {"bias": normal(4, N)}),
    "w4a16": (INTEGERS, "int4", GROUPED, None, 8, {}),
    "w4a16, rounded": (INTEGERS, "int4", GROUPED, None, 8, {"activations": "bfloat16"}),
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with one_thread():
        torch_ops.register()
        yield


def kernels() -> Any:
    return backend_for(select_platform("cpu")[0])


def weight_of(name: str) -> PanelWeight:
    values, kind, scale, zero, group_size, parts = WEIGHTS[name]
    packed: PanelWeight = kernels().op("pack")(values.clone(), kind)
    return replace(packed if scale is None else packed.scaled(scale, zero, group_size), **parts)


def operation(name: str) -> Any:
    return getattr(torch.ops.offline_llm, name).default


def same_bits(one: Any, other: Any) -> bool:
    pairs = zip(*(item if isinstance(item, tuple) else (item,) for item in (one, other)), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def check(name: str, of_kernel: tuple[Any, ...], of_operation: tuple[Any, ...]) -> None:
    assert same_bits(operation(name)(*of_operation), kernels().op(name)(*of_kernel))
    torch.library.opcheck(operation(name), of_operation, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", torch_ops.PLAIN)
def test_an_operation_is_its_kernel_and_its_fake_has_its_shape(name: str) -> None:
    check(name, ARGUMENTS[name], ARGUMENTS[name])


@pytest.mark.parametrize("name", WEIGHTS)
def test_so_is_a_product_with_a_weight_field_by_field(name: str) -> None:
    weight = weight_of(name)
    check("linear", (X, weight), (X, *torch_ops.fields_of(weight)))


@pytest.mark.parametrize("name", ["float32", "w8a8"])
def test_and_the_rows_of_a_table(name: str) -> None:
    weight, ids = weight_of(name), torch.tensor([[0, 4, 1]])
    check("embedding", (ids, weight), (ids, *torch_ops.fields_of(weight)))


def test_a_wrong_fake_kernel_is_seen() -> None:
    """The negative control."""
    library = torch.library.Library("offline_llm_control", "DEF")
    library.define("relu(Tensor x) -> Tensor")
    library.impl("relu", kernels().op("relu"), "CPU")
    torch.library.register_fake("offline_llm_control::relu", lambda x: x.new_empty(x.shape[0]), lib=library)
    with pytest.raises(Exception, match="test_faketensor failed"):
        torch.library.opcheck(torch.ops.offline_llm_control.relu.default, (X,), test_utils="test_faketensor")


class Graphs:
    """A compiler's backend that keeps what it is given and runs it as it is."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.operations += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return graph.forward


@pytest.mark.parametrize("quantization", [None, "w4a8"])
def test_layers_are_traced_whole(quantization: str | None) -> None:
    with open_llm(load_format="dummy", quantization=quantization) as llm:
        layer = engine_of(llm).runner.model.model.layers[0]
        for module, names in (
            (layer.mlp, ["linear", "silu_and_mul", "linear"]),
            (layer.input_layernorm, ["rms_norm"]),
            (layer.self_attn.qkv_proj, ["linear"]),
        ):
            graphs = Graphs()
            compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=graphs)
            with torch.inference_mode():
                for rows in (3, 5):  # 2 is the number of groups, too: a tracer would take them for one size
                    x = normal(rows, rows, 256)
                    assert torch.equal(compiled(x), module(x))
            assert [item for item in graphs.operations if "offline_llm" in item] == [
                f"offline_llm.{name}.default" for name in names
            ]


@pytest.mark.parametrize("scheme", [None, "W8A8_DYNAMIC"])
def test_a_layer_with_a_bias_is_traced_whole(scheme: str | None) -> None:
    """At its first product, which makes the bias the weight's, and later; with the bias that it has then."""
    with open_llm(load_format="dummy", quantization=scheme and "w8a8") as llm:
        layer = engine_of(llm).runner.model.model.layers[0].mlp.down_proj
        assert layer.packed_weight.bias is None
        x, graphs = normal(1, 3, layer.input_size), Graphs()
        plain = layer(x)
        layer.bias = torch.nn.Parameter(normal(2, layer.output_size), requires_grad=False)
        compiled = torch.compile(layer, fullgraph=True, backend=graphs)
        with torch.inference_mode():
            for _ in range(2):
                assert torch.equal(compiled(x), plain + layer.bias) and torch.equal(layer(x), plain + layer.bias)
            layer.bias.data.mul_(2)
            assert torch.equal(compiled(x), plain + layer.bias)


def test_a_layer_is_exported() -> None:
    with open_llm(load_format="dummy") as llm:
        norm = engine_of(llm).runner.model.model.norm
        x = normal(0, 3, 256)
        with torch.no_grad():
            exported = torch.export.export(norm, (x,), strict=True)
            assert torch.equal(exported.module()(x), norm(x))
    assert "offline_llm.rms_norm" in str(exported.graph)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_without_a_tracer_kernels_are_called_directly() -> None:
    with open_llm() as llm, torch.inference_mode(), Seen() as seen:
        mlp = engine_of(llm).runner.model.model.layers[0].mlp
        mlp(normal(0, 2, 256))
        operation("relu")(X)
    assert [name for name in seen.names if name.startswith("offline_llm")] == ["offline_llm.relu.default"]
