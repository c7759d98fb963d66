"""Holds our vectors and scores against sentence-transformers itself, on folders that the package writes.

    python tests/models/sentence_oracle.py

It needs the package, which the suite does not: pip install sentence-transformers. Every encoder, kind of pooling and
module is one tiny random folder; the largest difference must be below 1e-5. Exits with 1 if one is not.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from checkpoints.sentence_transformers import BERT, ENCODERS, save_model, save_tokenizer
from tiny_models import BASE

from llm import LLM

TOLERANCE = 1e-5
TEXTS = [" ".join(f"w{(7 * i + j) % 250}" for j in range(1 + (11 * i) % 40)) for i in range(24)]


def transformer(folder: Path, ends: bool) -> Any:
    from sentence_transformers import models
    from transformers import PreTrainedTokenizerFast

    save_tokenizer(folder, ends=ends)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    file, inputs = str(folder / "tokenizer.json"), ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_file=file, model_input_names=inputs, **names).save_pretrained(folder)
    return models.Transformer(str(folder))


def embedder(work: Path, name: str, config: dict[str, Any], pooling: str, dense: bool) -> float:
    """The largest difference of a vector, with and without a prompt."""
    from sentence_transformers import SentenceTransformer, models

    save_model(work / "model", name, **config)
    parts = [transformer(work / "model", pooling == "lasttoken"), models.Pooling(48, pooling_mode=pooling)]
    if dense:
        torch.manual_seed(1)
        parts.append(models.Dense(48, 20))
    theirs = SentenceTransformer(modules=[*parts, models.Normalize()], prompts={"query": "w1 w2 "}, device="cpu")
    theirs.save(str(work / "saved"))
    worst = 0.0
    with LLM(work / "saved") as llm:
        for prompt in (None, "query"):
            expected = theirs.encode(TEXTS, prompt_name=prompt, batch_size=8)
            found = llm.embed(TEXTS, prompt_name=prompt, use_tqdm=False).to_numpy()
            worst = max(worst, float(np.abs(found - expected).max()))
    return worst


def cross_encoder(work: Path) -> float:
    from sentence_transformers import CrossEncoder

    save_model(work / "model", "BertForSequenceClassification", **BERT, num_labels=1)
    transformer(work / "model", False)
    theirs = CrossEncoder(str(work / "model"), device="cpu")
    theirs.save_pretrained(str(work / "saved"))
    expected = theirs.predict([(TEXTS[0], text) for text in TEXTS])
    with LLM(work / "saved") as llm:
        return float(np.abs(llm.score(TEXTS[0], TEXTS, use_tqdm=False).to_numpy() - expected).max())


def main() -> int:
    torch.set_num_threads(1)
    jobs: dict[str, Any] = {}
    for family, (prefix, config) in ENCODERS.items():
        pooling = "cls" if family == "roberta" else "mean"
        jobs[f"{family}, {pooling}"] = lambda work, p=prefix, c=config, k=pooling: embedder(
            work, f"{p}Model", c, k, False
        )
    jobs["bert, mean, dense"] = lambda work: embedder(work, "BertModel", dict(BERT), "mean", True)
    small = {**BASE, "num_hidden_layers": 2}
    jobs["qwen3, last token"] = lambda work: embedder(work, "Qwen3Model", small, "lasttoken", False)
    jobs["cross-encoder"] = cross_encoder
    failed = 0
    for name, job in jobs.items():
        with tempfile.TemporaryDirectory() as work:
            worst = job(Path(work))
        failed += worst > TOLERANCE
        print(f"{name:28} {worst:.1e}{'' if worst <= TOLERANCE else '  too far'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
