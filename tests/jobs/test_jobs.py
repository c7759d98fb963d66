"""`LLM.run`: an interrupted and resumed job is the job that nothing interrupted, and its files are checked first."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import os
import random
import resource
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kills
import pytest
from documented_processors import DummyLogitsProcessor
from embedded import assert_idle, engine_of, open_llm
from kernel_sets import needs_kernels

from llm import LLM, SamplingParams, ValidationError
from llm.base import system
from llm.cli import main
from llm.errors import JobError, JobInterrupted, OutOfMemoryError
from llm.jobs.bodies import text_offsets
from llm.jobs.identity import fingerprint, identity, model_identity
from llm.jobs.journal import Journal, SharedJournal, decode, encode
from llm.jobs.shard import Shard
from llm.jobs.shard import merge as merge_parts
from llm.jobs.tables import Columns, Form, read_rows, write_rows

PARAMS = SamplingParams(max_tokens=9, ignore_eos=True)
COUNT = 12


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=96, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(autouse=True)
def idle_afterwards(llm: LLM) -> Iterator[None]:
    yield
    assert_idle(llm)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows = [{"prompt": f"In the year {index}", "row": index} for index in range(COUNT)]
    return write(tmp_path / "in.jsonl", rows)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def run(llm: LLM, source: Path, name: str = "out.jsonl", params: Any = PARAMS, **options: Any) -> Path:
    return llm.run(source, source.parent / name, params, use_tqdm=False, **options).output


@contextmanager
def at_step(llm: LLM, step: int, action: Callable[[], Any]) -> Iterator[None]:
    """Do something in the middle of a step, counted from 1."""
    runner = engine_of(llm).runner
    execute, steps = runner.execute, []

    def hooked(plan: Any) -> Any:
        steps.append(plan)
        if len(steps) == step:
            action()
        return execute(plan)

    runner.execute = hooked
    try:
        yield
    finally:
        del runner.execute


# The answers


def test_the_rows_of_a_file_are_answered_in_their_order(llm: LLM, source: Path) -> None:
    summary = llm.run(source, source.with_name("out.jsonl"), PARAMS, use_tqdm=False)
    assert (summary.num_rows, summary.num_resumed, summary.num_errors) == (COUNT, 0, 0)
    assert summary.num_generated_tokens == 9 * COUNT
    rows = read(summary.output)
    assert [row["row"] for row in rows] == list(range(COUNT))
    llm._preprocessor._call_numbers = itertools.count()  # the seeds of a job do not depend on the calls before it
    outputs = llm.generate([row["prompt"] for row in rows], PARAMS, use_tqdm=False)
    assert [row["generated_text"] for row in rows] == [output.outputs[0].text for output in outputs]
    assert rows[0].keys() == {
        *("prompt", "row", "generated_text", "finish_reason"),
        *("num_prompt_tokens", "num_generated_tokens", "error"),
    }
    assert sorted(path.name for path in source.parent.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.job"]


def test_the_shards_of_a_job_are_the_job(llm: LLM, source: Path) -> None:
    whole = run(llm, source).read_bytes()
    for index in range(3):
        run(llm, source, "parts.jsonl", shard=f"{index}/3")
        if index < 2:
            with pytest.raises(JobError, match=r"parts of .* are missing, first parts.shard-"):
                merge(source)
    assert merge(source).read_bytes() == whole
    with pytest.raises(JobError, match=r"parts\.jsonl exists"):
        merge(source)
    for wrong in ("3/3", "1", "-1/3"):
        with pytest.raises(ValidationError, match="shard must be 'i/n'"):
            run(llm, source, "wrong.jsonl", shard=wrong)


@pytest.mark.parametrize(
    ("environment", "shard"),
    [
        ("RANK=2 WORLD_SIZE=4 SLURM_PROCID=0 SLURM_NTASKS=1", "2/4"),
        ("RANK=0 WORLD_SIZE=1", None),
        ("SLURM_PROCID=1 SLURM_NTASKS=3", "1/3"),
        ("SLURM_ARRAY_TASK_ID=5 SLURM_ARRAY_TASK_COUNT=3 SLURM_ARRAY_TASK_MIN=1 SLURM_ARRAY_TASK_STEP=2", "2/3"),
        ("SLURM_ARRAY_TASK_ID=1 SLURM_ARRAY_TASK_COUNT=2 SLURM_PROCID=2 SLURM_NTASKS=4", "6/8"),
        ("JOB_COMPLETION_INDEX=7 JOB_COMPLETIONS=8", "7/8"),
    ],
)
def test_the_launcher_says_which_shard(monkeypatch: pytest.MonkeyPatch, environment: str, shard: str | None) -> None:
    set_environment(monkeypatch, environment)
    assert Shard.of("auto").name == shard


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ("", "finds none of RANK"),
        ("RANK=1", "needs WORLD_SIZE, a number, got None"),
        ("RANK=4 WORLD_SIZE=4", r"needs RANK from 0 to WORLD_SIZE-1, got 4 of 4"),
        ("JOB_COMPLETION_INDEX=0", "needs JOB_COMPLETIONS.*spec.completions"),
        ("SLURM_PROCID=-1 SLURM_NTASKS=2", "needs SLURM_PROCID, a number"),
    ],
)
def test_half_a_launcher_is_told(monkeypatch: pytest.MonkeyPatch, environment: str, what: str) -> None:
    set_environment(monkeypatch, environment)
    with pytest.raises(ValidationError, match=what):
        Shard.of("auto")


def set_environment(monkeypatch: pytest.MonkeyPatch, environment: str) -> None:
    for name in "RANK WORLD_SIZE SLURM_PROCID SLURM_ARRAY_TASK_ID JOB_COMPLETION_INDEX JOB_COMPLETIONS".split():
        monkeypatch.delenv(name, raising=False)
    for pair in environment.split():
        monkeypatch.setenv(*pair.split("="))


def merge(source: Path) -> Path:
    from llm.jobs.shard import merge

    merge(source.with_name("parts.jsonl"))
    return source.with_name("parts.jsonl")


def test_csv_templates_and_columns(llm: LLM, tmp_path: Path) -> None:
    table = tmp_path / "in.csv"
    table.write_text('name,verb\nMoses,went\n"the\nking",came\n')
    run(llm, table, "out.csv", template="And {name} {verb}")
    run(llm, table, "column.jsonl", column="name")
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[0] == "name,verb,generated_text,finish_reason,num_prompt_tokens,num_generated_tokens,error"
    rows = read(tmp_path / "column.jsonl")
    assert [row["name"] for row in rows] == ["Moses", "the\nking"]
    for options, said in (
        ({"column": "nome"}, "has no column 'nome'"),
        ({"template": "{nome}"}, "has no column 'nome'"),
        ({"template": "{name.x}"}, "template must name columns"),
        ({"template": "{name"}, "template cannot be read"),
        ({"template": "{name}", "column": "name"}, "template must be None"),
    ):
        with pytest.raises((JobError, ValidationError), match=said):
            run(llm, table, "wrong.jsonl", **options)


def test_parquet(llm: LLM, source: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = source.with_name("in.parquet")
    parquet.write_table(arrow.Table.from_pylist(read(source)), table)
    found = parquet.read_table(run(llm, table, "out.parquet")).to_pylist()
    assert found == read(run(llm, source))


def test_tables_have_the_columns_of_all_rows(llm: LLM, tmp_path: Path) -> None:
    """Also those that come late; Parquet has types that hold the values of all rows, or is refused at the start."""
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "a", "of": None}, {"prompt": "b", "late": 1}] + [{"prompt": "c"}] * 1100
    rows[-1] = {"prompt": "d", "late": 1.5, "of": ["x"], "tail\ud83d": "y\ud83d"}
    source, one = write(tmp_path / "in.jsonl", rows), SamplingParams(max_tokens=1, temperature=0)
    table = parquet.read_table(run(llm, source, "out.parquet", one)).to_pylist()
    assert [(row["late"], row["of"]) for row in (*table[:2], table[-1])] == [(None, None), (1, None), (1.5, ["x"])]
    assert table[-1]["tail\\ud83d"] == "y\\ud83d"
    with run(llm, source, "out.csv", one).open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert [(row["late"], row["of"]) for row in (*cells[:2], cells[-1])] == [("", ""), ("1", ""), ("1.5", '["x"]')]
    assert list(cells[0])[:4] == ["prompt", "of", "late", "tail\\ud83d"] and cells[-1]["tail\\ud83d"] == "y\\ud83d"
    for wrong in (2, 1 << 70, {}):
        write(source, [{"prompt": "a", "own": wrong}, {"prompt": "b", "own": "text" if wrong == 2 else wrong}])
        with pytest.raises(JobError, match="Parquet has no type for all values of the column 'own'"):
            run(llm, source, "wrong.parquet", one)
    assert not (tmp_path / "wrong.parquet.journal").exists()
    write(source, [batch_row("a")])
    with pytest.raises(JobError, match="objects of many forms; write a"):
        run(llm, source, "wrong.parquet", None)


def test_rows_that_a_table_cannot_hold_are_not_lost(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    with monkeypatch.context() as patch:
        patch.setattr("llm.jobs.tables._cell", lambda value: 1 // 0 if value == "b" else int("a"))
        with pytest.raises(JobError, match=r"out.csv cannot hold these rows: .* run the job into out.jsonl with res"):
            run(llm, source, "out.csv")
    (tmp_path / "out.csv.journal").rename(tmp_path / "out.jsonl.journal")
    summary = llm.run(source, tmp_path / "out.jsonl", PARAMS, use_tqdm=False, resume=True)
    assert summary.num_resumed == 2 and not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_damaged_line_is_the_error_of_its_row(llm: LLM, tmp_path: Path, end: str) -> None:
    """Lines are counted as editors do, empty ones too; the other rows are answered as ever."""
    lines = [
        *(b"", b'{"prompt": "And", "n": 1}', b'{"prompt": ', b"[1]", b"", b'{"text": "a"}', b'{"prompt": "Then"}'),
        *('{"prompt": "\u00e9"}'.encode("latin-1"), b'{"prompt": "a\\nb\xe2\x80\xa8c"}', b'{"prompt": "\\ud83d"}'),
        *(b'{"prompt": "a", "error": 1}', b'{"prompt": "So"}', b'{"prompt": %s}' % (b"9" * 5000), b'{"prompt": "Now"}'),
        *(b'{"prompt": "He"}', b'{"prompt": "She"}', b'{"prompt": "It"}'),
    ]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + end.encode().join(lines))
    found = read(run(llm, source))
    told = [row["error"] and row["error"].removeprefix("validation: ") for row in found]
    assert told[0] is None and told[4] is None and told[6] is None
    for index, said in {
        1: "line 3: this is not JSON (",
        2: "line 4: a row must be an object, got [1].",
        3: "line 6: the input has no column 'prompt'; it has 'text'.",
        5: "line 8: this is not UTF-8.",
        7: "a prompt must be text that UTF-8 can express",
        8: "line 11: the input has a column 'error', which the output would replace; rename it.",
        10: "line 13: this is not JSON (",
    }.items():
        assert (told[index] or "").startswith(said), (index, told[index])
    assert sum(error is not None for error in told) == 7 and len(found) == 15
    prompts = [row["prompt"] for row in found if row["error"] is None]
    good = write(tmp_path / "good.jsonl", [{"prompt": prompt} for prompt in prompts])
    seeded = SamplingParams(max_tokens=3, seed=1)
    by_prompt = {row["prompt"]: row["generated_text"] for row in read(run(llm, good, "good.out.jsonl", seeded))}
    again = read(run(llm, source, "again.jsonl", seeded))
    assert by_prompt == {row["prompt"]: row["generated_text"] for row, e in zip(again, told, strict=True) if not e}
    assert found[7]["prompt"] == "\ud83d"  # as it was
    with pytest.raises(
        ValidationError, match=r"in.jsonl: line 3: this is not JSON .*; line 4: a row must .*; line 6: "
    ):
        run(llm, source, "strict.jsonl", on_error="raise")
    write(source, [{"prompt": "a"}, {"text": "b"}, {"text": "c"}])
    with pytest.raises(JobError, match=r"2 of 3 rows are bad, the first in line 2: the input has no column 'prompt'"):
        run(llm, source, "mostly.jsonl")


def test_a_damaged_line_of_csv_takes_no_other_along(llm: LLM, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    rows = ["prompt,more", "And,1", '"a\nb","2\nx"', "", "Then", "So,1,2", '"the\nking",3', '"open,4', "Now,5"]
    rows += ['a "quote" inside,6', '"bad"quote,7', "caf\u00e9,8", "He,9", "It,10", "We,11", "You,12"]
    source.write_bytes("\n".join(rows).encode("latin-1") + b"\n")
    found = read(run(llm, source))
    told = {row["prompt"]: (row["error"] or "").removeprefix("validation: ") for row in found if "prompt" in row}
    assert told == {
        **dict.fromkeys(("And", "a\nb", "the\nking", "Now", 'a "quote" inside', "He", "It", "We", "You"), ""),
        **{"Then": "line 7: it has 1 values for 2 columns.", "So": "line 8: it has 3 values for 2 columns."},
        "caf\ufffd": "line 15: this is not UTF-8.",
    }
    others = [row["error"] for row in found if "prompt" not in row]
    assert [error[:40] for error in others] == [f"validation: line {line}: this is not CSV ('," for line in (11, 14)]
    as_table = run(llm, source, "out.csv")
    with as_table.open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert [row["error"] for row in cells] == [row["error"] or "" for row in found]
    for header, said in (("a,a\n1,2\n", "two columns have the name 'a'"), ('"a,b\n1,2\n', "this is not CSV")):
        source.write_text(header)
        with pytest.raises(JobError, match=f"in.csv, line 1: {said}"):
            run(llm, source, "wrong.jsonl")


def test_a_line_of_a_batch_without_an_id_has_an_error(llm: LLM, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    good = json.dumps(batch_row("a", max_tokens=1)), json.dumps(batch_row("b", max_tokens=1))
    nameless = json.dumps({**batch_row("c"), "custom_id": 5})
    source.write_text("\n".join([good[0], "{", nameless, good[1], ""]))
    found = read(run(llm, source, params=None))
    assert [row["custom_id"] for row in found] == ["a", None, 5, "b"]
    assert [row["error"] and row["error"]["message"][:20] for row in found] == [
        *(None, "line 2: this is not ", "line 3: a row of a b", None)
    ]


def batch_row(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "And", **body}}


def test_openai_batches(llm: LLM, tmp_path: Path) -> None:
    rows = [
        batch_row("plain", max_tokens=3, temperature=0, model="m"),
        batch_row("several", max_tokens=2, n=2, logprobs=1, seed=5),
        batch_row("unknown", max_tokns=3),
        batch_row("stream", stream=True),
        batch_row("long", prompt="the king " * 100),
        batch_row("list", prompt=["a", "b"]),
        {**batch_row("url"), "url": "/v1/images"},
        {**batch_row("extra"), "priority": 1},
        batch_row("ids", prompt=[1, 5, 6], max_tokens=1),
    ]
    source = write(tmp_path / "in.jsonl", rows)
    answers = {row["custom_id"]: row for row in read(run(llm, source, params=None))}
    assert list(answers) == [row["custom_id"] for row in rows]
    bad = {name: row["error"] for name, row in answers.items() if row["error"] is not None}
    assert list(bad) == ["unknown", "stream", "long", "list", "url", "extra"]
    assert all(answers[name]["response"] is None and error["code"] for name, error in bad.items())
    assert bad["long"]["code"] == "prompt_too_long"
    assert bad["list"]["message"].endswith("write a row for each.")
    assert bad["unknown"]["message"] == "body has no field 'max_tokns' here. Did you mean 'max_tokens'?"
    body = answers["plain"]["response"]["body"]
    [choice] = body["choices"]
    [output] = llm.generate("And", SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
    assert (choice["text"], choice["finish_reason"]) == (output.outputs[0].text, "length")
    assert body["model"] == "m" and body["object"] == "text_completion"
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    several = answers["several"]["response"]["body"]["choices"]
    assert [choice["index"] for choice in several] == [0, 1]
    assert len(several[0]["logprobs"]["token_logprobs"]) == 2
    with pytest.raises(
        ValidationError, match=r"line 3: body has no field 'max_tokns' here.* line 4: stream must be False"
    ):
        run(llm, source, "strict.jsonl", params=None, on_error="raise")


def test_files_are_checked_before_a_row_is_run(llm: LLM, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_of(llm), "add", lambda *_, **__: pytest.fail("a row was run"))
    folder = source.parent

    def refused(said: str, path: Path, name: str = "out.jsonl") -> None:
        with pytest.raises(JobError, match=said):
            run(llm, path, name)

    refused("is the input", source, "in.jsonl")
    refused("is no folder", source, "no/out.jsonl")
    refused("must end in .jsonl, .csv, .parquet", source, "out.txt")
    refused("is no file", folder / "none.jsonl")
    link = folder / "link.jsonl"
    link.symlink_to(source)
    refused("is the input", source, "link.jsonl")
    (folder / "empty.jsonl").touch()
    refused("has no rows", folder / "empty.jsonl")
    (folder / "bad.jsonl").write_text('{"prompt": \n[1]\n')
    refused("bad.jsonl has no row that can be read; line 1: this is not JSON", folder / "bad.jsonl")
    (folder / "latin.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    refused("line 1: this is not UTF-8", folder / "latin.jsonl")
    refused("would replace", write(folder / "clash.jsonl", [{"prompt": "a", "error": 1}]))
    same = [batch_row("a"), batch_row("b"), batch_row("a")]
    refused("line 1 and line 3 have the same custom_id, 'a'", write(folder / "same.jsonl", same))
    noids = [{**batch_row("a"), "custom_id": None}] * 2
    refused("2 of 2 rows are bad, the first in line 1: .* needs a custom_id", write(folder / "noid.jsonl", noids))


# Interrupted and resumed


def test_interrupted_rows_go_on_from_their_tokens(llm: LLM, source: Path, ctrl_c: None) -> None:
    whole = run(llm, source, "whole.jsonl").read_bytes()
    stats = engine_of(llm).stats
    for number in (signal.SIGINT, signal.SIGTERM):
        before, handler = stats.generated_tokens, signal.getsignal(signal.SIGTERM)
        for step in (14, 3):
            with (
                at_step(llm, step, lambda number=number: signal.raise_signal(number)),
                pytest.raises(
                    JobInterrupted, match=r"interrupted with \d+ of 12 rows finished; run .* again"
                ) as caught,
            ):
                run(llm, source, resume=step == 3)
            assert caught.value.signal == number
        assert signal.getsignal(signal.SIGTERM) == handler
        with pytest.raises(JobError, match="is of a run that has not ended; pass resume=True"):
            run(llm, source)
        summary = llm.run(source, source.with_name("out.jsonl"), PARAMS, use_tqdm=False, resume=True)
        assert summary.num_resumed == 4 and summary.output.read_bytes() == whole
        assert stats.generated_tokens - before == 9 * COUNT  # no token was drawn twice
        assert run(llm, source, resume=True) == summary.output  # complete: nothing to do
        with pytest.raises(JobError, match="exists and is complete"):
            run(llm, source)
        summary.output.unlink()


def test_completions_that_had_ended_end_where_they_did(llm: LLM, source: Path, ctrl_c: None) -> None:
    """Of a row whose other completions go on after an interruption, at any step."""
    params = SamplingParams(n=3, max_tokens=9, stop=["e"])
    write(source, read(source)[:3])
    whole = read(run(llm, source, "whole.jsonl", params=params))
    assert any(len(set(map(len, row["generated_text"]))) == 3 for row in whole)
    for step in range(2, 6):
        with at_step(llm, step, lambda: signal.raise_signal(signal.SIGINT)), pytest.raises(JobInterrupted):
            run(llm, source, params=params)
        assert read(run(llm, source, params=params, resume=True)) == whole, step
        (source.parent / "out.jsonl").unlink()


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
def test_a_finished_output_is_of_one_job(llm: LLM, source: Path, name: str) -> None:
    """`resume=True` returns it to the job that it is of, and is refused by name to any other."""
    rows = [{"prompt": "Then"}, {"prompt": "the king " * 200}, {"prompt": "And"}]
    first = llm.run(write(source, rows), source.with_name(name), PARAMS, use_tqdm=False)
    before, steps = first.output.read_bytes(), engine_of(llm).stats.steps
    again = llm.run(source, source.with_name(name), PARAMS, use_tqdm=False, resume=True)
    assert (again.num_rows, again.num_resumed, again.num_errors) == (3, 3, 1) and first.num_errors == 1

    def refused(what: str, host: LLM = llm, params: Any = PARAMS, **options: Any) -> None:
        with pytest.raises(JobError, match=f"{name} is complete and {what}.*; delete it"):
            run(host, source, name, params, resume=True, **options)

    of_another = "of another job: its "
    refused(f"{of_another}sampling_params is .* 'max_tokens': 9.*, and now it is .*'max_tokens': 8", params=FEWER)
    refused(f"{of_another}sampling_params is .*, and now it is .*'temperature': 0.8", params=None)
    refused(f"{of_another}template is None, and now it is '{{prompt}}'", template="{prompt}")
    refused(f"{of_another}column is None, and now it is 'prompt'", column="prompt")
    refused(f"{of_another}on_too_long is 'error', and now it is 'skip'", on_too_long="skip")
    with open_llm(max_model_len=96, seed=3) as other:
        refused(f"{of_another}seed is 0, and now it is 3", other)
    with open_llm(max_model_len=64) as other:  # as many tokens as fit are told to the row that is too long
        refused(f"{of_another}rows have other tokens, parameters or adapters", other)
    write(source, [*rows, {"prompt": "more"}])
    refused("has 3 rows, and this input asks for 4")
    write(source, [rows[0], rows[1], {"prompt": "Now"}])
    refused(f"{of_another}input_sha256 is '.*', and now it is '")
    write(source, rows)
    assert run(llm, source, name, resume=True).read_bytes() == before and engine_of(llm).stats.steps == steps
    said = source.with_name(f"{name}.job")
    said.write_text("{}")
    with pytest.raises(JobError, match=f"{name}.job does not say of what job"):
        run(llm, source, name, resume=True)
    said.unlink()
    with pytest.raises(JobError, match=f"{name} is complete, and {name}.job, which says of what job, is not beside it"):
        run(llm, source, name, resume=True)


FEWER = SamplingParams(max_tokens=8, ignore_eos=True)


def test_a_merged_output_is_of_the_job_of_its_parts(llm: LLM, source: Path) -> None:
    for index in range(3):
        run(llm, source, "parts.jsonl", shard=f"{index}/3")
    merged = merge(source)
    assert run(llm, source, "parts.jsonl", resume=True) == merged  # as if one process had run it
    with pytest.raises(JobError, match="its sampling_params is"):
        run(llm, source, "parts.jsonl", FEWER, resume=True)
    merged.unlink()
    second = source.with_name("parts.shard-1-of-3.jsonl")
    second.unlink()
    run(llm, source, "parts.jsonl", FEWER, shard="1/3")
    with pytest.raises(
        JobError, match=r"parts.shard-1-of-3.jsonl is of another job than parts.shard-0.*sampling_params"
    ):
        merge(source)
    with second.open("a") as file:
        file.write("{}\n" * 2)
    second.with_name(f"{second.name}.job").unlink()
    with pytest.raises(JobError, match=r"parts.shard-1-of-3.jsonl has more rows than the parts of its job can have"):
        merge(source)


def test_everything_that_answers_depend_on_is_in_the_identity(llm: LLM) -> None:
    """A member for each argument that changes answers; some that do not change them are in none."""
    engine = engine_of(llm)

    def of(**changed: Any) -> dict[str, Any]:
        return model_identity(dataclasses.replace(llm._args, **changed), engine.config, "weights")

    before = of()
    calibration = ["In the beginning"]
    changes = {"quantization": "w8a8", "requantize": "w4a16", "calibration": calibration, "hf_overrides": {"a": 1}}
    for name, value in changes.items():
        now = of(**{name: value})
        assert {key for key in {*before, *now} if before.get(key) != now.get(key)} == {name}
    assert of(requantize="w8a16") != of(requantize="w4a16")
    assert of(dtype="bfloat16") != before and of(max_num_seqs=2) == before == of(num_threads=1)


def interrupted(llm: LLM, source: Path, step: int = 14) -> Path:
    """The journal of an interrupted run."""
    with at_step(llm, step, lambda: signal.raise_signal(signal.SIGINT)), pytest.raises(JobInterrupted):
        run(llm, source)
    return source.with_name("out.jsonl.journal")


def test_a_journal_of_another_job_is_refused(llm: LLM, source: Path, ctrl_c: None) -> None:
    journal = interrupted(llm, source)
    with open_llm(max_model_len=96, seed=3) as other, pytest.raises(JobError, match="is of another job: its seed is 0"):
        run(other, source, resume=True)
    with pytest.raises(JobError, match=r"line 1 of .* is not the one that the journal"):
        run(llm, source, params=SamplingParams(max_tokens=8, ignore_eos=True), resume=True)
    rows = read(source)
    write(source, [{**rows[0], "prompt": "changed"}, *rows[1:]])
    with pytest.raises(JobError, match=r"line 1 of .* is not the one that the journal"):
        run(llm, source, resume=True)
    write(source, rows)
    # A planted wrong key.
    lines = journal.read_bytes().splitlines(keepends=True)
    record = decode(lines[1])
    assert record is not None
    journal.write_bytes(lines[0] + encode({**record, "k": "0" * 64}) + b"".join(lines[2:]))
    with pytest.raises(JobError, match=f"line {record['i'] + 1} of .* is not the one"):
        run(llm, source, resume=True)
    journal.write_text("something else\n")
    with pytest.raises(JobError, match="is not a journal"):
        run(llm, source, resume=True)
    with open_llm(seed=None) as unseeded, pytest.raises(ValidationError, match=r"needs LLM\(seed="):
        run(unseeded, source, "new.jsonl")


def test_weights_have_a_fingerprint(llm: LLM) -> None:
    class Changed:
        def __init__(self, source: Any) -> None:
            self.config, self.close = source.config, source.close
            self.tensors = lambda: self
            self.source = source

        def stream(self) -> Iterator[tuple[str, Any]]:
            for place, (name, tensor) in enumerate(self.source.tensors().stream()):
                yield name, tensor + (place == 3)

    source: Any = llm._source
    assert fingerprint(source) == fingerprint(source) != fingerprint(Changed(source))  # type: ignore[arg-type]


def test_a_full_disk_ends_the_run_and_loses_nothing(llm: LLM, source: Path) -> None:
    whole = run(llm, source, "whole.jsonl").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with pytest.raises(JobError, match=r"journal .* cannot be written: File too large; what it has is kept"):
            run(llm, source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kills.finished(source.with_name("out.jsonl.journal"))
    summary = llm.run(source, source.with_name("out.jsonl"), PARAMS, use_tqdm=False, resume=True)
    assert summary.num_resumed > 0 and summary.output.read_bytes() == whole


def test_an_output_that_cannot_be_written_leaves_the_journal(
    llm: LLM, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        failed = OSError(30, "Read-only file system")
        patch.setattr("llm.base.system.replace", lambda source, target: (_ for _ in ()).throw(failed))
        with pytest.raises(JobError, match="cannot be written: Read-only file system"):
            run(llm, source)
    run(llm, source, "whole.jsonl")


def test_a_failing_step_loses_nothing(llm: LLM, source: Path) -> None:
    whole = run(llm, source, "whole.jsonl").read_bytes()
    with at_step(llm, 13, lambda: (_ for _ in ()).throw(RuntimeError("planted"))), pytest.raises(RuntimeError):
        run(llm, source)
    before = engine_of(llm).stats.generated_tokens
    assert run(llm, source, resume=True).read_bytes() == whole
    assert engine_of(llm).stats.generated_tokens - before == 9 * COUNT - 4 * 12


@needs_kernels
def test_a_killed_job_is_the_whole_job(tmp_path: Path, ctrl_c: None) -> None:
    with kills.open_llm() as llm:
        kills.write_input(tmp_path / "in.jsonl", rows=6)
        started = time.monotonic()
        run(llm, tmp_path / "in.jsonl", "whole.jsonl", params=None)
        seconds = time.monotonic() - started
        expected = (tmp_path / "whole.jsonl").read_bytes()
        count, problems = kills.one_job(llm, tmp_path, expected, seconds, random.Random(5))
    assert (problems, count > 0) == ([], True)


# The disk


class Disk:
    """What survives a power failure: of each file as much as was there when it was last waited for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.durable: dict[int, int] = {}  # by inode
        self.too_early: list[str] = []  # names that a file got before the disk had it
        fsync, replace = os.fsync, system.replace

        def waited(handle: int) -> None:
            fsync(handle)
            self.durable[os.fstat(handle).st_ino] = os.fstat(handle).st_size

        def named(path: Path, target: Path) -> None:
            if not self.has(path):
                self.too_early.append(target.name)
            self.durable.pop(target.parent.stat().st_ino, None)
            replace(path, target)

        patch.setattr("os.fsync", waited)
        patch.setattr(system, "replace", named)

    def has(self, path: Path) -> bool:
        """All of a file; of a folder, its names."""
        found = path.stat()
        return found.st_ino in self.durable and (path.is_dir() or self.durable[found.st_ino] == found.st_size)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
def test_a_file_has_its_name_when_the_disk_has_the_file(tmp_path: Path, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        forms: dict[str, Form] = {"prompt": str, "error": str}
        write_rows(tmp_path / name, [{"prompt": "a", "error": None}], Columns(Path(name).suffix).schema(forms))
        assert disk.has(tmp_path / name) and disk.has(tmp_path) and disk.too_early == []


def test_the_disk_has_the_journal_once_per_second_and_when_asked(tmp_path: Path) -> None:
    clock = [100.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llm.jobs.journal.monotonic", lambda: clock[0])
        disk = Disk(patch)
        journal = Journal(tmp_path / "run.journal", {"a": 1})
        assert disk.has(journal.path) and disk.has(tmp_path) and disk.too_early == []
        for seconds, asked, kept in ((0.5, False, False), (0.6, False, True), (0.9, False, False), (0.0, True, True)):
            clock[0] += seconds
            journal.add({"i": 0, "k": "x", "o": clock[0]})
            journal.flush(sync=asked)
            assert disk.has(journal.path) == kept
        journal.close()


@pytest.mark.parametrize("written", [0, 1, 30])
def test_a_write_that_fails_leaves_whole_lines(tmp_path: Path, written: int) -> None:
    """The same process may go on: what it could not write, it writes then, behind whole lines."""

    class Full:
        def __init__(self, file: Any) -> None:
            self.file, self.tell, self.seek, self.fileno, self.close = (
                file,
                file.tell,
                file.seek,
                file.fileno,
                file.close,
            )

        def write(self, data: bytes) -> int:
            self.file.write(data[:written])
            raise OSError(28, "No space left on device")

    records = [{"i": index, "k": "x" * 20, "p": [[0, [index]]]} for index in range(3)]
    journal = Journal(tmp_path / "run.journal", {"a": 1})
    journal.add(records[0])
    journal.flush()
    before = journal.path.read_bytes()
    whole: Any = journal._file
    journal._file = Full(whole)  # type: ignore[assignment]
    journal.add(records[1])
    with pytest.raises(JobError, match="No space left on device; what it has is kept"):
        journal.flush()
    assert journal.path.read_bytes() == before
    journal._file = whole
    journal.add(records[2])
    journal.flush()
    journal.close()
    assert [decode(line) for line in journal.path.read_bytes().splitlines(keepends=True)][1:] == records


@pytest.mark.parametrize("count", [2, 3])
def test_parts_of_any_lengths_are_one_job_or_are_refused(tmp_path: Path, count: int) -> None:
    """Row r of a job is row r // count of part r % count, so that earlier parts may have one row more."""
    for number, lengths in enumerate(itertools.product(range(3), repeat=count)):
        output = tmp_path / f"{number}.jsonl"
        rows = [[{"row": place * count + index} for place in range(length)] for index, length in enumerate(lengths)]
        for index, own in enumerate(rows):
            write(Shard(index, count).path(output), own)
        total = sum(lengths)
        if lengths == tuple(len(range(index, total, count)) for index in range(count)):
            merge_parts(output)
            assert read(output) == [{"row": row} for row in range(total)]
        else:
            with pytest.raises(JobError, match="has more rows than the parts of its job can have"):
                merge_parts(output)
            assert not output.exists()


@pytest.mark.parametrize(("name", "text"), [("in.jsonl", '{"prompt": "é"}\n'), ("in.csv", "prompt\né\n")])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, name: str, text: str) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / name).write_text(text, encoding=encoding)
        assert list(read_rows(tmp_path / name)) == [{"prompt": "é"}]


def test_parquet_holds_every_value_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    values = {
        "text": "é",
        "number": 2**53 + 1,
        "score": 0.1,
        "vector": [0.1, 2.0**-60],
        "call": {"id": 2**40, "at": 1e300},
    }
    forms: dict[str, Form] = {"text": str, "number": int, "score": float, "vector": [float]}
    forms["call"] = {"id": int, "at": float}
    rows = [dict.fromkeys(values), values]  # the first says nothing of the types
    write_rows(tmp_path / "out.parquet", rows, Columns(".parquet").schema(forms))
    assert list(read_rows(tmp_path / "out.parquet")) == rows


def test_rows_of_a_batch_have_the_defaults_of_the_call(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    rows = [batch_row("silent"), batch_row("own", max_tokens=2), batch_row("null", max_tokens=None)]
    found = bodies_of(run(llm, write(tmp_path / "in.jsonl", rows), params=params))
    assert [body["usage"]["completion_tokens"] for body in found.values()] == [4, 2, 4]
    [output] = llm.generate("And", params, use_tqdm=False)
    assert found["silent"]["choices"][0]["text"] == output.outputs[0].text


def test_a_job_is_bound_to_every_setting_that_changes_answers(llm: LLM) -> None:
    """Two that differ in one of these are different jobs."""
    args, config = llm._args, llm.config
    settings: dict[str, Any] = {
        "quantization": "w8a8",
        "requantize": "w8a8",
        "calibration": ["In the beginning"],
        "dtype": "bfloat16",
        "hf_overrides": {"rms_norm_eps": 0.5},
        "logprobs_mode": "processed_logprobs",
    }
    changed = [
        identity(dataclasses.replace(args, **{name: value}), config, "w", []) for name, value in settings.items()
    ]
    known = [identity(args, config, "w", []), identity(args, config, "v", []), *changed]
    assert all(first != second for first, second in itertools.combinations(known, 2))


# The journal


def test_a_torn_end_is_cut_off_wherever_it_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    journal = Journal(path, {"a": 1})
    records = [{"i": index, "k": "x", "p": [[0, [index]]], "text": "é" * index} for index in range(4)]
    for record in records:
        journal.add(record)
    journal.flush()
    with pytest.raises(JobError, match="is in use by another process"):
        Journal(path, {"a": 1})
    journal.close()
    whole = path.read_bytes()
    last = len(encode(records[-1]))
    for torn in [*(whole[:-cut] for cut in range(1, last + 1)), whole[:-2] + b"?\n", whole + b"\0" * 9]:
        path.write_bytes(torn)
        journal = Journal(path, {"a": 1})
        expected = records if torn.startswith(whole) else records[:-1]
        assert path.stat().st_size == sum(map(len, map(encode, expected))) + len(whole.splitlines(keepends=True)[0])
        assert list(journal.records()) == expected
        journal.add({"i": 9, "k": "y", "p": [[0, []]]})
        journal.flush()
        assert list(journal.records())[len(expected) :] == [{"i": 9, "k": "y", "p": [[0, []]]}]
        journal.close()
    lines = whole.splitlines(keepends=True)
    lines[2] = lines[2].replace(b"x", b"z")
    path.write_bytes(b"".join(lines))
    journal = Journal(path, {"a": 1})
    assert list(journal.records()) == [records[0], *records[2:]]
    journal.close()


def test_the_command(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = source.with_name("out.jsonl")
    options = ["--params", '{"max_tokens": 2}', "--max-model-len", "64"]
    assert main(["run", str(source), str(output), *options]) == 0
    said = capsys.readouterr()
    assert (
        said.out == f"{output}\n" and "[12 rows, 0 of them from an earlier run, 0 with an error; 24 tokens" in said.err
    )
    assert main(["run", str(source), str(output), *options]) == 1
    assert "exists and is complete" in capsys.readouterr().err
    assert main(["run", str(source), str(output), "--params", "[]"]) == 1
    assert main(["merge", str(output)]) == 1


# Batch rows against OpenAI's documents


def bodies_of(path: Path) -> dict[str, Any]:
    """By custom_id, a row's response, or the message of its error."""
    rows = read(path)
    return {row["custom_id"]: row["response"]["body"] if row["response"] else row["error"]["message"] for row in rows}


def chat_row(name: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Who was the king?"}]
    return {**batch_row(name), "url": "/v1/chat/completions", "body": {"messages": messages, "max_tokens": 12, **body}}


@pytest.mark.parametrize("count", [None, 0, 1, 3, -1])
def test_a_chat_has_as_many_top_logprobs_as_it_asks_for(llm: LLM, tmp_path: Path, count: int | None) -> None:
    asked = {"logprobs": True} if count is None else {"logprobs": True, "top_logprobs": count}
    rows = [chat_row("greedy", temperature=0, **asked), chat_row("drawn", temperature=2.0, seed=1, **asked)]
    found = bodies_of(run(llm, write(tmp_path / "in.jsonl", rows), params=None))
    in_top = []
    for name in ("greedy", "drawn"):
        content = found[name]["choices"][0]["logprobs"]["content"]
        assert len(content) == found[name]["usage"]["completion_tokens"]
        for item in content:
            top = item["top_logprobs"]
            expected = engine_of(llm).config.model_config.vocab_size if count == -1 else count or 0
            assert len(top) == expected
            logprobs = [own["logprob"] for own in top]
            assert logprobs == sorted(logprobs, reverse=True)
            assert all(value <= 0 for value in logprobs) and item["bytes"] == list(item["token"].encode())
            if count == 1 and name == "greedy":
                assert top == [{key: item[key] for key in ("token", "logprob", "bytes")}]
            in_top.append(any(own["token"] == item["token"] for own in top))
    if count == 3:
        assert set(in_top) == {True, False}  # both cases occurred


def test_logprobs_are_asked_for_as_openai_has_it(llm: LLM, tmp_path: Path) -> None:
    rows = [
        chat_row("alone", top_logprobs=2),
        chat_row("off", logprobs=False, top_logprobs=2),
        chat_row("number", logprobs=2),
        chat_row("neither", logprobs=False, top_logprobs=0),
        chat_row("silent", max_tokens=2),
        chat_row("both", max_completion_tokens=3),
        batch_row("text", logprobs=2, max_tokens=8),
    ]
    found = bodies_of(run(llm, write(tmp_path / "in.jsonl", rows), params=SamplingParams(logprobs=1)))
    assert found["alone"] == found["off"] == "logprobs must be true where top_logprobs is given."
    assert found["number"] == "logprobs must be True or False, got 2."
    assert found["neither"]["choices"][0]["logprobs"] is None
    assert [len(item["top_logprobs"]) for item in found["silent"]["choices"][0]["logprobs"]["content"]] == [1, 1]
    assert found["both"] == "max_tokens must be left out where max_completion_tokens is given."
    (choice,) = found["text"]["choices"]
    logprobs = choice["logprobs"]
    assert {len(own) for own in logprobs["top_logprobs"]} <= {2, 3}  # the sampled one is always there
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_what_json_cannot_say_is_openais_number(llm: LLM, tmp_path: Path) -> None:
    """A token that may not be drawn has a logprob of -inf where logprobs are of processed logits."""
    rows = [
        chat_row("chat", allowed_token_ids=[5, 6], logprobs=True, top_logprobs=4, max_tokens=2),
        batch_row("text", allowed_token_ids=[5, 6], logprobs=4, max_tokens=2),
    ]
    with open_llm(max_model_len=64, logprobs_mode="processed_logprobs") as processed:
        path = run(processed, write(tmp_path / "in.jsonl", rows), params=None)
    assert "Infinity" not in path.read_text()
    found = bodies_of(path)
    content = found["chat"]["choices"][0]["logprobs"]["content"]
    assert all([own["logprob"] for own in item["top_logprobs"]][2:] == [-9999.0] * 2 for item in content)
    assert -9999.0 in found["text"]["choices"][0]["logprobs"]["top_logprobs"][0].values()


@pytest.mark.parametrize(
    ("tokens", "text", "offsets"),
    [
        (["And", " the", " king"], "And the king", [0, 3, 7]),
        (["And", " the", "</s>"], "And the", [0, 3, 7]),  # what ended the text is not in it
        (["And", "the", "king"], "And the king", [0, 4, 8]),  # SentencePiece's tokens alone lose their space
        (["<b>", "a", "", "\u00e9", "b"], "a\u00e9b", [0, 0, 1, 1, 2]),  # a special one, and parts of a character
        ([], "", []),
    ],
)
def test_text_offsets_are_places_in_the_text(tokens: list[str], text: str, offsets: list[int]) -> None:
    assert text_offsets(text, tokens) == offsets


DEFAULTS: dict[str, Any] = {
    **dict.fromkeys("stop seed logit_bias logprobs user metadata top_p temperature presence_penalty n".split()),
    **dict.fromkeys("response_format tools tool_choice parallel_tool_calls reasoning_effort functions audio".split()),
    **dict.fromkeys(
        "stream stream_options service_tier store prediction web_search_options structured_outputs".split()
    ),
    **dict.fromkeys("top_logprobs max_completion_tokens prompt_logprobs vllm_xargs extra_args chat_template".split()),
}
SET: dict[str, Any] = {"stream": False, "n": 1, "user": "me", "frequency_penalty": 0, "logit_bias": {}, "stop": []}
SET |= {"echo": False, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "priority": 0, "request_id": "a"}
SET |= {"top_p": 1.0, "presence_penalty": 0.0, "store": False, "metadata": {}, "min_tokens": 0, "ignore_eos": False}
OF_CHAT: dict[str, Any] = {"modalities": ["text"], "add_special_tokens": False, "tools": [], "tool_choice": "auto"}
OF_CHAT |= {"include_reasoning": True, "function_call": "none", "functions": [], "response_format": {"type": "text"}}


def test_members_that_ask_for_nothing_are_taken(llm: LLM, tmp_path: Path) -> None:
    greedy = {"temperature": 0}
    rows = [
        chat_row("bare", **greedy),
        chat_row("null", **{**DEFAULTS, **greedy}),
        chat_row("set", **greedy, **SET, **OF_CHAT, logprobs=False, top_logprobs=0),
        batch_row("bare text", **greedy, max_tokens=5),
        batch_row("null text", **{**DEFAULTS, **greedy}, max_tokens=5),
        batch_row("set text", **greedy, **SET, max_tokens=5, suffix="", add_special_tokens=True),
        batch_row("list", **greedy, max_tokens=5),
        *(batch_row(name, **{name: value}) for name, value in {**WRONG, "max_tokns": 1}.items()),
    ]
    rows[6]["body"]["prompt"] = ["And"]
    found = bodies_of(run(llm, write(tmp_path / "in.jsonl", rows), params=None))
    answers = {name: body["choices"] for name, body in found.items() if not isinstance(body, str)}
    assert answers["bare"] == answers["null"] == answers["set"]
    assert answers["bare text"] == answers["null text"] == answers["set text"] == answers["list"]
    assert {name for name, body in found.items() if isinstance(body, str)} == {*WRONG, "max_tokns"}


WRONG = {"stream": True, "echo": True, "suffix": "a", "best_of": 3, "use_beam_search": True, "priority": 2}


# Parameters of a row


def test_extra_args_reach_logits_processors(tmp_path: Path) -> None:
    """Under vLLM's name and ours, of a batch; in columns of plain rows, in CSV as JSON."""
    own = {"target_token": 67}
    limits = {"max_tokens": 2, "temperature": 0}
    batch = [
        batch_row("bare", **limits),
        batch_row("xargs", **limits, vllm_xargs=own),
        batch_row("extra", **limits, extra_args=own),
        chat_row("chat", **limits, vllm_xargs=own),
        batch_row("both", vllm_xargs=own, extra_args=own),
        batch_row("text", vllm_xargs="a"),
        batch_row("bad", vllm_xargs={"target_token": "a"}),
    ]
    plain: list[dict[str, Any]] = [
        {"prompt": "And"},
        {"prompt": "And", "extra_args": own},
        {"prompt": "And", "sampling_params": {"max_tokens": 1, "extra_args": own, "stop": None}},
        {"prompt": "And", "extra_args": None, "sampling_params": {}},
        {"prompt": "And", "sampling_params": {"max_token": 1}},
        {"prompt": "And", "extra_args": own, "sampling_params": {"extra_args": own}},
        {"prompt": "And", "extra_args": [67]},
    ]
    table = tmp_path / "in.csv"
    table.write_text(
        'prompt,extra_args,sampling_params\nAnd,,\nAnd,"{""target_token"": 67}",\nAnd,,"{""max_tokens"": 1}"\n'
    )
    with open_llm(max_model_len=64, logits_processors=[DummyLogitsProcessor]) as llm:
        target = llm.get_tokenizer().decode([67])
        found = bodies_of(run(llm, write(tmp_path / "batch.jsonl", batch), params=None))
        rows = read(run(llm, write(tmp_path / "in.jsonl", plain), "rows.jsonl", SamplingParams(**limits)))
        of_table = read(run(llm, table, "cells.jsonl", SamplingParams(**limits)))
    answers = {name: body["choices"][0] for name, body in found.items() if not isinstance(body, str)}
    assert answers["xargs"]["text"] == answers["extra"]["text"] == answers["chat"]["message"]["content"] == target * 2
    assert answers["bare"]["text"] != target * 2 and found["both"].startswith("extra_args must be left out")
    assert "extra_args must be" in found["text"] and "target_token" in found["bad"]
    bare = answers["bare"]["text"]
    assert [row["generated_text"] for row in rows[:4]] == [bare, target * 2, target, bare]
    for row, said in zip(
        rows[4:], ("Did you mean 'max_tokens'", "must be given once", "must be an object"), strict=True
    ):
        assert said in row["error"]
    assert [row["generated_text"] for row in of_table[:2]] == [bare, target * 2]
    assert of_table[2]["num_generated_tokens"] == 1


def test_columns_are_parameters_of_their_rows_on_request(
    llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "And", "max_tokens": 2, "stop": None, "ignore_eos": True, "logit_bias": None},
        {"prompt": "And", "max_tokens": 3.0, "stop": None, "ignore_eos": True, "logit_bias": None},
        {"prompt": "And", "max_tokens": None, "stop": None, "ignore_eos": True, "logit_bias": {"67": 100}},
        {"prompt": "And", "max_tokens": 7, "stop": "e", "ignore_eos": None, "logit_bias": None},
        {"prompt": "And", "max_tokens": -1, "stop": None, "ignore_eos": None, "logit_bias": None},
        {"prompt": "And", "max_tokens": 2, "sampling_params": {"max_tokens": 3}},
    ]
    params = SamplingParams(temperature=0, max_tokens=5)
    source = write(tmp_path / "in.jsonl", rows)
    off = read(run(llm, source, "off.jsonl", params))
    said = [message for message in caplog.messages if "copied and set nothing" in message]
    assert len(said) == 1 and "('max_tokens', 'stop', 'ignore_eos', 'logit_bias')" in said[0]
    assert {row["num_generated_tokens"] for row in off[:5]} == {5}
    found = read(run(llm, source, "on.jsonl", params, row_params=True))
    assert [row["num_generated_tokens"] for row in found[:3]] == [2, 3, 5]
    assert found[2]["generated_text"] == llm.get_tokenizer().decode([67]) * 5
    assert found[3]["finish_reason"] == "stop" and "e" not in found[3]["generated_text"]
    assert "max_tokens must be" in found[4]["error"] and "max_tokens of a row must be given once" in found[5]["error"]
    table = tmp_path / "in.csv"
    lines = ["prompt,max_tokens,stop,ignore_eos,logit_bias", "And,2,,TRUE,", "And,3,,true,"]
    lines += ['And,,,True,"{""67"": 100}"', "And,7,e,,", "And,few,,,", ""]
    table.write_text("\n".join(lines))
    cells = read(run(llm, table, "cells.jsonl", params, row_params=True))
    assert [row["generated_text"] for row in cells[:4]] == [row["generated_text"] for row in found[:4]]
    assert "max_tokens must be an integer of at least 1, got 'few'" in cells[4]["error"]
    made = read(run(llm, table, "made.jsonl", params, row_params=True, template="{prompt} {max_tokens}"))
    assert [row["num_generated_tokens"] for row in made[:3]] == [5] * 3  # the prompt has it
    with pytest.raises(ValidationError, match="row_params must be None"):
        run(llm, write(source, [batch_row("a")]), "x.jsonl", None, row_params=True)
    options = ["--row-params", "--params", '{"temperature": 0, "max_tokens": 5}', "--max-model-len", "96"]
    assert main(["run", str(table), str(tmp_path / "shell.jsonl"), *options]) == 0
    assert (tmp_path / "shell.jsonl").read_text() == (tmp_path / "cells.jsonl").read_text()


def foreign() -> dict[str, bytes]:
    """Bodies of lines with right checksums that no job wrote, by what is wrong."""
    output = {
        **{"request_id": "0", "index": 0, "prompt": "And", "prompt_token_ids": [1], "finished": True, "seed": None},
        **{"num_cached_tokens": 0, "num_dropped_tokens": 0, "prompt_logprobs": None, "params": None},
        **{"lora_request": None},
    }
    own = {
        **{"index": 0, "text": "", "token_ids": [], "cumulative_logprob": None, "logprobs": None, "error": None},
        **{"finish_reason": "stop", "stop_reason": None, "structured": None},
    }
    good: dict[str, Any] = {"i": 0, "k": "x", "o": {**output, "outputs": [own]}}
    error = {"type": "JobError", "message": 5}
    wrong: dict[str, Any] = {
        "list": [1],
        "index": {**good, "i": "0"},
        "flag": {**good, "i": True},
        "negative": {**good, "i": -1},
        "key": {"i": 0, "o": good["o"]},
        "neither": {"i": 0, "k": "x"},
        "parts": {"i": 0, "k": "x", "p": [[0]]},
        "tokens": {"i": 0, "k": "x", "p": [[0, ["a"]]]},
        "output": {**good, "o": 5},
        "values": {**good, "v": "A?"},
        "lora": {**good, "o": {**good["o"], "lora_request": {"a": 1}}},
        "outputs": {**good, "o": {**output, "outputs": [5]}},
        **{f"no {name}": {**good, "o": {k: v for k, v in good["o"].items() if k != name}} for name in good["o"]},
        **{f"own {name}": {**good, "o": {**output, "outputs": [{**own, name: {}}]}} for name in own},
        "error": {**good, "o": {**output, "outputs": [{**own, "error": error}]}},
        "logprobs": {**good, "o": {**output, "outputs": [{**own, "logprobs": [[{"token_id": 1}]]}]}},
    }
    found = {name: json.dumps(value).encode() for name, value in wrong.items()}
    return {**found, "torn": b"{bad", "digits": b'{"i": %s}' % (b"9" * 100_000), "deep": b"[" * 100_000}


def test_foreign_lines_of_a_journal_are_told(tmp_path: Path) -> None:
    """Wherever journals are read; a damaged line, whose checksum is wrong, is passed over."""
    header = encode({"journal": 1, "identity": {"a": 1}})
    path = tmp_path / "shared" / "run.journal"
    path.parent.mkdir()
    for name, body in foreign().items():
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        path.write_bytes(header + line)
        with pytest.raises(JobError, match=r"run.journal, line 2: this is no record of a journal \(.*\); delete"):
            Journal(path, {"a": 1})
        with pytest.raises(JobError, match=rf"run.journal, byte {len(header)}: this is no record of a journal"):
            SharedJournal(path.parent, {"a": 1})
        for own in path.parent.glob("*.journal"):
            own.unlink()
        if name != "no outputs":
            path.write_bytes(line)
            with pytest.raises(JobError, match=r"run.journal(, line 1: this is no record| is not a journal)"):
                Journal(path, {"a": 1})
        path.write_bytes(header + line.replace(b" ", b"  ", 1))
        Journal(path, {"a": 1}).close()
        path.unlink()


def test_tokens_of_a_journal_are_those_of_the_row(llm: LLM, source: Path, ctrl_c: None) -> None:
    journal = interrupted(llm, source, 5)
    lines = journal.read_bytes().splitlines(keepends=True)
    place, record = next((i, own) for i, line in enumerate(lines) if (own := decode(line)) and "p" in own)
    for parts in ([[0, [10**6]]], [[0, [-1]]], [[0, [1]], [0, [1]]]):
        changed = [*lines[:place], encode({**record, "p": parts}), *lines[place + 1 :]]
        journal.write_bytes(b"".join(changed))
        with pytest.raises(JobError, match=r"tokens that are not of this row|are of \d and of \d completions"):
            run(llm, source, resume=True)
    journal.write_bytes(b"".join(lines))
    run(llm, source, resume=True)


@pytest.mark.parametrize(
    "template",
    [
        "{prompt:999999999999}",
        "{prompt!r:>9999999999}",
        "{prompt:.1234}",
        "{prompt:{row}}",
        "{prompt:>{row}}",
        "{row!x}",
    ],
)
def test_templates_write_columns_of_bounded_width(llm: LLM, source: Path, template: str) -> None:
    with pytest.raises(ValidationError, match=r"template (may say how|cannot be read)"):
        run(llm, source, template=template)
    rows = read(run(llm, source, "good.jsonl", SamplingParams(max_tokens=1), template="{prompt!s:>20.9} {row:03d}"))
    assert all(row["error"] is None for row in rows)


# As torch, safetensors and Python say it.
NO_MEMORY = (
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to"),
    OSError("Cannot allocate memory (os error 12)"),
    MemoryError(),
)


@pytest.mark.parametrize("error", NO_MEMORY)
def test_a_lack_of_memory_is_a_sentence_and_loses_nothing(
    llm: LLM, source: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with at_step(llm, 13, fail), pytest.raises(OutOfMemoryError, match=r"the machine is out of memory .* resume=True"):
        run(llm, source)
    summary = llm.run(source, source.with_name("out.jsonl"), PARAMS, use_tqdm=False, resume=True)
    assert summary.num_resumed == 4 and summary.num_errors == 0
    monkeypatch.setattr("llm.jobs.command._params", fail)  # outside of a job
    assert main(["run", str(source), str(source.with_name("x.jsonl"))]) == 1
    assert capsys.readouterr().err.startswith("error: the machine is out of memory (")
    monkeypatch.setattr("llm.jobs.command._params", lambda text: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["run", str(source), str(source.with_name("x.jsonl"))])
