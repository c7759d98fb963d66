"""What is not here is refused in one sentence that says what to do instead, and not by a wall of names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from embedded import copy_model

from llm import LLM, LLMError, SamplingParams, StructuredOutputsParams
from llm.engine.prompts import parse_prompt
from llm.loading.gguf.names import family_of

MOST_CHARACTERS = 420


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(LLMError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) <= MOST_CHARACTERS, text
    return text


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("hqq", "'w4a16'"),
        ("auto-round", "'w4a16'"),
        ("fbgemm_fp8", "'w8a16' or 'w8a8'"),
        ("modelopt_fp4", "'w4a16'"),
        ("torchao", "'w8a16' or 'w4a16'"),
    ],
)
def test_formats_of_quantized_checkpoints(tmp_path: Path, name: str, instead: str) -> None:
    asked = refusal(lambda: LLM(quantization=name))
    assert f"quantization='{name}' is a format that is not computed" in asked and f"quantization={instead}" in asked
    folder = copy_model(tmp_path / name, config={"quantization_config": {"quant_method": name, "bits": 4}})
    found = refusal(lambda: LLM(folder))
    assert f"quantized as '{name}'" in found and f"use the unquantized checkpoint with quantization={instead}" in found


def test_a_gguf_file_and_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.Q4_K_M.gguf"
    path.write_bytes(b"GGUF")
    for model in (path, str(path), tmp_path, f"{tmp_path}:q4_k_m"):
        assert "model.Q4_K_M.gguf is not a GGUF file: it has 4 bytes" in refusal(lambda model=model: LLM(model))
    assert "holds no GGUF file of the type 'Q8_0'; of these pass one" in refusal(lambda: LLM(f"{tmp_path}:Q8_0"))
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    assert "holds several GGUF files" in refusal(lambda: LLM(tmp_path))
    family = refusal(lambda: family_of("nemotron"))
    assert "'nemotron' of this GGUF file" in family and "safetensors, with quantization='q4_k'" in family
    assert "a GGUF file is read as the model alone" in refusal(lambda: LLM(tokenizer=str(path)))


def test_quantization_gguf_is_of_gguf_files(tmp_path: Path) -> None:
    assert "needs a checkpoint in that format" in refusal(lambda: LLM(quantization="gguf"))
    folder = copy_model(tmp_path / "model", config={"quantization_config": {"quant_method": "gguf"}})
    assert "pass the path of the .gguf file itself" in refusal(lambda: LLM(folder))


def test_the_folder_of_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    assert "holds an adapter; pass" in refusal(lambda: LLM(tmp_path)) and "merge_lora=" in refusal(
        lambda: LLM(tmp_path)
    )


@pytest.mark.parametrize(
    ("model_type", "architecture", "said"),
    [
        ("newmoe", "NewMoeForCausalLM", "this mixture of experts is not here yet; "),
        ("gemma9", "Gemma9ForCausalLM", "the nearest by name is gemma;"),
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration", "it takes images"),
        ("camembert", "CamembertModel", "this encoder is not here yet"),
        ("zzz", "ZzzForCausalLM", "is not supported; ModelRegistry.get_supported_archs() lists the "),
    ],
)
def test_unknown_families(tmp_path: Path, model_type: str, architecture: str, said: str) -> None:
    folder = copy_model(tmp_path / "model", config={"model_type": model_type, "architectures": [architecture]})
    text = refusal(lambda: LLM(folder))
    assert said in text and model_type in text and "register_model()" in text
    assert text.count("ForCausalLM") <= 1


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("LlamaBidirectionalModel", "sentence-transformers embeds texts"),
        ("LlamaForQuestionAnswering", "AutoModelForQuestionAnswering answers from a text"),
    ],
)
def test_other_uses_of_a_known_family(tmp_path: Path, architecture: str, said: str) -> None:
    """They hold the same layers: loaded as a language model they would answer nonsense."""
    folder = copy_model(tmp_path / "model", config={"architectures": [architecture]})
    text = refusal(lambda: LLM(folder))
    assert architecture in text and said in text and "hf_overrides={'architectures': ['LlamaForCausalLM']}" in text
    if architecture == "LlamaBidirectionalModel":
        assert "in both directions" in refusal(lambda: LLM(folder, runner="pooling"))
    for known in ("LlamaForCausalLM", "LLaMAForCausalLM"):
        with LLM(folder, hf_overrides={"architectures": [known]}, load_format="dummy", max_model_len=64):
            pass


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("response_format", "StructuredOutputsParams(json=schema)"),
        ("guided_json", "StructuredOutputsParams(json=...)"),
        ("guided_choice", "StructuredOutputsParams(choice=...)"),
        ("tools", "LLM.chat"),
    ],
)
def test_names_of_structured_output(name: str, said: str) -> None:
    text = refusal(lambda: SamplingParams(**{name: {}}))
    assert text.startswith(f"SamplingParams has no argument {name!r}; ") and said in text
    if name != "tools":
        text = refusal(lambda: LLM.generate(object(), "x", **{name: {}}))  # type: ignore[arg-type]
        assert text.startswith(f"LLM.generate has no argument {name!r}; ") and said in text
    assert "its name is json" in refusal(lambda: StructuredOutputsParams(schema={}))  # type: ignore[call-arg]


@pytest.mark.parametrize("key", ["media_io_kwargs", "prompt_embeds", "encoder_prompt"])
def test_prompts_that_are_not_text(key: str) -> None:
    text = refusal(lambda: parse_prompt({"prompt": "x", key: {"image": 1}}))
    assert text.startswith(f"{key!r} in a prompt is refused: ")
