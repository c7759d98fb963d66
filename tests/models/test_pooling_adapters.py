"""Vectors of rows with adapters are those of transformers' model with the sums in its weights, in any mix of rows."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints.adapters import add_adapter, write_adapter
from checkpoints.sentence_transformers import BERT, hidden_states, prompts, save_model, save_modules, save_tokenizer
from same_answers import same_values
from tiny_models import one_thread

from llm import LLM, ValidationError
from llm.inputs import LoRARequest

TARGETS = {"one": ("query", "value", "dense", "word_embeddings"), "two": ("key", "value")}


def vector(model: Any, prompt: list[int]) -> np.ndarray:
    return torch.nn.functional.normalize(hidden_states(model, prompt).double().mean(0), dim=-1).numpy()


def test_an_encoder_with_an_adapter_per_row(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "BertModel", **BERT)
    save_modules(tmp_path / "model", "mean")
    save_tokenizer(tmp_path / "model")
    for seed, (name, targets) in enumerate(TARGETS.items()):
        write_adapter(model, tmp_path / name, targets, rank=3, seed=seed)
    one, two = (LoRARequest(name, index + 1, str(tmp_path / name)) for index, name in enumerate(TARGETS))
    requests = [one, None, two, one, two]
    with one_thread(), LLM(tmp_path / "model", enable_lora=True, max_loras=1, max_num_batched_tokens=96) as llm:
        found = llm.embed(prompts(), lora_request=requests, use_tqdm=False).to_numpy()
        theirs = {"": model}
        for request in (one, two):
            theirs[request.lora_name] = deepcopy(model)
            add_adapter(theirs[request.lora_name], Path(request.lora_path))
        for prompt, request, row in zip(prompts(), requests, found, strict=True):
            (alone,) = llm.embed([prompt], lora_request=request, use_tqdm=False).to_numpy()
            assert same_values(alone, row)
            for name, own in theirs.items():
                is_close = np.abs(row - vector(own, prompt)).max() < 1e-5
                assert is_close == (name == ("" if request is None else request.lora_name))
        texts = ["w1 w2 w3", "w4 w5", "w1 w2 w3"]
        scores = llm.score("w9 w3", texts, lora_request=[one, one, two], use_tqdm=False).to_numpy()
        query, *documents = llm.embed(["w9 w3", *texts], lora_request=one, use_tqdm=False).to_numpy()
        assert np.allclose(scores[:2], np.stack(documents[:2]) @ query, atol=1e-6)
        assert abs(scores[2] - documents[2] @ query) > 1e-3
        best = llm.rerank("w9 w3", texts[:2], lora_request=one, use_tqdm=False)
        assert sorted(item.relevance_score for item in best) == pytest.approx(sorted(scores[:2].tolist()), abs=1e-6)
        with pytest.raises(ValidationError, match="there are 2 lora_request for 1 prompts"):
            llm.embed("w1", lora_request=[one, two])
