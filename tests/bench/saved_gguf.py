"""Tiny models of each family, saved as GGUF, in llama.cpp: which of its greedy tokens are ours.

    python tests/bench/saved_gguf.py --folder /tmp/saved --llama-python /tmp/venv_llamacpp/bin/python

Weights are random, so likely tokens are near one another: where a row first differs, the gap is our logprob of our
token less that of llama.cpp's, which rounds activations to 8 bits. A gap above `--most` is an error. gpt-oss is without
YaRN here: llama.cpp rounds the range that it blends to whole channels, of which a head has few.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_experts as experts
from bench_gguf import gaps

HERE = Path(__file__).resolve().parent
NEW_TOKENS = 12


def rows() -> dict[str, tuple[Any, str]]:
    """name -> (tiny model, what it is quantized to)."""
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "models"), str(HERE.parent / "quantization")]
    from test_quant_gguf import FAMILIES

    model, scheme = FAMILIES["gpt-oss"]
    plain = replace(model, config={**model.config, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    return {**FAMILIES, "gpt-oss": (plain, scheme)}


def compared(folder: Path, name: str, model: Any, scheme: str, llama_python: str) -> dict[str, Any]:
    from tiny_models import make_prompts, write_checkpoint

    from llm import LLM, SamplingParams

    checkpoint, file = folder / f"{name}-float", folder / f"{name}-{scheme}.gguf"
    write_checkpoint(model, checkpoint)
    file.unlink(missing_ok=True)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_dtype": "float32", "speculative_config": None}
    head = {"lm_head": "q8_0"} if scheme == "mxfp4" else {}
    with LLM(checkpoint, quantization={"scheme": scheme, **head}, max_model_len=64, **options) as llm:
        llm.save_quantized(file, "gguf")
    prompts = make_prompts(model)[:4]
    task = {"file": str(file), "prompts": [prompts[:1], prompts], "new": NEW_TOKENS, "runs": 1}
    theirs = experts.answer([llama_python, str(HERE / "llama_cpp_child.py"), json.dumps(task)])["tokens"]
    with LLM(file, max_model_len=64, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        ours = [list(output.outputs[0].token_ids) for output in outputs]
        return {"same": experts.shared(ours, theirs), "gap": max(gaps(llm, prompts, ours, theirs), default=0.0)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--llama-python", required=True, help="interpreter with llama-cpp-python")
    parser.add_argument("--only", help="families, with commas")
    parser.add_argument("--most", type=float, default=0.5, help="largest gap")
    args = parser.parse_args()
    folder, worst = Path(args.folder), 0.0
    folder.mkdir(parents=True, exist_ok=True)
    for name, (model, scheme) in rows().items():
        if args.only and name not in args.only.split(","):
            continue
        found = compared(folder, name, model, scheme, args.llama_python)
        worst = max(worst, found["gap"])
        print(f"{name}, {scheme}: {found['same']:.0%} of the tokens, gap {found['gap']:.3f}", flush=True)
    return int(worst > args.most)


if __name__ == "__main__":
    sys.exit(main())
