"""Encoders are transformers': hidden states, means and classes, of texts and of pairs, alone and in a ragged batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints.sentence_transformers import (
    BERT,
    ENCODERS,
    hidden_states,
    prompts,
    save_model,
    save_modules,
    save_tokenizer,
)
from kernel_sets import has_kernels
from same_answers import same_values
from tiny_models import BASE, VOCAB

from llm import LLM, PoolingParams, ValidationError
from llm.errors import UnsupportedModelError

pytestmark = pytest.mark.usefixtures("one_core")

TOLERANCE = 1e-5


def load(folder: Path, **more: Any) -> LLM:
    return LLM(folder, **{"skip_tokenizer_init": not (folder / "tokenizer.json").exists(), **more})


def close(actual: np.ndarray, expected: torch.Tensor) -> bool:
    return bool(np.abs(actual - expected.numpy()).max() <= TOLERANCE)


def unit(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(values.double(), dim=-1)


@pytest.mark.parametrize("family", ENCODERS)
def test_hidden_states_and_means(family: str, tmp_path: Path) -> None:
    name, config = ENCODERS[family]
    model = save_model(tmp_path, f"{name}Model", **config)
    save_modules(tmp_path, "mean")
    with load(tmp_path, max_num_batched_tokens=64) as llm:
        assert llm.config.model_config.convert_type == "embed" and llm.config.invariant is has_kernels()
        states = [hidden_states(model, prompt) for prompt in prompts()]
        found = llm.embed(prompts(), use_tqdm=False).to_numpy()
        assert close(found, torch.stack([unit(own.mean(0)) for own in states]))
        tokens = llm.encode(prompts(), use_tqdm=False)
        assert all(close(one.to_numpy(), unit(own)) for one, own in zip(tokens, states, strict=True))
        for order in (prompts()[::-1], *([prompt] for prompt in prompts())):
            expected = [found[prompts().index(prompt)] for prompt in order]
            assert same_values(llm.embed(order, use_tqdm=False).to_numpy(), np.stack(expected))
        # A mean over padding, and a text at other positions, are seen.
        padded = torch.cat([states[0], torch.zeros(1, 48)])
        assert not close(found[0], unit(padded.mean(0) + 0.01))
        if family not in ("modernbert", "nomic_bert"):
            moved = hidden_states(model, prompts()[0], position_ids=torch.arange(5)[None] + 9)
            assert not close(found[0], unit(moved.mean(0)))


@pytest.mark.parametrize("family", ENCODERS)
def test_classes(family: str, tmp_path: Path) -> None:
    name, config = ENCODERS[family]
    model: Any = save_model(tmp_path, f"{name}ForSequenceClassification", **config, num_labels=3)
    with load(tmp_path) as llm:
        outputs = llm.classify(prompts(), use_tqdm=False)
        with torch.no_grad():
            logits = torch.cat([model(torch.tensor([prompt])).logits for prompt in prompts()])
        assert close(outputs.to_numpy(), logits.softmax(-1))
        alone = [llm.classify([prompt], use_tqdm=False).to_numpy() for prompt in prompts()]
        assert same_values(np.concatenate(alone), outputs.to_numpy())
    with load(tmp_path, convert="embed", pooler_config={"pooling_type": "CLS", "normalize": False}) as llm:
        first = torch.stack([hidden_states(model, prompt)[0] for prompt in prompts()])
        assert close(llm.embed(prompts(), use_tqdm=False).to_numpy() / 10, first / 10)


DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**BASE, "num_hidden_layers": 2}),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 80}),
    "gpt_neox": ("GPTNeoX", {key: value for key, value in BERT.items() if key != "pad_token_id"}),
}
NAMES = {0: "O", 1: "B-PER", 2: "I-PER"}


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_every_token_is_classified(family: str, tmp_path: Path) -> None:
    name, config = {**ENCODERS, **DECODERS}[family]
    model: Any = save_model(tmp_path, f"{name}ForTokenClassification", **config, id2label=NAMES)
    with load(tmp_path, max_num_batched_tokens=64) as llm:
        assert llm.config.model_config.convert_type == "classify" and llm.config.invariant is has_kernels()
        outputs = llm.encode(prompts(), use_tqdm=False, pooling_task="token_classify")
        raw = llm.encode(prompts(), PoolingParams(use_activation=False), use_tqdm=False)
        with torch.no_grad():
            logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]
        assert {row.shape[1] for row in logits} == {3}
        assert all(close(one.to_numpy(), own.softmax(-1)) for one, own in zip(outputs, logits, strict=True))
        assert all(close(one.to_numpy() / 10, own / 10) for one, own in zip(raw, logits, strict=True))
        alone = llm.encode([prompts()[2]], use_tqdm=False)[0]
        assert same_values(alone.to_numpy(), outputs[2].to_numpy())
        labels = llm.model_config.hf_config.id2label
        assert [labels[int(best)] for best in outputs[0].outputs.data.argmax(-1)] == [
            NAMES[int(best)] for best in logits[0].argmax(-1)
        ]
        for call in (llm.classify, llm.reward, lambda given: llm.encode(given, pooling_task="classify")):
            with pytest.raises(ValidationError, match=r"call LLM\.encode|must be 'token_classify'"):
                call(prompts())
        assert not close(outputs[0].to_numpy(), (logits[0] + 0.01 * torch.eye(5, 3)).softmax(-1))  # a bias is seen


def test_tokens_see_both_sides_of_a_window_in_gemma(tmp_path: Path) -> None:
    """EmbeddingGemma: a decoder's layers, a window of both sides, and a matrix after the mean."""
    config = {**BASE, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    given = {**config, "num_attention_heads": 4, "use_bidirectional_attention": True, "query_pre_attn_scalar": 10}
    model = save_model(tmp_path, "Gemma3TextModel", **given)
    dense = save_modules(tmp_path, "mean", dense=(48, 20))
    with load(tmp_path) as llm:
        found = llm.embed(prompts(), use_tqdm=False).to_numpy()
        means = torch.stack([hidden_states(model, prompt).double().mean(0) for prompt in prompts()])
        weight, bias = (dense[f"linear.{name}"].double() for name in ("weight", "bias"))
        assert close(found, unit(torch.tanh(means @ weight.T + bias)))
        assert same_values(llm.embed(prompts()[2:3], use_tqdm=False).to_numpy()[0], found[2])
    with pytest.raises(UnsupportedModelError, match="cannot generate: its tokens see those after them"):
        load(tmp_path, runner="generate", hf_overrides={"architectures": ["Gemma3ForCausalLM"]})


def test_an_encoder_computes_whole_texts(tmp_path: Path) -> None:
    save_model(tmp_path, "BertModel", **BERT)
    save_tokenizer(tmp_path)
    with load(tmp_path, max_num_batched_tokens=16) as llm:
        scheduler = llm.config.scheduler_config
        assert not scheduler.enable_chunked_prefill and not llm.config.cache_config.enable_prefix_caching
        whole = llm.embed([[7] * 80, "w1 w2"], use_tqdm=False)
        assert [len(output.prompt_token_ids) for output in whole] == [80, 4]
        with pytest.raises(ValidationError, match="max_model_len is 80; shorten it, or pass PoolingParams"):
            llm.embed("w1 " * 79)
        cut = llm.embed("w1 " * 79, use_tqdm=False, pooling_params=PoolingParams(truncate_prompt_tokens=-1))
        assert (len(cut[0].prompt_token_ids), cut[0].prompt_token_ids[-1]) == (80, 3)
        with pytest.raises(ValidationError, match="generates no text, it gives vectors; call embed"):
            llm.generate("w1")


def test_a_published_nomic_config_is_understood(tmp_path: Path) -> None:
    model = save_model(tmp_path, "NomicBertModel", **ENCODERS["nomic_bert"][1])
    published = {"n_embd": 48, "n_head": 6, "n_inner": 91, "n_layer": 2, "n_positions": 80, "layer_norm_epsilon": 1e-3}
    more = {"activation_function": "swiglu", "rotary_emb_base": 1000, "prenorm": False, "use_flash_attn": True}
    kept = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "type_vocab_size": 2, "vocab_size": VOCAB}
    (tmp_path / "config.json").write_text(json.dumps({**published, **more, **kept}))
    with load(tmp_path, pooler_config={"pooling_type": "MEAN"}) as llm:
        means = [unit(hidden_states(model, prompt).mean(0)) for prompt in prompts()]
        assert close(llm.embed(prompts(), use_tqdm=False).to_numpy(), torch.stack(means))
    (tmp_path / "config.json").write_text(json.dumps({**published, **more, **kept, "prenorm": True}))
    with pytest.raises(UnsupportedModelError, match="prenorm is True, must be False"):
        load(tmp_path)
