"""Outputs as JSON and as tables, with one schema whatever happened; tables as prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from embedded import GREEDY, open_llm, run, tokens

from llm import LLM, SamplingParams
from llm.errors import MissingPackageError
from llm.jobs.journal import output_from_json
from llm.output_formats import COLUMNS
from llm.outputs import RequestOutputs


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def outputs(llm: LLM) -> RequestOutputs:
    params = [
        SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=1, logit_bias={5: 1.0}),
        SamplingParams(max_tokens=3, n=2, stop="the", seed=2**64 - 1),
        SamplingParams(max_tokens=3, logprobs=1, flat_logprobs=True),
        GREEDY,
    ]
    prompts = ["In the", "And", {"prompt_token_ids": [1, 5]}, [1, 10**6]]
    return llm.generate(prompts, params, use_tqdm=False, on_error="return")


def test_json_holds_everything(outputs: RequestOutputs, tmp_path: Path) -> None:
    text = json.dumps(outputs.to_dict())
    assert json.loads(text) == outputs.to_dict()
    lines = outputs.to_jsonl(tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == outputs.to_dict()
    for output, data in zip(outputs, json.loads(text), strict=True):
        again = output_from_json(data, output.params)
        if output.error is not None:
            assert (type(again.error), str(again.error)) == (type(output.error), str(output.error))
            again.outputs[0].error = output.error
        assert again == output
    assert outputs[0].to_dict()["params"]["logit_bias"] == {"5": 1.0}


def test_tables_have_one_schema(outputs: RequestOutputs) -> None:
    frame = outputs.to_pandas()
    assert list(frame.columns) == list(COLUMNS)
    assert frame["index"].tolist() == [0, 1, 1, 2, 3] and frame["completion"].tolist() == [0, 0, 1, 0, 0]
    assert frame["text"].tolist() == [own.text for output in outputs for own in output.outputs]
    assert frame["error_type"].tolist() == ["", "", "", "", "TokenOutOfRangeError"]
    assert frame["seed"].tolist()[1] == 2**64 - 1
    for some in (outputs[0], RequestOutputs(outputs[3:]), RequestOutputs()):
        assert some.to_pandas().dtypes.to_dict() == frame.dtypes.to_dict()


def test_arrow_and_parquet(outputs: RequestOutputs, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = outputs.to_arrow()
    for some in (outputs[0], RequestOutputs(outputs[3:]), RequestOutputs()):
        assert some.to_arrow().schema == table.schema
    assert parquet.read_table(outputs.to_parquet(tmp_path / "out.parquet")).equals(table)


def test_a_missing_package_is_named(outputs: RequestOutputs, monkeypatch: pytest.MonkeyPatch) -> None:

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", without)
    with pytest.raises(MissingPackageError, match=r"this needs pandas: pip install 'offline-llm\[pandas\]'"):
        outputs.to_pandas()


def test_tables_are_prompts(llm: LLM) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["In the", "And"], "other": [1, 2]})
    expected = tokens(run(llm, ["In the", "And"]))
    assert tokens(run(llm, frame)) == tokens(run(llm, frame["prompt"])) == expected
    assert tokens(list(llm.generate_iter(frame, GREEDY, ordered=True))) == expected
    with pytest.raises(ValueError, match=r'a table with a column "prompt", or one column, got .*a, b'):
        run(llm, pandas.DataFrame({"a": ["x"], "b": ["y"]}))
    arrow = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pandas(frame)
    assert tokens(run(llm, table)) == tokens(run(llm, table["prompt"])) == expected
    assert tokens(list(llm.generate_iter(table["prompt"], GREEDY, ordered=True))) == expected
