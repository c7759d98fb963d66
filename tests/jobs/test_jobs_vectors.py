"""Jobs of models that pool, and of rows with adapters: their answers are those of calls, interrupted or not."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints.adapters import write_adapter
from checkpoints.sentence_transformers import BERT, save_model, save_tokenizer
from embedded import engine_of, open_llm
from tiny_models import BASE, one_thread

from llm import LLM, PoolingParams, SamplingParams, ValidationError
from llm.cli import main
from llm.errors import CheckpointError, JobError, JobInterrupted
from llm.inputs import LoRARequest
from llm.jobs.shard import merge
from llm.progress import GenerationProgress

TEXTS = [f"In the year {index} of king David" for index in range(9)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(runner="pooling", max_model_len=96, max_num_seqs=2) as llm:
        yield llm


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(llm: LLM, source: Path, name: str = "out.jsonl", **options: Any) -> Path:
    return llm.run(source, source.with_name(name), use_tqdm=False, **options).output


@contextmanager
def interrupted(llm: LLM, step: int) -> Iterator[None]:
    """Ctrl-C in this step, counted from 1."""
    runner, steps = engine_of(llm).runner, []
    execute = runner.execute

    def hooked(plan: Any) -> Any:
        steps.append(plan)
        if len(steps) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return execute(plan)

    runner.execute = hooked
    try:
        with pytest.raises(JobInterrupted):
            yield
    finally:
        del runner.execute


def test_vectors_of_an_interrupted_job_are_those_of_a_call(llm: LLM, tmp_path: Path, ctrl_c: None) -> None:
    source = write(
        tmp_path / "in.jsonl", [{"prompt": text, "row": row} for row, text in enumerate([*TEXTS, "the king " * 100])]
    )
    whole = run(llm, source)
    rows = read(whole)
    assert np.array_equal([row["embedding"] for row in rows[:-1]], llm.embed(TEXTS, use_tqdm=False).to_numpy())
    assert rows[-1]["embedding"] is None and rows[-1]["error"].startswith("prompt_too_long: the prompt has")
    assert list(rows[0]) == ["prompt", "row", "embedding", "num_prompt_tokens", "error"]
    with interrupted(llm, 3):
        run(llm, source, "again.jsonl")
    summary = llm.run(source, tmp_path / "again.jsonl", resume=True, use_tqdm=False)
    assert 0 < summary.num_resumed < 10 and summary.num_errors == 1 and summary.num_prompt_tokens > 50
    assert summary.output.read_bytes() == whole.read_bytes()
    short = read(run(llm, source, "short.jsonl", pooling_params=PoolingParams(dimensions=8)))
    assert len(short[0]["embedding"]) == 8
    with pytest.raises(ValidationError, match="sampling_params must be None: the model pools; pass pooling_params"):
        llm.run(source, tmp_path / "x.jsonl", PARAMS)
    with pytest.raises(ValidationError, match="on_too_long must be 'error' or 'skip' for a model that pools"):
        run(llm, source, "x.jsonl", on_too_long="truncate_left")


def line(name: str, url: str = "/v1/embeddings", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def test_batches_of_embeddings(llm: LLM, tmp_path: Path) -> None:
    rows = [
        line("text", input=TEXTS[0], model="m"),
        line("coded", input=[TEXTS[1]], encoding_format="base64", dimensions=8),
        line("ids", input=[5, 6, 7], user="me"),
        line("url", url="/v1/completions", prompt="And"),
        line("field", input="a", dimension=3),
        line("long", input="the king " * 100),
        line("cut", input="the king " * 100, truncate_prompt_tokens=-1),
    ]
    found = {row["custom_id"]: row for row in read(run(llm, write(tmp_path / "in.jsonl", rows)))}
    assert list(found) == [row["custom_id"] for row in rows]
    bad = {name: row["error"]["message"] for name, row in found.items() if row["error"] is not None}
    assert list(bad) == ["url", "field", "long"]
    assert bad["url"] == "url must be /v1/embeddings." and "Did you mean 'dimensions'" in bad["field"]
    assert found["long"]["error"]["code"] == "prompt_too_long"
    body = found["text"]["response"]["body"]
    (vector,) = llm.embed(TEXTS[0], use_tqdm=False)
    (item,) = body["data"]
    assert item == {"index": 0, "object": "embedding", "embedding": vector.outputs.embedding}
    assert (body["object"], body["model"]) == ("list", "m")
    assert body["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), len(vector.prompt_token_ids))
    coded = base64.b64decode(found["coded"]["response"]["body"]["data"][0]["embedding"])
    expected = llm.embed(TEXTS[1], pooling_params=PoolingParams(dimensions=8), use_tqdm=False).to_numpy()[0]
    assert np.array_equal(np.frombuffer(coded, "<f4"), expected)


def test_lists_of_inputs(llm: LLM, tmp_path: Path, ctrl_c: None) -> None:
    rows = [
        line("texts", input=TEXTS),
        line("one", input=TEXTS[3]),
        line("ids", input=[[5, 6, 7], [8], [5, 6, 7, 9]], dimensions=4, encoding_format="base64"),
        line("long", input=["a", "b", "the king " * 100, "c"]),
        line("no tokens", input=[[5], []]),
        line("empty", input=[]),
        line("many", input=["a"] * 2049),
        line("mixed", input=["a", [5]]),
        line("number", input=[["a"], 5]),
        line("last", input=TEXTS[:2]),
    ]
    source = write(tmp_path / "in.jsonl", rows)
    whole = run(llm, source)
    found = {row["custom_id"]: row for row in read(whole)}
    assert list(found) == [row["custom_id"] for row in rows]
    bad = {name: row["error"] for name, row in found.items() if row["error"] is not None}
    right = "input must be one text, one list of token ids, or a list of texts or of such lists."
    assert {name: error["message"] for name, error in bad.items() if name not in ("long", "no tokens")} == {
        "empty": "input is an empty list; give it at least one text.",
        "many": "input has 2049 texts and may have 2048; write several rows.",
        "mixed": right,
        "number": right,
    }
    assert bad["long"]["code"] == "prompt_too_long" and bad["long"]["message"].startswith("input[2]: the prompt has")
    assert bad["no tokens"]["message"].startswith("input[1]: the prompt is empty")
    expected = llm.embed(TEXTS, use_tqdm=False)
    bodies = {name: row["response"]["body"] for name, row in found.items() if name not in bad}
    assert [item["index"] for item in bodies["texts"]["data"]] == [*range(len(TEXTS))]
    vectors = [item["embedding"] for item in bodies["texts"]["data"]]
    assert vectors == [own.outputs.embedding for own in expected]
    assert vectors[3:4] == [item["embedding"] for item in bodies["one"]["data"]]
    assert vectors[:2] == [item["embedding"] for item in bodies["last"]["data"]]
    assert len({tuple(vector) for vector in vectors}) == len(TEXTS)  # or their order would show nothing
    counts = [len(own.prompt_token_ids) for own in expected]
    assert bodies["texts"]["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), sum(counts))
    assert bodies["ids"]["usage"]["total_tokens"] == 8
    coded = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in bodies["ids"]["data"]]
    ids = [{"prompt_token_ids": own} for own in rows[2]["body"]["input"]]
    short = llm.embed(ids, pooling_params=PoolingParams(dimensions=4), use_tqdm=False)
    assert np.array_equal(coded, short.to_numpy())
    _is_resumed(llm, source, whole)
    for shard in ("0/2", "1/2"):
        run(llm, source, "parts.jsonl", shard=shard)
    assert merge(tmp_path / "parts.jsonl") == len(rows)
    assert (tmp_path / "parts.jsonl").read_bytes() == whole.read_bytes()


def _is_resumed(llm: LLM, source: Path, whole: Path) -> None:
    """An interruption in the middle of a list loses that row alone; a changed list is another row."""
    for step in (3, 7):  # within the first list, whose texts are computed two at a time, and after it
        with interrupted(llm, step):
            run(llm, source, "again.jsonl")
        summary = llm.run(source, source.with_name("again.jsonl"), resume=True, use_tqdm=False)
        assert (summary.num_rows, summary.num_errors) == (10, 6)
        assert (summary.num_resumed == 0) == (step == 3)
        assert summary.output.read_bytes() == whole.read_bytes()
        summary.output.unlink()
    with interrupted(llm, 7):
        run(llm, source, "again.jsonl")
    rows = read(source)
    rows[0]["body"]["input"][-1] = "And"
    write(source, rows)
    with pytest.raises(JobError, match=r"line 1 of .* is not the one that the journal"):
        run(llm, source, "again.jsonl", resume=True)
    rows[0]["body"]["input"] = TEXTS
    write(source, rows)


def test_progress_counts_inputs(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [line("a", input=TEXTS), line("b", input=["a", 5]), line("c", input="a")])
    seen: list[GenerationProgress] = []
    llm.run(source, tmp_path / "out.jsonl", use_tqdm=seen.append)
    assert (seen[-1].done, seen[-1].rows, seen[-1].failed) == (len(TEXTS) + 2, len(TEXTS) + 2, 1)


def test_classes_and_scores(tmp_path: Path) -> None:
    for classes in (1, 3):
        folder = tmp_path / str(classes)
        save_model(folder, "BertForSequenceClassification", **BERT, num_labels=classes)
        save_tokenizer(folder)
    pairs = [{"text_1": "w1 w2", "text_2": "w3"}, {"text_1": "w4", "text_2": ["w5"]}, {"text_1": "w6", "text_2": "w7"}]
    plain = write(tmp_path / "pairs.jsonl", pairs)
    batch = write(
        tmp_path / "batch.jsonl",
        [
            line("score", "/v1/score", **pairs[0]),
            line("class", "/classify", input=["w3", "w1 w2"]),
            line("pair", "/score", **pairs[1]),
        ],
    )
    with one_thread(), LLM(tmp_path / "1") as llm:
        expected = llm.score(["w1 w2", "w6"], ["w3", "w7"], use_tqdm=False).to_numpy().tolist()
        rows = read(run(llm, plain))
        assert [row["score"] for row in rows] == [expected[0], None, expected[1]]
        assert rows[1]["error"] == "validation: text_2 must be a text; write a row for each pair."
        first, second, third = read(run(llm, batch, "batch.out.jsonl"))
        assert first["response"]["body"]["data"] == [{"index": 0, "object": "score", "score": expected[0]}]
        classes = llm.classify(["w3", "w1 w2"], use_tqdm=False)
        told = [item["probs"] for item in second["response"]["body"]["data"]]
        assert told == [own.outputs.probs for own in classes] and third["error"] is not None
    texts = write(tmp_path / "texts.jsonl", [{"text": "w1 w2"}])
    with one_thread(), LLM(tmp_path / "3") as llm:
        (row,) = read(run(llm, texts, "classes.jsonl", column="text"))
        (own,) = llm.classify("w1 w2", use_tqdm=False)
        assert (row["label"], row["probabilities"]) == (own.outputs.label, own.outputs.probs)


def test_rows_with_adapters(tmp_path: Path, ctrl_c: None) -> None:
    model = save_model(tmp_path / "base", "LlamaForCausalLM", **{**BASE, "num_hidden_layers": 2})
    save_tokenizer(tmp_path / "base")
    for seed, name in enumerate(("sql", "poet")):
        write_adapter(model, tmp_path / name, seed=seed)
    modules = {name: tmp_path / name for name in ("sql", "poet")}
    names = ["sql", None, "poet", "base", "sq"]
    plain = write(tmp_path / "in.jsonl", [{"prompt": "w1 w2 w3", "lora_name": name} for name in names])
    bodies = [{"prompt": "w1 w2 w3", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "model": n} for n in names]
    batch = write(tmp_path / "batch.jsonl", [line(str(i), "/v1/completions", **body) for i, body in enumerate(bodies)])
    with one_thread(), LLM(tmp_path / "base", enable_lora=True) as llm:
        requests = [LoRARequest(n, 1, str(tmp_path / n)) if n in modules else None for n in names[:4]]
        outputs = llm.generate(["w1 w2 w3"] * 4, PARAMS, lora_request=requests, use_tqdm=False)
        expected = [output.outputs[0].text for output in outputs]
        assert len(set(expected)) == 3
        rows = read(run(llm, plain, sampling_params=PARAMS, lora_modules=modules))
        assert [row["generated_text"] for row in rows[:4]] == expected
        assert (
            "lora_name must be the model, 'base', or one of lora_modules, 'sql', 'poet'; got 'sq'" in rows[4]["error"]
        )
        answers = read(run(llm, batch, "batch.out.jsonl", lora_modules=modules))
        bodies = [row["response"]["body"] for row in answers[:4]]
        assert [body["choices"][0]["text"] for body in bodies] == expected
        assert [body["model"] for body in bodies] == ["sql", "base", "poet", "base"]
        assert answers[4]["error"]["message"].startswith("model must be the model, 'base'")
        every = read(run(llm, plain, "every.jsonl", sampling_params=PARAMS, lora_request=requests[0]))
        assert {row["generated_text"] for row in every} == {expected[0]}
        with pytest.raises(ValidationError, match="lora_request must be None where lora_modules is given"):
            run(llm, plain, "x.jsonl", lora_request=requests[0], lora_modules=modules)
        with pytest.raises(CheckpointError, match="no adapter"):
            run(llm, plain, "x.jsonl", lora_modules={"a": tmp_path / "base"})
        with interrupted(llm, 4):
            run(llm, plain, "again.jsonl", sampling_params=PARAMS, lora_modules=modules)
        again = run(llm, plain, "again.jsonl", sampling_params=PARAMS, lora_modules=modules, resume=True)
        assert read(again) == rows
        with interrupted(llm, 4):
            run(llm, plain, "other.jsonl", sampling_params=PARAMS, lora_modules=modules)
        write_adapter(model, tmp_path / "sql", seed=7)  # the same name with other matrices
        with pytest.raises(JobError, match=r"line 1 of .* is not the one that the journal"):
            run(llm, plain, "other.jsonl", sampling_params=PARAMS, lora_modules=modules, resume=True)


def test_the_command_embeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": TEXTS[0]}])
    options = ["--task", "embed", "--params", '{"dimensions": 4}', "--max-model-len", "64"]
    assert main(["run", str(source), str(tmp_path / "out.jsonl"), *options]) == 0
    assert "[1 rows, 0 of them from an earlier run, 0 with an error; 9 prompt tokens" in capsys.readouterr().err
    assert len(read(tmp_path / "out.jsonl")[0]["embedding"]) == 4
    assert main(["run", str(source), str(tmp_path / "x.jsonl"), "--lora-modules", "a"]) == 1
    assert "--lora-modules takes NAME=FOLDER" in capsys.readouterr().err


def test_columns_are_parameters_of_vectors_too(llm: LLM, tmp_path: Path) -> None:
    rows = [{"prompt": "And", "dimensions": 4}, {"prompt": "And", "dimensions": None}, {"prompt": "And"}]
    source = write(tmp_path / "in.jsonl", rows)
    whole = len(read(run(llm, source, "off.jsonl"))[0]["embedding"])
    assert [len(row["embedding"]) for row in read(run(llm, source, row_params=True))] == [4, whole, whole]
