"""`score` and `rerank`: pairs of texts for a cross-encoder, cosines of an embedder, a Qwen3 reranker's text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints.sentence_transformers import save_model, save_modules, save_tokenizer
from kernel_sets import needs_kernels
from tiny_models import BASE, VOCAB

from llm import LLM, PoolingParams, ValidationError

pytestmark = pytest.mark.usefixtures("one_core")

BERT = {"vocab_size": VOCAB, "hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 91}
SMALL = {"num_hidden_layers": 2, "pad_token_id": 0}
QUERY, DOCUMENTS = "w1 w2", ["w3 w4 w5", "w9", "w7 w1"]
RERANKER: dict[str, Any] = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["w1", "w2"],
    "is_original_qwen3_reranker": True,
}


@needs_kernels
def test_a_cross_encoder_reads_both_texts(tmp_path: Path) -> None:
    model: Any = save_model(tmp_path, "BertForSequenceClassification", **BERT, **SMALL, num_labels=1)
    save_tokenizer(tmp_path)

    def expected(ids: list[int], second: int) -> float:
        types = torch.tensor([[int(place >= second) for place in range(len(ids))]])
        with torch.no_grad():
            return float(torch.sigmoid(model(torch.tensor([ids]), token_type_ids=types).logits))

    with LLM(tmp_path) as llm:
        outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        assert outputs[0].prompt_token_ids == [2, 6, 7, 3, 8, 9, 10, 3]
        for output in outputs:
            assert output.outputs.score == pytest.approx(expected(output.prompt_token_ids, 4), abs=1e-5)
            assert output.outputs.score != pytest.approx(expected(output.prompt_token_ids, 99), abs=1e-5)
        alone = [llm.score(QUERY, text, use_tqdm=False)[0].outputs.score for text in DOCUMENTS]
        assert alone == outputs.to_numpy().tolist()
        ranked = llm.rerank(QUERY, DOCUMENTS, top_n=2, use_tqdm=False)
        best = sorted(range(3), key=lambda place: -alone[place])[:2]
        assert [(one.index, one.document) for one in ranked] == [(place, DOCUMENTS[place]) for place in best]
        cut = llm.score(QUERY, "w3 " * 30, use_tqdm=False, pooling_params=PoolingParams(truncate_prompt_tokens=9))
        assert cut[0].prompt_token_ids == [2, 6, 7, 3, 8, 8, 8, 8, 3] and cut[0].num_dropped_tokens == 26
        with pytest.raises(ValidationError, match="there are 2 texts in data_1 and 3 in data_2; pass as many"):
            llm.score([QUERY, QUERY], DOCUMENTS)


def test_a_reranker_is_asked_with_its_published_text(tmp_path: Path) -> None:
    model: Any = save_model(tmp_path, "Qwen3ForCausalLM", **{**BASE, **SMALL})
    save_tokenizer(tmp_path, ends=True)
    with LLM(tmp_path, hf_overrides=RERANKER) as llm:
        outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        for output in outputs:
            ids = output.prompt_token_ids
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1, [6, 7]]
            assert output.outputs.score == pytest.approx(float(logits.softmax(-1)[1]), abs=1e-5)
            assert ids[-1] != 3, "the text has its special tokens already"
        told = [llm.score(QUERY, "w9", use_tqdm=False, instruction=own)[0] for own in (None, "w20 w21", "w22")]
        for output, words in zip(told, ([], [25, 26], [27]), strict=True):
            ids = [own for own in output.prompt_token_ids if 25 <= own <= 27]
            assert ids == words
        text = "<|im_start|> w1 <Query>: w2 <Document>: "
        (own,) = llm.score(text, "w9", use_tqdm=False)
        assert own.prompt_token_ids == llm.get_tokenizer().encode(text + "w9", add_special_tokens=False)


def test_an_embedder_scores_by_the_angle(tmp_path: Path) -> None:
    save_model(tmp_path, "BertModel", **BERT, **SMALL)
    save_tokenizer(tmp_path)
    with LLM(tmp_path) as llm, LLM(tmp_path, quantization="w8a8") as small:
        found = llm.score(QUERY, DOCUMENTS, use_tqdm=False).to_numpy()
        query, *documents = llm.embed([QUERY, *DOCUMENTS], use_tqdm=False).to_numpy()
        assert np.abs(found - [query @ document for document in documents]).max() < 1e-6
        # Quantized: the same vectors but for rounding, and alone as in a batch.
        texts = [QUERY, *DOCUMENTS]
        rounded = small.embed(texts, use_tqdm=False).to_numpy()
        assert 0 < np.abs(rounded - llm.embed(texts, use_tqdm=False).to_numpy()).max() < 0.1
        alone = [small.embed(text, use_tqdm=False).to_numpy()[0] for text in texts]
        assert np.array_equal(np.stack(alone), rounded)


def test_scores_are_cosines_where_vectors_keep_their_length(tmp_path: Path) -> None:
    save_model(tmp_path, "BertModel", **BERT, **SMALL)
    save_tokenizer(tmp_path)
    save_modules(tmp_path, "mean", normalizes=False)
    with LLM(tmp_path) as llm:
        found = llm.score(QUERY, DOCUMENTS, use_tqdm=False).to_numpy()
        asked = PoolingParams(use_activation=False)
        raw = llm.score(QUERY, DOCUMENTS, use_tqdm=False, pooling_params=asked).to_numpy()
        vectors = llm.embed([QUERY, *DOCUMENTS], use_tqdm=False).to_numpy()
        with pytest.raises(ValidationError, match="must be one PoolingParams to score vectors"):
            llm.score(QUERY, DOCUMENTS, use_tqdm=False, pooling_params=[asked] * len(DOCUMENTS))
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.abs(lengths - 1).max() > 0.1
    query, *documents = vectors / lengths
    assert np.abs(found - [query @ document for document in documents]).max() < 1e-6
    assert np.array_equal(raw, found)
