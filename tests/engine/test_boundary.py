"""The runner's boundary: everything that crosses it is plain data, and nothing else is reached through it.

The proof is a runner in another process (`remote_runner`): the metamorphic tests' requests are answered through a pipe
with the bits that the runner of this process gives.
"""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from documented_processors import DummyLogitsProcessor
from embedded import GREEDY, PROMPTS, assert_idle, engine_of, open_llm, run
from remote_runner import METHODS, RemoteRunner, runner_process
from test_metamorphic import EVERYWHERE, PREEMPTED, SETTINGS, Case, check_orders, made_case
from tiny_models import TINY_MODELS, one_thread

from llm import LLM, SamplingParams
from llm.config.compilation import CompilationConfig
from llm.config.engine import LLMArgs
from llm.engine.boundary import Runner
from llm.kernels.select import backend_for
from llm.layers.attention import Attention
from llm.layers.parallel import SINGLE, TensorParallel
from llm.llm import EMBEDDED_MODEL
from llm.platforms import select_platform
from llm.platforms.cpu import CpuPlatform
from llm.runner.model_runner import ModelRunner
from llm.sampling_params import StructuredOutputsParams
from llm.setup.build import make_runner
from llm.setup.model_folder import read_model
from llm.setup.plan import make_plan
from llm.tools.bench.session import profile


def only_token_68(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([68]), 0.0)


def fails(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no luck")


@pytest.fixture(scope="module")
def pipe() -> Iterator[Connection]:
    with runner_process() as connection:
        yield connection


def behind(pipe: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every `LLM` that is opened has its runner in the other process."""
    monkeypatch.setattr("llm.setup.build.make_runner", lambda platform: RemoteRunner(pipe, platform))


# One row for each kind of cache, and packed weights. Not the toys: their classes are made while the tests run, and
# another process cannot import them. That every other row has a plan that crosses is `models/test_models.py`'s.
@pytest.fixture(scope="module", params=["llama", "gemma2", "minicpm3", "lfm2", "llama+w8a8"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    with made_case(request.param, tmp_path_factory) as case, one_thread():
        yield case


def test_the_metamorphic_tests_pass_through_a_pipe(
    case: Case, pipe: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert case.alone and case.state_bytes  # in this process
    behind(pipe, monkeypatch)
    # The first row runs all.
    settings = SETTINGS | PREEMPTED if case.row is TINY_MODELS["llama"] else EVERYWHERE
    for name in settings:
        with case.load(SETTINGS[name]) if name in SETTINGS else case.load_tight(PREEMPTED[name]) as llm:
            runner = engine_of(llm).runner
            check_orders(case, llm, name)
            assert isinstance(runner, RemoteRunner) and runner.messages > len(case.requests)


STRUCTURE = StructuredOutputsParams(regex="[ab]{3}")
REQUESTS: dict[str, tuple[Any, SamplingParams]] = {
    "logprobs": (PROMPTS[0], SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=2, prompt_logprobs=1)),
    "processor": (PROMPTS[1], SamplingParams(temperature=0, max_tokens=4, extra_args={"target_token": 67})),
    "callable": (PROMPTS[1], SamplingParams(temperature=0, max_tokens=4, logits_processors=[only_token_68])),
    "error": (PROMPTS[2], SamplingParams(temperature=0, max_tokens=4, logits_processors=[fails])),
    "penalties": (PROMPTS[2], SamplingParams(temperature=0, max_tokens=6, presence_penalty=1, logit_bias={9: 2.0})),
    "structure": (PROMPTS[0], SamplingParams(seed=5, max_tokens=9, structured_outputs=STRUCTURE)),
}


def answers(llm: LLM) -> list[Any]:
    prompts, params = zip(*REQUESTS.values(), strict=True)
    outputs = run(llm, list(prompts), list(params))
    completions = [output.outputs[0] for output in outputs]
    found = [(item.token_ids, item.text, item.logprobs, item.finish_reason, str(item.error)) for item in completions]
    return [found, outputs[0].prompt_logprobs, completions[-1].structured]


def test_requests_of_every_kind_are_answered_through_a_pipe(pipe: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of all kinds cross it, processors by class and by name, callables, compiled structures, errors."""
    options: dict[str, Any] = {"logits_processors": [DummyLogitsProcessor], "max_num_batched_tokens": 7}
    with open_llm(**options) as llm:
        expected = answers(llm)
    assert expected[0][1][0] == [67] * 4 and expected[0][2][0] == [68] * 4 and "no luck" in expected[0][3][-1]
    behind(pipe, monkeypatch)
    with open_llm(**options) as llm:
        assert answers(llm) == expected
        llm.remove_logits_processor(DummyLogitsProcessor)
        assert answers(llm)[0][1] != expected[0][1]
        llm.add_logits_processor("documented_processors:DummyLogitsProcessor")
        assert answers(llm) == expected
        assert_idle(llm)


def test_questions_are_answered_through_a_pipe(
    pipe: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = ["In the beginning God created the heaven and the earth."]
    options: dict[str, Any] = {"quantization": "w4a16", "calibration": texts}

    def ask(folder: Path) -> list[Any]:
        with open_llm(**options) as llm:
            saved = llm.save_quantized(folder)
            files = {path.name: path.read_bytes() for path in saved.iterdir()}
            report = llm.quantization_report(texts, speed=False)
            runner = engine_of(llm).runner
            config = re.sub("the calibration texts ran .*", "", str(llm.config))  # here layer by layer
            return [str(llm.explain()), report, files, config, list(llm.startup), runner.cost()]

    expected = ask(tmp_path / "here")
    behind(pipe, monkeypatch)
    assert ask(tmp_path / "there") == expected


def test_a_profile_through_a_pipe_adds_up(pipe: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    behind(pipe, monkeypatch)
    with open_llm() as llm:
        found = profile(engine_of(llm), lambda: run(llm, PROMPTS, GREEDY))
    rows = {row.name: row for row in found.rows}
    assert sum(row.seconds for row in found.rows) == pytest.approx(found.seconds, rel=0.02)
    assert all(row.prefill.seconds >= 0 and row.decode.seconds >= 0 for row in found.rows)
    assert rows["attention"].decode.calls and rows["runner"].decode.seconds and rows["sampler"].decode.seconds


def test_the_runner_here_has_every_method_of_the_boundary_and_one_behind_a_pipe_no_other(pipe: Connection) -> None:
    remote = RemoteRunner(pipe, select_platform("cpu")[0])
    for name in METHODS:
        here, asked = (inspect.signature(getattr(kind, name)) for kind in (ModelRunner, Runner))
        assert list(here.parameters) == list(asked.parameters), name
        assert callable(getattr(remote, name))
    for name in ("model", "batch", "processors", "sampler", "platform", "kv_caches"):
        with pytest.raises(AttributeError, match="not of the boundary"):
            getattr(remote, name)


def test_what_cannot_cross_is_told(pipe: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe is a real one: a function without a name does not pass it."""
    behind(pipe, monkeypatch)
    with open_llm() as llm:
        params = SamplingParams(max_tokens=2, logits_processors=[lambda ids, logits: logits])
        with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
            run(llm, PROMPTS[0], params)
        assert_idle(llm)
        assert run(llm, PROMPTS, GREEDY)


def test_a_plan_for_one_rank_of_two_holds_half_of_the_heads(tmp_path: Path) -> None:
    args = LLMArgs(model=EMBEDDED_MODEL, max_model_len=64)
    platform, compilation = CpuPlatform(), CompilationConfig()
    read = read_model(args)
    whole, *halves = (
        make_plan(args, read, platform, compilation, backend_for(platform), (), tp)
        for tp in (SINGLE, TensorParallel(0, 2), TensorParallel(1, 2))
    )
    for half in (pickle.loads(pickle.dumps(plan)) for plan in halves):
        assert [spec.num_kv_heads * 2 for spec in half.kv_cache_specs] == [
            spec.num_kv_heads for spec in whole.kv_cache_specs
        ]
        runner = make_runner(platform)
        runner.tp = TensorParallel(half.rank, half.tp_size)
        runner.load(half)
        attention = [module for module in runner.model.modules() if isinstance(module, Attention)]
        assert [layer.kv_cache_spec(half.config.cache_config.kv_cache_dtype) for layer in attention] == list(
            half.kv_cache_specs
        )
        runner.close()
