"""Weights are read, replaced and put to sleep; a model whose tensors were replaced is one that was loaded so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import engine_of
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, make_prompts, one_thread, reference_model, tiny_checkpoint, write_checkpoint

from llm import LLM, EngineClosedError, SamplingParams, ValidationError

PARAMS = SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True)
# Fused matrices with gates; stacked experts and biases; transposed matrices; several recurrences; quantized on load.
NAMES = ("qwen3-5", "mixtral", "gpt2", "falcon-h1", "llama-bf16")
SCHEMES = {"llama-biases-one-kv-head": "w8a8", "qwen2": "w4a8"}


def opened(folder: Path, **more: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, kv_cache_dtype="float32", **more)


def answers(llm: LLM, name: str) -> list[Any]:
    outputs = llm.generate(make_prompts(TINY_MODELS[name])[:3], PARAMS, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_checkpoint(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_checkpoint(name, tmp_path_factory)
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    with opened(folder) as llm:
        assert len(llm.weights) > 10
        for key in set(llm.weights) & set(stored):
            assert torch.equal(llm.weights[key].float(), stored[key].float()), key
        assert len(set(llm.weights) & set(stored)) > 8


def test_quantized_ones_are_the_values_that_are_computed_with(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_checkpoint("llama", tmp_path_factory)
    name = "model.layers.0.self_attn.k_proj.weight"
    with opened(folder, quantization="w8a16") as llm, opened(folder) as plain:
        near, exact = llm.weights[name], plain.weights[name]
        assert near.shape == exact.shape and not torch.equal(near, exact)
        assert float((near - exact).abs().max()) < 0.02 * float(exact.abs().max())


@pytest.mark.parametrize(("name", "scheme"), [*((name, None) for name in NAMES[:3]), *SCHEMES.items()])
def test_an_update_is_a_fresh_load(name: str, scheme: str | None, tmp_path: Path) -> None:
    """Bit for bit, and the first answers come back with the first weights."""
    write_checkpoint(TINY_MODELS[name], tmp_path / "first")
    write_checkpoint(TINY_MODELS[name], tmp_path / "second")
    stored = load_file(tmp_path / "second" / "model.safetensors")
    changed = {key: tensor for key, tensor in stored.items() if ".1." in key and tensor.dim() >= 2}
    new = {key: (tensor.float().roll(1, -1) * 0.9).to(tensor.dtype) for key, tensor in changed.items()}
    save_file({**stored, **new}, tmp_path / "second" / "model.safetensors", {"format": "pt"})
    more = {} if scheme is None else {"quantization": scheme}
    with opened(tmp_path / "second", **more) as second:
        expected = answers(second, name)
    with opened(tmp_path / "first", **more) as llm:
        before = answers(llm, name)
        llm.update_weights(dict(list(new.items())[:1]))
        llm.update_weights(dict(list(new.items())[1:]))
        assert answers(llm, name) == expected != before
        llm.load_weights(tmp_path / "first")
        assert answers(llm, name) == before


def test_all_or_nothing(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("llama", tmp_path_factory)
    name = "model.layers.0.mlp.down_proj.weight"
    with opened(folder) as llm:
        before, tensor = answers(llm, "llama"), llm.weights[name]
        with pytest.raises(ValidationError, match=r"no tensor 'model\.layers\.0\.mlp\.down.weight'\. Did you mean"):
            llm.update_weights({name: tensor * 2, "model.layers.0.mlp.down.weight": tensor})
        with pytest.raises(ValidationError, match=r"must be a tensor of shape \[48, 91\], got \[91, 48\]"):
            llm.update_weights({name: tensor.t()})
        with pytest.raises(ValidationError, match="tensors must be a dict"):
            llm.update_weights([tensor])  # type: ignore[arg-type]
        other = tiny_checkpoint("gpt2", tmp_path_factory)
        with pytest.raises(ValidationError, match=r"path must be of a checkpoint whose config\.json"):
            llm.load_weights(other)
        runner = engine_of(llm).runner

        def fails(*args: Any) -> Any:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(runner, "place_model", fails)
            with pytest.raises(MemoryError):
                llm.update_weights({name: tensor * 2})
        assert answers(llm, "llama") == before
        stream = llm.generate_iter([[5, 6], [7, 8]], [replace(PARAMS, max_tokens=count) for count in (1, 50)])
        next(stream)
        with pytest.raises(ValidationError, match="while a stream is suspended"):
            llm.update_weights({name: tensor * 2})
        stream.close()  # type: ignore[attr-defined]


def test_codes_of_a_checkpoint_are_replaced_by_codes_alone(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Floats would be rounded to integers, without their scales."""
    name = "model.layers.0.mlp.down_proj.weight"
    with opened(tiny_checkpoint("llama", tmp_path_factory), quantization="w8a8") as llm:
        llm.save_quantized(tmp_path / "saved")
    stored = load_file(next((tmp_path / "saved").glob("*.safetensors")))
    with opened(tmp_path / "saved") as llm:
        before = answers(llm, "llama")
        with pytest.raises(ValidationError, match=f"{name} is stored as codes, int8, and got torch.float32"):
            llm.update_weights({name: llm.weights[name]})
        values = llm.weights[name]
        llm.update_weights({name: -stored[name]})
        assert torch.equal(llm.weights[name], -values) and answers(llm, "llama") != before
        llm.update_weights({name: stored[name]})
        assert answers(llm, "llama") == before


def test_steps_and_prefixes_of_the_old_weights_are_not_used(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_checkpoint("llama", tmp_path_factory)
    prompt = make_prompts(TINY_MODELS["llama"])[4]
    name = "model.layers.0.mlp.down_proj.weight"
    with opened(folder) as llm:
        for _ in range(2):
            (first,) = llm.generate([prompt], PARAMS, use_tqdm=False)
        assert first.num_cached_tokens > 0
        llm.update_weights({name: llm.weights[name] * 0})
        (second,) = llm.generate([prompt], PARAMS, use_tqdm=False)
        assert second.num_cached_tokens == 0 and second.outputs[0].logprobs != first.outputs[0].logprobs
        model = reference_model(folder)
        kept = model.model.layers[0].mlp.down_proj.weight.data.clone()
        model.model.layers[0].mlp.down_proj.weight.data.zero_()
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        model.model.layers[0].mlp.down_proj.weight.data.copy_(kept)
        for token, item in (second.outputs[0].logprobs or [])[0].items():
            assert abs(float(expected[token]) - item.logprob) < 1e-4


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_up(level: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    with opened(tiny_checkpoint("falcon-h1", tmp_path_factory)) as llm:
        before = answers(llm, "falcon-h1")
        runner = engine_of(llm).runner
        states = [tensor for state in runner.states for tensor in state]
        weights = list(runner.model.parameters())
        llm.sleep(level)
        llm.sleep(level)
        assert all(tensor.numel() == 0 for tensor in states)
        assert all(tensor.numel() == 0 for tensor in weights) == (level == 2)
        with pytest.raises(EngineClosedError, match="sleeps; call wake_up"):
            answers(llm, "falcon-h1")
        llm.wake_up()
        llm.wake_up()
        assert answers(llm, "falcon-h1") == before
    with pytest.raises(ValidationError, match="level must be an integer from 1 to 2"):
        llm.sleep(3)
