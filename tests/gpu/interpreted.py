"""The Triton kernels in Triton's interpreter: against their definitions, row by row, and through the engine.

The interpreter has to be chosen before Triton is imported, so `tests/gpu/test_triton.py` runs this file in a process of
its own. Without `-m "not slow"` it takes minutes:

    TRITON_INTERPRET=1 python -m pytest tests/gpu/interpreted.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from embedded import engine_of, open_llm, run, tokens
from tiny_models import TINY_MODELS, make_prompts, tiny_checkpoint

import llm.platforms
from llm import LLM, SamplingParams
from llm.kernels.backend import StepSize
from llm.kernels.reference.rotation import rotate
from llm.kernels.triton import attention, backend, check, elementwise, gemm, language, launch, moe, vocabulary
from llm.kernels.triton.backend import TritonBackend, kernel, kernel_names
from llm.platforms.cpu import CpuPlatform
from llm.platforms.interface import PlatformEnum

CPU = torch.device("cpu")
EVERY = [(name, case) for name in kernel_names() for case in check.cases(name)]
# Where bfloat16 goes another way than float32.
NARROW = {"linear", "paged_attention", "add_rms_norm", "silu_and_mul", "rotary_embedding", "experts", "heads_linear"}
# Of these in float32.
RECURRENT = {
    "causal_conv1d": "4 taps",
    "gated_delta_rule": "of each row",
    "selective_scan": "gate",
    "mamba2_scan": "of a channel",
}
QUICK = {("paged_attention", "sinks")}
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


def of_types() -> Iterator[Any]:
    for name, case in EVERY:
        for dtype in (torch.float32, torch.bfloat16):
            is_quick = dtype == torch.float32 or (name in NARROW and name not in ("paged_attention", "linear"))
            is_quick |= (name, case.label) in QUICK or (name == "linear" and case.label.endswith("17x77"))
            is_quick &= name not in RECURRENT or case.label.startswith(RECURRENT[name])
            marks = () if is_quick else (pytest.mark.slow,)
            yield pytest.param(name, case, dtype, marks=marks, id=f"{name}-{case.label}-{str(dtype)[6:]}")


@pytest.mark.parametrize(("name", "case", "dtype"), list(of_types()))
def test_a_kernel_agrees_with_its_definition_and_a_row_alone_with_the_row_in_a_batch(
    name: str, case: check.Case, dtype: torch.dtype
) -> None:
    if (name, case.label, dtype) == ("paged_attention", "sinks", torch.bfloat16) and OLD:
        pytest.skip("the interpreter of Triton before 3.8 has no constants of bfloat16 (`get_bf16`)")
    assert check.disagreement(name, kernel(name), CPU, dtype, case) == ""


@pytest.mark.parametrize("kind", ["bfloat16", "w8a16", "w8a8", "w4a16", "w4a8 in two levels"])
def test_the_tiles_of_hopper_give_the_bits_of_other_tiles(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = dict(check.weights(40, 192))[kind], torch.randn(150, 192).bfloat16()
    expected = gemm.linear(x, weight)
    monkeypatch.setattr(launch, "INTERPRETER", launch.TARGETS["sm90"])
    for rows in (1, 20, 40, 150):
        assert torch.equal(gemm.linear(x[:rows], weight), expected[:rows])


def test_a_rank_sums_in_the_order_of_the_whole_matrix() -> None:
    """Its part is narrower, and would be cut into more segments."""
    x, outputs = torch.randn(3, 2048), 32 * launch.PROGRAMS
    whole = replace(dict(check.weights(32, 2048))["bfloat16"], bias=None, outputs=outputs)
    part = replace(whole, data=whole.data[16:], n=16)
    expected = gemm.linear(x, whole)[:, 16:]
    assert torch.equal(gemm.linear(x, part), expected)
    assert not torch.equal(gemm.linear(x, replace(part, outputs=0)), expected)


@pytest.mark.parametrize("kind", ["w4a16", "w4a16 with zeros", "w4a16 with minima", "w4a8 in two levels"])
def test_a_weight_that_is_unpacked_once_gives_the_bits_of_tiles_that_unpack_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = dict(check.weights(300, 192))[kind], torch.randn(20, 192).bfloat16()
    weight = replace(weight, bias=torch.randn(300))
    expected, unpack, launches = gemm.linear(x, weight), gemm.launch, []
    monkeypatch.setattr(gemm, "UNPACKED_ROWS", 20)
    monkeypatch.setattr(gemm, "_UNPACKED_BYTES", 1 << 10)  # in two parts
    monkeypatch.setattr(
        gemm, "launch", lambda own, *args, **options: (launches.append(own), unpack(own, *args, **options))
    )
    assert torch.equal(gemm.linear(x, weight), expected)
    assert launches.count(gemm.unpack) == 2 and torch.equal(gemm.linear(x[:3], weight), expected[:3])


@pytest.mark.parametrize("block", [16, 64, 256])
def test_rows_are_rotated_by_the_sums_of_the_definition(block: int) -> None:
    x = torch.randn(3, 9 * block)
    assert torch.equal(gemm.rotate(x, block, torch.float32), rotate(x, block))


# --- Planted defects. ---


def without_the_tail(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """The last columns, less than a block of them, are left out."""
    whole = x.clone()
    whole[..., x.shape[-1] // 16 * 16 :] = 0
    return gemm.linear(whole, weight)


def of_a_wrong_stride(x: torch.Tensor) -> torch.Tensor:
    return elementwise.silu_and_mul(torch.empty_like(x.contiguous()).copy_(x.contiguous().view(-1).roll(1).view_as(x)))


def masked_one_off(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Every token sees one key less."""
    *most, metadata = args
    return attention.paged_attention(*most, replace(metadata, seq_lens=metadata.seq_lens - 1), **kwargs)


def of_the_next_expert(x: torch.Tensor, ids: torch.Tensor, *more: Any) -> torch.Tensor:
    return moe.experts(x, (ids + 1) % 5, *more)


def summed_by_batch(x: torch.Tensor, weight: torch.Tensor, eps: float, *more: Any) -> torch.Tensor:
    """Right, but its bits depend on how many rows there are."""
    return elementwise.rms_norm(x, weight, eps, *more) * (1 + len(x) * 1e-6)


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("linear", without_the_tail, "17x77: an error"),
        ("silu_and_mul", of_a_wrong_stride, "an error"),
        ("paged_attention", masked_one_off, "an error|nan"),
        ("rms_norm", summed_by_batch, "a row alone"),
        ("experts", of_the_next_expert, "w8a8: an error"),
        ("argmax", lambda logits: (logits.amax(1), logits.argmin(1)), "other integers"),
    ],
)
def test_a_planted_defect_is_found(name: str, wrong: Callable[..., Any], said: str) -> None:
    cases = [case for case in check.cases(name) if case.label in ("float32 17x77", "soft cap", "odd", "ties", "w8a8")]
    found = [check.disagreement(name, wrong, CPU, torch.float32, case) for case in cases]
    assert any(re.search(said, text) for text in found), found
    assert not any(check.disagreement(name, kernel(name), CPU, torch.float32, case) for case in cases)


def experts_case(label: str) -> tuple[Any, ...]:
    return next(case.args for case in check.cases("experts") if case.label == label)


def test_experts_of_one_form_are_one_launch_and_an_id_that_is_none_makes_its_row_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def one_by_one(*args: Any) -> Any:
        raise RuntimeError("one by one")

    monkeypatch.setattr(moe, "over_experts", one_by_one)
    x, ids, weights, experts = experts_case("w8a8")
    y = moe.experts(x, ids, weights, experts)
    for wrong in (-1, 5, 1 << 40):
        spoiled = moe.experts(x, ids.index_fill(1, torch.tensor([1]), wrong), weights, experts)
        assert spoiled.isnan().all(), "both slots are added"
    some = ids.clone()
    some[3, 0] = 5
    spoiled = moe.experts(x, some, weights, experts)
    assert spoiled[3].isnan().all() and torch.equal(spoiled[[0, 1, 2, 4]], y[[0, 1, 2, 4]])
    with pytest.raises(RuntimeError, match="one by one"):
        moe.experts(*experts_case("of several kinds"))


def test_experts_have_the_bits_of_their_linear_layers() -> None:
    for label in ("bfloat16", "w4a16 with zeros", "w4a8 in two levels"):
        x, ids, weights, experts = experts_case(label)
        apart = [partial(one_expert, *pair) for pair in zip(experts.gate_up, experts.down, strict=True)]
        assert torch.equal(moe.experts(x, ids, weights, experts), moe.over_experts(x, ids, weights, apart, 64)), label


def one_expert(gate_up: Any, down: Any, rows: torch.Tensor) -> torch.Tensor:
    return gemm.linear(elementwise.silu_and_mul(gemm.linear(rows, gate_up)), down)


def test_a_kernel_that_disagrees_is_left_out_and_the_finding_is_kept(tmp_path: Path, caplog: Any) -> None:
    calls = []

    def wrong(logits: torch.Tensor) -> Any:
        calls.append(1)
        return logits.amax(1), logits.argmin(1)

    kernels = {"argmax": wrong, "log_softmax": vocabulary.log_softmax}
    used, refused = check.agreeing(kernels, CPU, tmp_path)
    assert list(used) == ["log_softmax"] and "other integers" in refused["argmax"] and calls
    assert "argmax" in caplog.text and "please report" in caplog.text
    calls.clear()
    again = check.agreeing(kernels, CPU, tmp_path)
    assert again == (used, refused) and not calls, "found once"
    assert TritonBackend(used, "a test asked for it").source("argmax") == "PyTorch"


def test_a_kernel_is_compared_in_a_process_of_its_own() -> None:
    tasks = check.tasks_of(["argmax"], [torch.float32])
    unknown = check.Task("unknown", 0, torch.float32)
    found = check.found_by_several([tasks[0], unknown, tasks[0]._replace(dtype=torch.bfloat16)], CPU)
    assert found.pop(unknown) == "its process ended with 1: KeyError: 'unknown'"
    assert list(found.values()) == ["", ""], "the others are compared in another process"


def test_a_process_that_ends_badly_after_its_answers_says_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = check.tasks_of(["argmax"], [torch.float32, torch.bfloat16])
    monkeypatch.setattr(check, "_CHILD", check._CHILD + "\nimport os\nos._exit(3)\n")
    assert check.found_apart(tasks, CPU) == dict.fromkeys(tasks, "")
    differs = "found = disagreement("
    monkeypatch.setattr(
        check, "_CHILD", check._CHILD.replace(differs, "found = dtype if 'b' in dtype else disagreement(")
    )
    assert check.found_apart([*reversed(tasks)], CPU) == {tasks[1]: "bfloat16", tasks[0]: ""}


def test_decode_steps_are_padded_to_few_sizes() -> None:
    own = TritonBackend({}, "a test asked for it")
    sizes = {rows: own.step_sizes(rows * 2, rows, 2) for rows in (1, 3, 9, 70, 256, 257)}
    assert {rows: size[0][0].rows for rows, size in sizes.items() if size} == {1: 1, 3: 4, 9: 16, 70: 80, 256: 256}
    assert sizes[3][0] == (StepSize(tokens=8, rows=4, tokens_per_row=2), 1), "recorded when it comes again"
    assert own.step_sizes(256 * 3, 256, 3) == ()
    assert own.step_sizes(70, 3, 0) == [(StepSize(128, 8, is_whole=True), 1)]
    assert own.step_sizes(1025, 3, 0) == own.step_sizes(100, 65, 0) == ()
    assert not own.records, "there are no graphs on a CPU"


# --- Arithmetic. ---


@triton.jit
def convert(x, codes, values, halves, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    value = tl.load(x + at)
    stored = language.float8_codes(value)
    tl.store(codes + at, stored)
    tl.store(values + at, language.from_float8(stored))
    tl.store(halves + at, language.rounded(value, tl.bfloat16))


def test_rounding_is_that_of_pytorch() -> None:
    ties = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, 17.0, 19.0, 2**-10, 3 * 2**-10, -0.0, 447.9, 465.0, -1e9])
    x = torch.cat([ties, torch.randn(246) * torch.logspace(-4, 3, 246)])
    codes, values, halves = torch.zeros(256, dtype=torch.int8), torch.zeros(256), torch.zeros(256).bfloat16()
    convert[(1,)](x, codes, values, halves, COUNT=256)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(values, expected.float()) and torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(halves, x.bfloat16())
    assert not torch.equal(halves, (x.view(torch.int32) >> 16 << 16).view(torch.float32).bfloat16()), "cut, not rounded"


@triton.jit
def small_product(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tile = tl.load(x + at[:, None] * SIZE + at[None, :])
    tl.store(y + at[:, None] * SIZE + at[None, :], language.dot(tile, tile, tl.zeros((SIZE, SIZE), tl.float32)))


def test_a_tile_that_a_gpu_would_refuse_is_refused_here() -> None:
    x, y = torch.randn(16, 16), torch.zeros(16, 16)
    small_product[(1,)](x, y, SIZE=16)
    torch.testing.assert_close(y, x @ x)
    with pytest.raises(Exception, match=r"static_assert|Assertion"):
        small_product[(1,)](x, y, SIZE=8)


# --- Through the engine. ---


class TritonPlatform(CpuPlatform):
    name = "triton"
    kind = PlatformEnum.OOT
    dispatch_key = "oot"

    def get_backend_cls(self) -> str:
        return "llm.kernels.triton.backend.TritonBackend"


PARAMS = SamplingParams(temperature=0, max_tokens=2, logprobs=1, ignore_eos=True)


def answers(opened: LLM, prompts: Any) -> list[Any]:
    return [
        (output.outputs[0].token_ids, [entry.logprob for each in output.outputs[0].logprobs for entry in each.values()])
        for output in run(opened, prompts, PARAMS)
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        pytest.param("llama", {"quantization": "w8a8", "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("llama", {"quantization": "w4a16"}, marks=pytest.mark.slow),
        pytest.param("gemma2-caps", {}, marks=pytest.mark.slow),
        pytest.param("mixtral", {}, marks=pytest.mark.slow),
        pytest.param("qwen3-next", {}, marks=pytest.mark.slow),
        pytest.param("mamba2", {}, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", {}, marks=pytest.mark.slow),
        pytest.param("qwen3-next", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_engine_on_these_kernels_answers_as_the_cpu_and_alone_as_in_a_batch(
    name: str,
    options: dict[str, Any],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llm.platforms, "BUILTIN", (*llm.platforms.BUILTIN, TritonPlatform))
    folder, row = tiny_checkpoint(name, tmp_path_factory), TINY_MODELS[name]
    is_slow = "slow" in request.node.keywords
    prompts = [{"prompt_token_ids": ids} for ids in make_prompts(row)[1 : 4 if is_slow else 3]]
    arguments = {"max_model_len": 64, "skip_tokenizer_init": True, **row.engine, **options}
    with open_llm(str(folder), device="cpu", **arguments) as opened:
        expected = tokens(run(opened, prompts, PARAMS))
    with open_llm(str(folder), device="triton", **arguments) as opened:
        assert "triton kernel" in str(opened.explain())
        together = answers(opened, prompts)
        assert [own for own, _ in together] == expected
        assert answers(opened, prompts[-1:]) == together[-1:], "alone"
    if is_slow:
        with open_llm(str(folder), device="triton", max_num_batched_tokens=7, max_num_seqs=2, **arguments) as opened:
            assert answers(opened, prompts) == together, "in chunks"


def test_what_pytorch_computes_element_by_element_leaves_a_model_invariant(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GELU and its kin have no kernel here."""
    monkeypatch.setattr(llm.platforms, "BUILTIN", (*llm.platforms.BUILTIN, TritonPlatform))
    folder = str(tiny_checkpoint("gpt2", tmp_path_factory))
    arguments = {"max_model_len": 64, "skip_tokenizer_init": True, "device": "triton", **TINY_MODELS["gpt2"].engine}
    with open_llm(folder, **arguments) as opened:
        assert opened.config.invariant, opened.config.reasons["invariant"]
    monkeypatch.setattr(TritonBackend, "exact", TritonBackend.exact - {"gelu_new"})
    with open_llm(folder, **arguments) as opened:
        assert not opened.config.invariant


class Anew:
    """Stands for a graph: what it would replay is computed anew, into the memory of the first results."""

    refusal = ""

    def __init__(self, compute: Callable[[int], Any], tokens: int) -> None:
        self._compute, self.results = compute, compute(tokens)

    def run(self, tokens: int = 0) -> Any:
        for target, source in zip(self.results, self._compute(tokens), strict=True):
            target.copy_(source)
        return [item[:tokens] for item in self.results] if tokens else self.results


def test_padded_prompts_have_the_bits_of_prompts(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, beside rows that decode, after other prompts of the same size."""
    sizes: list[StepSize] = []

    def record(self: Any, compute: Any, tokens: int = 0, size: Any = None, fill: Any = None) -> Anew:
        if fill is not None:
            sizes.append(size)
            fill(0)
            compute(tokens)
            fill(tokens)
        return Anew(compute, tokens)

    monkeypatch.setattr(llm.platforms, "BUILTIN", (*llm.platforms.BUILTIN, TritonPlatform))
    monkeypatch.setattr(TritonBackend, "record", record)
    monkeypatch.setattr(backend, "_PROMPT_TOKENS", (16,))
    folder, row = tiny_checkpoint("llama", tmp_path_factory), TINY_MODELS["llama"]
    prompts = [{"prompt_token_ids": [(7 * i + at) % 50 for at in range(count)]} for i, count in enumerate((9, 12))]
    arguments = {"max_model_len": 64, "skip_tokenizer_init": True, "max_num_batched_tokens": 16, **row.engine}
    with open_llm(str(folder), device="triton", enable_prefix_caching=False, **arguments) as opened:
        expected = answers(opened, prompts)
        runner: Any = engine_of(opened).runner
        monkeypatch.setattr(runner.backend, "records", True)
        runner.recorded = runner._new_recorded()
        for some in (prompts, prompts):
            assert answers(opened, some) == [expected[prompts.index(prompt)] for prompt in some]
        assert {size.tokens for size in sizes if size.is_whole} == {16}
        assert runner.recorded.refusal is None and runner.recorded.any_size_refusal is None
        for step in runner.recorded._any_size.values():
            assert len(step.inputs._metadata[0].query_start_loc) == 9 and step.recording.results[0].isfinite().all()
