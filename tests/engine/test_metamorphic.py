"""An answer depends on its request alone: not on the batch, the order, the chunks, the cache or preemption.

Every row in `tiny_models.SCHEDULED` answers the same requests once each by itself and then in the settings of `cells`,
twice over in different orders where a second pass hits the prefix cache. `assert_same` is the only comparison. The
negative controls plant defects of the kinds that batching, caching and paging invite.

Rows of `THOROUGH` are answered in a third of the settings each, so that every setting meets several of them;
TEST_ALL_SCHEDULES=1 answers all rows in all settings. Set it when you change the scheduler or the batch.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded import engine_of
from kernel_sets import has_kernels
from tiny_models import SCHEDULED, THOROUGH, TINY_MODELS, TinyModel, make_prompts, one_thread, tiny_checkpoint
from toy_models import TOYS, toy_model

from llm import LLM, CompletionOutput, RequestOutput, SamplingParams
from llm.engine.block_manager import BlockManager, BlockPool
from llm.layers.attention import Attention
from llm.quantization.unquantized import UnquantizedLinearMethod
from llm.runner.batch import InputBatch
from llm.sampling.sampler import SamplingRows

# Where no kernels can be compiled PyTorch computes, and rounds differently with the number of rows.
TOLERANCE = 0.0 if has_kernels() else 1e-4
# Where a KV cache or activations are rounded to codes, a value beside a half becomes another code.
TOLERANCE_OF_CODES = 0.0 if has_kernels() else 0.25
LONGEST_OUTPUT = 10

SETTINGS: dict[str, Mapping[str, Any]] = {
    "one-batch": {},
    "whole-prompts-no-prefix-caching": {"enable_chunked_prefill": False, "enable_prefix_caching": False},
    "chunks-of-1-blocks-of-4": {"max_num_batched_tokens": 1, "block_size": 4},
    "chunks-of-3-blocks-of-1": {"max_num_batched_tokens": 3, "block_size": 1},
    "chunks-of-7": {"max_num_batched_tokens": 7},
    "chunks-of-64-two-rows": {"max_num_batched_tokens": 64, "max_num_seqs": 2},
    "one-row-blocks-of-4": {"max_num_seqs": 1, "block_size": 4},
}
# Rows of the table quantized on load, by schemes that have kernels.
QUANTIZED = ("llama+w8a8", "qwen2-bf16+w8a8", "llama+w4a8", "llama+w4a16")
# Rows whose KV cache is quantized: windows, soft caps and several groups; sinks; latents.
QUANTIZED_CACHES = ("gemma2+kv:int8", "gpt-oss+kv:fp8", "minicpm3+kv:int8")
# The KV cache holds little more than the longest sequence.
PREEMPTED: dict[str, Mapping[str, Any]] = {
    "preempted-blocks-of-4": {"block_size": 4},
    "preempted-blocks-of-1": {"block_size": 1},
    "preempted-in-chunks-no-prefix-caching": {
        "block_size": 4,
        "max_num_batched_tokens": 16,
        "enable_prefix_caching": False,
    },
}
SPARE_TOKENS = 8
SPARE_SLOTS = 4
# Settings of every row: a batch, and preemption with chunks that cut prompts anywhere.
EVERYWHERE = ("one-batch", "preempted-in-chunks-no-prefix-caching")
CASES = [*SCHEDULED, *QUANTIZED, *QUANTIZED_CACHES, *(f"toy {name}" for name in TOYS)]
ALL_SCHEDULES = os.environ.get("TEST_ALL_SCHEDULES") == "1"
IN_MORE_SETTINGS = [name for name in CASES if name in {*THOROUGH, *QUANTIZED} or name.startswith("toy ")]


def cells(settings: Iterable[str]) -> list[tuple[str, str]]:
    """(row, setting) of those tests that run: rows and settings are dealt out along the diagonals of their table."""
    chosen = [
        (name, setting)
        for row, name in enumerate(IN_MORE_SETTINGS)
        for column, setting in enumerate((*SETTINGS, *PREEMPTED))
        if (row + column) % 3 == 0
    ]
    return [
        (name, setting)
        for name in CASES
        for setting in settings
        if ALL_SCHEDULES or setting in EVERYWHERE or (name, setting) in chosen
    ]


# A step computes so little here that these take long: they get half of the requests.
SLOW = {"chunks-of-1-blocks-of-4", "one-row-blocks-of-4", "preempted-blocks-of-4", "preempted-blocks-of-1"}

Request = tuple[list[int], SamplingParams]


def make_requests(row: TinyModel) -> list[Request]:
    """Greedy and seeded, one completion and several, prompts that repeat and that share prefixes, uneven lengths."""
    prompts = make_prompts(row)
    longest = max(prompts, key=len)
    prompts += [longest, longest[:20] + prompts[1][:9], longest[:-3] + prompts[0][:3]]
    requests = [(prompt, _params(index, temperature=0)) for index, prompt in enumerate(prompts)]
    requests += [(prompts[index], _params(index, top_k=20, seed=index + 1)) for index in (0, 3, 4)]
    requests += [(prompts[2], _params(1, top_k=20, seed=5, n=3))]
    return requests


def _params(index: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=LONGEST_OUTPUT - index % 4, logprobs=5, ignore_eos=True, **fields)


@dataclass
class Case:
    """One row of the table and what it answers to each request by itself."""

    row: TinyModel
    folder: Path

    @cached_property
    def requests(self) -> list[Request]:
        return make_requests(self.row)

    @cached_property
    def max_model_len(self) -> int:
        longest = max(len(prompt) for prompt, _ in self.requests) + LONGEST_OUTPUT
        return self.row.engine.get("max_model_len", longest)

    @cached_property
    def alone(self) -> list[RequestOutput]:
        with self.load({"enable_prefix_caching": False}) as llm:
            assert llm.config.invariant == has_kernels(), llm.config.reasons["invariant"]
            return [generate(llm, [request])[0] for request in self.requests]

    @cached_property
    def state_bytes(self) -> tuple[int, int]:
        """Of all layers together: (per token, per request)."""
        with self.load({}) as llm:
            specs = engine_of(llm).runner.plan.kv_cache_specs
        return sum(spec.bytes_per_token() for spec in specs), sum(spec.bytes_per_request() for spec in specs)

    @property
    def tolerance(self) -> float:
        has_codes = self.row.engine.get("kv_cache_dtype") in ("int8", "fp8")
        has_codes |= self.row.engine.get("quantization") in ("w8a8", "w4a8")
        return TOLERANCE_OF_CODES if has_codes else TOLERANCE

    def load(self, setting: Mapping[str, Any]) -> LLM:
        # A bf16 cache would turn a rounding difference into one of a whole bf16 step; invariant kernels make none.
        exact = {"max_model_len": self.max_model_len, "kv_cache_dtype": "auto" if has_kernels() else "float32"}
        arguments = {**exact, **self.row.engine, **setting}
        return LLM(self.folder, skip_tokenizer_init=True, **arguments)

    def load_tight(self, setting: Mapping[str, Any]) -> LLM:
        """With a KV cache of one longest sequence and a little more, and a few slots."""
        block_size = setting["block_size"]
        blocks = -(-(self.max_model_len + SPARE_TOKENS) // block_size)
        per_token, per_request = self.state_bytes
        memory = blocks * block_size * per_token + SPARE_SLOTS * per_request
        return self.load({"kv_cache_memory_bytes": memory, **setting})


@contextmanager
def made_case(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """The case of a row of the table, `row+scheme`, `row+kv:dtype` (of the KV cache), or `toy name`."""
    if name.startswith("toy "):
        with toy_model(name.removeprefix("toy "), tmp_path_factory) as made:
            yield Case(*made)
        return
    name, _, quantization = name.partition("+")
    row = TINY_MODELS[name]
    if quantization.startswith("kv:"):
        row = replace(row, engine={**row.engine, "kv_cache_dtype": quantization.removeprefix("kv:")})
    elif quantization:
        row = replace(row, engine={**row.engine, "quantization": quantization})
    yield Case(row, tiny_checkpoint(name, tmp_path_factory))


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    with made_case(request.param, tmp_path_factory) as case, one_thread():
        yield case


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """For what needs no more than one row."""
    with one_thread():
        yield Case(TINY_MODELS["llama"], tiny_checkpoint("llama", tmp_path_factory))


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """A model with recurrent states."""
    with toy_model("recurrent", tmp_path_factory) as made, one_thread():
        yield Case(*made)


def generate(llm: LLM, requests: Sequence[Request]) -> list[RequestOutput]:
    return llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)


def assert_same(expected: CompletionOutput, actual: CompletionOutput, tolerance: float = TOLERANCE) -> None:
    """The comparison of this file, and the only one."""
    assert actual.token_ids == expected.token_ids
    assert actual.finish_reason == expected.finish_reason
    assert np.abs(_logprob_table(actual) - _logprob_table(expected)).max() <= tolerance


def _logprob_table(completion: CompletionOutput) -> np.ndarray:
    """[tokens, 6]: the logprob of each token, then the five largest of its position."""
    table = []
    for token, position in zip(completion.token_ids, completion.logprobs or [], strict=True):
        largest = sorted((item.logprob for item in position.values()), reverse=True)[:5]
        table.append([position[token].logprob, *largest])
    return np.array(table)


def check_orders(case: Case, llm: LLM, name: str = "") -> int:
    """All requests in a random order, and back where the prefix cache knows them by then; returns its prompt tokens."""
    count = len(case.requests) // (2 if name in SLOW else 1)
    order = random.Random(name).sample(range(len(case.requests)), count)
    cached = 0
    orders = (order, order[::-1]) if llm.config.cache_config.enable_prefix_caching else (order,)
    for permuted in orders:
        outputs = generate(llm, [case.requests[index] for index in permuted])
        for index, output in zip(permuted, outputs, strict=True):
            cached += output.num_cached_tokens
            for expected, actual in zip(case.alone[index].outputs, output.outputs, strict=True):
                assert_same(expected, actual, case.tolerance)
        assert_idle(llm)
    return cached


def assert_idle(llm: LLM) -> None:
    """Nothing is owned by anybody any more."""
    scheduler = _scheduler(llm)
    scheduler.check_integrity()
    assert not scheduler.has_unfinished()
    assert scheduler.blocks.num_free_blocks() == llm.config.cache_config.num_blocks
    assert scheduler.blocks.num_free_slots() == llm.config.cache_config.num_state_slots


def _scheduler(llm: LLM) -> Any:
    return engine_of(llm).scheduler


@pytest.mark.parametrize(("case", "name"), cells(SETTINGS), indirect=["case"])
def test_answers_do_not_depend_on(case: Case, name: str) -> None:
    with case.load(SETTINGS[name]) as llm:
        cached = check_orders(case, llm, name)
        assert (cached > 0) == llm.config.cache_config.enable_prefix_caching


@pytest.mark.parametrize(("case", "name"), cells(PREEMPTED), indirect=["case"])
def test_answers_do_not_depend_on_being(case: Case, name: str) -> None:
    with case.load_tight(PREEMPTED[name]) as llm:
        check_orders(case, llm, name)
        assert (_scheduler(llm).num_preemptions > 0) == (case.state_bytes[0] > 0)


@pytest.mark.parametrize("case", CASES if ALL_SCHEDULES else IN_MORE_SETTINGS, indirect=True)
def test_completions_of_one_prompt(case: Case) -> None:
    """The first seeded completion is what n=1 draws, the others differ; greedy ones are all the greedy answer."""
    prompt, params = case.requests[-1]
    single, greedy = replace(params, n=1), replace(params, temperature=0)
    with case.load({}) as llm:
        drawn, first, same = (
            output.outputs for output in generate(llm, [case.requests[-1], (prompt, single), (prompt, greedy)])
        )
    assert_same(first[0], drawn[0], case.tolerance)
    assert len({tuple(completion.token_ids) for completion in drawn}) == params.n
    for completion in same:
        assert_same(same[0], completion, case.tolerance)


# Negative controls: one batch with a planted defect is not the same any more.

Plant = Callable[[pytest.MonkeyPatch], None]


def _patch_metadata(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    build = InputBatch.attention_metadata

    def planted(self: InputBatch, *args: Any) -> Any:
        metadata = build(self, *args)
        change(metadata)
        return metadata

    monkeypatch.setattr(InputBatch, "attention_metadata", planted)


def slot_of_one_row_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(metadata: Any) -> None:
        metadata.slot_mapping[-metadata.query_lens_list[-1] :] += 1

    _patch_metadata(monkeypatch, change)


def one_stale_slot_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(metadata: Any) -> None:
        metadata.seq_lens += 1

    _patch_metadata(monkeypatch, change)


def positions_start_over_in_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    build = InputBatch.build

    def planted(self: InputBatch, plan: Any) -> Any:
        step = build(self, plan)
        step.forward_batch.positions = torch.cat([torch.arange(count) for count in step.counts])
        return step

    monkeypatch.setattr(InputBatch, "build", planted)


def prefix_hit_gives_a_wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    find = BlockPool.find

    def planted(self: BlockPool, digest: bytes, tokens: bytes) -> int:
        block = find(self, digest, tokens)
        return block if block < 0 else next((other for other in self.content if other != block), block)

    monkeypatch.setattr(BlockPool, "find", planted)


def moved_row_leaves_its_blocks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    move = InputBatch._move

    def planted(self: InputBatch, source: int, target: int) -> None:
        kept = [table[target].copy() for table in self.block_tables]
        move(self, source, target)
        for table, blocks in zip(self.block_tables, kept, strict=True):
            table[target] = blocks

    monkeypatch.setattr(InputBatch, "_move", planted)


def draws_depend_on_the_batch_row(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SamplingRows.set

    def planted(self: SamplingRows, row: int, params: SamplingParams, seed: int, index: int) -> None:
        original(self, row, params, seed, row)

    monkeypatch.setattr(SamplingRows, "set", planted)


def one_product_is_summed_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding alone: without invariant kernels this is what every batch does."""

    def planted(self: UnquantizedLinearMethod, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        halves = (half.contiguous() for half in (x[..., 1::2], x[..., ::2]))
        weight = self.dequantize_weight(layer)
        out = sum(half @ part.t() for half, part in zip(halves, (weight[:, 1::2], weight[:, ::2]), strict=True))
        return out if bias is None else out + bias

    monkeypatch.setattr(UnquantizedLinearMethod, "apply", planted)


@pytest.mark.parametrize(
    "plant",
    [
        slot_of_one_row_off_by_one,
        one_stale_slot_is_seen,
        positions_start_over_in_every_chunk,
        prefix_hit_gives_a_wrong_block,
        moved_row_leaves_its_blocks_behind,
        draws_depend_on_the_batch_row,
        pytest.param(
            one_product_is_summed_in_another_order,
            marks=pytest.mark.skipif(not has_kernels(), reason="the tolerance hides it"),
        ),
    ],
)
def test_planted_defects_are_seen(llama: Case, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llama.alone
    with llama.load({}) as llm:
        plant(monkeypatch)
        # The kernels refuse what reaches beyond a row's blocks; the comparison sees the rest.
        with pytest.raises((AssertionError, IndexError)):
            check_orders(llama, llm)


@pytest.mark.skipif(not has_kernels(), reason="it knows the layout of the kernels")
@pytest.mark.parametrize("case", QUANTIZED_CACHES[:1], indirect=True)
def test_a_scale_of_the_neighbouring_token_is_seen(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the slot before each token's, whose own scale is that of a token written later or earlier."""
    assert case.alone
    with case.load({}) as llm:
        for layer in engine_of(llm).runner.model.modules():
            if isinstance(layer, Attention):
                monkeypatch.setattr(layer.backend, "write", _writing_scales_beside(layer.backend.write))
        with pytest.raises(AssertionError):
            check_orders(case, llm)


def _writing_scales_beside(write: Callable[..., None]) -> Callable[..., None]:
    """Stores keys and values as usual, and each key's scale also for the token before."""

    def planted(key: torch.Tensor, value: torch.Tensor, cache: Any, metadata: Any) -> None:
        write(key, value, cache, metadata)
        for cached in cache:
            scales = cached.view(torch.uint8)[..., :32].unflatten(-1, (16, 2))
            for slot in metadata.slot_mapping.tolist():
                if slot % 16:
                    scales[slot // 16, :, slot % 16 - 1] = scales[slot // 16, :, slot % 16]

    return planted


def moved_row_leaves_its_slot_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    move = InputBatch._move

    def planted(self: InputBatch, source: int, target: int) -> None:
        kept = self.slots[target]
        move(self, source, target)
        self.slots[target] = kept

    monkeypatch.setattr(InputBatch, "_move", planted)


def two_rows_have_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    _patch_recurrent(monkeypatch, lambda metadata: metadata.slots.clamp_(max=2))


def a_slot_is_taken_over_with_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(metadata: Any) -> None:
        metadata.seq_lens_list = [length + 1 for length in metadata.seq_lens_list]

    _patch_recurrent(monkeypatch, change)


def every_chunk_starts_from_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(metadata: Any) -> None:
        metadata.seq_lens_list = metadata.query_lens_list

    _patch_recurrent(monkeypatch, change)


def prefixes_are_shared_without_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "_shares", lambda self, request: True)


def _patch_recurrent(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object]) -> None:
    build = InputBatch._recurrent

    def planted(self: InputBatch, *args: Any) -> Any:
        metadata = build(self, *args)
        change(metadata)
        return metadata

    monkeypatch.setattr(InputBatch, "_recurrent", planted)


@pytest.mark.parametrize(
    "plant",
    [
        moved_row_leaves_its_slot_behind,
        two_rows_have_one_slot,
        a_slot_is_taken_over_with_what_is_in_it,
        every_chunk_starts_from_zeros,
        prefixes_are_shared_without_their_state,
    ],
)
def test_planted_defects_of_recurrent_states_are_seen(
    recurrent: Case, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recurrent.alone
    with recurrent.load({}) as llm:
        plant(monkeypatch)
        with pytest.raises(AssertionError):
            check_orders(recurrent, llm)
            check_orders(recurrent, llm)


@pytest.mark.parametrize("slots", [1, 3])
def test_requests_wait_for_a_slot(recurrent: Case, slots: int) -> None:
    per_token, per_request = recurrent.state_bytes
    blocks = -(-recurrent.max_model_len // 16)
    with recurrent.load({"kv_cache_memory_bytes": 16 * blocks * per_token + slots * per_request}) as llm:
        assert llm.config.cache_config.num_state_slots == slots
        check_orders(recurrent, llm)


def test_the_comparison_sees_one_logprob(llama: Case) -> None:
    with llama.load({"enable_prefix_caching": False}) as llm:
        changed = generate(llm, llama.requests[:1])[0].outputs[0]
    assert_same(llama.alone[0].outputs[0], changed)
    assert changed.logprobs is not None
    changed.logprobs[-1][changed.token_ids[-1]].logprob *= 1 + 2**-23 if TOLERANCE == 0 else 1.01
    with pytest.raises(AssertionError):
        assert_same(llama.alone[0].outputs[0], changed)
