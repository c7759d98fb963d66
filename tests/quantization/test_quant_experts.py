"""Quantized experts: every scheme on load against the dequantized weights, patterns, calibration, reports, saving."""

from __future__ import annotations

import itertools
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.compressed_tensors import compressed
from checkpoints.modelslim import ModelSlimFolder, expected_output, write_modelslim
from embedded import engine_of, open_llm
from kernel_sets import has_kernels
from safetensors.torch import save_file
from tiny_models import TinyModel, write_checkpoint
from torch import nn

from llm import LLM, SamplingParams
from llm.errors import ValidationError
from llm.layers.moe import FusedMoE
from llm.setup.calibrate import _tell_of_unreached

pytestmark = pytest.mark.usefixtures("one_core")

SIZES = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10]}, {"prompt_token_ids": [200, 3]}]
PARAMS = SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True)
EXPERT = "model.layers.0.mlp.experts"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("experts") / "float"
    write_checkpoint(TinyModel("MixtralConfig", {**SIZES, **EXPERTS}), target)
    return target


def opened(folder: Path, quantization: Any = None, **more: Any) -> Any:
    return open_llm(folder, quantization=quantization, skip_tokenizer_init=True, **more)


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def layers(llm: LLM) -> list[FusedMoE]:
    return [module for module in engine_of(llm).runner.model.modules() if isinstance(module, FusedMoE)]


def both(layer: FusedMoE) -> list[list[Any]]:
    return [[expert.gate_up_proj for expert in layer.experts], [expert.down_proj for expert in layer.experts]]


def expected(layer: FusedMoE, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """In float64, of the dequantized weights."""
    weights, ids = layer.router(logits)
    y = torch.zeros(len(x), layer.hidden_size, dtype=torch.float64)
    for row in range(len(x)):
        for weight, index in zip(weights[row].double(), ids[row].tolist(), strict=True):
            parts = (layer.experts[index].gate_up_proj, layer.experts[index].down_proj)
            gate_up, down = (part.quant_method.dequantize_weight(part).double() for part in parts)
            gate, up = (gate_up @ x[row].double()).chunk(2)
            y[row] += weight * (down @ (torch.nn.functional.silu(gate) * up))
    return y


@pytest.mark.parametrize(
    ("scheme", "tolerance"), [("w8a8", 0.03), ("w8a16", 1e-5), ("w4a8", 0.03), ("w4a16", 1e-5), (None, 1e-5)]
)
def test_every_scheme_computes_what_its_weights_say(folder: Path, scheme: str | None, tolerance: float) -> None:
    """Rounded activations are within three percent; the control is another expert's weights, far beyond."""
    with opened(folder, scheme) as llm, torch.inference_mode():
        layer = layers(llm)[0]
        assert layer.expert_weights() is not None or not has_kernels()
        schemes = {part.gate_up_proj.quant_method.scheme for part in layer.experts}
        assert len(schemes) == 1 and bool(schemes.pop()) == (scheme is not None)
        x, logits = torch.randn(7, 64), torch.randn(7, 5)
        y, wanted = layer(x, logits), expected(layer, x, logits)
        worst = wanted.abs().max().item()
        assert (y - wanted).abs().max().item() < tolerance * worst
        assert (layer(x, logits.roll(1, dims=1)) - wanted).abs().max().item() > 0.3 * worst


def test_alone_is_batched_with_quantized_experts(folder: Path) -> None:
    with opened(folder, "w4a8") as llm:
        together = answers(llm)
        for prompt, answer in zip(PROMPTS, together, strict=True):
            [alone] = llm.generate([prompt], PARAMS, use_tqdm=False)
            assert alone.outputs[0].token_ids == answer[0]
            if has_kernels():
                assert alone.outputs[0].logprobs == answer[1]


def test_patterns_name_experts(folder: Path) -> None:
    """Experts of several kinds are computed in one call, with the bits that they have one by one."""
    asked = {"scheme": "w8a8", "layers": {"*.experts.3.*": "w4a16"}, "ignore": ["*layers.1.*.experts.*"]}
    with opened(folder, asked) as llm:
        first, second = layers(llm)
        assert [expert.down_proj.quant_method.scheme for expert in first.experts].count("W4A16") == 1
        assert {expert.down_proj.quant_method.scheme for expert in second.experts} == {""}
        assert (len({weight.kind for weight in first.expert_weights().down}) == 2) or not has_kernels()
        together = answers(llm)
        llm.apply_model(lambda model: [expert.register_forward_hook(lambda *_: None) for expert in first.experts])
        assert first.expert_weights() is None
        assert answers(llm) == together or not has_kernels()
    wrong = opened(folder, {"scheme": "w8a8", "ignore": ["*.experts.9.*"]})
    with pytest.raises(ValidationError, match="layers that this model does not have"), wrong:
        pass


def test_experts_of_a_layer_share_a_choice_of_bits(folder: Path) -> None:
    with opened(folder, {"bits": 5}) as llm:
        found = [{part.quant_method.scheme for part in parts} for layer in layers(llm) for parts in both(layer)]
        assert all(len(schemes) == 1 for schemes in found) and len({*map(tuple, found)}) == 2
        assert ".experts.*." in llm.config.reasons["quantization"]


@pytest.mark.parametrize("format", ["compressed-tensors", "modelslim"])
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8", "w8a16"])
def test_saved_experts_come_back_bit_for_bit(folder: Path, tmp_path: Path, scheme: str, format: str) -> None:
    asked = {"scheme": scheme, "rotate": format != "modelslim", "symmetric": format == "modelslim"}
    if scheme == "w4a8":
        asked["group_size"] = 8  # ModelSlim knows one size for all, and 32 does not divide every layer's columns
    with opened(folder, asked) as llm:
        before = answers(llm)
        llm.save_quantized(tmp_path / "saved", format)
    with opened(tmp_path / "saved") as loaded:
        assert answers(loaded) == before
        assert {expert.gate_up_proj.quant_method.scheme for expert in layers(loaded)[1].experts} != {""}


class LinearExperts(nn.Module):
    """transformers' experts as linear layers, which is what tools that quantize a checkpoint turn them into."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        for index, (both, down) in enumerate(zip(stacked.gate_up_proj, stacked.down_proj, strict=True)):
            expert = nn.Module()
            for name, weight in zip(("gate_proj", "up_proj", "down_proj"), (*both.chunk(2), down), strict=True):
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                linear.weight.data.copy_(weight)
                expert.add_module(name, linear)
            self.add_module(str(index), expert)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        for row, slot in itertools.product(*map(range, ids.shape)):
            expert: Any = self.get_submodule(str(int(ids[row, slot])))
            inner = nn.functional.silu(expert.gate_proj(hidden[row])) * expert.up_proj(hidden[row])
            total[row] += weights[row, slot] * expert.down_proj(inner)
        return total


@pytest.fixture(scope="module")
def per_expert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tensor per expert, under Qwen 3's names."""
    target = tmp_path_factory.mktemp("experts") / "qwen3"
    config = {**SIZES, "moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2}
    write_checkpoint(TinyModel("Qwen3MoeConfig", config), target)
    return target


@pytest.mark.parametrize("kind", ["W4A16", "W8A8_DYNAMIC"])
def test_experts_that_compressed_tensors_wrote(per_expert: Path, tmp_path: Path, kind: str) -> None:
    """Weight for weight, and where activations are floats token for token, against the package's own model."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    weights: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if kind == "W4A16":
        weights |= {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 16}
    else:
        group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(per_expert, dtype=torch.float32).eval()
    for layer in theirs.model.layers:
        layer.mlp.experts = LinearExperts(layer.mlp.experts)
    compressor = compressed(theirs, {"g": group}, ["lm_head"])
    shutil.copytree(per_expert, tmp_path / "packed")
    save_file({name: part.contiguous() for name, part in theirs.state_dict().items()}, tmp_path / "packed" / WEIGHTS)
    compressor.update_config(tmp_path / "packed")
    compressor.decompress_model(theirs)
    prompt = [5, 6, 7, 8, 9, 10, 200, 3]
    with opened(tmp_path / "packed") as llm:
        for ours, layer in zip(layers(llm), theirs.model.layers, strict=True):
            for index, expert in enumerate(ours.experts):
                both, its = expert.gate_up_proj, layer.mlp.experts.get_submodule(str(index))
                wanted = torch.cat((its.gate_proj.weight, its.up_proj.weight))
                assert both.quant_method.scheme == kind
                torch.testing.assert_close(both.quant_method.dequantize_weight(both), wanted, rtol=1e-6, atol=0)
            assert ours.expert_weights() is not None or not has_kernels()
        [output] = llm.generate([{"prompt_token_ids": prompt}], PARAMS, use_tqdm=False)
    completion = output.outputs[0]
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor([[*prompt, *completion.token_ids]]), use_cache=False).logits[0]
    expected = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    pairs = [
        (line[token].item(), item)
        for line, of in zip(expected, completion.logprobs or [], strict=True)
        for token, item in of.items()
    ]
    worst = max(abs(wanted - item.logprob) for wanted, item in pairs)
    # Activations that are rounded elsewhere go to other experts.
    assert len(pairs) >= 15 and (worst < 1e-4 or kind != "W4A16")


@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W4A8_DYNAMIC"])
def test_experts_in_the_form_of_modelslim(folder: Path, tmp_path: Path, kind: str) -> None:
    """Written from the format's formulas, which give each expert's output too."""
    how = ModelSlimFolder(lambda module: kind if ".experts." in module else "FLOAT")
    written = write_modelslim(folder, tmp_path / "modelslim", how)
    with opened(tmp_path / "modelslim") as llm, torch.inference_mode():
        x = torch.randn(3, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
        for layer, ours in enumerate(layers(llm)):
            assert ours.expert_weights() is not None or not has_kernels()
            for index, expert in enumerate(ours.experts):
                path = f"model.layers.{layer}.block_sparse_moe.experts.{index}"
                parts = [
                    {
                        name[len(f"{path}.{last}.") :]: part
                        for name, part in written.items()
                        if f"{path}.{last}." in name
                    }
                    for last in ("w1", "w3")
                ]
                wanted = torch.cat([expected_output(part, kind, how.version, x) for part in parts], dim=1)
                assert (expert.gate_up_proj(x) - wanted).abs().max() < 1e-5 * wanted.abs().max()
        answers(llm)


def test_the_report_has_one_line_for_the_experts_of_a_layer(folder: Path) -> None:
    with opened(folder, "w8a8") as llm:
        reports = {report.name: report for report in engine_of(llm).runner.layer_reports()}
        mentioned = [name for name in reports if "experts" in name]
        assert mentioned == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        report = reports[EXPERT]
        assert report.kind == "moe" and report.scheme == "W8A8_DYNAMIC" and report.weight_snr is not None
        assert report.bytes_before == 5 * 3 * 64 * 32 * 4 > 3 * report.bytes_after and report.weight_snr > 30
        assert ".experts.*." in str(llm.explain()) and ".experts.3." not in str(llm.explain())


def test_calibration_tells_of_experts_without_a_token(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="llm"):
        _tell_of_unreached({f"{EXPERT}.0.down_proj": 4, f"{EXPERT}.1.down_proj": 0})
    [record] = caplog.records
    assert "1 of 2 layers" in record.getMessage() and f"{EXPERT}.1.down_proj" in record.getMessage()
    caplog.clear()
    _tell_of_unreached({"x": 3})
    assert not caplog.records


def test_the_experts_of_a_layer_share_their_statistics(folder: Path) -> None:
    with opened(folder) as llm:
        runner = engine_of(llm).runner
        before = answers(llm)
        runner.start_observing()
        assert answers(llm) == before
        statistics = runner.stop_observing()
    first, second = (statistics[f"{EXPERT}.{index}.gate_up_proj"] for index in (0, 1))
    assert first.moments is second.moments and first.low == second.low
    tokens = sum(statistics[f"{EXPERT}.{index}.gate_up_proj"].rows for index in range(5))
    assert tokens == 2 * statistics["model.layers.0.self_attn.qkv_proj"].rows > 0


def test_the_load_of_experts(folder: Path) -> None:
    with opened(folder) as llm:
        runner = engine_of(llm).runner
        runner.start_counting_experts()
        answers(llm)
        counts = runner.stop_counting_experts()
        again = answers(llm)
        assert list(counts) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        # 6 + 2 tokens of the prompts and 4 of each answer, two experts each.
        assert [sum(tokens) for tokens in counts.values()] == [2 * (6 + 2 + 4 + 4)] * 2
        assert again == answers(llm)
