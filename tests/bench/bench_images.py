"""W7: pages of 1024x1024 pixels, beside transformers in the same run.

    python tests/bench/bench_images.py pages --shape smolvlm-256m [--pages 2 --vision-layers 2 --text-layers 4]
    python tests/bench/bench_images.py pages --shape qwen2.5-vl-3b --pages 1
    python tests/bench/bench_images.py job [--rows 500]

The shapes are the published models', with random weights, fewer layers and 1,024 words, so that a run is short: W7
is 32 pages. `pages` has a row per contestant: ours on weights in bfloat16, with inputs in bfloat16 too, with the
language model in w8a8, with the tower in w8a8 too, and transformers in float32 and bfloat16; how long pages take, and
of ours the tower's part; the CPU seconds of all threads say what other programs on the cores do not change. The
features of the towers are compared.

`job` runs `python -m llm run --image-column` on a folder of pictures: rows per second beside those of `LLM.generate` on
prompts in memory, how long the step loop waited for pictures, and the memory over the rows. Timings need a machine
that does nothing else.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np
import torch

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "models")]
import images

from llm import LLM, SamplingParams

WORDS = 1024
SIDE = 1024
QUESTION = "What does this page say?"
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, dtype bfloat16": {"dtype": "bfloat16"},
    "ours, w8a8": {"quantization": "w8a8"},
    "ours, w8a8 and the tower too": {"quantization": {"scheme": "w8a8", "tower": "w8a8"}},
}
THEIRS = ("transformers, float32", "transformers, bfloat16")
_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def smolvlm(vision_layers: int, text_layers: int) -> images.Family:
    text = {"model_type": "llama", "vocab_size": WORDS, "hidden_size": 576, "intermediate_size": 1536}
    text |= {"num_hidden_layers": text_layers, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5}
    vision = {"model_type": "smolvlm_vision", "hidden_size": 768, "intermediate_size": 3072, "patch_size": 16}
    vision |= {"num_hidden_layers": vision_layers, "num_attention_heads": 12, "image_size": 512}
    return images.Family(
        text,
        vision,
        {"image_token_id": "<image>", "scale_factor": 4},
        {"image_seq_len": 64},
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        positions=4096,
    )


def qwen(vision_layers: int, text_layers: int) -> images.Family:
    rope = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}
    text = {"vocab_size": WORDS, "hidden_size": 2048, "intermediate_size": 11008, "rope_parameters": rope}
    text |= {"num_hidden_layers": text_layers, "num_attention_heads": 16, "num_key_value_heads": 2}
    vision = {"depth": vision_layers, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
    vision |= {"out_hidden_size": 2048, "patch_size": 14, "window_size": 112}
    vision |= {"fullatt_block_indexes": [vision_layers - 1]}
    return images.Family(text, vision, _IDS, {}, {"patch_size": 14}, positions=4096)


SHAPES = {"smolvlm-256m": ("smolvlm", smolvlm), "qwen2.5-vl-3b": ("qwen2_5_vl", qwen)}


def written(shape: str, vision_layers: int, text_layers: int, folder: Path) -> str:
    """A checkpoint in bfloat16; returns the family's name."""
    kind, make = SHAPES[shape]
    name = f"{kind}-w7"
    images.FAMILIES[name] = make(vision_layers, text_layers)
    images.write(name, folder).to(torch.bfloat16).save_pretrained(folder)
    return name


def prompts_of(name: str, pages: int) -> list[dict[str, Any]]:
    mark = images.wrapped(name)
    return [
        {"prompt": f"{mark}{QUESTION}", "multi_modal_data": {"image": images.picture(SIDE, SIDE, seed)}}
        for seed in range(pages)
    ]


def ours(folder: Path, name: str, asked: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_of(name, args.pages)
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    more = {"use_tqdm_on_load": False, "enable_prefix_caching": False, "num_threads": args.threads}
    with LLM(folder, **asked, **more) as llm:
        small = {"prompt": prompts[0]["prompt"], "multi_modal_data": {"image": images.picture(96, 64)}}
        llm.generate(small, params, use_tqdm=False)  # reads the tower
        tower, seconds = llm._engine.runner.images.tower, []
        compute = tower.features

        def timed(inputs: Any) -> Any:
            started = perf_counter()
            found = compute(inputs)
            seconds.append(perf_counter() - started)
            return found

        tower.features = timed
        started, used = perf_counter(), process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        whole, used = perf_counter() - started, process_time() - used
        tower.features = compute
        inputs = llm._preprocessor.images.processor.process(images.picture(96, 64), {}).inputs
        return {
            "seconds": whole,
            "cpu": used,
            "tower": sum(seconds),
            "tokens": len(outputs[0].prompt_token_ids),
            "features": compute(inputs).rows,
        }


def transformers(folder: Path, name: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with LLM(folder, use_tqdm_on_load=False, max_num_seqs=1) as llm:
        processor = llm._preprocessor.images.processor._theirs
    nested = name.startswith("smolvlm")
    prompts = prompts_of(name, args.pages)
    started, used = perf_counter(), process_time()
    for prompt in prompts:
        picture = [prompt["multi_modal_data"]["image"]]
        given = processor(text=[prompt["prompt"]], images=[picture] if nested else picture, return_tensors="pt")
        with torch.inference_mode():
            model.generate(**given, max_new_tokens=args.tokens, min_new_tokens=args.tokens, do_sample=False)
    return {"seconds": perf_counter() - started, "cpu": process_time() - used}


def pages(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        name = written(args.shape, args.vision_layers, args.text_layers, folder)
        for contestant in args.only or (*OURS, *THEIRS):
            if contestant in OURS:
                rows[contestant] = ours(folder, name, OURS[contestant], args)
            else:
                rows[contestant] = transformers(folder, name, contestant.partition(", ")[2], args)
            print(contestant, {key: value for key, value in rows[contestant].items() if key != "features"}, flush=True)
    rivals = [rows[rival]["seconds"] for rival in THEIRS if rival in rows]
    best = min(rivals, default=float("nan"))
    print(f"\n{args.shape}: {args.pages} pages, {args.vision_layers} + {args.text_layers} layers, {args.tokens} tokens")
    print("| | s per page | of these the tower | CPU seconds | times transformers |\n|---|---|---|---|---|")
    for contestant, row in rows.items():
        tower = f"{row['tower'] / args.pages:.2f}" if "tower" in row else ""
        used = row["cpu"] / args.pages
        print(
            f"| {contestant} | {row['seconds'] / args.pages:.2f} | {tower} | {used:.2f} | {best / row['seconds']:.2f} |"
        )
    exact = rows.get("ours")
    for contestant, row in rows.items():
        if exact is not None and contestant in ("ours, dtype bfloat16", "ours, w8a8 and the tower too"):
            cosine = torch.cosine_similarity(row["features"], exact["features"], dim=-1)
            print(f"features of {contestant}: cosine {cosine.mean():.5f} on average, {cosine.min():.5f} at worst")
    return 0


# --- Jobs. ---


def job(args: argparse.Namespace) -> int:
    """Rows of small pictures, of a tiny model: what a row costs besides the model counts most."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = folder / "model"
        images.write("smolvlm", model)
        (folder / "pages").mkdir()
        for index in range(args.rows):
            images.picture(args.side, args.side, index).save(folder / "pages" / f"{index}.jpg", quality=90)
        with (folder / "pages.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["page", "prompt"])
            writer.writerows([f"pages/{index}.jpg", QUESTION] for index in range(args.rows))
        rate, waited, busy = engine_rate(model, folder, args)
        print(f"LLM.generate, files as prompts: {rate:.1f} rows/s; the step loop waited {waited:.2f} of {busy:.2f} s")
        seconds, memory = run_job(model, folder, args)
        own = args.rows / seconds
        print(f"python -m llm run: {own:.1f} rows/s, {own / rate:.2f} of the engine's")
        third = max(1, len(memory) // 3)
        early, late = median(memory[third : 2 * third]), median(memory[2 * third :])
        print(f"memory: {early / 1e6:.0f} MB in the middle third of the rows, {late / 1e6:.0f} MB in the last")
    return 0


def engine_rate(model: Path, folder: Path, args: argparse.Namespace) -> tuple[float, float, float]:
    """(rows per second, seconds in which the loop waited for a picture's inputs, seconds of the call)."""
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    with LLM(model, use_tqdm_on_load=False, max_num_seqs=args.seqs) as llm:
        mark = images.wrapped("smolvlm")

        def prompt(path: Path) -> dict[str, Any]:
            return {"prompt": mark + QUESTION, "multi_modal_data": {"image": path}}

        prompts = [prompt(folder / "pages" / f"{index}.jpg") for index in range(args.rows)]
        llm.generate([prompt(folder / "pages" / "0.jpg")], params, use_tqdm=False)
        ahead, waits = llm._preprocessor.images._ahead, []
        take = ahead.take

        def timed(*given: Any) -> Any:
            started = perf_counter()
            found = take(*given)
            waits.append(perf_counter() - started)
            return found

        ahead.take = timed
        started = perf_counter()
        for _ in llm.generate_iter(prompts, params):
            pass
        seconds = perf_counter() - started
    return args.rows / seconds, float(np.sum(waits)), seconds


def run_job(model: Path, folder: Path, args: argparse.Namespace) -> tuple[float, list[int]]:
    """(seconds of the rows from the first that the journal has, without start and load; the process's memory)."""
    out = folder / "answers.jsonl"
    command = [sys.executable, "-m", "llm", "run", str(folder / "pages.csv"), str(out), "--model", str(model)]
    command += ["--image-column", "page", "--column", "prompt", "--max-num-seqs", str(args.seqs)]
    command += ["--params", json.dumps({"temperature": 0, "max_tokens": args.tokens, "ignore_eos": True})]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()))
    reader.start()
    written, memory = [], []
    while process.poll() is None:
        sleep(0.02)
        count = max(map(lines, (out, *out.parent.glob("answers.jsonl.*"))), default=0)
        if count and (not written or count > written[-1][1]):
            written.append((perf_counter(), count))
        if written:
            memory.append(resident(process.pid))
    reader.join()
    if process.returncode or len(written) < 2:
        raise SystemExit("".join(said))
    if lines(out) != args.rows:
        raise SystemExit(f"{lines(out)} rows of {args.rows} came out")
    (began, first), (ended, last) = written[0], written[-1]
    return (ended - began) * args.rows / (last - first), [item for item in memory if item]


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    of_pages = commands.add_parser("pages")
    of_pages.add_argument("--shape", choices=tuple(SHAPES), default="smolvlm-256m")
    of_pages.add_argument("--pages", type=int, default=2)
    of_pages.add_argument("--vision-layers", type=int, default=2)
    of_pages.add_argument("--text-layers", type=int, default=2)
    of_pages.add_argument("--tokens", type=int, default=8)
    of_pages.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    of_pages.add_argument("--only", action="append", choices=(*OURS, *THEIRS))
    of_pages.set_defaults(run=pages)
    of_job = commands.add_parser("job")
    of_job.add_argument("--rows", type=int, default=500)
    of_job.add_argument("--side", type=int, default=96)
    of_job.add_argument("--tokens", type=int, default=16)
    of_job.add_argument("--seqs", type=int, default=32)
    of_job.set_defaults(run=job)
    args = parser.parse_args()
    result: int = args.run(args)
    return result


if __name__ == "__main__":
    sys.exit(main())
