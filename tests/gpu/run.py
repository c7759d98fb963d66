"""Everything that the tests can only suppose about a GPU, on one: kernels, models, bits, speed. One file to send back.

    python tests/gpu/run.py [--out report.json] [--minutes 10] [--only kernels,models,speed]

Needs a GPU, PyTorch and Triton; no network. What was found is written after every part, so that a run that is stopped
has told what it knew. Exits 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from llm import LLM, SamplingParams  # noqa: E402
from llm.kernels.triton import check  # noqa: E402
from llm.kernels.triton.backend import kernel, kernel_names  # noqa: E402
from llm.kernels.weight import Weight  # noqa: E402

NAME, DEVICE = "cuda", torch.device("cuda", 0)
# (tiny model, arguments of LLM): a dense one, windows and caps, experts, latent attention, states, and schemes.
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("mixtral", {}),
    ("deepseek-v3", {}),
    ("qwen3-next", {}),
    ("llama", {"quantization": "w8a8", "kv_cache_dtype": "int8"}),
    ("llama", {"quantization": "w4a16"}),
    ("llama", {"quantization": "w4a8"}),
    ("llama", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ("gemma2", {}),
    ("gemma3n", {}),
    ("mamba2", {}),
)
# Llama 3.1 8B, and as many of its layers as `--layers` says.
SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SCHEMES: tuple[dict[str, Any], ...] = (
    {},
    {"quantization": "w8a8"},
    {"quantization": "w4a16"},
    {"quantization": "w4a8"},
)


@dataclass
class Report:
    """`found` is what is written; `wrong` has a line for each thing that is."""

    path: Path
    until: float
    found: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def say(self, part: str, name: str, value: Any, is_wrong: bool = False) -> None:
        self.found.setdefault(part, {})[name] = value
        if is_wrong:
            self.wrong.append(f"{part}: {name}: {value}")
        print(f"{time.strftime('%H:%M:%S')} {part:<8} {'WRONG ' if is_wrong else ''}{name}: {value}", flush=True)
        self.path.write_text(json.dumps({**self.found, "wrong": self.wrong}, indent=1, default=str))

    def has_time(self) -> bool:
        return time.monotonic() < self.until

    def guarded(self, part: str, name: str, call: Callable[[], None]) -> None:
        """An error is a finding, and the other parts go on."""
        if not self.has_time():
            self.say(part, name, "not run: no time was left")
            return
        try:
            call()
        except Exception as error:
            traceback.print_exc()
            self.say(part, name, f"{type(error).__name__}: {error}"[:600], True)


# --- Kernels. ---


def kernels(report: Report) -> None:
    """Each kernel beside its definition, in each type, a row alone beside it in the batch. Most of it is compiling, so
    several processes do it."""
    started = time.perf_counter()
    found = check.found_by_several(check.tasks_of(kernel_names(), tuple(check.ALLOWED)), DEVICE)
    for name in kernel_names():
        wrong = [f"{task.dtype}, {text}" for task, text in found.items() if task.name == name and text]
        count = sum(task.name == name for task in found)
        report.say("kernels", name, "; ".join(wrong) or f"agrees in {count} cases", bool(wrong))
    report.say("kernels", "seconds", f"{time.perf_counter() - started:.0f}")


def rows_alone(report: Report) -> None:
    """Products of the sizes of models: rows in any number have the bits that they have among 600."""
    for kind in ("bf16", "w8a8", "w8a16", "w4a16", "w4a8"):
        for n, k in ((4096, 4096), (28672, 4096), (1024, 14336)):
            weight, x = packed(n, k, kind), torch.randn(600, k, device=DEVICE, dtype=torch.bfloat16)
            linear = kernel("linear")
            expected = linear(x, weight)
            other = [m for m in (1, 16, 20, 40, 64, 100, 128, 200, 256, 300, 512)
                     if not torch.equal(linear(x[600 - m :], weight), expected[600 - m :])]  # fmt: skip
            said = f"OTHER BITS with {other} rows" if other else "the same bits with 1 to 600 rows"
            report.say("kernels", f"{kind} {n}x{k}", said, bool(other))


# --- Models. ---


@contextmanager
def opened(*args: Any, **options: Any) -> Iterator[LLM]:
    llm = LLM(*args, **{"speculative_config": None, "use_tqdm_on_load": False, **options})
    try:
        yield llm
    finally:
        llm.close()
        gc.collect()
        torch.cuda.empty_cache()


def answers(llm: LLM, prompts: Any, params: SamplingParams) -> list[Any]:
    """(tokens, logprobs) of each prompt."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (list(o.outputs[0].token_ids), [e.logprob for each in o.outputs[0].logprobs for e in each.values()])
        for o in outputs
    ]


def models(report: Report, folder: Path) -> None:
    """Tiny models: the CPU's greedy tokens in float32, and in bfloat16 the same bits alone, batched and in chunks."""
    from tiny_models import TINY_MODELS, make_prompts, write_checkpoint

    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=8, logprobs=1, ignore_eos=True)
    for name, options in MODELS:

        def compare(name: str = name, options: dict[str, Any] = options) -> None:
            row, path = TINY_MODELS[name], folder / name
            if not path.exists():
                path.mkdir()
                write_checkpoint(row, path)
            prompts = [{"prompt_token_ids": ids} for ids in make_prompts(row)]
            prompts = prompts * 3
            arguments = {"max_model_len": 64, "skip_tokenizer_init": True, **row.engine, **options}
            with opened(str(path), device="cpu", **arguments) as llm:
                expected = answers(llm, prompts, greedy)
            said = []
            with opened(str(path), device=NAME, dtype="float32", **arguments) as llm:
                got = answers(llm, prompts, greedy)
                same = sum(a == b for (a, _), (b, _) in zip(got, expected, strict=True))
                error = max(abs(x - y) for (a, own), (b, theirs) in zip(got, expected, strict=True) if a == b
                            for x, y in zip(own, theirs, strict=True))  # fmt: skip
                said.append(f"float32: {same} of {len(prompts)} answers are the CPU's, logprobs within {error:.1e}")
            for dtype in ("float32", "bfloat16"):
                with opened(str(path), device=NAME, dtype=dtype, **arguments) as llm:
                    together = answers(llm, prompts, greedy) + answers(llm, prompts, drawn)
                    recorded = llm._engine.runner.recorded
                    graphs = 0 if recorded is None else len(recorded._steps)
                    refusal = "" if recorded is None else recorded.refusal
                    alone = [answers(llm, [p], o)[0] for o in (greedy, drawn) for p in prompts[: len(prompts) // 3]]
                    is_invariant = llm.config.invariant
                with opened(str(path), device=NAME, dtype=dtype, max_num_batched_tokens=7, max_num_seqs=2,
                            **arguments) as llm:  # fmt: skip
                    chunked = answers(llm, prompts, greedy) + answers(llm, prompts, drawn)
                third = len(prompts) // 3
                batched = together[:third] + together[len(prompts) : len(prompts) + third]
                bits = alone == batched and chunked == together
                said.append(
                    f"{dtype}: {'the same bits alone, batched, in chunks' if bits else 'OTHER BITS'}, "
                    f"{graphs} graphs{f' ({refusal})' if refusal else ''}, invariant={is_invariant}"
                )
                if is_invariant and not bits:
                    report.say("models", f"{name} {options} {dtype}", "says invariant, and is not", True)
            # Where activations or caches are rounded to 8 bits, the last bits of a float32 decide some of the codes.
            rounds = options.get("quantization") in ("w8a8", "w4a8") or "kv_cache_dtype" in options
            report.say("models", f"{name} {options or ''}".strip(), "; ".join(said), same < len(prompts) and not rounds)

        report.guarded("models", f"{name} {options or ''}".strip(), compare)


# --- Speed. ---


def seconds_of(*calls: Callable[[], object], repeats: int = 4) -> float:
    """Median seconds of one of the calls in a CUDA graph of them, as steps are computed. Each has operands of its own,
    so that none finds them in the cache."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / (repeats * len(calls)))
    return sorted(times)[2]


def limits(report: Report) -> tuple[float, float]:
    """(bytes of memory read in a second, bf16 operations in a second) that PyTorch reaches here."""
    block = torch.empty(1 << 30, dtype=torch.int8, device=DEVICE)
    bandwidth = (1 << 30) / seconds_of(lambda: block.view(torch.float32).sum())
    a, b = torch.randn(2, 8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    flops = 2 * 8192**3 / seconds_of(lambda: a @ b)
    report.say("limits", "memory, read", f"{bandwidth / 1e12:.2f} TB/s")
    report.say("limits", "bf16 products", f"{flops / 1e12:.0f} TFLOP/s")
    return bandwidth, flops


def packed(n: int, k: int, kind: str) -> Weight:
    with torch.device(DEVICE):
        if kind == "bf16":
            return kernel_ops().pack(torch.randn(n, k, dtype=torch.bfloat16))
        int8 = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        scale = torch.rand(n, 1) * 0.01
        if kind in ("w8a8", "w8a16"):
            weight = kernel_ops().pack(int8, "int8").scaled(scale)
            return weight if kind == "w8a16" else _integer(weight)
        int4 = int8.clamp(-8, 7)
        groups = torch.rand(n, k // 32) * 0.01
        if kind == "w4a16":
            return kernel_ops().pack(int4, "int4").scaled(groups.bfloat16(), None, 32)
        levels = torch.randint(0, 256, (n, k // 32), dtype=torch.uint8)
        return _integer(kernel_ops().pack(int4, "int4").scaled(scale, None, 32, levels=levels))


def _integer(weight: Weight) -> Weight:
    from dataclasses import replace

    return replace(weight, activations="int8")


def kernel_ops() -> Any:
    from llm.kernels.reference.backend import pytorch

    return pytorch("a measurement", DEVICE).ops


# Of each matrix: together they are larger than any cache.
_COPIES = 6


def products(report: Report, bandwidth: float) -> None:
    """GEMMs of an 8B model: few rows against memory, many against cuBLAS in bf16."""
    linear = kernel("linear")
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        exact = torch.randn(_COPIES, n, k, device=DEVICE, dtype=torch.bfloat16)
        for kind in ("bf16", "w8a8", "w8a16", "w4a16", "w4a8"):
            weights, said = [packed(n, k, kind) for _ in range(_COPIES)], []
            stored = {"bf16": 2.0, "w8a8": 1.0, "w8a16": 1.0, "w4a16": 0.5625, "w4a8": 0.53125}[kind] * n * k
            for m in (1, 32, 256, 2048):
                x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
                taken = seconds_of(*(partial(linear, x, weight) for weight in weights))
                theirs = seconds_of(*(partial(torch.nn.functional.linear, x, weight) for weight in exact))
                share = f"{stored / taken / bandwidth:.2f} of memory, " if m <= 32 else ""
                said.append(f"{m}: {taken * 1e6:.0f} us ({share}{theirs / taken:.2f} of cuBLAS bf16)")
            report.say("products", f"{kind} {n}x{k}", "; ".join(said))


def profile(report: Report, name: str, llm: LLM, ids: list[list[int]]) -> None:
    """The kernels that take most of 16 steps."""
    params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        llm.generate([{"prompt_token_ids": own} for own in ids], params, use_tqdm=False)
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)[:14]
    for row in rows:
        report.say(
            "profile", f"{name}: {row.key[:60]}", f"{row.self_device_time_total / 1e3:.2f} ms, {row.count} times"
        )


def speed(report: Report, folder: Path, layers: int, bandwidth: float, profiled: bool) -> None:
    """W1, W2 and W4 on the shape of Llama 3.1 8B with random weights, beside transformers in bfloat16."""
    path = folder / "shape"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
    for options in SCHEMES:
        name = options.get("quantization", "bf16")

        def measure(name: str = name, options: dict[str, Any] = options) -> None:
            started = time.perf_counter()
            arguments = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 8192, "device": NAME}
            with opened(str(path), **arguments, enable_prefix_caching=False, **options) as llm:
                report.say(
                    "speed",
                    f"{name}: load",
                    f"{time.perf_counter() - started:.1f} s, {llm.config.reasons.get('num_blocks', '')}",
                )
                stored = llm._engine.runner.cost().bytes_per_step
                for workload, rows, prompt, new in (("W1", 1, 128, 65), ("W2", 32, 144, 65), ("W4", 256, 40, 65)):
                    times = []
                    for repeat in range(4):
                        generator = torch.Generator().manual_seed(repeat)
                        ids = torch.randint(3, 8000, (rows, prompt), generator=generator).tolist()
                        seconds = []
                        for count in (1, new):
                            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                            torch.cuda.synchronize()
                            begun = time.perf_counter()
                            llm.generate([{"prompt_token_ids": own} for own in ids], params, use_tqdm=False)
                            seconds.append(time.perf_counter() - begun)
                        times.append(tuple(seconds))
                    first, whole = sorted(times[1:])[1]
                    step = (whole - first) / (new - 1)
                    report.say(
                        "speed", f"{name}: {workload}",
                        f"prompts {first * 1e3:.1f} ms, a step {step * 1e3:.2f} ms "
                        f"({stored / step / bandwidth:.2f} of memory), {rows * new / whole:.0f} tokens/s",
                    )  # fmt: skip

                    if profiled and workload == "W2":
                        profile(report, f"{name}: {workload}", llm, ids)
                job(llm)  # which captures steps of many sizes
                report.say("speed", f"{name}: job", job(llm))

        report.guarded("speed", name, measure)
    report.guarded("speed", "transformers", lambda: transformers_speed(report, path))


def job(llm: LLM) -> str:
    """More rows than are computed at a time, which end at different steps; others take their places."""
    ids = torch.randint(3, 8000, (768, 40), generator=torch.Generator().manual_seed(1)).tolist()
    params = [SamplingParams(temperature=0, max_tokens=16 + 7 * i % 97, ignore_eos=True) for i in range(len(ids))]
    begun = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": own} for own in ids], params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return f"{len(ids)} rows, {tokens / seconds:.0f} tokens/s, {seconds:.2f} s"


@torch.inference_mode()
def transformers_speed(report: Report, path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16).eval()
    for workload, rows, prompt, new in (("W1", 1, 128, 128), ("W2", 32, 144, 64)):
        ids = torch.randint(3, 8000, (rows, prompt), device=DEVICE)
        times = []
        for count in (1, 1, new):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        first, whole = times[1:]
        step = (whole - first) / (new - 1)
        text = f"prompts {first * 1e3:.1f} ms, a step {step * 1e3:.2f} ms, {rows * new / whole:.0f} tokens/s"
        report.say("speed", f"transformers bf16: {workload}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_report.json"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", default="kernels,models,products,speed")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--profile", action="store_true", help="which kernels take the time of W2")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU can be seen: `python -m llm doctor` says what there is", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING)
    report = Report(args.out, time.monotonic() + 60 * args.minutes)
    report.say("device", "identity", check.identity(DEVICE))
    report.say("device", "date", time.strftime("%Y-%m-%d"))
    parts = args.only.split(",")
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("XDG_CACHE_HOME", name)
        if "kernels" in parts:
            report.guarded("kernels", "all", lambda: kernels(report))
            report.guarded("kernels", "rows alone", lambda: rows_alone(report))
        if "models" in parts:
            models(report, Path(name))
        if {"products", "speed"} & set(parts):
            bandwidth, _ = limits(report)
        if "products" in parts:
            report.guarded("products", "all", lambda: products(report, bandwidth))
        if "speed" in parts:
            speed(report, Path(name), args.layers, bandwidth, args.profile)
    for line in report.wrong:
        print("WRONG", line)
    print(f"\n{len(report.wrong)} things are wrong. The report is {args.out}.")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
