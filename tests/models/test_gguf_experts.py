"""Mixtures of experts in GGUF: transformers' answers with the file's exact weights; what a file may not claim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints.gguf_mixtures import write_mixture
from embedded import open_llm, run
from gguf import GGMLQuantizationType as Type
from same_answers import same, told
from test_gguf_models import GREEDY, TOLERANCE, deviation
from tiny_models import NULL, TINY_MODELS, TinyModel, make_prompts, write_checkpoint

from llm import LLM
from llm.errors import CheckpointError, UnsupportedModelError
from llm.loading.gguf.container import read_header

# Rows that blocks of 32 divide.
SIZES: Mapping[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE: Mapping[str, Any] = {**SIZES, "intermediate_size": 96, "head_dim": 16}
_OWN: Mapping[str, Any] = {**_WIDE, "moe_intermediate_size": 32}
_LATENT: Mapping[str, Any] = {
    **{**SIZES, "intermediate_size": 96, "moe_intermediate_size": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32},
    **{"qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4},
}
_YARN = {**{"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}}


def changed(name: str, config: Mapping[str, Any]) -> TinyModel:
    return replace(TINY_MODELS[name], config={**TINY_MODELS[name].config, **config})


FAMILIES: dict[str, tuple[TinyModel, Type, bool]] = {
    "mixtral": (changed("mixtral", _WIDE), Type.Q8_0, False),
    "qwen2moe": (
        changed("qwen2-moe", {**_OWN, "head_dim": None, "shared_expert_intermediate_size": 64, "mlp_only_layers": []}),
        Type.Q5_1,
        False,
    ),
    "qwen3moe": (changed("qwen3-moe", _OWN), Type.Q4_1, False),
    "olmoe": (changed("olmoe", {**_WIDE, "head_dim": None, "num_experts_per_tok": 3}), Type.Q4_0, False),
    "granite": (changed("granite", {**_WIDE, "head_dim": None}), Type.Q4_0, False),
    "granitemoe": (changed("granitemoe", {**_WIDE, "head_dim": None}), Type.Q8_0, False),
    "granitemoeshared": (
        changed("granitemoeshared", {**_WIDE, "head_dim": None, "shared_intermediate_size": 64}),
        Type.Q4_0,
        False,
    ),
    "gpt-oss": (
        changed("gpt-oss", {**_WIDE, "swiglu_limit": 7.0, "rope_parameters": {**_YARN, "truncate": False}}),
        Type.MXFP4,
        False,
    ),
    "deepseek-v2": (
        changed(
            "deepseek-v2",
            {**_LATENT, "q_lora_rank": NULL, "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
        ),
        Type.Q5_0,
        False,
    ),
    "deepseek-v3": (changed("deepseek-v3", {**_LATENT, "q_lora_rank": 32}), Type.Q8_0, True),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    row, kind, split_latent = FAMILIES[name]
    write_checkpoint(row, tmp_path / "float")
    path = tmp_path / "model.gguf"
    exact = write_mixture(tmp_path / "float", path, kind, split_latent=split_latent)
    prompts = make_prompts(row)[:2]
    with open_llm(path, kv_cache_dtype="float32", skip_tokenizer_init=True, **row.engine) as llm:
        alone = [output for prompt in prompts for output in run(llm, [prompt], GREEDY)]
        batch = run(llm, prompts, GREEDY)
        table = str(llm.explain())
    assert deviation(exact, alone) < TOLERANCE
    assert same(told(batch), told(alone))
    assert f"{kind.name}:" in table
    if kind is Type.Q4_0:  # the control: the weights before they were quantized are others
        assert deviation(tmp_path / "float", alone) > 10 * TOLERANCE


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_checkpoint(FAMILIES["deepseek-v3"][0], folder / "float")
    write_mixture(folder / "float", folder / "model.gguf", Type.Q8_0, split_latent=True)
    return folder / "model.gguf"


def renamed(path: Path, target: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    target.write_bytes(data.replace(old, new))
    return target


def number(key: str, value: int) -> bytes:
    """A key of the header with its value, uint32."""
    name = key.encode()
    return len(name).to_bytes(8, "little") + name + (4).to_bytes(4, "little") + value.to_bytes(4, "little")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (number("deepseek2.expert_count", 6), number("deepseek2.expert_count", 7), "has the shape .* the model 7 exp"),
        (number("deepseek2.expert_count", 6), number("deepseek2.expert_count", 2**31), "the model 2147483648 experts"),
        (number("deepseek2.expert_count", 6), number("deepseek2.expert_count", 0), "mlp.experts|the model 0 experts"),
        (b"blk.1.attn_k_b.weight", b"blk.1.attn_x_b.weight", "one of attn_k_b and attn_v_b"),
        (b"blk.1.ffn_up_exps.weight", b"blk.1.ffn_ux_exps.weight", "ffn_ux_exps"),
        (
            number("deepseek2.expert_gating_func", 2),
            number("deepseek2.expert_gating_func", 3),
            "expert_gating_func is 3, must be 1, softmax, or 2",
        ),
        (
            number("deepseek2.attention.key_length_mla", 40),
            number("deepseek2.attention.key_length_mla", 8),
            "qk_nope_head_dim is 0",
        ),
    ],
    ids=["one-more", "very-many", "none", "half-a-projection", "no-such-tensor", "gating", "no-keys"],
)
def test_hostile_headers(small: Path, tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    path = renamed(small, tmp_path / "model.gguf", old, new)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        LLM(path, skip_tokenizer_init=True)


def test_a_scale_of_one_expert_that_is_not_finite(small: Path, tmp_path: Path) -> None:
    header = read_header(small)
    stack = next(tensor for tensor in header.tensors if tensor.name == "blk.1.ffn_up_exps.weight")
    data = bytearray(small.read_bytes())
    data[stack.start + stack.nbytes - 34 : stack.start + stack.nbytes - 32] = b"\x00\x7e"
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor \S+ has a scale that is not finite\.$"):
        LLM(tmp_path / "model.gguf", skip_tokenizer_init=True)
