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
from llm.kernels.reference.quantized import PackedWeight
from llm.kernels.select import backend_for
from llm.platforms import select_platform

pytestmark = [needs_compiler, pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")]
N, K = 5, 24
TABLE = normal(7, 9, 8)
INTEGERS = torch.randint(-8, 8, (N, K), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
SCALE = normal(8, N).abs() + 0.1
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
    "linear_float": (X, normal(3, N, K).bfloat16(), normal(4, N)),
    "linear_w8a8_dynamic": (X, INTEGERS, SCALE, normal(4, N)),
    "linear_w8a8_static": (X, INTEGERS, SCALE, 0.05, -3),
    "linear_w4a8": (X, INTEGERS, GROUPED, 8),
    "linear_w8a16": (X, INTEGERS, GROUPED, GROUPED.round(), 8, normal(4, N)),
    "linear_w4a16": (X, INTEGERS, GROUPED, None, 8),
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with one_thread():
        torch_ops.register()
        yield


def kernels() -> Any:
    return backend_for(select_platform("cpu")[0])


def arguments(name: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """For the kernel, and for the operation of the same name."""
    if name not in torch_ops.PRODUCTS:
        return ARGUMENTS[name], ARGUMENTS[name]
    x, weight, *rest = ARGUMENTS[name]
    kind = "float" if name == "linear_float" else "int4" if "w4" in name else "int8"
    packed: Any = kernels().op(f"pack_{kind}")(weight.clone())
    assert isinstance(packed, PackedWeight)
    packed = replace(packed, rounds_input=kind == "float")
    fields = packed.data, packed.sums, packed.n, packed.k, packed.kind, packed.rounds_input
    return (x, packed, *rest), (x, *fields, *rest)


def operation(name: str) -> Any:
    return getattr(torch.ops.offline_llm, name).default


def same_bits(one: Any, other: Any) -> bool:
    pairs = zip(*(item if isinstance(item, tuple) else (item,) for item in (one, other)), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", [*torch_ops.PLAIN, *torch_ops.PRODUCTS])
def test_an_operation_is_its_kernel_and_its_fake_has_its_shape(name: str) -> None:
    of_kernel, of_operation = arguments(name)
    assert same_bits(operation(name)(*of_operation), kernels().op(name)(*of_kernel))
    torch.library.opcheck(operation(name), of_operation, test_utils=("test_schema", "test_faketensor"))


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
        product = {None: "linear_float", "w4a8": "linear_w4a8"}[quantization]
        for module, names in (
            (layer.mlp, [product, "silu_and_mul", product]),
            (layer.input_layernorm, ["rms_norm"]),
            (layer.self_attn.qkv_proj, [product]),
        ):
            graphs = Graphs()
            compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=graphs)
            with torch.inference_mode():
                for rows in (2, 5):
                    x = normal(rows, rows, 256)
                    assert torch.equal(compiled(x), module(x))
            assert [item for item in graphs.operations if "offline_llm" in item] == [
                f"offline_llm.{name}.default" for name in names
            ]


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
