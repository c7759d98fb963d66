"""save_quantized: what is written is what was computed, others load it, and it appears whole or not at all."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import PROMPTS, engine_of, open_llm, python, run, tokens
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_quant_on_load import TEXTS
from tiny_models import (
    EXPERTS_OF_DEEPSEEK,
    LATENT,
    NULL,
    TinyModel,
    one_thread,
    reference_model,
    tiny_checkpoint,
    write_checkpoint,
)

from llm import LLM, SamplingParams
from llm.errors import LLMError, ValidationError
from llm.kernels.reference.quantize_weight import quantize_weight_as
from llm.kernels.reference.rotation import rotate
from llm.loading.saved_formats import stored_layers
from llm.quantization.quantizer import IntegerWeight

FORMATS = ("compressed-tensors", "modelslim")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
PROMPT = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10]}, {"prompt_token_ids": [200, 3]}]
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=3)


@pytest.fixture(scope="session")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("save") / "float"
    with one_thread():
        write_checkpoint(TinyModel("LlamaConfig", {**SIZES, "attention_bias": True}), folder)
    return folder


def answers(llm: LLM, prompts: Any = PROMPT) -> list[Any]:
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in run(llm, prompts, PARAMS)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "w4a8", "w4a16", "w8a8_static"])
def test_the_embedded_model_comes_back_bit_for_bit(scheme: str, format: str, tmp_path: Path) -> None:
    """Tied embeddings, and a tokenizer to copy."""
    calibration = TEXTS if scheme == "w8a8_static" else None
    asked = {"scheme": scheme, "rotate": format != "modelslim", "symmetric": format == "modelslim"}
    with open_llm(quantization=asked, calibration=calibration) as llm:
        before = answers(llm, PROMPTS)
        assert llm.save_quantized(tmp_path / "saved", format) == tmp_path / "saved"
    with open_llm(tmp_path / "saved") as loaded:
        assert loaded.config.model_config.quantization == {"modelslim": "ascend"}.get(format, format)
        assert answers(loaded, PROMPTS) == before
        assert loaded.get_default_sampling_params().top_p == 0.9
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def linear_layers(llm: LLM) -> dict[str, Any]:
    modules = engine_of(llm).runner.model.named_modules()
    return {name: module for name, module in modules if getattr(module, "quant_kind", "") == "linear"}


def test_two_levels_of_scales_are_found_again_in_a_saved_checkpoint(tmp_path: Path) -> None:
    """It holds integers of 8 bits; a layer that has one that no code stands for keeps 8 bits."""
    with open_llm(quantization="w4a8") as llm:
        before, asked = answers(llm, PROMPTS), linear_layers(llm)
        nbytes = {name: layer.packed_weight.nbytes for name, layer in asked.items()}
        llm.save_quantized(tmp_path / "saved")
    with open_llm(tmp_path / "saved") as loaded:
        layers = linear_layers(loaded)
        assert answers(loaded, PROMPTS) == before
        assert {name: layer.packed_weight.nbytes for name, layer in layers.items()} == nbytes
        assert {layer.quant_method.scheme for layer in layers.values()} == {"W4A8_DYNAMIC"}
        assert "16 layers held in 4 bits, as they fit" in loaded.config.reasons["quantization"]
    file, name = tmp_path / "saved/model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)
    tensors[name][3, 5] += 1 if tensors[name][3, 5] < 0 else -1
    save_file(tensors, file)
    with open_llm(tmp_path / "saved") as loaded:
        schemes = {name: layer.quant_method.scheme for name, layer in linear_layers(loaded).items()}
    assert schemes.pop(name.removesuffix(".weight")) == "W8A8_DYNAMIC" and set(schemes.values()) == {"W4A8_DYNAMIC"}


@pytest.mark.parametrize("size", [8, 16, 24, 32])
def test_levels_are_found_of_the_integers_that_they_make(size: int) -> None:
    """Whatever the codes: all the same, or all of a common divisor."""
    generator = torch.Generator().manual_seed(size)
    q, scale, levels, *_ = quantize_weight_as(torch.randn(40, 5 * size, generator=generator), "two_levels", size)
    groups = q.unflatten(1, (-1, size))
    least = groups.amin(dim=-1, keepdim=True)
    groups[3], groups[4] = least[3], least[4] + (groups[4] - least[4]) // 2 * 2
    made = IntegerWeight(q, scale, size, 4, levels=levels).as_eight_bits()
    found = made.on_levels(size)
    assert found is not None and torch.equal(found.as_eight_bits().q, made.q) and found.bits == 4
    made.q[7, :3] = torch.tensor([-128, 127, 0])
    assert made.on_levels(size) is None


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq"])
def test_scales_are_saved_positive(format: str, tmp_path: Path) -> None:
    """Q4_0 has negative ones; the values stay."""
    with open_llm(quantization="q4_0") as llm:
        before = {name: layer.packed_weight for name, layer in linear_layers(llm).items()}
        assert any((weight.scales < 0).any() for weight in before.values())
        expected = {name: weight.dequantize() for name, weight in before.items()}
        llm.save_quantized(tmp_path / "saved", format)
    with open_llm(tmp_path / "saved") as loaded:
        for name, layer in linear_layers(loaded).items():
            assert (layer.packed_weight.scales > 0).all()
            assert torch.equal(layer.packed_weight.dequantize(), expected[name])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "asked",
    [
        {"scheme": "w8a8"},
        {"scheme": "w4a8", "group_size": 16, "lm_head": "w8a16", "ignore": ["*.0.mlp.down_proj"]},
        {"scheme": "w8a16", "layers": {"*.o_proj": "w8a8", "*.down_proj": "w4a8"}},
    ],
    ids=["w8a8", "mixed-groups", "mixed-schemes"],
)
def test_biases_an_untied_head_and_mixtures_come_back(asked: Any, format: str, biased: Path, tmp_path: Path) -> None:
    asked = {**asked, "rotate": format != "modelslim", "symmetric": format == "modelslim"}
    with open_llm(biased, quantization=asked, skip_tokenizer_init=True) as llm:
        before = answers(llm)
        llm.save_quantized(tmp_path / "saved", format)
    with open_llm(tmp_path / "saved", skip_tokenizer_init=True) as loaded:
        assert answers(loaded) == before


def test_ignore_names_the_linear_layers_that_are_not_quantized(biased: Path, tmp_path: Path) -> None:
    """Other loaders read it: vLLM would look for integers in a layer that is missing there."""
    asked = {"scheme": "w8a8", "lm_head": None, "ignore": ["*.0.mlp.down_proj"]}
    with open_llm(biased, quantization=asked, skip_tokenizer_init=True) as llm:
        llm.save_quantized(tmp_path / "saved")
    section = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert section["ignore"] == ["model.layers.0.mlp.down_proj"]


def test_one_format_becomes_the_other(biased: Path, tmp_path: Path) -> None:
    with open_llm(biased, quantization={"scheme": "w8a8", "rotate": False}, skip_tokenizer_init=True) as llm:
        before = answers(llm)
        llm.save_quantized(tmp_path / "a", "modelslim")
    with open_llm(tmp_path / "a", skip_tokenizer_init=True) as llm:
        llm.save_quantized(tmp_path / "b", "compressed-tensors")
    with open_llm(tmp_path / "b", skip_tokenizer_init=True) as llm:
        assert answers(llm) == before


@pytest.mark.parametrize(
    ("given", "window"), [({"sliding_window": None}, None), ({"sliding_window": 8}, 8), ({}, 4096)]
)
def test_a_window_of_null_stays_null(given: dict[str, Any], window: int | None, tmp_path: Path) -> None:
    """For Mistral a missing `sliding_window` is one of 4,096 tokens, and null none."""
    write_checkpoint(TinyModel("MistralConfig", SIZES), tmp_path / "float")
    file = tmp_path / "float" / "config.json"
    config = json.loads(file.read_text())
    del config["sliding_window"]
    config |= given
    file.write_text(json.dumps(config))
    with open_llm(tmp_path / "float", quantization="w8a8", skip_tokenizer_init=True) as llm:
        llm.save_quantized(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {key: value for key, value in saved.items() if key != "quantization_config"} == config
    assert reference_model(tmp_path / "saved").config.sliding_window == window
    with open_llm(tmp_path / "saved", skip_tokenizer_init=True) as llm:
        assert [layer.attention.sliding_window for layer in engine_of(llm).runner.plan.architecture.layers] == [
            window
        ] * 2


# Latents of 32 and heads of 16, as the schemes that have groups need.
DEEPSEEK = {
    **{**LATENT, **EXPERTS_OF_DEEPSEEK, **SIZES},
    **{"q_lora_rank": NULL, "moe_intermediate_size": 32, "kv_lora_rank": 32, "num_key_value_heads": 4},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_shared_experts": 1, "head_dim": None},
}


@pytest.mark.parametrize(
    ("scheme", "format"),
    [
        ("w8a8", "compressed-tensors"),
        ({"scheme": "w8a8", "rotate": False}, "modelslim"),
        ({"scheme": "w4a16", "group_size": 32}, "gptq"),
        ("nf4", "bitsandbytes"),
        ("q8_0", "gguf"),
    ],
)
def test_queries_without_a_latent_come_back_in_every_format(scheme: Any, format: str, tmp_path: Path) -> None:
    """For DeepSeek V2 a missing `q_lora_rank` is a latent of 1,536 values, and null none."""
    write_checkpoint(TinyModel("DeepseekV2Config", DEEPSEEK), tmp_path / "float")
    assert json.loads((tmp_path / "float" / "config.json").read_text())["q_lora_rank"] is None
    with open_llm(tmp_path / "float", quantization=scheme, skip_tokenizer_init=True) as llm:
        architecture, before = engine_of(llm).runner.plan.architecture, run(llm, PROMPT, PARAMS)
        saved = llm.save_quantized(tmp_path / ("saved.gguf" if format == "gguf" else "saved"), format)
    with open_llm(saved, skip_tokenizer_init=True) as llm:
        assert engine_of(llm).runner.plan.architecture == architecture
        assert tokens(run(llm, PROMPT, PARAMS)) == tokens(before)


def test_shards_and_their_index(biased: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm.loading.save._SHARD_BYTES", 20_000)
    with open_llm(biased, quantization="w8a8", skip_tokenizer_init=True) as llm:
        before = answers(llm)
        llm.save_quantized(tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 3 and sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for file in files for tensor in tensors_of(tmp_path / "saved" / file).values()
    )
    with open_llm(tmp_path / "saved", skip_tokenizer_init=True) as llm:
        assert answers(llm) == before


def test_what_described_the_old_weights_is_not_copied(biased: Path, tmp_path: Path) -> None:
    """An index of other shards, another quantization's description: each of them would be read with the new weights."""
    folder = shutil.copytree(biased, tmp_path / "float")
    old = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "quant_model_description_w8a8.json")
    kept = {"tokenizer_config.json", "generation_config.json", "special_tokens_map.json"}
    with open_llm(folder, quantization="w8a8", skip_tokenizer_init=True) as llm:
        before = answers(llm)
        for name in (*old, "quantize_config.json", "quant_config.json", "results.json", *kept):
            (folder / name).write_text("{}")
        saved = llm.save_quantized(tmp_path / "saved")
    names = {path.name for path in saved.iterdir()}
    assert names == {"config.json", "model.safetensors"} | kept
    with open_llm(saved, skip_tokenizer_init=True) as llm:
        assert answers(llm) == before


def tensors_of(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


# Others load it


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16", "w8a8_static", "w8a8", "w4a8"])
def test_transformers_gives_the_same_logits(scheme: str, tmp_path: Path) -> None:
    """transformers with compressed-tensors, in float32.

    Exactly our arithmetic but for dynamic activations: compressed-tensors simulates them with max|x| / 127.5 where
    kernels (vLLM's, the NPU's, ours) use 127; the test puts 127 in its place and keeps the rest. Where an activation
    lies at the border of two integers, float32's last bit decides, and the logits part: few prompts may, all
    would if a formula differed.
    """
    pytest.importorskip("compressed_tensors")
    import transformers

    calibration = TEXTS if scheme == "w8a8_static" else None
    # transformers 5.23 makes room for zero points as they are before they are packed, and refuses the packed ones.
    asked = {"scheme": scheme, "symmetric": True}
    with open_llm(quantization=asked, calibration=calibration, kv_cache_dtype="float32") as llm:
        llm.save_quantized(tmp_path / "saved")
        ids = llm.get_tokenizer().encode("And it came to pass, when he had made an end of speaking")
        prompts = [ids[start : start + 2] for start in range(12)]
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=2304)
        outputs = run(llm, [{"prompt_token_ids": prompt} for prompt in prompts], params)
        ours = torch.tensor([[out.outputs[0].logprobs[0][token].logprob for token in range(2304)] for out in outputs])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    dynamic = {name: module for name, module in model.named_modules() if quantizes_tokens(module)}
    rotations = input_transforms(tmp_path / "saved", dynamic)
    assert bool(rotations) == (scheme in ("w8a8", "w4a8", "w8a8_static"))  # the LM head, at least
    for name, module in dynamic.items():
        module.quantization_scheme.input_activations = None
        turn, size = rotations.get(name, lambda x: x), module.quantization_scheme.weights.group_size
        hook = partial(in_groups_as_kernels_do, turn=turn, size=size or module.in_features)
        module.register_forward_pre_hook(hook)
    assert bool(dynamic) == (scheme in ("w8a8", "w4a8", "w8a8_static"))
    theirs = model(input_ids=torch.tensor(prompts)).logits[:, -1].log_softmax(-1)
    equal = (ours - theirs).abs().amax(-1) < 2e-4
    # Without outliers rows are rounded more finely: more values lie at a border.
    assert equal.sum() >= (6 if scheme == "w8a8" else 9) if dynamic else equal.all()
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, inputs, output: 1.01 * output)
    planted = model(input_ids=torch.tensor(prompts)).logits[:, -1].log_softmax(-1)
    assert ((ours - planted).abs().amax(-1) > 2e-4).all()


def input_transforms(folder: Path, modules: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """What the description's transforms of inputs are, by module: transformers reads transform_config and leaves it.

    compressed-tensors' own transform is compared with ours, which takes its place: it sums in another order, and at the
    border of two integers that decides.
    """
    from compressed_tensors.transform import TransformConfig, TransformFactory

    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    found = {}
    for name, scheme in TransformConfig(**section.get("transform_config", {"config_groups": {}})).config_groups.items():
        factory = TransformFactory.from_scheme(scheme, name=name)
        for applied in scheme.apply:
            for target in applied.targets if applied.location == "input" else ():
                theirs = factory.create_transform(modules[target], applied)
                found[target] = partial(rotate, block=scheme.head_dim)
                x = torch.randn(3, modules[target].in_features, generator=torch.Generator().manual_seed(0))
                torch.testing.assert_close(found[target](x), theirs(x), rtol=1e-5, atol=1e-5)
    return found


def quantizes_tokens(module: Any) -> bool:
    scheme = getattr(module, "quantization_scheme", None)
    return scheme is not None and scheme.input_activations is not None and bool(scheme.input_activations.dynamic)


def in_groups_as_kernels_do(module: Any, inputs: Any, turn: Any, size: int) -> tuple[torch.Tensor]:
    """Activations have a scale for each group that the weight has one for."""
    groups = turn(inputs[0]).unflatten(-1, (-1, size))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((torch.round(groups / scale) * scale).flatten(-2),)


def test_every_layer_is_written_once(biased: Path) -> None:
    with open_llm(biased, quantization="w8a8", skip_tokenizer_init=True) as llm:
        runner = engine_of(llm).runner
        layers = stored_layers(runner.model, runner.targets)
    names = [layer.name for layer in layers]
    assert len(names) == len(set(names)) == 2 * 9 + 3
    assert sum(layer.is_quantized for layer in layers) == 2 * 7 + 1


# Whole or not at all


def test_a_killed_save_leaves_no_folder(tmp_path: Path) -> None:
    script = f"""
import os, signal
import llm.loading.save as save
from llm import LLM
write = save.save_file
def killed(*args, **kwargs):
    write(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
save.save_file = killed
LLM(quantization="w8a8").save_quantized({str(tmp_path / "saved")!r})
"""
    done = python("-c", script)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "saved").exists()


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    """A file that may not grow to its size fails as a full disk does, in the library that writes it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_llm(quantization="w8a8") as llm:
        before = answers(llm, PROMPTS)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
            with pytest.raises(LLMError, match=r"could not be saved to .*File too large"):
                llm.save_quantized(tmp_path / "saved")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "file").write_text("")
        with pytest.raises(LLMError, match=r"could not be saved to .*file/saved: "):
            llm.save_quantized(tmp_path / "file" / "saved")
        assert answers(llm, PROMPTS) == before


def test_mistakes_are_told_in_a_sentence(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with open_llm(quantization="w8a8") as llm:
        with pytest.raises(ValidationError, match="format='marlin' is not known; use one of 'compressed-tensors'"):
            llm.save_quantized(tmp_path / "saved", "marlin")
        with pytest.raises(ValidationError, match="exists already; pass a new folder"):
            llm.save_quantized(tmp_path)
    with (
        open_llm() as llm,
        pytest.raises(ValidationError, match="the model is not quantized, there is nothing to save"),
    ):
        llm.save_quantized(tmp_path / "saved")
    gpt2 = tiny_checkpoint("gpt2", tmp_path_factory)
    with (
        open_llm(gpt2, quantization="w8a8", skip_tokenizer_init=True) as llm,
        pytest.raises(LLMError, match="transposed"),
    ):
        llm.save_quantized(tmp_path / "saved")
    with open_llm(load_format="dummy", quantization="w8a8") as llm, pytest.raises(LLMError, match="random weights"):
        llm.save_quantized(tmp_path / "saved")
    mixed = {
        "scheme": "w4a8",
        "symmetric": True,
        "rotate": False,
        "layers": {"*.down_proj": {"scheme": "w4a8", "group_size": 64}},
    }
    with open_llm(quantization=mixed) as llm, pytest.raises(LLMError, match=r"groups of \[32, 64\]"):
        llm.save_quantized(tmp_path / "saved", "modelslim")
    assert list(tmp_path.iterdir()) == []
