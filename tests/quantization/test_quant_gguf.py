"""Saving as GGUF: the types' bits are those of `gguf`, each family comes back bit for bit, tokenizers split alike."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from embedded import PROMPTS, open_llm, run
from gguf import GGMLQuantizationType as Type
from tiny_models import LLAMA3, NULL, TinyModel, write_checkpoint
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, normalizers, trainers
from tokenizers.models import BPE

from llm import LLM, SamplingParams
from llm.errors import LLMError, ValidationError
from llm.kernels.reference.gguf_blocks import BLOCKS, decode
from llm.loading.gguf.tokenizer import tokenizer_metadata
from llm.quantization.formats.gguf import pack_blocks, type_of
from llm.quantization.quantizer import IntegerWeight, quantize_weight_as
from llm.text.tokenizer import Tokenizer, TokenizerDefinition

GREEDY = SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
}
GEMMA: dict[str, Any] = {**SIZES, "sliding_window": 7, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [1.0 + index for index in range(8)],
    "original_max_position_embeddings": 32,
}
PHI3 = {**SIZES, "head_dim": None, "original_max_position_embeddings": 32, "rope_parameters": LONG_ROPE}
MIXTURE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {**{"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}}
LATENT: dict[str, Any] = {
    **{**SIZES, "head_dim": 8, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16},
    **{"qk_rope_head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
}
FAMILIES: dict[str, tuple[TinyModel, str]] = {
    "llama-3.1": (TinyModel("LlamaConfig", {**SIZES, "rope_parameters": LLAMA3, "attention_bias": True}), "q8_0"),
    "mistral": (TinyModel("MistralConfig", {**SIZES, "sliding_window": None}), "q4_0"),
    "qwen2": (TinyModel("Qwen2Config", {**SIZES, "head_dim": None, "hidden_size": 256}), "q4_k"),
    "qwen3": (TinyModel("Qwen3Config", SIZES), "q8_0"),
    "gemma2": (TinyModel("Gemma2Config", GEMMA), "q4_0"),
    "gemma3": (TinyModel("Gemma3TextConfig", {**GEMMA, "num_hidden_layers": 7}), "q8_0"),
    "phi3": (TinyModel("Phi3Config", {**PHI3, "sliding_window": None}), "q8_0"),
    "mixtral": (TinyModel("MixtralConfig", {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2}), "q4_0"),
    "qwen2-moe": (
        TinyModel("Qwen2MoeConfig", {**SIZES, **MIXTURE, "head_dim": None, "shared_expert_intermediate_size": 64}),
        "q8_0",
    ),
    "granite-moe": (
        TinyModel(
            "GraniteMoeConfig",
            {
                **{key: size for key, size in SIZES.items() if key != "head_dim"},
                **{"num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 12.0},
                **{"attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 6.0},
            },
        ),
        "q4_0",
    ),
    "qwen3-moe": (
        TinyModel("Qwen3MoeConfig", {**SIZES, **MIXTURE, "hidden_size": 256, "norm_topk_prob": True}),
        "q4_k",
    ),
    "gpt-oss": (
        TinyModel(
            "GptOssConfig",
            {
                **{**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7},
                "rope_parameters": {**YARN, "truncate": False},
            },
        ),
        "mxfp4",
    ),
    "deepseek-v2": (
        TinyModel(
            "DeepseekV2Config",
            {
                **{**LATENT, "q_lora_rank": NULL, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
                "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
            },
        ),
        "q8_0",
    ),
    "deepseek-v3": (
        TinyModel("DeepseekV3Config", {**LATENT, "q_lora_rank": 32, "n_group": 2, "topk_group": 1}),
        "q4_0",
    ),
}


def hard_values() -> torch.Tensor:
    """Zeros, groups of one sign, ties of both signs, tiny values, and normal ones."""
    torch.manual_seed(3)
    weight = torch.randn(24, 512) * 0.04
    weight[0] = 0
    weight[1, :256] = 0
    weight[2] = weight[2].abs() + 1
    weight[3] = -weight[2]
    weight[4, :64] = torch.tensor([1.0, -1.0, 0.5, -0.5]).repeat(16)
    weight[5] *= 1e-6
    return weight


@pytest.mark.parametrize(("bits", "kind"), [(8, Type.Q8_0), (4, Type.Q4_0)], ids=["Q8_0", "Q4_0"])
def test_bytes_are_those_of_gguf(bits: int, kind: Type) -> None:
    weight = hard_values()
    found = quantize_weight_as(weight, kind.name.lower(), 32)
    packed = pack_blocks(IntegerWeight(found.q, found.scale, 32, bits), kind.name)
    expected = gguf.quantize(weight.numpy(), kind)
    assert np.array_equal(packed.numpy(), expected)
    weight[20, 3] += 1.0  # the control
    assert not np.array_equal(expected, gguf.quantize(weight.numpy(), kind))


def test_q4_k_loses_less_than_rounding_between_the_ends() -> None:
    weight = hard_values()
    found = quantize_weight_as(weight, "q4_k", 32)
    whole = IntegerWeight(found.q, found.scale, 32, 4, minimum=found.minimum)
    packed = pack_blocks(whole, "Q4_K")
    values = torch.from_numpy(gguf.dequantize(packed.numpy(), Type.Q4_K))
    assert type_of(whole) == "Q4_K" and torch.equal(values, whole.dequantize())
    again = decode(packed, BLOCKS["Q4_K"])
    assert again.minimum is not None and torch.equal(again.scale, found.scale)
    noise = float((weight - values).square().sum())
    assert math.isclose(noise, found.noise, rel_tol=1e-4)
    groups = weight.view(-1, 8, 32)
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    step = (groups.amax(-1, keepdim=True).clamp(min=0) - low) / 15
    units = [(part.amax(1, keepdim=True) / 63).half().float().clamp(min=1e-9) for part in (step, -low)]
    step, least = ((part / unit).round() * unit for part, unit in zip((step, -low), units, strict=True))
    simple = ((groups + least) / step.clamp(min=1e-12)).round().clamp(0, 15) * step - least
    assert noise < 0.85 * float((groups - simple).square().sum())
    with pytest.raises(ValueError, match="no products of a float16"):
        pack_blocks(IntegerWeight(whole.q, torch.rand(24, 16), 32, 4, minimum=found.minimum), "Q4_K")


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "q4_k"])
def test_what_no_block_can_hold(form: str) -> None:
    for value in (math.nan, math.inf, 3e38):
        weight = hard_values()
        weight[7, 9] = value
        with pytest.raises(ValueError, match=r"NaN or infinite|beyond the range"):
            quantize_weight_as(weight, form, 32)


def held(llm: Any) -> dict[str, torch.Tensor]:
    modules = llm._engine.runner.model.named_modules()
    return {
        name: module.quant_method.dequantize_weight(module)
        for name, module in modules
        if getattr(module, "quant_method", None) is not None and module.quant_method.scheme
    }


def opened(path: Path, **more: Any) -> Any:
    return open_llm(path, **{"kv_cache_dtype": "float32", "skip_tokenizer_init": True, **more})


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, scheme = FAMILIES[name]
    write_checkpoint(model, tmp_path / "float")
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]}, {"prompt_token_ids": [200, 3]}]
    head = {"lm_head": "q8_0"} if scheme == "mxfp4" else {}
    with opened(tmp_path / "float", quantization={"scheme": scheme, **head}) as llm:
        before, weights = run(llm, prompts, GREEDY), held(llm)
        assert llm.save_quantized(tmp_path / "m.gguf", "gguf") == tmp_path / "m.gguf"
    with opened(tmp_path / "m.gguf") as llm:
        after, read = run(llm, prompts, GREEDY), held(llm)
    assert weights.keys() == read.keys() and all(torch.equal(weights[key], read[key]) for key in weights)
    assert [out.outputs[0].token_ids for out in after] == [out.outputs[0].token_ids for out in before]
    # Frequencies of Llama 3.1 and Gemma's norms take one more rounding in the file.
    for mine, other in zip(before, after, strict=True):
        for left, right in zip(mine.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert all(abs(left[key].logprob - right[key].logprob) < 1e-5 for key in left)
    header = gguf.GGUFReader(tmp_path / "m.gguf")
    kinds = {tensor.tensor_type.name for tensor in header.tensors}
    assert scheme.upper() in kinds and kinds <= {scheme.upper(), "F32", "BF16", "Q8_0", "Q4_0"}


def test_the_embedded_model_with_its_tokenizer(tmp_path: Path) -> None:
    """Answers, ids, the chat template and what ends an answer."""
    chat = [{"role": "user", "content": "Who was king?"}]
    with open_llm(quantization="q4_k", kv_cache_dtype="float32") as llm:
        before = [(out.prompt_token_ids, out.outputs[0].token_ids) for out in run(llm, PROMPTS, GREEDY)]
        said = llm.chat(chat, GREEDY, use_tqdm=False)[0]
        llm.save_quantized(tmp_path / "tiny.gguf", "gguf")
        ends = llm._engine.eos_token_ids
        with pytest.raises(ValidationError, match="pass a new file"):
            llm.save_quantized(tmp_path / "tiny.gguf", "gguf")
        for format in ("compressed-tensors", "modelslim", "gptq"):
            with pytest.raises(LLMError, match=r"minima|with groups"):
                llm.save_quantized(tmp_path / format, format)
    with open_llm(tmp_path / "tiny.gguf", kv_cache_dtype="float32") as llm:
        assert [(out.prompt_token_ids, out.outputs[0].token_ids) for out in run(llm, PROMPTS, GREEDY)] == before
        again = llm.chat(chat, GREEDY, use_tqdm=False)[0]
        assert (again.prompt_token_ids, again.outputs[0].logprobs) == (said.prompt_token_ids, said.outputs[0].logprobs)
        assert llm._engine.eos_token_ids == ends
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_what_gguf_has_no_form_for(tmp_path: Path) -> None:
    with open_llm(quantization="w8a16") as llm:
        with pytest.raises(LLMError, match=r"groups of 256, which no type of GGUF .* quantization='q8_0'"):
            llm.save_quantized(tmp_path / "m.gguf", "gguf")
        with pytest.raises(ValidationError, match=r"name a file that ends in \.gguf"):
            llm.save_quantized(tmp_path / "folder", "gguf")
        with pytest.raises(ValidationError, match="pass a folder, or format='gguf'"):
            llm.save_quantized(tmp_path / "m.gguf")
    with pytest.raises(ValidationError, match="group_size=64 for q4_0, whose groups are of 32"):
        LLM(quantization={"scheme": "q4_0", "group_size": 64})
    for config, sizes, match in (
        (
            "MistralConfig",
            {"sliding_window": 9, "max_position_embeddings": 64},
            "would be read from GGUF as another one",
        ),
        ("LlamaConfig", {"hidden_act": "gelu"}, "would be read from GGUF as another one"),
        ("Gemma2Config", {"query_pre_attn_scalar": 31}, "would be read from GGUF as another one"),
        ("Olmo2Config", {}, "'olmo2' are not written in GGUF"),
        ("Qwen3MoeConfig", {**MIXTURE, "norm_topk_prob": False}, "would be read from GGUF as another one"),
    ):
        folder = tmp_path / f"{config}-{len(sizes)}"
        write_checkpoint(
            TinyModel(config, {**SIZES, **({"head_dim": None} if "Olmo" in config else {}), **sizes}), folder
        )
        with opened(folder, quantization="q8_0") as llm, pytest.raises(LLMError, match=match):
            llm.save_quantized(tmp_path / "m.gguf", "gguf")
    assert not list(tmp_path.glob("*.gguf"))


def test_columns_that_blocks_do_not_divide(tmp_path: Path) -> None:
    """256: Q4_0 in the place of Q4_K. 32: the layer stays as it is, in the file too."""
    sizes = {**SIZES, "intermediate_size": 80, "rms_norm_eps": 9.999999747378752e-06}  # 1e-5, as float32 has it
    write_checkpoint(TinyModel("LlamaConfig", sizes), tmp_path / "float")
    with opened(tmp_path / "float", quantization="q4_k") as llm:
        explained = str(llm.explain())
        llm.save_quantized(tmp_path / "m.gguf", "gguf")
        weights = held(llm)
    assert "as blocks of 256 do not divide 64 columns" in explained
    assert "blocks of 32 do not divide its 80 columns" in explained
    kinds = {item.name: item.tensor_type.name for item in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == "Q4_0" and kinds["blk.0.ffn_down.weight"] in ("F32", "BF16")
    with opened(tmp_path / "m.gguf") as llm:
        read = held(llm)
    assert all(torch.equal(weights[key], read[key]) for key in weights)


def sentencepiece(prefix: bool) -> FastTokenizer:
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = FastTokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    in_front = [normalizers.Prepend("\u2581")] if prefix else []
    made.normalizer = normalizers.Sequence([*in_front, normalizers.Replace(" ", "\u2581")])
    stripped = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    corpus = ["low lower lowest newer newest wide wider two spaces line new 1234 56"] * 20
    made.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False))
    # Byte tokens are no special ones in published files.
    saved = json.loads(made.to_str())
    saved["added_tokens"] = saved["added_tokens"][:3]
    return FastTokenizer.from_str(json.dumps(saved))


@pytest.mark.parametrize("prefix", [True, False], ids=["llama", "gemma"])
def test_sentencepiece_tokenizers_come_back(prefix: bool) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False}
    path = Path("model.gguf")
    tokenizer = Tokenizer(TokenizerDefinition(path, sentencepiece(prefix), config))
    found = tokenizer_metadata(tokenizer, 340, path)
    assert found["tokenizer.ggml.model"] == "llama" and found["tokenizer.ggml.add_space_prefix"] is prefix
    assert len(found["tokenizer.ggml.tokens"]) == 340 and found["tokenizer.ggml.token_type"][3] == 6
    with pytest.raises(LLMError, match="the model 100 of them"):
        tokenizer_metadata(tokenizer, 100, path)
    lower = sentencepiece(prefix)
    lower.normalizer = normalizers.Sequence([normalizers.Lowercase(), lower.normalizer])
    with pytest.raises(LLMError, match="splits text in a way that GGUF has no form for"):
        tokenizer_metadata(Tokenizer(TokenizerDefinition(path, lower, config)), 340, path)
