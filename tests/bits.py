"""Did a change move a bit? Digests of the answers to fixed requests, over families, schemes and instruction sets.

    python tests/bits.py record before.json     # in the checkout before the change
    python tests/bits.py compare before.json    # in the one after it; lists what differs and exits 1
    python tests/bits.py record before.json avx512      # of one instruction set alone

It asks for nothing but `LLM.generate`, so it runs in checkouts far apart; run both in one environment, as a
checkpoint's random weights are those of the installed transformers. Instruction sets that this machine does not run are
passed over by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ISAS = ("plain", "avx2", "avx2_vnni", "avx512", "amx")
SCHEMES: dict[str, dict[str, Any]] = {
    "as stored": {},
    "dtype=bfloat16": {"dtype": "bfloat16"},
    **{name: {"quantization": name} for name in ("w8a8", "w8a16", "w4a8", "w4a16")},
}
CALIBRATION = ["And Moses said unto the children of Israel", "In the beginning God created the heaven and the earth."]
# Of the embedded model; groups and blocks divide few of the tiny models' columns.
GROUPED: dict[str, dict[str, Any]] = {
    **{
        f"{name} in groups of 32": {"quantization": {"scheme": name, "group_size": 32, "symmetric": True}}
        for name in ("w4a8", "w4a16")
    },
    **{name: {"quantization": name} for name in ("fp8", "mxfp4", "nf4", "q8_0", "q4_0", "q4_k")},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    **{
        f"{name} calibrated": {"quantization": name, "calibration": CALIBRATION, "skip_tokenizer_init": False}
        for name in ("w8a8_static", "w4a8", "w4a16")
    },
}
LIMITS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 3,  # fewer than the requests: they wait
    "max_num_batched_tokens": 16,  # fewer than the longest prompt: chunks
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 22,
}


def main(arguments: Sequence[str]) -> int:
    if len(arguments) == 3 and arguments[0] == "one":  # an instruction set is chosen once per process
        Path(arguments[2]).write_text(json.dumps(dict(digests(Path(arguments[1])))))
        return 0
    if len(arguments) < 2 or arguments[0] not in ("record", "compare") or not {*arguments[2:]} <= {*ISAS}:
        print(__doc__)
        return 2
    verb, file, isas = arguments[0], Path(arguments[1]), arguments[2:] or ISAS
    before = json.loads(file.read_text()) if verb == "compare" else {}
    if verb == "compare" and not arguments[2:]:
        isas = list(dict.fromkeys(name.partition(":")[0] for name in before))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoints(Path(folder))
        found = {f"{isa}: {name}": digest for isa in isas for name, digest in measured(isa, Path(folder)).items()}
    if verb == "record":
        file.write_text(json.dumps(found, indent=1))
        print(f"{len(found)} digests in {file}")
        return 0
    differing = [name for name in before if found.get(name) != before[name]]
    print(*(f"differs: {name}" for name in differing), sep="\n", end="\n" if differing else "")
    print(f"{len(before) - len(differing)} of {len(before)} digests are the same")
    return 1 if differing or not before else 0


def write_checkpoints(folder: Path) -> None:
    from tiny_models import TINY_MODELS, write_checkpoint

    for name, row in TINY_MODELS.items():
        write_checkpoint(row, folder / name)


def measured(isa: str, folder: Path) -> dict[str, str]:
    out = folder / f"{isa}.json"
    environment = {**os.environ, "LLM_CPU_ISA": isa, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "one", str(folder), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and "does not have" in done.stderr:
        print(f"not run here: {isa}")
        return {}
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(out.read_text())


def digests(folder: Path) -> Iterator[tuple[str, str]]:
    """(model and scheme, SHA-256 of every token and logprob)."""
    import torch

    from llm import LLM

    torch.set_num_threads(1)
    models = [(path.name, (str(path),), SCHEMES) for path in sorted(folder.iterdir()) if path.is_dir()]
    for model, arguments, schemes in [*models, ("embedded", (), SCHEMES | GROUPED)]:
        for scheme, options in schemes.items():
            try:
                with LLM(*arguments, **LIMITS | options) as llm:
                    yield f"{model}, {scheme}", digest(llm)
            except ValueError as error:
                yield f"{model}, {scheme}", f"error: {error}"


def digest(llm: Any) -> str:
    from llm import SamplingParams

    vocabulary = llm.config.model_config.vocab_size
    prompts = [
        [(7 * start + 13 * place) % (vocabulary - 4) + 2 for place in range(count)]
        for start, count in ((1, 5), (2, 1), (3, 41), (4, 17), (1, 23))
    ]
    params = [
        SamplingParams(max_tokens=9, temperature=0, logprobs=3, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.9, seed=11, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.1, top_p=0.8, seed=12, logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.0, top_k=7, seed=13, n=2, logprobs=1, ignore_eos=True),
        SamplingParams(
            max_tokens=9,
            temperature=0.7,
            seed=14,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.2,
            min_p=0.02,
            logprobs=1,
            ignore_eos=True,
        ),
    ]
    seen = hashlib.sha256()
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False):
        add_logprobs(seen, [entry for entry in output.prompt_logprobs or [] if entry])
        for completion in output.outputs:
            seen.update(struct.pack(f"{len(completion.token_ids)}q", *completion.token_ids))
            add_logprobs(seen, completion.logprobs)
    return seen.hexdigest()


def add_logprobs(seen: Any, positions: Sequence[Any]) -> None:
    for position in positions:
        for token, entry in position.items():
            seen.update(struct.pack("qdq", token, entry.logprob, entry.rank or 0))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
