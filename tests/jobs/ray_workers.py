"""Real Ray on this machine: two workers answer as one process does, however the data is split and whoever is killed.

    pip install '.[ray]'
    PYTHONPATH=. python tests/jobs/ray_workers.py            # about a minute

Not in CI, where there is no Ray. Exits 1 if a row differs. `test_jobs_worker.py` tests the worker without Ray.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.data

from llm import LLM, SamplingParams
from llm.ray import LLMWorker, build_llm_processor, vLLMEngineProcessorConfig

ROOT = Path(__file__).resolve().parents[2]
COUNT = 120
PARAMS = {"max_tokens": 24, "ignore_eos": True}
ENGINE = {"max_model_len": 96, "max_num_seqs": 4}


def rows() -> list[dict[str, Any]]:
    found = [{"id": index, "prompt": f"In the year {index}"} for index in range(COUNT)]
    found[17]["prompt"] = "the king " * 200  # too long
    return found


def of_one_process(folder: Path) -> list[dict[str, Any]]:
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    with LLM(**ENGINE) as llm:
        llm.run(folder / "in.jsonl", folder / "out.jsonl", SamplingParams(**PARAMS), use_tqdm=False)
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def by_workers(blocks: int, journal: Path | None = None, **options: Any) -> list[dict[str, Any]]:
    shuffled = rows()
    random.Random(blocks).shuffle(shuffled)
    arguments = {"sampling_params": PARAMS, "journal": journal, "share": 0.5, "num_threads": 1, **ENGINE}
    dataset = ray.data.from_items(shuffled, override_num_blocks=blocks).map_batches(
        LLMWorker,
        fn_constructor_kwargs=arguments,
        compute=ray.data.ActorPoolStrategy(size=2),
        batch_size=20,
        num_cpus=0.5,
        **options,
    )
    return sorted(dataset.take_all(), key=lambda row: row["id"])


def kill_a_worker(journal: Path, killed: list[int]) -> None:
    """SIGKILL to the first worker whose journal has some rows."""
    while not killed:
        for path in journal.glob("*.journal"):
            if path.read_bytes().count(b'"o":') >= 15:
                killed.append(int(path.name.split("-")[-2]))
                os.kill(killed[0], signal.SIGKILL)
                return
        time.sleep(0.02)


def answered(journal: Path) -> list[str]:
    lines = [line for path in journal.glob("*.journal") for line in path.read_bytes().splitlines() if b'"o":' in line]
    return [json.loads(line[9:])["k"] for line in lines if line.endswith(b"}")]  # the killed one's end may be torn


def like_vllm() -> list[dict[str, Any]]:
    config = vLLMEngineProcessorConfig(
        model_source=str(ROOT / "llm" / "assets" / "tiny"), engine_kwargs=ENGINE, concurrency=2, batch_size=32
    )
    processor = build_llm_processor(
        config,
        preprocess=lambda row: {"prompt": f"In the year {row['id']}", "sampling_params": PARAMS},
        postprocess=lambda row: {"id": row["id"], "answer": row["generated_text"]},
    )
    return sorted(processor(ray.data.range(40)).take_all(), key=lambda row: row["id"])


def same(what: str, found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    wrong = [row["id"] for row, other in zip(found, expected, strict=False) if {**row} != other]
    is_same = not wrong and len(found) == len(expected)
    print(f"{what}: {len(found)} rows, {'the same' if is_same else f'differing: {wrong[:5]}'}", flush=True)
    return is_same


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = of_one_process(folder)
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        good = [same("2 workers, 3 blocks", by_workers(3), expected)]
        good.append(same("2 workers, 11 blocks, Arrow", by_workers(11, batch_format="pyarrow"), expected))
        journal, killed = folder / "journal", []
        threading.Thread(target=kill_a_worker, args=(journal, killed), daemon=True).start()
        good.append(same("2 workers, one killed in the middle", by_workers(6, journal), expected))
        keys = answered(journal)
        print(
            f"  killed: process {killed}; {len(keys)} answers of {len(set(keys))} rows in "
            f"{len(list(journal.iterdir()))} journals"
        )
        good += [bool(killed), len(keys) == len(set(keys)) == COUNT - 1]
        started = time.time()
        good.append(same("the same again, from the journals", by_workers(2, journal), expected))
        good.append(len(answered(journal)) == len(keys))
        print(f"  nothing was computed again, {time.time() - started:.1f} s with starting the workers")
        found = [row["answer"] for row in like_vllm()]
        wrong = [index for index in range(40) if index != 17 and found[index] != expected[index]["generated_text"]]
        print(f"build_llm_processor: {len(found)} rows, {'the same' if not wrong else f'differing: {wrong}'}")
        good.append(not wrong)
        ray.shutdown()
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
