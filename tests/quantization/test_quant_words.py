"""GPTQ and AWQ checkpoints, written here by their documented layouts, against float64 and transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.gguf import write_gguf
from embedded import engine_of, open_llm, run
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from same_answers import close, same, told
from tiny_models import TinyModel, make_prompts, one_thread, reference_logprobs, write_checkpoint

from llm import LLM, SamplingParams
from llm.errors import CheckpointError, LLMError
from llm.layers.linear import ColumnParallelLinear
from llm.quantization.formats.gptq import GPTQConfig

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
ROW = TinyModel("LlamaConfig", {**SIZES, "vocab_size": 256}, lengths=(5, 23))
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = dict[str, torch.Tensor]
Write = Callable[[torch.Tensor, torch.Generator], tuple[Parts, torch.Tensor]]


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned values [R, C] -> int32: a stream of bits along C, the lowest first, in the plainest way there is."""
    rows = []
    for row in values.tolist():
        stream = sum(value << (bits * index) for index, value in enumerate(row))
        rows.append([(stream >> (32 * index)) & 0xFFFFFFFF for index in range(len(row) * bits // 32)])
    return torch.tensor(rows).to(torch.int32)


def integers(weight: torch.Tensor, bits: int, size: int, group: torch.Tensor, symmetric: bool) -> tuple[Any, ...]:
    """(q [K, N], zero [G, N], float16 scale [G, N], float64 W [N, K]) by rounding to nearest; `group` of each input."""
    count, most = weight.shape[1] // size, (1 << bits) - 1
    by_group = torch.stack([weight[:, group == index] for index in range(count)])
    low, high = by_group.amin(-1).clamp(max=0), by_group.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scale = ((high - low) / most).half()
    zero = torch.full_like(low, 1 << (bits - 1)) if symmetric else (-low / scale).round().clamp(0, most)
    q = ((weight.t() / scale[group]).round() + zero[group]).clamp(0, most).long()
    return q, zero.long(), scale, ((q - zero.long()[group]).double() * scale.double()[group]).t()


def gptq(bits: int = 4, size: int = 32, symmetric: bool = False, v2: bool = False, act_order: bool = False) -> Write:
    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Parts, torch.Tensor]:
        columns = weight.shape[1]
        group = torch.arange(columns) // (columns if size == -1 else size)
        if act_order:  # the same for all layers of one width: those of a fused layer have the same inputs
            group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        q, zero, scale, exact = integers(weight, bits, columns if size == -1 else size, group, symmetric)
        stored = zero
        if not v2:
            assert symmetric or zero.min() > 0, "a zero of 0 has no form in words of v1 zero points"
            stored = zero - 1
        return {
            "qweight": words(q.t(), bits).t().contiguous(),
            "qzeros": words(stored, bits),
            "scales": scale,
            "g_idx": group.int(),
        }, exact

    return write


def awq(size: int = 32) -> Write:
    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Parts, torch.Tensor]:
        group = torch.arange(weight.shape[1]) // size
        q, zero, scale, exact = integers(weight, 4, size, group, False)
        order = torch.arange(weight.shape[0]).view(-1, 8)[:, AWQ_ORDER].flatten()
        return {"qweight": words(q[:, order], 4), "qzeros": words(zero[:, order], 4), "scales": scale}, exact

    return write


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words") / "float"
    with one_thread():
        write_checkpoint(ROW, folder)
    return folder


def quantized(
    source: Path,
    target: Path,
    description: dict[str, Any],
    choose: Callable[[str], Write | None],
    file: str = "",
) -> Path:
    """Write `target`, quantized, and `target`-exact in float32; returns the latter. `choose` gets a layer's name."""
    tensors, exact = {}, {}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        is_matrix = tensor.dim() == 2 and "embed_tokens" not in name
        write = choose(layer) if is_matrix else None
        tensors[name] = exact[name] = tensor
        if write is not None:
            del tensors[name]
            parts, value = write(tensor, generator)
            tensors |= {f"{layer}.{part}": item for part, item in parts.items()}
            exact[name] = value.float()
    config = json.loads((source / "config.json").read_text())
    other = target.with_name(f"{target.name}-exact")
    for folder, content in ((target, tensors), (other, exact)):
        folder.mkdir()
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
        own = config if file or folder is other else {**config, "quantization_config": description}
        (folder / "config.json").write_text(json.dumps(own))
    if file:
        (target / file).write_text(json.dumps(description))
    return other


def held(llm: LLM) -> dict[str, torch.Tensor]:
    found = {}
    for name, layer in engine_of(llm).runner.model.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and method.scheme:
            found[name] = method.dequantize_weight(layer)
    return found


def expected(exact: Path, name: str) -> torch.Tensor:
    tensors = load_file(exact / "model.safetensors")
    path, _, last = name.rpartition(".")
    parts = {"qkv_proj": "q_proj k_proj v_proj", "gate_up_proj": "gate_proj up_proj"}.get(last, last).split()
    return torch.cat([tensors[f"{path}.{part}.weight" if path else f"{part}.weight"] for part in parts])


def everything(write: Write) -> Callable[[str], Write | None]:
    return lambda name: None if name == "lm_head" else write


CASES: dict[str, tuple[dict[str, Any], Callable[[str], Write | None], str]] = {
    "gptq-4": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, everything(gptq(symmetric=True)), ""),
    "gptq-2-v2": (
        {"quant_method": "gptq", "bits": 2, "group_size": 32, "checkpoint_format": "gptq_v2"},
        everything(gptq(2, v2=True)),
        "",
    ),
    "gptq-3-old-file": ({"bits": 3, "group_size": -1}, everything(gptq(3, -1, symmetric=True)), "quantize_config.json"),
    "gptq-8-head": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "lm_head": True, "checkpoint_format": "gptq_v2"},
        lambda name: gptq(8, v2=True),
        "",
    ),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "checkpoint_format": "gptq_v2"},
        everything(gptq(4, 16, v2=True, act_order=True)),
        "",
    ),
    "gptq-dynamic": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "checkpoint_format": "gptq_v2",
            "dynamic": {r"-:.*\.0\.mlp\.down_proj": {}, r"+:.*\.mlp\.": {"bits": 8, "group_size": 16}},
        },
        lambda name: None
        if name in ("lm_head", "model.layers.0.mlp.down_proj")
        else gptq(8, 16, v2=True)
        if ".mlp." in name
        else gptq(v2=True),
        "",
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
         "modules_to_not_convert": ["o_proj"]},
        lambda name: None if name == "lm_head" or "o_proj" in name else awq(),
        "",
    ),
    "awq-old-file": (
        {"zero_point": True, "q_group_size": 16, "w_bit": 4, "version": "GEMM"},
        everything(awq(16)),
        "quant_config.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_files_and_answers_transformers(case: str, source: Path, tmp_path: Path) -> None:
    description, choose, file = CASES[case]
    exact = quantized(source, tmp_path / "model", description, choose, file)
    prompts = make_prompts(ROW)
    with open_llm(tmp_path / "model", skip_tokenizer_init=True, kv_cache_dtype="float32") as llm:
        layers = held(llm)
        assert len(layers) == 2 * 4 + ("head" in case) - ("dynamic" in case) - 2 * (case == "awq")
        for name, weight in layers.items():
            assert torch.equal(weight, expected(exact, name)), name
        alone = [output for prompt in prompts for output in run(llm, [prompt], GREEDY)]
        batch = run(llm, prompts, GREEDY)
    assert same(told(batch), told(alone))
    assert deviation(exact, alone) < 1e-4
    assert deviation(source, alone) > 1e-3  # the control: the weights before they were quantized


def deviation(folder: Path, outputs: list[Any]) -> float:
    worst = 0.0
    for output in outputs:
        completion = output.outputs[0]
        lines = reference_logprobs(folder, output.prompt_token_ids, completion.token_ids)
        for line, ours in zip(lines, completion.logprobs or [], strict=True):
            worst = max(worst, *(abs(line[index].item() - item.logprob) for index, item in ours.items()))
    return worst if math.isfinite(worst) else math.inf


ACT_ORDER = CASES["gptq-act-order"]
AWQ = CASES["awq"]
LAYER = "model.layers.1.mlp.down_proj"


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor], layer: str = LAYER) -> Callable[[Parts], None]:
    def apply(tensors: Parts) -> None:
        tensors[f"{layer}.{part}"] = change(tensors[f"{layer}.{part}"]).contiguous()

    return apply


def put(value: float, at: int = 3) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[at] = value
        return tensor

    return change


HOSTILE: list[tuple[Any, Callable[[Parts], None], str]] = [
    (
        ACT_ORDER,
        changed("g_idx", put(6)),
        r"g_idx \(from 0 to 6\) does not put 16 inputs into each of the groups from 0",
    ),
    (ACT_ORDER, changed("g_idx", put(-1)), r"g_idx \(from -1 to 5\) does not put 16 inputs"),
    (ACT_ORDER, changed("g_idx", lambda x: x * 0), r"g_idx \(from 0 to 0\) does not put 16 inputs"),
    (ACT_ORDER, changed("g_idx", lambda x: x[:-1]), r"g_idx has shape \[95\], the model needs \[96\]"),
    (ACT_ORDER, changed("g_idx", lambda x: x.float() + 0.5), "g_idx has values that are not whole"),
    (
        ACT_ORDER,
        changed("g_idx", lambda x: x.flip(0), "model.layers.0.self_attn.k_proj"),
        "qkv_proj: g_idx differs between the shards",
    ),
    (ACT_ORDER, changed("scales", put(math.nan)), f"tensor {LAYER}.scales must be finite and not 0"),
    (
        ACT_ORDER,  # of a fused layer: the checkpoint's own name
        changed("scales", put(math.nan), "model.layers.0.self_attn.k_proj"),
        "tensor model.layers.0.self_attn.k_proj.scales must be finite and not 0, .* it holds nan",
    ),
    (ACT_ORDER, changed("scales", put(0.0)), "scales must be finite and not 0, .* it holds 0"),
    (ACT_ORDER, changed("scales", lambda x: put(3e38)(x.float())), r"at most 2\*\*100; it holds 3e\+38"),
    (ACT_ORDER, changed("scales", lambda x: x[:-1]), r"scales has shape \[5, 64\], the model needs \[6, 64\]"),
    (ACT_ORDER, changed("qweight", lambda x: x[:-1]), r"qweight has shape \[11, 64\], the model needs \[12, 64\]"),
    (ACT_ORDER, changed("qzeros", lambda x: x.repeat(1, 2)), r"qzeros has shape \[6, 16\], the model needs \[6, 8\]"),
    (ACT_ORDER, changed("qweight", lambda x: x.to(torch.int64) << 3), "qweight is stored as int64|beyond the range"),
    (ACT_ORDER, lambda parts: parts.pop(f"{LAYER}.qzeros"), "parameters that no tensor fills: .*down_proj.qzeros"),
    (
        ACT_ORDER,
        lambda parts: parts.pop("model.layers.0.self_attn.v_proj.qzeros"),
        r"parameters that no tensor fills: model.layers.0.self_attn.v_proj.qzeros\.$",
    ),
    (ACT_ORDER, lambda parts: parts.pop(f"{LAYER}.g_idx"), f"desc_act is true, and there is no {LAYER}.g_idx"),
    (
        ACT_ORDER,
        lambda parts: parts.pop("model.layers.0.self_attn.v_proj.qweight"),
        "some but not all shards of model.layers.0.self_attn.qkv_proj are quantized, and a fused layer has one form",
    ),
    (ACT_ORDER, lambda parts: parts.update({f"{LAYER}.bias": torch.ones(64)}), "does not have: .*down_proj.bias"),
    (
        AWQ,
        lambda parts: parts.update({"lm_head.weight": parts["lm_head.weight"].double()}),
        "lm_head: the weight is stored as float64; convert the checkpoint to float32",
    ),
    (AWQ, changed("scales", put(math.inf)), "scales must be finite and not 0"),
    (AWQ, changed("qweight", lambda x: x.t()), r"qweight has shape \[8, 96\], the model needs \[96, 8\]"),
]


def test_files_that_do_not_fit_are_refused(source: Path, tmp_path: Path) -> None:
    for index, (description, choose, _) in enumerate((ACT_ORDER, AWQ)):
        quantized(source, tmp_path / str(index), description, choose)
    whole = [load_file(tmp_path / name / "model.safetensors") for name in "01"]
    for case, change, message in HOSTILE:
        index = 0 if case is ACT_ORDER else 1
        tensors = dict(whole[index])
        change(tensors)
        save_file(tensors, tmp_path / str(index) / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            LLM(tmp_path / str(index), skip_tokenizer_init=True)


def test_a_bias_of_zeros_for_a_layer_without_one_is_left_out(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "model", *ACT_ORDER[:2])
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors[f"{LAYER}.bias"] = torch.zeros(64)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with open_llm(tmp_path / "model", skip_tokenizer_init=True) as llm:
        text = " ".join(str(llm.explain()).split())
    assert "4 bits, groups of 16" in text and "W4A16" in text


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"bits": 5}, "gptq: weights of 5 bits are not computed, only of 2, 3, 4, 8"),
        ({"group_size": 0}, "group_size is 0, must be at least 1, or -1"),
        ({"group_size": 4096}, r"qkv_proj has 64 columns, and groups are of 4096"),
        ({"checkpoint_format": "marlin"}, "the checkpoint_format 'marlin' is not read"),
        ({"pack_dtype": "int64"}, "packed in 'int64'"),
        ({"rotation": "hadamard"}, "rotation 'hadamard' is not computed"),
        ({"dynamic": {"(": {}}}, "no regular expression"),
        ({"dynamic": {"x": 3}}, "is 3, must be an object"),
        ({"modules_in_block_to_quantize": "all"}, "must be a list of lists"),
        ({"quant_method": "awq", "w_bit": 3}, "awq: weights of 3 bits"),
        (
            {"quant_method": "awq", "version": "gemv"},
            "the version 'gemv' is not read, only 'gemm'; use the unquantized",
        ),
        ({"quant_method": "awq", "zero_point": False}, "without zero points"),
    ],
)
def test_descriptions_that_are_not_computed(description: dict[str, Any], message: str, source: Path) -> None:
    """Random weights: nothing of the description is hidden by what the checkpoint has."""
    asked = {"quant_method": "gptq", "bits": 4, "group_size": 32, **description}
    with pytest.raises(LLMError, match=message):
        LLM(source, load_format="dummy", skip_tokenizer_init=True, hf_overrides={"quantization_config": asked})


def test_zero_points_less_one_borrow_as_gptqmodel_does() -> None:
    """A zero point of 0 takes its 1 from the next value; of 3 bits other words are subtracted (GPTQModel 2 to 4)."""
    zero = torch.tensor([[0, 15, 3, 0, 0, 8, 1, 2]])
    stored = (words(zero, 4).long() - 0x11111111).to(torch.int32)
    assert torch.equal(zeros_of({"bits": 4}, stored, 8), zero)
    threes = words(torch.full((1, 64), 4), 3)
    subtracted = (threes.long() - torch.tensor([0x24924924, 0x92492492, 0x49249249] * 2)).to(torch.int32)
    assert not torch.equal(subtracted, words(torch.full((1, 64), 3), 3))
    for quantizer in ("gptqmodel", "gptqmodel:2.0.0", ["gptqmodel:1.4.1"], ["optimum:1.2", "gptqmodel:2.0.0"]):
        assert torch.equal(zeros_of({"bits": 3, "meta": {"quantizer": quantizer}}, subtracted, 64), threes_of(4))
    for meta in ({}, {"meta": {}}, {"meta": {"quantizer": ["auto_gptq:0.7"]}}):
        assert torch.equal(zeros_of({"bits": 3, **meta}, words(threes_of(3), 3), 64), threes_of(4))


def threes_of(value: int) -> torch.Tensor:
    return torch.full((1, 64), value)


def zeros_of(description: dict[str, Any], qzeros: torch.Tensor, columns: int) -> torch.Tensor:
    """[1, columns]: the zero points of a layer of one group, whose integers are 0, in a file of this description."""
    config = GPTQConfig.from_config({"quant_method": "gptq", "group_size": 32, "sym": False, **description})
    layer: Any = ColumnParallelLinear(32, columns, bias=False, quant_config=config, prefix="model.q_proj")
    parts = {
        "qweight": torch.zeros(32 * config.bits // 32, columns, dtype=torch.int32),
        "qzeros": qzeros,
        "scales": torch.ones(1, columns),
    }
    for name, tensor in parts.items():
        parameter = getattr(layer, name)
        parameter.elements_loaded = parameter.weight_loader(parameter, tensor)
    layer.quant_method.process_weights_after_loading(layer)
    return -layer.quant_method.dequantize_weight(layer)[:, :1].t().long()


def test_the_first_rule_that_matches_is_used() -> None:
    """Of `dynamic`, in the order of the file."""
    rules = {r"+:.*\.0\..*": {"bits": 8, "group_size": 64}, r".*q_proj": {"bits": 2}, r"-:.*k_proj": {}}
    names = [f"model.layers.{index}.self_attn.{name}_proj" for index in (0, 1) for name in "qkv"]
    for order in (list(rules), list(rules)[::-1]):
        config = GPTQConfig.from_config({"bits": 4, "group_size": 32, "dynamic": {key: rules[key] for key in order}})
        of_zero, of_queries, of_keys = (8, 64), (2, 32), None
        first = [of_zero] * 3 if order[0] == r"+:.*\.0\..*" else [of_queries, of_keys, of_zero]
        found = [config.bits_and_group(name) if config.described(name) else None for name in names]
        assert found == [*first, of_queries, of_keys, (4, 32)]


def test_requantize_is_quantizing_what_the_file_stands_for(source: Path, tmp_path: Path) -> None:
    exact = quantized(source, tmp_path / "model", *ACT_ORDER[:2])
    asked = {"scheme": "w8a8", "layers": {"*.0.self_attn.o_proj": "w8a16"}, "ignore": ["*.1.mlp.down_proj"]}
    prompts = make_prompts(ROW)
    arguments = {"skip_tokenizer_init": True, "kv_cache_dtype": "float32"}
    with open_llm(tmp_path / "model", requantize=asked, **arguments) as llm:
        layers, answers = held(llm), run(llm, prompts, GREEDY)
        text, reason = " ".join(str(llm.explain()).split()), llm.config.reasons["quantization"]
        reports = engine_of(llm).runner.layer_reports()
        llm.save_quantized(tmp_path / "saved")
    with open_llm(tmp_path / "saved", **arguments) as llm:
        assert run(llm, prompts, GREEDY)[1].outputs[0].logprobs == answers[1].outputs[0].logprobs
    with open_llm(exact, quantization={**asked, "lm_head": None}, **arguments) as llm:
        expected_layers = held(llm)
        noises = {report.name: report.weight_snr for report in engine_of(llm).runner.layer_reports()}
    kept = expected_layers.pop(LAYER, None)
    assert kept is None and torch.equal(layers.pop(LAYER), expected(exact, LAYER))
    assert layers.keys() == expected_layers.keys() and len(layers) == 7
    for name, weight in layers.items():
        assert torch.equal(weight, expected_layers[name]), name
    for report in reports:
        if report.name in layers:
            assert report.weight_snr == pytest.approx(noises[report.name], abs=1e-5)
    assert all(12 < noises[name] < 60 for name in layers)
    assert "W8A8_DYNAMIC" in text and "from 4 bits, groups of 16" in text and "W4A16" in text
    assert "asked for requantize={" in reason and "'scheme': 'w8a8'" in reason
    assert deviation(exact, answers) > 1e-3  # the control: the weights did move
    with pytest.raises(LLMError, match="is for a quantized checkpoint, and this one is not; pass quantization='w4a8'"):
        LLM(source, requantize="w4a8", skip_tokenizer_init=True)
    with pytest.raises(LLMError, match=r"requantize='w9' names the scheme 'w9'; known: w8a8, "):
        LLM(tmp_path / "model", requantize="w9", skip_tokenizer_init=True)
    with pytest.raises(
        LLMError, match=r"quantization='gptq' needs a checkpoint .* has no quantization_config in config"
    ):
        LLM(source, quantization="gptq", skip_tokenizer_init=True)


FOUR_BITS = ("gptq-4", "gptq-act-order", "awq", "Q4_0", "Q4_1")


@pytest.mark.parametrize("case", FOUR_BITS)
def test_four_bits_are_not_rounded_to_four_bits_again(case: str, source: Path, tmp_path: Path) -> None:
    """Kept where the scheme computes them as stored, so that answers are the file's; else it is told."""
    if case in CASES:
        quantized(source, tmp_path / "model", *CASES[case])
        path = tmp_path / "model"
    else:
        path = tmp_path / "model.gguf"
        write_gguf(source, path, lambda name: Type[case] if ".layers." in name else Type.F16)
    arguments = {"skip_tokenizer_init": True, "kv_cache_dtype": "float32"}
    prompts = make_prompts(ROW)
    with open_llm(path, **arguments) as llm:
        stored, answers = held(llm), run(llm, prompts, GREEDY)
    with open_llm(path, requantize="w4a16", **arguments) as llm:
        kept, again = held(llm), run(llm, prompts, GREEDY)
        reason, snr = llm.config.reasons["quantization"], [r.weight_snr for r in engine_of(llm).runner.layer_reports()]
    assert all(torch.equal(kept[name], weight) for name, weight in stored.items()), case
    assert same(told(again), told(answers))
    assert f"{len(stored)} layers kept as stored" in reason and snr.count(math.inf) == len(stored)
    with open_llm(path, requantize={"scheme": "w4a16", "group_size": 8}, **arguments) as llm:  # the control
        rounded = held(llm)
        assert "kept as stored" not in (reason := llm.config.reasons["quantization"]) and "rounded again" in reason
    assert not any(torch.equal(rounded[name], weight) for name, weight in stored.items())
    with open_llm(path, requantize="w4a8", **arguments) as llm:
        equal = [torch.equal(weight, stored[name]) for name, weight in held(llm).items() if name in stored]
        reason = llm.config.reasons["quantization"]
    assert all(equal) and len(equal) == len(stored) and "kept as stored" in reason


def test_layers_in_more_bits_than_others_get_8_bits(source: Path, tmp_path: Path) -> None:
    """As a file of 4 bits stores some on purpose; a file wholly in 8 bits gets the 4 that are asked for."""
    arguments = {"skip_tokenizer_init": True}
    for name, kind in (("mixed", Type.Q4_0), ("wide", Type.Q8_0)):
        path = tmp_path / f"{name}.gguf"
        write_gguf(source, path, lambda of, kind=kind: Type.Q5_0 if "down_proj" in of else kind)
        for asked in ("w4a16", {"scheme": "w4a8", "layers": {"*.0.mlp.down_proj": "w4a16"}}):
            with open_llm(path, requantize=asked, **arguments) as llm:
                schemes = {report.name: report.scheme for report in engine_of(llm).runner.layer_reports()}
                reason = llm.config.reasons["quantization"]
            down = [scheme for layer, scheme in schemes.items() if "down_proj" in layer]
            other = "W4A8_DYNAMIC" if isinstance(asked, dict) else "W4A16"
            eight = {"W4A16": "W8A16", "W4A8_DYNAMIC": "W8A8_DYNAMIC"}[other]
            expected = [eight if name == "mixed" else other] * 2
            if isinstance(asked, dict):
                expected[0] = "W4A16"  # a pattern names it
            assert down == expected and schemes["model.layers.0.mlp.gate_up_proj"] == other
            assert ("as the file stores other layers in 4 bits and these in more" in reason) == (name == "mixed")


def test_saved_as_gptq_it_answers_the_same(source: Path, tmp_path: Path) -> None:
    """Quantized on load in groups and per row, and act-order with zero points; the words are read by other code."""
    quantized(source, tmp_path / "model", *ACT_ORDER[:2])
    asked = {"scheme": "w4a16", "layers": {"*.mlp.down_proj": "w8a16"}, "ignore": ["*.0.self_attn.o_proj"]}
    prompts, arguments = make_prompts(ROW), {"skip_tokenizer_init": True}
    symmetric = {**asked, "symmetric": True}
    for index, (folder, quantization) in enumerate(((source, symmetric), (tmp_path / "model", None), (source, asked))):
        saved = tmp_path / f"saved-{index}"
        with open_llm(folder, quantization=quantization, **arguments) as llm:
            answers, weights = run(llm, prompts, GREEDY), held(llm)
            llm.save_quantized(saved, "gptq")
        with open_llm(saved, **arguments) as llm:
            assert llm.config.model_config.quantization == "gptq"
            again = run(llm, prompts, GREEDY)
            assert {name: torch.equal(weights[name], weight) for name, weight in held(llm).items()} == dict.fromkeys(
                [name for name in weights if name != "lm_head"], True
            )
        assert close(told(again), told(answers))  # the head is saved as floats
        section = json.loads((saved / "config.json").read_text())["quantization_config"]
        assert (section["desc_act"], section["sym"]) == ((False, True), (True, False), (False, False))[index]
    tensors, down = load_file(tmp_path / "saved-0" / "model.safetensors"), weights[LAYER].shape
    stored = tensors[f"{LAYER}.qweight"].t().contiguous().view(torch.uint8).double() - 128
    zero = tensors[f"{LAYER}.qzeros"].view(torch.uint8).double() + 1 - 128
    assert stored.shape == down and not zero.any() and tensors[f"{LAYER}.scales"].shape == (1, 64)
    with (
        open_llm(source, quantization="w8a8", **arguments) as llm,
        pytest.raises(LLMError, match="for W4A16 and W8A16 "),
    ):
        llm.save_quantized(tmp_path / "no", "gptq")


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_experts_of_both_formats(form: str, tmp_path: Path) -> None:
    """Act-order in a mixture too: the operation `experts` gives the bits of the experts' layers one by one."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    row = TinyModel("MixtralConfig", {**sizes, "num_local_experts": 4, "num_experts_per_tok": 2}, lengths=(9, 5))
    with one_thread():
        write_checkpoint(row, tmp_path / "float")
    description = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 16,
        "desc_act": True,
        "checkpoint_format": "gptq_v2",
    }
    write = gptq(4, 16, v2=True, act_order=True)
    if form == "awq":
        description = {**AWQ[0], "group_size": 16, "modules_to_not_convert": ["gate"]}
        write = awq(16)
    exact = quantized(
        tmp_path / "float", tmp_path / "model", description, lambda name: write if "experts." in name else None
    )
    prompts = make_prompts(row)
    with open_llm(tmp_path / "model", skip_tokenizer_init=True, kv_cache_dtype="float32") as llm:
        layers, together = held(llm), run(llm, prompts, GREEDY)
        alone = [output for prompt in prompts for output in run(llm, [prompt], GREEDY)]
    assert len(layers) == 8 and all("experts" in name for name in layers)
    assert same(told(together), told(alone))
    assert deviation(exact, together) < 1e-4 < 1e-3 < deviation(tmp_path / "float", together)
