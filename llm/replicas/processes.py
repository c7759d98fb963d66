"""The processes of replicas: one inbox for their messages, calls of their methods, and who follows a dead one."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic

from llm.errors import LLMError, WorkerDiedError
from llm.replicas.placement import Placement
from llm.replicas.schema import SCHEMA, MethodCall, MethodResult, ReplicaArgs, ReplicaLoaded
from llm.workers.messages import Message
from llm.workers.on_ray import RayProcess
from llm.workers.process import Inbox, WorkerProcess

ROLE = "llm.replicas.worker"
# How long is waited at once, so that Ctrl-C is seen.
WAIT_SECONDS = 0.1
# So often is a replica started again at one place; a row that kills whoever computes it must not go on for ever.
_RESTARTS = 3
_RESTARTS_SECONDS = 3600.0


@dataclass
class _Seat:
    """Where replicas run one after the other: the place, what they load, and when the last ones died."""

    place: Placement
    args: ReplicaArgs
    deaths: list[float] = field(default_factory=list)


class Replicas:
    """The processes, by their numbers; what they report comes to one inbox. A number is never used again.

    Attributes:
        alive: those that are not dead, and have loaded the model if they took the place of another.
        died: the last that did; None: none has.
        count: of places.
        files: descriptors of the files of weights that they share, closed with them.
        shared_bytes: of weights of each, that are in such a file.
    """

    def __init__(self, files: Sequence[int] = ()) -> None:
        self.files = files
        self.shared_bytes = 0
        self._close_files = weakref.finalize(self, _close_all, files)
        self.inbox: Inbox = SimpleQueue()
        self.alive: dict[int, WorkerProcess] = {}
        self.died: WorkerDiedError | None = None
        self.count = 0
        self.resets = 0
        # Taken while a result was waited for, and left for the next step.
        self.kept: deque[tuple[int, Message | WorkerDiedError]] = deque()
        self._loading: dict[int, WorkerProcess] = {}  # in the place of a dead one
        self._seats: dict[int, _Seat] = {}
        self._restarts = False
        self._owner = os.getpid()
        self._next = 0
        self._followed: dict[int, str] = {}
        self._lasting: dict[str, tuple[object, ...]] = {}
        self._asked = self._watched_from = 0.0
        self._calls = 0
        self._sent: dict[int, float] = {}

    def start(self, place: Placement, args: ReplicaArgs) -> None:
        """Start one more, which loads the model."""
        self.count += 1
        number, worker = self._start(_Seat(place, args))
        self.alive[number] = worker

    def restart_dead(self, loaded: Sequence[ReplicaLoaded]) -> None:
        """From now on another takes the place of one that dies, with a KV cache of the size that this one has found."""
        self._restarts = True
        self.shared_bytes = loaded[0].shared_bytes
        for seat, found in zip(self._seats.values(), loaded, strict=True):
            engine = replace(seat.args.engine, kv_cache_memory_bytes=found.kv_cache_memory_bytes or None)
            seat.args = replace(seat.args, engine=engine)

    def what_follows(self, number: int) -> str:
        """A sentence about the place of a replica that has died."""
        return self._followed.pop(number)

    def _start(self, seat: _Seat) -> tuple[int, WorkerProcess]:
        number, self._next = self._next, self._next + 1
        # One OpenMP team a replica: the number of threads is set before PyTorch is loaded.
        place, environment = seat.place, {}
        if place.threads is not None:
            environment["OMP_NUM_THREADS"] = str(place.threads)
        start = None
        if place.is_on_ray:
            environment |= {name: value for name, value in os.environ.items() if name.startswith("LLM_")}
            start = partial(RayProcess, ROLE, number, place.bundles, environment)
        worker = WorkerProcess(
            ROLE,
            number,
            SCHEMA,
            cores=place.cores,
            environment=environment,
            name="replica",
            inbox=self.inbox,
            files=() if seat.args.shared_weights is None else (seat.args.shared_weights,),
            start=start,
        )
        self._seats[number] = seat
        self._sent[number] = monotonic()
        worker.send("load", seat.args)
        return number, worker

    def _start_again(self, seat: _Seat) -> str:
        """Start another in the place of one that has died; what has come of it."""
        now = monotonic()
        seat.deaths = [*(time for time in seat.deaths if now - time < _RESTARTS_SECONDS), now]
        if len(seat.deaths) > _RESTARTS:
            return f"None is started in its place, where {len(seat.deaths)} have died within an hour."
        try:
            number, worker = self._start(seat)
        except LLMError as error:
            return f"None is started in its place: {error}"
        self._loading[number] = worker
        return f"Replica {number} is started in its place (try {len(seat.deaths)} of {_RESTARTS})."

    def send(self, number: int, kind: str, body: object = None) -> None:
        """Send to one that may have died: its end comes by the inbox, like everything from it."""
        self._sent[number] = monotonic()
        try:
            self.alive[number].send(kind, body)
        except WorkerDiedError:
            return

    def send_all(self, kind: str, body: object = None) -> None:
        for number in self.alive:
            self.send(number, kind, body)

    def take(self, seconds: float, busy: Sequence[int]) -> tuple[int, Message | WorkerDiedError] | None:
        """The next message and its sender, or that a replica has died, which is no longer `alive` then.

        Args:
            seconds: to wait at most.
            busy: those that are to compute, and are ended if they hang.
        """
        if self.kept:
            return self.kept.popleft()
        try:
            number, message = self.inbox.get(timeout=seconds) if seconds else self.inbox.get_nowait()
        except Empty:
            return self._hung([*busy, *self._loading])
        worker = self._worker(number)
        if worker is None:
            return None
        try:
            received = worker.check_message(message)
        except WorkerDiedError as error:
            return number, self._lose(number, error)
        if number in self._loading:
            self._join(number)
        return number, received

    def check_alive(self) -> None:
        """Raises `WorkerDiedError` if there is no replica left, and none is being loaded."""
        if not self.alive and not self._loading:
            raise WorkerDiedError(
                f"all {self.count} replicas have died; make a new LLM. The last: {self.died}",
                0 if self.died is None else self.died.number,
            )

    def reset(self) -> None:
        """Have all drop what they compute; what fails before they do is not reported."""
        self.resets += 1
        self.send_all("reset", self.resets)

    def close(self) -> None:
        workers = [*self.alive.values(), *self._loading.values()]
        for worker in workers:
            worker.shut_down()
        for worker in workers:
            worker.close()
        self.alive.clear()
        self._loading.clear()
        self._close_files()

    def call(self, method: str, *args: object) -> object:
        """The result of the first replica that is alive; of the next one, if it dies."""
        while True:
            self._await_one()
            results = self._call([next(iter(self.alive))], method, args)
            if results:
                return results[0]

    def call_all(self, method: str, *args: object) -> None:
        """Do something in all replicas, and in those that are started later; raises the first error of one."""
        self._await_one()
        self._call(list(self.alive), method, args)
        self._lasting[method] = args

    def _await_one(self) -> None:
        """Return when a replica is alive; raises `WorkerDiedError`. What comes meanwhile is kept for the next step."""
        others = list(self.kept)
        self.kept.clear()
        while not self.alive:
            self.check_alive()
            found = self.take(WAIT_SECONDS, ())
            if found is not None:
                others.append(found)
        self.kept.extend(others)

    def _call(self, numbers: Sequence[int], method: str, args: tuple[object, ...]) -> list[object]:
        """The results of those that do not die meanwhile. Reports that come first are kept for the next step."""
        self._calls += 1
        call = MethodCall(self._calls, method, args)
        for number in numbers:
            self.send(number, "call", call)
        results: dict[int, MethodResult] = {}
        others = list(self.kept)
        self.kept.clear()
        waiting = [number for number in numbers if number in self.alive]
        while waiting:
            found = self.take(WAIT_SECONDS, waiting)
            if found is None:
                continue
            number, message = found
            body = message.body if isinstance(message, Message) else None
            if isinstance(body, MethodResult) and body.number == call.number:
                results[number] = body
            else:
                others.append((number, message))
            waiting = [item for item in waiting if item in self.alive and item not in results]
        self.kept.extend(others)
        for result in results.values():
            if result.error is not None:
                raise result.error
        return [result.value for result in results.values()]

    def _hung(self, watched: Sequence[int]) -> tuple[int, WorkerDiedError] | None:
        now = monotonic()
        if now - self._asked > 10 * WAIT_SECONDS:  # nobody has asked for a while
            self._watched_from = now
        self._asked = now
        for number in watched:
            worker = self._worker(number)
            if worker is None:
                continue
            try:
                # One that had nothing to do was silent, and rightly.
                worker.check_heard(max(self._watched_from, self._sent[number]))
            except WorkerDiedError as error:
                return number, self._lose(number, error)
        return None

    def _worker(self, number: int) -> WorkerProcess | None:
        return self.alive.get(number) or self._loading.get(number)

    def _join(self, number: int) -> None:
        """One that was started later has loaded the model: it gets the settings that the others got."""
        self.alive[number] = self._loading.pop(number)
        self.send(number, "reset", self.resets)
        for method, args in self._lasting.items():
            self.send(number, "call", MethodCall(0, method, args))

    def _lose(self, number: int, error: WorkerDiedError) -> WorkerDiedError:
        (self.alive if number in self.alive else self._loading).pop(number).close()
        self.died = error
        seat = self._seats.pop(number)
        restarts = self._restarts and os.getpid() == self._owner  # a forked child has none of its own
        self._followed[number] = self._start_again(seat) if restarts else "None is started in its place."
        return error


def _close_all(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
