"""Adapters' folders: what is read, what is merged, and what is refused in a sentence that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.adapters import LINEAR, add_adapter, write_adapter
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, TinyModel, make_prompts, reference_model, write_checkpoint

from llm import LLM, SamplingParams
from llm.errors import CheckpointError, LLMError, OutOfMemoryError
from llm.inputs import LoRARequest
from llm.layers.moe import FusedMoE
from llm.loading.adapters.folder import AdapterConfig, AdapterFolder
from llm.loading.adapters.targets import by_expert
from llm.loading.weight_map import WeightMap
from llm.models.decoder.mlp import down, gate_and_up
from llm.models.interface import Cut

# Stacked by key head in its checkpoint, with biases; and a layer of experts.
FUSED = TinyModel("GPTBigCodeConfig", {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")),
    "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 90, "multi_query": False,
})  # fmt: skip
# Weights stored the other way round, a square one among them, whose shape says nothing.
TURNED = TINY_MODELS["gpt2"]
PLAIN = TinyModel("LlamaConfig", {"num_hidden_layers": 2})
EXPERTS = TinyModel(
    "MixtralConfig", {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    found = {}
    for name, row in (("plain", PLAIN), ("fused", FUSED), ("turned", TURNED), ("experts", EXPERTS)):
        found[name] = root / name
        write_checkpoint(row, found[name])
    return found


@pytest.fixture(scope="module")
def enabled(checkpoints: dict[str, Path]) -> Any:
    with LLM(checkpoints["plain"], skip_tokenizer_init=True, enable_lora=True, max_lora_rank=8) as llm:
        yield llm


def logprobs_of(llm: LLM, prompt: list[int], **arguments: Any) -> tuple[list[int], torch.Tensor]:
    own = llm.generate([prompt], PARAMS, use_tqdm=False, **arguments)[0].outputs[0]
    return own.token_ids, torch.tensor([item[t].logprob for item, t in zip(own.logprobs, own.token_ids, strict=True)])


@torch.no_grad()
def expected_of(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("plain", (*LINEAR, "embed_tokens", "lm_head")),
        ("fused", ("c_attn", "c_proj", "c_fc")),
        ("turned", ("c_attn", "c_proj", "c_fc")),
    ],
)
def test_merged_and_switched_are_the_same_model(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, targets: tuple[str, ...]
) -> None:
    model = reference_model.__wrapped__(checkpoints[name])
    patterns = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {r"layers\.1\.mlp.down_proj": 9.0}}
    write_adapter(model, tmp_path / "adapter", targets, rank=3, **patterns)
    config = AdapterConfig.read(tmp_path / "adapter")
    assert config.scale_of("model.layers.1.mlp.down_proj") == 4.5 and config.scale_of("model.layers.0.q_proj") == 2.0
    scales = {"1.mlp.down_proj": 4.5, "0.mlp.down_proj": 3.0}
    add_adapter(model, tmp_path / "adapter", scales)
    prompt = make_prompts(PLAIN)[2]
    common: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32"}
    with LLM(checkpoints[name], merge_lora=tmp_path / "adapter", **common) as llm:
        tokens, merged = logprobs_of(llm, prompt)
        assert "is added" in repr(llm.config)
    with LLM(checkpoints[name], enable_lora=True, **common) as llm:
        again, switched = logprobs_of(llm, prompt, lora_request=LoRARequest("a", 1, str(tmp_path / "adapter")))
        without = logprobs_of(llm, prompt)
    expected = expected_of(model, prompt, tokens)
    assert again == tokens
    assert torch.allclose(merged, expected, rtol=0, atol=1e-4) and torch.allclose(switched, expected, rtol=0, atol=1e-4)
    assert without[0] != tokens or not torch.allclose(without[1], expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("name", ["plain", "fused", "turned"])
def test_a_bias_of_an_adapter_is_added(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Of `lora_bias`; where rows are stored by key head, it has their order."""
    model = reference_model.__wrapped__(checkpoints[name])
    targets = LINEAR if name == "plain" else ("c_attn", "c_proj", "c_fc")
    folder = write_adapter(model, tmp_path / "adapter", targets, lora_bias=True)
    add_adapter(model, folder)
    held, modules = load_file(folder / "adapter_model.safetensors"), dict(model.named_modules())
    for index, key in enumerate([key for key in held if key.endswith(".lora_B.weight")]):
        generator = torch.Generator().manual_seed(index)
        bias = held[key.replace("weight", "bias")] = torch.randn(len(held[key]), generator=generator) / 3
        module = modules[key.removeprefix("base_model.model.").removesuffix(".lora_B.weight")]
        own = 0.0 if module.bias is None else module.bias.data
        module.bias = torch.nn.Parameter(own + 6.0 / 4 * bias)
    save_file(held, folder / "adapter_model.safetensors")
    prompt, request = make_prompts(PLAIN)[2], LoRARequest("a", 1, str(folder))
    with LLM(checkpoints[name], skip_tokenizer_init=True, dtype="float32", enable_lora=True) as llm:
        tokens, own = logprobs_of(llm, prompt, lora_request=request)
    assert torch.allclose(own, expected_of(model, prompt, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("keys", [("q_proj", r"layers\.0\..*"), (r"layers\.0\..*", "q_proj")])
def test_the_first_pattern_that_fits_is_used(keys: tuple[str, str], tmp_path: Path) -> None:
    """As PEFT has it, in the order of the file."""
    patterns = {"rank_pattern": dict(zip(keys, (2, 3), strict=True))}
    patterns["alpha_pattern"] = dict(zip(keys, (20, 30), strict=True))
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], **patterns}
    (tmp_path / "adapter_config.json").write_text(json.dumps(given))
    config = AdapterConfig.read(tmp_path)
    both, other = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
    assert (config.rank_of(both), config.scale_of(both)) == (2, 10.0)
    assert config.rank_of(other) == (2 if keys[0] == "q_proj" else 3)
    assert config.rank_of("model.layers.1.self_attn.k_proj") == 4


def test_dora_and_whole_tensors_are_merged(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = reference_model.__wrapped__(checkpoints["plain"])
    folder = write_adapter(model, tmp_path / "adapter", ("q_proj",), use_dora=True, modules_to_save=["lm_head"])
    tensors = load_file(folder / "adapter_model.safetensors")
    add_adapter(model, folder)
    head = torch.randn_like(model.lm_head.weight) / 7
    for index, layer in enumerate(model.model.layers):
        weight = layer.self_attn.q_proj.weight
        magnitude = torch.rand(len(weight)) + 0.5
        weight.data *= (magnitude / weight.norm(dim=1))[:, None]
        tensors[f"base_model.model.model.layers.{index}.self_attn.q_proj.lora_magnitude_vector"] = magnitude
    model.lm_head.weight.data = head
    tensors["base_model.model.lm_head.weight"] = head
    save_file(tensors, folder / "adapter_model.safetensors")
    prompt = make_prompts(PLAIN)[2]
    with LLM(checkpoints["plain"], skip_tokenizer_init=True, merge_lora=folder) as llm:
        tokens, own = logprobs_of(llm, prompt)
    assert torch.allclose(own, expected_of(model, prompt, tokens), rtol=0, atol=1e-4)


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        held = load_file(folder / "adapter_model.safetensors")
        change(held)
        save_file(held, folder / "adapter_model.safetensors")

    return changed


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"
DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (edit(r=9), r"rank 9 and max_lora_rank is 8; pass LLM\(enable_lora=True, max_lora_rank=9\)"),
    (edit(r=3), "shape .* the model and rank 3 need"),
    (edit(use_dora=True), "use_dora, which cannot be switched per row; merge"),
    (edit(peft_type="IA3"), "peft_type is 'IA3'"),
    (edit(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    (edit(init_lora_weights="unheard_of"), "init_lora_weights is 'unheard_of'.*what another start does"),
    (edit(init_lora_weights=3), "init_lora_weights is 3"),
    (edit(arrow_config={"n": 1}), "asks for 'arrow_config'"),
    (edit(rank_pattern={"(a+)+b": 2}), "names of modules, or regular expressions"),
    (edit(lora_alpha="4"), "lora_alpha is '4'"),
    (tensors(lambda held: held.pop(f"{FIRST}.lora_B.weight")), "one of its two matrices"),
    (tensors(lambda held: held.update({f"{FIRST}.lora_E": torch.ones(1)})), "adapter that is not computed"),
    (tensors(lambda held: held.update({f"{FIRST}.bias": torch.ones(60)})), "whole tensors .modules_to_save"),
    (tensors(lambda held: held.update({"x.lora_A.weight": torch.ones(1)})), "not named as PEFT names"),
    (tensors(lambda held: held[f"{FIRST}.lora_B.weight"].fill_(torch.nan)), "not finite"),
    (
        tensors(lambda held: held.update({f"{FIRST}.lora_B.weight": torch.ones(60, 4, dtype=torch.int8)})),
        "floats of 16 bits",
    ),
    (
        tensors(lambda held: [held.update({k.replace("q_proj", "r_proj"): held.pop(k)}) for k in list(held)]),
        "'model.layers.0.self_attn.r_proj', which is no layer of this model",
    ),
    (lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"), "can run code"),
    (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"1234567"), "not a valid safetensors"),
    (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config.json"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGE, ids=[str(index) for index in range(len(DAMAGE))])
def test_what_cannot_be_used_is_named(
    enabled: LLM, checkpoints: dict[str, Path], tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    folder = write_adapter(reference_model(checkpoints["plain"]), tmp_path / "adapter", ("q_proj", "down_proj"))
    damage(folder)
    with pytest.raises(CheckpointError, match=said) as caught:
        enabled.generate([[5, 6]], PARAMS, lora_request=LoRARequest("a", 1, str(folder)), use_tqdm=False)
    assert "\n" not in str(caught.value)
    assert enabled.generate([[5, 6]], PARAMS, use_tqdm=False)[0].finished


STACKED = "base_model.model.model.layers.0.mlp.experts"


def stack_of(layer: str, count: int, inputs: int, channels: int, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """The pair of one parameter of all experts, in PEFT's layout."""
    drawn = torch.Generator().manual_seed(seed)
    return {
        f"{layer}.lora_A.weight": torch.randn(count * rank, inputs, generator=drawn) / inputs**0.5,
        f"{layer}.lora_B.weight": torch.randn(channels, count * rank, generator=drawn) / rank**0.5,
    }


def write_tensors(folder: Path, held: dict[str, torch.Tensor], **config: Any) -> LoRARequest:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 3, **config}))
    save_file(held, folder / "adapter_model.safetensors")
    return LoRARequest(folder.name, 1 + len(folder.name), str(folder))


def delta_of(held: dict[str, torch.Tensor], layer: str, count: int) -> torch.Tensor:
    """[experts, channels, inputs], by PEFT's formula."""
    first, second = held[f"{layer}.lora_A.weight"], held[f"{layer}.lora_B.weight"]
    return torch.einsum(
        "ore,eri->eoi", second.reshape(len(second), -1, count), first.reshape(count, -1, first.shape[1])
    )


def test_adapters_of_experts(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Stacked as transformers 5 has them, and by module as before; switched beside other rows, and merged."""
    inner, outer = f"{STACKED}.base_layer", STACKED
    held = {**stack_of(inner, 4, 48, 182, 4, 1), **stack_of(outer, 4, 91, 48, 2, 2)}
    twice = {"rank_pattern": {r".*\.gate_up_proj": 4}, "alpha_pattern": {r".*\.gate_up_proj": 6}}
    names = ["experts.gate_up_proj", "down_proj"]
    stacked = write_tensors(tmp_path / "stacked", held, target_parameters=names, **twice)
    old = f"{STACKED.replace('mlp', 'block_sparse_moe')}.2.w3"
    one = write_tensors(tmp_path / "one", stack_of(old, 1, 48, 91, 2, 3))
    plain, other = (reference_model.__wrapped__(checkpoints["experts"]) for _ in range(2))
    experts = plain.model.layers[0].mlp.experts
    experts.gate_up_proj.data += 1.5 * delta_of(held, inner, 4)
    experts.down_proj.data += 1.5 * delta_of(held, outer, 4)
    added = delta_of(load_file(tmp_path / "one" / "adapter_model.safetensors"), old, 1)
    other.model.layers[0].mlp.experts.gate_up_proj.data[2, 91:] += 1.5 * added[0]
    prompts = make_prompts(EXPERTS)[1:4]
    rows: list[tuple[LoRARequest | None, Any]] = [
        (stacked, plain),
        (None, reference_model(checkpoints["experts"])),
        (one, other),
    ]
    requests = [request for request, _ in rows]
    with LLM(checkpoints["experts"], skip_tokenizer_init=True, enable_lora=True) as llm:
        outputs = llm.generate(prompts, PARAMS, lora_request=requests, use_tqdm=False)
        for (request, model), prompt, output in zip(rows, prompts, outputs, strict=True):
            tokens, own = logprobs_of(llm, prompt, lora_request=request)
            assert torch.allclose(own, expected_of(model, prompt, tokens), rtol=0, atol=1e-4)
            again = output.outputs[0]
            told = [item[t].logprob for item, t in zip(again.logprobs, again.token_ids, strict=True)]
            assert again.token_ids == tokens
            assert told == own.tolist() or not llm.config.invariant
            if request is not None:
                before = expected_of(rows[1][1], prompt, tokens)
                assert not torch.allclose(own, before, rtol=0, atol=1e-3), "the adapter changes nothing"
    for request, model in (rows[0], rows[2]):
        with LLM(checkpoints["experts"], skip_tokenizer_init=True, merge_lora=request.lora_path) as llm:
            tokens, own = logprobs_of(llm, prompts[0])
        assert torch.allclose(own, expected_of(model, prompts[0], tokens), rtol=0, atol=1e-4)


class Experts(torch.nn.Module):
    """Of a model: three experts whose first matrix is square. Stored as [inputs, channels] if `is_turned`."""

    def __init__(self, is_turned: bool) -> None:
        super().__init__()
        self.experts = FusedMoE(3, 1, 8, 4, params_dtype=torch.float32)
        cuts: dict[str, Cut] = {"experts.gate_up_proj": gate_and_up, "experts.down_proj": down}
        turned = {name: lambda part, cut=cut: cut(part.t()) for name, cut in cuts.items()}
        self.stacked_weights = turned if is_turned else cuts


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("is_exchanged", [False, True])
def test_what_a_stack_of_experts_is_over(tmp_path: Path, is_turned: bool, is_exchanged: bool) -> None:
    """Older versions of PEFT, and Llama 4 in the present one, have the first tensor over the channels."""
    layers = {"experts.base_layer": (8, 8), "experts": (8, 4)}
    held = {}
    for seed, (layer, (channels, inputs)) in enumerate(layers.items()):
        sides = (channels, inputs) if is_exchanged else (inputs, channels)
        held |= stack_of(f"base_model.model.{layer}", 3, *sides, 2, seed)
    weight_map = WeightMap(Experts(is_turned))
    write_tensors(tmp_path / "both", held, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    with AdapterFolder(tmp_path / "both") as folder:
        found = {pair.name: folder.matrices(pair) for pair in by_expert(folder, weight_map)}
    assert len(found) == 9
    for layer, names in (("experts.base_layer", ("gate_proj", "up_proj")), ("experts", ("down_proj",))):
        delta = delta_of(held, f"base_model.model.{layer}", 3)
        for index in range(3):
            pairs = [found[f"experts.{index}.{name}"] for name in names]
            own = torch.cat([up @ first for first, up, _ in pairs])
            assert torch.allclose(own, delta[index].t() if is_exchanged else delta[index], atol=1e-6)
    alone = {name: tensor for name, tensor in held.items() if "base_layer" in name}
    write_tensors(tmp_path / "square", alone, target_parameters=["experts.gate_up_proj"])
    write_tensors(tmp_path / "misfit", held, target_parameters=["experts.gate_up_proj", "experts.down_proj"], r=3)
    for name, said in (("square", "all its sides are equal"), ("misfit", "3 experts with down_proj of 8 by 4 and")):
        with AdapterFolder(tmp_path / name) as folder, pytest.raises(CheckpointError, match=said):
            by_expert(folder, weight_map)


def test_a_digest_is_of_each_byte_and_of_the_file_that_holds_it(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    write_adapter(reference_model(checkpoints["plain"]), tmp_path)
    with AdapterFolder(tmp_path) as folder:
        found = set()
        for config, weights in ((b"ab", b"c"), (b"a", b"bc"), (b"ab", b"d"), (b"xb", b"c")):
            (tmp_path / "adapter_config.json").write_bytes(config)
            (tmp_path / "adapter_model.safetensors").write_bytes(weights)
            found.add(folder.digest())
    assert len(found) == 4


def test_other_models_are_named(checkpoints: dict[str, Path], tmp_path: Path, enabled: LLM) -> None:
    other = write_adapter(reference_model(checkpoints["fused"]), tmp_path / "other", ("c_attn",))
    with pytest.raises(CheckpointError, match=r"no layer of this model.*trained for 'tiny'"):
        enabled.generate([[5]], PARAMS, lora_request=LoRARequest("b", 2, str(other)), use_tqdm=False)
    with pytest.raises(CheckpointError, match=r"changes .* which the checkpoint does not have"):
        LLM(checkpoints["plain"], skip_tokenizer_init=True, merge_lora=other)


def test_an_adapter_as_the_model_names_its_base_and_the_ways(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = write_adapter(reference_model(checkpoints["plain"]), tmp_path / "adapter", ("q_proj",))
    with pytest.raises(CheckpointError, match=r"an adapter of 'tiny'; pass LLM\('tiny', merge_lora=.*enable_lora=True"):
        LLM(folder)


def test_arguments(checkpoints: dict[str, Path], enabled: LLM) -> None:
    folder = checkpoints["plain"]
    assert enabled.config.lora_config.max_loras == 4
    # Two layers: seven matrices each; the embedding and the LM head.
    sides = 2 * (2 * (48 + 60) + 2 * (48 + 20) + 3 * (48 + 91)) + 2 * (257 + 48)
    assert enabled.config.lora_config.lora_memory_bytes == 4 * 8 * 4 * sides
    assert "lora_memory_bytes" in repr(enabled.config)
    for arguments, kind in (
        ({"max_loras": 0}, LLMError),
        ({"max_lora_rank": "8"}, LLMError),
        ({"enable_lora": 1}, LLMError),
        ({"enable_lora": True, "max_lora_rank": 1 << 40}, OutOfMemoryError),
        ({"merge_lora": "/no/such/folder"}, CheckpointError),
        ({"merge_lora": folder, "load_format": "dummy"}, LLMError),
        ({"lora_dtype": "float16"}, LLMError),
    ):
        with pytest.raises(kind):
            LLM(folder, skip_tokenizer_init=True, **arguments)
    for wrong in ([None], ["a", None], "adapter", 3):
        with pytest.raises(LLMError, match="lora_request"):
            enabled.generate([[5], [6]], PARAMS, lora_request=wrong, use_tqdm=False)
    for values in (("", 1, "x"), ("a", 0, "x"), ("a", 1, "")):
        with pytest.raises(LLMError, match="lora_"):
            LoRARequest(*values)
