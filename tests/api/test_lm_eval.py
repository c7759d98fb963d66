"""lm-evaluation-harness runs on an `LLM` and gets what its own "hf" model gets, to float32 rounding."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from embedded import open_llm, python

from llm import LLM
from llm.errors import MissingPackageError, ValidationError
from llm.llm import EMBEDDED_MODEL

TOLERANCE = 1e-3
CHOICES = ["heaven and the earth", "Moses", "sea"]
TASKS = {
    "local_choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "local_perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
""",
    "local_generation": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["and", "\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "llm.lm_eval", raising=False)
    with pytest.raises(MissingPackageError, match=r"pip install 'offline-llm\[lm-eval\]'"):
        importlib.import_module("llm.lm_eval")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'offline-llm[lm-eval]'")
    with open_llm(dtype="float32", max_model_len=256) as opened:
        yield opened


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks, as `--include_path` takes it. One question ends with a space, one is long."""
    folder = tmp_path_factory.mktemp("tasks")
    questions = [
        "In the beginning God created the",
        "And the LORD spake unto ",
        "He stretched out his hand over the " * 4,
    ]
    docs = [{"question": own, "choices": CHOICES, "gold": gold} for gold, own in enumerate(questions)]
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, text in TASKS.items():
        source = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/docs.jsonl}}}}\n"
        (folder / f"{name}.yaml").write_text(f"{source}test_split: test\n{text}")
    return folder


def evaluate(model: Any, tasks: Path) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True)


def answers(result: dict[str, Any], task: str) -> list[Any]:
    samples = sorted(result["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for answer in sample["filtered_resps"]]


def test_answers_are_those_of_the_harness_own_model(llm: LLM, tasks: Path) -> None:
    HFLM = pytest.importorskip("lm_eval.models.huggingface", reason="its own model needs accelerate").HFLM

    from llm.lm_eval import OfflineLLM

    ours = evaluate(OfflineLLM(llm=llm), tasks)
    theirs = evaluate(HFLM(pretrained=str(EMBEDDED_MODEL), dtype="float32", device="cpu", max_length=256), tasks)
    for (logprob, greedy), (other, was_greedy) in zip(
        answers(ours, "local_choices"), answers(theirs, "local_choices"), strict=True
    ):
        assert float(logprob) == pytest.approx(float(other), abs=TOLERANCE) and greedy == was_greedy
    assert answers(ours, "local_perplexity") == pytest.approx(answers(theirs, "local_perplexity"), abs=TOLERANCE)
    assert answers(ours, "local_generation") == answers(theirs, "local_generation")
    assert any(answers(ours, "local_generation"))
    for task in ("local_choices", "local_generation"):
        assert {key: value for key, value in ours["results"][task].items() if key != "alias"} == {
            key: value for key, value in theirs["results"][task].items() if key != "alias"
        }
    # classify_choices is the same scores, and its labels count the same.
    docs = [json.loads(line) for line in (tasks / "docs.jsonl").read_text().splitlines()]
    for normalize, metric in ((None, "acc,none"), ("characters", "acc_norm,none")):
        found = llm.classify_choices([doc["question"] for doc in docs], CHOICES, normalize=normalize, use_tqdm=False)
        flat = [logprob for output in found for logprob in output.logprobs]
        assert flat == [float(logprob) for logprob, _ in answers(ours, "local_choices")]
        right = [output.index == doc["gold"] for output, doc in zip(found, docs, strict=True)]
        assert ours["results"]["local_choices"][metric] == sum(right) / len(right)


def test_the_harness_finds_the_model_by_its_name(llm: LLM) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    importlib.import_module("llm.lm_eval")
    with get_model("offline_llm").create_from_arg_string("max_model_len=32", {"model": EMBEDDED_MODEL}).llm:
        pass
    model = get_model("offline_llm")(llm=llm)
    pairs = (("", "And"), ("And", ""), ("a " * 300, "b"))
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    first, empty, cut = model.loglikelihood(requests, disable_tqdm=True)
    assert first[0] < 0 and empty == (0.0, True) and cut[0] < 0
    assert model.apply_chat_template([{"role": "user", "content": "Hello"}]).count("Hello") == 1
    with pytest.raises(ValidationError, match="pretrained must be a model's folder or name"):
        get_model("offline_llm")()
    with pytest.raises(ValidationError, match="llm must be given alone"):
        get_model("offline_llm")("folder", llm=llm)


def test_the_command(tasks: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'offline-llm[lm-eval]'")
    command = ["-m", "llm.lm_eval", "run", "--model", "offline_llm", "--tasks", "local_choices", "--include_path"]
    options = [str(tasks), "--model_args", f"pretrained={EMBEDDED_MODEL},max_model_len=256"]
    result = python(*command, *options, "--output_path", str(tmp_path))
    assert result.returncode == 0 and "acc_norm" in result.stdout, result.stderr[-2000:]
