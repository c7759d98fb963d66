"""Every tensor of a step is on the platform's device, and what a platform says of its device is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from embedded import engine_of, open_llm, run
from pretend_device import DEVICE, OnDevice, PretendPlatform, pretend_device

import llm.platforms
from llm import LLM, SamplingParams
from llm.kernels.backend import Backend
from llm.kernels.reference.backend import pytorch
from llm.layers.attention import PagedAttention
from llm.sampling import sampler
from llm.sampling.logits_processors import builtin, interface
from llm.sampling.logits_processors.builtin import PenaltiesLogitsProcessor
from llm.sampling.logits_processors.pipeline import LogitsProcessors
from llm.sampling_params import StructuredOutputsParams

PROMPTS = [[5, 300, 301, 17], [7, 8], [9], list(range(100, 141)), [11, 12, 13], [20, 21]]
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"top_k": 5, "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"top_p": 0.8, "min_p": 0.05, "logit_bias": {7: 3.0}, "prompt_logprobs": 1},
    {"min_tokens": 4, "allowed_token_ids": list(range(20, 90)), "logprobs": -1},
    {"top_k": 1200, "bad_words": ["the", "of the"], "logprob_token_ids": [5, 6]},
    {"structured_outputs": StructuredOutputsParams(regex="[a-z ]+")},
]
PARAMS = [
    SamplingParams(max_tokens=6, ignore_eos="structured_outputs" not in request, seed=4, **request)
    for request in REQUESTS
]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`device=` of a platform whose tensors the CPU's cannot be mixed with."""
    monkeypatch.setattr(llm.platforms, "BUILTIN", (*llm.platforms.BUILTIN, PretendPlatform))
    with pretend_device():
        yield PretendPlatform.name


def answers(opened: LLM) -> tuple[list[list[int]], torch.Tensor]:
    """The tokens of each request, and every logprob in one row."""
    outputs = run(opened, PROMPTS, PARAMS)
    found = [position for request in outputs for position in request.prompt_logprobs or [] if position]
    found += [position for request in outputs for position in request.outputs[0].logprobs or []]
    logprobs = [entry.logprob for position in found for entry in position.values()]
    return [request.outputs[0].token_ids for request in outputs], torch.tensor(logprobs)


# Activations in integers and in floats, weights of 8 bits and of 4: the other schemes combine the same tensors. PyTorch
# attends with another kernel: what its last bit decides at the border of two integers is seen in logprobs where all
# channels of a row are rounded finely, as rotated ones are.
@pytest.mark.parametrize(
    ("quantization", "most"),
    [(None, 1e-3), ({"scheme": "w8a8", "rotate": False}, 1e-3), ("w8a8", 0.1), ("w4a16", 1e-3)],
)
def test_a_model_on_another_device_gives_the_same_answers(
    pretend: str, monkeypatch: pytest.MonkeyPatch, quantization: Any, most: float
) -> None:
    with open_llm(device=pretend, dtype="float32", quantization=quantization) as opened:
        runner = engine_of(opened).runner
        states = [tensor for state in runner.states for tensor in state]
        placed = [*runner.model.parameters(), *runner.model.buffers(), *states]
        assert placed and all(isinstance(tensor, OnDevice) for tensor in placed)
        tokens, logprobs = answers(opened)
    monkeypatch.setenv("LLM_CPU_ISA", "none")
    with open_llm(device="cpu", dtype="float32", quantization=quantization) as opened:
        expected_tokens, expected = answers(opened)
    assert tokens == expected_tokens
    torch.testing.assert_close(logprobs, expected, rtol=1e-3, atol=most)


# The negative control: what forgets the device, somewhere in a step, is seen.


def mixing(original: Any) -> Any:
    """The function, after it added its last argument to a tensor made without a device."""

    def call(*args: Any) -> Any:
        torch.zeros(1) + args[-1]
        return original(*args)

    return call


def on_the_cpu(original: Any) -> Any:
    """An upload that stays where it is."""
    return lambda self, array: torch.from_numpy(array.copy())


FORGETFUL: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "batch": (Backend, "upload", on_the_cpu),
    "cache": (Backend, "kv_cache", lambda original: lambda self, shape, dtype: torch.zeros(shape, dtype=dtype)),
    "layer": (PagedAttention, "attend", lambda original: lambda self, query, *rest: original(self, query, *rest).cpu()),
    "sampler": (sampler._DeviceStep, "start", mixing),
    "processor": (builtin.MinPLogitsProcessor, "apply", mixing),
    "penalties": (PenaltiesLogitsProcessor, "_tensor", on_the_cpu),
}


@pytest.mark.parametrize("forgetful", FORGETFUL)
def test_a_tensor_without_a_device_is_seen(pretend: str, monkeypatch: pytest.MonkeyPatch, forgetful: str) -> None:
    owner, name, forget = FORGETFUL[forgetful]
    monkeypatch.setattr(owner, name, forget(getattr(owner, name)))
    with (
        open_llm(device=pretend, dtype="float32") as opened,
        pytest.raises(RuntimeError, match="was given tensors of pretend:0 and of cpu"),
    ):
        run(opened, PROMPTS, PARAMS)


# What a platform says of its device.


class Asked(PretendPlatform):
    calls: ClassVar[list[Any]] = []

    def set_device(self, index: int) -> None:
        self.calls.append(index)

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        super().synchronize()

    def is_pin_memory_available(self) -> bool:
        return True


def test_the_device_is_set_waited_for_and_copied_to(pretend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Told(interface.LogitsProcessor):
        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            told.append((device, is_pin_memory))

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits

        def is_argmax_invariant(self) -> bool:
            return True

        def update_state(self, batch_update: Any) -> None:
            return None

        def is_idle(self) -> bool:
            return True

    monkeypatch.setattr(llm.platforms, "BUILTIN", (*llm.platforms.BUILTIN, Asked))
    monkeypatch.setattr(Asked, "name", "asked")
    Asked.calls.clear()
    with open_llm(device="asked", logits_processors=[Told]) as opened:
        assert Asked.calls == [0]
        run(opened, PROMPTS[:2], SamplingParams(max_tokens=3, ignore_eos=True))
    assert Asked.calls == [0, *["synchronize"] * 3]
    assert set(told) == {(DEVICE, True)}


def test_a_cpu_copies_and_pins_nothing() -> None:
    with open_llm(device="cpu") as opened:
        step = np.arange(3)
        assert np.shares_memory(engine_of(opened).runner.backend.upload(step).numpy(), step)


@pytest.mark.parametrize("pins", [True, False])
def test_every_processor_is_told_whether_memory_is_pinned(pins: bool) -> None:
    class Told(interface.LogitsProcessor):
        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            told.append(is_pin_memory)

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            return None

    told: list[Any] = []
    config: Any = SimpleNamespace(model_config=SimpleNamespace(max_model_len=8))
    LogitsProcessors(config, torch.device("cpu"), [Told], pytorch("a test", torch.device("cpu"), pins))
    assert told == [pins]
