"""Models with experts as a whole: numbers that no model has, recorded steps, a NaN in one row, the load of experts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import engine_of, open_llm
from kernel_sets import has_kernels
from tiny_models import TINY_MODELS, TinyModel, config_of, make_prompts, tiny_checkpoint
from tiny_models import write_checkpoint as write

from llm import LLM, SamplingParams
from llm.errors import CheckpointError, UnsupportedModelError, ValidationError
from llm.layers.moe import FusedMoE
from llm.layers.rotary import frequencies
from llm.llm import EMBEDDED_MODEL
from llm.models.config_reader import ConfigReader
from llm.models.registry import resolve_model_cls

pytestmark = pytest.mark.usefixtures("one_core")

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("mixtral", tmp_path_factory)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, skip_tokenizer_init=True, enable_prefix_caching=False) as llm:
        yield llm


def layers(llm: LLM) -> list[FusedMoE]:
    model: Any = engine_of(llm).runner.model
    return [layer.mlp.experts for layer in model.model.layers]


def test_experts_that_no_model_has_are_refused_before_they_are_built() -> None:
    """In every family."""
    families = set()
    for row in TINY_MODELS.values():
        if not any("experts" in key for key in row.config):
            continue
        raw = config_of(row).to_dict()
        family = resolve_model_cls([], raw["model_type"])
        if not family.read_config(ConfigReader(raw)).experts:
            continue  # a dense one of a family that may have experts
        [key] = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"} & set(raw)
        for count in (0, 10**9):
            if count == 0 and raw["model_type"] == "granitemoehybrid":
                continue  # a dense one says 0
            with pytest.raises(UnsupportedModelError, match=f"{key} is {count}, must be an integer from 1 to 4096"):
                family.read_config(ConfigReader(raw | {key: count}))
        families.add(family)
    assert len(families) == 30


def test_experts_that_the_checkpoint_cannot_hold_are_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="the model has 8000 experts, and the checkpoint holds 59 matrices"):
        LLM(folder, hf_overrides={"num_local_experts": 4000})


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def test_phimoe_is_read_as_its_authors_wrote_it() -> None:
    """The architecture with other capitals, the rope in its older form with factors of its own, every bias."""
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope |= {"short_mscale": 1.2, "long_mscale": 1.24, "original_max_position_embeddings": 4096}
    raw = {
        **{"model_type": "phimoe", "attention_bias": True, "lm_head_bias": True, "hidden_dropout": 0.0},
        **{"hidden_act": "silu", "hidden_size": 64, "intermediate_size": 32, "input_jitter_noise": 0.01},
        **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "num_attention_heads": 4},
        **{"num_hidden_layers": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 16},
        **{"output_router_logits": False, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01},
        **{"rms_norm_eps": 1e-5, "rope_scaling": rope, "rope_theta": 10000.0, "sliding_window": 131072},
        **{"vocab_size": 32064, "tie_word_embeddings": False},
    }
    family = resolve_model_cls(["PhiMoEForCausalLM"], "phimoe")
    read = family.read_config(ConfigReader(raw))
    assert read.lm_head_bias and read.max_position_embeddings == 131072 and read.experts == 32
    attention = read.layers[0].attention
    assert attention.qkv_bias and attention.out_bias
    factors = [frequencies(attention.rope, 16, longest) for longest in (4096, 4097)]
    assert [factor for _, factor in factors] == [1.2, 1.24]
    assert torch.equal(factors[0][0], 2 * factors[1][0])
    for changed in ({"num_experts_per_tok": 3}, {"rope_scaling": {**rope, "type": "linear", "factor": 2.0}}):
        with pytest.raises(UnsupportedModelError, match=r"num_experts_per_tok is 3|rope_type is 'linear'"):
            family.read_config(ConfigReader(raw | changed))


@pytest.mark.skipif(not has_kernels(), reason="PyTorch computes, which is not recorded")
def test_decoding_steps_are_recorded_although_experts_differ(llm: LLM) -> None:
    """The bits are those of steps that are not: with a hook there is no replay."""
    prompts = make_prompts(TINY_MODELS["mixtral"])[:3]
    recorded = answers(llm, prompts)
    replay: Any = engine_of(llm).runner.recorded
    assert replay.refusal is None and replay._steps
    hook = layers(llm)[0].register_forward_hook(lambda *_: None)
    assert answers(llm, prompts) == recorded
    hook.remove()


def test_a_nan_in_the_router_ends_its_row_alone(llm: LLM) -> None:
    first, second = make_prompts(TINY_MODELS["mixtral"])[1:3]
    [alone] = answers(llm, [first])

    def spoil(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        spoiled = logits.clone()
        spoiled[len(first) if len(logits) > 2 else 1 :] = torch.nan
        return spoiled

    model: Any = engine_of(llm).runner.model
    hook = model.model.layers[1].mlp.gate.register_forward_hook(spoil)
    outputs = llm.generate([first, second], GREEDY, use_tqdm=False)
    hook.remove()
    kept, ended = (output.outputs[0] for output in outputs)
    assert ended.finish_reason == "error"
    assert (kept.token_ids, kept.logprobs) == alone or not has_kernels()


def test_the_load_of_experts_is_told(tmp_path: Path) -> None:
    config = {"vocab_size": 2304, "num_local_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 2}
    write(TinyModel("MixtralConfig", config), tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(EMBEDDED_MODEL) / name, tmp_path / "model")
    with open_llm(tmp_path / "model") as llm:
        load = llm.expert_load(["In the beginning God created the heaven and the earth.", "And it came to pass."])
        with pytest.raises(ValidationError, match="texts must be a list of texts"):
            llm.expert_load("one text")
    assert list(load.tokens) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    counts = load.tokens["model.layers.0.mlp.experts"]
    assert len(counts) == 4 and sum(counts) == sum(load.tokens["model.layers.1.mlp.experts"]) > 10
    assert 1 <= load.imbalance("model.layers.0.mlp.experts") <= 4
    assert str(load).count("\n") == 2 and load._repr_html_().count("<rect") == 8
    with open_llm() as dense, pytest.raises(ValidationError, match="no layers of experts"):
        dense.expert_load(["x"])


def test_a_step_reads_the_experts_that_a_token_chose(llm: LLM) -> None:
    cost = engine_of(llm).runner.cost()
    stored = [(layer, sum(parameter.nbytes for parameter in layer.parameters())) for layer in layers(llm)]
    chosen = sum(size * layer.top_k // layer.num_experts for layer, size in stored)
    assert 0 < cost.chosen_bytes == chosen < cost.bytes_per_step
    tables = engine_of(llm).runner.model.model.embed_tokens.weight.nbytes
    assert cost.weight_bytes - cost.bytes_per_step in (left := sum(size for _, size in stored) - chosen, left + tables)
