"""compressed-tensors checkpoints, made by the `compressed-tensors` package, against that package's own arithmetic."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.compressed_tensors import compress
from embedded import engine_of, open_llm
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sets import needs_kernels
from safetensors.torch import load_file, save_file
from same_answers import same, told
from tiny_models import TinyModel, one_thread, write_checkpoint

from llm import LLM, SamplingParams
from llm.errors import CheckpointError, LLMError, ValidationError
from llm.kernels.weight import Weight
from llm.quantization import packing

pytest.importorskip("compressed_tensors.quantization")

from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}


def rotations(**given: Any) -> dict[str, Any]:
    """A `transform_config` of inputs and weights of all linear layers."""
    places = [{"targets": ["Linear"], "location": place} for place in ("weight_input", "input")]
    return {
        "transform_config": {"config_groups": {"u": {"type": "hadamard", "head_dim": 16, "apply": places, **given}}}
    }


def group(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs, **more}


# name -> (config_groups, the scheme our layers get)
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "w8a8": ({"g": group(INT8, TOKEN)}, "W8A8_DYNAMIC"),
    "w8a8-tensor": ({"g": group({**INT8, "strategy": "tensor"}, TOKEN)}, "W8A8_DYNAMIC"),
    "w8a8-static": ({"g": group(INT8, STATIC)}, "W8A8"),
    "w8a8-static-asym": ({"g": group(INT8, {**STATIC, "symmetric": False})}, "W8A8"),
    "w4a8-group": ({"g": group(INT4, TOKEN)}, "W4A8_DYNAMIC"),
    "w4a8-channel": ({"g": group({**INT8, "num_bits": 4}, TOKEN)}, "W4A8_DYNAMIC"),
    "w4a8-packed": ({"g": group(INT4, TOKEN, format="pack-quantized")}, "W4A8_DYNAMIC"),
    "w8a16": ({"g": group(INT8)}, "W8A16"),
    "w8a16-naive": ({"g": group({**INT8, "symmetric": False}, format="naive-quantized")}, "W8A16"),
    "w4a16": ({"g": group(INT4)}, "W4A16"),
    "w4a16-asym": ({"g": group({**INT4, "symmetric": False})}, "W4A16"),
    "w4a16-channel-asym": ({"g": group({**INT8, "num_bits": 4, "symmetric": False})}, "W4A16"),
    "w3a16": ({"g": group({**INT4, "num_bits": 3})}, "W4A16"),
    "w6a16-asym": ({"g": group({**INT4, "num_bits": 6, "symmetric": False})}, "W8A16"),
    "actorder-weight": ({"g": group({**INT4, "actorder": "weight"})}, "W4A16"),
    "preset": ({"W8A8": ["Linear"]}, "W8A8_DYNAMIC"),
}


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed") / "float"
    with one_thread():
        write_checkpoint(TinyModel("LlamaConfig", {**SIZES, "attention_bias": True}), folder)
    return folder


@pytest.fixture(scope="session")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """case -> (folder, the package's decompressed model), each made once."""
    found: dict[str, tuple[Path, Any]] = {}

    def make(case: str) -> tuple[Path, Any]:
        if case not in found:
            folder = tmp_path_factory.mktemp("ct") / case
            with one_thread():
                found[case] = folder, compress(source, folder, CASES[case][0], ["lm_head"])
        return found[case]

    return make


def fake_quantized_input(x: torch.Tensor, inputs: Mapping[str, Any] | None, weight: Weight) -> torch.Tensor:
    """The activations in float64 as the format quantizes them (dynamic ones by amax / 127, as vLLM's kernels do), under
    int4 weights each group of the weight by itself."""
    if inputs is None:
        return x.double()
    if inputs.get("dynamic"):
        order = torch.arange(weight.k) if weight.columns is None else weight.columns.long()
        size = weight.group_size if weight.kind == "int4" else weight.k
        groups = x[:, order].unflatten(1, (-1, size))
        scale = groups.abs().amax(2, keepdim=True) / 127
        return (torch.round(groups / scale).double() * scale.double()).flatten(1)[:, order.argsort()]
    zero = 0 if inputs["symmetric"] else -11
    scale = torch.tensor(0.04)
    return ((torch.round(x / scale) + zero).clamp(-128, 127).double() - zero) * scale.double()


@pytest.mark.parametrize("case", CASES)
def test_every_layer_computes_what_the_package_stored(case: str, made: Any) -> None:
    folder, theirs = made(case)
    groups, scheme = CASES[case]
    (only,) = groups.values()
    inputs = TOKEN if isinstance(only, list) else only["input_activations"]
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        assert llm.config.model_config.quantization == "compressed-tensors"
        for name, layer in engine_of(llm).runner.model.named_modules():
            if getattr(layer, "quant_kind", "") != "linear":
                continue
            assert layer.quant_method.scheme == scheme
            path, _, last = name.rpartition(".")
            shards = [theirs.get_submodule(f"{path}.{part}") for part in fused.get(last, [last])]
            weight = torch.cat([shard.weight for shard in shards])
            torch.testing.assert_close(layer.quant_method.dequantize_weight(layer), weight, rtol=1e-6, atol=0)
            x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0))
            expected = fake_quantized_input(x, inputs, layer.packed_weight) @ weight.double().t()
            if shards[0].bias is not None:
                expected += torch.cat([shard.bias for shard in shards]).double()
            assert (layer(x) - expected).abs().max() < 1e-5 * expected.abs().max()


@needs_kernels
@pytest.mark.parametrize("case", ["w4a16-asym", "w4a8-group"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_stay_in_the_files_type(case: str, dtype: torch.dtype, made: Any, tmp_path: Path) -> None:
    """Kernels read them as they are, which loses nothing and reads less; embeddings and LM heads aside."""
    folder, _ = made(case)
    copy = copy_folder(folder, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    scales = [name for name in tensors if name.endswith("weight_scale")]
    for tensor in ({}, {name: tensors[name].to(dtype) for name in scales}):
        save_file({**tensors, **tensor}, copy / "model.safetensors")
        with open_llm(copy, skip_tokenizer_init=True) as llm:
            layer = engine_of(llm).runner.model.model.layers[0].mlp.down_proj
            stored = {**tensors, **tensor}["model.layers.0.mlp.down_proj.weight_scale"]
            assert layer.weight_scale.dtype == stored.dtype
            assert torch.equal(layer.weight_scale, stored)
            assert layer.quant_method.integers(layer).scale.dtype == torch.float32
            if layer.weight_zero is not None:
                assert layer.weight_zero.dtype == torch.bfloat16  # holds every whole number up to 256
            x = torch.randn(3, layer.input_size, generator=torch.Generator().manual_seed(0))
            narrow = layer(x)
            layer.weight_scale = layer.weight_scale.float()
            assert torch.equal(layer(x), narrow)


def test_the_comparison_sees_a_transposed_scale(made: Any, tmp_path: Path) -> None:
    folder, theirs = made("w4a16")
    copy = copy_folder(folder, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    tensors[name] = tensors[name].flip(1).contiguous()
    save_file(tensors, copy / "model.safetensors")
    with open_llm(copy, skip_tokenizer_init=True) as llm:
        layer = engine_of(llm).runner.model.model.layers[0].self_attn.o_proj
        reference = theirs.model.layers[0].self_attn.o_proj.weight
        assert not torch.allclose(layer.quant_method.dequantize_weight(layer), reference, rtol=1e-3)


@pytest.mark.parametrize("case", ["w8a16", "w4a16-asym", "w3a16"])
def test_logits_equal_the_packages_decompressed_forward(case: str, made: Any) -> None:
    folder, theirs = made(case)
    ids = torch.arange(3, 40)
    with torch.no_grad():
        expected = theirs(input_ids=ids[None]).logits[0].log_softmax(-1)
    from llm import SamplingParams

    with open_llm(folder, skip_tokenizer_init=True, kv_cache_dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        (output,) = llm.generate([{"prompt_token_ids": ids.tolist()}], params, use_tqdm=False)
        found = {token: item.logprob for token, item in output.outputs[0].logprobs[0].items()}
    for token, logprob in found.items():
        assert logprob == pytest.approx(expected[-1, token].item(), abs=1e-4)


# Static scales of fused shards


@pytest.mark.parametrize(
    "shards",
    [[(0.04, -11), (0.02, 100), (0.05, 3)], [(0.04, -11), (0.04, 90), (0.04, 3)], [(0.04, 5), (0.02, 5), (0.03, 5)]],
    ids=["both differ", "equal scales", "equal zeros"],
)
def test_ranges_of_fused_static_shards_are_joined(shards: list[tuple[float, int]], made: Any, tmp_path: Path) -> None:
    folder, _ = made("w8a8-static-asym")
    copy = copy_folder(folder, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    for part, (scale, zero) in zip("qkv", shards, strict=True):
        tensors[f"model.layers.0.self_attn.{part}_proj.input_scale"].fill_(scale)
        tensors[f"model.layers.0.self_attn.{part}_proj.input_zero_point"].fill_(zero)
    save_file(tensors, copy / "model.safetensors")
    with open_llm(copy, skip_tokenizer_init=True) as llm:
        weight = engine_of(llm).runner.model.model.layers[0].self_attn.qkv_proj.packed_weight
        low = min(scale * (-128 - zero) for scale, zero in shards)
        high = max(scale * (127 - zero) for scale, zero in shards)
        assert weight.input_scale == pytest.approx((high - low) / 255)
        assert (-128 - weight.input_offset) * weight.input_scale == pytest.approx(low, abs=weight.input_scale)
        assert (127 - weight.input_offset) * weight.input_scale == pytest.approx(high, abs=weight.input_scale)


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ({"input_zero_point": torch.tensor([float("nan")])}, "values that are not whole; the model needs int32"),
        ({"input_zero_point": torch.tensor([1e30])}, "values beyond the range of int32"),
        ({"input_zero_point": torch.tensor([1 << 20])}, "input_zero_point is .*, and at most 32768"),
        (
            {"input_scale": torch.tensor([3e38])},
            r"k_proj.input_scale must be .* at most 2\*\*100; it holds 3e\+38",
        ),
    ],
)
def test_static_tensors_that_make_no_sense(
    edits: dict[str, torch.Tensor], says: str, made: Any, tmp_path: Path
) -> None:
    copy = copy_folder(made("w8a8-static-asym")[0], tmp_path)
    tensors = load_file(copy / "model.safetensors")
    for part, name in itertools.product("qkv", edits):
        # Scales that differ: the ranges of the shards are joined.
        value = edits[name] / 2 if part == "q" and name == "input_scale" else edits[name].clone()
        tensors[f"model.layers.0.self_attn.{part}_proj.{name}"] = value
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        LLM(copy, skip_tokenizer_init=True)


@pytest.mark.parametrize("widest", ["q", "k", "v"])
def test_the_widest_of_fused_symmetric_scales_serves_all_shards(widest: str, made: Any, tmp_path: Path) -> None:
    copy = copy_folder(made("w8a8-static")[0], tmp_path)
    tensors = load_file(copy / "model.safetensors")
    for part in "qkv":
        tensors[f"model.layers.0.self_attn.{part}_proj.input_scale"].fill_(0.5 if part == widest else 0.25)
    save_file(tensors, copy / "model.safetensors")
    with open_llm(copy, skip_tokenizer_init=True) as llm:
        weight = engine_of(llm).runner.model.model.layers[0].self_attn.qkv_proj.packed_weight
        assert (weight.input_scale, weight.input_offset) == (0.5, 0)


# Which layers


def copy_folder(folder: Path, tmp_path: Path, **quantization: Any) -> Path:
    """A copy whose quantization_config has these keys changed; None removes one."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    path = copy / "config.json"
    config = json.loads(path.read_text())
    section = config["quantization_config"] | quantization
    config["quantization_config"] = {key: value for key, value in section.items() if value is not None}
    path.write_text(json.dumps(config))
    return copy


def test_targets_by_name_regex_and_class(source: Path, tmp_path: Path) -> None:
    groups = {
        "four": {**group(INT4), "targets": ["re:.*mlp.(gate|up)_proj"]},
        "eight": {**group(INT8, TOKEN), "targets": ["model.layers.0.self_attn.o_proj"]},
        "rest": group(INT8),
    }
    folder = tmp_path / "mixed"
    with one_thread():
        theirs = compress(source, folder, groups, ["lm_head", "re:.*layers.1.*down_proj"])
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        layers = engine_of(llm).runner.model.model.layers
        assert layers[0].mlp.gate_up_proj.quant_method.scheme == "W4A16"
        assert layers[0].self_attn.o_proj.quant_method.scheme == "W8A8_DYNAMIC"
        assert layers[0].self_attn.o_proj.quant_method.reason == "config_groups.group_1, int-quantized"
        assert layers[1].self_attn.o_proj.quant_method.scheme == "W8A16"
        assert layers[1].mlp.down_proj.quant_method.scheme == ""
        x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
        plain = x.double() @ theirs.model.layers[1].mlp.down_proj.weight.double().t()
        torch.testing.assert_close(layers[1].mlp.down_proj(x).double(), plain, rtol=1e-5, atol=1e-5)
        for ours, reference in zip(layers, theirs.model.layers, strict=True):
            o_proj, weight = ours.self_attn.o_proj, reference.self_attn.o_proj.weight
            torch.testing.assert_close(o_proj.quant_method.dequantize_weight(o_proj), weight, rtol=1e-6, atol=0)
            fused, mlp = ours.mlp.gate_up_proj, reference.mlp
            weight = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            torch.testing.assert_close(fused.quant_method.dequantize_weight(fused), weight, rtol=1e-6, atol=0)


def test_the_lm_head_is_linear_unless_ignored(source: Path, tmp_path: Path) -> None:
    with one_thread():
        theirs = compress(source, tmp_path / "head", {"g": group(INT8, TOKEN)}, [])
    with open_llm(tmp_path / "head", skip_tokenizer_init=True) as llm:
        head = engine_of(llm).runner.model.lm_head
        assert head.quant_method.scheme == "W8A8_DYNAMIC"
        assert engine_of(llm).runner.model.model.embed_tokens.quant_method.scheme == ""
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
        expected = fake_quantized_input(x, TOKEN, head.packed_weight) @ theirs.lm_head.weight.double().t()
        assert (engine_of(llm).runner.model.compute_logits(x) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_shards_must_share_a_group(made: Any, tmp_path: Path) -> None:
    copy = copy_folder(made("w8a16")[0], tmp_path, ignore=["lm_head", "model.layers.0.self_attn.k_proj"])
    with pytest.raises(CheckpointError, match=r"some but not all shards of model.layers.0.self_attn.qkv_proj"):
        LLM(copy, skip_tokenizer_init=True)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "kv": ({"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme is 4-bit int of strategy 'tensor'; computed are"),
    "kv-dynamic": ({"kv_cache_scheme": {"type": "float", "dynamic": True}}, "kv_cache_scheme is dynamic 8-bit float"),
    "rotation": ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config.u is of type ''"),
    "rotation-random": (rotations(randomize=True), "computed is 'hadamard', not randomized"),
    "rotation-of-outputs": (rotations(apply=[{"targets": ["Linear"], "location": "output"}]), "applied at 'output'"),
    "rotation-of-inputs-alone": (rotations(apply=[{"targets": ["Linear"], "location": "input"}]), "applied at 'input'"),
    "rotation-of-odd-blocks": (rotations(head_dim=24), "columns are rotated in blocks of a power of two"),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    "status": ({"quantization_status": "frozen"}, "saved before they were compressed"),
    "unknown": ({"surprise": 1}, "keys that are not understood: 'surprise'"),
    "no-groups": ({"config_groups": {}}, "config_groups is {}"),
    "actorder": (
        {"config_groups": {"g": group({**INT8, "actorder": "group"})}},
        "actorder 'group', which is of integers",
    ),
    "fp6": ({"config_groups": {"g": group({**INT8, "num_bits": 6, "type": "float"})}}, "6-bit float weights"),
    "fp8-ints": ({"config_groups": {"g": group({**INT8, "type": "float"}, TOKEN)}}, "float weights under 8-bit int"),
    "fp8-zeros": ({"config_groups": {"g": group({**INT8, "type": "float", "symmetric": False})}}, "with zero points"),
    "fp8-packed": (
        {"config_groups": {"g": group({**INT8, "type": "float"})}},
        "format 'pack-quantized'; read are float",
    ),
    "block": (
        {"config_groups": {"g": group({**INT8, "strategy": "block", "block_structure": "2x2"})}},
        "strategy 'block'",
    ),
    "no-block": (
        {"config_groups": {"g": group({**INT8, "strategy": "block", "block_structure": [0, 8]})}},
        "rows and columns of a block",
    ),
    "fp4-groups": (
        {
            "config_groups": {
                "g": group(
                    {**INT4, "type": "float", "group_size": 16, "strategy": "group"}, format="mxfp4-pack-quantized"
                )
            }
        },
        "strategy 'group' in groups of 16",
    ),
    "outputs": ({"config_groups": {"g": {**group(INT8), "output_activations": STATIC}}}, "output activations"),
    "int4-inputs": ({"config_groups": {"g": group(INT4, {**TOKEN, "num_bits": 4})}}, "4-bit int activations"),
    "asymmetric": ({"config_groups": {"g": group({**INT8, "symmetric": False}, TOKEN)}}, "asymmetric weights under"),
    "token-zero": ({"config_groups": {"g": group(INT8, {**TOKEN, "symmetric": False})}}, "symmetric=False"),
    "grouped-8": ({"config_groups": {"g": group({**INT4, "num_bits": 8}, TOKEN)}}, "8-bit weights in groups"),
    "preset": ({"config_groups": {"MXFP6": ["Linear"]}}, "preset 'MXFP6' is not computed"),
    "format": ({"config_groups": {"g": group(INT8, format="marlin-24")}}, "format 'marlin-24'"),
    "group-size": ({"config_groups": {"g": group({**INT4, "group_size": 48})}}, "groups of 48 do not divide"),
    "misspelt": ({"config_groups": {"g": group({**INT4, "groupsize": 48})}}, "not understood: 'groupsize'"),
    "not-integer": ({"config_groups": {"g": group({**INT4, "num_bits": "4"})}}, "num_bits is '4', must be an integer"),
    "targets": ({"config_groups": {"g": {**group(INT4), "targets": [None]}}}, "a list of names"),
    "sparsity": ({"sparsity_config": [1]}, "must be an object"),
    "endless": ({"ignore": ["re:(.+)+!$"]}, "repeats too much"),
    "no-pattern": ({"ignore": ["re:["]}, "is no regular expression"),
    "long": ({"x" * 10**5: 1}, r"x\.\.\."),
    "no-method": (
        {"quant_method": None},
        "^config.json's quantization_config names no quant_method; use the unquantized checkpoint with quantization=",
    ),
    "method": ({"quant_method": "hqq"}, "quantized as 'hqq' .*, which is not computed; .* Known: compressed-tensors"),
    "ignore": ({"ignore": "lm_head"}, "ignore is 'lm_head'"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_computed_is_refused(case: str, made: Any, tmp_path: Path) -> None:
    changes, says = REFUSALS[case]
    with pytest.raises(LLMError, match=says):
        LLM(copy_folder(made("w8a16")[0], tmp_path, **changes), skip_tokenizer_init=True)


def test_asking_for_something_else_contradicts_the_checkpoint(made: Any) -> None:
    with pytest.raises(
        ValidationError, match=r"'w4a16' contradicts .*'compressed-tensors' \(config.json's.*pass requantize='w4a16' to"
    ):
        LLM(made("w8a8")[0], quantization="w4a16", skip_tokenizer_init=True)
    with open_llm(made("w8a8")[0], quantization="compressed-tensors", skip_tokenizer_init=True) as llm:
        assert llm.config.model_config.quantization == "compressed-tensors"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("weight_shape", torch.tensor([64, 32]), r"weight_shape says \[64, 32\], the model needs \[64, 64\]"),
        ("weight_scale", torch.zeros(64, 2), "weight_scale must be positive and finite, .* it holds 0"),
        ("weight_scale", torch.full((64, 2), 3e38), r"weight_scale must be .* at most 2\*\*100; it holds 3e\+38"),
        ("weight_zero_point", torch.zeros(8, 3, dtype=torch.int32), "the model needs int32"),
        ("weight_packed", torch.zeros(64, 9, dtype=torch.int32), r"has shape \[64, 9\], the model needs \[64, 8\]"),
    ],
)
def test_tensors_that_make_no_sense(name: str, value: torch.Tensor, says: str, made: Any, tmp_path: Path) -> None:
    copy = copy_folder(made("w4a16-asym")[0], tmp_path)
    tensors = load_file(copy / "model.safetensors")
    tensors[f"model.layers.0.self_attn.o_proj.{name}"] = value
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        LLM(copy, skip_tokenizer_init=True)


def test_int4_values_out_of_range(made: Any, tmp_path: Path) -> None:
    copy = copy_folder(made("w4a8-group")[0], tmp_path)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"][3, 3] = 8
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model.layers.0.self_attn.o_proj: the weight has values outside of 4 bits"
    ):
        LLM(copy, skip_tokenizer_init=True)


# Packing, both directions, against the package and by hand


def test_int32_words_by_hand() -> None:
    values = torch.tensor([[-8, 7, 0, 1, 2, 3, 4, 5, -1]], dtype=torch.int8)
    words = packing.pack_to_int32(values, 4)
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0xDCBA98F0, 0x00000007]
    assert torch.equal(packing.unpack_from_int32(words, 4, (1, 9)), values)
    three = torch.tensor([[-4, 3, 0, -1] * 3], dtype=torch.int8)  # the eleventh value straddles two words
    stream = sum((value + 4) << (3 * place) for place, value in enumerate(three[0].tolist()))
    assert [word & 0xFFFFFFFF for word in packing.pack_to_int32(three, 3)[0].tolist()] == [
        stream & 0xFFFFFFFF,
        stream >> 32,
    ]


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(1, 9), st.integers(1, 70), st.sampled_from([0, 1]))
def test_int32_words_are_the_packages(seed: int, bits: int, rows: int, columns: int, dim: Any) -> None:
    half = 1 << (bits - 1)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-half, half, (rows, columns), generator=generator, dtype=torch.int8)
    words = packing.pack_to_int32(values, bits, dim)
    assert torch.equal(words, pack_to_int32(values, bits, dim))
    assert torch.equal(packing.unpack_from_int32(words, bits, (rows, columns), dim), values)
    assert torch.equal(unpack_from_int32(words, bits, values.shape, dim), values)


def test_row_pairs_by_hand() -> None:
    values = torch.tensor([[-8, 1], [7, -1], [0, 2], [-2, 3]], dtype=torch.int8)
    packed = packing.pack_row_pairs(values)
    assert packed.view(torch.uint8).tolist() == [[0x78, 0xF1], [0xE0, 0x32]]
    assert torch.equal(packing.unpack_row_pairs(packed), values)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 20))
def test_row_pairs_and_deq_scales_come_back(seed: int, pairs: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, (2 * pairs, columns), generator=generator, dtype=torch.int8)
    assert torch.equal(packing.unpack_row_pairs(packing.pack_row_pairs(values)), values)
    scale = torch.randn(columns, generator=generator)
    stored = scale.view(torch.int32).long() & 0xFFFFFFFF
    assert torch.equal(packing.unpack_deq_scale(stored), scale)
    assert torch.equal(packing.unpack_deq_scale(scale), scale)


def act_ordered(made: Any, case: str, target: Path) -> Path:
    """A checkpoint whose groups are not runs, as earlier releases of the package wrote them: inputs take turns."""
    folder = copy_folder(made(case)[0], target)
    config = json.loads((folder / "config.json").read_text())
    (args,) = (group["weights"] for group in config["quantization_config"]["config_groups"].values())
    args["actorder"] = "group"
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        shape = torch.Size(tensors[name.replace("_packed", "_shape")].tolist())
        order = turns(shape[1])
        q = unpack_from_int32(tensors[name], args["num_bits"], shape)[:, order]
        tensors[name] = pack_to_int32(q.contiguous(), args["num_bits"])
        tensors[name.replace("_packed", "_g_idx")] = (order // 32).to(torch.int32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def turns(columns: int) -> torch.Tensor:
    return torch.arange(columns).view(-1, 32).t().flatten()


@pytest.mark.parametrize("case", ["w4a16-asym", "w3a16", "w4a8-packed"])
def test_act_order_and_saving_it(case: str, made: Any, tmp_path: Path) -> None:
    folder, theirs = act_ordered(made, case, tmp_path), made(case)[1]
    prompt, answers = [{"prompt_token_ids": [5, 9, 200, 31, 7]}], []
    for model in (folder, tmp_path / "saved"):
        with open_llm(model, skip_tokenizer_init=True) as llm:
            params = SamplingParams(max_tokens=3, temperature=0, logprobs=3)
            answers.append(told(llm.generate(prompt, params, use_tqdm=False)))
            if model == folder:
                layer = engine_of(llm).runner.model.model.layers[1].mlp.down_proj
                weight = theirs.model.layers[1].mlp.down_proj.weight[:, turns(layer.input_size)]
                torch.testing.assert_close(layer.quant_method.dequantize_weight(layer), weight, rtol=1e-6, atol=0)
                x = torch.randn(5, layer.input_size, generator=torch.Generator().manual_seed(0))
                inputs = fake_quantized_input(x, TOKEN if "a8" in case else None, layer.packed_weight)
                expected = inputs @ weight.double().t()
                assert (layer(x) - expected).abs().max() < 1e-5 * expected.abs().max()
                llm.save_quantized(tmp_path / "saved")
                with pytest.raises(LLMError, match="ModelSlim has no "):
                    llm.save_quantized(tmp_path / "other", format="modelslim")
    assert same(*answers)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.zeros(64, dtype=torch.int32),
            r"weight_g_idx \(from 0 to 0\) does not put 32 inputs into each of the",
        ),
        (torch.full((64,), -1, dtype=torch.int32), "does not put 32 inputs"),
        (torch.zeros(32, dtype=torch.int32), r"has shape \[32\], the model needs \[64\]"),
        (torch.ones(64) / 2, "values that are not whole"),
    ],
)
def test_groups_that_make_no_sense(value: torch.Tensor, message: str, made: Any, tmp_path: Path) -> None:
    copy = act_ordered(made, "w4a16-asym", tmp_path)
    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.o_proj.weight_g_idx": value}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        LLM(copy, skip_tokenizer_init=True)
