"""One recording for steps of any number of tokens: prompts, chunks of prompts and mixed batches keep their bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from embedded import engine_of, open_llm, run
from kernel_sets import ISAS, has_kernels, kernel_set, needs_compiler

from llm import LLM, SamplingParams
from llm.engine.replay_sizes import MOST_TOKENS, SizedReplay
from llm.forward import ForwardBatch, RecurrentMetadata
from llm.kernels.backend import NotRecordable

pytestmark = [needs_compiler, pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")]
KERNELS = kernel_set(ISAS[-1]) if has_kernels() else None
PARAMS = SamplingParams(max_tokens=3, logprobs=3, ignore_eos=True, temperature=0)
MOST = 24


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(block_size=4, enable_prefix_caching=False) as opened:
        yield opened


def sizes_of(llm: LLM) -> Any:
    runner: Any = engine_of(llm).runner
    return runner.replay.sizes


def numbers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    found: list[Any] = []
    for output in run(llm, prompts, PARAMS):
        (item,) = output.outputs
        found += [item.token_ids, [[entry.logprob for entry in position.values()] for position in item.logprobs]]
    return found


def eagerly(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    runner: Any = engine_of(llm).runner
    kept, runner.replay = runner.replay, None
    try:
        return numbers(llm, prompts)
    finally:
        runner.replay = kept


@pytest.fixture
def replayed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the steps that the one recording served."""
    for _ in range(2):  # every token of a prompt with prompt_logprobs needs logits, as of a step with drafts
        run(llm, [list(range(9, 40))], SamplingParams(max_tokens=1, temperature=0))
    seen: list[int] = []
    (step,) = sizes_of(llm)._steps.values()
    run_program = step.program.run

    def run_and_note(tokens: int) -> bool:
        seen.append(tokens)
        assert run_program(tokens), "a kernel refused its arguments"
        return True

    monkeypatch.setattr(step.program, "run", run_and_note)
    return seen


def test_steps_of_every_size_have_the_bits_of_computed_ones(llm: LLM, replayed: list[int]) -> None:
    draw = random.Random(0)
    for rows in (1, 1, 2, 5, 11):
        prompts = [[draw.randrange(9, 300) for _ in range(draw.choice((1, 2, 7, 40, 90)))] for _ in range(rows)]
        assert numbers(llm, prompts) == eagerly(llm, prompts)
    numbers(llm, [[9] * (MOST_TOKENS + 1)])
    assert len(set(replayed)) > 4 and min(replayed) > 1 and max(replayed) <= MOST_TOKENS
    assert sizes_of(llm).refusal is None and len(sizes_of(llm)._steps) == 1


def test_a_step_that_computes_too_few_tokens_is_seen(llm: LLM, replayed: list[int]) -> None:
    """The control of the test above."""
    prompt = [list(range(50, 90))]
    expected = eagerly(llm, prompt)
    (step,) = sizes_of(llm)._steps.values()
    factors = step.program._factors
    factors[-1] -= 1  # the last norm's rows
    assert numbers(llm, prompt) != expected
    factors[-1] += 1
    assert numbers(llm, prompt) == expected


def test_steps_that_change_recurrent_states_are_not_recorded() -> None:
    """Recording computes some of the tokens twice."""
    assert KERNELS is not None
    replay = SizedReplay(KERNELS, 4, lambda batch: pytest.fail("it was computed"))
    numbers = torch.zeros(2, dtype=torch.int32)
    states = RecurrentMetadata(numbers[:1].long(), numbers, numbers[:1], [9], [9])
    batch = ForwardBatch(torch.arange(9), torch.arange(9), [states], [], torch.tensor([8]))
    assert [replay.run(batch, may_record=True) for _ in range(3)] == [None] * 3


# What two recordings may differ in


def for_any_size(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, few: int, more: int) -> Any:
    assert KERNELS is not None
    programs = []
    with torch.inference_mode():
        for tokens in (few, more):
            with KERNELS.record(tokens, MOST) as program:
                out = compute(x[:tokens])
            programs.append(program)
    return KERNELS.for_any_size(*programs), out


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
