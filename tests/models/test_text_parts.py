"""The language model of a multimodal checkpoint answers as transformers' whole model does to text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import BASE, TINY_MODELS, randomise

from llm import LLM, SamplingParams
from llm.errors import CheckpointError, UnsupportedModelError
from llm.models.config_reader import ConfigReader
from llm.models.decoder import Heads
from llm.models.registry import resolve_model_cls
from llm.models.text_part import TextPart

TOLERANCE = 1e-4
PROMPT = list(range(11, 39))  # none is the token of a picture
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_PIXTRAL = {**_SIGLIP, "head_dim": 8}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}
_GEMMA = {**BASE, "model_type": "gemma3_text", "sliding_window": 7, "num_hidden_layers": 3}
_QWEN = {key: value for key, value in BASE.items() if key != "head_dim"}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 48}
_GEMMA4_VISION = {
    **{"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 8},
}
_LLAMA4_VISION = {
    **{"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16},
    "projector_output_dim": 16,
}
# Name -> (transformers' class, its config's arguments).
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"text_config": _GEMMA, "vision_config": _SIGLIP, "mm_tokens_per_image": 4}),
    "qwen2_vl": (
        "Qwen2VL",
        {
            "text_config": {**_QWEN, "rope_parameters": _MROPE},
            "vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48},
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"text_config": {**_QWEN, "rope_parameters": _MROPE}, "vision_config": _QWEN_VISION},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": {
                **BASE,
                "rope_parameters": {**_MROPE, "mrope_section": [3, 1, 1], "mrope_interleaved": True},
            },
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {"text_config": {**BASE, **TINY_MODELS["qwen3-5"].config}, "vision_config": _QWEN_VISION},
    ),
    "mistral3": (
        "Mistral3",
        {"text_config": {**BASE, "model_type": "mistral"}, "vision_config": {**_PIXTRAL, "model_type": "pixtral"}},
    ),
    "gemma4": (
        "Gemma4",
        {
            "text_config": {**BASE, **TINY_MODELS["gemma4"].config, "tie_word_embeddings": False},
            "vision_config": _GEMMA4_VISION,
        },
    ),
    "llama4": (
        "Llama4",
        {"text_config": {**BASE, **TINY_MODELS["llama4"].config}, "vision_config": _LLAMA4_VISION},
    ),
    "mistral3-ministral3": (
        "Mistral3",
        {
            "text_config": {**BASE, "model_type": "ministral3", "rope_parameters": _YARN},
            "vision_config": {**_PIXTRAL, "model_type": "pixtral"},
        },
    ),
}


@pytest.fixture(scope="module", params=PARTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder, transformers' model)."""
    import transformers

    name, arguments = PARTS[request.param]
    config = getattr(transformers, f"{name}Config")(**arguments, tie_word_embeddings=False)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    randomise(model, seed=3)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, model


def load(folder: Path, **more: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, max_model_len=64, kv_cache_dtype="float32", **more)


def worst_difference(folder: Path, model: Any) -> float:
    with load(folder) as llm:
        assert "vision" in llm.config.reasons["architecture"]
        output = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0]
    with torch.no_grad():
        # transformers 5.24 cannot make the outputs of its whole Llama 4; without pictures the text is all of it.
        whole = model.language_model if type(model).__name__ == "Llama4ForConditionalGeneration" else model
        logits = whole(input_ids=torch.tensor([[*PROMPT, *output.token_ids]])).logits[0].float()
    expected = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert expected.argmax(-1).tolist() == output.token_ids
    positions = zip(expected, output.logprobs or [], strict=True)
    return max(abs(line[token].item() - item.logprob) for line, ours in positions for token, item in ours.items())


def test_text_is_answered_as_by_the_whole_model(made: tuple[Path, Any]) -> None:
    assert worst_difference(*made) < TOLERANCE


def test_the_names_of_transformers_modules_are_known_too(made: tuple[Path, Any], tmp_path: Path) -> None:
    """`save_pretrained` goes back to the names of the first releases; checkpoints made by other means may not."""
    folder, model = made
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert worst_difference(tmp_path, model) < TOLERANCE


def test_weights_that_nobody_left_out_are_named(made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextPart, "left_out", ("multi_modal_projector", "model.multi_modal_projector"))
    with pytest.raises(CheckpointError, match=r"does not have: .*(vision_tower|visual|vision_model)"), load(made[0]):
        pass


def test_a_key_beside_the_text_that_nobody_knows_is_an_error(made: tuple[Path, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="keys that are not understood: 'touch_config'"):
        load(made[0], hf_overrides={"touch_config": {}})
    text = json.loads((made[0] / "config.json").read_text())["text_config"]
    with pytest.raises(UnsupportedModelError, match="keys that are not understood: 'odd'"):
        load(made[0], hf_overrides={"text_config": {**text, "odd": 1}})


# As their authors wrote them; of the vision towers one key each.
_GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152},
}
_MISTRAL_SMALL_3_1: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1024},
    "vision_feature_layer": -1,
}
_QWEN_2_5_VL_3B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {"hidden_size": 1280},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("config", "layers", "heads", "longest", "windows", "tied"),
    [
        (_GEMMA_3_4B, 34, Heads(8, 4, 256), 131072, {1024, None}, True),
        (_MISTRAL_SMALL_3_1, 40, Heads(32, 8, 128), 131072, {None}, False),
        (_QWEN_2_5_VL_3B, 36, Heads(16, 2, 128), 128000, {None}, True),
    ],
    ids=["gemma-3-4b", "mistral-small-3.1", "qwen2.5-vl-3b"],
)
def test_a_published_config_is_read_with_every_key_accounted_for(
    config: dict[str, Any], layers: int, heads: Heads, longest: int, windows: set[int | None], tied: bool
) -> None:
    reader = ConfigReader(config)
    read = resolve_model_cls(config["architectures"], config["model_type"]).read_config(reader)
    attention: list[Any] = [layer.attention for layer in read.layers]
    assert (len(read.layers), reader.layers() or layers) == (layers, layers)
    assert {part.heads for part in attention} == {heads} and {part.sliding_window for part in attention} == windows
    assert (read.max_position_embeddings, read.tie_word_embeddings) == (longest, tied)
    assert reader.dtype() == torch.bfloat16
    types = {part.rope.rope_type for part in attention}
    assert types == ({"linear", "default"} if config is _GEMMA_3_4B else {"default"})


def test_another_language_model_inside_is_refused_by_name() -> None:
    inside = {**_MISTRAL_SMALL_3_1, "text_config": {"model_type": "mamba"}}
    with pytest.raises(UnsupportedModelError, match="model_type of text_config is 'mamba'"):
        resolve_model_cls([], "mistral3").read_config(ConfigReader(inside))
