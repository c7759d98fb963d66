"""lm-evaluation-harness over HTTP and in this process give equal scores. `python tests/serve/harness.py`

Needs `pip install 'lm-eval[api]'`. Its tasks here have multiple choices, continuations to score and text to generate.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from embedded import open_llm  # noqa: E402

import llm as package  # noqa: E402
from llm.llm import EMBEDDED_MODEL  # noqa: E402

PLACES = ("Egypt", "Babylon", "Jerusalem", "Nineveh")
ROWS = [
    {"question": f"And {name} the king went {way} unto", "choices": list(PLACES), "answer": index % 4}
    for index, (name, way) in enumerate(
        (n, w) for n in ("David", "Saul", "Asa", "Jehu", "Ahab") for w in ("up", "down")
    )
]
COMMON = "dataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
TASKS = {
    "choices": 'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: choices\n'
    "doc_to_target: answer\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "rolling": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{question}} {{choices[0]}}"\n'
    "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n",
    "generated": 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{choices[answer]}}"\n'
    "generation_kwargs: {until: ['\\n', ','], max_gen_toks: 12, do_sample: false, temperature: 0}\n"
    "metric_list: [{metric: bleu}, {metric: chrf}]\n",
}


def scores(model: str, arguments: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the metrics of each task, the answers to each of its requests)"""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model, model_args=arguments, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    samples = {task: [sample["filtered_resps"] for sample in found["samples"][task]] for task in TASKS}
    return found["results"], samples


def main() -> None:
    import llm.lm_eval  # registers the model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        for task, text in TASKS.items():
            (folder / f"{task}.yaml").write_text(f"task: {task}\n{COMMON.format(file=rows)}{text}")
        inside = scores("offline_llm", {"pretrained": str(EMBEDDED_MODEL)}, folder)
        with open_llm() as llm, package.serve(llm, port=0) as url:
            arguments = {
                "model": "tiny",
                "base_url": f"{url}/v1/completions",
                "tokenizer": str(EMBEDDED_MODEL),
                "add_bos_token": True,
            }
            outside = scores("local-completions", {**arguments, "num_concurrent": 4, "max_length": 512}, folder)
    for task in TASKS:
        metrics = {name: value for name, value in inside[0][task].items() if isinstance(value, float)}
        assert metrics and all(outside[0][task][name] == value for name, value in metrics.items()), (
            f"{task}: {metrics}, over HTTP {outside[0][task]}"
        )
        assert inside[1][task] == outside[1][task], f"{task}: {inside[1][task]}, over HTTP {outside[1][task]}"
        print(task, metrics)


if __name__ == "__main__":
    main()
