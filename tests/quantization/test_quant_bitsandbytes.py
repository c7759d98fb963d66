"""bitsandbytes checkpoints that transformers saved (fixtures/make_bitsandbytes.py), and NF4 on load."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import engine_of, open_llm, run
from safetensors.torch import load_file, save_file
from same_answers import close, same, told
from test_quant_words import deviation, held, put

from llm import LLM, SamplingParams
from llm.errors import CheckpointError, LLMError
from llm.quantization.packing import nf4
from llm.quantization.quantizer import IntegerWeight, quantize_weight_as

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "bitsandbytes"
DIGESTS = json.loads((FIXTURES / "digests.json").read_text())
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9]}, {"prompt_token_ids": list(range(3, 30))}]
DOWN = "model.layers.0.mlp.down_proj"
KEYS = "model.layers.0.self_attn.k_proj"
Parts = dict[str, torch.Tensor]


def by_matrix(llm: LLM) -> Parts:
    """The weights of fused layers apart, by the checkpoint's names."""
    found = {}
    for name, weight in held(llm).items():
        path, _, last = name.rpartition(".")
        layer = engine_of(llm).runner.model.get_submodule(name)
        sizes = getattr(layer, "output_partition_sizes", [len(weight)])
        for part, rows in zip(FUSED.get(last, (last,)), weight.split(sizes), strict=True):
            found[f"{path}.{part}"] = rows
    return found


@pytest.mark.parametrize("form", DIGESTS)
def test_weights_are_bitsandbytes_own_and_answers_transformers(form: str, tmp_path: Path) -> None:
    with open_llm(FIXTURES / form, skip_tokenizer_init=True, kv_cache_dtype="float32") as llm:
        weights = by_matrix(llm)
        alone = [output for prompt in PROMPTS for output in run(llm, [prompt], GREEDY)]
        batch = run(llm, PROMPTS, GREEDY)
        reason = " ".join(str(llm.explain()).split())
    assert weights.keys() == DIGESTS[form].keys() and len(weights) == 7
    stored = load_file(FIXTURES / form / "model.safetensors")
    for name, weight in weights.items():
        if form == "int8":  # bitsandbytes multiplies by SCB, then by 1 / 127, and rounds twice
            exact = stored[f"{name}.weight"].double() * stored[f"{name}.SCB"].double()[:, None] / 127
            torch.testing.assert_close(weight.double(), exact, rtol=2e-7, atol=0)
        else:
            assert hashlib.sha256((weight + 0.0).contiguous().numpy().tobytes()).hexdigest() == DIGESTS[form][name], (
                name
            )
    assert same(told(batch), told(alone))
    config = json.loads((FIXTURES / form / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    floats = {name: value for name, value in stored.items() if value.dtype == torch.float32 and "layers" not in name}
    floats |= {name: value for name, value in stored.items() if name.endswith("norm.weight")}
    exact_weights = {f"{name}.weight": weight.contiguous() for name, weight in weights.items()}
    save_file(floats | exact_weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert deviation(tmp_path, alone) < 1e-4
    assert ("int8, activations are not quantized" in reason) == (form == "int8")


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor], layer: str = DOWN) -> Callable[[Parts], None]:
    def apply(tensors: Parts) -> None:
        tensors[f"{layer}.{part}"] = change(tensors[f"{layer}.{part}"]).contiguous()

    return apply


def state(**fields: Any) -> Callable[[Parts], None]:
    def apply(tensors: Parts) -> None:
        name = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"
        given = json.loads(bytes(tensors[name].tolist()))
        tensors[name] = torch.tensor(list(json.dumps({**given, **fields}).encode()), dtype=torch.uint8)

    return apply


HOSTILE: list[tuple[str, Callable[[Parts], None], str]] = [
    ("nf4", changed("weight", lambda x: x[:-1]), r"down_proj: weight is torch.uint8 \[2559, 1\], must be 2560"),
    ("nf4", changed("weight.absmax", lambda x: x[:-1]), r"weight\.absmax is torch.uint8 \[79\], must be 80"),
    ("nf4", changed("weight.absmax", lambda x: x.float()), r"weight\.absmax is torch.float32"),
    ("nf4", changed("weight.nested_absmax", put(math.nan, 0)), r"weight\.nested_absmax has values that are not finite"),
    ("nf4", changed("weight.quant_map", put(math.inf)), r"weight\.quant_map has values that are not finite"),
    ("nf4", changed("weight.nested_quant_map", lambda x: x[:5]), r"weight\.nested_quant_map is torch.float32 \[5\]"),
    ("nf4", state(blocksize=0), "blocksize is 0, must be from 1 to"),
    ("nf4", state(blocksize=1 << 40), "blocksize"),
    ("nf4", state(blocksize=32), r"weight\.absmax is torch.uint8 \[80\], must be 160"),
    ("nf4", state(shape=[80, 64]), r"shape is \[80, 64\], must be \[64, 80\]"),
    ("nf4", state(shape=None), "shape is None, must be"),
    ("nf4", state(nested_offset=math.nan), "nested_offset is nan, must be a number"),
    ("nf4", state(nested_blocksize="x"), "nested_blocksize is 'x', must be an integer"),
    (
        "nf4",
        changed("weight.quant_state.bitsandbytes__nf4", lambda x: x[:-1]),
        "weight.quant_state is no JSON text",
    ),
    *(
        ("nf4", changed(name, change, KEYS), rf"self_attn.qkv_proj: k_proj\.{name} {says}")
        for name, change, says in (
            ("weight", lambda x: x[:-1], r"is torch.uint8 \[1023, 1\]"),
            ("weight.quant_map", put(math.nan), "has values that are not finite"),
            ("weight.absmax", lambda x: x[:-1], r"is torch.uint8 \[31\]"),
        )
    ),
    ("nf4", lambda parts: parts.pop(f"{DOWN}.weight.quant_map"), "no tensor fills: .*down_proj.weight_quant_map"),
    ("nf4", lambda parts: parts.update({f"{DOWN}.extra": torch.ones(3)}), "does not have: .*down_proj.extra"),
    # One of the tables of a fused layer: of another shape, or with one other value.
    ("nf4", changed("weight.quant_map", lambda x: x * 2, KEYS), "quant_map differs between the shards"),
    ("nf4", changed("weight.quant_map", put(0.5), KEYS), "quant_map differs between the shards"),
    ("fp4", changed("weight.absmax", put(math.inf)), r"weight\.absmax has values that are not finite"),
    ("fp4", changed("weight.absmax", put(3e38)), r"absmax must be finite, and at most 2\*\*100; it holds 3e\+38"),
    ("nf4", changed("weight.quant_map", put(3e38)), r"quant_map must be finite, and at most 2\*\*100"),
    ("int8", changed("SCB", put(math.nan)), "SCB must be finite and not negative, .* holds nan"),
    ("int8", changed("SCB", lambda x: -x), "SCB must be finite and not negative"),
    ("int8", changed("weight_format", lambda x: x + 2), "weight_format is 2, a layout of one GPU, and read is 0, rows"),
    ("int8", changed("weight", lambda x: x.t()), r"weight has shape \[80, 64\], the model needs \[64, 80\]"),
]


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for form, change, message in HOSTILE:
        shutil.rmtree(tmp_path / form, ignore_errors=True)
        shutil.copytree(FIXTURES / form, tmp_path / form)
        tensors = load_file(FIXTURES / form / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / form / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            LLM(tmp_path / form, skip_tokenizer_init=True)


def test_what_is_not_computed_says_the_way_out(tmp_path: Path) -> None:
    config = json.loads((FIXTURES / "nf4" / "config.json").read_text())
    asked = config["quantization_config"]
    with pytest.raises(LLMError, match=r"random weights .* are not made in bitsandbytes' formats"):
        LLM(FIXTURES / "nf4", load_format="dummy", skip_tokenizer_init=True)
    with pytest.raises(LLMError, match=r"while they are loaded; pass hf_overrides=.*quantization='nf4' or 'w8a16'"):
        LLM(hf_overrides={"quantization_config": asked})
    with pytest.raises(CheckpointError, match="load_in_4bit is True, must be true, or load_in_8bit, and not both"):
        LLM(FIXTURES / "nf4", hf_overrides={"quantization_config": {**asked, "load_in_8bit": True}})


def test_nf4_on_load_is_the_nearest_value(tmp_path: Path) -> None:
    """Each weight as the nearest of bitsandbytes' values times the largest of its 64; of 80 columns in groups of 16."""
    table = load_file(FIXTURES / "nf4" / "model.safetensors")[f"{DOWN}.weight.quant_map"]
    assert torch.equal(nf4(), table)
    weight = torch.randn(48, 128) * torch.logspace(-30, 10, 48)[:, None]
    weight[3, :64] = 0
    found = quantize_weight_as(weight, "nf4", 64)
    groups = weight.double().view(48, 2, 64)
    largest = groups.abs().amax(-1, keepdim=True)
    every = table.double() * largest[..., None]
    best = (groups[..., None] - every).abs().min(-1).values
    held = IntegerWeight(found.q, found.scale, 64, 4, table=table).dequantize()
    error = (held.double().view_as(groups) - groups).abs()
    assert (error <= best * (1 + 1e-5) + largest * 1e-7).all() and not held[3, :64].any()
    assert found.noise == pytest.approx(float(error.square().sum()), rel=1e-4)
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize_weight_as(torch.full((2, 64), math.nan), "nf4", 64)


def test_nf4_on_load_answers_as_its_own_weights(tmp_path: Path) -> None:
    with open_llm(quantization="nf4") as llm:
        reports = {report.name: report for report in engine_of(llm).runner.layer_reports()}
        text = run(llm, ["In the beginning"], GREEDY)[0].outputs[0]
        with pytest.raises(LLMError, match="values of a table"):
            llm.save_quantized(tmp_path / "saved")
    report = reports["model.layers.0.mlp.down_proj"]
    assert 17 < report.weight_snr < 25 and report.bytes_after < report.bytes_before
    assert len(text.token_ids) == 4 and reports["model.embed_tokens"].scheme == "W8A16"


def test_nf4_is_saved_as_transformers_does(tmp_path: Path) -> None:
    """The same answers; the tensors of a checkpoint that transformers saved, with their types."""
    with open_llm(quantization="nf4", kv_cache_dtype="float32") as llm:
        before, weights = run(llm, ["In the beginning"], GREEDY), by_matrix(llm)
        llm.save_quantized(tmp_path / "saved", "bitsandbytes")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    theirs = load_file(FIXTURES / "fp4" / "model.safetensors")
    fields = {name.removeprefix(DOWN).replace("fp4", "nf4"): value.dtype for name, value in theirs.items()}
    for name in (name for name in weights if name != "model.embed_tokens"):
        ours = {part.removeprefix(name): value.dtype for part, value in stored.items() if part.startswith(f"{name}.")}
        assert ours == {part: dtype for part, dtype in fields.items() if part.startswith(".weight")}
        packed, absmax = stored[f"{name}.weight"].flatten(), stored[f"{name}.weight.absmax"]
        codes = torch.stack((packed >> 4, packed & 15), dim=1).long().view(-1, 64)
        assert torch.equal((nf4()[codes] * absmax[:, None]).view_as(weights[name]), weights[name])
    with open_llm(tmp_path / "saved", kv_cache_dtype="float32") as llm:
        after = run(llm, ["In the beginning"], GREEDY)
    assert close(told(after), told(before))  # the head is saved as floats
    for asked, message in (("w4a16", "without NF4's table"), ({"scheme": "nf4", "group_size": 16}, "groups of 16")):
        with open_llm(quantization=asked) as llm, pytest.raises(LLMError, match=message):
            llm.save_quantized(tmp_path / "other", "bitsandbytes")
