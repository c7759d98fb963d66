"""Which tokens the next step computes.

First come first served or by priority, a token budget per step, chunked prefill, preemption by recomputation. No
tensors, no clocks. Its decisions are a `SchedulerOutput`, plain data that can be sent to another process.
"""

from __future__ import annotations

import bisect
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

from llm.config.engine import SchedulerConfig
from llm.engine.block_manager import BlockManager, StateSnapshots
from llm.engine.boundary import RunnerPlan
from llm.engine.request import Request, RequestStatus
from llm.engine.step import NO_SLOT, Adapter, NewRow, RunnerOutput, SchedulerOutput
from llm.forward import group_states

# Tokens of a step with drafts, of a model with recurrent states.
_MOST_WITH_DRAFTS = 128


class Scheduler:
    """First come, first served, with at most `max_num_batched_tokens` tokens and `max_num_seqs` batch rows per step.

    With the policy "priority" `running` is in the order of `Request.rank`, the lowest (priority, arrival) first, and of
    the waiting requests the lowest is started.

    A request whose adapter finds no slot is passed over until one is free.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, max_loras: int = 0) -> None:
        self.config = config
        self.blocks = blocks
        self.adapters = AdapterSlots(max_loras)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self._removed: list[str] = []
        self.num_preemptions = 0
        self._by_priority = config.scheduling_policy == "priority"
        self._arrivals = 0

    def add(self, request: Request) -> None:
        self._arrivals += 1
        request.rank = request.rank[0], self._arrivals
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> SchedulerOutput:
        """Choose this step's tokens: running requests first, then, unless one was preempted, waiting ones."""
        plan = SchedulerOutput()
        budget = self.config.max_num_batched_tokens
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = self._chunk(request, min(request.num_tokens - request.num_computed_tokens, budget))
            drafts = 0
            if request.draft_token_ids:
                drafts = self._verify(plan, request, count, budget, len(self.running) - index - 1)
                count += drafts
            while (new_blocks := self._allocate(request, request.num_computed_tokens + count)) is None:
                preempted = True
                if self.preempt_last() is request:
                    break
            else:
                if any(new_blocks):
                    plan.new_blocks[request.request_id] = new_blocks
                self._schedule(plan, request, count, drafts)
                budget -= count
                index += 1
        while not preempted and budget > 0 and len(self.running) < self.config.max_num_seqs:
            place = self._next_waiting()
            if place is None:
                break
            request = self.waiting[place]
            prefix = self.blocks.match_prefix(request)
            count = request.num_tokens - prefix[0]
            if count > budget and not self.config.enable_chunked_prefill:
                if plan.num_scheduled_tokens:
                    break
                budget = count  # a prompt that fits no step has one of its own
            # Blocks are reserved for the whole prompt, not only for this chunk: partly admitted prompts would thrash.
            if not self.blocks.admit(request, self._with_next(request, request.num_tokens), prefix):
                break
            count = self._chunk(request, min(count, budget))
            del self.waiting[place]
            self._start(plan, request)
            self._schedule(plan, request, count)
            budget -= count
        plan.removed, self._removed = self._removed, []
        plan.goes_on = self.config.async_scheduling and self._goes_on(plan)
        if self.blocks.slots is not None and sum(plan.num_scheduled_tokens.values()) > _MOST_WITH_DRAFTS:
            self._drop_drafts(plan)
        return plan

    def update_from_output(self, plan: SchedulerOutput, result: RunnerOutput) -> int:
        """Update computed tokens and free the blocks of rejected drafts; returns the number of accepted drafts.

        Call it before the sampled tokens are appended to the requests.
        """
        requests, num_accepted = self.requests, 0
        self.blocks.commit_snapshots()
        for request_id, count in plan.num_scheduled_tokens.items():
            requests[request_id].num_computed_tokens += count
        for request_id, drafts in plan.draft_token_ids.items():
            request = requests[request_id]
            # The last sampled token is no draft; with an error it is missing.
            accepted = max(0, len(result.sampled_token_ids.get(request_id, ())) - 1)
            request.num_computed_tokens -= len(drafts) - accepted
            request.num_drafted_tokens += len(drafts)
            request.num_accepted_tokens += accepted
            num_accepted += accepted
            self.blocks.trim(request)
        for request_id, drafts in result.draft_token_ids.items():
            if requests[request_id].params.inside is None:  # a rejected draft would be among its activations
                requests[request_id].draft_token_ids = drafts
        return num_accepted

    def finish(self, request: Request) -> None:
        """Forget a request that has a `finish_reason`, and free its blocks."""
        if request.status is RequestStatus.RUNNING:
            self._removed.append(request.request_id)
            self.adapters.release(request.adapter)
            # Drafts accepted in its last step are not in the prefix cache yet. Its last token is never computed.
            self.blocks.remember(request, min(request.num_computed_tokens, request.num_tokens - 1))
        self.blocks.free(request)
        del self.requests[request.request_id]
        request.status = RequestStatus.FINISHED

    def remove_finished(self) -> None:
        """Drop finished requests from the queues; once per step, so that finishing one is O(1)."""
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        if any(request.status is RequestStatus.FINISHED for request in self.waiting):
            self.waiting = deque(request for request in self.waiting if request.status is RequestStatus.WAITING)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests in any state; ids of finished requests are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                request.finish("abort")
                self.finish(request)
        self.remove_finished()

    def check_integrity(self) -> None:
        """Check blocks and queues; raises `IntegrityError` or RuntimeError."""
        self.blocks.check_integrity(self.requests.values())
        queued = [request.request_id for request in (*self.running, *self.waiting)]
        if sorted(queued) != sorted(self.requests):
            raise RuntimeError("a request is in no queue, or in two")
        if self.adapters.users() != Counter(item.adapter.digest for item in self.running if item.adapter is not None):
            raise RuntimeError("an adapter counts other requests than those that run with it")

    def _allocate(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """As `BlockManager.allocate`; with `async_scheduling` for one token more, where there are blocks for it."""
        if self.config.async_scheduling:
            more = self.blocks.allocate(request, self._with_next(request, num_tokens))
            if more is not None:
                return more
        return self.blocks.allocate(request, num_tokens)

    def _with_next(self, request: Request, num_tokens: int) -> int:
        """With the token that a step computes which is started early."""
        return min(num_tokens + 1, request.max_total_tokens) if self.config.async_scheduling else num_tokens

    def _goes_on(self, plan: SchedulerOutput) -> bool:
        """True if all running rows sample in this step, and the next one has most of them, and few or no prompts.

        A prompt is computed after what was started early, by a pass of its own; many of them had better share one.
        """
        counts = plan.num_scheduled_tokens
        if plan.draft_token_ids or any(
            request.num_computed_tokens + counts.get(request.request_id, 0) < request.num_tokens
            for request in self.running
        ):
            return False
        ending = sum(request.num_tokens + 1 >= request.max_total_tokens for request in self.running)
        if self.waiting and (8 * ending > len(self.running) or len(self.running) < self.config.max_num_seqs):
            return False
        return ending < len(self.running)

    def _next_waiting(self) -> int | None:
        """The place of the first waiting request, or the lowest, whose adapter has a slot or finds one."""
        fitting = (place for place, request in enumerate(self.waiting) if self.adapters.has_room(request.adapter))
        if self._by_priority:
            return min(fitting, key=lambda place: self.waiting[place].rank, default=None)
        return next(fitting, None)

    def _schedule(self, plan: SchedulerOutput, request: Request, count: int, drafts: int = 0) -> None:
        """Plan `count` tokens; the last `drafts` may be rejected, so they are not added to the prefix cache."""
        plan.num_scheduled_tokens[request.request_id] = count
        self.blocks.remember(request, request.num_computed_tokens + count - drafts)
        slot = -1 if drafts else self.blocks.take_snapshot(request, request.num_computed_tokens + count)
        if slot >= 0:
            plan.snapshots.append((request.slot, slot))

    def _chunk(self, request: Request, count: int) -> int:
        """As many of `count` tokens as one step may compute; more where a run that sees both ways would be cut."""
        count = self._up_to_snapshot(request, count)
        if request.images is None or not request.images.spans:
            return count
        start = request.num_computed_tokens
        return request.images.whole(start, start + count) - start

    def _up_to_snapshot(self, request: Request, count: int) -> int:
        """At most so many tokens that the step ends where a snapshot of the recurrent states is to be taken."""
        position = self.blocks.next_snapshot(request) if self.config.enable_chunked_prefill else 0
        return min(count, position - request.num_computed_tokens) if position else count

    def _verify(self, plan: SchedulerOutput, request: Request, count: int, budget: int, later: int) -> int:
        """Plan the request's drafts if this step computes its last known token; returns their number.

        Drafts never delay or preempt a running request: a token of the budget and a block are reserved for each of the
        `later` ones. The token sampled after the last draft must be within the request's length.
        """
        if request.num_computed_tokens + count < request.num_tokens:
            return 0
        most = min(budget - count - later, request.max_total_tokens - request.num_tokens - 1)
        most = min(most, self.blocks.room(request, later) - request.num_tokens)
        if position := self.blocks.next_snapshot(request):  # none is taken of a state that drafts may change
            most = min(most, position - 1 - request.num_tokens)
        drafts, request.draft_token_ids = request.draft_token_ids[: max(0, most)], []
        if drafts:
            plan.draft_token_ids[request.request_id] = drafts
        return len(drafts)

    def _drop_drafts(self, plan: SchedulerOutput) -> None:
        """A step with drafts keeps what every layer with a recurrent state got of every token, until they are verified.

        The blocks that were allocated for the drafts are the requests' next ones.
        """
        for request_id, drafts in plan.draft_token_ids.items():
            plan.num_scheduled_tokens[request_id] -= len(drafts)
        plan.draft_token_ids = {}

    def _start(self, plan: SchedulerOutput, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        request.adapter_slot = self.adapters.take(request.adapter)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if self._by_priority:
            bisect.insort(self.running, request, key=lambda running: running.rank)
        else:
            self.running.append(request)
        plan.new_rows.append(
            NewRow(
                request.request_id,
                list(request.token_ids),
                request.num_prompt_tokens,
                request.num_computed_tokens,
                [list(blocks) for blocks in request.blocks],
                request.slot,
                request.restored_slot,
                request.params,
                request.seed,
                request.sample_index,
                request.prompt_logprobs_from,
                request.pooling,
                request.adapter,
                request.adapter_slot,
                request.images,
            )
        )

    def preempt_last(self) -> Request:
        """Move the last running request back to the head of the queue; it recomputes its tokens."""
        request = self.running.pop()
        self.blocks.free(request)
        self.adapters.release(request.adapter)
        request.num_computed_tokens = 0
        request.draft_token_ids = []
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.num_preemptions += 1
        self._removed.append(request.request_id)
        self.waiting.appendleft(request)
        return request


def scheduler_maker(plan: RunnerPlan) -> Callable[[], Scheduler]:
    """A function that makes a scheduler with all blocks free."""
    config = plan.config
    windows = [spec.sliding_window for spec in group_states(plan.kv_cache_specs)[0]]
    cache = config.cache_config
    max_loras = 0 if config.lora_config is None else config.lora_config.max_loras
    num_slots = cache.num_state_slots and cache.num_state_slots + 1

    def make_scheduler() -> Scheduler:
        count, interval = cache.num_state_snapshots, cache.mamba_block_size
        snapshots = StateSnapshots(count, interval, num_slots) if count else None
        blocks = BlockManager(cache.num_blocks + 1, windows, cache.block_size, num_slots, snapshots)
        return Scheduler(config.scheduler_config, blocks, max_loras)

    return make_scheduler


class AdapterSlots:
    """`count` slots, numbered from 1; an adapter that no running request uses keeps its slot until it is needed."""

    def __init__(self, count: int) -> None:
        self._slots: OrderedDict[str, int] = OrderedDict()  # by digest, the least recently used first
        self._users: Counter[str] = Counter()
        self._free = list(range(count, NO_SLOT, -1))

    def has_room(self, adapter: Adapter | None) -> bool:
        """Whether `take` has a slot for it."""
        return (
            adapter is None or adapter.digest in self._slots or bool(self._free) or len(self._users) < len(self._slots)
        )

    def take(self, adapter: Adapter | None) -> int:
        """The slot for one more request with this adapter; the caller has asked `has_room`."""
        if adapter is None:
            return NO_SLOT
        digest = adapter.digest
        slot = self._slots.pop(digest, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._evict()
        self._slots[digest] = slot
        self._users[digest] += 1
        return slot

    def release(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._users[adapter.digest] -= 1
            if not self._users[adapter.digest]:
                del self._users[adapter.digest]

    def users(self) -> dict[str, int]:
        """Digest -> running requests."""
        return dict(self._users)

    def _evict(self) -> int:
        unused = next(digest for digest in self._slots if digest not in self._users)
        return self._slots.pop(unused)
