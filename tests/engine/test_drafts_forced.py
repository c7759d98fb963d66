"""Drafts that a grammar leaves no alternative to are taken without being sampled, and answers are as without drafts.

`test_drafts_verified.py` has every other feature; here no other processor is active, and most rows ask for no logprobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drafts import KINDS
from embedded import engine_of, open_llm, run
from same_answers import CACHE
from test_drafts_verified import PROMPTS, SCHEMA, Opened, Workload, assert_same

from llm import LLM, SamplingParams, StructuredOutputsParams
from llm.sampling.sampler import Sampler

# A choice is forced from its second letter on, a schema's names are, and a regex has one way to go on now and then.
STRUCTURES: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": "(ab|c){2,5} and then some more"},
    {"choice": ["In the beginning God created", "Then he said"]},
]


def workload() -> Workload:
    structures = [StructuredOutputsParams(**own) for own in STRUCTURES]
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=30, structured_outputs=own)
        for own in structures
        for temperature in (0.0, 1.0)
    ]
    params += [
        SamplingParams(temperature=0, max_tokens=20, structured_outputs=structures[0], logprobs=2),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    ]
    return [PROMPTS[index % len(PROMPTS)] for index in range(len(params))], params


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(**CACHE, block_size=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def opened(llm: LLM) -> Opened:
    return Opened(llm, workload())


@pytest.mark.parametrize("kind", KINDS)
def test_forced_drafts_change_no_answer(opened: Opened, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[int] = []
    sample = Sampler.__call__
    monkeypatch.setattr(Sampler, "__call__", lambda *args: (lines.append(len(args[3])), sample(*args))[1])
    outputs, proposer = opened.drafted(kind)
    assert_same(opened.plain, outputs)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if kind == "right":
        assert proposer.accepted == proposer.drafted
        assert sum(lines) < 0.8 * tokens
    else:
        assert proposer.accepted < proposer.drafted


def test_a_callable_that_leaves_the_grammar_is_followed(llm: LLM) -> None:
    """It lets the second token be one that the grammar bars, after the masks of the drafts have been computed."""

    def leave(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_ids) == 1:
            logits[300] = 99.0
        return logits

    params = SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(**STRUCTURES[2]))
    obedient = run(llm, PROMPTS[:1], params)[0].outputs[0].token_ids
    params.logits_processors = [leave]
    opened = Opened(llm, (PROMPTS[:1], [params]))
    assert opened.plain[0].outputs[0].token_ids[1] == 300 != obedient[1]
    opened.answers = dict.fromkeys(opened.answers, obedient)
    assert_same(opened.plain, opened.drafted("right")[0])


def test_a_forced_token_whose_logit_is_nan_is_an_error_still(
    llm: LLM, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine_of(llm).runner.model
    token = opened.plain[4].outputs[0].token_ids[2]
    compute = type(model).compute_logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(model, hidden).clone()
        logits[:, token] = float("nan")
        return logits

    monkeypatch.setattr(model, "compute_logits", broken)
    plain = run(llm, *opened.work)
    assert any(output.outputs[0].error for output in plain)
    assert_same(plain, opened.drafted("right")[0])
