"""Captured activations are those of transformers' modules, for a model of every kind; `sites.py` tries all rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sites import BY_DESIGN, TOLERANCE, TheirActivations, compare
from tiny_models import TINY_MODELS, make_prompts, one_thread, reference_model, tiny_checkpoint

from llm import LLM
from llm.inside.names import canonical, matching

# Dense with norms before, around, behind and beside; sinks; experts; latents; several streams; recurrences and hybrids.
KINDS = """
    llama gemma2 olmo2 cohere gpt2 gpt-oss mixtral deepseek-v2 gemma3n mamba falcon-h1 lfm2 qwen3-next
    nemotron-h-experts zamba2 kimi-linear
""".split()
PARTS = ("input", "attention.input", "attention.heads", "attention.output", "middle", "mlp.input", "mlp.activation")


def worst(llm: LLM, theirs: TheirActivations, prompts: list[list[int]]) -> dict[str, float]:
    found = dict(compare(llm, theirs, prompts))
    return {name: value for name, value in found.items() if value is not None and not name.endswith(BY_DESIGN)}


@pytest.mark.parametrize("name", KINDS)
def test_activations_are_transformers(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    row, folder = TINY_MODELS[name], tiny_checkpoint(name, tmp_path_factory)
    theirs = TheirActivations(reference_model(folder))
    try:
        with one_thread(), LLM(folder, skip_tokenizer_init=True, kv_cache_dtype="float32", **row.engine) as llm:
            found = worst(llm, theirs, make_prompts(row)[:4])
            assert {"layers.0.input", "layers.1.output", "norm.output", "logits"} <= found.keys()
            assert {site for site, value in found.items() if value > TOLERANCE} == set()
            if name in ("mixtral", "deepseek-v2", "qwen3-next"):
                assert any(site.endswith("experts.chosen") and value == 0 for site, value in found.items())
            if name == "llama":
                assert {f"layers.{index}.{part}" for index in range(3) for part in PARTS} <= found.keys()
    finally:
        theirs.close()


def saved(model_type: str, folder: Path, **more: Any) -> tuple[Path, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    sizes = {"vocab_size": 257, "hidden_size": 48, "intermediate_size": 91, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1}
    config = AutoConfig.for_model(model_type, **sizes, eos_token_id=2, max_position_embeddings=256, **more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder, model


# With our attention, row by row on transformers' own, and with our layer of experts in transformers' block.
BACKEND = {
    "cwm": {"head_dim": 10, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "bloom": {},
    "qwen3_moe": {"head_dim": 10, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


@pytest.fixture(params=BACKEND)
def on_transformers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[LLM, Any]]:
    folder, model = saved(request.param, tmp_path / "model", **BACKEND[request.param])
    more = {"kv_cache_dtype": "float32", "max_model_len": 96, "model_impl": "transformers"}
    with one_thread(), LLM(folder, skip_tokenizer_init=True, **more) as llm:
        yield llm, model


def test_on_transformers_code(on_transformers: tuple[LLM, Any]) -> None:
    llm, model = on_transformers
    theirs = TheirActivations(model)
    found = worst(llm, theirs, [list(range(3, 3 + count)) for count in (1, 5, 23)])
    assert {"layers.0.input", "layers.0.attention.output", "layers.1.mlp.output", "logits"} <= found.keys()
    assert {site for site, value in found.items() if value > TOLERANCE} == set()


def test_a_wrong_site_is_seen(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Negative control: transformers' activations of another layer are not ours."""
    folder = tiny_checkpoint("llama", tmp_path_factory)
    theirs = TheirActivations(reference_model(folder))
    given = theirs.of

    def swapped(ids: Any) -> dict[str, torch.Tensor]:
        found = given(ids)
        found["layers.0.mlp.output"], found["layers.1.mlp.output"] = (
            found["layers.1.mlp.output"],
            found["layers.0.mlp.output"],
        )
        return found

    theirs.of = swapped  # type: ignore[method-assign]
    with one_thread(), LLM(folder, skip_tokenizer_init=True, kv_cache_dtype="float32") as llm:
        found = worst(llm, theirs, make_prompts(TINY_MODELS["llama"])[:2])
    theirs.close()
    assert {site for site, value in found.items() if value > TOLERANCE} == {
        "layers.0.mlp.output",
        "layers.1.mlp.output",
    }


def test_names_of_other_libraries() -> None:
    assert canonical("blocks.3.hook_resid_post") == canonical("model.layers.3") == "layers.3.output"
    assert canonical("blocks.3.attn.hook_z") == "layers.3.attention.heads"
    assert canonical("transformer.h.3.mlp") == canonical("blocks.3.hook_mlp_out") == "layers.3.mlp.output"
    assert canonical("model.norm") == "norm.output"
    assert canonical("layers.3.mlp.output") == "layers.3.mlp.output"
    with LLM() as llm:
        sites = llm.sites()
        assert matching("layers.-1.output", sites) == matching("blocks.3.hook_resid_post", sites) == ["layers.3.output"]
        assert matching(["layers.*.mlp.output", "logits"], sites)[-1] == "logits"
        with pytest.raises(ValueError, match=r"no site 'layers.9.output'.*layers\.\*\.mlp\.activation"):
            matching("layers.9.output", sites)
