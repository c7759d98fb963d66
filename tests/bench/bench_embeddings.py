"""Texts of mixed lengths embedded by this package and by sentence-transformers, on the same cores.

    python tests/bench/bench_embeddings.py [--shape bge-base] [--texts 1000] [--rounds 3] [--quantizations none w8a8]

The shapes of MiniLM-L6 and bge-base with random weights, written by sentence-transformers, which must be installed.
Prints medians of what is taken in turn: processor seconds of all threads, which a busy machine changes little, and
texts per second by the clock; and the largest difference of a vector. --folder keeps the model for the next time.
With few texts, batches of 32 are mostly padding: --every 8 takes each eighth batch of the sorted --texts, which are
padded as all of them are.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from llm import LLM

VOCABULARY = 30522
_BATCH = 32
SHAPES = {
    "minilm-l6": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "bge-base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
}


def write_model(folder: Path, shape: str) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as modules
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = SHAPES[shape]
    BertModel(BertConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(folder / "model")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{index}" for index in range(VOCABULARY - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "model")
    pooling = modules.Pooling(sizes["hidden_size"], pooling_mode="mean")
    parts = [modules.Transformer(str(folder / "model")), pooling, modules.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder / "saved"))


def texts_of(count: int) -> list[str]:
    """Lengths as in a collection of passages: many short ones, few of hundreds of words."""
    draw = random.Random(1)
    lengths = [min(400, max(3, round(draw.lognormvariate(3.6, 0.9)))) for _ in range(count)]
    return [" ".join(f"w{draw.randrange(VOCABULARY - 4)}" for _ in range(length)) for length in lengths]


def some_batches(texts: list[str], every: int) -> list[str]:
    """Each `every`th batch of sentence-transformers, which sorts by length."""
    longest_first = sorted(texts, key=lambda text: -len(text.split()))
    return [
        text
        for start in range(every // 2 * _BATCH, len(texts), every * _BATCH)
        for text in longest_first[start : start + _BATCH]
    ]


def compare(folder: Path, texts: list[str], rounds: int, quantizations: list[str]) -> None:
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(folder / "saved"), device="cpu")
    own = {name: LLM(folder / "saved", quantization=None if name == "none" else name) for name in quantizations}
    ways: dict[str, Callable[[list[str]], np.ndarray]] = {
        "sentence-transformers": lambda given: theirs.encode(given, batch_size=_BATCH)
    }
    for name, llm in own.items():
        label = f"offline-llm, {'float32' if name == 'none' else name}"
        ways[label] = lambda given, llm=llm: llm.embed(given, use_tqdm=False).to_numpy()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}  # (of the processor, by the clock)
    found = {name: run(texts[:8]) for name, run in ways.items()}
    for _ in range(rounds):
        for name, run in ways.items():
            started = process_time(), perf_counter()
            found[name] = run(texts)
            seconds[name].append((process_time() - started[0], perf_counter() - started[1]))
    base = "sentence-transformers"
    for name, taken in seconds.items():
        cpu, clock = (statistics.median(own[kind] for own in taken) for kind in (0, 1))
        cpu_ratio, clock_ratio = (
            statistics.median(theirs[kind] / own[kind] for theirs, own in zip(seconds[base], taken, strict=True))
            for kind in (0, 1)
        )
        difference = np.abs(found[name] - found[base]).max()
        print(
            f"{name:22} {cpu:6.2f} processor seconds, ratio {cpu_ratio:.2f}; {len(texts) / clock:6.1f} texts/s, ratio "
            f"{clock_ratio:.2f}; largest difference {difference:.1e}",
            flush=True,
        )
    for llm in own.values():
        llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="minilm-l6")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantizations", nargs="+", default=["none", "w8a8", "w4a8"])
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        if not (folder / "saved").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_model(folder, given.shape)
        texts = texts_of(given.texts)
        texts = texts if given.every == 1 else some_batches(texts, given.every)
        words = sum(len(text.split()) for text in texts)
        threads = torch.get_num_threads()
        print(f"{given.shape}: {len(texts)} texts, {words} words, {threads} threads, load {os.getloadavg()[0]:.1f}")
        compare(folder, texts, given.rounds, given.quantizations)


if __name__ == "__main__":
    main()
