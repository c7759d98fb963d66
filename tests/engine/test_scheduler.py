"""The scheduler and the block manager: nothing shared wrongly, leaked or freed twice, and every request gets its turn.

A state machine drives both without tensors, against a runner that writes into every cache slot what the slot is for:
a token together with all that precedes it, drafts included, of which it accepts any number. A row that reads anything
but its own past is a defect of sharing, preemption, eviction, window-freeing or of taking drafts back. The same machine
must turn red under each of the defects planted below.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from llm.config import SchedulerConfig
from llm.engine import block_manager
from llm.engine.block_manager import NULL_BLOCK, BlockManager, BlockPool, IntegrityError
from llm.engine.engine import Engine
from llm.engine.request import Request, RequestStatus
from llm.engine.scheduler import Scheduler
from llm.engine.step import RunnerOutput, SchedulerOutput
from llm.sampling_params import SamplingParams

EOS = 3
STOP = 2
VOCAB = 4


@lru_cache
def params(n: int = 1, min_tokens: int = 0, ignore_eos: bool = False, stops: bool = False) -> SamplingParams:
    stop_token_ids = [STOP] if stops else None
    return SamplingParams(n=n, min_tokens=min_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids)


def cache_key(prefix_caching: bool, prompt_id: str, n: int) -> bytes | None:
    """What the engine gives a request; an engine needs a model, so its method is called without one."""
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching))
    row = SimpleNamespace(sharing=None, cache_salt=None, adapter=None, params=SimpleNamespace(n=n, inside=None))
    return Engine._cache_key(SimpleNamespace(config=config), prompt_id, row)  # type: ignore[arg-type]


def make_request(
    request_id: str,
    tokens: list[int],
    own: SamplingParams | None = None,
    *,
    max_total_tokens: int = 64,
    key: bytes | None = b"",
) -> Request:
    return Request(
        request_id,
        tokens,
        own or params(),
        seed=0,
        sample_index=0,
        max_total_tokens=max_total_tokens,
        eos_token_ids=frozenset({EOS}),
        cache_key=key,
    )


def make_scheduler(
    *,
    num_blocks: int = 33,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    budget: int = 64,
    max_num_seqs: int = 8,
    chunked: bool = True,
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs, budget, chunked)
    return Scheduler(config, BlockManager(num_blocks, list(windows), block_size))


@dataclass
class Row:
    """A row as the runner knows it: from `SchedulerOutput`s and its own samples, nothing else.

    `drafts`: those of the step that is computed.
    """

    tokens: list[int]
    computed: int
    tables: list[list[int]]
    slot: int
    owner: str
    drafts: list[int] = field(default_factory=list)

    def content(self, position: int) -> tuple[str, tuple[int, ...]]:
        return self.owner, tuple([*self.tokens, *self.drafts][: position + 1])


class FakeRunner:
    """Replays `SchedulerOutput`s; a slot holds a token, its past, and who may share them.

    Args:
        owner_of: request id -> equal for requests that may share blocks, and for no others.
    """

    def __init__(
        self, block_size: int, windows: list[int | None], owner_of: Callable[[str], str], has_states: bool
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self.owner_of = owner_of
        self.rows: dict[str, Row] = {}
        self.slots: list[dict[tuple[int, int], Any]] = [{} for _ in windows]
        self.has_states = has_states
        self.states: dict[int, Any] = {}  # slot -> what its state has seen

    def execute(self, plan: SchedulerOutput, random: Random) -> RunnerOutput:
        """Compute a step; which drafts are right, what is sampled and what is drafted next is left to chance."""
        self._update(plan)
        steps = [(self.rows[request_id], count) for request_id, count in plan.num_scheduled_tokens.items()]
        for group in range(len(self.windows)):
            written: set[tuple[int, int]] = set()
            # As attention does: first all rows write, then all rows read.
            for row, count in steps:
                self._write(group, row, count, written)
            for row, count in steps:
                self._read(group, row, count)
        for row, count in steps if self.has_states else ():
            self._advance_state(row, count)
        result = RunnerOutput()
        for request_id, count in plan.num_scheduled_tokens.items():
            row = self.rows[request_id]
            row.computed += count
            if row.computed == len(row.tokens) + len(row.drafts):
                result.sampled_token_ids[request_id] = self._sample(row, random)
            # Also while it is in prefill.
            if not self.has_states and random.random() < 0.5:
                result.draft_token_ids[request_id] = random.choices(range(VOCAB), k=random.randint(1, 6))
        return result

    def _advance_state(self, row: Row, count: int) -> None:
        """As a recurrent layer does: from zeros with a sequence's first token, else on from the one before."""
        assert sum(other.slot == row.slot for other in self.rows.values()) == 1, "two rows have one slot"
        assert row.slot != NULL_BLOCK
        if row.computed:
            assert self.states.get(row.slot) == row.content(row.computed - 1)
        self.states[row.slot] = row.content(row.computed + count - 1)

    def _sample(self, row: Row, random: Random) -> list[int]:
        """Some drafts and one token more; the others are forgotten, with the blocks that held nothing else."""
        sampled = [*row.drafts[: random.randint(0, len(row.drafts))], random.randrange(VOCAB)]
        row.tokens += sampled
        if row.drafts:
            row.computed, row.drafts = len(row.tokens) - 1, []
            for table in row.tables:
                del table[-(-row.computed // self.block_size) :]
        return sampled

    def _update(self, plan: SchedulerOutput) -> None:
        for request_id in plan.removed:
            del self.rows[request_id]
        for new in plan.new_rows:
            assert new.request_id not in self.rows
            tables = [list(blocks) for blocks in new.blocks]
            owner = self.owner_of(new.request_id)
            self.rows[new.request_id] = Row(list(new.token_ids), new.num_computed_tokens, tables, new.slot, owner)
        for request_id, groups in plan.new_blocks.items():
            for table, blocks in zip(self.rows[request_id].tables, groups, strict=True):
                table.extend(blocks)
        for request_id, drafts in plan.draft_token_ids.items():
            assert drafts, "no drafts are nothing to verify"
            self.rows[request_id].drafts = drafts

    def _slot(self, group: int, row: Row, position: int) -> tuple[int, int]:
        block = row.tables[group][position // self.block_size]
        assert block != NULL_BLOCK, f"position {position} lies in a block that was freed"
        return block, position % self.block_size

    def _write(self, group: int, row: Row, count: int, written: set[tuple[int, int]]) -> None:
        known = len(row.tokens) + len(row.drafts)
        assert row.computed + count <= known, "more tokens were scheduled than there are"
        assert row.computed + count == known or not row.drafts, "drafts without the token before them"
        for position in range(row.computed, row.computed + count):
            slot = self._slot(group, row, position)
            assert slot not in written, "two rows write one slot in a step"
            written.add(slot)
            self.slots[group][slot] = row.content(position)

    def _read(self, group: int, row: Row, count: int) -> None:
        """Attention: every position that some token of this step sees."""
        window = self.windows[group]
        first = 0 if window is None else max(0, row.computed - window + 1)
        for position in range(first, row.computed + count):
            found = self.slots[group].get(self._slot(group, row, position))
            assert found == row.content(position), f"position {position} holds {found}"


class SchedulerMachine(RuleBasedStateMachine):
    """Random traffic. Sequences are short and the vocabulary tiny, so that shared prefixes are the rule."""

    plant: Callable[[Scheduler], None] | None = None

    @initialize(
        block_size=st.integers(1, 4),
        max_model_len=st.integers(3, 20),
        windows=st.sampled_from([[None], [3], [None, 1], [None, 4], [5, 2]]),
        spare=st.integers(0, 8),
        num_slots=st.sampled_from([0, 0, 1, 2, 6]),
        budget=st.integers(1, 16),
        max_num_seqs=st.integers(1, 5),
        chunked=st.booleans(),
        prefix_caching=st.booleans(),
    )
    def build(
        self,
        block_size: int,
        max_model_len: int,
        windows: list[int | None],
        spare: int,
        num_slots: int,
        budget: int,
        max_num_seqs: int,
        chunked: bool,
        prefix_caching: bool,
    ) -> None:
        self.max_model_len = max_model_len
        self.prefix_caching = prefix_caching
        # As the engine's own configuration: one longest sequence fits, and so does a prompt that may not be cut.
        budget = budget if chunked else max(budget, max_model_len)
        self.config = SchedulerConfig(max_num_seqs, budget, chunked)
        self.num_blocks = -(-max_model_len // block_size) + spare + 1
        self.num_slots = num_slots
        blocks = BlockManager(self.num_blocks, windows, block_size, num_slots + 1 if num_slots else 0)
        self.scheduler = Scheduler(self.config, blocks)
        self.runner = FakeRunner(block_size, windows, lambda request_id: self.owners[request_id], num_slots > 0)
        self.owners: dict[str, str] = {}
        self.prompts: list[list[int]] = [[]]
        self.heads: list[list[int]] = [[]]  # prompts, and rows with what was drafted for them
        self.added: list[Request] = []
        self.sound = True
        if self.plant is not None:
            type(self).plant(self.scheduler)  # type: ignore[misc]

    @rule(
        like=st.integers(0, 7),
        keep=st.integers(0, 20),
        tail=st.lists(st.integers(0, 1), max_size=12),
        own=st.builds(params, st.sampled_from([1, 1, 1, 2, 3]), st.sampled_from([0, 0, 3]), st.booleans()),
        max_tokens=st.integers(1, 20),
    )
    def add(self, like: int, keep: int, tail: list[int], own: SamplingParams, max_tokens: int) -> None:
        """A prompt that begins like an earlier one or its answer, `n` times."""
        tokens = ([*self.heads[-1 - like % len(self.heads)][:keep], *tail] or [0])[: self.max_model_len - 1]
        prompt_id = str(len(self.prompts))
        self.prompts.append(tokens)
        self.heads.append(tokens)
        for index in range(own.n):
            request_id = f"{prompt_id}-{index}"
            key = cache_key(self.prefix_caching, prompt_id, own.n)
            self.owners[request_id] = request_id if key is None else key.hex()
            total = min(self.max_model_len, len(tokens) + max_tokens)
            request = make_request(request_id, tokens, own, max_total_tokens=total, key=key)
            self.added.append(request)
            self.scheduler.add(request)

    @rule(entropy=st.integers(0, 2**32 - 1), count=st.integers(1, 5))
    def steps(self, entropy: int, count: int) -> None:
        random = Random(entropy)
        for _ in range(count):
            self._step(random)

    @rule(which=st.lists(st.integers(0, 63), min_size=1, max_size=3))
    def abort(self, which: list[int]) -> None:
        """Of waiting, running and finished ones alike: a name that is gone is no error."""
        self.sound = False
        self.scheduler.abort({self.added[index % len(self.added)].request_id for index in which if self.added})
        self.sound = True

    @rule()
    def reset_prefix_cache(self) -> None:
        self.scheduler.blocks.reset_prefix_cache()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    @invariant()
    def first_come_first_served(self) -> None:
        """Running ones all came before waiting ones, each in the order of arrival, preempted or not."""
        if hasattr(self, "scheduler"):
            served = [request.request_id for request in (*self.scheduler.running, *self.scheduler.waiting)]
            arrived = [request.request_id for request in self.added if request.status is not RequestStatus.FINISHED]
            assert served == arrived

    def teardown(self) -> None:
        """All that is left finishes, and every block comes back; not asked of what has just failed."""
        if getattr(self, "sound", False):
            self._run_dry()
            assert self.scheduler.blocks.num_free_blocks() == self.num_blocks - 1
            assert self.scheduler.blocks.num_free_slots() == self.num_slots
            assert not self.runner.rows

    def _run_dry(self) -> None:
        """The oldest request computes a token in every step, so the number of steps is bounded."""
        random = Random(0)
        for _ in range(sum(request.max_total_tokens for request in self.added)):
            if not self.scheduler.has_unfinished():
                break
            self._step(random)
            self.scheduler.check_integrity()
        assert not self.scheduler.has_unfinished()
        self.runner.execute(self.scheduler.schedule(), random)  # who left last

    def _step(self, random: Random) -> None:
        self.sound = False
        unfinished = [request for request in self.added if request.status is not RequestStatus.FINISHED]
        before = {request.request_id: request.num_computed_tokens for request in self.scheduler.running}
        plan = self.scheduler.schedule()
        self._check_plan(plan, unfinished, before)
        drafted = plan.draft_token_ids.items()
        self.heads += [self.scheduler.requests[request_id].token_ids + drafts for request_id, drafts in drafted]
        result = self.runner.execute(plan, random)
        self.scheduler.update_from_output(plan, result)
        for request_id, sampled in result.sampled_token_ids.items():
            self._append(self.scheduler.requests[request_id], sampled)
        self.scheduler.remove_finished()
        self._check_blocks(set(result.sampled_token_ids))
        self.sound = True

    def _check_plan(self, plan: SchedulerOutput, unfinished: list[Request], before: dict[str, int]) -> None:
        scheduled = plan.num_scheduled_tokens
        assert sum(scheduled.values()) <= self.config.max_num_batched_tokens
        assert all(count >= 1 for count in scheduled.values())
        assert len(self.scheduler.running) <= self.config.max_num_seqs
        if unfinished:
            assert unfinished[0].request_id in scheduled, "the oldest request must get on in every step"
        starts = before | {new.request_id: new.num_computed_tokens for new in plan.new_rows}
        for request_id, count in scheduled.items():
            request = self.scheduler.requests[request_id]
            drafts = plan.draft_token_ids.get(request_id, [])
            # What it computes is not counted yet, and all that it may draw is within its length.
            assert request.num_computed_tokens == starts[request_id]
            assert request.num_computed_tokens + count <= request.num_tokens + len(drafts)
            assert not drafts or request.num_tokens + len(drafts) + 1 <= request.max_total_tokens
        if not self.config.enable_chunked_prefill:
            for new in plan.new_rows:
                assert scheduled[new.request_id] == len(new.token_ids) - new.num_computed_tokens

    def _append(self, request: Request, sampled: list[int]) -> None:
        """As `Engine._update`: what is sampled after its last token is dropped."""
        assert self.runner.rows[request.request_id].tokens == [*request.token_ids, *sampled]
        for token in sampled:
            if request.append(token):
                self.scheduler.finish(request)
                return
        assert request.num_computed_tokens == request.num_tokens - 1

    def _check_blocks(self, drew: set[str]) -> None:
        """After a step nobody can tell that there were drafts, and the runner's tables are the scheduler's.

        `drew`: the requests that drew a token. Another one, computed again after a preemption, may hold a block more:
        it was admitted with blocks for all of its tokens.
        """
        for request in self.scheduler.running:
            lengths = {len(blocks) for blocks in request.blocks}
            assert {len(table) for table in self.runner.rows[request.request_id].tables} == lengths
            if request.request_id in drew and request.num_tokens > request.num_prompt_tokens:
                assert request.num_computed_tokens == request.num_tokens - 1
                assert lengths == {-(-request.num_computed_tokens // self.scheduler.blocks.block_size)}


SchedulerMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerMachine = SchedulerMachine.TestCase


def plant_double_free(scheduler: Scheduler) -> None:
    free = scheduler.blocks.free

    def twice(request: Request) -> None:
        held = [block for block in (request.blocks or [[]])[0] if block != NULL_BLOCK]
        free(request)
        for block in held[:1]:
            scheduler.blocks.pools[0].release(block)

    scheduler.blocks.free = twice  # type: ignore[method-assign]


def plant_leak(scheduler: Scheduler) -> None:
    free = scheduler.blocks.free

    def leaky(request: Request) -> None:
        if request.blocks:
            request.blocks[-1] = request.blocks[-1][:-1]
        free(request)

    scheduler.blocks.free = leaky  # type: ignore[method-assign]


def plant_window_freed_early(scheduler: Scheduler) -> None:
    blocks = scheduler.blocks
    honest = blocks._first_seen_block
    blocks._first_seen_block = lambda position, window: honest(position + 1, window)  # type: ignore[method-assign]


def plant_hash_without_parent(scheduler: Scheduler) -> None:
    blocks = scheduler.blocks

    def extend(request: Request) -> None:
        for index in range(len(request.block_hashes), request.num_tokens // blocks.block_size):
            request.block_hashes.append(hashlib.sha256(blocks._tokens(request, index)).digest())

    blocks._extend_hashes = extend  # type: ignore[method-assign]


def plant_eviction_forgotten(scheduler: Scheduler) -> None:
    for pool in scheduler.blocks.pools:
        pool._forget = lambda block: None  # type: ignore[method-assign]


def plant_key_ignored(scheduler: Scheduler) -> None:
    add = scheduler.add

    def shared_by_all(request: Request) -> None:
        request.cache_key = b""
        add(request)

    scheduler.add = shared_by_all  # type: ignore[method-assign]


def plant_budget_exceeded(scheduler: Scheduler) -> None:
    scheduler.config = replace(scheduler.config, max_num_batched_tokens=scheduler.config.max_num_batched_tokens + 1)


def plant_too_many_rows(scheduler: Scheduler) -> None:
    scheduler.config = replace(scheduler.config, max_num_seqs=scheduler.config.max_num_seqs + 1)


def plant_oldest_preempted(scheduler: Scheduler) -> None:
    preempt = scheduler.preempt_last

    def first() -> Request:
        scheduler.running.append(scheduler.running.pop(0))
        return preempt()

    scheduler.preempt_last = first  # type: ignore[method-assign]


def plant_slot_leaked(scheduler: Scheduler) -> None:
    free = scheduler.blocks.free

    def leaky(request: Request) -> None:
        request.slot = NULL_BLOCK
        free(request)

    scheduler.blocks.free = leaky  # type: ignore[method-assign]


def plant_slot_taken_back_early(scheduler: Scheduler) -> None:
    if scheduler.blocks.slots is not None:
        slots = scheduler.blocks.slots
        slots.allocate = lambda count: [1]  # type: ignore[method-assign]


def plant_prefix_shared_without_its_state(scheduler: Scheduler) -> None:
    scheduler.blocks._shares = lambda request: request.cache_key is not None  # type: ignore[method-assign]


def plant_removal_untold(scheduler: Scheduler) -> None:
    preempt = scheduler.preempt_last

    def untold() -> Request:
        request = preempt()
        scheduler._removed.remove(request.request_id)
        return request

    scheduler.preempt_last = untold  # type: ignore[method-assign]


def plant_rejected_tokens_counted(scheduler: Scheduler) -> None:
    update = scheduler.update_from_output

    def one_more(plan: SchedulerOutput, result: RunnerOutput) -> int:
        accepted = update(plan, result)
        for request_id in plan.draft_token_ids:
            scheduler.requests[request_id].num_computed_tokens += 1
        return accepted

    scheduler.update_from_output = one_more  # type: ignore[method-assign]


def plant_block_of_drafts_kept(scheduler: Scheduler) -> None:
    scheduler.blocks.trim = lambda request: None  # type: ignore[method-assign]


def plant_block_taken_back_early(scheduler: Scheduler) -> None:
    trim = scheduler.blocks.trim

    def one_more(request: Request) -> None:
        request.num_computed_tokens -= 1
        trim(request)
        request.num_computed_tokens += 1

    scheduler.blocks.trim = one_more  # type: ignore[method-assign]


def plant_drafts_beyond_the_length(scheduler: Scheduler) -> None:
    verify = scheduler._verify

    def longer(plan: SchedulerOutput, request: Request, *rest: int) -> int:
        request.max_total_tokens += 1
        count = verify(plan, request, *rest)
        request.max_total_tokens -= 1
        return count

    scheduler._verify = longer  # type: ignore[method-assign]


def plant_drafts_before_their_token(scheduler: Scheduler) -> None:
    verify = scheduler._verify

    def always(plan: SchedulerOutput, request: Request, count: int, budget: int, later: int) -> int:
        # A step that ends before the last known token has used up its budget: nothing would be left for drafts.
        return verify(plan, request, request.num_tokens - request.num_computed_tokens, budget + 64, later)

    scheduler._verify = always  # type: ignore[method-assign]


PLANTS = [value for name, value in list(globals().items()) if name.startswith("plant_")]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.removeprefix("plant_"))
def test_machine_sees_planted_defects(plant: Callable[[Scheduler], None]) -> None:
    broken = type("BrokenMachine", (SchedulerMachine,), {"plant": plant})
    quick = settings(
        max_examples=300,
        stateful_step_count=25,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, IntegrityError)):
        run_state_machine_as_test(broken, settings=quick)


def step(scheduler: Scheduler, result: RunnerOutput | None = None) -> SchedulerOutput:
    """Schedule, and give back a result."""
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, result or RunnerOutput())
    return plan


def run_to_end(scheduler: Scheduler) -> tuple[int, list[SchedulerOutput]]:
    """Step until all is done, sampling token 0: (tokens computed, plans)."""
    plans = []
    while scheduler.has_unfinished():
        plans.append(step(scheduler))
        for request_id in plans[-1].num_scheduled_tokens:
            request = scheduler.requests[request_id]
            if request.num_computed_tokens == request.num_tokens and request.append(0):
                scheduler.finish(request)
        scheduler.remove_finished()
        scheduler.check_integrity()
    return sum(sum(plan.num_scheduled_tokens.values()) for plan in plans), plans


@given(
    shared=st.integers(0, 24),
    tails=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    block_size=st.integers(1, 8),
    budget=st.integers(1, 80),
)
@settings(max_examples=60)
def test_prompts_that_arrive_together_compute_a_shared_prefix_once(
    shared: int, tails: tuple[int, int], block_size: int, budget: int
) -> None:
    scheduler = make_scheduler(num_blocks=200, block_size=block_size, budget=budget)
    for index, tail in enumerate(tails):
        tokens = [7] * shared + [index] * tail
        scheduler.add(make_request(str(index), tokens, max_total_tokens=len(tokens) + 1))
    computed, _ = run_to_end(scheduler)
    assert computed == shared + sum(tails) + shared % block_size


def test_a_shared_prefix_is_found_within_the_step_that_computes_it() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_request("a", [1] * 12 + [2]))
    scheduler.add(make_request("b", [1] * 12 + [3]))
    plan = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 13, "b": 1}
    assert plan.new_rows[0].blocks[0][:3] == plan.new_rows[1].blocks[0][:3]
    assert plan.new_rows[1].num_computed_tokens == 12


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_siblings_share_their_prompt_and_strangers_only_with_prefix_caching(prefix_caching: bool) -> None:
    scheduler = make_scheduler(block_size=4)
    for prompt_id in ("0", "1"):
        for index in range(3):
            key = cache_key(prefix_caching, prompt_id, 3)
            scheduler.add(make_request(f"{prompt_id}-{index}", [1] * 9, params(n=3), key=key))
    scheduled = step(scheduler).num_scheduled_tokens
    assert [scheduled[f"0-{index}"] for index in range(3)] == [9, 1, 1]
    assert [scheduled[f"1-{index}"] for index in range(3)] == [1 if prefix_caching else 9, 1, 1]


def test_without_prefix_caching_one_completion_leaves_nothing_to_find() -> None:
    scheduler = make_scheduler(block_size=4)
    for request_id in ("a", "b"):
        scheduler.add(make_request(request_id, [1] * 9, max_total_tokens=10, key=cache_key(False, request_id, 1)))
        assert run_to_end(scheduler)[0] == 9
    assert not scheduler.blocks.pools[0].content


def finish_prompt(scheduler: Scheduler, request_id: str, tokens: list[int]) -> int:
    """Run a prompt that samples one token, alone; the tokens it had to compute."""
    scheduler.add(make_request(request_id, tokens, max_total_tokens=len(tokens) + 1))
    return run_to_end(scheduler)[0]


def test_the_least_recently_used_prefix_is_evicted_tail_first() -> None:
    # 8 blocks of 2 tokens. Each prompt holds 3 blocks, of which 2 are full and computed before its last token.
    scheduler = make_scheduler(num_blocks=9, block_size=2)
    prompts = {name: [token] * 5 for token, name in enumerate("abc")}
    assert [finish_prompt(scheduler, name, prompts[name]) for name in "abc"] == [5, 5, 5]
    assert finish_prompt(scheduler, "a again", prompts["a"]) == 1
    # 2 blocks are free of content: a prompt of 3 blocks evicts one, the tail of b, now the oldest.
    assert finish_prompt(scheduler, "d", [3] * 5) == 5
    assert finish_prompt(scheduler, "b again", prompts["b"]) == 3
    assert finish_prompt(scheduler, "a once more", prompts["a"]) == 1


class ConstantHash:
    """A hash under which everything collides."""

    def __init__(self, data: bytes) -> None:
        pass

    def digest(self) -> bytes:
        return bytes(32)


def test_tokens_are_compared_when_hashes_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager.hashlib, "sha256", ConstantHash)
    scheduler = make_scheduler(block_size=4)
    assert finish_prompt(scheduler, "a", [1] * 6) == 6
    assert finish_prompt(scheduler, "same", [1] * 6) == 2
    assert finish_prompt(scheduler, "other", [2] * 6) == 6
    # The control: without the comparison the other prompt would be given the first one's keys.
    monkeypatch.setattr(BlockPool, "find", lambda self, digest, tokens: self.by_hash.get(digest, -1))
    assert finish_prompt(scheduler, "served wrongly", [2] * 6) == 2


def test_a_request_takes_no_more_from_the_cache_than_it_may() -> None:
    """Tokens whose logprobs are wanted must be computed; so must all that a parameter keeps from the cache."""
    scheduler = make_scheduler(block_size=4)
    assert finish_prompt(scheduler, "a", [1] * 9) == 9
    unread = SamplingParams(skip_reading_prefix_cache=True)
    scheduler.add(make_request("b", [1] * 9, unread, max_total_tokens=10))
    assert run_to_end(scheduler)[0] == 9
    request = make_request("c", [1] * 9, max_total_tokens=10)
    request.prompt_logprobs_from = 5
    scheduler.add(request)
    assert run_to_end(scheduler)[0] == 5
    assert finish_prompt(scheduler, "d", [1] * 9) == 1


def test_the_last_to_arrive_is_preempted_and_recomputes_what_it_had() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    first, second = make_request("a", [0] * 3, key=None), make_request("b", [1] * 3, key=None)
    for request in (first, second):
        scheduler.add(request)
    assert step(scheduler).num_scheduled_tokens == {"a": 3, "b": 3}
    for token in range(2):
        first.append(0)
        second.append(1)
        plan = step(scheduler)
        scheduler.check_integrity()
        if token == 0:
            assert plan.num_scheduled_tokens == {"a": 1, "b": 1}
    assert plan.num_scheduled_tokens == {"a": 1}
    assert plan.removed == ["b"]
    assert (second.status, second.num_computed_tokens, second.blocks) == (RequestStatus.WAITING, 0, [])
    assert (second.num_preemptions, scheduler.num_preemptions) == (1, 1)
    scheduler.abort(["a"])
    resumed = step(scheduler)
    assert resumed.removed == ["a"]
    assert resumed.new_rows[0].token_ids == [1] * 5
    assert resumed.new_rows[0].num_prompt_tokens == 3
    assert resumed.num_scheduled_tokens == {"b": 5}


def test_cached_tokens_are_counted_at_the_first_admission_only() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    request = make_request("a", [0] * 5)
    scheduler.add(request)
    step(scheduler)
    scheduler.preempt_last()
    step(scheduler)
    assert request.num_computed_tokens == 5
    assert request.num_cached_tokens == 0


@pytest.mark.parametrize("chunked", [True, False])
def test_prompts_are_cut_only_when_chunking_is_on(chunked: bool) -> None:
    scheduler = make_scheduler(budget=10, chunked=chunked)
    for request_id, token in (("a", 0), ("b", 1)):
        scheduler.add(make_request(request_id, [token] * 7))
    assert step(scheduler).num_scheduled_tokens == ({"a": 7, "b": 3} if chunked else {"a": 7})


def test_a_window_keeps_only_the_blocks_it_sees() -> None:
    scheduler = make_scheduler(block_size=2, windows=(None, 3))
    request = make_request("a", [0] * 8)
    scheduler.add(request)
    step(scheduler)
    request.append(0)
    step(scheduler)
    # The next token is at position 8 and sees 6 and later: blocks 0 to 2 are gone.
    full, windowed = request.blocks
    assert NULL_BLOCK not in full and len(full) == 5
    assert windowed[:3] == [NULL_BLOCK] * 3 and NULL_BLOCK not in windowed[3:]
    scheduler.check_integrity()


def drafted(count: int, *, tokens: int = 5, **fields: Any) -> tuple[Scheduler, list[Request], SchedulerOutput]:
    """Three requests that have sampled a token and have `count` drafts each, and the step that verifies them."""
    scheduler = make_scheduler(**fields)
    requests = [make_request(name, [index] * tokens, key=None) for index, name in enumerate("abc")]
    for request in requests:
        scheduler.add(request)
    step(scheduler, RunnerOutput(draft_token_ids={name: [1] * count for name in "abc"}))
    for request in requests:
        request.append(0)
    return scheduler, requests, scheduler.schedule()


def test_drafts_take_what_others_leave_of_the_budget() -> None:
    _, requests, plan = drafted(4, budget=15)
    assert plan.num_scheduled_tokens == {"a": 5, "b": 5, "c": 5}
    _, requests, plan = drafted(9, budget=15)
    # Of 15 tokens two are kept for b and c, then one for c.
    assert plan.num_scheduled_tokens == {"a": 10, "b": 4, "c": 1}
    assert {name: len(drafts) for name, drafts in plan.draft_token_ids.items()} == {"a": 9, "b": 3}
    assert not any(request.draft_token_ids for request in requests)


def test_nothing_is_preempted_for_drafts() -> None:
    """Six blocks of three tokens: each request holds two and has one token of room, and no block is left."""
    scheduler, _, plan = drafted(5, num_blocks=7, block_size=3)
    assert plan.num_scheduled_tokens == {"a": 1, "b": 1, "c": 1} and not plan.draft_token_ids
    # With three more the first may have one for its drafts: the others could need one each.
    scheduler, _, plan = drafted(5, num_blocks=10, block_size=3)
    assert {name: len(drafts) for name, drafts in plan.draft_token_ids.items()} == {"a": 3, "b": 3, "c": 3}
    assert scheduler.num_preemptions == 0
    scheduler.check_integrity()


def test_drafts_end_where_the_request_must() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [0] * 5, max_total_tokens=8)
    scheduler.add(request)
    step(scheduler, RunnerOutput(draft_token_ids={"a": [1] * 9}))
    request.append(0)
    # Token 8, the last, is sampled behind the draft for token 7.
    assert scheduler.schedule().draft_token_ids == {"a": [1]}


def test_counts_and_blocks_follow_what_was_accepted() -> None:
    scheduler, (a, b, c), plan = drafted(9, block_size=4)
    assert plan.num_scheduled_tokens == {"a": 10, "b": 10, "c": 10}
    assert [len(request.blocks[0]) for request in (a, b, c)] == [4, 4, 4]
    assert [request.num_computed_tokens for request in (a, b, c)] == [5, 5, 5]
    answer = RunnerOutput(sampled_token_ids={"a": [1] * 9 + [0], "b": [1, 1, 0]}, errors={"c": ValueError()})
    assert scheduler.update_from_output(plan, answer) == 9 + 2
    # All known tokens but the last, and for c, which could not sample, all.
    assert [request.num_computed_tokens for request in (a, b, c)] == [15, 8, 6]
    assert [len(request.blocks[0]) for request in (a, b, c)] == [4, 2, 2]
    scheduler.check_integrity()


def test_a_request_that_is_preempted_forgets_its_drafts() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [0] * 5, key=None)
    scheduler.add(request)
    step(scheduler, RunnerOutput(draft_token_ids={"a": [1, 1]}))
    request.append(0)
    scheduler.preempt_last()
    plan = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 6} and not plan.draft_token_ids
    # Nor does it verify them behind the token that it samples then: they were drafted for that one's place.
    request.append(0)
    plan = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 1} and not plan.draft_token_ids


def test_drafts_wait_for_the_last_known_token() -> None:
    """After a preemption the known tokens come in chunks; what was drafted meanwhile is verified with the last."""
    scheduler = make_scheduler(budget=4)
    request = make_request("a", [0] * 10)
    scheduler.add(request)
    step(scheduler, RunnerOutput(draft_token_ids={"a": [1]}))
    assert step(scheduler).num_scheduled_tokens == {"a": 4}
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 3} and plan.draft_token_ids == {"a": [1]}


def test_what_a_finished_request_accepted_last_is_found() -> None:
    scheduler = make_scheduler(block_size=2)
    request = make_request("a", [0] * 3)
    scheduler.add(request)
    step(scheduler, RunnerOutput(draft_token_ids={"a": [1, 1, 1, 1]}))
    request.append(0)
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, RunnerOutput(sampled_token_ids={"a": [1, 1, 1, 2]}))
    for token in (1, 1, EOS):  # the engine ends it before the last
        request.append(token)
    scheduler.finish(request)
    # Seven tokens, of which the last is never computed without drafts.
    assert sorted(len(tokens) for _, tokens in scheduler.blocks.pools[0].content.values()) == [16, 16, 16]
    found, _ = scheduler.blocks.match_prefix(make_request("b", [0, 0, 0, 0, 1, 1, EOS, 5, 5]))
    assert found == 6


def test_double_free_is_refused_where_it_happens() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.release(block)
    with pytest.raises(IntegrityError, match=f"block {block} freed twice"):
        pool.release(block)


def test_the_audit_finds_every_kind_of_imbalance() -> None:
    def audited(spoil: Callable[[Scheduler, Request], object]) -> None:
        scheduler = make_scheduler(block_size=2)
        request = make_request("a", [0] * 5)
        scheduler.add(request)
        step(scheduler)
        spoil(scheduler, request)
        scheduler.check_integrity()

    audited(lambda scheduler, request: None)
    spoiled: list[Callable[[Scheduler, Request], object]] = [
        lambda scheduler, request: request.blocks[0].pop(),
        lambda scheduler, request: request.blocks[0].append(request.blocks[0][0]),
        lambda scheduler, request: scheduler.blocks.pools[0].free.popitem(),
        lambda scheduler, request: scheduler.blocks.pools[0].free.setdefault(request.blocks[0][0]),
        lambda scheduler, request: scheduler.blocks.pools[0].free.setdefault(NULL_BLOCK),
        lambda scheduler, request: scheduler.blocks.pools[0].by_hash.popitem(),
        lambda scheduler, request: scheduler.blocks.pools[0].content.popitem(),
        lambda scheduler, request: scheduler.running.clear(),
        lambda scheduler, request: scheduler.waiting.append(request),
    ]
    for spoil in spoiled:
        with pytest.raises(RuntimeError):  # IntegrityError is one
            audited(spoil)


def test_aborting_is_harmless_wherever_the_request_is() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = make_request("running", [0] * 5), make_request("waiting", [1] * 5)
    for request in (running, waiting):
        scheduler.add(request)
    step(scheduler)
    scheduler.abort(["running", "waiting", "unknown", "running"])
    assert not scheduler.has_unfinished()
    assert [request.finish_reason for request in (running, waiting)] == ["abort", "abort"]
    assert step(scheduler).removed == ["running"]
    scheduler.check_integrity()


def ended(request: Request) -> tuple[str | None, int | str | None]:
    return request.finish_reason, request.stop_reason


@pytest.mark.parametrize(
    ("own", "tokens", "reason"),
    [
        (params(), [0, EOS], ("stop", None)),
        (params(ignore_eos=True), [0, EOS, 0], ("length", None)),
        (params(stops=True), [0, STOP], ("stop", STOP)),
        (params(min_tokens=3, stops=True), [EOS, STOP, EOS], ("stop", None)),
        (params(min_tokens=3, stops=True), [EOS, STOP, 0], ("length", None)),
        (params(stops=True), [0, 0, STOP], ("stop", STOP)),
        (params(), [0, 0, EOS], ("stop", None)),
        (SamplingParams(stop_token_ids=[EOS]), [EOS], ("stop", None)),
        (SamplingParams(stop_token_ids=[EOS], ignore_eos=True), [EOS], ("stop", EOS)),
    ],
)
def test_a_request_ends_by_eos_then_stop_tokens_then_length(
    own: SamplingParams, tokens: list[int], reason: tuple[str, int | None]
) -> None:
    request = make_request("a", [0, 0], own, max_total_tokens=5)
    assert [request.append(token) for token in tokens] == [False] * (len(tokens) - 1) + [True]
    assert ended(request) == reason
    assert request.output_token_ids == tokens


def test_a_prompt_is_admitted_when_all_of_it_has_room_and_not_only_its_first_chunk() -> None:
    """Half-admitted prompts would preempt each other."""
    scheduler = make_scheduler(num_blocks=7, block_size=4, budget=12)
    scheduler.add(make_request("a", [1] * 8))
    scheduler.add(make_request("b", [2] * 20, max_total_tokens=24))
    plan = step(scheduler)
    assert [row.request_id for row in plan.new_rows] == ["a"]
    scheduler.abort(["a"])
    plan = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 12} and len(plan.new_rows[0].blocks[0]) == 5
