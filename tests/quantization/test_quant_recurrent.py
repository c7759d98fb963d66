"""Recurrent mixers with quantized projections: every scheme applies, and bits do not depend on the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from embedded import engine_of
from safetensors.torch import load_file
from same_answers import close, same, told
from tiny_models import TINY_MODELS, TinyModel, one_thread, write_checkpoint

from llm import LLM, SamplingParams

PROMPTS = [[5], [7, 9, 11, 200, 3], list(range(10, 33))]
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "tie_word_embeddings": True}
    path = tmp_path_factory.mktemp("recurrent") / "mamba2"
    with one_thread():
        write_checkpoint(TinyModel("Mamba2Config", {**TINY_MODELS["mamba2"].config, **sizes}), path)
    return path


@pytest.mark.parametrize(("scheme", "error"), [("w8a8", 0.01), ("w4a16", 0.12)])
def test_projections_are_quantized(scheme: str, error: float, folder: Path) -> None:
    quantization = {"scheme": scheme, **({"group_size": 32} if scheme == "w4a16" else {})}
    with one_thread(), LLM(folder, quantization=quantization, skip_tokenizer_init=True) as llm:
        layers = dict(engine_of(llm).runner.model.named_modules())
        for name in ("in_proj", "out_proj"):
            layer = layers[f"model.layers.1.mamba.{name}"]
            assert layer.quant_method.scheme.startswith(scheme.upper())
            stored = load_file(folder / "model.safetensors")[f"backbone.layers.1.mixer.{name}.weight"]
            rounding = layer.quant_method.dequantize_weight(layer) - stored
            assert 0 < rounding.norm() / stored.norm() < error
        together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    assert same(told(alone), told(together))


@pytest.mark.parametrize("row", ["qwen3-5", "lfm2", "qwen3-next", "plamo2"])
def test_a_saved_hybrid_is_the_same_model(row: str, tmp_path: Path) -> None:
    """Two of the checkpoint's names, of a mixer and of attention, become one of the model's."""
    write_checkpoint(TINY_MODELS[row], tmp_path / "float")
    with one_thread():
        with LLM(tmp_path / "float", quantization="w8a8", skip_tokenizer_init=True) as llm:
            expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            llm.save_quantized(tmp_path / "saved")
        with LLM(tmp_path / "saved", skip_tokenizer_init=True) as llm:
            again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].logprobs for output in again] == [output.outputs[0].logprobs for output in expected]


@pytest.mark.parametrize(("scheme", "format"), [("nf4", "bitsandbytes"), ("w4a16", "gptq")])
def test_matrices_that_are_stored_by_head_are_saved_by_head(scheme: str, format: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "hidden_size_per_head": 8, "mamba_num_heads": 8, "intermediate_size": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1, "num_hidden_layers": 2, "mamba_d_state": 8}
    row = TINY_MODELS["plamo2"]
    write_checkpoint(TinyModel(row.config_class, {**row.config, **sizes, **heads}), tmp_path / "float")
    quantization = {"scheme": scheme, "group_size": 32}
    with one_thread():
        with LLM(tmp_path / "float", quantization=quantization, skip_tokenizer_init=True) as llm:
            expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            llm.save_quantized(tmp_path / "saved", format=format)
        with LLM(tmp_path / "saved", skip_tokenizer_init=True) as llm:
            again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert close(told(again), told(expected))  # the head is saved as floats
