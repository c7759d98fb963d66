"""Backends: what every one answers, and a third one that a platform brings."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from counting_backend.backend import CountingBackend, CountingPlatform, calls
from embedded import engine_of, open_llm, run
from kernel_sets import ISAS, has_kernels, kernel_set, needs_compiler

import llm.platforms
from llm import LLM, SamplingParams
from llm.base.construction import constructing_for
from llm.errors import PluginError, ValidationError
from llm.kernels.backend import OPERATIONS, Backend, definition
from llm.kernels.cpu import backend as cpu
from llm.kernels.cpu.backend import CpuBackend
from llm.kernels.reference.backend import REFERENCE, pytorch
from llm.kernels.select import backend_for
from llm.kernels.triton import backend as triton
from llm.layers.norm import RMSNorm
from llm.platforms import select_platform
from llm.platforms.cpu import CpuPlatform
from llm.setup.plan import check_activations

with_kernels = pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")
PROMPTS = [[5, 300, 301, 17], [7, 8], list(range(100, 141))]
PARAMS = [
    SamplingParams(max_tokens=7, temperature=temperature, top_p=0.9, seed=1, logprobs=2, ignore_eos=True)
    for temperature in (0.0, 0.8, 1.0)
]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`device=` of the platform with the third backend."""
    monkeypatch.setattr(llm.platforms, "BUILTIN", (*llm.platforms.BUILTIN, CountingPlatform))
    calls.clear()
    yield CountingPlatform.name


def answers(opened: LLM) -> list[Any]:
    return [
        (output.token_ids, [[entry.logprob for entry in position.values()] for position in output.logprobs or []])
        for request in run(opened, PROMPTS, PARAMS)
        for output in request.outputs
    ]


# --- One signature per operation: that of its definition. ---


def arguments(operation: Any) -> list[tuple[str, Any, Any]]:
    return [(item.name, item.kind, item.default) for item in inspect.signature(operation).parameters.values()]


def other_arguments(kernels: dict[str, Any]) -> list[str]:
    """The kernels whose arguments, order, defaults or kinds of arguments are not those of their definitions."""
    return [name for name, own in kernels.items() if arguments(own) != arguments(definition(name))]


def test_kernels_have_the_arguments_of_their_definitions() -> None:
    functions = {name: cpu.kernel(name) for name in OPERATIONS}
    own = {name: functools.partial(item, None) for name, item in functions.items() if item is not None}
    assert len(own) == len(OPERATIONS) and other_arguments(own) == []
    if find_spec("triton") is not None:
        assert other_arguments({name: triton.kernel(name) for name in triton.kernel_names()}) == []


def test_another_default_order_or_name_is_seen() -> None:
    def relu(x: torch.Tensor, slope: float = 0.0) -> None: ...
    def scale(factor: float, x: torch.Tensor) -> None: ...
    def multiply(x: torch.Tensor, z: torch.Tensor) -> None: ...

    assert other_arguments({"relu": relu, "scale": scale, "multiply": multiply, "add": definition("add")}) == [
        *("relu", "scale", "multiply")
    ]


# --- A third backend: a folder and a line. ---


@needs_compiler
@with_kernels
@pytest.mark.parametrize("quantization", [None, "w8a8", "w4a16"])
def test_a_third_backend_computes_every_operation_of_a_model_with_the_same_bits(
    counting: str, quantization: str | None
) -> None:
    with open_llm(device="cpu", quantization=quantization) as opened:
        expected = answers(opened)
    assert not calls
    with open_llm(device=counting, quantization=quantization) as opened:
        calls.clear()
        assert answers(opened) == expected
        model = engine_of(opened).runner.model
        layers = len(model.model.layers)
        explained = str(opened.explain())
        assert opened.config.invariant
    norms = calls["rms_norm"] + calls["add_rms_norm"]
    steps, rest = divmod(norms, 2 * layers + 1)
    assert steps >= 7 and rest == 0
    assert calls["paged_attention"] == calls["write_kv_cache"] == calls["rotary_embedding"] == steps * layers
    assert calls["silu_and_mul"] == steps * layers
    assert calls["draw_nucleus"] and calls["gather_logprobs"] and calls["argmax"]
    assert "oot kernel" in explained and "cpu kernel" not in explained


def test_an_operation_that_a_backend_has_no_kernel_for_is_pytorchs() -> None:
    class Half(Backend):
        name = "half"

    half = Half({"rms_norm": lambda *args: "mine"}, "a test asked for it")
    assert half.op("rms_norm")() == half.ops.rms_norm() == "mine"
    assert half.op("argmax") is definition("argmax")
    assert half.computes("rms_norm") and not half.computes("rms_norm", "argmax")
    assert (half.source("rms_norm"), half.source("argmax")) == ("half kernel", "PyTorch")
    invariant, reason = half.invariant
    assert not invariant and "top_k" in reason and " rms_norm," not in reason.replace("add_rms_norm,", "")


@needs_compiler
@with_kernels
@pytest.mark.parametrize("lacking", ["linear", "embedding", "add_rms_norm", "paged_attention", "silu_and_mul", "top_k"])
def test_the_cpus_backend_too_may_lack_an_operation(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    with open_llm(device="cpu") as opened:
        expected = answers(opened)
        assert not [part for part in opened.explain().parts if part.kind == "operation"]
    of = cpu.kernel
    inner = CpuBackend.of(select_platform("cpu")[0])
    assert isinstance(inner, CpuBackend)
    monkeypatch.setattr(cpu, "kernel", lambda name: None if name == lacking else of(name))
    monkeypatch.setattr(cpu, "_cpu_backend", lambda isa: without)
    without = CpuBackend(inner.library, inner.reason)
    # What shares a layout of memory with it goes with it.
    gone = ["kv_cache_shapes", "write_kv_cache", lacking] if lacking == "paged_attention" else [lacking]
    assert without.lacks == gone and without.op(lacking) is definition(lacking)
    with open_llm(device="cpu") as opened:
        found = answers(opened)
        told = [(part.name, part.runs) for part in opened.explain().parts if part.kind == "operation"]
        assert told == [(name, "PyTorch") for name in gone]
        assert opened.config.invariant is (lacking == "embedding")
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_activations_that_a_kernel_does_not_take_are_refused() -> None:
    class Narrow(Backend):
        name, activations = "narrow", (torch.float16,)

    narrow = Narrow({"rms_norm": definition("rms_norm")}, "a test asked for it")
    assert narrow.takes("rms_norm") == (torch.float16,) and torch.float32 in narrow.takes("argmax")
    check_activations(torch.float16, narrow)
    with pytest.raises(ValidationError, match=r"dtype must be float16, which narrow kernels take \(rms_norm\), got"):
        check_activations(torch.float32, narrow)


# --- What every backend answers. ---

BACKENDS = [REFERENCE, *([kernel_set(ISAS[-1]), CountingBackend(kernel_set(ISAS[-1]))] if has_kernels() else [])]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_backend_answers_for_every_operation_and_for_nothing_else(backend: Backend) -> None:
    for name in OPERATIONS:
        assert callable(backend.op(name)) and backend.op(name) is getattr(backend.ops, name)
        assert (backend.source(name) == "PyTorch") is not backend.computes(name)
    with pytest.raises(KeyError):
        backend.op("rms_morn")
    assert backend.reason and isinstance(backend.invariant[1], str)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_backend_allocates_where_it_computes(backend: Backend) -> None:
    assert backend.empty(2, 3).shape == (2, 3) and backend.empty(4).dtype == torch.float32
    cache = backend.kv_cache((3, 5), torch.bfloat16)
    assert cache.dtype == torch.bfloat16 and not cache.any()
    array = torch.arange(6).view(2, 3).numpy()
    uploaded = backend.upload(array)
    array[0, 0] = 7
    assert uploaded[0, 0] == 7, "on a CPU nothing is copied"
    backend.clear()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_backend_that_records_nothing_says_so(backend: Backend) -> None:
    x = torch.randn(3, 8)
    if not backend.records:
        assert not backend.step_sizes(1, 1, 1)
        with pytest.raises(NotImplementedError, match=backend.name):
            backend.record(lambda tokens: [backend.ops.relu(x)])
        return
    with torch.inference_mode():
        recording = backend.record(lambda tokens: [backend.ops.relu(x)])
    (out,) = recording.results
    x.copy_(torch.randn(3, 8))
    assert not recording.refusal and recording.run() and torch.equal(out, x.clamp(min=0))


def test_memory_elsewhere_is_allocated_and_filled_there() -> None:
    backend = pytorch("a test asked for it", torch.device("meta"))
    assert backend.empty(2).is_meta and backend.kv_cache((2, 2), torch.float16).is_meta
    assert backend.upload(torch.arange(3).numpy()).is_meta


# --- Which one a platform has. ---


def test_without_a_platform_pytorch_computes() -> None:
    assert backend_for(None) is REFERENCE
    norm = RMSNorm(8)
    assert norm.backend is REFERENCE and norm.binding.method == "forward_native"


def test_a_platform_that_names_no_backend_has_pytorchs_operations() -> None:
    class Other(CpuPlatform):
        kind = CountingPlatform.kind
        dispatch_key = "oot"

    assert backend_for(Other()).name == "reference"
    with constructing_for(Other()):
        assert RMSNorm(8).binding.reason == "no forward_oot, native"


def test_a_platform_that_names_something_else_is_refused() -> None:
    class Wrong(CpuPlatform):
        def get_backend_cls(self) -> str:
            return "llm.layers.norm.RMSNorm"

    with pytest.raises(PluginError, match=r"Wrong\.get_backend_cls names .*RMSNorm"):
        backend_for(Wrong())


@needs_compiler
@with_kernels
def test_layers_of_a_platform_share_its_backend() -> None:
    with constructing_for(CpuPlatform()):
        assert RMSNorm(8).backend is RMSNorm(8).backend


# --- One body an operation. ---


@needs_compiler
@with_kernels
def test_what_a_subclass_overrides_runs_in_place_of_the_body() -> None:
    class Mine(RMSNorm):
        def forward_cpu(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            return super().forward_cpu(x, residual) * 2

    class Newer(RMSNorm):
        def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            return super().forward_native(x, residual) * 2

    x = torch.randn(3, 8)
    with constructing_for(CpuPlatform()):
        plain, mine, newer = RMSNorm(8), Mine(8), Newer(8)
    assert (plain.binding.method, mine.binding.method) == ("forward_cpu", "forward_cpu")
    assert torch.equal(mine(x), plain(x) * 2)
    assert newer.binding.method == "forward_native" and "a forward_native of its own" in newer.binding.reason
    assert torch.equal(newer(x), plain.forward_native(x) * 2)


@needs_compiler
@with_kernels
def test_a_bound_operation_is_one_frame_from_its_kernel() -> None:
    frames: list[str] = []
    with constructing_for(CpuPlatform()):
        norm = RMSNorm(8)
    kernel = norm.backend.ops.rms_norm.func.__code__  # type: ignore[attr-defined]

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is kernel:
            while "torch/nn" not in frame.f_code.co_filename:
                frames.append(frame.f_code.co_name)
                frame = frame.f_back

    x = torch.randn(1, 8)
    sys.setprofile(note)
    try:
        norm(x)
    finally:
        sys.setprofile(None)
    assert frames == ["rms_norm", "compute", "forward"]
