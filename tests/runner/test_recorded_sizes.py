"""One recording for steps of any number of tokens: prompts, chunks of prompts and mixed batches keep their bits."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from embedded import engine_of, open_llm, run
from kernel_sets import ISAS, has_kernels, kernel_set, needs_compiler
from tiny_models import VOCAB, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.forward import ForwardBatch, RecurrentMetadata
from llm.kernels.backend import NotRecordable
from llm.kernels.cpu.backend import MOST_TOKENS
from llm.kernels.cpu.program import AnySize, record
from llm.runner.recorded import RecordedSteps

pytestmark = [needs_compiler, pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")]
KERNELS = kernel_set(ISAS[-1]) if has_kernels() else None
PARAMS = SamplingParams(max_tokens=3, logprobs=3, ignore_eos=True, temperature=0)
MOST = 24


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(block_size=4, enable_prefix_caching=False) as opened:
        yield opened


def recorded_of(llm: LLM) -> Any:
    runner: Any = engine_of(llm).runner
    return runner.recorded


def numbers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    found: list[Any] = []
    for output in run(llm, prompts, PARAMS):
        (item,) = output.outputs
        found += [item.token_ids, [[entry.logprob for entry in position.values()] for position in item.logprobs]]
    return found


def eagerly(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    runner: Any = engine_of(llm).runner
    kept, runner.recorded = runner.recorded, None
    try:
        return numbers(llm, prompts)
    finally:
        runner.recorded = kept


@pytest.fixture
def replayed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the steps that the one recording served."""
    run(llm, [list(range(9, 40))], SamplingParams(max_tokens=1, temperature=0))
    seen: list[int] = []
    (step,) = recorded_of(llm)._any_size.values()
    program = step.recording.program
    run_program = program.run

    def run_and_note(tokens: int, *places: Any) -> bool:
        seen.append(tokens)
        assert run_program(tokens, *places), "a kernel refused its arguments"
        return True

    monkeypatch.setattr(program, "run", run_and_note)
    return seen


def test_steps_of_every_size_have_the_bits_of_computed_ones(llm: LLM, replayed: list[int]) -> None:
    draw = random.Random(0)
    for rows in (1, 1, 2, 5, 11):
        prompts = [[draw.randrange(9, 300) for _ in range(draw.choice((1, 2, 7, 40, 90)))] for _ in range(rows)]
        assert numbers(llm, prompts) == eagerly(llm, prompts)
    numbers(llm, [[9] * (MOST_TOKENS + 1)])
    assert len(set(replayed)) > 4 and min(replayed) > 1 and max(replayed) <= MOST_TOKENS
    assert recorded_of(llm).any_size_refusal is None and len(recorded_of(llm)._any_size) == 1


def test_a_step_that_computes_too_few_tokens_is_seen(llm: LLM, replayed: list[int]) -> None:
    """The control of the test above."""
    prompt = [list(range(50, 90))]
    expected = eagerly(llm, prompt)
    (step,) = recorded_of(llm)._any_size.values()
    factors = step.recording.program._factors
    factors[-1] -= 1  # the last norm's rows
    assert numbers(llm, prompt) != expected
    factors[-1] += 1
    assert numbers(llm, prompt) == expected


@pytest.mark.parametrize("name", ["mamba", "mamba2", "lfm2", "granitemoehybrid", "qwen3-next"])
def test_prompts_change_recurrent_states_as_computed_ones_do(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rows that leave their slots to others, prompts in chunks, and decoding rows beside prompts."""
    folder, draw = tiny_checkpoint(name, tmp_path_factory), random.Random(1)
    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    with open_llm(folder, skip_tokenizer_init=True, enable_prefix_caching=False, **sizes) as opened:
        for rows in (1, 2, 7):
            prompts = [[draw.randrange(VOCAB) for _ in range(draw.choice((1, 9, 40, 90)))] for _ in range(rows)]
            prompts[0] = (prompts[0] * 40)[:40]
            assert numbers(opened, prompts) == eagerly(opened, prompts)
        assert recorded_of(opened).any_size_refusal is None
        (step,) = recorded_of(opened)._any_size.values()
        # The control: each row in the slot of the one before.
        fill, (own,) = step.inputs.fill, [item for item in step.inputs._metadata if isinstance(item, RecurrentMetadata)]
        step.inputs.fill = lambda *given: (fill(*given), own.slots.copy_(own.slots.roll(1)))
        assert numbers(opened, prompts) != eagerly(opened, prompts)


def recorded_steps(forward: Callable[[ForwardBatch], Any], **options: Any) -> RecordedSteps:
    assert KERNELS is not None
    return RecordedSteps(torch.nn.Identity(), KERNELS, 4, forward, **options)


def test_steps_whose_states_are_not_to_see_drafts_are_not_recorded() -> None:
    """The states of the accepted ones are computed again, from what is not in a recording."""
    assert KERNELS is not None
    replay = recorded_steps(lambda batch: pytest.fail("it was computed"))
    counts = torch.zeros(2, dtype=torch.int32)
    states = RecurrentMetadata(counts[:1].long(), counts, counts[:1], [9], [9], stored=counts[:1])
    batch = ForwardBatch(torch.arange(9), torch.arange(9), [states], [], torch.tensor([8]))
    assert [replay.run(batch) for _ in range(3)] == [None] * 3
    states.stored = None
    alone = recorded_steps(lambda batch: pytest.fail("it was computed"), rolls_back=False)
    assert alone.run(batch) is None


def test_a_step_that_raises_while_it_is_recorded_is_not_computed_again() -> None:
    """Its states may have changed."""
    assert KERNELS is not None

    def forward(batch: ForwardBatch) -> torch.Tensor:
        raise RuntimeError("too late")

    counts = torch.tensor([0, 9], dtype=torch.int32)
    states = RecurrentMetadata(counts[:1].long(), counts, counts[1:], [9], [9])
    batch = ForwardBatch(torch.arange(9), torch.arange(9), [states], [], torch.tensor([8]))
    with pytest.raises(RuntimeError, match="too late"):
        recorded_steps(forward).run(batch)


def test_the_first_prompt_is_recorded_and_one_of_another_length_is_not() -> None:
    with open_llm(enable_prefix_caching=False) as opened:
        once = SamplingParams(max_tokens=1, temperature=0)
        run(opened, [list(range(9, 40))], once)
        (step,) = recorded_of(opened)._any_size.values()
        run(opened, [list(range(9, 30)), list(range(40, 90))], once)
        assert list(recorded_of(opened)._any_size.values()) == [step]


# Recording without running


def scaled(x: torch.Tensor) -> torch.Tensor:
    """A kernel that changes its argument."""
    assert KERNELS is not None
    result: torch.Tensor = KERNELS.op("scale")(x, 2.0)
    return result


def test_the_second_recording_runs_no_kernel() -> None:
    assert KERNELS is not None
    x = torch.ones(MOST, 64)
    with torch.inference_mode():
        with record(KERNELS.library, 9, MOST) as large:
            scaled(x[:9])
        with record(KERNELS.library, 5, MOST, like=large) as small:
            scaled(x[:5])
        assert x[:9].eq(2).all()
        assert AnySize(small, large).run(7)
        assert x[:7].eq(4).all() and x[7:9].eq(2).all()
        with record(KERNELS.library, 5, MOST):  # the control: a recording that runs them
            scaled(x[:5])
        assert x[:5].eq(8).all()


def test_a_recording_with_more_kernels_than_the_first_is_refused() -> None:
    assert KERNELS is not None
    x = torch.ones(MOST, 64)
    with torch.inference_mode():
        with record(KERNELS.library, 9, MOST) as large:
            silu(x[:9])
        with (
            pytest.raises(NotRecordable, match="kernels that are called"),
            record(KERNELS.library, 5, MOST, like=large),
        ):
            silu(silu(x[:5]))
    assert KERNELS.library.recorder is None


def test_another_thread_computes_while_one_records() -> None:
    assert KERNELS is not None
    x, found = torch.randn(MOST, 64), []
    expected = silu(x)
    with torch.inference_mode():
        with record(KERNELS.library, 9, MOST) as large:
            silu(x[:9])
        with record(KERNELS.library, 5, MOST, like=large) as small:
            thread = threading.Thread(target=lambda: found.append(silu(x)))
            thread.start()
            thread.join()
            silu(x[:5])
    assert torch.equal(found[0], expected)
    assert len(small) == 1 and len(small.counts) == 1


# What two recordings may differ in


def for_any_size(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, few: int, more: int) -> Any:
    assert KERNELS is not None
    programs = []
    with torch.inference_mode():
        for tokens in (few, more):
            with record(KERNELS.library, tokens, MOST) as program:
                out = compute(x[:tokens])
            programs.append(program)
    return AnySize(*programs), out


def silu(x: torch.Tensor) -> torch.Tensor:
    assert KERNELS is not None
    result: torch.Tensor = KERNELS.op("silu_and_mul")(x)
    return result


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: silu(silu(x) * 0.5),
        lambda x: silu(x.view(-1, 4, 16)[:, 1:].contiguous()).flatten(1),
        lambda x: silu(x) + torch.zeros(len(x), 32),
    ],
)
def test_a_program_runs_for_any_number_of_tokens(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(MOST, 64)
    program, out = for_any_size(compute, x, 3, 9)
    for tokens in (1, 2, 8, 20, MOST):
        x.copy_(torch.randn(MOST, 64))
        assert program.run(tokens)
        expected = compute(x[:tokens])
        assert torch.equal(out.as_strided(expected.shape, expected.stride()), expected)
    with pytest.raises(ValueError, match="at most 24"):
        program.run(MOST + 1)


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (lambda x: silu(x[len(x) // 2 :]), "multiple"),
        (lambda x: silu(silu(x)[1:]), "multiple"),
        (lambda x: silu(silu(x)[-1:]), "multiple"),
        (lambda x: silu(silu(x)[len(x) // 2 :]), "multiple"),
        (lambda x: silu(x) if len(x) < 5 else silu(silu(x)), "kernels that are called"),
        (lambda x: silu(x * (0.5 + len(x))), "multiple"),
        (lambda x: silu(torch.empty(len(x) ** 2, 8)), "tensor's size"),
    ],
)
def test_what_follows_the_number_of_tokens_otherwise_is_refused(
    compute: Callable[[torch.Tensor], torch.Tensor], why: str
) -> None:
    with pytest.raises(NotRecordable, match=why):
        for_any_size(compute, torch.randn(MOST, 64), 3, 9)
