"""Adapters' folders: what is read, what is merged, and what is refused in a sentence that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import LINEAR, add_adapter, write_adapter
from safetensors.torch import load_file, save_file
from tiny_models import TinyModel, make_prompts, reference_model, write_checkpoint

from llm import LLM, SamplingParams
from llm.base.errors import CheckpointError, LLMError, OutOfMemoryError
from llm.inputs import LoRARequest
from llm.loading.adapters.config import AdapterConfig

# Stacked by key head in its checkpoint, with biases; and a layer of experts.
FUSED = TinyModel("GPTBigCodeConfig", {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")),
    "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 90, "multi_query": False,
})  # fmt: skip
PLAIN = TinyModel("LlamaConfig", {"num_hidden_layers": 2})
EXPERTS = TinyModel(
    "MixtralConfig", {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    found = {}
    for name, row in (("plain", PLAIN), ("fused", FUSED), ("experts", EXPERTS)):
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
    ("name", "targets"), [("plain", (*LINEAR, "embed_tokens", "lm_head")), ("fused", ("c_attn", "c_proj", "c_fc"))]
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
    (edit(target_parameters=["experts.w1"]), "asks for 'target_parameters'"),
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


def test_other_models_are_named(checkpoints: dict[str, Path], tmp_path: Path, enabled: LLM) -> None:
    experts = reference_model(checkpoints["experts"])
    folder = write_adapter(experts, tmp_path / "experts", ("q_proj",))
    held = load_file(folder / "adapter_model.safetensors")
    for part, shape in (("lora_A", (4, 48)), ("lora_B", (91, 4))):
        held[f"base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.{part}.weight"] = torch.ones(shape)
    save_file(held, folder / "adapter_model.safetensors")
    request = LoRARequest("a", 1, str(folder))
    with (
        LLM(checkpoints["experts"], skip_tokenizer_init=True, enable_lora=True) as llm,
        pytest.raises(CheckpointError, match=r"experts\.0\.w1', .*cannot be switched per row"),
    ):
        llm.generate([[5]], PARAMS, lora_request=request, use_tqdm=False)
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
