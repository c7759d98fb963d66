"""A stand-in for Ray in this process: actors are objects with threads, machines are numbers. The processes are real."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch


class RayError(Exception):
    pass


class Actor:
    """A handle: `actor.method.remote(...)` returns a future."""

    def __init__(self, cls: type, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        self.options = options
        self.is_dead = False
        self.pool = ThreadPoolExecutor(options["max_concurrency"])
        self.instance = cls(*arguments)

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> tuple[Actor, Future[Any]]:
            if self.is_dead:
                return self, Future()
            return self, self.pool.submit(getattr(self.instance, name), *args)

        return SimpleNamespace(remote=remote)


class Group:
    def __init__(self, ray: PretendRay, bundles: list[dict[str, float]], strategy: str) -> None:
        self.ray, self.bundles, self.strategy = ray, bundles, strategy

    def wait(self, seconds: float) -> bool:
        if not self.ray.has_room:
            time.sleep(min(seconds, 0.05))
        return self.ray.has_room


class PretendRay(ModuleType):
    """
    Attributes:
        machines: resources of each.
        has_room: for another placement group.
        groups, actors: those that there are.
    """

    def __init__(self, *machines: dict[str, float]) -> None:
        super().__init__("ray")
        self.machines = machines or ({"CPU": 4.0, "memory": 8e9},)
        self.has_room, self.is_on = True, False
        self.groups: list[Group] = []
        self.actors: list[Actor] = []
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.util = SimpleNamespace(placement_group=self._group, remove_placement_group=self.groups_remove)

    def is_initialized(self) -> bool:
        return self.is_on

    def init(self) -> None:
        self.is_on = True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": each} for each in self.machines] + [{"Alive": False, "Resources": {}}]

    def remote(self, cls: type) -> Any:
        def options(**given: Any) -> Any:
            def make(*arguments: Any) -> Actor:
                self.actors.append(actor := Actor(cls, arguments, given))
                return actor

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def get(self, ref: tuple[Actor, Future[Any]], timeout: float = 3600.0) -> Any:
        actor, future = ref
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if actor.is_dead:
                raise RayError("The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerHost")
            if wait([future], 0.01).done and not actor.is_dead:  # what a dead one returned is lost
                return future.result()
        raise RayError("Get timed out")

    def kill(self, actor: Actor) -> None:
        actor.is_dead = True
        actor.instance._process.kill()  # as a raylet does with the children of its workers
        actor.pool.shutdown(wait=False, cancel_futures=True)
        if actor in self.actors:
            self.actors.remove(actor)

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> Group:
        self.groups.append(group := Group(self, bundles, strategy))
        return group

    def groups_remove(self, group: Group) -> None:
        self.groups.remove(group)


@contextmanager
def pretend_ray(*machines: dict[str, float]) -> Iterator[PretendRay]:
    """`import ray` gives it; in the end nothing may be left of what it was asked for."""
    ray = PretendRay(*machines)
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda *given: given  # type: ignore[attr-defined]
    with patch.dict(sys.modules, {"ray": ray, strategies.__name__: strategies}):
        yield ray
    assert ray.groups == [] and ray.actors == []
