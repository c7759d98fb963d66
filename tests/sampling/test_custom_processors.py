"""Custom logits processors end to end: the documented examples unchanged, loaded every way, in batches that churn.

The embedded model answers; what is asserted is what a processor makes of an answer, and that rows which do not use one
answer as if it were not there.
"""

from __future__ import annotations

import pickle
import traceback
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documented_processors import DummyLogitsProcessor, WrappedPerReqLogitsProcessor
from embedded import assert_idle, engine_of, open_llm, run, tokens
from hypothesis import given
from hypothesis import strategies as st
from test_batch_updates import Replay, move_untold, newest_place_first

from llm import LLM, RequestOutput, SamplingParams, ValidationError, plugins
from llm.errors import LLMError, LogitsProcessorError, PluginError, SamplingError
from llm.sampling.logits_processors import EndThinkingLogitsProcessor, NoRepeatNGramLogitsProcessor
from llm.sampling.logits_processors.pipeline import LogitsProcessors
from llm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

TARGET = 67
# So few tokens a step that prompts come in chunks: rows that draw and rows that do not share a step.
SIZES: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 7}
PROMPTS = [[5 + index, 300, 7 * index + 1] for index in range(17)]


def params_of(index: int, **fields: Any) -> SamplingParams:
    """Rows of many lengths, greedy and seeded; every third wants its target token, and nothing else."""
    extra_args = {"target_token": TARGET + index} if index % 3 == 0 else None
    own = {"temperature": index % 2, "seed": index, "extra_args": extra_args, "ignore_eos": True}
    return SamplingParams(**{"max_tokens": 1 + (5 * index) % 8, **own, **fields})


PARAMS = [params_of(index) for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(**SIZES) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    """What the rows answer with no processor loaded."""
    return tokens(run(llm, PROMPTS, PARAMS))


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        shared: LLM = request.getfixturevalue("llm")
        for kind in shared.logits_processors:
            shared.remove_logits_processor(kind)
        assert_idle(shared)


def check_targets(outputs: Sequence[RequestOutput], plain: list[list[int]]) -> None:
    for index, (output, expected) in enumerate(zip(tokens(outputs), plain, strict=True)):
        assert output == ([TARGET + index] * len(expected) if index % 3 == 0 else expected)


def by_entry_point(monkeypatch: pytest.MonkeyPatch, name: str, group: str = "llm.logits_processors") -> None:
    plugin = plugins.Plugin(group, "dummy", "a package", f"documented_processors:{name}")
    monkeypatch.setattr(plugins, "_scan", lambda path: (plugin,))


@pytest.mark.parametrize("kind", [DummyLogitsProcessor, WrappedPerReqLogitsProcessor])
@pytest.mark.parametrize("way", ["class", "module:Class", "entry point", "added"])
def test_the_documented_examples_run_unmodified(
    way: str, kind: type[LogitsProcessor], llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = kind.__qualname__
    if way == "added":
        llm.add_logits_processor(kind)
        check_targets(run(llm, PROMPTS, PARAMS), plain)
        return
    if way == "entry point":
        by_entry_point(monkeypatch, name)
    given = {"class": [kind], "module:Class": [f"documented_processors:{name}"], "entry point": None}[way]
    with open_llm(logits_processors=given, **SIZES) as loaded:
        assert loaded.logits_processors == [kind]
        check_targets(run(loaded, PROMPTS, PARAMS), plain)
        assert_idle(loaded)


class Watcher(LogitsProcessor):
    """Replays every update and, at every `apply`, compares what it knows with what the engine has."""

    engine: Any
    kinds: set[str]

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.scheduler_config.max_num_seqs == SIZES["max_num_seqs"]
        model = vllm_config.model_config
        assert model.get_vocab_size() == model.vocab_size == model.hf_config.vocab_size
        assert model.hf_text_config.vocab_size == model.vocab_size
        assert (vllm_config.speculative_config, vllm_config.lora_config, vllm_config.quant_config) == (None, None, None)
        assert vllm_config.device_config.device == device and vllm_config.device_config.device_type == "cpu"
        parallel = vllm_config.parallel_config
        assert parallel.world_size == parallel.tensor_parallel_size == parallel.pipeline_parallel_size == 1
        assert vllm_config.load_config.load_format == "auto" and vllm_config.additional_config == {}
        assert vllm_config.structured_outputs_config.backend == "guidance"
        assert vllm_config.observability_config.otlp_traces_endpoint is None
        assert not model.is_multimodal_model and model.runner_type == "generate"
        self.replay = Replay()

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.replay.apply(batch_update)
        type(self).kinds |= self.replay.kinds

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        batch, requests = self.engine.runner.batch, self.engine.scheduler.requests
        assert len(logits) == self.replay.size == len(batch.request_ids)
        for row, request_id in enumerate(batch.request_ids):
            params, prompt, output = self.replay.places[row]
            request = requests[request_id]
            assert params is request.params
            assert [*prompt, *output] == request.token_ids
        return logits


@pytest.mark.parametrize("preempting", [False, True])
def test_updates_of_a_whole_run_replay_to_the_true_batch(preempting: bool, plain: list[list[int]]) -> None:
    tight = {}
    if preempting:
        with open_llm(**SIZES) as roomy:
            cache = roomy.config.cache_config
        tight = {"max_model_len": 16, "block_size": 4, "enable_prefix_caching": False}
        tight["kv_cache_memory_bytes"] = cache.kv_cache_memory_bytes // cache.num_blocks // cache.block_size * 20
    with open_llm(logits_processors=[Watcher], **SIZES, **tight) as watched:
        Watcher.engine, Watcher.kinds = engine_of(watched), set()
        outputs = run(watched, PROMPTS, PARAMS)
        assert Watcher.kinds == {"remove", "extend", "replace", "move"}
        assert (Watcher.engine.scheduler.num_preemptions > 0) == preempting
        assert tokens(outputs) == plain
        del Watcher.engine


def lines_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LogitsProcessors.apply

    def planted(self: LogitsProcessors, stage: Any, logits: torch.Tensor, rows: Any, *rest: Any) -> torch.Tensor:
        return original(self, stage, logits, np.roll(rows, 1), *rest)

    monkeypatch.setattr(LogitsProcessors, "apply", planted)


@pytest.mark.parametrize("plant", [move_untold, newest_place_first, lines_of_another_row])
def test_planted_defects_are_seen(
    plant: Any, llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above: a batch that says the wrong thing of its rows changes answers."""
    llm.add_logits_processor(DummyLogitsProcessor)
    with monkeypatch.context() as planted:
        plant(planted)
        with pytest.raises((AssertionError, IndexError, LogitsProcessorError)):
            check_targets(run(llm, PROMPTS, PARAMS), plain)
    engine_of(llm).reset()


def test_a_bad_extra_arg_is_refused_before_any_work(llm: LLM) -> None:
    llm.add_logits_processor(DummyLogitsProcessor)
    bad = SamplingParams(extra_args={"target_token": "x"})
    with pytest.raises(ValidationError, match=r"prompt 1: DummyLogitsProcessor refuses .* target_token value x is not"):
        run(llm, PROMPTS[:3], [SamplingParams(), bad, SamplingParams()])


def test_extra_args_that_nobody_reads_are_told_of(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    run(llm, PROMPTS[:2], SamplingParams(max_tokens=1, extra_args={"target_token": 3}))
    assert [record.getMessage() for record in caplog.records] == [
        "extra_args ['target_token'] are given, and no logits processor is loaded that could read them."
    ]
    caplog.clear()
    llm.add_logits_processor(DummyLogitsProcessor)
    run(llm, PROMPTS[:2], SamplingParams(max_tokens=1, extra_args={"target_token": 3}))
    assert not caplog.records


class NotAProcessor:
    pass


@pytest.mark.parametrize(
    ("given", "message", "is_runtime_error"),
    [
        (["documented_processors"], "'module:Class' strings", False),
        (["a:b:c"], "'module:Class' strings", False),
        (["no_such_module:Class"], "cannot be imported .ModuleNotFoundError", True),
        (["documented_processors:Missing"], "documented_processors has no Missing", False),
        (["documented_processors:DummyLogitsProcessor.apply"], "is function", False),
        (["test_custom_processors:NotAProcessor"], "NotAProcessor is not a subclass of LogitsProcessor", False),
        ([NotAProcessor], "NotAProcessor is not a subclass of LogitsProcessor", False),
        ([5], "a class or a 'module:Class' string", False),
        (DummyLogitsProcessor, "a list of classes", False),
        ("documented_processors:DummyLogitsProcessor", "a list of classes", False),
    ],
)
def test_what_cannot_be_loaded_is_refused(given: Any, message: str, is_runtime_error: bool) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        LLM(logits_processors=given)
    assert caught.value.parameter == "logits_processors"
    assert isinstance(caught.value, RuntimeError) == is_runtime_error


def test_a_module_that_exits_does_not_end_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_that_exits.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValidationError, match="SystemExit: 3"):
        LLM(logits_processors=["module_that_exits:Class"])


def test_a_broken_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = plugins.Plugin("llm.logits_processors", "broken", "a-package 1.0", "no_such_module:Class")
    monkeypatch.setattr(plugins, "_scan", lambda path: (plugin,))
    with pytest.raises(PluginError, match=r"plugin 'broken' of a-package 1\.0 cannot be imported"):
        LLM()


def test_a_plugin_that_is_no_processor_is_named_or_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = plugins.Plugin("llm.logits_processors", "broken", "a-package 1.0", f"{__name__}:NotAProcessor")
    monkeypatch.setattr(plugins, "_scan", lambda path: (plugin,))
    with pytest.raises(PluginError, match=r"plugin 'broken' of a-package 1\.0 .*NotAProcessor is not a subclass"):
        LLM()
    monkeypatch.setenv("LLM_PLUGIN_ERRORS", "warn")
    with caplog.at_level("WARNING", logger="llm"), open_llm(**SIZES) as llm:
        assert llm.logits_processors == []
    assert any("NotAProcessor is not a subclass" in record.getMessage() for record in caplog.records)


def define(code: int) -> type[LogitsProcessor]:
    """A class as a notebook cell defines it, again and again under one name."""

    class Cell(DummyLogitsProcessor):
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            logits[:, code] = 1000.0
            return logits

    return Cell


def test_a_class_can_be_redefined_and_tried_again_on_the_loaded_model(llm: LLM, plain: list[list[int]]) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=2)
    for code in (100, 200):
        llm.add_logits_processor(define(code))
        assert len(llm.logits_processors) == 1
        assert tokens(run(llm, PROMPTS[:2], greedy)) == [[code, code]] * 2
    llm.remove_logits_processor(f"{__name__}:define.<locals>.Cell")
    assert tokens(run(llm, PROMPTS, PARAMS)) == plain
    with pytest.raises(ValidationError, match="is not loaded; loaded are: none"):
        llm.remove_logits_processor(DummyLogitsProcessor)


class Unmakeable(DummyLogitsProcessor):
    def __init__(self, *args: Any) -> None:
        raise OSError("no table")


def test_a_processor_that_cannot_be_made_leaves_the_others_in_place(llm: LLM, plain: list[list[int]]) -> None:
    llm.add_logits_processor(DummyLogitsProcessor)
    with pytest.raises(OSError, match="no table"):
        llm.add_logits_processor(Unmakeable)
    assert llm.logits_processors == [DummyLogitsProcessor]
    check_targets(run(llm, PROMPTS, PARAMS), plain)


def test_a_suspended_stream_goes_on_under_the_new_processor(llm: LLM) -> None:
    stream = llm.stream_state(PROMPTS[0], params_of(0, max_tokens=9, temperature=0, extra_args={"target_token": 300}))
    state = next(stream)
    before = len(state.completions[0].request.output_token_ids)
    llm.add_logits_processor(DummyLogitsProcessor)
    assert [item.finished for item in stream][-1]
    output = state.completions[0].request.output_token_ids
    assert len(output) == 9 and 0 < before < 9
    assert set(output[before:]) == {300} and 300 not in output[:before]


def force(token: int) -> Any:
    def processor(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -torch.inf)
        forced[token] = 0.0
        return forced

    return processor


def count_up(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return force(sum(prompt_ids) + len(output_ids))(output_ids, logits)


def fails_at_three(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output_ids) == 3:
        raise KeyError("my table")
    return logits


def with_own(processors: dict[int, Any]) -> list[SamplingParams]:
    return [params_of(index, logits_processors=processors.get(index)) for index in range(len(PROMPTS))]


def test_requests_bring_their_own_processors(llm: LLM, plain: list[list[int]]) -> None:
    """Two arguments, three, several in a row; more rows than the batch holds, and none sees another's."""
    own = {1: [force(40)], 3: [count_up], 5: [force(40), lambda out, logits: logits.roll(1)], 10: [force(50)]}
    outputs = tokens(run(llm, PROMPTS, with_own(own)))
    assert outputs[1] == [40] * len(plain[1])
    assert outputs[3] == [sum(PROMPTS[3]) + step for step in range(len(plain[3]))]
    assert outputs[5] == [41] * len(plain[5])
    assert outputs[10] == [50] * len(plain[10])
    assert [outputs[row] for row in range(len(plain)) if row not in own] == [
        plain[row] for row in range(len(plain)) if row not in own
    ]


def test_hugging_face_processors_run_as_request_processors(llm: LLM) -> None:
    transformers = pytest.importorskip("transformers")
    prompt, greedy = [300, 301, 302, 300], {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    theirs = transformers.LogitsProcessorList([transformers.NoRepeatNGramLogitsProcessor(1)])
    [bare, with_list] = [
        run(llm, prompt, SamplingParams(logits_processors=own, **greedy))[0].outputs[0].token_ids
        for own in (list(theirs), [theirs])
    ]
    llm.add_logits_processor(NoRepeatNGramLogitsProcessor)
    ours = run(llm, prompt, SamplingParams(extra_args={"no_repeat_ngram_size": 1}, **greedy))[0].outputs[0].token_ids
    assert bare == with_list == ours != run(llm, prompt, SamplingParams(**greedy))[0].outputs[0].token_ids
    assert len(set(ours)) == len(ours) and not set(ours) & set(prompt)


N_GRAM_ROWS = st.lists(
    st.tuples(st.integers(1, 4), *(st.lists(st.integers(0, 3), max_size=9) for _ in range(3))), min_size=1, max_size=4
)


@given(rows=N_GRAM_ROWS)
def test_repeated_n_grams_are_those_of_transformers(rows: list[tuple[int, list[int], list[int], list[int]]]) -> None:
    """Rows of several sizes in one batch; the outputs grow between two calls."""
    transformers = pytest.importorskip("transformers")
    ours: Any = NoRepeatNGramLogitsProcessor(None, torch.device("cpu"), False)  # type: ignore[arg-type]
    outputs = [list(output) for _, _, output, _ in rows]
    added = [
        (index, SamplingParams(extra_args={"no_repeat_ngram_size": size}), prompt, outputs[index])
        for index, (size, prompt, _, _) in enumerate(rows)
    ]
    ours.update_state(BatchUpdate(len(rows), [], added, []))
    for _ in range(2):
        found = ours.apply(torch.zeros(len(rows), 4))
        for index, (size, prompt, _, more) in enumerate(rows):
            ids = torch.tensor([[*prompt, *outputs[index]]], dtype=torch.long)
            theirs = transformers.NoRepeatNGramLogitsProcessor(size)(ids, torch.zeros(1, 4))
            assert torch.equal(found[index], theirs[0])
            outputs[index] += more


def test_a_requests_processor_sees_logits_before_penalties(llm: LLM) -> None:
    """vLLM's order: whatever it makes of them, penalties come last."""
    seen: list[torch.Tensor] = []

    def look(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())
        return logits.fill_(0.0).index_fill_(0, torch.tensor([300, 40]), 1.0)

    prompt = [300, 301, 302]
    for penalty in (1.0, 5.0):
        params = SamplingParams(temperature=0, max_tokens=1, repetition_penalty=penalty, logits_processors=[look])
        assert tokens(run(llm, prompt, params)) == [[40]]
    assert torch.equal(seen[0], seen[1])
    forced = [lambda output_ids, logits: logits.fill_(0.0).index_fill_(0, torch.tensor([300]), 1.0)]
    barred = SamplingParams(temperature=0, max_tokens=2, logits_processors=forced, presence_penalty=2.0)
    assert tokens(run(llm, prompt, [barred]))[0] == [300, 0]


def test_an_error_of_a_requests_processor_ends_that_request_alone(
    llm: LLM, plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    row = max(range(len(plain)), key=lambda index: len(plain[index]))
    assert len(plain[row]) > 3
    outputs = run(llm, PROMPTS, with_own({row: [fails_at_three]}))
    failed = outputs[row].outputs[0]
    assert (failed.finish_reason, failed.stop_reason, failed.token_ids) == ("error", None, plain[row][:3])
    assert outputs[row].finished and failed.text == engine_of(llm).tokenizer.decode_continuation(
        PROMPTS[row], plain[row][:3], True
    )
    assert isinstance(failed.error, KeyError) and failed.error.args == ("my table",)
    shown = "".join(traceback.format_exception(failed.error))
    assert 'raise KeyError("my table")' in shown and "fails_at_three" in shown
    assert failed.error.__traceback__ is None
    others = [index for index in range(len(plain)) if index != row]
    assert [tokens(outputs)[index] for index in others] == [plain[index] for index in others]
    assert all(outputs[index].outputs[0].error is None for index in others)
    assert "1 completion ended with finish_reason='error'; the first with KeyError" in caplog.text
    assert pickle.loads(pickle.dumps(outputs))[row].outputs[0].finish_reason == "error"


def test_a_stream_raises_what_ended_it(llm: LLM) -> None:
    pieces = []
    with pytest.raises(KeyError, match="my table"):
        for piece in llm.stream(PROMPTS[3], SamplingParams(logits_processors=[fails_at_three], temperature=0)):
            pieces.append(piece)
    assert "".join(pieces) == run(llm, PROMPTS[3], SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].text


def test_an_error_keeps_no_tensor_alive(llm: LLM) -> None:
    seen: list[Any] = []

    def fails(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        local = torch.zeros(3)
        seen.append(weakref.ref(local))
        raise ValueError("x")

    output = run(llm, PROMPTS[0], SamplingParams(logits_processors=[fails]))[0].outputs[0]
    assert isinstance(output.error, ValueError) and seen[0]() is None


def test_an_adapters_error_ends_that_row_alone(llm: LLM, plain: list[list[int]]) -> None:
    llm.add_logits_processor(WrappedPerReqLogitsProcessor)
    beyond = [*PARAMS]
    beyond[4] = params_of(4, extra_args={"target_token": 10**6})  # IndexError in the callable
    outputs = run(llm, PROMPTS, beyond)
    assert (outputs[4].outputs[0].finish_reason, outputs[4].outputs[0].token_ids) == ("error", [])
    assert isinstance(outputs[4].outputs[0].error, IndexError)
    check_targets(outputs, [*plain[:4], [], *plain[5:]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_no_token_is_left_to_ends_with_an_error(
    temperature: float, llm: LLM, plain: list[list[int]]
) -> None:
    barred = params_of(2, temperature=temperature, allowed_token_ids=[9], logit_bias={9: -torch.inf}, logprobs=1)
    outputs = run(llm, PROMPTS[:4], [PARAMS[0], PARAMS[1], barred, PARAMS[3]])
    failed = outputs[2].outputs[0]
    assert (failed.finish_reason, failed.token_ids, failed.logprobs) == ("error", [], [])
    assert isinstance(failed.error, SamplingError) and "no token is left" in str(failed.error)
    assert [tokens(outputs)[index] for index in (0, 1, 3)] == [plain[index] for index in (0, 1, 3)]


class Nan(DummyLogitsProcessor):
    """NaN in the rows of a target; the rows that it may end by itself."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.row_errors: dict[int, Exception] = {}

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, target in self.req_info.items():
            if target == 1:
                logits[row, 5] = torch.nan
            else:
                self.row_errors[row] = LLMError("ended by the processor")
        return logits


def test_nan_and_rows_that_a_batch_level_processor_ends(llm: LLM, plain: list[list[int]]) -> None:
    llm.add_logits_processor(Nan)
    chosen = {1: 1, 2: 2}
    own = [params_of(row, extra_args=(row in chosen and {"target_token": chosen[row]}) or None) for row in range(4)]
    outputs = [output.outputs[0] for output in run(llm, PROMPTS[:4], own)]
    assert [output.finish_reason for output in outputs] == ["length", "error", "error", "length"]
    assert "NaN" in str(outputs[1].error) and str(outputs[2].error) == "ended by the processor"


class Raises(DummyLogitsProcessor):
    where = ""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.where == "apply":
            raise ZeroDivisionError
        return logits[:, :3] if self.where == "shape" else logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if self.where == "update_state":
            raise ZeroDivisionError


@pytest.mark.parametrize("where", ["apply", "update_state", "shape"])
def test_an_error_that_belongs_to_no_row_fails_the_call_and_not_the_engine(
    where: str, llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.add_logits_processor(Raises)
    monkeypatch.setattr(Raises, "where", where)
    with pytest.raises(LogitsProcessorError, match="Raises") as caught:
        run(llm, PROMPTS, PARAMS)
    assert isinstance(caught.value.__cause__, ZeroDivisionError) == (where != "shape")
    llm.remove_logits_processor(Raises)
    assert tokens(run(llm, PROMPTS, PARAMS)) == plain


class Invariant(DummyLogitsProcessor):
    """Says it never changes the argmax."""

    applied = 0
    asked = 0

    def is_argmax_invariant(self) -> bool:
        type(self).asked += 1
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        type(self).applied += 1
        return logits


def test_an_argmax_invariant_processor_is_asked_once_and_skipped_when_all_rows_are_greedy(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Invariant, "applied", 0)
    monkeypatch.setattr(Invariant, "asked", 0)
    llm.add_logits_processor(Invariant)
    run(llm, PROMPTS[:3], SamplingParams(temperature=0, max_tokens=4))
    assert (Invariant.asked, Invariant.applied) == (1, 0)
    run(llm, PROMPTS[:2], [SamplingParams(temperature=0, max_tokens=4), SamplingParams(max_tokens=4, ignore_eos=True)])
    assert (Invariant.asked, Invariant.applied) == (1, 4)


def test_the_end_of_thinking_is_forced_once_the_budget_is_used(llm: LLM) -> None:
    llm.add_logits_processor(EndThinkingLogitsProcessor)
    end = [400, 401, 400, 402]
    extra_args = {"max_thinking_tokens": 3, "end_thinking_token_ids": end}
    greedy = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
    [free, kept, early] = run(
        llm,
        [PROMPTS[0]] * 3,
        [
            SamplingParams(**greedy),
            SamplingParams(extra_args=extra_args, **greedy),
            # It ends by itself, at once.
            SamplingParams(extra_args=extra_args, logits_processors=[count_to(end)], **greedy),
        ],
    )
    output = kept.outputs[0].token_ids
    assert output[:3] == free.outputs[0].token_ids[:3] and output[3:7] == end
    assert early.outputs[0].token_ids[:4] == end and end not in [early.outputs[0].token_ids[4:8]]
    for bad in ({"max_thinking_tokens": 3}, {"max_thinking_tokens": -1, "end_thinking_token_ids": end}):
        with pytest.raises(ValidationError, match="extra_args"):
            run(llm, PROMPTS[0], SamplingParams(extra_args=bad))


def count_to(ids: list[int]) -> Any:
    def processor(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return force(ids[len(output_ids)])(output_ids, logits) if len(output_ids) < len(ids) else logits

    return processor


@pytest.mark.parametrize("processor", [lambda logits: logits, lambda a, b, c, d: d, "".join], ids=["1", "4", "C"])
def test_a_callable_of_the_wrong_arity_is_refused(processor: Any, llm: LLM) -> None:
    with pytest.raises(ValidationError, match="logits_processors must be callables of") as caught:
        run(llm, PROMPTS[0], SamplingParams(logits_processors=[processor]))
    assert caught.value.parameter == "logits_processors"


def test_the_paths_of_vllm_lead_to_the_same_names() -> None:
    from llm.logger import init_logger
    from llm.v1.sample.logits_processor.builtin import process_dict_updates
    from llm.v1.sample.logits_processor.interface import LogitsProcessor as Same
    from llm.v1.sample.logits_processor.state import BatchUpdateBuilder

    assert Same is LogitsProcessor and callable(process_dict_updates) and BatchUpdateBuilder().reset() is False
    assert init_logger("llm.mine").name == "llm.mine"


class NeedsTarget(DummyLogitsProcessor):
    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        params.extra_args["target_token"]


@pytest.mark.parametrize("extra_args, said", [({}, "KeyError: 'target_token'"), (None, "TypeError: ")])
def test_whatever_validate_params_raises_is_told_of_its_rows(extra_args: Any, said: str) -> None:
    with open_llm(logits_processors=[NeedsTarget], **SIZES) as llm:
        good, bad = SamplingParams(max_tokens=2, extra_args={"target_token": 9}), SamplingParams(extra_args=extra_args)
        with pytest.raises(
            ValidationError, match=f"^prompt 1: NeedsTarget refuses the sampling params: {said}"
        ) as caught:
            run(llm, PROMPTS[:2], [good, bad])
        assert isinstance(caught.value.__cause__.__cause__, KeyError | TypeError)
        assert_idle(llm)
        check = run(llm, PROMPTS[:1], good)[0].outputs[0]
        assert check.token_ids == [9, 9]
