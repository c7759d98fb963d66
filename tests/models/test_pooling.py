"""Vectors and classes are transformers', alone and in a ragged batch, whatever the model: bit for bit in any order.

sentence-transformers' files are written by hand (tests/checkpoints/sentence_transformers.py); what they mean is
computed here from transformers' hidden states.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints.sentence_transformers import hidden_states, prompts, save_model, save_modules, save_tokenizer
from same_answers import same_values
from tiny_models import BASE

from llm import LLM, GenerationInterrupted, PoolerConfig, PoolingParams, ValidationError
from llm.errors import UnsupportedModelError
from llm.loading.sentence_transformers import read_sentence_modules
from llm.v1.sample.logits_processor import MinPLogitsProcessor

pytestmark = pytest.mark.usefixtures("one_core")

TOLERANCE = 1e-5
SMALL = {**BASE, "num_hidden_layers": 2}


def load(folder: Path, **more: Any) -> LLM:
    return LLM(folder, **{"skip_tokenizer_init": not (folder / "tokenizer.json").exists(), **more})


def vectors(llm: LLM, given: Any, **more: Any) -> np.ndarray:
    return llm.embed(given, use_tqdm=False, **more).to_numpy()


def unit(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(values.double(), dim=-1)


def assert_close(actual: np.ndarray, expected: list[torch.Tensor]) -> None:
    assert np.abs(actual - torch.stack(expected).numpy()).max() <= TOLERANCE


def assert_alone_is_batched(llm: LLM, given: list[list[int]], batched: np.ndarray) -> None:
    alone = np.concatenate([vectors(llm, [prompt]) for prompt in given])
    assert same_values(alone, batched)
    assert same_values(vectors(llm, given[::-1])[::-1], batched)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """As Qwen3-Embedding is published: without a head and "model.", the last token's hidden state, normalised."""
    folder = tmp_path_factory.mktemp("embedder")
    model = save_model(folder, "Qwen3Model", **SMALL)
    save_tokenizer(folder, ends=True)
    save_modules(folder, "lasttoken", new=False, prompts={"query": "w1 w2 w3 ", "document": ""})
    return folder, model


def test_a_causal_embedder_is_sentence_transformers(embedder: tuple[Path, Any]) -> None:
    folder, model = embedder
    with load(folder, max_num_batched_tokens=32) as llm:
        assert llm.config.model_config.runner_type == "pooling"
        found = vectors(llm, prompts())
        assert_close(found, [unit(hidden_states(model, prompt)[-1]) for prompt in prompts()])
        assert_alone_is_batched(llm, prompts(), found)
        # The wrong token is seen.
        wrong = [unit(hidden_states(model, prompt)[-2]) for prompt in prompts() if len(prompt) > 1]
        with pytest.raises(AssertionError):
            assert_close(vectors(llm, [prompt for prompt in prompts() if len(prompt) > 1]), wrong)
        # The tokenizer ends a text, and the prompt of a name precedes it.
        (query,) = llm.embed("w7", use_tqdm=False, prompt_name="query")
        assert query.prompt_token_ids == [6, 7, 8, 12, 3]
        cut = llm.embed("w7 w8 w9", use_tqdm=False, pooling_params=PoolingParams(truncate_prompt_tokens=3))
        assert (cut[0].prompt_token_ids, cut[0].num_dropped_tokens) == ([12, 13, 3], 1)
        short = PoolingParams(dimensions=8)
        assert_close(
            vectors(llm, prompts(), pooling_params=short),
            [unit(hidden_states(model, item)[-1][:8]) for item in prompts()],
        )
        plain = PoolingParams(use_activation=False)
        raw = vectors(llm, prompts(), pooling_params=plain)
        assert_close(raw / 10, [hidden_states(model, item)[-1] / 10 for item in prompts()])
        tokens = llm.encode(prompts(), use_tqdm=False)[2].outputs.data
        assert_close(tokens.numpy(), list(unit(hidden_states(model, prompts()[2]))))


def test_a_mean_is_of_the_tokens_of_a_text_alone(embedder: tuple[Path, Any], tmp_path: Path) -> None:
    """In chunks too, and through a matrix that follows it."""
    model = save_model(tmp_path, "MistralForCausalLM", **{**SMALL, "sliding_window": 16})
    save_tokenizer(tmp_path)
    dense = save_modules(tmp_path, "mean", dense=(48, 20), include_prompt=False, prompts={"query": "w1 w2 "})

    def expected(token_ids: list[int], first: int = 0) -> torch.Tensor:
        mean = hidden_states(model, token_ids)[first:].double().mean(0)
        return unit(torch.tanh(dense["linear.weight"].double() @ mean + dense["linear.bias"].double()))

    with load(tmp_path, max_num_batched_tokens=24) as llm, load(tmp_path) as whole:
        found = vectors(llm, prompts())
        assert_close(found, [expected(prompt) for prompt in prompts()])
        assert_alone_is_batched(llm, prompts(), found)
        assert same_values(vectors(whole, prompts()), found)
        (query,) = llm.embed(["w7 w8"], use_tqdm=False, prompt_name="query")
        assert query.prompt_token_ids == [2, 6, 7, 12, 13, 3]
        assert_close(query.to_numpy()[None], [expected(query.prompt_token_ids, first=3)])
        with pytest.raises(AssertionError):  # what the prompt adds is seen
            assert_close(query.to_numpy()[None], [expected(query.prompt_token_ids)])


def test_a_decoder_classifies(tmp_path: Path) -> None:
    model = save_model(tmp_path, "LlamaForSequenceClassification", **{**SMALL, "num_labels": 3})
    with load(tmp_path) as llm:
        outputs = llm.classify(prompts(), use_tqdm=False)
        with torch.no_grad():
            logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]
        assert_close(outputs.to_numpy(), [row.softmax(-1) for row in logits])
        assert outputs[0].outputs.label == f"LABEL_{int(logits[0].argmax())}"
        assert list(outputs.to_pandas().columns) == ["index", "num_prompt_tokens", "label", *llm._pooling.labels]
        rewards = llm.reward(prompts(), use_tqdm=False)
        assert_close(rewards.to_numpy() / 10, [row / 10 for row in logits])
        with pytest.raises(ValidationError, match="gives classes; call classify, score or encode, or build it with"):
            llm.embed(prompts())
    with load(tmp_path, convert="embed") as llm:
        assert_close(vectors(llm, prompts()), [unit(hidden_states(model, prompt)[-1]) for prompt in prompts()])


@pytest.mark.parametrize(("kind", "place"), [("CLS", 0), ("LAST", -1)])
def test_one_token_of_a_prompt_in_chunks_is_that_token(embedder: tuple[Path, Any], kind: str, place: int) -> None:
    """The first of the first chunk, the last of the last, of prompts longer than a step."""
    folder, model = embedder
    with load(folder, max_num_batched_tokens=24, pooler_config={"pooling_type": kind}) as llm:
        found = vectors(llm, prompts())
        assert_close(found, [unit(hidden_states(model, prompt)[place]) for prompt in prompts()])
        assert_alone_is_batched(llm, prompts(), found)


def test_keys_are_held_in_full_precision_whatever_the_weights_are(tmp_path: Path) -> None:
    """Rounded to bfloat16, as a model that generates keeps them, the vectors would be others."""
    model = save_model(tmp_path, "Qwen3Model", **SMALL)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = [unit(hidden_states(model, prompt)[-1]) for prompt in prompts()]
    with load(tmp_path, max_num_batched_tokens=24) as llm:
        assert llm.config.cache_config.kv_cache_dtype == torch.float32
        assert_close(vectors(llm, prompts()), expected)
    with load(tmp_path, max_num_batched_tokens=24, kv_cache_dtype="bfloat16") as llm, pytest.raises(AssertionError):
        assert_close(vectors(llm, prompts()), expected)


@pytest.mark.parametrize(
    ("labels", "problem", "activation"),
    [
        (1, None, torch.sigmoid),
        (3, None, lambda x: x.softmax(-1)),
        (1, "regression", lambda x: x),
        (3, "regression", lambda x: x),
        (3, "single_label_classification", lambda x: x.softmax(-1)),
        (1, "multi_label_classification", torch.sigmoid),
        (3, "multi_label_classification", torch.sigmoid),
    ],
)
def test_classes_are_read_by_the_kind_of_problem(tmp_path: Path, labels: int, problem: Any, activation: Any) -> None:
    """As transformers' pipeline reads them; several labels at once are no distribution."""
    config: dict[str, Any] = {**SMALL, "num_labels": labels, "num_hidden_layers": 1}
    model: Any = save_model(tmp_path, "LlamaForSequenceClassification", **config, problem_type=problem)
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]
    with load(tmp_path) as llm:
        found = llm.classify(prompts(), use_tqdm=False).to_numpy()
    assert_close(found.reshape(len(logits), -1), [activation(row) for row in logits])


@pytest.mark.parametrize("side", ["right", "left"])
def test_prompts_of_tokens_are_cut_at_the_side_asked_for(embedder: tuple[Path, Any], side: str) -> None:
    with load(embedder[0]) as llm:
        cut = {"truncation": True, "max_length": 4, "truncation_side": side}
        outputs = llm.embed([[5, 6, 7, 8, 9, 10], [5, 6]], use_tqdm=False, tokenization_kwargs=cut)
    expected = [[5, 6, 7, 8] if side == "right" else [7, 8, 9, 10], [5, 6]]
    assert [(output.prompt_token_ids, output.num_dropped_tokens) for output in outputs] == [
        (ids, dropped) for ids, dropped in zip(expected, (2, 0), strict=True)
    ]


def test_what_a_file_of_sentence_transformers_leaves_out_has_its_default(tmp_path: Path) -> None:
    """Each key in turn: a Dense ends with tanh and has a bias, a prompt is pooled too, similarities are cosines."""
    save_modules(tmp_path, "mean", dense=(48, 20), prompts={"query": "w1 "})
    before = read_sentence_modules(tmp_path)
    assert before is not None
    assert (before.dense[0].activation, before.dense[0].bias) == ("tanh", True) and before.includes_prompt
    dropped = 0
    for path in (*tmp_path.glob("*/config.json"), tmp_path / "config_sentence_transformers.json"):
        whole = json.loads(path.read_text())
        for key in whole.keys() - {"in_features", "out_features", "pooling_mode", "prompts"}:
            path.write_text(json.dumps({name: value for name, value in whole.items() if name != key}))
            assert read_sentence_modules(tmp_path) == before, key
            dropped += 1
        path.write_text(json.dumps(whole))
    assert dropped == 5


@pytest.mark.parametrize(
    ("older", "tokenizer", "limit"), [(7, 9, 7), (9, 7, 9), (None, 9, 9), (7, None, 7), (None, 10**30, None)]
)
def test_the_longest_text_is_that_of_the_older_file(
    tmp_path: Path, older: int | None, tokenizer: int | None, limit: int | None
) -> None:
    save_modules(tmp_path, "mean")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": older}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": tokenizer}))
    found = read_sentence_modules(tmp_path)
    assert found is not None and found.max_seq_length == limit


def test_a_model_does_one_of_both(embedder: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = embedder
    save_model(tmp_path, "LlamaForCausalLM", **SMALL)
    with (
        load(tmp_path) as llm,
        pytest.raises(ValidationError, match="generates text; for vectors build it with runner"),
    ):
        llm.embed(prompts())
    with load(tmp_path, runner="pooling", pooler_config={"pooling_type": "MEAN", "dimensions": 5}) as llm:
        assert vectors(llm, prompts()).shape == (5, 5)
    with load(folder) as llm:
        for call in (llm.generate, llm.perplexity):
            with pytest.raises(ValidationError, match="generates no text, it gives vectors; call embed"):
                call(prompts())
        for name in ("nothing", "quer"):
            with pytest.raises(ValidationError, match="prompt_name must be one of the model's prompts, 'query'"):
                llm.embed("w1", prompt_name=name)
        with pytest.raises(ValidationError, match="max_model_len is 256; shorten it, or pass PoolingParams"):
            llm.embed([[7] * 257])
        assert vectors(llm, [[7] * 256]).shape == (1, 48)


@pytest.mark.parametrize(
    ("argument", "asked"),
    [("logits_processors", [MinPLogitsProcessor]), ("speculative_config", {"method": "ngram"})],
)
def test_what_only_generating_uses_is_refused(embedder: tuple[Path, Any], argument: str, asked: Any) -> None:
    load(embedder[0], **{argument: type(asked)()}).close()  # asks for nothing
    with pytest.raises(ValidationError, match="left out: a pooling model") as error:
        load(embedder[0], **{argument: asked})
    assert error.value.parameter == argument


def test_files_that_mean_something_else_are_refused(embedder: tuple[Path, Any], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in embedder[0].iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    save_modules(folder, "max")
    with pytest.raises(UnsupportedModelError, match=r"the pooling mode is .*max.*; computed here are cls, mean"):
        load(folder)
    (folder / "modules.json").write_text('[{"type": "a.CNN", "path": "1_CNN"}]')
    with pytest.raises(UnsupportedModelError, match="has a module 'CNN'; computed here are Transformer, Pooling"):
        load(folder)
    (folder / "modules.json").write_text('[{"type": "a.Pooling", "path": "../up"}]')
    with pytest.raises(Exception, match="must have a type and a folder's name"):
        load(folder)


def test_an_interrupted_call_has_what_is_done(embedder: tuple[Path, Any], ctrl_c: None) -> None:
    seen: list[None] = []
    with load(embedder[0], max_num_batched_tokens=16, max_num_seqs=1) as llm:
        with pytest.raises(GenerationInterrupted) as caught:
            llm.embed(prompts(), use_tqdm=lambda _: seen or seen.append(os.kill(os.getpid(), signal.SIGINT)))
        outputs = caught.value.outputs
        assert len(outputs) == len(prompts()) and outputs[-1] is None
        again = vectors(llm, prompts())
        assert again.shape == (5, 48)
        assert all(np.array_equal(one.to_numpy(), row) for one, row in zip(outputs, again, strict=True) if one)


def test_a_pooler_config_says_the_task(embedder: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = embedder
    with load(folder, pooler_config={"task": "embed", "tok_pooling_type": "ALL"}) as llm:
        whole = llm.encode(prompts(), use_tqdm=False)
        assert same_values(whole.to_numpy(), vectors(llm, prompts()))
        tokens = llm.encode(prompts(), use_tqdm=False, pooling_task="token_embed")
        assert [one.to_numpy().shape for one in tokens] == [(len(prompt), 48) for prompt in prompts()]
        config = llm.model_config.pooler_config
        assert config == PoolerConfig(
            task="embed", seq_pooling_type="LAST", tok_pooling_type="ALL", use_activation=True
        )
        assert llm.model_config.embedding_size == whole.to_numpy().shape[1]
    with load(folder, pooler_config=PoolerConfig(task="token_embed", pooling_type="ALL")) as llm:
        assert [one.to_numpy().shape for one in llm.encode(prompts(), use_tqdm=False)] == [
            (len(prompt), 48) for prompt in prompts()
        ]
    save_model(tmp_path, "LlamaForCausalLM", **SMALL)
    with load(tmp_path, pooler_config={"task": "embed"}) as llm:
        assert vectors(llm, prompts()).shape == (5, 48)
    for wrong, said in (
        ({"pooler_config": {"pooling_type": "MEAN"}}, "None for a model that generates; or pass runner='pooling'"),
        ({"pooler_config": {"task": "embed"}, "convert": "classify"}, "with convert='classify'"),
        ({"pooler_config": {"task": "plugin"}}, "task must be 'embed'"),
        ({"pooler_config": {"tok_pooling_type": "STEP"}}, "tok_pooling_type must be 'ALL'"),
        ({"pooler_config": {"pooling_type": "ALL", "tok_pooling_type": "ALL"}}, "left out where pooling_type is given"),
        ({"pooler_config": {"logit_mean": 1.0}}, "logit_mean"),
    ):
        with pytest.raises(ValidationError, match=said):
            load(tmp_path, **wrong)
