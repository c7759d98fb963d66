"""A decoder takes parts that it does not know: other ways of joining them, other states, layers with other parts.

The parts are `toy_models.py`'s; that their answers do not depend on the schedule is `engine/test_metamorphic.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import engine_of
from tiny_models import TinyModel, make_prompts, one_thread
from toy_models import (
    ATTENTION,
    HIDDEN,
    MLP,
    NORM,
    PRE,
    TOYS,
    LatentConfig,
    RecurrentConfig,
    ThreeNorms,
    ThreePartConfig,
    toy_class,
    toy_model,
)

from llm import LLM, SamplingParams
from llm.forward import KVCacheSpec, LatentCacheSpec, RecurrentSpec, StateSpec
from llm.layers.parallel import SINGLE
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, LayerConfig
from llm.models.interface import BuildOptions
from llm.runner.speculation.proposer import ComputedStep, Proposer

OPTIONS = BuildOptions(64, torch.float32)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", params=TOYS)
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    with toy_model(request.param, tmp_path_factory) as (_, folder), one_thread():
        yield request.param, folder


def config_of(*layers: LayerConfig) -> DecoderConfig:
    return DecoderConfig(vocab_size=64, hidden_size=HIDDEN, max_position_embeddings=64, layers=layers, final_norm=NORM)


def specs_of(*layers: LayerConfig) -> list[StateSpec]:
    return config_of(*layers).states(torch.bfloat16, SINGLE)


def load(folder: Path, **arguments: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{"max_model_len": 60, **arguments})


def test_a_model_says_what_it_keeps_state_by_state() -> None:
    recurrent, latent = RecurrentConfig(20), LatentConfig(12)
    keys = KVCacheSpec(2, 10, torch.bfloat16)
    state = RecurrentSpec(((20,), (2, 20)), (torch.float64, torch.float32))
    vector = LatentCacheSpec(12, torch.bfloat16)
    plain = LayerConfig(attention=ATTENTION, mlp=MLP, norms=PRE)
    both = ThreePartConfig(attention=ATTENTION, mlp=recurrent, last=latent, norms=ThreeNorms(NORM))
    stateless = LayerConfig(mlp=MLP, norms=PRE)
    assert specs_of(both, stateless, plain) == [keys, state, vector, keys]
    assert [spec.bytes_per_token() for spec in specs_of(both)] == [2 * 2 * 10 * 2, 0, 12 * 2]
    assert [spec.bytes_per_request() for spec in specs_of(both)] == [0, 20 * 8 + 2 * 20 * 4, 0]


def test_parts_number_their_states_in_the_order_in_which_they_are_declared() -> None:
    model: Any = toy_class("recurrent")(config_of(*TOYS["recurrent"]), OPTIONS)
    layers = model.model.layers
    places = [layers[0].self_attn.state, layers[1].self_attn.attn.layer_index]
    places += [layers[3].self_attn.attn.layer_index, layers[3].mlp.state]
    assert places == [0, 1, 2, 3]


@dataclass(frozen=True)
class Forgetful(RecurrentConfig):
    """Builds a part with a state and declares none."""

    def states(self, *_: Any) -> tuple[RecurrentSpec, ...]:
        return ()


def test_a_state_that_nobody_declared_is_found_out() -> None:
    layer = LayerConfig(attention=Forgetful(20), mlp=MLP, norms=PRE)
    with pytest.raises(RuntimeError, match="declare 0 states and built 1"):
        DecoderForCausalLM(config_of(layer), OPTIONS)


def test_layers_share_the_rotary_table_of_their_rope_and_no_other() -> None:
    other = replace(ATTENTION, rope=replace(ATTENTION.rope, theta=500.0))
    layers = [LayerConfig(attention=part, mlp=MLP, norms=PRE) for part in (ATTENTION, other, ATTENTION)]
    config = config_of(*layers)
    model: Any = DecoderForCausalLM(config, OPTIONS)
    first, second, third = (layer.self_attn.rotary_emb for layer in model.model.layers)
    assert first is third and first is not second
    assert config.ropes == {ATTENTION.rope, other.rope}


def test_modules_are_where_their_parts_are_named(toy: tuple[str, Path]) -> None:
    name, _ = toy
    model: Any = toy_class(name)(config_of(*TOYS[name]), OPTIONS)
    for layer, config in zip(model.model.layers, TOYS[name], strict=True):
        parts = {key for key, module in layer.named_children() if "norm" not in key}
        assert parts == set(config.parts)
    for path, module in model.named_modules():
        if hasattr(module, "prefix"):
            assert module.prefix == path


def test_hooks_on_layers_and_parts_see_what_passes(toy: tuple[str, Path]) -> None:
    _, folder = toy
    seen: list[str] = []
    with load(folder) as llm:
        model = engine_of(llm).runner.model
        plain = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

        def hook(path: str) -> Any:
            return lambda module, inputs, output: seen.append(path)

        watched = {path: module for path, module in model.named_modules() if path.count(".") in (2, 3)}
        for path, module in watched.items():
            if path.startswith("model.layers"):
                module.register_forward_hook(hook(path))
        hooked = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert hooked == plain
    assert set(seen) == {path for path in watched if path.startswith("model.layers")}


def test_the_config_says_what_is_kept(toy: tuple[str, Path]) -> None:
    name, folder = toy
    with load(folder, max_num_seqs=5) as llm:
        runner, cache = engine_of(llm).runner, llm.config.cache_config
        shapes = [[tuple(tensor.shape) for tensor in state] for state in runner.states]
        assert (cache.num_state_slots == 5) == name.startswith("recurrent")
        assert cache.enable_prefix_caching == (cache.num_state_slots == 0)
        if cache.num_state_slots:
            assert "recurrent" in llm.config.reasons["enable_prefix_caching"]
        assert (cache.num_blocks == 0) == (name == "recurrent-only")
        held = [tensor[1:].nbytes for state in runner.states for tensor in state if name == "recurrent-only"]
        assert not held or sum(held) == cache.kv_cache_memory_bytes
    if name == "recurrent-only":
        assert shapes == [[(6, 20), (6, 2, 20)], [(6, 9), (6, 2, 9)]]
    if name == "latent":
        assert [len(state) for state in shapes] == [1, 2, 1]
        assert shapes[0] == [(cache.num_blocks + 1, 16, 12)]


def test_what_was_in_a_slot_is_of_no_account(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Slots come back with the states of whoever had them; filled with NaN, they change nothing."""
    with toy_model("recurrent", tmp_path_factory) as (row, folder), one_thread(), load(folder) as llm:
        expected = answers(llm, row)
        for state, spec in zip(engine_of(llm).runner.states, engine_of(llm).runner.plan.kv_cache_specs, strict=True):
            if isinstance(spec, RecurrentSpec):
                for tensor in state:
                    tensor.fill_(float("nan"))
        assert answers(llm, row) == expected


def answers(llm: LLM, row: TinyModel) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(make_prompts(row), GREEDY, use_tqdm=False)]


class Eager(Proposer):
    def propose(self, step: ComputedStep) -> Mapping[str, Sequence[int]]:
        return {step.batch.request_ids[row]: [1] for row in step.rows.tolist()}


def test_drafts_are_refused_where_they_could_not_be_taken_back(toy: tuple[str, Path]) -> None:
    name, folder = toy
    with load(folder) as llm:
        expected = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        engine_of(llm).runner.proposer = Eager()
        if name.startswith("recurrent"):
            with pytest.raises(ValueError, match="recurrent states, which cannot be rolled back"):
                llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
            engine_of(llm).runner.proposer = None
        assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
