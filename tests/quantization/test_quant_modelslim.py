"""ModelSlim checkpoints, written by `checkpoints.modelslim` from the formulas of the format, read and computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.modelslim import ModelSlimFolder, Tensors, expected_output, write_modelslim
from embedded import engine_of, open_llm, run, tokens
from safetensors.torch import load_file, save_file
from tiny_models import TinyModel, one_thread, write_checkpoint

from llm import LLM, SamplingParams
from llm.errors import CheckpointError, LLMError, UnsupportedModelError, ValidationError

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
PROMPT = [{"prompt_token_ids": [5, 6, 7, 8]}]
Writer = Callable[..., tuple[Path, Tensors]]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modelslim") / "float"
    with one_thread():
        write_checkpoint(TinyModel("LlamaConfig", {**SIZES, "attention_bias": True}), folder)
    return folder


@pytest.fixture
def write(source: Path, tmp_path: Path) -> Writer:
    def writer(how: ModelSlimFolder) -> tuple[Path, Tensors]:
        return tmp_path / "model", write_modelslim(source, tmp_path / "model", how)

    return writer


def layers_are(kind: str) -> Callable[[str], str]:
    return lambda module: kind if module.endswith("_proj") else "FLOAT"


def parts_of(written: Tensors, module: str) -> Tensors:
    prefix = f"{module}."
    return {name[len(prefix) :]: value for name, value in written.items() if name.startswith(prefix)}


def worst_error(llm: LLM, written: Tensors, kind: str, version: str, seed: int = 0) -> float:
    """The largest error of any linear layer against float64, relative to its largest output."""
    worst = 0.0
    for name, layer in engine_of(llm).runner.model.named_modules():
        if getattr(layer, "quant_kind", "") != "linear":
            continue
        x = torch.randn(5, layer.input_size, generator=torch.Generator().manual_seed(seed))
        path, _, last = name.rpartition(".")
        shards = [parts_of(written, f"{path}.{part}") for part in FUSED.get(last, [last])]
        expected = torch.cat([expected_output(parts, kind, version, x) for parts in shards], 1)
        worst = max(worst, float((layer(x) - expected).abs().max() / expected.abs().max()))
    return worst


CASES = {
    "dynamic": ("W8A8_DYNAMIC", ModelSlimFolder(layers_are("W8A8_DYNAMIC"))),
    "static": ("W8A8", ModelSlimFolder(layers_are("W8A8"))),
    "static-int64": ("W8A8", ModelSlimFolder(layers_are("W8A8"), int64_deq_scale=True)),
    "static-old": ("W8A8", ModelSlimFolder(layers_are("W8A8"), version="0.9", int64_deq_scale=True)),
    "static-W8A8S": ("W8A8S", ModelSlimFolder(layers_are("W8A8S"))),
    "mix": ("W8A8_MIX", ModelSlimFolder(layers_are("W8A8_MIX"))),
    "weight-only": ("W8A16", ModelSlimFolder(layers_are("W8A16"))),
    "int4-old": ("W4A8_DYNAMIC", ModelSlimFolder(layers_are("W4A8_DYNAMIC"), version="0", group_size=32)),
    "int4-old-channel": ("W4A8_DYNAMIC", ModelSlimFolder(layers_are("W4A8_DYNAMIC"), version="0")),
    "int4-new": ("W4A8_DYNAMIC", ModelSlimFolder(layers_are("W4A8_DYNAMIC"), group_size=16)),
    "int4-weight-only": ("W4A16", ModelSlimFolder(layers_are("W4A16"), group_size=16)),
    "int4-weight-only-channel": ("W4A16", ModelSlimFolder(layers_are("W4A16"))),
    # Its description says nothing of groups.
    "int4-weight-only-old": ("W4A16", ModelSlimFolder(layers_are("W4A16"), "0", 32, extra={"group_size": 0})),
    "int4-new-channel": ("W4A8_DYNAMIC", ModelSlimFolder(layers_are("W4A8_DYNAMIC"))),
}


@pytest.mark.parametrize("case", CASES)
def test_every_layer_computes_the_formula(case: str, write: Writer) -> None:
    kind, how = CASES[case]
    folder, written = write(how)
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        assert llm.config.model_config.quantization == "ascend"
        layer = engine_of(llm).runner.model.model.layers[0].self_attn.qkv_proj
        assert layer.quant_method.source == "quant_model_description.json"
        assert layer.quant_method.reason == f"its weight is {kind}"
        assert layer.quant_method.scheme == {"W8A8S": "W8A8"}.get(kind, kind)
        assert worst_error(llm, written, kind, how.version) < 1e-5
        batch = [*PROMPT, {"prompt_token_ids": [9, 3]}, *PROMPT]
        assert tokens(run(llm, batch))[::2] == tokens(run(llm, PROMPT)) * 2


def test_mix_is_saved_as_what_is_computed(write: Writer, tmp_path: Path) -> None:
    folder, _ = write(CASES["mix"][1])
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        before = tokens(run(llm, PROMPT))
        llm.save_quantized(tmp_path / "saved", "modelslim")
    types = json.loads((tmp_path / "saved" / "quant_model_description.json").read_text())
    assert types["model.layers.0.self_attn.o_proj.weight"] == "W8A8_DYNAMIC"
    with open_llm(tmp_path / "saved", skip_tokenizer_init=True) as llm:
        assert tokens(run(llm, PROMPT)) == before


def test_the_comparison_sees_a_wrong_weight(write: Writer) -> None:
    folder, written = write(CASES["int4-new"][1])
    packed = written["model.layers.0.mlp.up_proj.weight"]
    # Nibbles swapped: rows 2j and 2j + 1 change places.
    written["model.layers.0.mlp.up_proj.weight"] = ((packed.to(torch.int16) & 15) << 4 | (packed >> 4 & 15)).to(
        torch.int8
    )
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        assert worst_error(llm, written, "W4A8_DYNAMIC", "1.0.0") > 0.1


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("weight_scale", torch.ones(64, 3), r"has shape \[64, 3\]; groups must be multiples of 8 of 64 columns"),
        ("weight_scale", torch.zeros(64, 4), "must be positive and finite"),
        ("weight_offset", torch.full((64, 4), 9.0), "weight_offset has values from 9 to 9, must be of 4 bits"),
        ("weight", torch.zeros(4, dtype=torch.int8), r"has shape \[4\], must have two dimensions"),
        ("weight", torch.zeros(64, 64, dtype=torch.int8), r"has shape \[128, 64\], the model needs \[64, 64\]"),
    ],
)
def test_weight_only_tensors_that_make_no_sense(part: str, value: torch.Tensor, says: str, write: Writer) -> None:
    folder, written = write(CASES["int4-weight-only"][1])
    written[f"model.layers.1.self_attn.o_proj.{part}"] = value
    save_file(written, folder / "quant_model_weights.safetensors")
    with pytest.raises(CheckpointError, match=says):
        LLM(folder, skip_tokenizer_init=True)


def test_swapped_nibbles_are_caught_by_scale_bias(write: Writer) -> None:
    folder, written = write(CASES["int4-new"][1])
    name = "model.layers.1.mlp.down_proj.weight"
    written[name] = ((written[name].to(torch.int16) & 15) << 4 | (written[name] >> 4 & 15)).to(torch.int8)
    save_file(written, folder / "quant_model_weights.safetensors")
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.down_proj: scale_bias is not 8 times the sum"):
        LLM(folder, skip_tokenizer_init=True)


def test_quant_bias_is_the_bias_to_half_a_step(write: Writer) -> None:
    """|W x + bias - y| from rounding quant_bias alone is at most deq_scale / 2."""
    folder, written = write(CASES["static"][1])
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        layer = engine_of(llm).runner.model.model.layers[0].self_attn.qkv_proj
        stored = torch.cat([written[f"model.layers.0.self_attn.{part}_proj.bias"] for part in "qkv"]).double()
        deq = torch.cat([written[f"model.layers.0.self_attn.{part}_proj.deq_scale"] for part in "qkv"]).double()
        assert ((layer.bias.double() - stored).abs() <= deq * 0.5001).all()
        assert (layer.bias.double() != stored).any()


def test_old_static_files_may_lack_what_can_be_computed(write: Writer) -> None:
    lacking = ("deq_scale", "weight_offset")
    how = ModelSlimFolder(layers_are("W8A8"), version="0.9")
    folder, written = write(how)
    kept = {name: value for name, value in written.items() if not name.endswith(lacking)}
    save_file(kept, folder / "quant_model_weight_w8a8.safetensors")
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        assert worst_error(llm, written, "W8A8", "0.9") < 1e-5


def test_the_float_bias_serves_when_there_is_no_quant_bias(write: Writer) -> None:
    folder, written = write(ModelSlimFolder(layers_are("W8A8")))
    for name in [name for name in written if name.endswith("quant_bias")]:
        module = name.removesuffix(".quant_bias")
        sums = written[f"{module}.weight"].double().sum(1)
        float_bias = written.get(f"{module}.bias", torch.zeros(())).double()
        deq = written[f"{module}.deq_scale"].double()
        written[name] = float_bias / deq - written[f"{module}.input_offset"].double() * sums
    kept = {name: value for name, value in written.items() if not name.endswith("quant_bias")}
    save_file(kept, folder / "quant_model_weights.safetensors")
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        assert worst_error(llm, written, "W8A8", "1.0.0") < 1e-5


def test_int8_tables(write: Writer) -> None:
    def types(module: str) -> str:
        return {"model.embed_tokens": "W8A16", "lm_head": "W8A8_DYNAMIC"}.get(
            module, layers_are("W8A8_DYNAMIC")(module)
        )

    folder, written = write(ModelSlimFolder(types))
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        model = engine_of(llm).runner.model
        ids = torch.tensor([3, 250, 3])
        parts = parts_of(written, "model.embed_tokens")
        assert torch.equal(model.embed(ids), parts["weight"][ids].float() * parts["weight_scale"][ids])
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
        expected = expected_output(parts_of(written, "lm_head"), "W8A8_DYNAMIC", "1.0.0", x)
        assert (model.compute_logits(x) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_mixed_layers_and_norm_bias(write: Writer, source: Path) -> None:
    """Down projections stay float; norms have a bias, and the first generation's copies of them are ignored."""
    norm = "model.layers.0.input_layernorm"
    how = ModelSlimFolder(
        lambda module: "FLOAT" if "down_proj" in module else layers_are("W8A8_DYNAMIC")(module),
        extra={f"{norm}.bias": "FLOAT", f"{norm}.module.weight": "FLOAT", f"{norm}.module.bias": "FLOAT"},
    )
    folder, written = write(how)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(2))
    written |= {f"{norm}.bias": bias, f"{norm}.module.bias": bias.clone(), f"{norm}.module.weight": bias.clone()}
    save_file(written, folder / "quant_model_weights.safetensors")
    with open_llm(folder, skip_tokenizer_init=True) as llm, open_llm(source, skip_tokenizer_init=True) as plain:
        layer, reference = (engine_of(item).runner.model.model.layers[0] for item in (llm, plain))
        x, residual = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(3))
        normed, total = layer.input_layernorm(x, residual)
        expected, expected_total = reference.input_layernorm(x, residual)
        assert torch.equal(normed, expected + bias) and torch.equal(total, expected_total)
        assert torch.equal(layer.mlp.down_proj.weight, reference.mlp.down_proj.weight)
        assert not hasattr(layer.post_attention_layernorm, "bias")


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "kv": ({"kv_cache_type": "C4"}, "kv_cache_type='C4'; computed is 'C8'"),
    "kv-tensor": ({"model.layers.0.self_attn.k_proj.kv_cache_scale": "C4"}, "the type 'C4'; computed is 'C8'"),
    "fa": ({"fa_quant_type": "FAKQuant"}, "quantized attention is not computed"),
    "rotation": ({"is_rot_used": True}, "rotated activations is not computed"),
    "heads": ({"model.layers.0.self_attn.heads_rotation": "FLOAT"}, "rotations of heads are not computed"),
    "kronecker": ({"model.layers.0.mlp.kronecker_rotation_m": "FLOAT"}, "Kronecker rotations are not computed"),
    "smooth": ({"model.layers.0.mlp.up_proj.div.mul_scale": "FLOAT"}, "div.mul_scale"),
    "unknown-global": ({"surprise": 1}, "keys that are not understood: 'surprise'"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_computed_is_refused(case: str, write: Writer) -> None:
    extra, says = REFUSALS[case]
    folder, _ = write(ModelSlimFolder(layers_are("W8A8_DYNAMIC"), extra=extra))
    with pytest.raises(LLMError, match=says):
        LLM(folder, skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("W8A8SC", r"W8A8SC \(its weights are compressed for the NPU\)"),
        ("W4A4_FLATQUANT_DYNAMIC", "stored as W4A4_FLATQUANT_DYNAMIC, which is not computed for linear layers"),
        ("W4A4_MXFP4_FLATQUANT", "computed are W8A8_DYNAMIC, W8A8_MIX, W8A8, W4A8_DYNAMIC, W8A16, W4A16, WFP8AFP8"),
        ("NF4", "stored as NF4"),
    ],
)
def test_types_that_are_not_computed_are_refused(kind: str, says: str, write: Writer) -> None:
    folder, _ = write(CASES["dynamic"][1])
    path = folder / "quant_model_description.json"
    types = json.loads(path.read_text())
    path.write_text(json.dumps({name: kind if value == "W8A8_DYNAMIC" else value for name, value in types.items()}))
    with pytest.raises(UnsupportedModelError, match=says):
        LLM(folder, skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("odd", "others", "says"),
    [
        ({"k_proj": "FLOAT"}, "W8A16", "some but not all shards of model.layers.0.self_attn.qkv_proj"),
        ({"up_proj": "W8A16"}, "W8A8", "Not all shards of model.layers.0.mlp.gate_up_proj"),
    ],
)
def test_shards_that_disagree(write: Writer, odd: dict[str, str], others: str, says: str) -> None:
    def kind(module: str) -> str:
        return next((value for name, value in odd.items() if name in module), layers_are(others)(module))

    folder, _ = write(ModelSlimFolder(kind))
    with pytest.raises(CheckpointError, match=says):
        LLM(folder, skip_tokenizer_init=True)


def test_a_shard_missing_from_the_description(write: Writer) -> None:
    folder, _ = write(ModelSlimFolder(layers_are("W8A8"), drop=lambda name: "v_proj" in name))
    with pytest.raises(CheckpointError, match=r"says nothing of model.layers.0.self_attn.v_proj.weight"):
        LLM(folder, skip_tokenizer_init=True)


def test_a_shard_missing_from_the_weights(write: Writer) -> None:
    drop = "model.layers.1.self_attn.k_proj.weight"
    folder, _ = write(ModelSlimFolder(layers_are("W8A16"), drop=lambda name: name == drop, keep_described=True))
    with pytest.raises(
        CheckpointError, match=r"parameters that no tensor fills: model.layers.1.self_attn.k_proj.weight"
    ):
        LLM(folder, skip_tokenizer_init=True)


def test_one_tensor_of_a_module_with_another_type(write: Writer) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale"
    folder, _ = write(ModelSlimFolder(layers_are("W8A16"), extra={name: "W8A8"}))
    with pytest.raises(CheckpointError, match=r"gives model.layers.0.mlp.up_proj.weight_scale the type 'W8A8'"):
        LLM(folder, skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (("q_proj.input_scale", torch.tensor([0.5])), "input_scale differs between the shards"),
        (("up_proj.input_offset", torch.tensor([0.5])), "input_offset differs between the shards"),
        (("o_proj.input_offset", torch.tensor([0.5])), "input_offset is 0.5, which is not whole"),
        (("o_proj.input_offset", torch.tensor([float("nan")])), "input_offset is nan, which is not whole"),
        (("o_proj.input_offset", torch.tensor([float("inf")])), "input_offset is inf, which is not whole"),
        (("o_proj.input_offset", torch.tensor([1e30])), "input_offset is 1e\\+30, and at most 32768"),
        (("o_proj.input_offset", torch.tensor([1j])), "stored as complex64, the model needs float32"),
        (("o_proj.input_scale", torch.tensor([0.0])), "input_scale must be positive"),
        (("o_proj.deq_scale", torch.full((64,), -1.0)), "deq_scale must be positive"),
        (("o_proj.weight_scale", torch.full((64, 1), 3.0)), r"deq_scale is not input_scale \* weight_scale"),
        (("o_proj.weight_offset", torch.full((64, 1), 3.0)), "weight_offset is not 0"),
        (("o_proj.weight", torch.zeros(64, 64)), "stored as float32, the model needs int8"),
        (("o_proj.input_scale", torch.ones(2)), r"has shape \[2\], the model needs \[1\]"),
    ],
)
def test_static_tensors_that_make_no_sense(edit: tuple[str, torch.Tensor], says: str, write: Writer) -> None:
    folder, written = write(ModelSlimFolder(layers_are("W8A8"), version="0.9"))
    part = "mlp" if "up_proj" in edit[0] else "self_attn"
    written[f"model.layers.0.{part}.{edit[0]}"] = edit[1]
    save_file(written, folder / "quant_model_weight_w8a8.safetensors")
    with pytest.raises(CheckpointError, match=says):
        LLM(folder, skip_tokenizer_init=True)


def test_an_input_scale_that_leaves_no_weights(write: Writer) -> None:
    folder, written = write(CASES["static"][1])
    written["model.layers.0.self_attn.o_proj.input_scale"] = torch.tensor([1e-45])
    save_file(written, folder / "quant_model_weights.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj: deq_scale divided by input_scale must be .* it holds inf"):
        LLM(folder, skip_tokenizer_init=True)


def test_a_scale_bias_that_is_no_number(write: Writer) -> None:
    folder, written = write(CASES["int4-new"][1])
    written["model.layers.0.self_attn.o_proj.scale_bias"][3] = torch.nan
    save_file(written, folder / "quant_model_weights.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj: scale_bias is not 8 times .* in 1 of 64 rows"):
        LLM(folder, skip_tokenizer_init=True)


@pytest.mark.parametrize("shape", [(), (64,), (64, 1, 1)])
def test_a_scale_bias_of_another_shape(shape: tuple[int, ...], write: Writer) -> None:
    folder, written = write(CASES["int4-new"][1])
    written["model.layers.0.self_attn.o_proj.scale_bias"] = torch.zeros(shape)
    save_file(written, folder / "quant_model_weights.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj.scale_bias has shape .*, must have two dimensions"):
        LLM(folder, skip_tokenizer_init=True)


def test_asking_for_something_else_contradicts_the_checkpoint(write: Writer) -> None:
    folder, _ = write(CASES["dynamic"][1])
    for asked in ("w8a8", "compressed-tensors", {"scheme": "w4a16"}):
        with pytest.raises(ValidationError, match=r"contradicts the checkpoint: it is quantized as 'ascend'"):
            LLM(folder, quantization=asked, skip_tokenizer_init=True)
    for asked in ("ascend", "modelslim", "ModelSlim"):
        with open_llm(folder, quantization=asked, skip_tokenizer_init=True) as llm:
            assert llm.config.model_config.quantization == "ascend"
            assert llm.config.reasons["quantization"] == "quant_model_description.json"


def test_the_description_is_found_under_its_old_name_too(write: Writer) -> None:
    folder, _ = write(CASES["static-old"][1])
    (folder / "quant_model_description.json").rename(folder / "quant_model_description_w8a8.json")
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        assert llm.config.model_config.quantization == "ascend"
    (folder / "quant_model_description_w8a16.json").write_text("{}")
    with pytest.raises(CheckpointError, match="several quantization descriptions"):
        LLM(folder, skip_tokenizer_init=True)


def test_sharded_weights_with_their_own_index_name(write: Writer) -> None:
    folder, _ = write(CASES["dynamic"][1])
    tensors = load_file(folder / "quant_model_weights.safetensors")
    (folder / "quant_model_weights.safetensors").unlink()
    files = ("quant_model_weights-00001-of-00002.safetensors", "quant_model_weights-00002-of-00002.safetensors")
    names = sorted(tensors)
    halves = {files[0]: names[::2], files[1]: names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in halves.items() for name in held}}
    (folder / "quant_model_weights.safetensors.index.json").write_text(json.dumps(index))
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        assert worst_error(llm, tensors, "W8A8_DYNAMIC", "1.0.0") < 1e-5


@pytest.mark.parametrize("format", ["compressed-tensors", "modelslim"])
def test_a_bias_that_only_quant_bias_holds_survives_a_save(format: str, write: Writer, tmp_path: Path) -> None:
    folder, written = write(ModelSlimFolder(layers_are("W8A8")))
    kept = {name: value for name, value in written.items() if not name.endswith("_proj.bias")}
    assert len(kept) < len(written)
    save_file(kept, folder / "quant_model_weights.safetensors")
    prompt, params = [{"prompt_token_ids": [5, 6, 7, 8]}], SamplingParams(temperature=0, max_tokens=3, logprobs=3)
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        before = run(llm, prompt, params)[0].outputs[0]
        assert engine_of(llm).runner.model.model.layers[0].self_attn.qkv_proj.bias.abs().max() > 0.01
        llm.save_quantized(tmp_path / "saved", format)
    with open_llm(tmp_path / "saved", skip_tokenizer_init=True) as llm:
        after = run(llm, prompt, params)[0].outputs[0]
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
