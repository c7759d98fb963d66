"""Damaged models: whatever a stranger wrote, only this project's errors come out, within time and memory.

`python tests/fuzz/folders.py --hours 2` runs new seeds and prints each finding with the seed that repeats it:
`python tests/fuzz/folders.py --seed 17`. `test_fuzz_folders.py` runs a few seeds in CI.

Each seed changes one file of a small folder (config, quantization, tokenizer, index, template, weights) or a GGUF file,
as `damage.py` says, opens the model and asks for one token and one chat. A worker process works through seeds with
limits; the parent sees it die, hang or raise.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from damage import INDEX, damaged

ROOT = Path(__file__).resolve().parents[2]
# Of one seed: processor time, and by the clock, on a machine that may be busy; and for the folders that seeds change.
CPU_SECONDS, WALL_SECONDS, START_SECONDS = 30, 300, 1200
MEMORY_BYTES = 12 << 30
# Schemes and formats of the folders that a stranger may have quantized.
QUANTIZED = (
    ("w8a8", "compressed-tensors"),
    ("w8a8", "modelslim"),
    ("w4a16", "compressed-tensors"),
    ("w4a8", "modelslim"),
    ("fp8", "compressed-tensors"),
    ("mxfp4", "compressed-tensors"),
    ("w4a16", "gptq"),
    ("nf4", "bitsandbytes"),
)


@dataclass(frozen=True)
class Finding:
    """What went wrong: the seed that repeats it, and what was seen."""

    seed: int
    what: str


def bases(folder: Path) -> list[Path]:
    """What seeds start from: the embedded model as it is, in two shards, quantized, and in GGUF."""
    from llm import LLM
    from llm.llm import EMBEDDED_MODEL

    plain, shards, gguf = folder / "plain", folder / "shards", folder / "model.gguf"
    quantized = {folder / f"{scheme}-{format}": (scheme, format) for scheme, format in QUANTIZED}
    if not plain.exists():
        for path, (scheme, format) in quantized.items():
            is_symmetric = format == "modelslim"  # it has no form for zero points, nor for rotations, as GPTQ
            rotates = format not in ("modelslim", "gptq")
            asked = {"scheme": scheme, "rotate": rotates, "symmetric": is_symmetric}
            with LLM(quantization=asked, num_threads=1) as llm:
                llm.save_quantized(path, format)
        write_shards(EMBEDDED_MODEL, shards)
        write_blocks(EMBEDDED_MODEL, gguf)
        shutil.copytree(EMBEDDED_MODEL, plain)
    return [plain, shards, *quantized, gguf]


def write_blocks(source: Path, target: Path) -> None:
    """The model as a GGUF file of several types."""
    from checkpoints.gguf import write_gguf
    from gguf import GGMLQuantizationType as Type

    kinds = {"q_proj": Type.Q4_0, "o_proj": Type.Q8_0, "down_proj": Type.Q5_1, "up_proj": Type.BF16}
    write_gguf(source, target, lambda name: kinds.get(name.split(".")[-2], Type.F16), tokenizer=True)


def write_shards(source: Path, target: Path) -> None:
    """The model in two shards, with the index that names them."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(source / "model.safetensors")
    weight_map = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, own in weight_map.items() if own == file}, target / file)
    index = {"metadata": {"total_size": sum(item.nbytes for item in tensors.values())}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index))


def open_folder(folder: Path) -> None:
    """What a user does first: open, generate, chat."""
    from llm import LLM, SamplingParams
    from llm.errors import LLMError

    params = SamplingParams(max_tokens=1, temperature=0)
    for step in (
        lambda llm: llm.generate("In the beginning", params, use_tqdm=False),
        lambda llm: llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False),
    ):
        try:
            with LLM(folder, num_threads=1, max_num_seqs=2, kv_cache_memory_bytes=1 << 22, max_model_len=64) as llm:
                step(llm)
        except LLMError as error:
            check_message(str(error))


def check_message(text: str) -> None:
    """One sentence that a terminal can show."""
    assert text and len(text) < 2000, f"a message of {len(text)} characters: {text[:200]!r}"
    assert all(char.isprintable() or char == "\n" for char in text), f"not printable: {text[:300]!r}"


def work(seeds: list[int], folder: Path, one: Callable[[Path], None] = open_folder) -> None:
    """The worker: prints a line per seed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    import warnings

    warnings.simplefilter("ignore")
    starts = bases(folder)
    for seed in seeds:
        print("start", seed, flush=True)
        own = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(own.ru_utime + own.ru_stime) + CPU_SECONDS, -1))
        base = starts[seed % len(starts)]
        case = Path(tempfile.mkdtemp(dir=folder)) / f"case{base.suffix}"
        damaged(seed, base, case)
        try:
            one(case)
            said = "ok"
        except BaseException as error:
            last = [frame for frame in traceback.extract_tb(error.__traceback__) if "/llm/" in frame.filename][-1:]
            where = f"{last[0].filename.rpartition('/llm/')[2]}:{last[0].lineno}" if last else "?"
            said = f"{type(error).__name__} at {where}: {str(error)[:200]!r}"
        shutil.rmtree(case.parent)
        print("done", seed, said, flush=True)


def run(seeds: range, folder: Path) -> Iterator[Finding]:
    """Work through the seeds; a worker that dies or hangs is a finding, and the next goes on after it."""
    left = list(seeds)
    while left:
        command = [sys.executable, __file__, "--work", str(left[0]), str(left[-1] + 1), "--folder", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
            lines, errors = _watch(worker)
        done = {int(line.split()[1]): line.split(maxsplit=2)[2].strip() for line in lines if line.startswith("done")}
        yield from (Finding(seed, said) for seed, said in done.items() if said != "ok")
        started = [int(line.split()[1]) for line in lines if line.startswith("start")]
        if not started:
            raise RuntimeError(f"the worker did not start: {errors[-2000:]}")
        if started[-1] not in done:
            hangs = worker.returncode in (-signal.SIGKILL, -signal.SIGXCPU)
            how = "hangs" if hangs else f"dies with {worker.returncode}"
            yield Finding(started[-1], f"{how}: {errors[-300:]!r}")
        left = [seed for seed in left if seed > started[-1]]


def _watch(worker: subprocess.Popen[str]) -> tuple[list[str], str]:
    """All lines; a worker that prints none for too long is killed."""
    import threading

    lines: list[str] = []
    errors: list[str] = []
    readers = [
        threading.Thread(target=lambda: lines.extend(iter(worker.stdout.readline, ""))),  # type: ignore[union-attr]
        threading.Thread(target=lambda: errors.append(worker.stderr.read())),  # type: ignore[union-attr]
    ]
    for reader in readers:
        reader.start()
    count, since = 0, time.monotonic() + START_SECONDS
    while readers[0].is_alive():
        readers[0].join(0.2)
        if len(lines) != count:
            count, since = len(lines), time.monotonic()
        if time.monotonic() - since > WALL_SECONDS:
            worker.kill()
    readers[1].join()
    return lines, "".join(errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=0.1)
    parser.add_argument("--seed", type=int, help="run this one, in this process")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(list(range(*args.work)), args.folder)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if args.seed is not None:
            starts = bases(Path(folder))
            base = starts[args.seed % len(starts)]
            case = Path(folder) / f"case{base.suffix}"
            damaged(args.seed, base, case)
            open_folder(case)
            return 0
        end, seed, found = time.monotonic() + 3600 * args.hours, args.first, 0
        while time.monotonic() < end:
            for finding in run(range(seed, seed + 100), Path(folder)):
                print(f"seed {finding.seed}: {finding.what}", flush=True)
                found += 1
            seed += 100
        print(f"{seed - args.first} seeds, {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    sys.exit(main())
