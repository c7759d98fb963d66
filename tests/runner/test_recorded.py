"""Decoding steps that are recorded and repeated: the same bits as operation by operation, and nothing is left out."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import pytest
import torch
from drafts import FakeProposer, Recorder, drafting
from embedded import engine_of, open_llm, python, run
from kernel_sets import ISAS, has_kernels, kernel_set, needs_compiler
from tiny_models import TINY_MODELS, make_prompts, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.base import watch
from llm.kernels.backend import OPERATIONS, Backend, NotRecordable, Recording, StepSize
from llm.kernels.cpu.program import record
from llm.layers.attention import PagedAttention
from llm.layers.linear import LinearBase
from llm.layers.norm import RMSNorm
from llm.models.decoder import layer as decoder_layer
from llm.models.llama import LlamaForCausalLM
from llm.quantization.base import PackedLinearMethod
from llm.runner import recorded as replay

pytestmark = [needs_compiler, pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")]
KERNELS = kernel_set(ISAS[-1]) if has_kernels() else None
PROMPT_TEXTS = ["In the beginning God created the heaven and the earth.", "And Moses said unto the people,"]
PROMPTS = [[5, 300, 301, 17], [7, 8], [9], list(range(100, 141))]


def params(tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, logprobs=3, ignore_eos=True, **{"temperature": 0, **fields})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(block_size=4) as opened:
        yield opened


def replays(llm: LLM) -> Any:
    runner: Any = engine_of(llm).runner
    return runner.recorded


def key_of(rows: int, lines: int = 1) -> Any:
    return StepSize(rows * lines, rows, lines, torch.get_num_threads()), False, False


def answers(llm: LLM, prompts: list[list[int]], wanted: Any) -> list[tuple[Any, Any]]:
    outputs = run(llm, prompts, wanted)
    return [
        (item.token_ids, [[entry.logprob for entry in position.values()] for position in item.logprobs])
        for output in outputs
        for item in output.outputs
    ]


def eagerly(llm: LLM, *arguments: Any) -> list[tuple[Any, Any]]:
    runner: Any = engine_of(llm).runner
    kept, runner.recorded = runner.recorded, None
    try:
        return answers(llm, *arguments)
    finally:
        runner.recorded = kept


def test_repeated_steps_give_the_bits_of_computed_ones(llm: LLM) -> None:
    """Rows that leave one by one: every number of rows is recorded and repeated, over block boundaries."""
    wanted = [params(6), params(12, temperature=1.0, seed=3), params(24), params(30)]
    expected = eagerly(llm, PROMPTS, wanted)
    assert answers(llm, PROMPTS, wanted) == expected
    assert replays(llm).refusal is None
    assert set(replays(llm)._steps) == {key_of(rows) for rows in (1, 2, 3, 4)}
    assert answers(llm, PROMPTS, wanted) == expected
    assert answers(llm, PROMPTS[::-1], wanted[::-1]) == expected[::-1]


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_static", "w8a16", "w4a8", "w4a16"])
def test_steps_of_quantized_models_are_repeated(scheme: str) -> None:
    calibration = PROMPT_TEXTS if scheme == "w8a8_static" else None
    with open_llm(quantization=scheme, calibration=calibration) as quantized:
        expected = eagerly(quantized, PROMPTS, params(6))
        assert answers(quantized, PROMPTS, params(6)) == expected
        assert replays(quantized).refusal is None
        assert replays(quantized)._steps


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_steps_with_k_lines_per_row_are_repeated(llm: LLM, kind: str) -> None:
    """Every row with as many drafts: recorded for (rows, lines); with unequal numbers nothing is."""
    wanted = [params(25), params(25, temperature=1.0, seed=3)]
    with drafting(llm, recorder := Recorder()):
        expected = eagerly(llm, PROMPTS[:2], wanted)
    replays(llm)._steps.clear()
    vocab = llm.config.model_config.vocab_size
    with drafting(llm, FakeProposer(kind, recorder.answers, vocab, most=3)):
        assert answers(llm, PROMPTS[:2], wanted) == expected
        assert key_of(2, 4) in replays(llm)._steps
        assert eagerly(llm, PROMPTS[:2], wanted) == expected
    replays(llm)._steps.clear()
    with drafting(llm, OneRowDrafts("wrong", recorder.answers, vocab, most=3)):
        assert answers(llm, PROMPTS[:2], wanted) == expected
    assert {size.tokens_per_row for size, *_ in replays(llm)._steps} <= {1}


class OneRowDrafts(FakeProposer):
    def _draft(self, batch: Any, row: int) -> list[int]:
        return [] if row else super()._draft(batch, row)


def test_a_prompt_s_chunks_are_no_lines(llm: LLM) -> None:
    """Of equal lengths, one after the other: they are not recorded, and what was is kept."""
    replays(llm)._steps.clear()
    for index in range(4):
        answers(llm, [[index, 5, 6]], params(1))
    assert not replays(llm)._steps


def test_recording_imports_no_compiler() -> None:
    script = (
        "import sys; from llm import LLM, SamplingParams; llm = LLM();"
        "llm.generate('In', SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False);"
        "print(len(llm._engine.runner.recorded._steps), 'torch._dynamo' in sys.modules)"
    )
    done = python("-c", script)
    assert done.stdout.split() == ["1", "False"], done.stderr


def test_memory_of_what_was_let_go_is_used_again(llm: LLM) -> None:
    answers(llm, PROMPTS, params(8))
    program = replays(llm)._steps[key_of(4)].recording.program
    layers = len(engine_of(llm).runner.states)
    assert len(program) > 4 * layers
    assert program._pool.made < 15


def test_no_more_than_a_few_steps_are_kept(llm: LLM) -> None:
    for rows in range(1, Backend.most_recordings + 4):
        answers(llm, [[rows, index] for index in range(rows)], params(5))
    assert len(replays(llm)._steps) == Backend.most_recordings


def test_what_a_repeated_kernel_refuses_is_an_error(llm: LLM) -> None:
    """A token id out of range cannot come from a request; a defect that makes one is not passed over."""
    answers(llm, PROMPTS[:1], params(8))
    step = replays(llm)._steps[key_of(1)]
    assert step.recording.run(1) is not None
    with torch.inference_mode():
        step.inputs._input_ids.fill_(10**6)
    assert step.recording.run(1) is None


def test_bfloat16_weights_with_biases_are_repeated_as_computed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Biases and scales must be as the kernels read them: a conversion in every step would keep it from recording."""
    folder = tiny_checkpoint("qwen2-bf16", tmp_path_factory)
    prompts = make_prompts(TINY_MODELS["qwen2-bf16"])
    for quantization in (None, "w8a8"):
        with LLM(folder, skip_tokenizer_init=True, quantization=quantization, max_model_len=60) as opened:
            expected = eagerly(opened, prompts, params(9))
            assert answers(opened, prompts, params(9)) == expected
            assert replays(opened).refusal is None and replays(opened)._steps


# What may happen between kernels while a step is recorded


def recorded(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
    assert KERNELS is not None
    with torch.inference_mode(), record(KERNELS.library) as program:
        out = compute(x)
    program.kept.append(out)
    return program, out


def op(name: str) -> Any:
    assert KERNELS is not None
    return KERNELS.op(name)


def test_a_program_reads_what_is_in_its_inputs_now() -> None:
    x = torch.randn(3, 64)
    program, out = recorded(lambda x: op("gelu_new")(op("silu_and_mul")(x).view(-1, 16)), x)
    assert len(program) == 2
    x.copy_(torch.randn(3, 64))
    assert program.run()
    assert torch.equal(out, op("gelu_new")(op("silu_and_mul")(x).view(-1, 16)))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, y: x + y,
        lambda x, y: x * 0.3,
        lambda x, y: (x * 1e30) * 1e30 + y,
        lambda x, y: x[:, 3:19].contiguous(),
        lambda x, y: x.view(3, 4, 16)[:, 1:].contiguous(),
        lambda x, y: torch.cat((x, y[:, :5].contiguous()), dim=-1),
        lambda x, y: torch.cat((x[:, 7:20], y.new_ones(3, 1)), dim=-1),
        lambda x, y: x[:, 3:19] * y[:, 5:6],
        lambda x, y: x * y[:, :1] + torch.ones_like(x),
        lambda x, y: x[:, 3:19] + y[:, 5:21],
        lambda x, y: x + 0.7,
        lambda x, y: x.clamp(-0.3, 0.4) + y.clamp(max=0.1),
    ],
)
def test_sums_and_products_between_kernels_keep_their_bits(compute: Callable[..., torch.Tensor]) -> None:
    """They are repeated by kernels of their own."""
    x, y = torch.randn(3, 64), torch.randn(3, 64)
    program, out = recorded(lambda x: compute(x, y), x)
    assert len(program)
    x.copy_(torch.randn(3, 64))
    y.copy_(torch.randn(3, 64))
    assert program.run()
    assert torch.equal(out, compute(x, y))


def test_positions_are_shifted_in_a_program() -> None:
    positions = torch.arange(5)
    program, out = recorded(lambda positions: positions + 2, positions)
    positions += 7
    assert program.run() and torch.equal(out, positions + 2)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.bfloat16(),
        lambda x: x.double(),
        lambda x: x[:, ::2].contiguous(),
        lambda x: x[:, :5].reshape(-1),
        lambda x: x.clone(),
        lambda x: torch.cat((x, x)),
        lambda x: torch.empty(3).copy_(x[:, 0]),
        lambda x: x.mul_(2),
        lambda x: torch.full((2,), float(x[0, 0])),
    ],
)
def test_what_is_no_kernel_cannot_be_recorded(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(NotRecordable):
        recorded(compute, torch.randn(3, 64))
    assert KERNELS is not None and KERNELS.library.recorder is None


def test_finalizers_of_garbage_are_no_part_of_a_step() -> None:
    class Computes:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            torch.ones(3).add_(1)

    def compute(x: torch.Tensor) -> torch.Tensor:
        Computes()
        kept = [[index] for index in range(10)]  # more objects than the threshold: they would be collected
        return x.view(-1)[: len(kept)]

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        recorded(compute, torch.randn(3, 64))
    finally:
        gc.set_threshold(*threshold)
    assert gc.isenabled()


@pytest.mark.parametrize(
    "compute",
    [lambda x: x.float(), lambda x: x[1:].view(-1), lambda x: x.split(3, dim=-1)[0], lambda x: x.contiguous()],
)
def test_views_can(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert recorded(compute, torch.randn(3, 64))[1].numel()


def divide_by_one(model_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the class had been written so, which is no patch."""
    forward = model_class.forward
    monkeypatch.setattr(model_class, "forward", lambda self, batch: forward(self, batch) / 1.0)
    monkeypatch.setattr(watch._Patches, "of_classes", {})


def test_a_model_that_computes_between_kernels_runs_as_before(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = eagerly(llm, PROMPTS, params(6))
    with open_llm(block_size=4) as other:
        divide_by_one(type(engine_of(other).runner.model), monkeypatch)
        assert answers(other, PROMPTS, params(6)) == expected
        assert "div" in replays(other).refusal and not replays(other)._steps


def test_a_step_that_cannot_be_recorded_changes_recurrent_states_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompts = tiny_checkpoint("mamba", tmp_path_factory), make_prompts(TINY_MODELS["mamba"])[:2]
    with open_llm(folder, skip_tokenizer_init=True, max_model_len=128) as opened:
        expected = eagerly(opened, prompts, params(6))
        divide_by_one(type(engine_of(opened).runner.model), monkeypatch)
        assert answers(opened, prompts, params(6)) == expected
        assert "div" in replays(opened).refusal


@pytest.mark.parametrize("kind", ["forward hook", "pre-hook", "replaced forward"])
def test_hooks_of_the_user_see_every_step(llm: LLM, kind: str) -> None:
    model: Any = engine_of(llm).runner.model
    run(llm, [PROMPTS[0]], params(8))  # recorded before the hook is there
    norm, calls = model.model.norm, []
    if kind == "forward hook":
        remove = norm.register_forward_hook(lambda *_: calls.append(1)).remove
    elif kind == "pre-hook":
        remove = norm.register_forward_pre_hook(lambda *_: calls.append(1)).remove
    else:
        forward = norm.forward
        norm.forward = lambda *args: (calls.append(1), forward(*args))[1]

        def remove() -> None:
            del norm.forward

    run(llm, [PROMPTS[0]], params(8))
    assert len(calls) == 8
    remove()
    run(llm, [PROMPTS[0]], params(8))
    assert len(calls) == 8


# --- Patches: what is set on a class or an object runs in every step. ---

TOKENS = 8


def counted(function: Any, calls: list[int]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return call


def of_a_class(cls: Any, name: str) -> Callable[[Any, pytest.MonkeyPatch, list[int]], None]:
    return lambda model, monkeypatch, calls: monkeypatch.setattr(cls, name, counted(getattr(cls, name), calls))


def of_the_model(find: Callable[[Any], Any], name: str) -> Callable[[Any, pytest.MonkeyPatch, list[int]], None]:
    def patch(model: Any, monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
        target = find(model)
        monkeypatch.setattr(target, name, counted(getattr(target, name), calls))

    return patch


def other_method(model: Any, monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    layer = model.model.layers[0].mlp.down_proj
    method = copy(layer.quant_method)
    method.apply = counted(method.apply, calls)
    monkeypatch.setattr(layer, "quant_method", method)


LAYERS = 4  # of the embedded model
CLASSES = {
    "a layer's forward": (of_a_class(RMSNorm, "forward"), 2 * LAYERS + 1),
    "a function that forward calls": (of_a_class(LinearBase, "_multiply"), 4 * LAYERS),
    "attention": (of_a_class(PagedAttention, "attend"), LAYERS),
    "the model": (of_a_class(LlamaForCausalLM, "compute_logits"), 1),
    "all methods": (of_a_class(PackedLinearMethod, "apply"), 4 * LAYERS + 1),
    "a function of a module": (of_a_class(decoder_layer, "add_norm"), LAYERS),
    "every module": (of_a_class(torch.nn.Module, "__call__"), None),
}
OBJECTS = {
    "a live layer's method": (of_the_model(lambda model: model.model.layers[0].mlp.down_proj.quant_method, "apply"), 1),
    "another method": (other_method, 1),
    "a layer's bound method": (of_the_model(lambda model: model.model.norm, "_forward_method"), 1),
    "a backend": (of_the_model(lambda model: model.model.layers[1].self_attn.attn.backend, "attend"), 1),
}


def steps_of(opened: LLM) -> None:
    run(opened, [PROMPTS[0]], params(TOKENS))


@pytest.mark.parametrize("name", [*CLASSES, *OBJECTS])
def test_a_patch_after_the_first_call_runs_in_every_step(name: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        steps_of(llm)
    assert replays(llm)._steps
    patch, per_step = {**CLASSES, **OBJECTS}[name]
    calls: list[int] = []
    patch(engine_of(llm).runner.model, monkeypatch, calls)
    for times in (1, 2):
        steps_of(llm)
        assert len(calls) == times * TOKENS * per_step if per_step else len(calls) > times * TOKENS
    monkeypatch.undo()
    calls.clear()
    before = dict(replays(llm)._steps)
    steps_of(llm)
    assert not calls and replays(llm)._steps == before  # recorded ones again


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "every module"])
def test_a_class_patched_before_loading_runs_in_every_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, per_step = CLASSES[name]
    calls: list[int] = []
    patch(None, monkeypatch, calls)
    with open_llm(block_size=4) as opened:
        calls.clear()
        for times in (1, 2):
            steps_of(opened)
            assert len(calls) == times * TOKENS * per_step
        [part] = [part for part in opened.explain().parts if part.kind == "patch"]
        assert part.name.endswith(("forward", "_multiply", "attend", "compute_logits", "apply", "add_norm"))
        assert __name__ in part.reason and "steps are not recorded" in part.reason


class Around(torch.nn.Module):
    """Whose class counts nothing, as those of other libraries."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Any:
        return self.inner(*inputs)


def around_the_norm(model: Any) -> None:
    model.model.norm = Around(model.model.norm)


def test_functions_of_any_class_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(block_size=4) as opened:
        opened.apply_model(around_the_norm)
        for _ in range(2):
            steps_of(opened)
        assert replays(opened)._steps
        calls: list[int] = []
        monkeypatch.setattr(Around, "forward", counted(Around.forward, calls))
        steps_of(opened)
        assert len(calls) == TOKENS


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek-v2", "mamba2", "qwen3-next", "gemma3", "lfm2"])
def test_what_is_built_in_is_not_taken_for_patched(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with open_llm(tiny_checkpoint(name, tmp_path_factory), skip_tokenizer_init=True, max_model_len=128) as opened:
        model: Any = engine_of(opened).runner.model
        assert not watch.is_watched(model.modules())
        steps = watch.Watch(model.modules())
        assert not any(steps() for _ in range(5))


# --- A backend that records as graphs of a GPU are: in few sizes, padded, after a warm-up, whatever computes. ---


class Graph:
    """Computes anew into the memory of the first results."""

    refusal = ""

    def __init__(self, compute: Callable[[int], Sequence[torch.Tensor]], tokens: int) -> None:
        self._compute = compute
        self.results = [item.clone() for item in compute(tokens)]

    def run(self, tokens: int = 0) -> Sequence[torch.Tensor]:
        for target, source in zip(self.results, self._compute(tokens), strict=True):
            target.copy_(source)
        return [item[:tokens] for item in self.results]


class GraphBackend(Backend):
    name, records, records_kernels_only = "graphs", True, False

    def __init__(self, inner: Backend) -> None:
        super().__init__({name: inner.op(name) for name in OPERATIONS}, "a test asked for it")
        self.sizes: list[StepSize] = []
        self.warmed_up = 0

    def step_sizes(self, tokens: int, rows: int, tokens_per_row: int) -> Sequence[tuple[StepSize, int | None]]:
        size = 1 << (rows - 1).bit_length()
        return [(StepSize(size * tokens_per_row, size, tokens_per_row), 0)] if tokens_per_row else []

    def record(
        self,
        compute: Callable[[int], Sequence[torch.Tensor]],
        tokens: int = 0,
        size: StepSize | None = None,
        fill: Callable[[int], None] | None = None,
    ) -> Recording:
        if size is not None and fill is not None:
            self.sizes.append(size)
            fill(0)
            compute(0)
            self.warmed_up += 1
            fill(tokens)
        return Graph(compute, tokens)


@contextmanager
def graphs(llm: LLM) -> Iterator[GraphBackend]:
    runner: Any = engine_of(llm).runner
    kept = runner.backend, runner.recorded
    runner.backend = GraphBackend(kept[0])
    runner.recorded = runner._new_recorded()
    try:
        yield runner.backend
    finally:
        runner.backend, runner.recorded = kept


WANTED = [params(6), params(12, temperature=1.0, seed=3), params(24), params(30)]


@pytest.mark.parametrize("name", ["llama", "mamba2", "qwen3-next"])
def test_padded_sizes_give_the_bits_of_computed_steps(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rows that leave one by one: the places of those that have left are padding, which changes nobody's state."""
    folder = tiny_checkpoint(name, tmp_path_factory)
    prompts = [[token % 50 for token in prompt] for prompt in PROMPTS]
    with open_llm(folder, skip_tokenizer_init=True, block_size=4, max_model_len=128) as opened:
        expected = eagerly(opened, prompts, WANTED)
        with graphs(opened) as backend:
            for _ in range(2):
                assert answers(opened, prompts, WANTED) == expected
            assert {size.rows for size in backend.sizes} == {1, 2, 4}, "three rows are padded to four"
            assert backend.warmed_up == len(backend.sizes) == 3
            four = next(step for (size, *_), step in replays(opened)._steps.items() if size.rows == 4)
            assert four.inputs._input_ids[3] == four.inputs._positions[3] == 0
            for metadata in four.inputs._metadata:
                table = getattr(metadata, "block_table", None)
                where = metadata.slots if table is None else metadata.slot_mapping
                assert where[3] == 0 and metadata.seq_lens[3] == 1 and (table is None or not table[3].any())


def test_padded_steps_with_drafts(llm: LLM) -> None:
    wanted, prompts = [params(25), params(25, temperature=1.0, seed=3), params(25)], PROMPTS[:3]
    with drafting(llm, recorder := Recorder()):
        expected = eagerly(llm, prompts, wanted)
    vocab = llm.config.model_config.vocab_size
    with graphs(llm) as backend, drafting(llm, FakeProposer("right", recorder.answers, vocab, most=3)):
        assert answers(llm, prompts, wanted) == expected
        assert StepSize(16, 4, 4) in backend.sizes


def test_steps_that_cannot_be_recorded_are_computed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = eagerly(llm, PROMPTS, WANTED)
    with graphs(llm) as backend, monkeypatch.context() as patch:
        record = backend.record

        def heads_refused(*args: Any) -> Recording:
            if len(args) == 2:
                raise NotRecordable("a head")
            return record(*args)

        patch.setattr(backend, "record", heads_refused)
        assert answers(llm, PROMPTS, WANTED) == expected and replays(llm)._steps
        assert all(step.head is None for step in replays(llm)._steps.values())
    with graphs(llm) as backend, monkeypatch.context() as patch:
        patch.setattr(replay.StepInputs, "batch", lambda self, batch, tokens: list(self._metadata[0].seq_lens_list))
        assert answers(llm, PROMPTS, WANTED) == expected
        assert replays(llm).refusal == "an operation of this model reads the lengths of rows on the host"


def test_padding_that_is_left_out_is_seen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: rows that have left go on writing where their blocks were."""
    copy_all = replay._copy
    monkeypatch.setattr(replay, "_copy", lambda target, source, count, *_: copy_all(target, source, count, False))
    with graphs(llm):
        answers(llm, PROMPTS, WANTED)
        four = next(step for (size, *_), step in replays(llm)._steps.items() if size.rows == 4)
        assert four.inputs._metadata[0].slot_mapping[3] != 0
