"""Every tensor of a step is on the platform's device, and what a platform says of its device is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from checkpoints.adapters import write_adapter
from checkpoints.sentence_transformers import BERT, save_model, save_modules
from checkpoints.sentence_transformers import prompts as pooled_prompts
from embedded import engine_of, free_blocks, open_llm, run, tokens
from fake_device import FakePlatform, are_fakes_complete, fake_device
from models import images
from pretend_device import DEVICE, QUEUE, OnDevice, PretendPlatform, pretend_device
from tiny_models import TINY_MODELS, make_prompts, tiny_checkpoint
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoModelForCausalLM

import llm.platforms
from llm import LLM, SamplingParams
from llm.errors import LLMError, OutOfMemoryError, ValidationError
from llm.inputs import LoRARequest
from llm.jobs.identity import model_identity
from llm.kernels.backend import Backend
from llm.kernels.reference.backend import pytorch
from llm.layers.attention import PagedAttention
from llm.models.vision.tower import Features, VisionTower
from llm.runner import model_runner
from llm.runner.ahead import StepAhead, in_order
from llm.runner.model_runner import ModelRunner
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

MARK = Backend._mark


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`device=` of a platform whose tensors the CPU's cannot be mixed with."""
    monkeypatch.setattr(llm.platforms, "BUILTIN", (*llm.platforms.BUILTIN, PretendPlatform))
    monkeypatch.setattr(Backend, "_mark", lambda self: QUEUE.mark())
    with pretend_device():
        yield PretendPlatform.name


def answers(opened: LLM) -> tuple[list[list[int]], torch.Tensor]:
    """The tokens of each request, and every logprob in one row."""
    outputs = run(opened, PROMPTS, PARAMS)
    found = [position for request in outputs for position in request.prompt_logprobs or [] if position]
    found += [position for request in outputs for position in request.outputs[0].logprobs or []]
    logprobs = [entry.logprob for position in found for entry in position.values()]
    return [request.outputs[0].token_ids for request in outputs], torch.tensor(logprobs)


# Activations in integers and in floats; weights of 4 bits are below. PyTorch
# attends with another kernel: what its last bit decides at the border of two integers is seen in logprobs where all
# channels of a row are rounded finely, as rotated ones are.
@pytest.mark.parametrize(
    ("quantization", "most"),
    [(None, 1e-3), ({"scheme": "w8a8", "rotate": False}, 1e-3), ("w8a8", 0.1)],
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


# One of each kind: what it is about, and how many of its layers have experts.
KINDS = {
    "qwen3": 0,  # dense
    "gpt-oss": 2,  # experts, windows, sinks
    "deepseek-v3": 1,  # latent attention, experts in groups
    "falcon-alibi": 0,
    "qwen3-next": 4,  # gated delta rule, convolutions, experts
    "nemotron-h": 0,  # Mamba 2
}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=0)
GREEDY_ALONE = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=3, logprobs=2, seed=3, ignore_eos=True)


class Counted:
    """A runner's steps: (waits, copies that are not from pinned memory) of each."""

    def __init__(self, opened: LLM) -> None:
        self.steps: list[tuple[int, int]] = []
        runner = engine_of(opened).runner
        self._execute, runner.execute = runner.execute, self

    def __call__(self, plan: Any) -> Any:
        before = QUEUE.waits, QUEUE.pageable
        result = self._execute(plan)
        if plan.num_scheduled_tokens:
            self.steps.append((QUEUE.waits - before[0], QUEUE.pageable - before[1]))
        return result


def told(outputs: Any) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Tokens, their logprobs, and those of the prompts' tokens."""
    rows = [output.outputs[0] for output in outputs]
    own = [position[token].logprob for row in rows for token, position in zip(row.token_ids, row.logprobs, strict=True)]
    prompts = [
        position[token].logprob
        for output in outputs
        for token, position in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
        if position
    ]
    return [row.token_ids for row in rows], torch.tensor(own), torch.tensor(prompts)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "float32") for kind in KINDS),
        ("qwen3", "bfloat16"),
        ("qwen3-next", "bfloat16"),
    ],
)
def test_every_kind_of_model_computes_on_another_device(
    pretend: str, tmp_path_factory: pytest.TempPathFactory, kind: str, dtype: str
) -> None:
    row, folder = TINY_MODELS[kind], tiny_checkpoint(kind, tmp_path_factory)
    prompts, options = make_prompts(row), {**row.engine, "skip_tokenizer_init": True, "dtype": dtype}
    options["async_scheduling"] = False  # with it, one step waits for what another asked
    with open_llm(folder, device="cpu", **options) as opened:
        tokens, logprobs, of_prompts = told(run(opened, prompts, GREEDY))
    with open_llm(folder, device=pretend, **options) as opened:
        assert opened.config.model_config.dtype == getattr(torch, dtype)
        found = told(run(opened, prompts, GREEDY))
        counted = Counted(opened)
        run(opened, prompts, DRAWN)
        # Reading the tokens is the one wait of a step, and one more for each layer whose experts PyTorch computes.
        assert set(counted.steps) == {(1 + KINDS[kind], 0)}
    if dtype == "float32":
        assert found[0] == tokens
        torch.testing.assert_close(found[1], logprobs, rtol=0, atol=1e-4)
        torch.testing.assert_close(found[2], of_prompts, rtol=0, atol=1e-4)
    else:
        # On the CPU activations are float32: here they are rounded after every operation.
        difference = (found[2] - of_prompts).abs()
        assert 1e-3 < difference.median() < 0.1  # a token whose experts are others is far off


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`device=` of a CUDA device that knows types, shapes and devices, and computes nothing."""
    if not are_fakes_complete():
        pytest.skip("PyTorch 2.11's fake tensors fail where an empty dimension is split")
    monkeypatch.setattr(llm.platforms, "BUILTIN", (*llm.platforms.BUILTIN, FakePlatform))
    with fake_device(monkeypatch):
        yield FakePlatform.name


DUMMY: dict[str, Any] = {"skip_tokenizer_init": True, "load_format": "dummy"}
ON_CUDA = [
    *((kind, None) for kind in ("gpt-oss", "deepseek-v3", "qwen3-next", "nemotron-h")),
    *(("qwen3", "w4a16"), ("llama", "w4a8")),
]


@pytest.mark.parametrize(("kind", "quantization"), ON_CUDA)
def test_whole_steps_stay_on_a_cuda_device(
    fake: str, tmp_path_factory: pytest.TempPathFactory, kind: str, quantization: str | None
) -> None:
    row = TINY_MODELS[kind]
    with unset_fake_temporarily():
        folder, prompts = tiny_checkpoint(kind, tmp_path_factory), make_prompts(row)
    options = {**row.engine, **DUMMY, "quantization": quantization}
    with open_llm(folder, device=fake, **options) as opened:
        assert opened.config.device == "cuda:0" and opened.config.model_config.dtype == torch.bfloat16
        outputs = run(opened, prompts, [GREEDY_ALONE, DRAWN] * (len(prompts) // 2) + [DRAWN] * (len(prompts) % 2))
    assert all(len(output.outputs[0].token_ids) >= 3 for output in outputs)


@pytest.mark.parametrize("forgetful", ["cache", "layer", "sampler", "type"])
def test_what_is_not_on_the_cuda_device_is_seen(
    fake: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, forgetful: str
) -> None:
    """The control, of devices and of types."""
    forgets = {**FORGETFUL, "type": (PagedAttention, "attend", widened)}
    owner, name, forget = forgets[forgetful]
    monkeypatch.setattr(owner, name, forget(getattr(owner, name)))
    with unset_fake_temporarily():
        folder, prompts = tiny_checkpoint("qwen3", tmp_path_factory), make_prompts(TINY_MODELS["qwen3"])
    with (
        open_llm(folder, device=fake, **DUMMY) as opened,
        pytest.raises(RuntimeError, match=r"two devices|same device|expected scalar type"),
    ):
        run(opened, prompts, DRAWN)


def test_an_encoder_pools_on_another_device(pretend: str, tmp_path: Path) -> None:
    save_model(tmp_path, "BertModel", **BERT)
    save_modules(tmp_path, "mean")
    vectors = []
    for device, dtype in (("cpu", "float32"), (pretend, "float32"), (pretend, "bfloat16")):
        with open_llm(tmp_path, device=device, dtype=dtype, skip_tokenizer_init=True) as opened:
            vectors.append(opened.embed(pooled_prompts(), use_tqdm=False).to_numpy())
    np.testing.assert_allclose(vectors[1], vectors[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(vectors[2], vectors[0], rtol=0, atol=0.03)


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_vl", "qwen2_5_vl", "gemma3", "ovis2"])
def test_pictures_are_seen_on_another_device(
    pretend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """In the type of its activations."""
    images.write(family, tmp_path)
    prompts = images.asked(family)[:3]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=0)

    def answer(device: str, dtype: str) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
        with LLM(tmp_path, device=device, dtype=dtype, max_model_len=512, use_tqdm_on_load=False) as opened:
            outputs = opened.generate(prompts, params, use_tqdm=False)
            rows = engine_of(opened).runner.images
            computed = rows.tower.parameters(), (known.features.rows for known in rows._features.values())
            for made in computed:
                assert {tensor.dtype for tensor in made} == {getattr(torch, dtype)}
        return told(outputs)

    expected, _, of_prompts = answer("cpu", "float32")
    assert answer(pretend, "float32")[0] == expected
    if family == "ovis2":  # its tower takes the nearest of its features: rounded, another one
        return
    found, _, rounded = answer(pretend, "bfloat16")
    assert [row[0] for row in found] == [row[0] for row in expected]
    assert (rounded - of_prompts).abs().median() < 0.1
    if family == "gemma3":  # the control: other features are further away
        features = VisionTower.features
        monkeypatch.setattr(VisionTower, "features", lambda *given: Features(features(*given).rows.flip(0)))
        assert (answer(pretend, "bfloat16")[2] - of_prompts).abs().median() > 0.2


def test_given_features_stand_beside_pictures_on_another_device(pretend: str, tmp_path: Path) -> None:
    images.write("llava", tmp_path)
    prompt = next(item for item in images.asked("llava") if len(item["multi_modal_data"]["image"]) == 2)
    first, second = prompt["multi_modal_data"]["image"]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for dtype in ("float32", "bfloat16"):
        with LLM(tmp_path, device=pretend, dtype=dtype, max_model_len=512, use_tqdm_on_load=False) as opened:
            expected = tokens(opened.generate(prompt, params, use_tqdm=False))
            inputs = opened._preprocessor.images.processor.process(first, {}).inputs
            given = {"image_embeds": engine_of(opened).runner.images.tower.features(inputs).rows.cpu().float()}
            mixed = {**prompt, "multi_modal_data": {"image": [given, second]}}
            assert tokens(opened.generate(mixed, params, use_tqdm=False)) == expected


def test_a_prompt_cache_is_of_one_type_of_activations(pretend: str) -> None:
    found = []
    for device in ("cpu", pretend):
        with open_llm(device=device, dtype="bfloat16", kv_cache_dtype="bfloat16") as opened:
            found.append(model_identity(opened._args, engine_of(opened).config, "weights").get("activations"))
    assert found == [None, "torch.bfloat16"]


def test_the_prompt_cache_on_disk_is_read_on_another_device(pretend: str, tmp_path: Path) -> None:
    prompt, params = [list(range(20, 80))], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with open_llm(device=pretend, dtype="float32") as opened:
        expected = tokens(run(opened, prompt, params))
        opened.save_prefix_cache(tmp_path / "cache")
    with open_llm(device=pretend, dtype="float32", prefix_cache=tmp_path / "cache") as opened:
        (output,) = run(opened, prompt, params)
    assert tokens([output]) == expected and output.num_cached_tokens == 48


def test_requests_of_all_kinds_wait_once_a_step(pretend: str) -> None:
    """Every built-in processor, every kind of draw, and logprobs."""
    params = [param for param in PARAMS if param.prompt_logprobs is None]
    prompts = [prompt for prompt, param in zip(PROMPTS, PARAMS, strict=True) if param.prompt_logprobs is None]
    with open_llm(device=pretend, logprobs_mode="processed_logprobs") as opened:
        counted = Counted(opened)
        run(opened, prompts, params)
    assert set(counted.steps) == {(1, 0)}


@pytest.mark.parametrize("defect", ["memory is used again before anybody waited", "read before anybody waited"])
def test_what_does_not_wait_is_seen(
    pretend: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    """The control: the device reads and writes the host's memory late."""
    folder, prompts = tiny_checkpoint("qwen3", tmp_path_factory), make_prompts(TINY_MODELS["qwen3"])
    with open_llm(folder, device=pretend, skip_tokenizer_init=True) as opened:
        expected = tokens(run(opened, prompts, GREEDY_ALONE))
        staging = engine_of(opened).runner.backend._staging
        if defect.startswith("memory"):
            taken = staging._taken
            monkeypatch.setattr(staging, "_taken", lambda like: (staging.give_back(staging.taken()), taken(like))[1])
        else:
            monkeypatch.setattr(Backend, "_mark", lambda self: lambda: None)
        # Other answers, or numbers that are no tokens.
        with contextlib.suppress(IndexError, LLMError, OverflowError, RuntimeError):
            assert tokens(run(opened, prompts, GREEDY_ALONE)) != expected


# --- Steps that are started before the tokens of the one before are read. ---

# Rows end at different steps, some by a token, and cross blocks; more rows than are computed at a time.
MANY = [
    SamplingParams(temperature=t, max_tokens=4 + 3 * i, seed=i, ignore_eos=i % 2 == 0, logprobs=1 if i % 3 else None)
    for i, t in enumerate((0, 0, 1.0, 0, 0.7, 0, 1.0))
]


class Ahead:
    """The steps of a runner that were started early, and those of them that were read."""

    def __init__(self, opened: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = engine_of(opened).runner
        self.started = self.rows = self.taken = 0
        start, take = runner._start_ahead, StepAhead.rows_of

        def started(positions: np.ndarray, *rest: Any) -> Any:
            found = start(positions, *rest)
            self.started += found is not None
            self.rows += 0 if found is None else len(positions)
            return found

        def taken(ahead: StepAhead, *args: Any) -> dict[int, int]:
            found = take(ahead, *args)
            self.taken += len(found)
            return found

        runner._start_ahead = started
        monkeypatch.setattr(StepAhead, "rows_of", taken)


@pytest.mark.parametrize(("kind", "rows"), [("qwen3", 2), ("qwen3", 8), ("gpt-oss", 8), ("deepseek-v3", 8)])
def test_a_step_that_is_started_early_changes_no_answer(
    pretend: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, kind: str, rows: int
) -> None:
    row, folder = TINY_MODELS[kind], tiny_checkpoint(kind, tmp_path_factory)
    prompts = (make_prompts(row) * 2)[: len(MANY)]
    options = {**row.engine, "skip_tokenizer_init": True, "device": pretend, "dtype": "float32", "max_num_seqs": rows}
    with open_llm(folder, **options, async_scheduling=False, speculative_config=None) as opened:
        assert not opened.config.scheduler_config.async_scheduling
        expected = run(opened, prompts, MANY)
    with open_llm(folder, **options) as opened:
        assert opened.config.scheduler_config.async_scheduling and opened.config.speculative_config is None
        ahead = Ahead(opened, monkeypatch)
        found = run(opened, prompts, MANY)
        assert 0.7 * ahead.rows < ahead.taken <= ahead.rows and ahead.started > 10
        again = run(opened, prompts[::-1], MANY[::-1])[::-1]
    assert tokens(found) == tokens(expected) == tokens(again)
    for own, theirs in zip(found, expected, strict=True):
        assert own.outputs[0].finish_reason == theirs.outputs[0].finish_reason
        for a, b in zip(own.outputs[0].logprobs or (), theirs.outputs[0].logprobs or (), strict=True):
            assert a.keys() == b.keys() and all(abs(a[key].logprob - b[key].logprob) < 1e-4 for key in a)


def test_rows_join_others_whose_step_was_started_early(
    pretend: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, folder = TINY_MODELS["qwen3"], tiny_checkpoint("qwen3", tmp_path_factory)
    prompts = (make_prompts(row) * 8)[:24]
    options = {**row.engine, "skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 9, "block_size": 4}
    params = [SamplingParams(temperature=i % 2, max_tokens=4 + i, seed=i, ignore_eos=True) for i in range(len(prompts))]
    with open_llm(folder, **options, device="cpu", speculative_config=None) as opened:
        expected = tokens(run(opened, prompts, params))
    with open_llm(folder, **options, device=pretend) as opened:
        ahead, runner, plans = Ahead(opened, monkeypatch), engine_of(opened).runner, []
        execute = runner.execute
        runner.execute = lambda plan: plans.append(plan) or execute(plan)
        assert tokens(run(opened, prompts, params)) == expected
        joined = sum(bool(plan.new_rows) and len(plan.num_scheduled_tokens) > 1 and plan.goes_on for plan in plans)
        assert joined > 10 and ahead.started > 0.8 * len(plans) and ahead.taken > 0.8 * ahead.rows
        engine_of(opened).scheduler.check_integrity()


def test_rows_that_lose_their_blocks_or_are_left_half_done_are_not_mixed_up(
    pretend: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    row, folder = TINY_MODELS["qwen3"], tiny_checkpoint("qwen3", tmp_path_factory)
    prompts = make_prompts(row)[:4]
    options = {**row.engine, "skip_tokenizer_init": True, "device": pretend, "dtype": "float32", "block_size": 4}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with open_llm(folder, **options) as opened:
        expected = tokens(run(opened, prompts, params))
        per_block = opened.config.cache_config.kv_cache_memory_bytes // opened.config.cache_config.num_blocks
        short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        rest = opened.generate_iter([{"prompt_token_ids": ids} for ids in prompts], [short, *[params] * 3])
        assert next(rest).outputs[0].token_ids == expected[0][:3]  # the others are under way
        assert tokens(run(opened, prompts[1:], params)) == expected[1:]
        rest.close()
        assert tokens(run(opened, prompts, params)) == expected
        engine_of(opened).scheduler.check_integrity()
    few = -(-max(len(prompt) + 40 for prompt in prompts) // 4) + 6
    with open_llm(folder, **options, max_model_len=4 * (few - 6), kv_cache_memory_bytes=few * per_block) as opened:
        assert tokens(run(opened, prompts, params)) == expected
        assert engine_of(opened).scheduler.num_preemptions > 0
        engine_of(opened).scheduler.check_integrity()


def test_rows_with_adapters_go_on_early(
    pretend: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, folder = TINY_MODELS["qwen3"], tiny_checkpoint("qwen3", tmp_path_factory)
    prompts, options = make_prompts(row)[:4], {**row.engine, "skip_tokenizer_init": True, "dtype": "float32"}
    with unset_fake_temporarily():
        model = AutoModelForCausalLM.from_pretrained(folder)
        adapters = [LoRARequest(str(i), i, str(write_adapter(model, tmp_path / str(i), seed=i))) for i in (1, 2)]
    requests = [adapters[0], None, adapters[1], adapters[0]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def answer(device: str) -> list[list[int]]:
        with open_llm(folder, **options, device=device, enable_lora=True, max_loras=2) as opened:
            ahead = Ahead(opened, monkeypatch)
            ids = [{"prompt_token_ids": own} for own in prompts]
            found = tokens(opened.generate(ids, params, lora_request=requests, use_tqdm=False))
            assert (ahead.started > 5) == (device == pretend)
            return found

    assert answer(pretend) == answer("cpu")


def test_what_async_scheduling_can_be() -> None:
    with pytest.raises(ValidationError, match=r"^async_scheduling must be None or False or True, got 'yes'"):
        LLM(async_scheduling="yes")  # type: ignore[arg-type]
    with open_llm(async_scheduling=True) as opened:  # of a CPU
        assert not opened.config.scheduler_config.async_scheduling
        assert "CPU" in opened.config.reasons["async_scheduling"]


def test_what_needs_the_tokens_waits_for_them(pretend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(device=pretend) as opened:
        ahead = Ahead(opened, monkeypatch)
        run(opened, PROMPTS[:2], SamplingParams(max_tokens=6, repetition_penalty=1.2, ignore_eos=True))
        assert not ahead.started
        run(opened, PROMPTS[:2], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        assert ahead.started


@pytest.mark.parametrize("defect", ["other positions", "tokens of other rows"])
def test_a_step_of_other_rows_is_seen(
    pretend: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    """The control."""
    row, folder = TINY_MODELS["qwen3"], tiny_checkpoint("qwen3", tmp_path_factory)
    prompts = (make_prompts(row) * 2)[: len(MANY)]
    with open_llm(folder, device=pretend, dtype="float32", skip_tokenizer_init=True, **row.engine) as opened:
        expected = tokens(run(opened, prompts, MANY))
        runner = engine_of(opened).runner
        if defect == "other positions":
            start = runner._start_ahead
            monkeypatch.setattr(runner, "_start_ahead", lambda positions, own: start(positions + 1, own))
            monkeypatch.setattr(
                StepAhead,
                "rows_of",
                lambda self, plan, batch: {
                    batch.index[name]: at
                    for at, name in enumerate(self.request_ids)
                    if name in plan.num_scheduled_tokens
                },
            )
        else:
            monkeypatch.setattr(
                model_runner,
                "in_order",
                lambda parts, upload: (in_order(parts, upload)[0], in_order(parts, upload)[1].flip(0)),
            )
        with contextlib.suppress(IndexError, LLMError, RuntimeError):
            assert tokens(run(opened, prompts, MANY)) != expected


class Measured(PretendPlatform):
    """Of which the tests say how much memory it has and a step needs."""

    name = "measured"
    free, step = 3 << 20, 1 << 20
    tokens: ClassVar[list[int]] = []

    def memory_of(self, call: Callable[[], object]) -> int | None:
        call()
        return self.step

    def memory_total(self) -> int:
        return 50 << 20

    def memory_free(self) -> int:
        return self.free


def test_the_cache_has_what_a_measured_step_leaves(
    pretend: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.platforms, "BUILTIN", (*llm.platforms.BUILTIN, Measured))
    folder, prompts = tiny_checkpoint("qwen3-next", tmp_path_factory), make_prompts(TINY_MODELS["qwen3-next"])
    computed: list[int] = []
    forward = ModelRunner.forward
    monkeypatch.setattr(
        ModelRunner, "forward", lambda self, batch: (computed.append(len(batch.input_ids)), forward(self, batch))[1]
    )
    options: dict[str, Any] = {"device": "measured", "skip_tokenizer_init": True, "max_num_seqs": 3, "block_size": 16}
    with open_llm(folder, **options, max_model_len=200, max_num_batched_tokens=90) as opened:
        assert computed == [90]
        cache, reasons = opened.config.cache_config, opened.config.reasons
        specs = engine_of(opened).runner.plan.kv_cache_specs
        states = sum(spec.bytes_per_request() for spec in specs) * (cache.num_state_slots + cache.num_state_snapshots)
        per_block = 16 * sum(spec.bytes_per_token() for spec in specs)
        assert cache.num_blocks == min(3 * 13, (Measured.free - Measured.step - (1 << 20) - states) // per_block)
        assert cache.kv_cache_memory_bytes == states + cache.num_blocks * per_block
        assert "a step of 90 tokens needs 1048576" in reasons["num_blocks"]
        assert free_blocks(opened) == [cache.num_blocks] * len(free_blocks(opened))
        found = told(run(opened, prompts, GREEDY))[0]
    with open_llm(folder, **{**options, "device": "cpu"}, dtype="float32") as opened:
        assert told(run(opened, prompts, GREEDY))[0] == found
    monkeypatch.setattr(Measured, "step", 2 << 20)
    with pytest.raises(OutOfMemoryError, match=r"max_model_len=200 needs .* a step of 90 tokens leaves 0; lower"):
        open_llm(folder, **options, max_model_len=200, max_num_batched_tokens=90).__enter__()


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


def widened(original: Any) -> Any:
    """Attention whose result is of another type than the activations."""
    return lambda self, query, *rest: original(self, query, *rest).float()


FORGETFUL: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "batch": (Backend, "upload", on_the_cpu),
    "cache": (Backend, "kv_cache", lambda original: lambda self, shape, dtype: torch.zeros(shape, dtype=dtype)),
    "layer": (PagedAttention, "attend", lambda original: lambda self, query, *rest: original(self, query, *rest).cpu()),
    "sampler": (sampler._DeviceStep, "start", mixing),
    "processor": (builtin.MinPLogitsProcessor, "apply", mixing),
    "penalties": (PenaltiesLogitsProcessor, "_tensor", on_the_cpu),
}


@pytest.mark.parametrize("forgetful", FORGETFUL)
def test_a_tensor_without_a_device_is_seen(
    pretend: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, forgetful: str
) -> None:
    owner, name, forget = FORGETFUL[forgetful]
    monkeypatch.setattr(owner, name, forget(getattr(owner, name)))
    with (
        open_llm(tiny_checkpoint("qwen3", tmp_path_factory), device=pretend, skip_tokenizer_init=True) as opened,
        pytest.raises(RuntimeError, match="was given tensors of pretend:0 and of cpu"),
    ):
        run(opened, [[5, 6, 7], [8, 9], [10]], PARAMS[:3])


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


def test_the_device_is_set_waited_for_and_copied_to(
    pretend: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(Backend, "_mark", MARK)
    folder = tiny_checkpoint("qwen3", tmp_path_factory)
    with open_llm(folder, device="asked", skip_tokenizer_init=True, logits_processors=[Told]) as opened:
        assert Asked.calls == [0]
        run(opened, [[5, 6, 7], [8, 9]], SamplingParams(max_tokens=3, ignore_eos=True))
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
