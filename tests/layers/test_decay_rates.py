"""The rates of recurrent states: computed once from the checkpoint's A_log, and again when it may have changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from embedded import open_llm, run, tokens
from tiny_models import TINY_MODELS, make_prompts, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.layers.mamba import DecayingLayer

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


def logprobs(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    outputs = run(llm, prompts, PARAMS)
    steps = [step for output in outputs for step in output.outputs[0].logprobs]
    return [tokens(outputs), [entry.logprob for step in steps for entry in step.values()]]


def scale(by: float) -> Any:
    def change(model: torch.nn.Module) -> list[str]:
        found = {name: item for name, item in model.named_parameters() if name.endswith("A_log")}
        for item in found.values():
            item.mul_(by)
        return sorted(found)

    return change


def forget(model: torch.nn.Module) -> int:
    """Let each forward compute the rates."""
    layers = [module for module in model.modules() if isinstance(module, DecayingLayer)]
    for layer in layers:
        layer.register_buffer("_rates", None, persistent=False)
    return len(layers)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3-next"])
def test_they_follow_what_apply_model_does_to_the_checkpoints_parameter(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompts = tiny_checkpoint(name, tmp_path_factory), make_prompts(TINY_MODELS[name])[:2]
    with open_llm(folder, skip_tokenizer_init=True, max_model_len=128, enable_prefix_caching=False) as llm:
        before = logprobs(llm, prompts)
        [changed] = llm.apply_model(scale(-2.0))
        [state] = llm.apply_model(lambda model: sorted(model.state_dict()))
        assert changed and set(changed) <= set(state) and not any("rates" in item for item in state)
        after = logprobs(llm, prompts)
        assert after != before
        monkeypatch.setattr(DecayingLayer, "weights_changed", lambda self: None)
        assert llm.apply_model(forget) == [len(changed)]
        assert logprobs(llm, prompts) == after
        monkeypatch.undo()
        llm.apply_model(scale(-0.5))
        assert logprobs(llm, prompts) == before


def test_they_are_those_of_float64_whatever_computes() -> None:
    layer = DecayingLayer()
    layer.A_log = torch.nn.Parameter(torch.linspace(-9, 9, 1001))
    expected = -layer.A_log.double().exp()
    assert torch.equal(layer.rates, expected.float())
    layer.A_log = torch.nn.Parameter(torch.linspace(-9, 9, 12).view(3, 4))
    assert layer.rates.shape == (4, 3) and layer.rates.is_contiguous() and not layer.rates.requires_grad
