"""Rows in any pieces, as Ray's workers get them: the answers of one machine, and journals that workers share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from embedded import engine_of, open_llm
from kernel_sets import needs_kernels

from llm import LLM, SamplingParams, ValidationError
from llm.engine.output import output_without_run
from llm.engine.rows import RefusedRow
from llm.errors import JobError, OutOfMemoryError
from llm.jobs.identity import identity_of
from llm.jobs.journal import SharedJournal, encode
from llm.jobs.requests import JobAdapters
from llm.jobs.worker import PieceRows, RowWorker, plain_row
from llm.output_formats import output_as_json
from llm.ray import LLMProcessorConfig, LLMWorker, _planned, _threads

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
SAID = output_as_json(output_without_run(RefusedRow(0, ValidationError("said"))))
ROWS: list[dict[str, Any]] = [{"id": index, "prompt": f"In the year {index % 5}"} for index in range(9)]
ROWS[4]["prompt"] = "the king " * 200


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=64, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def whole(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one machine answers, by `LLM.run`."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    llm.run(folder / "in.jsonl", folder / "out.jsonl", PARAMS, use_tqdm=False)
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def worker(llm: LLM, journal: Path | None = None, **more: Any) -> RowWorker:
    given = {"params": PARAMS, "base": PARAMS, "adapters": JobAdapters(), "id_column": "id", "seed": 0, **more}
    kept = None if journal is None else SharedJournal(journal, identity_of(llm))
    return RowWorker(llm, PieceRows(**given), "error", kept)


def count_steps(llm: LLM) -> int:
    return engine_of(llm).stats.steps


@pytest.mark.parametrize("pieces", [[range(9)], [range(8, -1, -1)], [[3, 1], [0], [8, 7, 6, 5, 4], [2]]])
def test_answers_do_not_depend_on_the_pieces(llm: LLM, whole: list[dict[str, Any]], pieces: list[Any]) -> None:
    own = worker(llm)
    found = [row for piece in pieces for row in own.answers([ROWS[index] for index in piece])]
    assert sorted(found, key=lambda row: row["id"]) == whole
    assert (
        whole[4]["error"].startswith("prompt_too_long: ") and whole[1]["generated_text"] != whole[6]["generated_text"]
    )


def test_a_seed_follows_from_the_id_or_else_from_the_prompt(llm: LLM) -> None:
    texts = [
        row["generated_text"] for row in worker(llm).answers([{"id": "a", **BARE}, {"id": "b", **BARE}, BARE, BARE])
    ]
    assert len(set(texts[:3])) == 3 and texts[2] == texts[3]
    assert texts[1] == worker(llm).answers([{"id": "b", **BARE}])[0]["generated_text"]
    assert texts[1] != worker(llm, seed=1).answers([{"id": "b", **BARE}])[0]["generated_text"]


BARE = {"prompt": "And the"}


def test_a_row_has_params_of_its_own(llm: LLM) -> None:
    rows = [
        {**BARE, "sampling_params": {"max_tokens": 2, "temperature": None}},
        {**BARE, "sampling_params": {"max_token": 2}},
        {**BARE, "sampling_params": {"n": 2}},
        {**BARE, "sampling_params": None},
    ]
    found = worker(llm).answers(rows)
    assert [row["num_generated_tokens"] for row in found] == [2, 0, 0, 6]
    assert "has no field 'max_token'. Did you mean 'max_tokens'?" in found[1]["error"]
    assert "n must be the same" in found[2]["error"]


def test_what_another_worker_has_answered_is_not_computed_again(
    llm: LLM, whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    first, second = worker(llm, tmp_path), worker(llm, tmp_path)
    assert first.answers(ROWS[:6]) == whole[:6]
    before = count_steps(llm)
    assert second.answers(ROWS[2:6]) == whole[2:6]  # it sees what was written since it began
    assert count_steps(llm) == before
    journal = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    journal.write_bytes(journal.read_bytes()[:-40])  # killed in the middle of a line
    assert worker(llm, tmp_path).answers(ROWS) == whole
    assert count_steps(llm) > before


def test_half_answers_go_on(llm: LLM, whole: list[dict[str, Any]], tmp_path: Path) -> None:
    own = worker(llm, tmp_path)
    own._partials.due = 0.0  # after the first step
    seen: list[Any] = []
    keep = own._keep

    def fail(output: Any, found: Any) -> None:
        seen.append(output)
        raise RuntimeError("the machine has stopped")

    own._keep = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="stopped"):
        own.answers(ROWS[:3])
    assert keep and seen
    partial = [answer.tokens for answer in SharedJournal(tmp_path, identity_of(llm))._unfinished.values()]
    assert len(partial) == 3 and all(len(tokens[0]) >= 1 for tokens in partial)
    tokens = engine_of(llm).stats.generated_tokens
    assert worker(llm, tmp_path).answers(ROWS[:3]) == whole[:3]
    assert engine_of(llm).stats.generated_tokens - tokens < 18


def test_an_answer_that_has_ended_stays_whatever_is_read_after_it(llm: LLM, tmp_path: Path) -> None:
    """Journals are read by their names: half an answer may lie behind a whole one, its own or another process's."""
    identity = identity_of(llm)
    first, second = SharedJournal(tmp_path, identity), SharedJournal(tmp_path, identity)
    half: dict[str, Any] = {"i": 0, "k": "key", "p": [[0, [5, 6]]]}
    whole: dict[str, Any] = {"i": 0, "k": "key", "o": SAID}
    for writer, other in ((first, second), (second, first)):
        for record in (whole, half):
            writer.add(record)
        writer.flush()
        for reader in (writer, other, SharedJournal(tmp_path, identity)):
            reader.refresh()
            found = reader.answer("key")
            assert found is not None and found.output == SAID and not reader._unfinished


def test_a_line_that_is_being_written_is_read_when_it_is_whole(llm: LLM, tmp_path: Path) -> None:
    """Wherever the reader meets the line: at every byte of it, and the lines behind it too."""
    writer, reader = SharedJournal(tmp_path, identity_of(llm)), SharedJournal(tmp_path, identity_of(llm))
    lines = [encode({"i": index, "k": f"key {index}", "o": SAID}) for index in range(3)]
    data = b"".join(lines)
    with writer._own.path.open("ab", buffering=0) as file:
        for end in range(1, len(data) + 1):
            file.write(data[end - 1 : end])
            reader.refresh()
            known = [reader.answer(f"key {index}") is not None for index in range(3)]
            assert known == [sum(map(len, lines[: index + 1])) <= end for index in range(3)]


def test_a_row_that_failed_is_tried_again(llm: LLM, tmp_path: Path) -> None:
    """Its error may be of this machine or of this version: no journal has it."""
    own = worker(llm, tmp_path)
    assert own.answers(ROWS[3:5])[1]["error"].startswith("prompt_too_long: ")
    assert own._journal is not None
    failed, answered = own._keys[1], own._keys[0]
    journal = SharedJournal(tmp_path, identity_of(llm))
    assert journal.answer(failed) is None and journal.answer(answered) is not None


def test_a_journal_of_another_model_is_refused(llm: LLM, tmp_path: Path) -> None:
    SharedJournal(tmp_path, {**identity_of(llm), "weights": "others"}).close()
    with pytest.raises(JobError, match="is of another job: its weights is 'others'"):
        worker(llm, tmp_path)


def test_batches_of_arrays_and_of_tables(whole: list[dict[str, Any]]) -> None:
    own = LLMWorker(sampling_params={"max_tokens": 6, "ignore_eos": True}, max_model_len=64, share=0.5, num_threads=1)
    table = own(pyarrow.Table.from_pylist(ROWS))
    assert not isinstance(table, dict) and table.to_pylist() == whole  # type: ignore[union-attr]
    arrays = own({name: np.array([row[name] for row in ROWS]) for name in ("id", "prompt")})
    assert [dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)] == whole  # type: ignore
    chat = [{"id": 1, "messages": [{"role": "user", "content": "And", "name": None}], "tools": None}]
    answered = own(pyarrow.Table.from_pylist(chat))
    assert answered.to_pylist()[0]["num_generated_tokens"] == 6  # type: ignore[union-attr]


@needs_kernels
def test_a_worker_of_two_ranks_answers_as_one_process(whole: list[dict[str, Any]]) -> None:
    options = {"max_model_len": 64, "share": 0.5, "num_threads": 1, "tensor_parallel_size": 2}
    own = LLMWorker(sampling_params={"max_tokens": 6, "ignore_eos": True}, **options)
    assert own(pyarrow.Table.from_pylist(ROWS)).to_pylist() == whole  # type: ignore[union-attr]
    assert own._llm.config.parallel_config.tensor_parallel_size == 2
    own._llm.close()


def test_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, half = (LLM.plan().kv_cache_bytes, _planned(LLM.plan().model, {}, 0.5)["kv_cache_memory_bytes"])
    assert 0 < half <= whole
    assert _planned("x", {"kv_cache_memory_bytes": 5}, 0.5) == {"kv_cache_memory_bytes": 5}
    assert _planned("x", {}, 1.0) == {}
    ranks = {"tensor_parallel_size": 2}
    assert _planned(LLM.plan().model, ranks, 0.5)["kv_cache_memory_bytes"] == half // 2
    assert (_threads(9, {}), _threads(9, ranks), _threads(1, ranks)) == (9, 4, 1)
    monkeypatch.setattr("llm.platforms.cpu.CpuPlatform.memory_total", lambda self: 32 << 20)
    assert _planned(LLM.plan().model, {}, 0.5)["kv_cache_memory_bytes"] < 3 << 20
    with pytest.raises(OutOfMemoryError, match="use fewer workers per machine"):
        _planned(LLM.plan().model, {}, 0.1)


def test_the_settings_are_checked() -> None:
    with pytest.raises(ValidationError, match="concurrency must be an integer of at least 1"):
        LLMProcessorConfig(concurrency=0)
    with pytest.raises(ValidationError, match="on_too_long must be"):
        LLMWorker(on_too_long="cut")


def test_rows_of_tables_are_plain() -> None:
    row = {"a": np.array([{"x": np.int64(1), "y": None, "content": None}], dtype=object), "b": np.float32(0.5)}
    assert plain_row(row) == {"a": [{"x": 1, "content": None}], "b": 0.5}
