"""Captured activations are those of transformers' modules, for a model of every kind; `sites.py` tries all rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sites import BY_DESIGN, TOLERANCE, TheirActivations, compare
from tiny_models import TINY_MODELS, make_prompts, one_thread, reference_model, tiny_checkpoint

from llm import LLM, Capture, Intervention, SamplingParams
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


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "falcon-alibi", "cohere2"])
def test_patterns_and_values_make_the_heads(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With ALiBi too, where the pattern that transformers returns is not the one that it computes with."""
    row = TINY_MODELS[name]
    given = {"skip_tokenizer_init": True, "kv_cache_dtype": "float32", **row.engine}
    with one_thread(), LLM(tiny_checkpoint(name, tmp_path_factory), **given) as llm:
        capture = Capture("layers.*.attention.*", positions="all")
        (output,) = llm.generate([make_prompts(row)[3]], SamplingParams(max_tokens=3), capture=capture, use_tqdm=False)
    found = {site: torch.from_numpy(array) for site, array in output.activations.items()}
    for site in [site for site in found if site.endswith("pattern")]:
        heads, values = found[site.replace("pattern", "heads")], found[site.replace("pattern", "value")]
        values = values.repeat_interleave(heads.shape[1] // values.shape[1], dim=1)
        assert float((torch.einsum("nhk,khd->nhd", found[site], values) - heads).abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "deepseek-v2", "minicpm3"])
def test_patterns_are_transformers(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Windows, soft caps and sinks; grouped queries; latents; of a chosen head too."""
    from transformers import AutoModelForCausalLM

    row, folder = TINY_MODELS[name], tiny_checkpoint(name, tmp_path_factory)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    prompt, params = make_prompts(row)[3], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with one_thread(), LLM(folder, skip_tokenizer_init=True, kv_cache_dtype="float32", **row.engine) as llm:
        capture = Capture("layers.*.attention.pattern", positions="all")
        (output,) = llm.generate([prompt], params, capture=capture, use_tqdm=False)
        few = Capture("layers.1.attention.pattern", positions=[3, -1], heads=[2])
        (chosen,) = llm.generate([prompt], params, capture=few, use_tqdm=False)
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    with torch.no_grad():
        theirs = model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    for index, expected in enumerate(theirs):
        found = torch.from_numpy(output.activations[f"layers.{index}.attention.pattern"])
        assert found.shape == (len(ids), expected.shape[1], len(ids))
        assert float((found.transpose(0, 1) - expected[0]).abs().max()) < TOLERANCE
    rows = chosen.activations["blocks.1.attn.hook_pattern"]
    assert rows.shape == (2, 1, len(prompt))
    whole = output.activations["layers.1.attention.pattern"]
    assert abs(rows[:, 0] - whole[[3, len(prompt) - 1], 2, : len(prompt)]).max() < 1e-6


def test_latents_are_changed_as_they_are_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A change that changes nothing keeps all bits; without its keys attention weighs all positions alike."""
    row, one = TINY_MODELS["deepseek-v2"], SamplingParams(temperature=0, max_tokens=2)
    prompt = make_prompts(row)[3]
    with one_thread(), LLM(tiny_checkpoint("deepseek-v2", tmp_path_factory), skip_tokenizer_init=True) as llm:
        capture = Capture(["layers.0.attention.pattern", "layers.0.attention.key", "logits"], positions="all")
        sites = ["layers.0.attention.query", "layers.0.attention.key"]
        plain, same, none = (
            llm.generate([prompt], one, capture=capture, interventions=own, use_tqdm=False)[0].activations
            for own in ([], [Intervention.scale(sites, 1.0)], [Intervention.scale(sites[1:], 0.0)])
        )
    assert all(np.array_equal(plain[name], same[name]) for name in plain)
    expected = np.tril(np.ones((len(prompt), len(prompt)))) / np.arange(1, len(prompt) + 1)[:, None]
    assert np.abs(none["layers.0.attention.pattern"][: len(prompt), :, : len(prompt)] - expected[:, None]).max() < 1e-6
    assert not none["layers.0.attention.key"].any() and not np.array_equal(none["logits"], plain["logits"])


def add_to_stream(llm: LLM, model: Any) -> tuple[list[Intervention], Any]:
    vector = torch.linspace(-1, 1, llm.sites()["layers.0.output"].size)
    layer = next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList))[0]

    def change(module: Any, args: Any, output: Any) -> Any:
        return (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector

    return [Intervention.add("layers.0.output", vector)], layer.register_forward_hook(change)


def project_out_of_the_last(llm: LLM, model: Any) -> tuple[list[Intervention], Any]:
    direction = torch.linspace(-1, 2, llm.sites()["layers.1.input"].size)
    unit = direction / direction.norm()
    layer = next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList))[1]

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        hidden = args[0].clone()
        hidden[0, -1] -= unit * (hidden[0, -1] @ unit)
        return (hidden, *args[1:]), kwargs

    made = Intervention.project_out("layers.1.input", direction, positions="last")
    return [made], layer.register_forward_pre_hook(change, with_kwargs=True)


def without_a_head(llm: LLM, model: Any) -> tuple[list[Intervention], Any]:
    size = llm.sites()["layers.1.attention.heads"].shape[1]
    last = next(module for name, module in model.named_modules() if name.endswith("1.self_attn.o_proj"))

    def change(module: Any, args: Any) -> Any:
        heads = args[0].clone()
        heads[..., size : 2 * size] = 0
        return (heads,)

    return [Intervention.zero_head(1, 1)], last.register_forward_pre_hook(change)


def without_an_expert(llm: LLM, model: Any) -> tuple[list[Intervention], Any]:
    experts = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp.experts"))

    def change(module: Any, args: Any) -> Any:
        hidden, chosen, weights = args
        return hidden, chosen, weights.masked_fill(chosen == 2, 0.0)

    return [Intervention.zero_expert(1, 2)], experts.register_forward_pre_hook(change)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *((name, add_to_stream) for name in ("llama", "olmo2", "mamba", "falcon-h1")),
        *((name, project_out_of_the_last) for name in ("gemma2", "deepseek-v2")),
        *((name, without_a_head) for name in ("llama", "cohere", "minicpm3")),
        *((name, without_an_expert) for name in ("mixtral", "gpt-oss")),
    ],
)
def test_interventions_are_those_of_hooks(name: str, make: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    row, folder = TINY_MODELS[name], tiny_checkpoint(name, tmp_path_factory)
    model, prompt = reference_model(folder), make_prompts(row)[3]
    one = SamplingParams(temperature=0, max_tokens=1)
    with one_thread(), LLM(folder, skip_tokenizer_init=True, kv_cache_dtype="float32", **row.engine) as llm:
        interventions, handle = make(llm, model)
        try:
            with torch.no_grad():
                expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
        finally:
            handle.remove()
        capture = Capture("logits", "prompt")
        changed, plain = (
            llm.generate([prompt], one, capture=capture, interventions=own, use_tqdm=False)[0].activations["logits"]
            for own in (interventions, [])
        )
    scale = max(1.0, float(expected.abs().max()))
    assert float((torch.from_numpy(changed) - expected).abs().max()) / scale < TOLERANCE
    assert float((torch.from_numpy(plain) - expected).abs().max()) / scale > 10 * TOLERANCE


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
    theirs = TheirActivations(model, with_stream=True)
    found = worst(llm, theirs, [list(range(3, 3 + count)) for count in (1, 5, 23)])
    assert {"layers.0.input", "layers.0.attention.output", "layers.1.mlp.output", "logits"} <= found.keys()
    assert {site for site, value in found.items() if value > TOLERANCE} == set()


def test_a_wrong_site_is_seen(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Negative control: transformers' activations of another layer are not ours."""
    folder = tiny_checkpoint("llama", tmp_path_factory)
    theirs = TheirActivations(reference_model(folder))
    given = theirs.of

    def swapped(ids: Any, length: int) -> dict[str, torch.Tensor]:
        found = given(ids, length)
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
        with pytest.raises(ValueError, match=r"before the rotary embedding.*layers\.3\.attention\.key is behind it"):
            matching("blocks.3.attn.hook_k", sites)
        with pytest.raises(ValueError, match=r"no site 'layers.9.output'.*layers\.\*\.mlp\.activation"):
            matching("layers.9.output", sites)
