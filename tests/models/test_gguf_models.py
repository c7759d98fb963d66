"""`LLM("model.gguf")`: transformers' answers with the file's exact weights, the weights bit for bit, the tokenizer.

Files are written by the `gguf` package (`checkpoints.gguf`); the reference is transformers in float32 on the values of
`gguf.dequantize`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.gguf import write_gguf
from embedded import PROMPTS, open_llm, run, tokens
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from tiny_models import LLAMA3, TinyModel, make_prompts, reference_logprobs, write_checkpoint

from llm import LLM, RequestOutput, SamplingParams
from llm.errors import CheckpointError, LLMError, UnsupportedModelError, ValidationError
from llm.llm import EMBEDDED_MODEL
from llm.loading.gguf.names import FAMILIES as ARCHITECTURES
from llm.loading.weight_map import rename
from llm.text.tokenizer import Tokenizer

TOLERANCE = 1e-4
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
# Rows that blocks of 32 divide.
SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [1.0 + index for index in range(8)],
    "original_max_position_embeddings": 32,
}
_LAYER_NORM: Mapping[str, Any] = {"rms_norm_eps": None, "layer_norm_eps": 1e-3, "head_dim": None}
_OF_LFM2: Mapping[str, Any] = {
    **{"head_dim": None, "rms_norm_eps": None, "norm_eps": 1e-3, "conv_L_cache": 4, "block_multiple_of": 32},
    "intermediate_size": 120,
}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
FAMILIES: dict[str, tuple[TinyModel, Type]] = {
    "llama": (TinyModel("LlamaConfig", SIZES), Type.Q8_0),
    "llama-tied": (TinyModel("LlamaConfig", {**SIZES, "tie_word_embeddings": True}), Type.Q4_0),
    "llama-bias": (TinyModel("LlamaConfig", {**SIZES, "attention_bias": True}), Type.Q5_0),
    "llama-3.1": (
        TinyModel("LlamaConfig", {**SIZES, "rope_parameters": LLAMA3}, lengths=(5, 80)),
        Type.F16,
    ),
    "qwen2": (TinyModel("Qwen2Config", {**SIZES, "head_dim": None}), Type.Q4_1),
    "qwen3": (TinyModel("Qwen3Config", SIZES), Type.Q5_1),
    "gemma": (TinyModel("GemmaConfig", {**SIZES, "hidden_act": "gelu", "tie_word_embeddings": True}), Type.Q4_1),
    "gemma2": (
        TinyModel(
            "Gemma2Config",
            {**SIZES, "sliding_window": 7, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
            lengths=(5, 23),
        ),
        Type.Q8_0,
    ),
    "gemma3": (
        TinyModel(
            "Gemma3TextConfig",
            {
                **SIZES,
                "num_hidden_layers": 7,
                "sliding_window": 7,
                "query_pre_attn_scalar": 16,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
            lengths=(5, 23),
        ),
        Type.BF16,
    ),
    "phi3": (
        TinyModel("Phi3Config", {**SIZES, "head_dim": None, "sliding_window": 11}, lengths=(5, 23)),
        Type.Q8_0,
    ),
    "phi3-longrope": (
        TinyModel(
            "Phi3Config",
            {
                **SIZES,
                "head_dim": None,
                "sliding_window": None,
                "original_max_position_embeddings": 32,
                "rope_parameters": LONG_ROPE,
            },
            lengths=(33, 47),
            engine={"max_model_len": 100},
        ),
        Type.F32,
    ),
    "phi2": (
        TinyModel("PhiConfig", {**SIZES, **_LAYER_NORM, "num_key_value_heads": None, "rope_parameters": HALF}),
        Type.Q4_0,
    ),
    "olmo2": (TinyModel("Olmo2Config", {**SIZES, "head_dim": None}), Type.Q4_0),
    "olmo3": (
        TinyModel(
            "Olmo3Config",
            {**SIZES, "head_dim": None, "num_hidden_layers": 4, "sliding_window": 7, "layer_types": None},
            lengths=(5, 23),
        ),
        Type.Q4_1,
    ),
    "smollm3": (TinyModel("SmolLM3Config", {**SIZES, "head_dim": None, "num_hidden_layers": 5}), Type.Q5_1),
    "starcoder2": (
        TinyModel("Starcoder2Config", {**SIZES, **_LAYER_NORM, "layer_norm_eps": None, "norm_epsilon": 1e-3}),
        Type.Q4_1,
    ),
    "lfm2": (
        TinyModel(
            "Lfm2Config",
            {**SIZES, **_OF_LFM2, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
        ),
        Type.Q4_0,
    ),
    "command-r": (
        TinyModel("CohereConfig", {**SIZES, **_LAYER_NORM, "logit_scale": 0.7, "tie_word_embeddings": True}),
        Type.Q4_0,
    ),
    "cohere2": (
        TinyModel(
            "Cohere2Config",
            {
                **{**SIZES, **_LAYER_NORM, "logit_scale": 0.9, "tie_word_embeddings": True},
                **{"sliding_window": 7, "layer_types": None, "num_hidden_layers": 4},
            },
            lengths=(5, 23),
        ),
        Type.Q4_1,
    ),
    "stablelm": (
        TinyModel("StableLmConfig", {**SIZES, **_LAYER_NORM, "rope_parameters": HALF, "use_qkv_bias": True}),
        Type.Q4_0,
    ),
    "seed_oss": (TinyModel("SeedOssConfig", {**SIZES, "attention_bias": True, "attention_out_bias": False}), Type.Q4_0),
    "ernie4_5": (TinyModel("Ernie4_5Config", {**SIZES, "head_dim": 16}), Type.Q4_0),
    "arcee": (TinyModel("ArceeConfig", SIZES), Type.Q4_0),
    "glm4": (TinyModel("Glm4Config", {**SIZES, "attention_bias": True, "rope_parameters": HALF}), Type.Q4_0),
}


def opened(path: Path, **more: Any) -> Any:
    arguments = {"kv_cache_dtype": "float32", "skip_tokenizer_init": True, **more}
    return open_llm(path, **arguments)


def deviation(folder: Path, outputs: list[RequestOutput]) -> float:
    """The largest difference from transformers' logprobs; infinite where the likeliest token is another."""
    worst = 0.0
    for output in outputs:
        completion = output.outputs[0]
        expected = reference_logprobs(folder, output.prompt_token_ids, completion.token_ids)
        if expected.argmax(dim=-1).tolist() != completion.token_ids:
            return math.inf
        for line, ours in zip(expected, completion.logprobs or [], strict=True):
            worst = max(worst, *(abs(line[index].item() - item.logprob) for index, item in ours.items()))
    return worst


def held_weights(llm: LLM) -> dict[str, torch.Tensor]:
    """W of every layer that has a quantized weight, by its path."""
    engine: Any = llm._engine
    modules = engine.runner.model.named_modules()
    return {
        name: module.quant_method.dequantize_weight(module)
        for name, module in modules
        if getattr(module, "quant_method", None) is not None and module.quant_method.scheme
    }


def check_weights(llm: LLM, exact: Path) -> None:
    """That every quantized weight is bit for bit the file's."""
    engine: Any = llm._engine
    saved = load_file(exact / "model.safetensors")
    expected = {rename(name, engine.runner.model.renames): tensor for name, tensor in saved.items()}
    for name, weight in held_weights(llm).items():
        last = name.rpartition(".")[2]
        parts = (last,) if f"{name}.weight" in expected else FUSED[last]
        values = [expected[f"{name.removesuffix(last)}{part}.weight"] for part in parts]
        assert torch.equal(weight, torch.cat(values)), name


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    row, kind = FAMILIES[name]
    write_checkpoint(row, tmp_path / "float")
    path = tmp_path / "model.gguf"
    exact = write_gguf(tmp_path / "float", path, lambda _: kind)
    prompts = make_prompts(row)
    with opened(path, **row.engine) as llm:
        alone = [output for prompt in prompts for output in run(llm, [prompt], GREEDY)]
        batch = run(llm, prompts, GREEDY)
        invariant = llm.config.invariant
        check_weights(llm, exact)
    assert deviation(exact, alone) < TOLERANCE
    assert not invariant or [(item.token_ids, item.logprobs) for output in batch for item in output.outputs] == [
        (item.token_ids, item.logprobs) for output in alone for item in output.outputs
    ]
    if kind in (Type.Q4_0, Type.Q4_1):  # the control: the weights before they were quantized are others
        assert deviation(tmp_path / "float", alone) > 10 * TOLERANCE


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The embedded model with its shape and K types mixed as in Q4_K_M, and the checkpoint of its exact values."""
    folder = tmp_path_factory.mktemp("mixture")

    def type_of(name: str) -> Type:
        if "v_proj" in name or "down_proj" in name or "embed" in name:
            return Type.Q6_K if "layers.1." in name or "embed" in name else Type.Q5_K
        if "layers.2." in name:
            return Type.Q2_K if "gate" in name else Type.Q3_K
        if "layers.3." in name:
            return Type.IQ4_XS if "proj" in name and "o_proj" not in name else Type.IQ4_NL
        return Type.Q4_K

    exact = write_gguf(EMBEDDED_MODEL, folder / "tiny-Q4_K_M.gguf", type_of, tokenizer=True)
    return folder / "tiny-Q4_K_M.gguf", exact


def test_weights_are_bit_for_bit_those_of_gguf(mixture: tuple[Path, Path]) -> None:
    path, exact = mixture
    expected = load_file(exact / "model.safetensors")
    with opened(path) as llm:
        check_weights(llm, exact)
        held = held_weights(llm)
        ids = torch.tensor([0, 7, 2303])
        engine: Any = llm._engine
        rows = engine.runner.model.model.embed_tokens(ids)
    assert len(held) == 4 * 4 + 1
    assert torch.equal(rows, expected["model.embed_tokens.weight"][ids])
    # The control: one bit of the file is felt.
    assert not torch.equal(held["model.embed_tokens"], expected["model.embed_tokens.weight"].nextafter(torch.ones(1)))


def test_a_mixture_answers_as_transformers_does(mixture: tuple[Path, Path]) -> None:
    path, exact = mixture
    prompts = [[5, 9, 300, 41], list(range(20, 60)), [2000]]
    with opened(path) as llm:
        alone = [output for prompt in prompts for output in run(llm, [prompt], GREEDY)]
        batch = run(llm, prompts, GREEDY)
        config, explained, invariant = str(llm.config), str(llm.explain()), llm.config.invariant
    assert deviation(exact, alone) < TOLERANCE
    assert not invariant or [o.outputs[0].logprobs for o in batch] == [o.outputs[0].logprobs for o in alone]
    assert "gguf" in config
    floats = 4 * 2 + 1
    for line in (
        r"Q4_K +\d+ tensors, float32 activations, int4 in groups of 32 with minima",
        r"Q6_K +\d+ tensors, float32 activations, int8 in groups of 16",
        r"IQ4_XS +\d+ tensors, float32 activations, a table of 16 in groups of 32",
        rf"F32 +{floats} tensors, computed as stored",
    ):
        assert re.search(rf"^  {line}$", config, re.MULTILINE), config
    assert sum(map(int, re.findall(r"(\d+) tensors?, ", config))) == len(load_file(exact / "model.safetensors"))
    for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL"):
        assert kind in explained, explained
    assert "bits a value (4.5 in the file)" in explained


def test_the_tokenizer_is_the_files(mixture: tuple[Path, Path]) -> None:
    theirs = Tokenizer(EMBEDDED_MODEL)
    texts = [*PROMPTS, "", "  two  spaces\n\nand 12345 's caf\u00e9 \U0001f600", "<|user|>hi<|end|>"]
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}]
    with open_llm(mixture[0]) as llm:
        ours = llm.get_tokenizer()
        engine: Any = llm._engine
        own = engine.tokenizer
        assert own.encode(texts) == theirs.encode(texts)
        ids = own.encode(texts)[-2]
        assert own.decode(ids) == theirs.decode(ids)
        assert own.render_chat(messages, add_generation_prompt=True) == theirs.render_chat(
            messages, add_generation_prompt=True
        )
        assert ours.eos_token == "<|endoftext|>"
        assert len(llm.chat(messages, SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids) > 0


def test_q8_0_of_the_embedded_model_says_what_it_says(tmp_path: Path) -> None:
    """Text in, text out, of a folder that holds the file alone, and of its type."""
    exact = write_gguf(EMBEDDED_MODEL, tmp_path / "tiny-Q8_0.gguf", lambda _: Type.Q8_0, tokenizer=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "tiny-Q8_0.gguf").rename(tmp_path / "folder" / "tiny-Q8_0.gguf")
    with open_llm(exact, tokenizer=str(EMBEDDED_MODEL), kv_cache_dtype="float16") as llm:
        expected = [output.outputs[0].text for output in run(llm, PROMPTS)]
    with open_llm(tmp_path / "folder") as llm:
        assert [output.outputs[0].text for output in run(llm, PROMPTS)] == expected
        with pytest.raises(LLMError, match="is in GGUF already"):
            llm.save_quantized(tmp_path / "saved")
    with open_llm(f"{tmp_path / 'folder'}:q8_0") as llm:
        assert tokens(run(llm, PROMPTS[:1])) != []


def test_a_split_model_is_the_whole_one(tmp_path: Path) -> None:
    for name, split in (("whole", 0), ("parts", 15)):
        write_gguf(EMBEDDED_MODEL, tmp_path / f"{name}.gguf", lambda _: Type.Q4_0, split=split)
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(parts) == 3
    answers = []
    for path in (tmp_path / "whole.gguf", parts[0], parts[2]):
        with opened(path) as llm:
            answers.append(run(llm, [[5, 6, 7]], GREEDY)[0].outputs[0].logprobs)
    assert answers[0] == answers[1] == answers[2]
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match="is not part 2, as its name says"):
        LLM(parts[0])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match="beside it are missing 'parts-00002-of-00003"):
        LLM(parts[0])


def test_float_files_are_quantized_on_load(tmp_path: Path) -> None:
    write_gguf(EMBEDDED_MODEL, tmp_path / "tiny.gguf", lambda _: Type.BF16)
    with opened(tmp_path / "tiny.gguf", quantization="w8a8") as ours:
        got = run(ours, [[5, 6, 7]], GREEDY)
    with opened(EMBEDDED_MODEL, quantization="w8a8") as theirs:
        assert tokens(got) == tokens(run(theirs, [[5, 6, 7]], GREEDY))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda path: {"quantization": "w8a8"},
            ValidationError,
            r"it is quantized as 'gguf' \(the types of its tensors\)",
        ),
        (lambda path: {"load_format": "dummy"}, ValidationError, "load_format must be 'auto' for a GGUF file"),
        (lambda path: {"revision": "main"}, ValidationError, "revision='main' applies to hub models"),
    ],
)
def test_arguments_that_do_not_fit(
    mixture: tuple[Path, Path], make: Callable[[Path], dict[str, Any]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(mixture[0], **make(mixture[0]))


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"llama.attention.temperature_scale": 0.1}, UnsupportedModelError, "its attention is scaled by position"),
        ({"llama.expert_count": 8}, CheckpointError, "llama.expert_used_count is None, must be an integer"),
        ({"llama.rope.scaling.type": "ntk"}, CheckpointError, "rope.scaling.type is 'ntk', must be none, linear"),
        ({"llama.attention.value_length": 3}, CheckpointError, "value_length"),
        ({"tokenizer.ggml.model": "t5"}, UnsupportedModelError, "of the kind 't5', which is not known"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "novel"},
            UnsupportedModelError,
            "splits text by the rule 'novel'",
        ),
        ({"split.count": 2}, CheckpointError, "is of a model in 2 parts, and its name says 1"),
    ],
)
def test_metadata_that_is_not_computed(
    tmp_path: Path, extra: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(EMBEDDED_MODEL, path, lambda _: Type.F16, tokenizer="tokenizer.ggml" not in str(extra), extra=extra)
    with pytest.raises(error, match=message):
        LLM(path)


def test_the_page_of_formats_names_every_architecture() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/formats.md").read_text()
    line = page.split("- Read: ")[1].split("- Written:")[0]
    assert [name for name in ARCHITECTURES if not re.search(rf"\b{name}\b", line)] == []
