"""The memory of replicas: what each has for itself, and its part of what they share (Pss of /proc/PID/smaps_rollup).

    PYTHONPATH=.:tests python tests/replicas/memory.py --shape qwen2.5-0.5b --replicas 1 2
    PYTHONPATH=.:tests python tests/replicas/memory.py --shape qwen2.5-0.5b --replicas 2 --quantization w8a8

`--alone` gives each its own weights, as on a system that has no files without names.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

from embedded import engine_of

from llm import LLM, SamplingParams
from llm.tools.bench.session import building_shape
from llm.tools.bench.workloads import BenchOptions

MIB = 1 << 20


def pss(pid: int) -> int:
    """Bytes; a page that n processes have counts as 1/n."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="model-b")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quantization")
    parser.add_argument("--alone", action="store_true")
    args = parser.parse_args()
    if args.alone:
        mock.patch("llm.base.system.has_unnamed_files", return_value=False).start()
    with building_shape(BenchOptions(shape=args.shape), lambda text: None) as (folder, _):
        for count in args.replicas:
            options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 4}
            with LLM(folder, devices=[{0}] * count, num_threads=1, quantization=args.quantization, **options) as llm:
                params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
                prompts = [{"prompt_token_ids": [5 + index, 6, 7]} for index in range(4 * count)]
                llm.generate(prompts, params, use_tqdm=False)
                found = [pss(worker.pid) for worker in engine_of(llm)._replicas.alive.values()]
                each = ", ".join(f"{size / MIB:,.0f}" for size in found)
                print(
                    f"{count} replicas: {sum(found) / MIB:,.0f} MiB in all (each: {each}); "
                    f"weights {llm.stats().weight_bytes / MIB:,.0f} MiB; started in {sum(llm.startup.values()):.1f} s"
                )


if __name__ == "__main__":
    main()
