"""Checkpoints of 8-bit and 4-bit floats: fp8 of DeepSeek and Qwen, mxfp4 of gpt-oss, and those of compressed-tensors.

A weight that is quantized alone is one float32 weight, and the kernels compute it as they compute that. So a quantized
checkpoint gives the answers of the float32 checkpoint that its format's own package makes of it, bit for bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import engine_of, open_llm
from kernel_sets import has_kernels
from safetensors.torch import load_file, save_file
from same_answers import Answer, close, same, told
from tiny_models import BASE, TinyModel, reference_logprobs, write_checkpoint

from llm import SamplingParams
from llm.errors import CheckpointError, LLMError, UnsupportedModelError, ValidationError
from llm.layers.linear import QKVParallelLinear, RowParallelLinear
from llm.layers.parallel import TensorParallel
from llm.quantization.formats.floats import Fp8Config
from llm.quantization.packing import doubled_fp4
from llm.quantization.quantizer import quantize_weight_as
from llm.quantization.unquantized import UnquantizedLinearMethod

pytestmark = pytest.mark.usefixtures("one_core")

Tensors = dict[str, torch.Tensor]
FLOAT8 = torch.float8_e4m3fn
PROMPTS = [{"prompt_token_ids": list(range(5, 25))}, {"prompt_token_ids": [200, 3]}, {"prompt_token_ids": [9] * 7}]
PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
# Sizes that blocks of 16 x 24 and groups of 32 cut in parts of different sizes.
LLAMA = TinyModel(
    "LlamaConfig",
    {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 2},
)
DEEPSEEK = TinyModel(
    "DeepseekV3Config",
    {
        **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 40, "n_group": 2, "topk_group": 1, "head_dim": None, "q_lora_rank": 20},
        **{"kv_lora_rank": 36, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 9},
        "num_key_value_heads": BASE["num_attention_heads"],
    },
)
GPT_OSS = TinyModel(
    "GptOssConfig",
    {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3, "head_dim": 16}
    | {"num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
)

QWEN = TinyModel(
    "Qwen3MoeConfig",
    {"num_hidden_layers": 1, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "head_dim": 16}
    | {"num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
)


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The float32 checkpoint of a row, by name; written once."""
    folder = tmp_path_factory.mktemp("floats")

    def make(name: str) -> Path:
        if not (folder / name).exists():
            rows = {"llama": LLAMA, "deepseek": DEEPSEEK, "gpt-oss": GPT_OSS, "qwen3_moe": QWEN}
            write_checkpoint(rows[name], folder / name)
        return folder / name

    return make


def is_linear(name: str) -> bool:
    return name.endswith("proj.weight") or "_proj_with_mqa.weight" in name or ("_a_proj" in name and ".weight" in name)


def write(source: Path, folder: Path, tensors: Mapping[str, torch.Tensor], said: Mapping[str, Any] | None) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    if said is not None:
        config["quantization_config"] = dict(said)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def answers(folder: Path, **more: Any) -> list[Answer]:
    """Tokens and logprobs of all prompts together, and of each alone."""
    with open_llm(folder, skip_tokenizer_init=True, **more) as llm:
        batches = [PROMPTS, *([prompt] for prompt in PROMPTS)]
        outputs = [output for prompts in batches for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    found = told(outputs)
    assert same(found[: len(PROMPTS)], found[len(PROMPTS) :])  # alone as in company
    return found[: len(PROMPTS)]


# quant_method fp8


def in_blocks(weight: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(8-bit floats, the scale of each block, what both stand for)."""
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, (height, width), strict=True))
    padded = torch.zeros(rows * height, columns * width)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scale = padded.view(rows, height, columns, width).abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)[: weight.shape[0], : weight.shape[1]]
    q = (weight / spread).to(FLOAT8)
    return q, scale, q.float() * spread


def fp8_pair(source: Path, target: Path, block: tuple[int, int] | None, name_of_scale: str) -> tuple[Path, Path]:
    """(quantized checkpoint, the float32 one that it stands for); kv_b_proj is quantized too."""
    stored, exact, kept = {}, {}, ["lm_head", "model.layers.1.self_attn.o_proj"]
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = exact[name] = tensor
        if not is_linear(name) or name.startswith(kept[1]):
            continue
        q, scale, value = in_blocks(tensor, *(block or tensor.shape))
        base = name.removesuffix("weight")
        stored[name], exact[name] = q, value
        stored[f"{base}{name_of_scale}"] = scale if block else scale.view(())
        if not block:
            stored[f"{base}input_scale"] = torch.tensor(0.5)
    said = {"quant_method": "fp8", "activation_scheme": "dynamic" if block else "static", "fmt": "e4m3"}
    said |= {"weight_block_size": list(block)} if block else {"modules_to_not_convert": None}
    return (
        write(source, target / "fp8", stored, {**said, "modules_to_not_convert": kept}),
        write(source, target / "exact", exact, None),
    )


@pytest.mark.parametrize(
    ("row", "block", "scale"),
    [("llama", (16, 24), "weight_scale_inv"), ("llama", None, "weight_scale"), ("deepseek", (16, 24), "weight_scale")],
)
def test_fp8_is_the_float_weight_that_it_stands_for(
    row: str, block: Any, scale: str, floats: Callable[[str], Path], tmp_path: Path
) -> None:
    stored, exact = fp8_pair(floats(row), tmp_path, block, scale)
    expected = answers(exact)
    assert close(answers(stored), expected)
    assert not close(answers(floats(row)), expected)  # 8 bits are felt
    with open_llm(stored, skip_tokenizer_init=True) as llm:
        assert llm.config.model_config.quantization == "fp8"
        layers = dict(engine_of(llm).runner.model.named_modules())
        assert "float8_e4m3" in str(llm.explain())
        names = {"llama": "model.layers.0.mlp.down_proj", "deepseek": "model.layers.1.mlp.experts.3.down_proj"}
        weight = layers[names[row]].packed_weight
        assert weight.kind == "float8" and weight.data.nbytes == -(-weight.n // 16) * 16 * weight.k
        value = load_file(exact / "model.safetensors")[f"{names[row]}.weight"]
        assert torch.equal(layers[names[row]].quant_method.dequantize_weight(layers[names[row]]), value)
        assert layers["model.layers.1.self_attn.o_proj"].quant_method.scheme == ""


def test_fp8_agrees_with_transformers(floats: Callable[[str], Path], tmp_path: Path) -> None:
    stored, exact = fp8_pair(floats("deepseek"), tmp_path, (16, 24), "weight_scale_inv")
    prompt = PROMPTS[0]["prompt_token_ids"]
    with open_llm(stored, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    theirs = reference_logprobs(exact, prompt, tokens)
    for step, (token, found) in enumerate(zip(tokens, output.outputs[0].logprobs, strict=True)):
        assert abs(found[token].logprob - float(theirs[step, token])) < 1e-4


def broken(source: Path, target: Path, name: str, value: Any) -> Path:
    tensors = load_file(source / "model.safetensors")
    tensors[name] = value(tensors[name]) if callable(value) else value
    config = json.loads((source / "config.json").read_text())
    return write(source, target / "broken", tensors, config.get("quantization_config"))


def with_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[1] = value
        return tensor

    return change


def not_numbers(weight: torch.Tensor) -> torch.Tensor:
    return with_value(float("nan"))(weight.float()).to(FLOAT8)


def test_broken_fp8_files_are_refused(floats: Callable[[str], Path], tmp_path: Path) -> None:
    stored, _ = fp8_pair(floats("llama"), tmp_path, (16, 24), "weight_scale_inv")
    layer = "model.layers.1.mlp.down_proj"
    cases: list[tuple[str, Any, str]] = [
        (f"{layer}.weight_scale_inv", with_value(float("nan")), "down_proj.weight_scale_inv must be finite"),
        (
            f"{layer}.weight_scale_inv",
            with_value(-1.0),
            "must be finite and not negative, and at most 2.*100; it holds -1",
        ),
        (f"{layer}.weight_scale_inv", with_value(1e38), r"at most 2\*\*100"),
        (f"{layer}.weight_scale_inv", lambda scale: scale[:, :-1], r"has shape \[4, 3\], the model needs \[4, 4\]"),
        (f"{layer}.weight_scale_inv", lambda scale: scale.to(torch.int32), "is torch.int32, scales are floats"),
        (f"{layer}.weight", lambda weight: weight.float(), "is stored as float32, the model needs float8_e4m3fn"),
        (f"{layer}.weight", lambda weight: weight.float().to(torch.float8_e5m2), "is stored as float8_e5m2"),
        (f"{layer}.weight", not_numbers, r"tensor model\.layers\.1\.mlp\.down_proj\.weight has values that are NaN"),
        ("model.layers.0.self_attn.k_proj.weight", not_numbers, r"tensor .*\.k_proj\.weight has values that are NaN"),
        (f"{layer}.weight_scale", torch.ones(4, 4), "down_proj: the weight needs one of the scales"),
    ]
    for name, value, message in cases:
        folder = broken(stored, tmp_path, name, value)
        with pytest.raises(CheckpointError, match=message), open_llm(folder, skip_tokenizer_init=True):
            pass
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [128]}, "weight_block_size is .*two positive numbers"),
        ({"weight_block_size": [0, 128]}, "two positive numbers"),
        ({"weight_block_size": [10**30, 128]}, "two positive numbers"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"activation_scheme": "psychic"}, "must be 'dynamic' or 'static'"),
        ({"wieght_block_size": [8, 8]}, "not understood: 'wieght_block_size'"),
        ({"modules_to_not_convert": [1]}, "a list of names"),
    ],
)
def test_fp8_descriptions_are_checked(
    change: dict[str, Any], message: str, floats: Callable[[str], Path], tmp_path: Path
) -> None:
    source = floats("llama")
    folder = write(source, tmp_path / "m", load_file(source / "model.safetensors"), {"quant_method": "fp8", **change})
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        open_llm(folder, skip_tokenizer_init=True).__enter__()


# quant_method mxfp4


def gpt_oss_pair(source: Path, target: Path) -> tuple[Path, Path]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    stored, exact = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = exact[name] = tensor
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, columns, rows = tensor.shape  # the float layout is transposed
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 126, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    said = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    return write(source, target / "mxfp4", stored, said), write(source, target / "exact", exact, None)


def test_the_experts_of_gpt_oss(floats: Callable[[str], Path], tmp_path: Path) -> None:
    stored, exact = gpt_oss_pair(floats("gpt-oss"), tmp_path)
    expected = answers(exact)
    assert close(answers(stored), expected)
    with open_llm(stored, skip_tokenizer_init=True) as llm:
        expert = engine_of(llm).runner.model.model.layers[0].mlp.experts.experts[1]
        assert expert.down_proj.packed_weight.table is not None
        assert expert.down_proj.weight_scale.dtype.itemsize == 2 or not has_kernels()  # powers of two
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    swapped = broken(stored, tmp_path, name, lambda scales: scales.roll(1, dims=1))
    assert not close(answers(swapped), expected)
    for value, message in (
        (with_value(255), r"tensor .*\.experts\.0\.gate_proj\.weight_scale has a scale of 255"),
        (lambda scales: scales.float(), "is stored as float32, the model needs uint8"),
        (lambda scales: scales[:, :-2], "has shape"),
        (lambda scales: scales[0, 0], "the model has 3 experts"),
    ):
        shutil.rmtree(swapped)
        broken(stored, tmp_path, name, value)
        with pytest.raises(CheckpointError, match=message), open_llm(swapped, skip_tokenizer_init=True):
            pass


# compressed-tensors

ONE = {"type": "float", "symmetric": True, "num_bits": 8}
COMPRESSED: dict[str, dict[str, Any]] = {
    "float-quantized": {**ONE, "strategy": "tensor"},
    "naive-quantized": {**ONE, "strategy": "channel"},
    "float-quantized, blocks": {**ONE, "strategy": "block", "block_structure": [16, 24]},
    "mxfp8-quantized": {**ONE, "strategy": "group", "group_size": 32},
    "mxfp4-pack-quantized": {**ONE, "num_bits": 4, "strategy": "group", "group_size": 32},
    "nvfp4-pack-quantized": {**ONE, "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
}


def scales_of(weight: torch.Tensor, args: Mapping[str, Any]) -> Tensors:
    """Largest values by the largest code, with a power of two where the format stores exponents."""
    largest = 448.0 if args["num_bits"] == 8 else 6.0
    if args["strategy"] == "block":
        return {"weight_scale": in_blocks(weight, *args["block_structure"])[1]}
    if args["strategy"] == "tensor":
        return {"weight_scale": weight.abs().max().view(1) / largest}
    size = args.get("group_size", weight.shape[1])
    scale = weight.view(len(weight), -1, size).abs().amax(-1) / largest
    if args["strategy"] == "tensor_group":
        divisor = 448 / scale.max()
        return {"weight_scale": (scale * divisor).to(FLOAT8).float(), "weight_global_scale": divisor.view(1)}
    return {"weight_scale": 2.0 ** scale.log2().ceil() if size == 32 else scale}


def compressed_pair(source: Path, target: Path, case: str, inputs: Any = None) -> tuple[Path, Path]:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    args, form = COMPRESSED[case], case.partition(",")[0]
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": args})
    package = BaseCompressor.get_value_from_registry(form)
    stored, exact = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = exact[name] = tensor
        if not is_linear(name):
            continue
        parts = package.compress({"weight": tensor, **scales_of(tensor, args)}, scheme)
        del stored[name]
        stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        exact[name] = exactly(parts) if args["num_bits"] == 4 else package.decompress(parts, scheme)["weight"].float()
        theirs = package.decompress(parts, scheme)["weight"].float()
        assert (exact[name] - theirs).abs().max() <= theirs.abs().max() / 256  # of 4 bits it gives bfloat16
        if inputs:
            stored[name.removesuffix("weight") + "input_global_scale"] = torch.ones(1)
    group = {"targets": ["Linear"], "weights": args, "input_activations": inputs, "format": form}
    said = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}, "ignore": ["lm_head"]}
    return write(source, target / "ct", stored, said), write(source, target / "exact", exact, None)


def exactly(parts: Tensors) -> torch.Tensor:
    """4-bit floats by the definition, in float32."""
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))[codes]
    if scale.dtype == torch.uint8:
        return values * (2.0 ** (scale.float() - 127)).repeat_interleave(32, 1)
    return values * (scale.float() / parts["weight_global_scale"]).repeat_interleave(16, 1)


def test_scales_of_rows_may_have_one_dimension(floats: Callable[[str], Path], tmp_path: Path) -> None:
    stored, _ = compressed_pair(floats("llama"), tmp_path, "naive-quantized")
    expected = answers(stored)
    tensors = load_file(stored / "model.safetensors")
    flat = {name: tensor.flatten() if name.endswith("weight_scale") else tensor for name, tensor in tensors.items()}
    assert any(flat[name].shape != tensor.shape for name, tensor in tensors.items())
    save_file(flat, stored / "model.safetensors", metadata={"format": "pt"})
    assert same(answers(stored), expected)


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors_of_floats(case: str, floats: Callable[[str], Path], tmp_path: Path) -> None:
    inputs = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    stored, exact = compressed_pair(floats("llama"), tmp_path, case, inputs if case.startswith("nv") else None)
    expected = answers(exact)
    assert close(answers(stored), expected)
    with open_llm(stored, skip_tokenizer_init=True) as llm:
        layer = engine_of(llm).runner.model.model.layers[0].self_attn.o_proj
        assert layer.quant_method.scheme == ("W4A16" if "fp4" in case else "W8A16_FP8")
        value = load_file(exact / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
        assert torch.equal(layer.quant_method.dequantize_weight(layer), value)
        assert case.partition(",")[0] in str(llm.explain())
        if case.startswith("nv"):
            with pytest.raises(LLMError, match="holds values of a table, which compressed-tensors has a form for if"):
                llm.save_quantized(tmp_path / "saved")
            return
        llm.save_quantized(tmp_path / "saved")
        said = "a table, which ModelSlim has no form" if "fp4" in case else "which ModelSlim has no published"
        with pytest.raises(LLMError, match=said):
            llm.save_quantized(tmp_path / "other", format="modelslim")
    assert close(answers(tmp_path / "saved"), expected)


@pytest.mark.parametrize("case", ["float-quantized, blocks", "nvfp4-pack-quantized"])
def test_experts_of_compressed_floats(case: str, floats: Callable[[str], Path], tmp_path: Path) -> None:
    """A tensor for each part of each expert, and scales of their own; computed in one call."""
    stored, exact = compressed_pair(floats("qwen3_moe"), tmp_path, case)
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*mlp.gate$"]  # as llm-compressor's recipes have it
    (stored / "config.json").write_text(json.dumps(config))
    expected = answers(exact)
    assert close(answers(stored), expected) and not close(answers(floats("qwen3_moe")), expected)
    with open_llm(stored, skip_tokenizer_init=True) as llm:
        layer = engine_of(llm).runner.model.model.layers[0].mlp.experts
        assert layer.expert_weights() is not None
        schemes = {part.quant_method.scheme for expert in layer.experts for part in expert.children()}
        assert schemes - {""} == {"W4A16" if "fp4" in case else "W8A16_FP8"}


def test_broken_compressed_floats_are_refused(floats: Callable[[str], Path], tmp_path: Path) -> None:
    stored, _ = compressed_pair(floats("llama"), tmp_path, "nvfp4-pack-quantized")
    layer = "model.layers.1.mlp.down_proj"
    for name, value, message in (
        (f"{layer}.weight_global_scale", torch.zeros(1), "weight_global_scale must be positive"),
        (f"{layer}.weight_global_scale", torch.ones(2), "has shape"),
        (f"{layer}.weight_global_scale", torch.tensor([1e-38]), "divided by weight_global_scale must be finite"),
        (f"{layer}.weight_scale", lambda scale: scale.float(), "the model needs float8_e4m3fn"),
        (f"{layer}.weight_packed", lambda packed: packed[:, :-1], "has shape"),
        (f"{layer}.weight_packed", lambda packed: packed.view(torch.int8), "is stored as int8"),
    ):
        folder = broken(stored, tmp_path, name, value)
        with pytest.raises(LLMError, match=message), open_llm(folder, skip_tokenizer_init=True):
            pass
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("WFP8AFP8_DYNAMIC", "naive-quantized"),
        ("W8A8_MXFP8", "mxfp8-quantized"),
        ("W4A4_MXFP4", "mxfp4-pack-quantized"),
    ],
)
def test_modelslim_types_of_floats(kind: str, case: str, floats: Callable[[str], Path], tmp_path: Path) -> None:
    compressed, exact = compressed_pair(floats("llama"), tmp_path, case)
    tensors = {name.replace("_packed", ""): part for name, part in load_file(compressed / "model.safetensors").items()}
    quantized = {name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")}
    if kind == "WFP8AFP8_DYNAMIC":
        tensors |= {f"{name}.weight_offset": torch.zeros(1, 1) for name in quantized}
    folder = write(floats("llama"), tmp_path / "modelslim", tensors, None)
    types = {name: kind if name.rpartition(".")[0] in quantized else "FLOAT" for name in tensors}
    (folder / "quant_model_description.json").write_text(json.dumps({"version": "1.0.0", **types}))
    assert close(answers(folder), answers(exact))


# On load


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_floats_on_load_are_saved_as_they_are(name: str, floats: Callable[[str], Path], tmp_path: Path) -> None:
    source = floats("llama")
    with open_llm(source, quantization=name, skip_tokenizer_init=True) as llm:
        layer = engine_of(llm).runner.model.model.layers[1].mlp.down_proj
        found = layer.quant_method.dequantize_weight(layer)
        reports = {report.name: report for report in engine_of(llm).runner.layer_reports()}
        llm.save_quantized(tmp_path / "saved")
    weight = load_file(source / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(found, nearest(weight, name))
    report = reports["model.layers.1.mlp.down_proj"]
    assert report.weight_snr == pytest.approx(snr(weight, found), abs=0.01)
    assert report.weight_snr > (30 if name == "fp8" else 17)
    assert report.bytes_after < report.bytes_before * (0.3 if name == "fp8" else 0.16)  # of float32
    # A table that is the LM head too is saved twice, and in float32 where it is looked up.
    assert same(answers(tmp_path / "saved"), answers(source, quantization=name))
    assert not same(answers(source, quantization=name), answers(source))


def test_floats_on_load_round_ties_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    found = quantize_weight_as(torch.cat((ties, -ties)).repeat(2)[None], "mxfp4", 32)
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    assert torch.equal(doubled_fp4()[found.q.long() + 8] * found.scale, torch.cat((even, -even)).repeat(2)[None])
    with pytest.raises(ValueError, match="NaN or infinite values"):
        quantize_weight_as(torch.full((1, 32), float("nan")), "mxfp4", 32)


def snr(weight: torch.Tensor, found: torch.Tensor) -> float:
    return float(10 * torch.log10(weight.square().sum() / (weight - found).square().sum()))


def nearest(weight: torch.Tensor, name: str) -> torch.Tensor:
    """By trying every value, and for MXFP4 all powers of two."""
    if name == "fp8":
        return in_blocks(weight, 1, weight.shape[1])[2]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))
    groups = weight.view(len(weight), -1, 32, 1)
    tried = []
    for power in range(-12, 4):
        choice = (groups - values * 2.0**power).abs().argmin(-1)
        tried.append(values[choice] * 2.0**power)
    errors = torch.stack([(groups[..., 0] - value).square().sum(-1) for value in tried])
    best = errors.argmin(0)[..., None].expand_as(tried[0])
    return torch.stack(tried).gather(0, best[None])[0].view_as(weight)


def test_fp8_by_name_is_what_an_fp8_checkpoint_has(floats: Callable[[str], Path], tmp_path: Path) -> None:
    stored, exact = fp8_pair(floats("llama"), tmp_path, (16, 24), "weight_scale_inv")
    assert close(answers(stored, quantization="fp8"), answers(exact))
    with pytest.raises(ValidationError, match="quantization='mxfp4' contradicts the checkpoint: it is quantized as"):
        open_llm(stored, quantization="mxfp4").__enter__()
    with pytest.raises(ValidationError, match="group_size=16 for mxfp4, whose groups are of 32"):
        open_llm(floats("llama"), quantization={"scheme": "mxfp4", "group_size": 16}).__enter__()


# Ranks


def filled(layer: Any, tensors: Mapping[Any, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """What the layer's weight stands for, once it is loaded from (8-bit floats, scales) of each shard."""
    for shard, values in tensors.items():
        for parameter, value in zip((layer.weight, layer.weight_scale_inv), values, strict=True):
            parameter.weight_loader(parameter, value, shard)
    layer.weight_scale_inv.elements_loaded = layer.weight_scale_inv.numel()
    layer.quant_method.process_weights_after_loading(layer)
    return layer.quant_method.dequantize_weight(layer)


def test_each_rank_takes_the_scales_of_its_blocks() -> None:
    """Blocks of 24 rows cross the border between two ranks."""
    config = Fp8Config((24, 24), ())
    sizes = {"q": 64, "k": 32, "v": 32}
    made = {name: in_blocks(torch.randn(rows, 96), 24, 24) for name, rows in sizes.items()}
    down = in_blocks(torch.randn(40, 96), 24, 24)
    for rank in range(2):
        tp = TensorParallel(rank, 2)
        fused = QKVParallelLinear(
            96, 16, 4, 2, bias=False, quant_config=config, prefix="qkv_proj", tp=tp, return_bias=False
        )
        parts = [made[name][2][rank * rows // 2 : (rank + 1) * rows // 2] for name, rows in sizes.items()]
        assert torch.equal(filled(fused, {name: made[name][:2] for name in sizes}), torch.cat(parts))
        row = RowParallelLinear(96, 40, bias=False, quant_config=config, prefix="down_proj", tp=tp, return_bias=False)
        assert torch.equal(filled(row, {None: down[:2]}), down[2][rank * 20 : (rank + 1) * 20])


@pytest.mark.parametrize(
    ("listed", "left"),
    [
        ("model.layers.1.self_attn.o_proj", ["1.self_attn.o_proj"]),
        ("o_proj", ["1.self_attn.o_proj", "10.self_attn.o_proj"]),
        ("self_attn.o_proj", ["1.self_attn.o_proj", "10.self_attn.o_proj"]),
        ("model.layers.1", ["1.self_attn.o_proj", "1.mlp.no_proj"]),
        ("layers.1", []),
        ("proj", []),
        ("model", ["1.self_attn.o_proj", "10.self_attn.o_proj", "1.mlp.no_proj"]),
    ],
)
def test_modules_not_to_convert_are_whole_segments_of_a_path(listed: str, left: list[str]) -> None:
    """A module, one that holds it, or the end of its path; 1 is not 10 and o_proj is not no_proj."""
    config = Fp8Config.from_config({"quant_method": "fp8", "modules_to_not_convert": [listed]})
    layer: Any = torch.nn.Module()
    layer.quant_kind = "linear"
    paths = ("1.self_attn.o_proj", "10.self_attn.o_proj", "1.mlp.no_proj")
    methods = {path: config.get_quant_method(layer, f"model.layers.{path}") for path in paths}
    assert [path for path, method in methods.items() if isinstance(method, UnquantizedLinearMethod)] == left
