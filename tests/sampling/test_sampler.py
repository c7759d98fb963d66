"""The sampler: the right distribution, and draws that depend on nothing but the row's own logits, parameters and seed.

Distributions are tested by chi-square against a reference in float64, with fixed seeds, so that a run is red always or
never; a biased draw must turn it red.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sets import ISAS, has_compiler, kernel_set

from llm.config import SchedulerConfig
from llm.kernels.backend import Backend
from llm.kernels.reference.backend import REFERENCE
from llm.sampling import draw as draw_module
from llm.sampling import sampler as sampler_module
from llm.sampling.draw import draw_rows, philox4x32, uniform
from llm.sampling.logits_processors.interface import BatchUpdate
from llm.sampling.logits_processors.pipeline import LogitsProcessors
from llm.sampling.logprobs import MODES, NO_LOGPROBS, TokenLogprobs, gather_logprobs
from llm.sampling.sampler import Sampler, SamplerOutput, SamplingRows
from llm.sampling_params import SamplingParams

DRAWS = 20_000
PINNED_OPTIONS: list[dict[str, Any]] = [{}, {"top_k": 4}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}]
PINNED = {
    "{}": [9, 3, 0, 3, 3, 3, 7, 3, 0, 6, 6, 7],
    "{'top_k': 4}": [0, 6, 3, 6, 3, 6, 9, 3, 3, 6, 9, 9],
    "{'top_p': 0.8}": [9, 3, 0, 3, 3, 3, 6, 3, 0, 6, 6, 6],
    "{'top_k': 6, 'top_p': 0.9, 'min_p': 0.05}": [2, 6, 3, 6, 3, 6, 0, 3, 3, 6, 9, 0],
}
# PyTorch, and the compiled kernels where there are any.
SETS = (REFERENCE, *((kernel_set(ISAS[-1]),) if has_compiler() else ()))
TOY = torch.tensor([1.2, -0.3, 0.7, 2.0, -1.1, 0.0, 1.9, 0.4, -0.6, 1.5])


def philox(counter: list[int], key: list[int]) -> list[int]:
    return philox4x32(np.array([counter], dtype=np.uint32), np.array([key], dtype=np.uint32))[0].tolist()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    """The vectors that Random123 is distributed with."""
    assert philox(counter, key) == expected


def draw_uniform(seed: int, sample_index: int, position: int) -> float:
    arrays = np.array([seed], dtype=np.uint64), np.array([sample_index]), np.array([position])
    return float(uniform(*arrays)[0])


@given(seed=st.integers(0, 2**64 - 1), sample_index=st.integers(0, 16383), position=st.integers(0, 2**31))
def test_uniform_is_in_the_half_open_interval_and_every_part_of_the_key_counts(
    seed: int, sample_index: int, position: int
) -> None:
    value = draw_uniform(seed, sample_index, position)
    assert 0.0 <= value < 1.0
    for other in ((seed ^ 1, sample_index, position), (seed ^ 1 << 63, sample_index, position)):
        assert draw_uniform(*other) != value
    assert draw_uniform(seed, sample_index + 1, position) != value
    assert draw_uniform(seed, sample_index, position + 1) != value


def test_the_largest_uniform_is_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = np.full((1, 4), 0xFFFFFFFF, dtype=np.uint32)
    monkeypatch.setattr("llm.sampling.draw.philox4x32", lambda counter, key: largest)
    assert draw_uniform(0, 0, 0) == 1.0 - 2.0**-53


class Rows:
    """Batch rows with these parameters, and processors that know of them; each row's seed is its own."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        seeds: Sequence[int] | None = None,
        stops: tuple[int, ...] = (),
        outputs: Sequence[list[int]] | None = None,
        custom: Sequence[Any] = (),
        kernels: Backend = REFERENCE,
    ) -> None:
        self.kernels = kernels
        self.sampling = SamplingRows(len(params))
        model = SimpleNamespace(max_model_len=2048)
        config: Any = SimpleNamespace(scheduler_config=SchedulerConfig(len(params), 64), model_config=model)
        self.processors = LogitsProcessors(config, torch.device("cpu"), custom, kernels)
        self.outputs = [[] for _ in params] if outputs is None else list(outputs)
        added = []
        for row, own in enumerate(params):
            if stops:
                own = own.clone()
                own.all_stop_token_ids = frozenset(stops)
            self.sampling.set(row, own, row if seeds is None else seeds[row], 0)
            added.append((row, own, [], self.outputs[row]))
        self.processors.update_state(BatchUpdate(len(params), [], added, []))

    def sample(self, logits: torch.Tensor, logit_rows: Sequence[int] | None = None, mode: str = "raw_logprobs") -> Any:
        """`logit_rows`: the batch row of each logit row of `logits`. The sampler gets a copy: it overwrites it."""
        rows = np.arange(len(logits)) if logit_rows is None else np.array(logit_rows)
        counts = np.array([len(self.outputs[row]) for row in rows.tolist()])
        idle = self.processors.is_idle()
        processors = None if idle else self.processors
        return Sampler(mode, self.kernels)(logits.clone(), self.sampling, rows, counts, processors, len(self.outputs))


def rows_of(params: list[SamplingParams], seeds: list[int] | None = None, stops: tuple[int, ...] = ()) -> Rows:
    return Rows(params, seeds, stops)


def sample(logits: torch.Tensor, rows: Rows, logit_rows: list[int] | None = None) -> SamplerOutput:
    return rows.sample(logits, logit_rows)


def draw_many(logits: torch.Tensor, params: SamplingParams, seed: int = 1234, count: int = DRAWS) -> np.ndarray:
    """Draws of one batch row at the positions 0, 1, 2 ..., a logit row for each."""
    rows = Rows([params], [seed])
    logit_rows, positions = np.zeros(count, dtype=np.int64), np.arange(count)
    processors = None if rows.processors.is_idle() else rows.processors
    output = Sampler()(logits.repeat(count, 1), rows.sampling, logit_rows, positions, processors, 1)
    assert not output.errors
    return output.tokens.numpy()


def reference(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """What each token's probability should be: temperature, then min_p, top_k and top_p on what is left."""
    weights = np.exp(logits.double().numpy() / max(params.temperature, 0.01))
    weights[weights < params.min_p * weights.max()] = 0.0
    order = np.argsort(-weights, kind="stable")
    if params.top_k:
        weights[order[params.top_k :]] = 0.0
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= params.top_p * weights.sum()]] = 0.0
    return weights / weights.sum()


def fits(tokens: np.ndarray, expected: np.ndarray) -> bool:
    """Chi-square goodness of fit at a level of one in a million (Wilson and Hilferty's approximation)."""
    observed = np.bincount(tokens, minlength=len(expected))
    if observed[expected == 0].any():
        return False
    possible = expected > 0
    counts = expected[possible] * len(tokens)
    assert counts.min() >= 5, "too few draws for this vocabulary"
    freedom = int(possible.sum()) - 1
    if freedom == 0:
        return True
    statistic = float(((observed[possible] - counts) ** 2 / counts).sum())
    spread = 2.0 / (9.0 * freedom)
    return statistic <= freedom * (1.0 - spread + 4.75 * math.sqrt(spread)) ** 3


MIXTURES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 10},
    {"top_k": 5000},
    {"top_p": 0.6},
    {"top_p": 0.95},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 3, "min_p": 0.15},
    {"top_p": 0.7, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 5000, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("options", MIXTURES, ids=str)
def test_draws_have_the_distribution_of_the_reference(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    assert fits(draw_many(TOY, params), reference(TOY, params))


def test_draws_of_different_seeds_and_samples_are_independent_draws() -> None:
    params = SamplingParams()
    by_seed = rows_of([params] * DRAWS)
    assert fits(sample(TOY.expand(DRAWS, -1), by_seed).tokens.numpy(), reference(TOY, params))
    by_sample = rows_of([params] * DRAWS)
    for index in range(DRAWS):
        by_sample.sampling.set(index, params, 7, index)
    assert fits(sample(TOY.expand(DRAWS, -1), by_sample).tokens.numpy(), reference(TOY, params))


@pytest.mark.parametrize("options", [{"top_k": 4, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.05}, {}], ids=str)
def test_a_biased_draw_does_not_fit(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above: draws pushed towards 0 by a tenth of a power are caught."""
    monkeypatch.setattr(sampler_module, "uniform", lambda *key: uniform(*key) ** 1.1)
    params = SamplingParams(**options)
    assert not fits(draw_many(TOY, params), reference(TOY, params))


@pytest.mark.parametrize(
    ("asked", "computed"),
    [({"top_p": 0.6}, {"top_p": 0.8}), ({"top_k": 4}, {"top_k": 3}), ({"min_p": 0.1}, {"min_p": 0.2})],
    ids=str,
)
def test_a_wrong_cut_does_not_fit(asked: dict[str, Any], computed: dict[str, Any]) -> None:
    assert not fits(draw_many(TOY, SamplingParams(**computed)), reference(TOY, SamplingParams(**asked)))


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_a_large_top_k_keeps_what_sorting_the_line_keeps_ties_included(top_p: float) -> None:
    """Equal logits at the edge, and tokens of no mass, of which too few are left for top_k."""
    generator = np.random.default_rng(3)
    for top_k in (1025, 1500, 2990, 3001):
        values = generator.integers(-9, 9, 3000).astype(np.float32)
        values[generator.integers(0, 3000, 40)] = -np.inf
        weights = np.exp(values - values.max(), dtype=np.float32)
        order = sorted((token for token in range(3000) if weights[token]), key=lambda token: (-values[token], token))
        order = order[:top_k]
        own = weights[order].astype(np.float64)
        before = np.cumsum(own) - own
        expected = sorted(token for token, mass in zip(order, before, strict=True) if mass < top_p * own.cumsum()[-1])
        assert draw_module._largest(values, weights, top_k, top_p).tolist() == expected


# On a grid, so that equal logits are common: which of them is cut must not depend on the companions.
LOGITS = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).integers(-6, 6, (12, 40)) / 2.0)
OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-3, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 20, 40, 2000]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
        "logprobs": st.sampled_from([None, 0, 3, -1]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.5]),
        "logit_bias": st.sampled_from([None, None, {3: 2.0, 7: -5.0}]),
        "allowed_token_ids": st.sampled_from([None, None, None, list(range(0, 40, 3))]),
    }
)


def draws_alone_and_together(
    values: np.ndarray,
    options: list[dict[str, Any]],
    order: list[int],
    mode: str = "raw_logprobs",
    kernels: Backend = REFERENCE,
) -> list[tuple[Any, Any]]:
    """(alone, together in this order) for each row: its token and its logprobs."""
    logits = torch.from_numpy(values).float()
    params = [SamplingParams(**own) for own in options]
    outputs = [[row, 3, 3] for row in range(len(params))]
    batch = Rows([params[row] for row in order], order, outputs=[outputs[row] for row in order], kernels=kernels)
    together = batch.sample(logits[order], mode=mode)
    pairs = []
    for logit_row, row in enumerate(order):
        alone = Rows([params[row]], [row], outputs=[outputs[row]], kernels=kernels).sample(
            logits[row : row + 1], mode=mode
        )
        pairs.append(
            (
                (alone.tokens.tolist()[0], alone.logprobs.get(0)),
                (together.tokens.tolist()[logit_row], together.logprobs.get(logit_row)),
            )
        )
    return pairs


@given(
    values=LOGITS,
    options=st.lists(OPTIONS, min_size=12, max_size=12),
    order=st.permutations(range(12)),
    mode=st.sampled_from(MODES),
    tiles=st.sampled_from([1, 1, 60]),
    kernels=st.sampled_from(SETS),
)
@settings(max_examples=80)
def test_a_draw_is_the_same_alone_in_a_batch_and_in_any_order(
    values: np.ndarray, options: list[dict[str, Any]], order: list[int], mode: str, tiles: int, kernels: Backend
) -> None:
    """`tiles`: of a vocabulary of 2400 too, which is searched and summed in blocks."""
    values = np.tile(values, tiles) - 0.125 * np.arange(tiles).repeat(40)
    for alone, together in draws_alone_and_together(values, options, order, mode, kernels):
        assert alone == together


def test_torch_topk_alone_would_let_companions_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above, and the reason that `top_k` orders equals."""
    monkeypatch.setattr(REFERENCE.ops, "top_k", torch.topk)
    values = np.random.default_rng(0).integers(-3, 3, (12, 40)) / 2.0
    options: list[dict[str, Any]] = [{"top_k": 1 + 3 * row} for row in range(12)]
    pairs = draws_alone_and_together(values, options, list(range(12)))
    assert any(alone != together for alone, together in pairs)


@given(values=LOGITS, top_k=st.integers(1, 40), hidden=st.integers(0, 40))
@settings(max_examples=60)
def test_the_likeliest_are_those_of_a_stable_sort(values: np.ndarray, top_k: int, hidden: int) -> None:
    logits = torch.from_numpy(values).float()
    logits[:, :hidden] = -math.inf
    expected = torch.sort(logits, dim=-1, descending=True, stable=True)
    for kernels in SETS:
        found_values, found_ids = kernels.op("top_k")(logits, top_k)
        assert found_values.tolist() == expected.values[:, :top_k].tolist()
        assert found_ids.tolist() == expected.indices[:, :top_k].tolist()


def test_the_same_seed_draws_the_same_and_another_one_does_not() -> None:
    params = SamplingParams()
    first, again, other = (draw_many(TOY, params, seed, 200).tolist() for seed in (5, 5, 6))
    assert first == again
    assert first != other
    siblings = SamplingRows(2)
    for index in range(2):
        siblings.set(index, params, 5, index)
    logit_rows, positions = np.repeat([0, 1], 200), np.tile(np.arange(200), 2)
    drawn = Sampler()(TOY.repeat(400, 1), siblings, logit_rows, positions).tokens.tolist()
    assert drawn[:200] == first
    assert drawn[200:] != first


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    rows = rows_of([SamplingParams(temperature=0)] * 2)
    assert sample(logits, rows).tokens.tolist() == [1, 0]


def test_draws_leave_the_users_generators_alone() -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]

    before = states()
    for options in MIXTURES:
        draw_many(TOY, SamplingParams(**options), count=10)
    assert states() == before


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_forbids_the_ends_until_enough_is_out(temperature: float) -> None:
    logits = torch.tensor([0.0, 9.0, 8.0, 1.0])
    params = SamplingParams(temperature=temperature, min_tokens=2, logprobs=0)
    for seed in range(40):
        # A configuration can name ends that the model has no logits for.
        rows = Rows([params, SamplingParams(temperature=0)], [seed, 0], stops=(1, 2, 4))
        for position in range(4):
            output = rows.sample(logits.repeat(2, 1))
            token, unrestricted = output.tokens.tolist()
            assert token not in (1, 2) if position < 2 else token in (1, 2)
            assert unrestricted == 1
            # What is reported is the model's own: raw, before anything was forbidden.
            assert output.logprobs[0].logprobs == [float(logits.log_softmax(-1)[token])]
            rows.outputs[0].append(token)
            rows.processors.update_state(None)


def check_logprobs(found: TokenLogprobs, logits: torch.Tensor, token: int, count: int) -> None:
    expected = logits.float().log_softmax(dim=-1)
    assert found.token_ids[0] == token
    assert found.logprobs == expected[found.token_ids].tolist()
    assert found.ranks[0] == int((expected >= expected[token]).sum())
    assert found.logprobs[1:] == sorted(expected.tolist(), reverse=True)[:count]
    assert found.ranks[1:] == list(range(1, count + 1))


@given(
    seed=st.integers(0, 2**32 - 1),
    wanted=st.sampled_from([0, 1, 5, 29, 30, 31, -1, 10**30]),
    temperature=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=40)
def test_logprobs_are_the_log_softmax_of_the_raw_logits(seed: int, wanted: int, temperature: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).permutation(30)).float() / 7
    params = SamplingParams(temperature=temperature, top_k=10**30, min_p=0.1, logprobs=wanted)
    output = sample(logits.expand(2, -1), rows_of([SamplingParams(), params]))
    assert list(output.logprobs) == [1]
    count = 30 if wanted == -1 else min(wanted, 30)
    check_logprobs(output.logprobs[1], logits, int(output.tokens[1]), count)
    whole = np.log(reference(logits, SamplingParams()))
    assert output.logprobs[1].logprobs == pytest.approx(whole[output.logprobs[1].token_ids], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logprobs_are_float32_whatever_the_logits_are(dtype: torch.dtype) -> None:
    logits = TOY.to(dtype)
    output = sample(logits.unsqueeze(0), rows_of([SamplingParams(temperature=0, logprobs=-1)]))
    check_logprobs(output.logprobs[0], logits, 3, len(TOY))


@pytest.mark.parametrize("options", [{}, {"top_k": 8}, {"top_k": 5000}, {"top_p": 0.999}, {"min_p": 0.01}], ids=str)
def test_impossible_tokens_are_never_drawn(options: dict[str, Any]) -> None:
    logits = TOY.clone()
    logits[[0, 3, 6, 9]] = -math.inf
    params = SamplingParams(**options)
    assert fits(draw_many(logits, params), reference(logits, params))
    only = torch.full((10,), -math.inf)
    only[7] = -3.0
    assert set(draw_many(only, params, count=100).tolist()) == {7}


@pytest.mark.parametrize("draw", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("options", [{}, {"top_k": 8}, {"top_p": 0.999}], ids=str)
def test_the_ends_of_the_unit_interval_draw_possible_tokens(
    draw: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "uniform", lambda seeds, *rest: np.full(len(seeds), draw))
    logits = torch.tensor([-math.inf, 0.0, 1.0, 2.0, -math.inf, -math.inf])
    (token,) = sample(logits.unsqueeze(0), rows_of([SamplingParams(**options)])).tokens.tolist()
    assert logits[token] > -math.inf


BATCH_OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), OPTIONS, st.integers(0, 2**64 - 1), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 7)),
    ),
    max_size=30,
)


@given(operations=BATCH_OPERATIONS)
@settings(max_examples=60)
def test_parameters_move_with_their_rows(operations: list[Any]) -> None:
    """As the persistent batch does it: a new row goes last, a removed one is filled by the last."""
    rows = SamplingRows(8)
    live: list[tuple[SamplingParams, int, int]] = []
    for operation in operations:
        if operation[0] == "add" and len(live) < 8:
            _, options, seed, min_tokens = operation
            asked = {"logprobs": None, "logprob_token_ids": [seed % 5]} if min_tokens else {}
            params = SamplingParams(**{**options, **asked})
            rows.set(len(live), params, seed, min_tokens)
            live.append((params, seed, min_tokens))
        elif operation[0] == "remove" and operation[1] < len(live):
            last = len(live) - 1
            if operation[1] != last:
                rows.move(last, operation[1])
                live[operation[1]] = live[last]
            live.pop()
            rows.clear(last)
    for row, (params, seed, min_tokens) in enumerate(live):
        assert (rows.top_k[row], rows.top_p[row], rows.seed[row]) == (params.top_k, params.top_p, seed)
        assert rows.temperature[row] == np.float32(0.0 if params.greedy else max(params.temperature, 0.01))
        assert rows.sample_index[row] == min_tokens
        wanted = 1 if params.logprob_token_ids else params.logprobs
        assert rows.logprobs[row] == (NO_LOGPROBS if wanted is None else wanted)
        assert rows.logprob_token_ids.get(row) == params.logprob_token_ids
    assert set(rows.logprob_token_ids) <= set(range(len(live)))


@given(
    vocab=st.sampled_from([1, 7, 511, 512, 513, 2047, 2048, 2049, 2560, 5001]),
    seed=st.integers(0, 2**32 - 1),
    nan=st.booleans(),
)
@settings(max_examples=60)
def test_the_argmax_of_blocks_is_the_first_of_the_likeliest(vocab: int, seed: int, nan: bool) -> None:
    random_numbers = np.random.default_rng(seed)
    logits = random_numbers.integers(-9, 3, (3, vocab)).astype(np.float32)
    if nan:
        logits[1, random_numbers.integers(vocab)] = np.nan
    values, ids = REFERENCE.op("argmax")(torch.from_numpy(logits))
    assert ids.tolist() == np.argmax(logits, axis=1).tolist()
    np.testing.assert_array_equal(values.numpy(), logits.max(axis=1))


SPREAD = [0, 1, 511, 512, 1023, 2048, 2500, 4607, 4608, 4999]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.7}, {"top_p": 0.8}, {"top_p": 0.999}, {"top_k": 4}], ids=str)
def test_draws_from_many_blocks_have_the_distribution_of_the_reference(options: dict[str, Any]) -> None:
    """The toy's logits, scattered to the edges of the blocks of a larger vocabulary."""
    params = SamplingParams(**options)
    logits = torch.full((5000,), -40.0)
    logits[SPREAD] = TOY
    drawn = draw_many(logits, params, count=5000)
    assert set(drawn.tolist()) <= set(SPREAD)
    assert fits(np.searchsorted(SPREAD, drawn), reference(TOY, params))


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.99, 0.99999])
@pytest.mark.parametrize("top_k", [0, 40, 1500, 10**6])
@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("kernels", SETS, ids=["torch", "kernels"][: len(SETS)])
def test_top_p_keeps_the_fewest_that_weigh_enough(top_p: float, top_k: int, spread: float, kernels: Backend) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 4001)).astype(np.float32)) * spread
    draws = draw_module.draw_rows(
        logits, logits.amax(1), np.full(2, top_k), np.full(2, top_p), np.array([0.1, 0.9]), {0, 1}, kernels
    )
    for logit_row in range(2):
        weights = np.exp(logits[logit_row].double().numpy())
        order = np.argsort(-weights, kind="stable")[: top_k or None]
        kept = draws.kept[logit_row]
        assert sorted(kept.tolist()) == sorted(order[: len(kept)].tolist())
        mass = weights[order].sum()
        assert weights[kept].sum() >= (top_p - 1e-6) * mass
        assert weights[kept].sum() - weights[kept].min() <= (top_p + 1e-6) * mass
        assert draws.tokens[logit_row] in kept


@pytest.mark.parametrize("mode", MODES)
def test_processed_logprobs_are_those_the_token_was_drawn_from(mode: str) -> None:
    """After penalties for a greedy row; after temperature, min_p, top_k and top_p for one that draws."""
    bias = {3: -5.0}
    cut = SamplingParams(temperature=0.5, top_k=4, top_p=0.9, min_p=0.01, logit_bias=bias, logprobs=-1)
    greedy = SamplingParams(temperature=0, logit_bias=bias, logprobs=-1)
    free = SamplingParams(temperature=2.0, logprobs=-1)
    rows = Rows([cut, greedy, free])
    output = rows.sample(TOY.repeat(3, 1), mode=mode)
    biased = TOY.clone()
    biased[3] -= 5.0
    possible = torch.from_numpy(reference(biased, cut)) > 0
    assert 1 < int(possible.sum()) < 5
    processed = [(biased / 0.5).masked_fill(~possible, -math.inf), biased, TOY / 2.0]
    expected = [TOY] * 3 if mode.startswith("raw") else processed
    for logit_row, own in output.logprobs.items():
        values = expected[logit_row].log_softmax(-1) if mode.endswith("logprobs") else expected[logit_row]
        assert own.token_ids[0] == int(output.tokens[logit_row])
        assert own.logprobs == pytest.approx(values[own.token_ids].tolist(), abs=1e-6)
    assert sorted(output.logprobs) == [0, 1, 2]


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.source("argmax"))
@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"temperature": 0, "logit_bias": {3: 1.0}}], ids=str)
def test_raw_logprobs_are_of_the_logits_before_they_are_overwritten(options: dict[str, Any], kernels: Backend) -> None:
    output = Rows([SamplingParams(**options, logprobs=3)] * 2, kernels=kernels).sample(TOY.repeat(2, 1))
    for own in output.logprobs.values():
        assert own.token_ids[1:] == [3, 6, 9] and own.ranks[1:] == [1, 2, 3]
        assert own.logprobs == pytest.approx(TOY.log_softmax(-1)[own.token_ids].tolist(), abs=1e-6)


def test_logprobs_of_the_ids_that_were_asked_for() -> None:
    ids = [7, 0, 3, 9]
    rows = Rows([SamplingParams(temperature=0), SamplingParams(temperature=0, logprob_token_ids=ids)])
    output = rows.sample(TOY.repeat(2, 1))
    values = TOY.log_softmax(-1)
    assert list(output.logprobs) == [1]
    found = output.logprobs[1]
    assert found.token_ids == [3, *ids]
    assert found.logprobs == values[found.token_ids].tolist()
    assert found.ranks == [int((values >= value).sum()) for value in values[found.token_ids]]


def test_an_infinite_logit_forces_its_token() -> None:
    logits = TOY.repeat(3, 1)
    logits[:, [4, 6]] = math.inf
    drawn = draw_many(logits[0], SamplingParams(), count=200)
    assert set(drawn.tolist()) == {4, 6}
    params = [SamplingParams(top_p=0.5), SamplingParams(top_k=1), SamplingParams(temperature=0)]
    assert sample(logits, rows_of(params)).tokens.tolist() == [4, 4, 4]  # of two equal ones the first


@pytest.mark.parametrize("kernels", SETS, ids=["torch", "kernels"][: len(SETS)])
@pytest.mark.parametrize(("top_p", "count"), [(0.2, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.75, 3), (0.9, 4)])
@pytest.mark.parametrize("top_k", [0, 40, 1500])
def test_ties_at_the_edge_of_top_p_go_to_the_lower_ids(top_p: float, count: int, top_k: int, kernels: Backend) -> None:
    """Four equal tokens of a quarter each, exactly; the fewest whose mass is at least top_p stay."""
    tied = [7, 300, 1100, 1600]
    logits = torch.full((1, 2000), -math.inf)
    logits[0, tied] = 1.0
    for number in (0.0, 0.4, 0.999):
        numbers = np.array([top_k]), np.array([top_p]), np.array([number])
        draws = draw_rows(logits.clone(), torch.tensor([1.0]), *numbers, {0}, kernels)
        assert draws.kept[0].tolist() == tied[:count]
        assert draws.tokens.tolist() == [tied[int(number * count)]]


def test_draws_are_what_they_were() -> None:
    """Recorded with this generator and these cuts: a user's seed gives the same text in every version."""
    found = {str(options): draw_many(TOY, SamplingParams(**options), 7, 12).tolist() for options in PINNED_OPTIONS}
    assert found == PINNED


def test_a_row_without_a_token_is_an_error_and_its_companions_draw_as_ever() -> None:
    logits = TOY.repeat(5, 1)
    logits[1] = -math.inf
    logits[3, 2] = math.nan
    params = [SamplingParams(temperature=row % 2, logprobs=1) for row in range(5)]
    rows = rows_of(params)
    output, whole = sample(logits, rows), sample(TOY.repeat(5, 1), rows)
    assert sorted(output.errors) == [1, 3] and sorted(output.logprobs) == [0, 2, 4]
    assert "-inf" in str(output.errors[1]) and "NaN" in str(output.errors[3])
    assert output.tokens[[0, 2, 4]].tolist() == whole.tokens[[0, 2, 4]].tolist()
    assert [output.logprobs[row] for row in (0, 2, 4)] == [whole.logprobs[row] for row in (0, 2, 4)]


def test_only_rows_that_draw_are_given_to_adapters_and_the_lines_fit() -> None:
    """Three of five rows draw: processors see all five places, and each logit row comes back to its row."""
    own = [SamplingParams(temperature=0, logit_bias={row: 100.0}) for row in range(5)]
    output = rows_of(own).sample(TOY.repeat(3, 1), [0, 2, 3])
    assert output.tokens.tolist() == [0, 2, 3]


@pytest.mark.parametrize("count", [1, 5, 32, 33, 4001])
@pytest.mark.parametrize("vocab", [4001, 20001])
def test_the_top_logprobs_of_a_large_vocabulary_are_found_in_its_blocks(count: int, vocab: int) -> None:
    values = torch.from_numpy(np.random.default_rng(0).permuted(np.arange(2 * vocab).reshape(2, -1), axis=1)).float()
    found = gather_logprobs(values, torch.tensor([7, vocab - 1]), np.array([count, count]), {}, False)
    for row, own in zip(values, found, strict=True):
        ordered, ids = row.sort(descending=True)
        assert own.token_ids[1:] == ids[:count].tolist()
        assert own.logprobs[1:] == ordered[:count].tolist()
        assert own.ranks[0] == 1 + int((row > own.logprobs[0]).sum())
