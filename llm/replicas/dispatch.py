"""Which request goes to which replica, and when.

A replica gets requests as it has room, the one with the least to do first. Of the waiting ones it gets first those
whose beginning it has computed already, then such as no replica knows, and only then another's: prompts with a common
beginning stay together as long as nobody is idle for it. Among equals the longest comes first, so that no long one is
left for the end. Plain data: no process, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from llm.engine.request import Request

# Prompts are taken to share what they have computed if so many first tokens are the same.
_PREFIX_TOKENS = 64
# Groups of prompts with a common beginning that are remembered while none of them waits.
_REMEMBERED = 4096
# A replica has this share of `max_num_seqs` more requests than it computes at a time, so that none of its places is
# empty while it reports.
_AHEAD = 4
# Tokens of a prompt that take as long as one of an answer (docs/reference/speed.md has both rates).
_PROMPT_PER_ANSWER = 4

Rank = tuple[int, int, int]  # priority, minus its cost, arrival


@dataclass(eq=False)
class _Group:
    """Requests with a common beginning, and the replicas that have computed it."""

    number: int
    waiting: list[tuple[Rank, Request]] = field(default_factory=list)  # a heap
    owners: set[int] = field(default_factory=set)


_Heads = list[tuple[Rank, int, _Group]]


class Dispatcher:
    """The requests that wait, and those that replicas have.

    Args:
        replicas: their numbers.
        max_num_seqs: how many requests one computes at a time.
        by_priority: a lower `priority` goes first, whatever else.
    """

    def __init__(self, replicas: Iterable[int], max_num_seqs: int, by_priority: bool = False) -> None:
        self.held: dict[int, dict[str, Request]] = {number: {} for number in replicas}
        self.load = dict.fromkeys(self.held, 0)  # what is left to do, at most, in tokens of answers
        self._costs: dict[str, tuple[int, int]] = {}  # request id -> replica, cost
        self._room = max_num_seqs + max(1, max_num_seqs // _AHEAD)
        self._by_priority = by_priority
        self._waiting: dict[str, Request] = {}
        self._groups: OrderedDict[tuple[object, ...], _Group] = OrderedDict()
        self._all: _Heads = []
        self._unknown: _Heads = []
        self._known: dict[int, _Heads] = {number: [] for number in self.held}
        self._arrivals = 0
        self._numbers = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        self._arrivals += 1
        key = (request.cache_key, *request.token_ids[:_PREFIX_TOKENS])
        group = self._groups.get(key)
        if group is None:
            self._numbers += 1
            group = self._groups[key] = _Group(self._numbers)
            self._forget()
        self._groups.move_to_end(key)
        self._waiting[request.request_id] = request
        priority = request.rank[0] if self._by_priority else 0
        heappush(group.waiting, ((priority, -cost_of(request), self._arrivals), request))
        self._announce(group)

    def hand_out(self) -> list[tuple[int, Request]]:
        """(replica, request) of those that go to a replica now."""
        handed = []
        while self._waiting:
            free = [number for number, held in self.held.items() if len(held) < self._room]
            if not free:
                break
            replica = min(free, key=lambda number: (self.load[number], number))
            request = self._take(replica)
            cost = cost_of(request)
            self.held[replica][request.request_id] = request
            self._costs[request.request_id] = replica, cost
            self.load[replica] += cost
            handed.append((replica, request))
        return handed

    def end(self, request_id: str) -> int | None:
        """Forget a request; the replica that has it, None if it waits."""
        self._waiting.pop(request_id, None)
        replica, cost = self._costs.pop(request_id, (None, 0))
        if replica is None or replica not in self.held:
            return None
        del self.held[replica][request_id]
        self.load[replica] -= cost
        return replica

    def join(self, replica: int) -> None:
        """A replica more, which has computed nothing; one that is known stays as it is."""
        self.held.setdefault(replica, {})
        self.load.setdefault(replica, 0)
        self._known.setdefault(replica, [])

    def lose(self, replica: int) -> list[Request]:
        """Forget a replica that is dead; its requests, which are to be added again."""
        lost = list(self.held.pop(replica, {}).values())
        self.load.pop(replica, None)
        self._known.pop(replica, None)
        for request in lost:
            del self._costs[request.request_id]
        for group in self._groups.values():
            group.owners.discard(replica)
            if group.waiting and not group.owners:
                self._announce(group)
        return lost

    def _take(self, replica: int) -> Request:
        heads = [self._head(heads) for heads in (self._known[replica], self._unknown, self._all)]
        found = [group for group in heads if group is not None]
        # The first kind that has one; with priorities, the first of those with the lowest.
        group = min(found, key=lambda item: item.waiting[0][0][0])
        request = heappop(group.waiting)[1]
        del self._waiting[request.request_id]
        group.owners.add(replica)
        self._announce(group)
        return request

    def _head(self, heads: _Heads) -> _Group | None:
        """The group whose first request comes first; what has changed since it was announced is dropped."""
        while heads:
            rank, _, group = heads[0]
            self._drop_ended(group)
            if group.waiting and group.waiting[0][0] == rank and not (heads is self._unknown and group.owners):
                return group
            heappop(heads)
        return None

    def _drop_ended(self, group: _Group) -> None:
        changed = False
        while group.waiting and group.waiting[0][1].request_id not in self._waiting:
            heappop(group.waiting)
            changed = True
        if changed:
            self._announce(group)

    def _announce(self, group: _Group) -> None:
        """Put the group's first request where replicas look."""
        if not group.waiting:
            return
        head = group.waiting[0][0], group.number, group
        heappush(self._all, head)
        if not group.owners:
            heappush(self._unknown, head)
        for owner in group.owners:
            if owner in self._known:
                heappush(self._known[owner], head)

    def _forget(self) -> None:
        while len(self._groups) > _REMEMBERED + len(self._waiting):
            oldest = next((key for key, group in self._groups.items() if not group.waiting), None)
            if oldest is None:
                return
            del self._groups[oldest]


def cost_of(request: Request) -> int:
    """What is left to compute of a request, at most, in tokens of answers."""
    return request.num_tokens // _PROMPT_PER_ANSWER + request.max_total_tokens - request.num_tokens + 1
