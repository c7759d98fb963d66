"""Texts of mixed lengths embedded by this package and by sentence-transformers, on the same cores.

    python tests/bench/bench_embeddings.py [--texts 1000] [--rounds 3] [--quantization w8a8]

MiniLM-L6's shape (384 channels, 6 layers) with random weights, written by sentence-transformers, which must be
installed. Prints the medians in texts per second, taken in turn, and the largest difference of a vector.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from llm import LLM

VOCABULARY = 30522


def write_model(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as modules
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    BertModel(BertConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(folder / "model")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{index}" for index in range(VOCABULARY - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "model")
    parts = [modules.Transformer(str(folder / "model")), modules.Pooling(384, pooling_mode="mean"), modules.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder / "saved"))


def texts_of(count: int) -> list[str]:
    """Lengths as in a collection of passages: many short ones, few of hundreds of words."""
    draw = random.Random(1)
    lengths = [min(400, max(3, round(draw.lognormvariate(3.6, 0.9)))) for _ in range(count)]
    return [" ".join(f"w{draw.randrange(VOCABULARY - 4)}" for _ in range(length)) for length in lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization")
    given = parser.parse_args()
    texts = texts_of(given.texts)
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        from sentence_transformers import SentenceTransformer

        theirs = SentenceTransformer(str(Path(name) / "saved"), device="cpu")
        with LLM(Path(name) / "saved", quantization=given.quantization) as ours:
            seconds: dict[str, list[float]] = {"offline-llm": [], "sentence-transformers": []}
            for _ in range(given.rounds):
                started = perf_counter()
                found = ours.embed(texts, use_tqdm=False)
                seconds["offline-llm"].append(perf_counter() - started)
                started = perf_counter()
                expected = theirs.encode(texts, batch_size=32)
                seconds["sentence-transformers"].append(perf_counter() - started)
    tokens = sum(len(output.prompt_token_ids) for output in found)
    print(f"{len(texts)} texts, {tokens} tokens, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    for who, taken in seconds.items():
        print(f"{who:24} {len(texts) / statistics.median(taken):7.1f} texts/s  {[round(value, 2) for value in taken]}")
    ratio = statistics.median(seconds["sentence-transformers"]) / statistics.median(seconds["offline-llm"])
    print(f"ratio {ratio:.2f}, largest difference {np.abs(found.to_numpy() - expected).max():.1e}")


if __name__ == "__main__":
    main()
