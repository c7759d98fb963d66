"""`python -m llm bench --sampler`: every case runs, at every size, next to one pass over the logits."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
import torch

from llm.cli import main
from llm.tools.bench import sampler


def bench(*args: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["bench", "--sampler", *args])
    return status, out.getvalue(), err.getvalue()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sizes in (("ROWS", (1, 3)), ("VOCABULARIES", (40, 2048))):
        monkeypatch.setattr(sampler, name, sizes)
    run = sampler.run_sampler_bench
    monkeypatch.setattr(
        sampler, "run_sampler_bench", lambda reps, **kw: run(reps, sampler.ROWS, sampler.VOCABULARIES, **kw)
    )


def test_every_case_at_every_size(small: None) -> None:
    status, out, _ = bench("--json", "--reps", "1")
    figures = json.loads(out)["sampler"]
    assert status == 0
    sizes = {(figure["case"], figure["rows"], figure["vocab"]) for figure in figures}
    assert sizes == {(case, rows, vocab) for case in sampler.CASES for rows in (1, 3) for vocab in (40, 2048)}
    for figure in figures:
        assert figure["seconds"] > 0 and figure["passes"] == figure["seconds"] / figure["pass_seconds"]
    status, out, _ = bench("--reps", "1")
    assert status == 0 and len(out.splitlines()) == len(figures)


def test_each_case_does_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a case carry its params, and the logits are whole again before every step."""
    seen: list[tuple[torch.Tensor, Any]] = []
    call = sampler.Sampler.__call__

    def spy(self: Any, logits: torch.Tensor, params: Any, rows: Any, outputs: Any, processors: Any, size: int) -> Any:
        seen.append((logits.clone(), processors))
        return call(self, logits, params, rows, outputs, processors, size)

    monkeypatch.setattr(sampler.Sampler, "__call__", spy)
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    for case in sampler.CASES:
        seen.clear()
        sampler._measure(case, logits, 2)
        assert len(seen) == 3 and all(torch.equal(given, logits) for given, _ in seen)
        works = case in ("min_p 0.1", "penalties", "a custom processor on every row")
        assert all((processors is not None) == works for _, processors in seen), case


@pytest.mark.parametrize(
    "option", [("--model", "x"), ("--shape", "qwen2.5-0.5b"), ("--profile",), ("--workload", "w3")]
)
def test_what_says_something_of_a_model_is_refused(option: tuple[str, ...]) -> None:
    status, out, err = bench(*option)
    assert status != 0 and not out and "--sampler" in err
