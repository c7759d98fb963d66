"""Who gets which request: shared evenly, the longest first, common beginnings together, nothing lost or twice."""

from __future__ import annotations

import random

from llm.engine.request import Request
from llm.replicas.dispatch import Dispatcher, cost_of
from llm.sampling_params import SamplingParams


def request(number: int, prompt: list[int], max_tokens: int = 8, priority: int = 0) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(
        str(number),
        prompt,
        params,
        seed=0,
        sample_index=0,
        max_total_tokens=len(prompt) + max_tokens,
        eos_token_ids=frozenset(),
        cache_key=b"",
        priority=priority,
    )


def handed(dispatcher: Dispatcher) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for replica, item in dispatcher.hand_out():
        found.setdefault(replica, []).append(int(item.request_id))
    return found


def test_the_longest_go_first_and_every_replica_has_as_much_to_do() -> None:
    dispatcher = Dispatcher(range(3), 8)
    lengths = [5, 90, 7, 33, 60, 61, 2, 45, 30]
    for number, length in enumerate(lengths):
        dispatcher.add(request(number, [number] * 4, length))
    found = handed(dispatcher)
    assert [ids[0] for _, ids in sorted(found.items())] == [1, 5, 4]  # 90, 61, 60
    loads = sorted(dispatcher.load.values())
    assert loads[-1] - loads[0] <= max(lengths) // 2 and dispatcher.num_waiting == 0


def test_a_replica_gets_no_more_than_it_has_room_for_until_some_have_ended() -> None:
    dispatcher = Dispatcher([4, 7], 4)
    for number in range(30):
        dispatcher.add(request(number, [number]))
    found = handed(dispatcher)
    assert {replica: len(ids) for replica, ids in found.items()} == {4: 5, 7: 5}
    assert not handed(dispatcher)
    assert dispatcher.end(str(found[7][0])) == 7
    assert dispatcher.end("29") is None  # it waits
    assert [len(ids) for ids in handed(dispatcher).values()] == [1]
    assert dispatcher.num_waiting == 30 - 11 - 1


def test_common_beginnings_stay_together_while_there_is_work_for_all() -> None:
    dispatcher = Dispatcher(range(2), 20)
    for number in range(40):
        dispatcher.add(request(number, [number // 2 % 2] * 64 + [number]))
    found = handed(dispatcher)
    assert [{number // 2 % 2 for number in ids} for _, ids in sorted(found.items())] == [{0}, {1}]
    # One beginning for all: nobody is idle for it.
    dispatcher = Dispatcher(range(2), 20)
    for number in range(20):
        dispatcher.add(request(number, [5] * 64 + [number]))
    assert {replica: len(ids) for replica, ids in handed(dispatcher).items()} == {0: 10, 1: 10}


def test_priority_goes_before_length_and_beginnings() -> None:
    dispatcher = Dispatcher([0], 2, by_priority=True)
    for number, (length, priority) in enumerate([(50, 1), (5, 0), (90, 2), (7, 0)]):
        dispatcher.add(request(number, [1] * 64, length, priority))
    assert handed(dispatcher) == {0: [3, 1, 0]}


def test_what_a_dead_replica_had_is_given_back_and_goes_elsewhere() -> None:
    dispatcher = Dispatcher(range(2), 8)
    for number in range(10):
        dispatcher.add(request(number, [3] * 64 + [number]))
    found = handed(dispatcher)
    lost = dispatcher.lose(0)
    assert sorted(int(item.request_id) for item in lost) == sorted(found[0])
    for item in lost:
        dispatcher.add(item)
    assert sorted(handed(dispatcher)[1]) == sorted(found[0]) and dispatcher.lose(0) == []
    assert set(dispatcher.load) == {1} and dispatcher.load[1] == sum(map(cost_of, dispatcher.held[1].values()))


def test_nothing_is_lost_or_handed_out_twice_whatever_happens() -> None:
    rng = random.Random(3)
    for _ in range(50):
        dispatcher = Dispatcher(range(4), rng.choice([1, 4, 16]), rng.random() < 0.5)
        living, alive, made = {}, set(range(4)), 0
        for _ in range(200):
            move = rng.random()
            if move < 0.5:
                item = request(
                    made, [rng.randrange(3)] * rng.choice([3, 64, 70]), rng.randrange(1, 50), rng.randrange(3)
                )
                living[item.request_id] = item
                dispatcher.add(item)
                made += 1
            elif move < 0.75 and living:
                dispatcher.end(living.pop(rng.choice(list(living))).request_id)
            elif move < 0.77 and len(alive) > 1:
                gone = rng.choice(sorted(alive))
                alive.discard(gone)
                for item in dispatcher.lose(gone):
                    dispatcher.add(item)
            else:
                dispatcher.hand_out()
            held = [name for own in dispatcher.held.values() for name in own]
            assert len(held) == len(set(held)) and set(held) <= set(living)
            assert len(held) + dispatcher.num_waiting == len(living) and set(dispatcher.held) == alive
            for replica, own in dispatcher.held.items():
                assert dispatcher.load[replica] == sum(map(cost_of, own.values()))
