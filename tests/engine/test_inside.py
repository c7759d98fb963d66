"""What a row reads and changes inside the model depends on its request alone, and its neighbours keep their bits.

The requests of `test_metamorphic.Case`, of which some have captures and interventions, are answered once each by
themselves and then in batches, in chunks, with prefix hits, preempted and with drafts: tokens, logprobs and activations
are the same bits. Defects planted by hand are in `tests/mutations/inside.mutants`.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from embedded import engine_of
from test_metamorphic import TOLERANCE, Case, Request, assert_same, generate
from test_speculation import ngrams
from tiny_models import TINY_MODELS, make_prompts, one_thread, tiny_checkpoint

from llm import LLM, AsyncLLM, Capture, Intervention, RequestOutput, SamplingParams, ValidationError
from llm.inside.intervention import Place

ROWS = ("llama", "mixtral", "falcon-h1")
SETTINGS: dict[str, Mapping[str, Any]] = {
    "one batch, prefix hits": {},
    "chunks": {"max_num_batched_tokens": 3, "block_size": 1},
    "preempted": {"block_size": 4, "tight": True},
    "drafts": {"drafts": True},
}


def vector(llm: LLM, site: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(llm.sites()[site].shape, generator=torch.Generator().manual_seed(seed))


def twisted(x: torch.Tensor, place: Place) -> torch.Tensor:
    """Depends on everything that a function is given."""
    return x * (1 + 0.1 * (place.position % 3)) + 0.01 * place.token_id * x.roll(1) + x.sum() * 1e-3


def extra_args(llm: LLM, index: int) -> dict[str, object] | None:
    """Of the request with this index; two thirds of them have something."""
    mlp, stream = "layers.0.mlp.output", "layers.1.output"
    return (
        None,
        {"capture": Capture(["layers.*.output", "norm.output", "logits"], positions="all")},
        {"interventions": [Intervention.add(stream, vector(llm, stream)), Intervention.scale(mlp, 0.5)]},
        None,
        {
            "capture": [Capture(stream, positions=[0, -1]), Capture("layers.0.middle", positions="generated")],
            "interventions": Intervention.function("layers.0.output", twisted, positions="generated"),
        },
        {
            "capture": Capture(["layers.1.input", mlp], positions=lambda at, prompt: at % 2 == 0, dtype="float16"),
            "interventions": [
                Intervention.project_out("layers.0.middle", vector(llm, "layers.0.middle")),
                Intervention.zero_head(1, 0),
                Intervention.replace("layers.0.attention.output", vector(llm, mlp, 1), positions=slice(-3, None)),
            ],
        },
    )[index % 6]


def random_args(llm: LLM, draw: random.Random) -> dict[str, object]:
    """Captures and interventions anywhere, at any positions."""

    def positions() -> Any:
        words: list[Any] = ["last", "prompt", "generated", "all", [0, -1], slice(1, None, 2), slice(-3, None)]
        return draw.choice([*words, lambda at, prompt: at % 3 == 1])

    def change(site: str) -> Intervention:
        other = vector(llm, site, draw.randrange(99))
        return draw.choice(
            [
                lambda: Intervention.add(site, other, 0.3, positions()),
                lambda: Intervention.scale(site, draw.uniform(0.3, 1.2), positions()),
                lambda: Intervention.project_out(site, other, positions()),
                lambda: Intervention.replace(site, other, positions()),
                lambda: Intervention.function(site, lambda x, place: x * (1 + 0.1 * (place.position % 3)), positions()),
            ]
        )()

    sites = llm.sites()
    read = draw.sample(list(sites), 4)
    changed = draw.choices([name for name, site in sites.items() if site.can_change], k=draw.randrange(3))
    return {
        "capture": [Capture(name, positions(), draw.choice(["float32", "float16"])) for name in read],
        "interventions": [change(name) for name in changed],
    }


class InsideCase:
    """A row of the table, its requests, and what they give alone."""

    def __init__(self, case: Case) -> None:
        self.case = case
        with case.load({"enable_prefix_caching": False}) as llm:
            self.requests: list[Request] = [
                (prompt, replace(params, extra_args=extra_args(llm, index)))
                for index, (prompt, params) in enumerate(case.requests)
            ]
            draw = random.Random(7)
            self.requests += [
                (prompt, replace(params, extra_args=random_args(llm, draw))) for prompt, params in case.requests[:5]
            ]
            self.alone = [generate(llm, [request])[0] for request in self.requests]

    def load(self, setting: Mapping[str, Any]) -> LLM:
        given = {key: value for key, value in setting.items() if key not in ("tight", "drafts")}
        return self.case.load_tight(given) if setting.get("tight") else self.case.load(given)


@pytest.fixture(scope="module", params=ROWS)
def inside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InsideCase]:
    with one_thread():
        yield InsideCase(Case(TINY_MODELS[request.param], tiny_checkpoint(request.param, tmp_path_factory)))


def assert_same_inside(expected: RequestOutput, actual: RequestOutput) -> None:
    for ours, theirs in zip(actual.outputs, expected.outputs, strict=True):
        assert_same(theirs, ours)
        assert (ours.activations is None) == (theirs.activations is None)
        for name, array in (theirs.activations or {}).items():
            found = ours.activations
            assert found is not None and theirs.activations is not None
            assert found.positions[name].tolist() == theirs.activations.positions[name].tolist()
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
            values = array.astype(np.float64)
            # Of the largest value; and where TOLERANCE is not 0, the last bit of a float16 may be another.
            bound = TOLERANCE * max(1.0, np.abs(values).max(initial=0))
            step = np.finfo(array.dtype).eps * np.abs(values) if TOLERANCE else 0.0
            assert (np.abs(found[name].astype(np.float64) - values) <= bound + step).all()


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_depend_on_themselves(inside: InsideCase, name: str) -> None:
    with inside.load(SETTINGS[name]) as llm:
        engine = engine_of(llm)
        if SETTINGS[name].get("drafts"):
            engine.runner.proposer = ngrams()
        for order in (range(len(inside.requests)), reversed(range(len(inside.requests)))):
            indices = list(order)
            outputs = generate(llm, [inside.requests[index] for index in indices])
            for index, output in zip(indices, outputs, strict=True):
                assert_same_inside(inside.alone[index], output)
        if SETTINGS[name].get("drafts"):
            assert engine.stats.drafted_tokens > 0
        assert (engine.scheduler.num_preemptions > 0) == bool(SETTINGS[name].get("tight"))


def test_every_position_is_there(inside: InsideCase) -> None:
    output = inside.alone[1]
    count = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
    assert output.activations is not None
    for name, array in output.activations.items():
        assert output.activations.positions[name].tolist() == list(range(count)), name
        assert len(array) == count and np.isfinite(array).all()
    tokens = output.activations["logits"].argmax(-1)[len(output.prompt_token_ids) - 1 :]
    assert tokens.tolist() == output.outputs[0].token_ids


def test_neighbours_are_those_of_a_plain_call(inside: InsideCase) -> None:
    """Rows with captures alone, and rows without anything, answer as they do where nobody looks inside."""
    for index, (args, plain) in enumerate(zip(inside.requests, inside.case.alone, strict=False)):
        asked = args[1].extra_args or {}
        if not asked.get("interventions"):
            for ours, expected in zip(inside.alone[index].outputs, plain.outputs, strict=True):
                assert_same(expected, ours)


def test_interventions_change_answers(inside: InsideCase) -> None:
    changed = [
        index
        for index, (_, params) in enumerate(inside.requests[: len(inside.case.requests)])
        if "interventions" in (params.extra_args or {})
    ]
    tables = [
        (
            [list(position.values()) for position in answer.outputs[0].logprobs or []]
            for answer in (inside.alone[index], inside.case.alone[index])
        )
        for index in changed
    ]
    assert len(changed) >= 3 and all(ours != plain for ours, plain in tables)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny_checkpoint("llama", tmp_path_factory)
    with one_thread(), LLM(folder, skip_tokenizer_init=True, kv_cache_dtype="float32") as llm:
        yield llm


PROMPT = make_prompts(TINY_MODELS["llama"])[4]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)


def test_a_prompt_in_the_cache_is_captured_whole(llama: LLM) -> None:
    for _ in range(2):
        (output,) = llama.generate([PROMPT], PARAMS, capture=Capture("layers.0.input", "prompt"), use_tqdm=False)
        assert output.num_cached_tokens == 0
        assert output.activations is not None and len(output.activations["layers.0.input"]) == len(PROMPT)
    (plain,) = llama.generate([PROMPT], PARAMS, use_tqdm=False)
    assert plain.num_cached_tokens > 0  # what a row with a capture computes, others may use


def test_what_an_intervention_wrote_no_other_row_reads(llama: LLM) -> None:
    llama.reset_prefix_cache()
    (before,) = llama.generate([PROMPT], PARAMS, use_tqdm=False)
    llama.reset_prefix_cache()
    change = Intervention.scale("layers.0.mlp.output", 0)
    llama.generate([PROMPT], PARAMS, interventions=change, use_tqdm=False)
    (after,) = llama.generate([PROMPT], PARAMS, use_tqdm=False)
    assert after.num_cached_tokens == 0
    assert_same(before.outputs[0], after.outputs[0])


def test_patching_everything_gives_the_other_answer(llama: LLM) -> None:
    """The activations of another prompt in the place of one's own make its answer."""
    other = [*reversed(PROMPT)]
    site = "layers.2.output"
    (source,) = llama.generate([other], PARAMS, capture=Capture(site, "prompt"), use_tqdm=False)
    patch = Intervention.replace(site, source.activations[site], positions="prompt")
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
    (patched,) = llama.generate([PROMPT], one, interventions=patch, use_tqdm=False)
    (expected,) = llama.generate([other], one, use_tqdm=False)
    assert patched.outputs[0].token_ids == expected.outputs[0].token_ids
    assert patched.outputs[0].logprobs == expected.outputs[0].logprobs


def test_a_capture_sees_what_interventions_leave(llama: LLM) -> None:
    site, capture = "layers.1.output", Capture(["layers.1.output", "layers.2.input"], [1, 5])
    added = vector(llama, site)
    change = [Intervention.add(site, added), Intervention.scale(site, 2.0, positions=[5])]
    (plain,) = llama.generate([PROMPT], PARAMS, capture=capture, use_tqdm=False)
    (changed,) = llama.generate([PROMPT], PARAMS, capture=capture, interventions=change, use_tqdm=False)
    expected = (plain.activations[site] + added.numpy()) * np.array([[1.0], [2.0]], dtype=np.float32)
    assert np.array_equal(changed.activations[site], expected)
    assert np.array_equal(changed.activations["layers.2.input"], expected)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("last", [39]),
        ("prompt", range(40)),
        ("generated", [40, 41, 42]),
        ("all", range(43)),
        ([3, -1, 0], [0, 3, 39]),
        (slice(-2, None), [38, 39]),
        (7, [7]),
        (lambda at, prompt: at >= prompt - 1 and at % 2 == 1, [39, 41]),
    ],
)
def test_positions(llama: LLM, positions: Any, expected: Any) -> None:
    seen: list[tuple[int, int]] = []

    def function(x: torch.Tensor, place: Place) -> torch.Tensor:
        seen.append((place.position, place.token_id))
        return x

    site, change = "layers.0.output", Intervention.function("layers.0.output", function, positions=positions)
    capture = Capture(site, positions)
    (output,) = llama.generate([PROMPT], PARAMS, capture=capture, interventions=change, use_tqdm=False)
    assert output.activations.positions[site].tolist() == list(expected)
    tokens = [*PROMPT, *output.outputs[0].token_ids]
    assert seen == [(place, tokens[place]) for place in expected]


def test_steps_of_plain_rows_stay_recorded(llama: LLM) -> None:
    recorded = engine_of(llama).runner.recorded
    llama.generate([PROMPT], replace(PARAMS, max_tokens=8), use_tqdm=False)
    if recorded is None or not recorded._steps:
        pytest.skip("nothing is recorded here")
    steps = {key: id(step) for key, step in recorded._steps.items()}
    llama.generate([PROMPT], PARAMS, capture="layers.0.output", use_tqdm=False)
    looks = recorded._is_watched._looks_left
    llama.generate([PROMPT], replace(PARAMS, max_tokens=8), use_tqdm=False)
    assert recorded._is_watched._looks_left == looks == 0
    assert {key: id(step) for key, step in recorded._steps.items()} == steps


@pytest.mark.parametrize("name", ["llama", "gemma3n", "deepseek-v2"])
def test_layers_of_which_nothing_is_asked_are_replayed(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where something is looked at inside of a layer it is computed, all others are not, and no bit changes."""
    row = TINY_MODELS[name]
    prompts = make_prompts(row)[3:6]
    with one_thread(), LLM(tiny_checkpoint(name, tmp_path_factory), skip_tokenizer_init=True, **row.engine) as llm:
        runner: Any = engine_of(llm).runner
        if runner.recorded is None:
            pytest.skip("nothing is recorded here")
        asked: list[dict[str, Any]] = [
            {"capture": Capture(["layers.*.output", "layers.0.input"], positions="all")},
            {"capture": Capture("layers.1.attention.output", positions="all")},
            {"interventions": Intervention.scale(["layers.1.input", "layers.0.output"], 0.9, positions="generated")},
            {"capture": Capture("logits", "all"), "interventions": Intervention.scale("layers.1.mlp.output", 0.5)},
            {"interventions": Intervention.add("norm.output", vector(llm, "norm.output"))},
        ]
        replayed: list[Any] = []
        computed: list[int] = []
        layers = {layer: index for index, layer in enumerate(runner.model.model.layers)}

        def answers() -> list[RequestOutput]:
            llm.reset_prefix_cache()
            return [output for more in asked for output in llm.generate(prompts, PARAMS, **more, use_tqdm=False)]

        kept, runner.recorded = runner.recorded, None
        expected = answers()
        runner.recorded = kept
        for _ in range(2):
            for ours, theirs in zip(answers(), expected, strict=True):
                assert_same_inside(theirs, ours)
        assert runner.recorded.refusal is None and runner.recorded._any_size and runner.recorded._steps
        run, run_part = runner.recorded.run, runner.recorded._run_part

        def noted(batch: Any) -> Any:
            replayed.append(found := run(batch))
            return found

        def noted_part(recording: Any, module: Any, batch: Any, tokens: int, replays: bool) -> None:
            computed.extend([] if replays else [layers[module]])
            run_part(recording, module, batch, tokens, replays)

        runner.recorded.run, runner.recorded._run_part = noted, noted_part
        answers()
        assert set(computed) == {1}
        assert len(replayed) >= 20 and all(found is not None for found in replayed)


def test_every_call_takes_them(llama: LLM) -> None:
    """Flows, streams and requests of asyncio give the activations and answers of `generate`."""
    site, prompts = "layers.1.output", [PROMPT, PROMPT[::-1]]
    given: dict[str, Any] = {
        "capture": Capture(site, "all"),
        "interventions": Intervention.scale("layers.0.mlp.output", 0.5),
    }
    expected = llama.generate(prompts, PARAMS, **given, use_tqdm=False)
    (plain,) = llama.generate([PROMPT], PARAMS, use_tqdm=False)
    assert plain.outputs[0].logprobs != expected[0].outputs[0].logprobs
    for params in (PARAMS, iter([PARAMS, PARAMS])):
        found = list(llama.generate_iter(iter(prompts), params, **given, ordered=True))
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_inside(theirs, ours)

    async def ask() -> list[RequestOutput]:
        async with contextlib.aclosing(AsyncLLM(llama).generate(PROMPT, PARAMS, **given)) as outputs:
            return [output async for output in outputs]

    *others, last = asyncio.run(ask())
    assert_same_inside(expected[0], last)
    assert others and all(output.activations is None for output in others)
    with pytest.raises(TypeError, match="pieces of text have no activations; call stream_state or generate_iter"):
        llama.stream(PROMPT, PARAMS, capture=site)  # type: ignore[call-arg]


def test_text_is_steered_while_it_streams() -> None:
    with LLM() as llm:
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
        change = Intervention.add("layers.1.output", vector(llm, "layers.1.output"), 40.0)
        expected, plain = (llm.generate("And God", params, interventions=own, use_tqdm=False) for own in (change, None))
        assert expected[0].outputs[0].text != plain[0].outputs[0].text
        assert "".join(llm.stream("And God", params, interventions=change)) == expected[0].outputs[0].text
        *_, state = llm.stream_state("And God", params, interventions=change, capture="norm.output")
        (captured,) = llm.generate("And God", params, interventions=change, capture="norm.output", use_tqdm=False)
        assert_same_inside(captured, state.output())
        talk = [{"role": "user", "content": "And God"}]
        stream = llm.stream_chat(talk, params, interventions=change, capture="norm.output")
        (whole,) = llm.chat(talk, params, interventions=change, capture="norm.output", use_tqdm=False)
        assert "".join(stream) == whole.outputs[0].text
        assert np.array_equal(stream.output.activations["norm.output"], whole.activations["norm.output"])


def test_outputs_are_plain_data(llama: LLM) -> None:
    (output,) = llama.generate([PROMPT], PARAMS, capture=Capture("layers.*.output", "last"), use_tqdm=False)
    crossed = pickle.loads(pickle.dumps(output))
    assert crossed == output and crossed.activations.keys() == output.activations.keys()
    assert crossed.activations.positions.keys() == output.activations.positions.keys()
    assert np.array_equal(output.activations["blocks.1.hook_resid_post"], output.activations["layers.1.output"])
    with pytest.raises(KeyError, match=r"layers\.9\.output; captured are: layers\.0\.output"):
        output.activations["layers.9.output"]
    assert "activations" not in output.to_dict()["outputs"][0]


def wrong_width() -> Intervention:
    return Intervention.add("layers.0.output", [1.0, 2.0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"capture": "layers.0.outputs"}, "no site 'layers.0.outputs'. Did you mean 'layers.0.output'"),
        ({"capture": Capture("layers.0.output", [99])}, "positions must be numbers from -40 to 39"),
        ({"capture": ["layers.0.output", "layers.*.output"]}, "layers.0.output is captured twice"),
        ({"capture": 3}, "capture must be a Capture"),
        ({"capture": "logits", "checkpoint": "kept.jsonl"}, "checkpoint must be None with captures"),
        (
            {"capture": Capture("logits", "all", limit_bytes=10)},
            "of this prompt may take 44,204 bytes, and limit_bytes is 10",
        ),
        ({"interventions": "layers.0.output"}, "interventions must be an Intervention"),
        ({"interventions": wrong_width}, "vector must be of the shape of layers.0.output, [48]"),
        ({"interventions": lambda: Intervention.scale("logits", 2)}, "logits can be captured and not changed"),
        ({"interventions": lambda: Intervention.zero_head(0, 6)}, "head must be an integer from 0 to 5"),
        (
            {"interventions": lambda: Intervention.replace("layers.0.output", torch.zeros(3, 48), [1, 2])},
            "values must be of one row, or of 2",
        ),
        (
            {"interventions": lambda: Intervention.function("layers.0.output", lambda x, place: x[:3])},
            r"must return a tensor of shape [48], got [3]",
        ),
    ],
)
def test_mistakes_are_told(llama: LLM, arguments: dict[str, Any], said: str) -> None:
    given = {key: value() if callable(value) else value for key, value in arguments.items()}
    with pytest.raises(ValidationError) as error:
        llama.generate([PROMPT], PARAMS, **given, use_tqdm=False)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Capture([]), "sites must be the name of a site"),
        (lambda: Capture("logits", "first"), "positions must be 'last'"),
        (lambda: Capture("logits", dtype="bfloat16"), "dtype must be 'float32' or 'float16'"),
        (lambda: Intervention.add("logits", ["a"]), "vector must be numbers"),
        (lambda: Intervention.project_out("logits", [0.0, 0.0]), "direction must be a vector that is not zero"),
        (lambda: Intervention.scale("logits", float("nan")), "factor must be a finite number"),
    ],
)
def test_mistakes_are_told_where_they_are_made(make: Any, said: str) -> None:
    with pytest.raises(ValidationError) as error:
        make()
    assert said in str(error.value)
