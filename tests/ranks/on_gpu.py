"""Ranks on one GPU: NCCL with one rank, and two ranks that share the GPU by way of the host. One file to send back.

    python tests/ranks/on_gpu.py [--out ranks_report.json] [--minutes 3] [--only nccl,llama,wide,...]

Needs a GPU, PyTorch and Triton; no network. NCCL between two GPUs is not tried: that needs two.

    nccl      a group of one: gathering and picking, in a CUDA graph too, a step that is given up, and the next one
    prepare   compiles the kernels of CPUs, by whose memory the ranks gather, and Triton's on their first start
    llama, mixtral, deepseek-v3   tiny models, unquantized and quantized: tokens and logprobs of two ranks are those of
              one process on this GPU, bit for bit
    wide      the same of a model whose sums are cut into segments by the width of its matrices, with the time of a step
    killed    a rank that is killed ends the call with its number

Checks run in a process of their own, which is ended when one of them takes too long; the others go on in another.
Exits 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# Name -> seconds that it may take.
CHECKS: dict[str, float] = {
    "nccl": 60,
    "prepare": 150,
    "llama bfloat16": 60,
    "wide bfloat16": 60,
    "mixtral bfloat16": 60,
    "deepseek-v3 bfloat16": 60,
    "llama w4a8": 60,
    "llama w8a8": 60,
    "wide w4a16": 60,
    "killed": 60,
    "llama float32": 60,
    "mixtral float32": 60,
    "deepseek-v3 w8a8": 60,
    "mixtral w4a8": 60,
    "deepseek-v3 float32": 60,
}
ONE: dict[str, Any] = {"device": "cuda:0"}
TWO: dict[str, Any] = {"devices": ["cuda:0", "cuda:0"], "tensor_parallel_size": 2}
WIDE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 4096,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 2048,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 1024, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ANSWER = "ANSWER "  # before a line of JSON


# --- The checks, each of which returns what it saw and raises where something is wrong. ---


def nccl(folder: Path) -> str:
    import torch

    from llm.errors import RankError
    from llm.layers.communicators import NcclCommunicator
    from llm.layers.parallel import Rendezvous
    from llm.platforms import select_platform

    platform = select_platform("cuda")[0]
    communicator = NcclCommunicator(0, 1, Rendezvous(folder, 20.0), platform)
    said = []
    with platform.inference_mode():

        def gathers() -> None:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                x = torch.randn(7, 3, 64, device="cuda").to(dtype)
                assert torch.equal(communicator.all_gather(x), x), "all_gather"
                assert torch.equal(communicator.all_gather(x[..., 5:9]), x[..., 5:9]), "all_gather of columns"
                rows = x.view(21, 64)
                assert torch.equal(communicator.pick(rows, torch.zeros(21, dtype=torch.int64, device="cuda")), rows)

        started = time.perf_counter()
        gathers()
        said.append(f"first use {time.perf_counter() - started:.1f} s")
        x, graph = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16), torch.cuda.CUDAGraph()
        communicator.watch()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = communicator.pick(communicator.all_gather(x * 2), torch.zeros(4, dtype=torch.int64, device="cuda"))
            time.sleep(0.1)  # while a thread looks at the device
        for value in (1.0, 3.0):
            x.fill_(value)
            graph.replay()
            communicator.watch()
            assert bool((out == 2 * value).all()), "a replay"
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(100):
            communicator.all_gather(x)
        end.record()
        torch.cuda.synchronize()
        said.append(f"a gather alone {begin.elapsed_time(end) * 10:.0f} us")
        time.sleep(0.2)
        communicator.check()
        del graph, out  # as recorded steps are forgotten
        for _ in range(2):
            communicator.abort()
            try:
                communicator.all_gather(x)
            except RankError as error:
                said.append(str(error))
            else:
                raise AssertionError("a step that was given up goes on")
            communicator.restart()
            gathers()
        torch.cuda.synchronize()
        # A device that is not done in time.
        communicator._timeout_s = 0.3
        torch.cuda._sleep(int(4e9))
        communicator.watch()
        until = time.monotonic() + 10
        try:
            while time.monotonic() < until:
                communicator.check()
        except RankError as error:
            said.append(f"overdue: {error}")
        else:
            raise AssertionError("nothing watches the device")
        torch.cuda.synchronize()
        communicator.restart()
        gathers()
        communicator.close()
    return "; ".join(dict.fromkeys(said))


def prepare(folder: Path) -> str:
    from llm.kernels.select import backend_for
    from llm.platforms import select_platform

    started = time.perf_counter()
    cpu = threading.Thread(target=lambda: backend_for(select_platform("cpu")[0]))
    cpu.start()
    backend = backend_for(select_platform("cuda")[0])
    gpu = time.perf_counter() - started
    cpu.join()
    why = backend_for(select_platform("cpu")[0]).reason
    wrong = getattr(backend, "disagrees", {})
    assert not wrong, f"kernels disagree: {wrong}"
    return f"Triton {gpu:.0f} s, all {time.perf_counter() - started:.0f} s ({why})"


def models(name: str, scheme: str, folder: Path) -> str:
    from ranks.matrix import answers, evened
    from tiny_models import TINY_MODELS, make_prompts, write_checkpoint

    dtype = scheme if scheme in ("bfloat16", "float32") else "bfloat16"
    options = {"dtype": dtype} if dtype == scheme else {"dtype": dtype, "quantization": scheme}
    row = evened(TINY_MODELS[name])
    write_checkpoint(row, folder)
    prompts, seconds = make_prompts(row), [time.perf_counter()]
    alone = answers(folder, row, prompts, **ONE, **options)
    seconds.append(time.perf_counter())
    both = answers(folder, row, prompts, **TWO, **options)
    seconds.append(time.perf_counter())
    return _compared(alone, both) + f", {seconds[1] - seconds[0]:.1f} and {seconds[2] - seconds[1]:.1f} s"


def _compared(alone: list[Any], both: list[Any]) -> str:
    same = [one == two for one, two in zip(alone, both, strict=True)]
    tokens = [one[0] == two[0] for one, two in zip(alone, both, strict=True)]
    assert all(same), f"OTHER BITS: {sum(same)} of {len(same)} answers are the same, the tokens of {sum(tokens)}"
    return f"the same tokens and logprobs of {len(same)} prompts"


def wide(scheme: str, folder: Path) -> str:
    import torch
    from safetensors.torch import save_file

    from llm import LLM, SamplingParams
    from llm.kernels.triton.gemm import form_of

    (folder / "config.json").write_text(json.dumps(WIDE))
    generator = torch.Generator().manual_seed(3)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(2048, 2048),
        "lm_head.weight": matrix(2048, 2048),
        "model.norm.weight": torch.ones(2048).bfloat16(),
    }
    for layer in range(2):
        own = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{own}{name}.weight"] = torch.ones(2048).bfloat16()
        sizes = {"q_proj": (2048, 2048), "k_proj": (512, 2048), "v_proj": (512, 2048), "o_proj": (2048, 2048)}
        tensors |= {f"{own}self_attn.{name}.weight": matrix(*shape) for name, shape in sizes.items()}
        sizes = {"gate_proj": (4096, 2048), "up_proj": (4096, 2048), "down_proj": (2048, 4096)}
        tensors |= {f"{own}mlp.{name}.weight": matrix(*shape) for name, shape in sizes.items()}
    save_file(tensors, folder / "model.safetensors")
    options: dict[str, Any] = {} if scheme == "bfloat16" else {"quantization": scheme}
    prompts = [{"prompt_token_ids": [3 + (17 * at + 5 * row) % 2000 for at in range(9 + 3 * row)]} for row in range(8)]
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=16, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    found, said = [], []
    for where in (ONE, TWO):
        with LLM(
            folder, skip_tokenizer_init=True, max_model_len=256, speculative_config=None, use_tqdm_on_load=False,
            **where, **options,
        ) as llm:  # fmt: skip
            if where is not TWO:
                (layer,) = llm.apply_model(lambda model: model.model.layers[0].mlp.down_proj.packed_weight)
                form = form_of(layer, torch.bfloat16)
                assert form is not None and form.SEGMENTS > 1, "the sums of this model are not cut"
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs])
            times = []
            for count in (2, 34):
                one = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                seconds = []
                for _ in range(6):  # the first ones compile and record
                    begun = time.perf_counter()
                    llm.generate(prompts[:1], one, use_tqdm=False)
                    seconds.append(time.perf_counter() - begun)
                times.append(min(seconds[3:]))
            said.append(f"a step {(times[1] - times[0]) / 32 * 1e3:.2f} ms")
    return f"{_compared(found[0], found[1])}; one process {said[0]}, two ranks {said[1]}"


def killed(folder: Path) -> str:
    from ranks.matrix import evened
    from tiny_models import TINY_MODELS, make_prompts, write_checkpoint

    from llm import LLM, SamplingParams, WorkerDiedError

    row = evened(TINY_MODELS["llama"])
    write_checkpoint(row, folder)
    prompts = [{"prompt_token_ids": ids} for ids in make_prompts(row)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(folder, skip_tokenizer_init=True, speculative_config=None, **TWO) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        threading.Timer(0.3, os.kill, (llm._engine.runner.group._workers[0].pid, signal.SIGKILL)).start()
        until = time.monotonic() + 20
        try:
            while time.monotonic() < until:
                llm.generate(prompts, params, use_tqdm=False)
        except WorkerDiedError as error:
            assert error.number == 1 and "SIGKILL" in str(error), str(error)
            return str(error).splitlines()[0]
    raise AssertionError("the call went on without rank 1")


def check_of(name: str) -> Callable[[Path], str]:
    kind, _, scheme = name.partition(" ")
    alone: dict[str, Callable[[Path], str]] = {"nccl": nccl, "prepare": prepare, "killed": killed}
    if kind in alone:
        return alone[kind]
    return (lambda folder: wide(scheme, folder)) if kind == "wide" else lambda folder: models(kind, scheme, folder)


# --- The process that runs them, and the one that waits for it. ---


def serve(names: list[str]) -> None:
    """Run these, with a line for each as soon as it is done."""
    from ranks.kept import kept_ranks

    with kept_ranks():
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = {"name": name, "found": check_of(name)(Path(folder)), "wrong": False}
                except BaseException as error:
                    traceback.print_exc()
                    found = {"name": name, "found": f"{type(error).__name__}: {error}"[:1000], "wrong": True}
            print(_ANSWER + json.dumps(found), flush=True)
        os._exit(0)  # whatever is left of what went wrong


def run_all(names: list[str], until: float, say: Callable[[str, str, bool], None]) -> None:
    left = list(names)
    while left:
        command = [sys.executable, str(Path(__file__)), "--serve", *left]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert process.stdout is not None
        threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
        starts = 30.0  # importing takes a while
        while left:
            limit = min(time.monotonic() + CHECKS[left[0]] + starts, until)
            starts, found = 0.0, _answer(lines, limit)
            name = left.pop(0)
            if found is None:
                is_over = time.monotonic() >= until
                say(
                    name, "not done: no time was left" if is_over else "took too long, or its process died", not is_over
                )
                for other in left if is_over else ():
                    say(other, "not run: no time was left", False)
                left = [] if is_over else left
                break
            say(name, found["found"], found["wrong"])
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _forward(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _answer(lines: queue.SimpleQueue[str | None], until: float) -> dict[str, Any] | None:
    while True:
        try:
            line = lines.get(timeout=max(0.01, until - time.monotonic()))
        except queue.Empty:
            return None
        if line is None:
            return None
        if line.startswith(_ANSWER):
            found: dict[str, Any] = json.loads(line.removeprefix(_ANSWER))
            return found
        print(line, end="", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("ranks_report.json"))
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--only", default="", help="the first words of checks, with commas")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
    chosen = [name for name in CHECKS if not args.only or name.partition(" ")[0] in args.only.split(",")]
    report: dict[str, Any] = {}
    wrong: list[str] = []
    started = time.monotonic()

    def say(name: str, found: str, is_wrong: bool) -> None:
        report[name] = found
        wrong.extend([f"{name}: {found}"] if is_wrong else [])
        print(f"{time.monotonic() - started:6.1f} s {'WRONG ' if is_wrong else ''}{name}: {found}", flush=True)
        args.out.write_text(json.dumps({**report, "wrong": wrong}, indent=1))

    run_all(chosen, started + 60 * args.minutes, say)
    for line in wrong:
        print("WRONG", line)
    print(f"\n{len(wrong)} things are wrong. The report is {args.out}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
