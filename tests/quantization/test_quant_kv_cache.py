"""Checkpoints with the scales of a KV cache: compressed-tensors' `kv_cache_scheme`, and C8 of ModelSlim.

The engine's logprobs are compared with those of a float32 cache into which each key and value is written rounded, in
float64, by the formula of the format.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import engine_of, open_llm
from safetensors.torch import load_file, save_file
from tiny_models import one_thread, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.errors import CheckpointError, LLMError
from llm.layers.attention import Attention

FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
PROMPT = list(range(3, 60))
# Of the prompt alone: recorded decode steps do not call what a test patches.
PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
GROUPS = {
    "g": {"targets": ["re:nothing"], "weights": {"num_bits": 8, "strategy": "channel"}, "format": "int-quantized"}
}
FORMS = ("tensor", "attn_head", "int8", "C8")


def scales(form: str, layer: int, heads: int, size: int) -> dict[str, torch.Tensor]:
    """k_scale, k_offset, v_scale, v_offset of one layer, as the checkpoint stores them."""
    count = {"attn_head": heads, "C8": heads * size}.get(form, 1)
    generator = torch.Generator().manual_seed(layer)
    small = 0.01 if form in ("tensor", "attn_head") else 0.04
    found = {name: small * (1 + torch.rand(count, generator=generator)) for name in ("k_scale", "v_scale")}
    if form == "C8":
        found |= {f"{name}_offset": torch.randint(-40, 40, (count,), generator=generator).float() for name in "kv"}
    return found


def write(form: str, source: Path, target: Path) -> Path:
    """The folder `source` with scales."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    heads = config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    tensors, description = load_file(target / "model.safetensors"), {}
    description = {name: "FLOAT" for name in tensors} | {"version": "1.0.0", "kv_cache_type": "C8"}
    for layer in range(config["num_hidden_layers"]):
        for name, value in scales(form, layer, heads, size).items():
            prefix, last = f"model.layers.{layer}.self_attn", name.partition("_")[2]
            full = f"{prefix}.{name[0]}_proj.kv_cache_{last}" if form == "C8" else f"{prefix}.{name}"
            tensors[full] = value.bfloat16() if form == "tensor" else value
            description[full] = "C8"
    save_file(tensors, target / "model.safetensors")
    if form == "C8":
        (target / "model.safetensors").rename(target / "quant_model_weights.safetensors")
        (target / "quant_model_description.json").write_text(json.dumps(description))
        return target
    scheme = {"num_bits": 8, "type": "int" if form == "int8" else "float", "symmetric": True, "dynamic": False}
    scheme["strategy"] = "attn_head" if form == "attn_head" else "tensor"
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": GROUPS,
        "kv_cache_scheme": scheme,
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with one_thread():
        yield tiny_checkpoint("llama", tmp_path_factory)


def rounding(form: str, given: dict[str, torch.Tensor], name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """float32 [N, kv_heads, size] -> the same after a visit to the cache."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        stored = given[f"{name}_scale"].bfloat16() if form == "tensor" else given[f"{name}_scale"]
        heads, size = x.shape[1:]
        scale = stored.double().reshape(*((heads, size) if form == "C8" else (-1, 1)))
        quotient = x.double() / scale
        if form in ("tensor", "attn_head"):
            codes = quotient.clamp(-448, 448).float().to(FLOAT8).double()
            return (codes * scale).float()
        offset = given.get(f"{name}_offset", torch.zeros(1)).double()
        offset = offset.view(heads, size) if form == "C8" else offset
        codes = (quotient.round() + offset).clamp(-128, 127)
        return ((codes - offset) * scale).float()

    return rounded


def logprobs(llm: LLM) -> list[float]:
    """Of the prompt's tokens."""
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)
    found = (output.prompt_logprobs or [])[1:]
    return [position[token].logprob for token, position in zip(PROMPT[1:], found, strict=True) if position]


def layers(llm: LLM) -> list[Attention]:
    return [module for module in engine_of(llm).runner.model.modules() if isinstance(module, Attention)]


@pytest.mark.parametrize("form", FORMS)
def test_it_is_a_float_cache_of_rounded_values(form: str, source: Path, tmp_path: Path) -> None:
    folder = write(form, source, tmp_path / "model")
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        dtype = llm.config.cache_config.kv_cache_dtype
        assert dtype == (FLOAT8 if form in ("tensor", "attn_head") else INT8)
        named = "quant_model_description.json: C8" if form == "C8" else "kv_cache_scheme"
        assert llm.config.reasons["kv_cache_dtype"].startswith(f"static scales by {named}; ")
        assert "static scales" in str(llm.explain())
        actual = logprobs(llm)
    with open_llm(folder, skip_tokenizer_init=True, kv_cache_dtype="float32") as llm:
        assert f"the static scales of {named} are not used" in llm.config.reasons["kv_cache_dtype"]
        unrounded = logprobs(llm)
        for index, layer in enumerate(layers(llm)):
            given = scales(form, index, layer.num_kv_heads, layer.head_size)
            _round_first(layer, rounding(form, given, "k"), rounding(form, given, "v"))
        llm.reset_prefix_cache()
        expected = logprobs(llm)
    # Queries and probabilities are rounded to 15 bits against int8, and this model amplifies what is rounded: a cache
    # of bfloat16 is 0.07 away.
    assert distance(actual, expected) < (5e-5 if dtype == FLOAT8 else 0.1 * distance(expected, unrounded))
    assert distance(expected, unrounded) > 0.1  # the negative control


def _round_first(layer: Attention, of_keys: Any, of_values: Any) -> None:
    write = layer.backend.write

    def rounded(key: torch.Tensor, value: torch.Tensor, *rest: Any) -> None:
        write(of_keys(key), of_values(value), *rest)

    layer.backend.write = rounded  # type: ignore[method-assign]


def distance(actual: list[float], expected: list[float]) -> float:
    return max(abs(ours - theirs) for ours, theirs in zip(actual, expected, strict=True))


def test_asked_for_otherwise_each_token_has_its_scale(source: Path, tmp_path: Path) -> None:
    folder = write("tensor", source, tmp_path / "model")
    with open_llm(folder, skip_tokenizer_init=True, kv_cache_dtype="int8") as llm:
        reason = llm.config.reasons["kv_cache_dtype"]
        assert reason.startswith("asked for; the static scales of kv_cache_scheme are not used; a scale per token")
        scaled = logprobs(llm)
    with open_llm(source, skip_tokenizer_init=True, kv_cache_dtype="int8") as llm:
        assert logprobs(llm) == scaled


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.tensor([0.0]), "layers.0.self_attn.k_scale must be positive and finite, .* it holds 0"),
        (torch.tensor([float("nan")]), "self_attn.k_scale must be positive and finite, .* it holds nan"),
        (torch.ones(3), r"has shape \[3\], the model needs 1, 2 or"),
    ],
)
def test_bad_scales_are_refused(value: torch.Tensor, says: str, source: Path, tmp_path: Path) -> None:
    folder = write("tensor", source, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        LLM(folder, skip_tokenizer_init=True)


def test_a_layer_without_scales_is_refused(source: Path, tmp_path: Path) -> None:
    folder = write("tensor", source, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.v_scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor fills: model\.layers\.1\.self_attn\.attn\.v_scale"):
        LLM(folder, skip_tokenizer_init=True)


def test_scales_are_saved_with_the_weights(source: Path, tmp_path: Path) -> None:
    """As compressed-tensors; other formats, and scales of channels, are refused."""
    answers = {}
    with open_llm(source, skip_tokenizer_init=True, quantization="w8a16") as llm:
        llm.save_quantized(tmp_path / "integers", "compressed-tensors")
    groups = json.loads((tmp_path / "integers" / "config.json").read_text())["quantization_config"]["config_groups"]
    for form in ("tensor", "attn_head"):
        folder = write(form, tmp_path / "integers", tmp_path / form)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["config_groups"] = groups
        (folder / "config.json").write_text(json.dumps(config))
        with open_llm(folder, skip_tokenizer_init=True) as llm:
            answers[form] = logprobs(llm)
            llm.save_quantized(tmp_path / f"{form}-saved", "compressed-tensors")
            with pytest.raises(LLMError, match="static scales of a KV cache, which only 'compressed-tensors'"):
                llm.save_quantized(tmp_path / "other", "gptq")
        before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / f"{form}-saved"))
        name = "model.layers.1.self_attn.v_scale"
        assert torch.equal(before[name].float(), after[name])
        with open_llm(tmp_path / f"{form}-saved", skip_tokenizer_init=True) as llm:
            assert logprobs(llm) == answers[form]
            assert llm.config.reasons["kv_cache_dtype"].startswith("static scales by kv_cache_scheme")
    assert answers["tensor"] != answers["attn_head"]  # the control
    with open_llm(write("C8", source, tmp_path / "C8"), skip_tokenizer_init=True) as llm:
        match = "scales channels of a KV cache"
        with pytest.raises(LLMError, match=match):
            llm.save_quantized(tmp_path / "channels", "compressed-tensors")


def test_scales_in_an_fp8_checkpoint_are_used_where_they_are_asked_for(source: Path, tmp_path: Path) -> None:
    folder = write("tensor", source, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    scheme = config["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].to(FLOAT8)
        tensors[f"{name}_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    (folder / "config.json").write_text(json.dumps(config))
    found = {}
    for dtype in ("auto", "fp8", "int8"):
        with open_llm(folder, skip_tokenizer_init=True, kv_cache_dtype=dtype) as llm:
            found[dtype], reason = logprobs(llm), llm.config.reasons["kv_cache_dtype"]
        expected = {"auto": "'fp8' uses the checkpoint's k_scale", "fp8": "static scales by k_scale and v_scale"}
        assert expected.get(dtype, "the static scales of k_scale and v_scale are not used") in reason
    # The same integers in the format that says so in its configuration.
    config["quantization_config"] = {**scheme, "config_groups": GROUPS}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].float()
        del tensors[f"{name}_scale"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        assert distance(found["fp8"], logprobs(llm)) < 1e-4 < distance(found["auto"], found["fp8"])
