"""How far recurrent models are from transformers after thousands of tokens, in any chunks.

    python tests/models/drift.py                 # every recurrent row of tiny_models.py, 2,000 tokens
    python tests/models/drift.py mamba2 --tokens 500
    python tests/models/drift.py plamo2 --greedy # the tokens of a greedy answer of 2,000, held against the reference's
    python tests/models/drift.py plamo2 --float64 # ours and the reference's float32, both against its float64

A recurrence could lose what attention does not: an error in its state stays. Each tiny model reads one long prompt,
whole and in chunks of 1, 7 and 64 tokens. The logprobs of the prompt must be the same bits in all, and within 1e-4 of
transformers', which is fed the same tokens at once. plamo2, which transformers lacks, is held against `plamo2.py` in
float64. A greedy token may differ from the reference's only where the reference's two are closer than 1e-4.

The medians of the first and of the last quarter show whether errors grow. Single tokens may be further apart than
1e-4: that is what float32 is, whoever computes. `--float64` shows it. Of PLaMo 2 the worst token is 4.5e-4 from float64
here and 5.0e-4 in plain PyTorch, the same token; the medians are 4.7e-6 and 4.8e-6. So are those of the gated delta
rule: of Qwen3-Next the worst are 1.1e-4 here and 1.1e-4 in transformers, of Qwen3.5 with experts 3.1e-4 and 7.0e-4.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from tiny_models import BASE, TINY_MODELS, VOCAB, reference_logprobs, reference_model, write_checkpoint

from llm import LLM, SamplingParams

ROWS = """
    mamba falcon-mamba mamba2 granitemoehybrid granitemoehybrid-dense bamba falcon-h1 nemotron-h nemotron-h-experts
    jamba zamba2 zamba2-grouped plamo2 lfm2 lfm2-moe qwen3-next qwen3-5 qwen3-5-moe kimi-linear olmo-hybrid
""".split()
CHUNKS = (1, 7, 64)
TOLERANCE = 1e-4


def logprobs(folder: Path, prompt: list[int], chunk: int) -> torch.Tensor:
    """Of each token of the prompt but the first."""
    with LLM(
        folder,
        skip_tokenizer_init=True,
        kv_cache_dtype="float32",
        max_model_len=len(prompt) + 1,
        max_num_batched_tokens=chunk,
        max_num_seqs=1,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    lines = (output.prompt_logprobs or [])[1:]
    return torch.tensor([line[token].logprob for line, token in zip(lines, prompt[1:], strict=True) if line])


@contextmanager
def checkpoint(name: str, tokens: int) -> Iterator[Path]:
    """The row's folder, whose positions reach as far as `tokens`."""
    row = TINY_MODELS[name]
    if row.config.get("max_position_embeddings", BASE["max_position_embeddings"]) is not None:
        row = replace(row, config={**row.config, "max_position_embeddings": tokens + 1})
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / name
        write_checkpoint(row, folder)
        yield folder


def deviations(name: str, tokens: int) -> torch.Tensor:
    """Of each token; raises if chunks change a bit."""
    with checkpoint(name, tokens) as folder:
        prompt = torch.randint(3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        whole = logprobs(folder, prompt, tokens)
        for chunk in CHUNKS:
            if not torch.equal(logprobs(folder, prompt, chunk), whole):
                raise SystemExit(f"{name}: chunks of {chunk} change the answer")
        expected = reference_logprobs(folder, prompt[:1], prompt[1:])
    theirs = expected.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
    return (whole - theirs).abs()


def from_float64(name: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token: how far ours is from the reference in float64, and the reference in float32."""
    with checkpoint(name, tokens) as folder:
        prompt = torch.randint(3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        ours = logprobs(folder, prompt, tokens)
        single, double = (computed_in(dtype, folder, prompt) for dtype in (torch.float32, torch.float64))
    return (ours - double).abs(), (single - double).abs()


@torch.no_grad()
def computed_in(dtype: torch.dtype, folder: Path, prompt: list[int]) -> torch.Tensor:
    """The reference's logprobs of each token of the prompt but the first."""
    model = reference_model(folder).to(dtype)
    model.computes_in = dtype  # plamo2.py has its own
    logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1).double()


def shortfalls(name: str, tokens: int) -> torch.Tensor:
    """Of each token of a greedy answer: how much less likely the reference holds it than the token that it prefers."""
    with checkpoint(name, tokens) as folder:
        prompt = torch.randint(3, VOCAB, (8,), generator=torch.Generator().manual_seed(0)).tolist()
        with LLM(folder, skip_tokenizer_init=True, kv_cache_dtype="float32", max_model_len=tokens) as llm:
            params = SamplingParams(temperature=0, max_tokens=tokens - len(prompt), ignore_eos=True)
            (output,) = llm.generate([prompt], params, use_tqdm=False)
        answer = list(output.outputs[0].token_ids)
        expected = reference_logprobs(folder, prompt, answer)
    return expected.amax(1) - expected.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)


def spread(found: torch.Tensor) -> str:
    return f"worst {found.max():.1e} at token {int(found.argmax()) + 1}, median {found.median():.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=ROWS)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--greedy", action="store_true", help="hold a greedy answer against the reference")
    parser.add_argument("--float64", action="store_true", help="hold ours and the reference's float32 against float64")
    options = parser.parse_args()
    for name in options.rows:
        if options.float64:
            ours, theirs = from_float64(name, options.tokens)
            print(f"{name:24} from float64: ours {spread(ours)}; the reference's float32 {spread(theirs)}", flush=True)
            continue
        found = (shortfalls if options.greedy else deviations)(name, options.tokens)
        worst, part = found.max().item(), len(found) // 4
        verdict = "ok" if worst < TOLERANCE else "FURTHER THAN 1e-4"
        if options.greedy:
            print(
                f"{name:24} {(found > 0).sum()} of {len(found)} tokens differ, worst {worst:.1e} {verdict}", flush=True
            )
            continue
        ends = ", ".join(f"{quarter.median():.1e}" for quarter in (found[:part], found[-part:]))
        print(f"{name:24} worst {worst:.1e}, medians {ends} {verdict}", flush=True)


if __name__ == "__main__":
    main()
