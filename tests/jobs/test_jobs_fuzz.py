"""A row can hold anything: it has an answer or an error of its own, and the others are answered as ever."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bodies import CHAT, FIELDS, anything, body
from embedded import assert_idle, open_llm

from llm import LLM, PoolingParams, SamplingParams
from llm.jobs.requests import PlainRows
from llm.progress import GenerationProgress
from llm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

PARAMS = SamplingParams(max_tokens=2, temperature=0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=96, max_num_seqs=8) as llm:
        yield llm
        assert_idle(llm)


@pytest.fixture(scope="module")
def embedder() -> Iterator[LLM]:
    with open_llm(runner="pooling", max_model_len=96, max_num_seqs=8) as llm:
        yield llm


def answered(llm: LLM, folder: Path, rows: list[Any], **options: Any) -> list[dict[str, Any]]:
    """The rows of the output; to the byte what a run with other batches gives."""
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = llm.run(source, folder / "out.jsonl", use_tqdm=False, **options)
    found = [json.loads(line) for line in summary.output.read_text(encoding="utf-8").splitlines()]
    assert len(found) == len(rows) == summary.num_rows
    assert summary.num_errors == sum(row["error"] is not None for row in found)
    surprises = [row["error"] for row in found if "this row raised" in json.dumps(row["error"])]
    assert not surprises, surprises[:5]
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["chat", "completions", "embeddings"])
def test_any_body_is_answered_or_refused(kind: str, seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue("embedder" if kind == "embeddings" else "llm")
    own, url = {
        "chat": (CHAT, "/v1/chat/completions"),
        "completions": ({"prompt": "And", "max_tokens": 2}, "/v1/completions"),
        "embeddings": ({"input": ["And", "the king"]}, "/v1/embeddings"),
    }[kind]
    draw = random.Random(f"{kind} {seed}")
    good = {"method": "POST", "url": url, "body": {**own, "temperature": 0} if kind != "embeddings" else own}
    rows = [{**good, "body": body(draw, own)} for _ in range(150)]
    rows += [anything(draw, good, 1) for _ in range(30)]
    rows = [{**good}, *(row if isinstance(row, dict) else {**good, "body": row} for row in rows), {**good}]
    rows = [{**row, "custom_id": str(index)} for index, row in enumerate(rows)]
    found = answered(llm, tmp_path, rows)
    assert [row["custom_id"] for row in found] == [row["custom_id"] for row in rows]
    assert found[0]["response"]["body"] == {**found[-1]["response"]["body"], "id": found[0]["response"]["body"]["id"]}
    refused = [row for row in found if row["error"] is not None]
    assert all(row["response"] is None and row["error"]["code"] and row["error"]["message"] for row in refused)
    assert 10 < len(refused) < len(rows) - 10  # both happen


@pytest.mark.parametrize("kind", ["messages", "prompt", "embeddings"])
def test_any_plain_row_is_answered_or_refused(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue("embedder" if kind == "embeddings" else "llm")
    column = "messages" if kind == "messages" else "prompt"
    names = (column, "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs")
    right = {**FIELDS, **CHAT, "prompt": "And"}
    draw = random.Random(kind)
    rows = [{column: right[column]}]
    for _ in range(120):
        name = draw.choice(names)
        rows.append({column: right[column], name: anything(draw, right[name], draw.randrange(2))})
    params: Any = {"sampling_params": PARAMS} if kind != "embeddings" else {"pooling_params": PoolingParams()}
    found = answered(llm, tmp_path, rows, **params)
    refused = [row for row in found if row["error"] is not None]
    assert found[0]["error"] is None and 10 < len(refused) < len(rows) - 10


def test_messages_are_one_conversation(llm: LLM, tmp_path: Path) -> None:
    message = CHAT["messages"][0]
    rows = [
        {"messages": given} for given in (CHAT["messages"], [], [[message], [message]], {}, "a", None, [message, 5])
    ]
    found = answered(llm, tmp_path, rows, sampling_params=PARAMS)
    assert [row["error"] is None for row in found] == [True, *[False] * 6]
    assert all("messages must be one conversation" in row["error"] for row in found[1:] if row["messages"] is not None)


@pytest.mark.parametrize("place", ["request", "answer", "key"])
def test_an_exception_that_nothing_expected_is_the_error_of_its_row(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """With its type and its place. One about the machine ends the job, which goes on afterwards."""
    rows = [{"prompt": f"In the year {index}"} for index in range(6)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = llm.run(source, tmp_path / "whole.jsonl", PARAMS, use_tqdm=False).output.read_text().splitlines()
    raised: list[Exception] = [ZeroDivisionError("planted\nhere")]
    own = getattr(PlainRows, "request" if place == "key" else place)

    def planted(self: PlainRows, row: Any, *args: Any) -> Any:
        if row["prompt"].endswith("3") and (place != "answer" or args[0].output.error is None):
            raise raised[0]
        return own(self, row, *args)

    with monkeypatch.context() as patch:
        if place == "key":
            from llm.jobs import job

            keyed = job.rows_key
            is_third: Callable[[Any], bool] = lambda rows: getattr(rows[0], "prompt", "") == rows_text(3)  # noqa: E731
            patch.setattr(job, "rows_key", lambda rows, model: 1 / 0 if is_third(rows) else keyed(rows, model))
        else:
            patch.setattr(PlainRows, place, planted)
        found = llm.run(source, tmp_path / "out.jsonl", PARAMS, use_tqdm=False).output.read_text().splitlines()
        assert [*found[:3], *found[4:]] == [*whole[:3], *whole[4:]]
        error = json.loads(found[3])["error"]
        assert error.startswith("row: this row raised ZeroDivisionError in ") and ", line " in error
        if place == "key":
            return
        raised[0] = MemoryError("planted")
        with pytest.raises(MemoryError):
            llm.run(source, tmp_path / "again.jsonl", PARAMS, use_tqdm=False)
    again = llm.run(source, tmp_path / "again.jsonl", PARAMS, use_tqdm=False, resume=True).output
    assert again.read_text().splitlines() == whole


def rows_text(index: int) -> str:
    return f"In the year {index}"


class Picky(LogitsProcessor):
    """Raises for rows that ask for it, when they come or when they have two tokens."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            self.rows.pop(index, None)
            if params.extra_args:
                if params.extra_args["fails"] == "at once":
                    raise KeyError("planted")
                self.rows[index] = output
        for first, second, direction in batch_update.moved:
            one, other = self.rows.pop(first, None), self.rows.pop(second, None)
            if one is not None:
                self.rows[second] = one
            if other is not None and direction == MoveDirectionality.SWAP:
                self.rows[first] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if any(len(output) >= 2 for output in self.rows.values()):
            raise ValueError("planted")
        return logits


def test_a_row_that_a_logits_processor_cannot_take_has_the_error(tmp_path: Path) -> None:
    bad = {5: "at once", 11: "later", 12: "later"}
    rows: list[dict[str, Any]] = [{"prompt": f"In the year {index}"} for index in range(30)]
    for index, when in bad.items():
        rows[index]["extra_args"] = {"fails": when}
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    told: list[GenerationProgress] = []
    with open_llm(max_model_len=96, max_num_seqs=4, logits_processors=[Picky]) as llm:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        summary = llm.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", params, use_tqdm=told.append)
        found = [json.loads(line) for line in summary.output.read_text().splitlines()]
        assert_idle(llm)
        llm._preprocessor._call_numbers = itertools.count()
        outputs = llm.generate([row["prompt"] for row in rows], params, use_tqdm=False)
    assert {index for index, row in enumerate(found) if row["error"] is not None} == set(bad)
    assert (
        "LogitsProcessorError: the logits processor Picky raised in update_state(), which has all rows"
        in found[5]["error"]
    )
    assert (
        "Picky raised in apply(), which has all rows of a step (ValueError: planted)" in found[11]["error"]
        and found[11]["finish_reason"] == "error"
    )
    for index, (row, output) in enumerate(zip(found, outputs, strict=True)):
        assert row["generated_text"] == ("" if index in bad else output.outputs[0].text)
    assert told[-1].done <= told[-1].rows == len(rows)
