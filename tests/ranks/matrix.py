"""Every tiny family, and quantization schemes and formats, with 1, 2 and 4 ranks: tokens and logprobs bit for bit.

    python tests/ranks/matrix.py [names or name+scheme ...] [--ranks 2 4] [--schemes w8a8 ...]

What cannot be split is refused; the sentence is printed. Takes some minutes; the tests have a few of the rows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ranks.kept import kept_ranks
from tiny_models import BASE, TINY_MODELS, TinyModel, make_prompts, one_thread, write_checkpoint

from llm import LLM, SamplingParams
from llm.errors import LLMError

# What ranks split by, beside all that is called intermediate.
_SPLIT = ("ffn_hidden_size", "n_inner", "ffn_dim", "shared_size")


def evened(row: TinyModel) -> TinyModel:
    """The row with odd sizes rounded up to a multiple of 8, which 2 and 4 ranks divide."""
    sizes = {
        name: -(-value // 8) * 8
        for name, value in {**BASE, **row.config}.items()
        if type(value) is int and (name in _SPLIT or "intermediate" in name)
    }
    return replace(row, config={**row.config, **sizes})


def answers(folder: Path, row: TinyModel, prompts: Sequence[Sequence[int]], **options: Any) -> list[Any]:
    """Greedy and sampled tokens with their logprobs, of prompts in chunks that share steps."""
    params = [
        SamplingParams(temperature=0.8 if index % 2 else 0.0, seed=5, max_tokens=8, logprobs=3, prompt_logprobs=1)
        for index in range(len(prompts))
    ]
    options = {"max_num_batched_tokens": 24, "num_threads": 1, "speculative_config": None, **row.engine, **options}
    with LLM(folder, skip_tokenizer_init=True, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
        return [(item.outputs[0].token_ids, item.outputs[0].logprobs, item.prompt_logprobs) for item in outputs]


def compared(name: str, ranks: Sequence[int]) -> Mapping[int, str]:
    """Ranks -> "same", "OTHER BITS" or why they are refused, of a row of the table or `row+scheme`."""
    name, _, scheme = name.partition("+")
    row, options = evened(TINY_MODELS[name]), {"quantization": scheme} if scheme else {}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(row, Path(folder))
        prompts = make_prompts(row)
        try:
            alone = answers(Path(folder), row, prompts, **options)
        except LLMError as error:
            return dict.fromkeys(ranks, f"refused: by one process too: {error}")
        for size in ranks:
            try:
                same = answers(Path(folder), row, prompts, tensor_parallel_size=size, **options) == alone
                found[size] = "same" if same else "OTHER BITS"
            except LLMError as error:
                found[size] = f"refused: {str(error).splitlines()[-1]}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="rows of tiny_models.py; all by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--schemes", nargs="+", default=[""])
    given = parser.parse_args()
    counts = {"same": 0, "refused": 0, "OTHER BITS": 0}
    with one_thread(), kept_ranks():
        for name in given.names or TINY_MODELS:
            for scheme in given.schemes:
                whole = f"{name}+{scheme}" if scheme else name
                for size, verdict in compared(whole, given.ranks).items():
                    counts[verdict.partition(":")[0]] += 1
                    print(f"{whole} x {size}: {verdict}", flush=True)
    print(counts)
    sys.exit(counts["OTHER BITS"] > 0)


if __name__ == "__main__":
    main()
