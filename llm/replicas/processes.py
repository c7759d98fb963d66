"""The processes of replicas: what they tell, by one inbox, and what they are asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from time import monotonic

from llm.errors import WorkerDiedError
from llm.replicas.schema import SCHEMA, Answer, Question
from llm.workers.messages import Message
from llm.workers.process import Inbox, WorkerProcess

ROLE = "llm.replicas.worker"
# How long is waited at once, so that Ctrl-C is seen.
WAIT_SECONDS = 0.1


class Replicas:
    """The processes, by their numbers; what they report comes to one inbox.

    Attributes:
        alive: those that are not dead.
        died: the last that did; None: none has.
    """

    def __init__(self) -> None:
        self.inbox: Inbox = SimpleQueue()
        self.alive: dict[int, WorkerProcess] = {}
        self.died: WorkerDiedError | None = None
        self.count = 0
        self.resets = 0
        # Taken while an answer was waited for, and left for the next step.
        self.kept: deque[tuple[int, Message | WorkerDiedError]] = deque()
        self._asked = self._watched_from = 0.0
        self._questions = 0
        self._sent: dict[int, float] = {}

    def start(self, cores: Sequence[int] | None, environment: dict[str, str]) -> WorkerProcess:
        """Start one more; it waits for what it is to load."""
        number, self.count = self.count, self.count + 1
        worker = WorkerProcess(
            ROLE, number, SCHEMA, cores=cores, environment=environment, name="replica", inbox=self.inbox
        )
        self.alive[number] = worker
        return worker

    def send(self, number: int, kind: str, body: object = None) -> None:
        """Send to one that may have died: that is told by its end in the inbox, like everything from it."""
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
            return self._hung(busy) if busy else None
        if number not in self.alive:
            return None
        try:
            return number, self.alive[number].told(message)
        except WorkerDiedError as error:
            return number, self._lose(number, error)

    def check_alive(self) -> None:
        """Raises `WorkerDiedError` if there is no replica left."""
        if not self.alive:
            raise WorkerDiedError(
                f"all {self.count} replicas have died; make a new LLM. The last: {self.died}",
                0 if self.died is None else self.died.number,
            )

    def reset(self) -> None:
        """Have all drop what they compute; what fails before they do is not told."""
        self.resets += 1
        self.send_all("reset", self.resets)

    def close(self) -> None:
        workers = list(self.alive.values())
        for worker in workers:
            worker.shut_down()
        for worker in workers:
            worker.close()
        self.alive.clear()

    def ask(self, method: str, *args: object) -> object:
        """The answer of the first replica that is alive; of the next one, if it dies."""
        while True:
            self.check_alive()
            number = next(iter(self.alive))
            answers = self._answers([number], method, args)
            if answers:
                return answers[0]

    def ask_all(self, method: str, *args: object) -> None:
        """Do something in all replicas; raises the first error of one."""
        self.check_alive()
        self._answers(list(self.alive), method, args)

    def _answers(self, numbers: Sequence[int], method: str, args: tuple[object, ...]) -> list[object]:
        """What those answer that do not die meanwhile. Reports that come first are kept for the next step."""
        self._questions += 1
        question = Question(self._questions, method, args)
        for number in numbers:
            self.send(number, "ask", question)
        answers: dict[int, Answer] = {}
        others = list(self.kept)
        self.kept.clear()
        waiting = [number for number in numbers if number in self.alive]
        while waiting:
            found = self.take(WAIT_SECONDS, waiting)
            if found is None:
                continue
            number, told = found
            if isinstance(told, Message) and isinstance(told.body, Answer) and told.body.number == question.number:
                answers[number] = told.body
            else:
                others.append((number, told))
            waiting = [item for item in waiting if item in self.alive and item not in answers]
        self.kept.extend(others)
        for answer in answers.values():
            if answer.error is not None:
                raise answer.error
        return [answer.value for answer in answers.values()]

    def _hung(self, busy: Sequence[int]) -> tuple[int, WorkerDiedError] | None:
        now = monotonic()
        if now - self._asked > 10 * WAIT_SECONDS:  # nobody has asked for a while
            self._watched_from = now
        self._asked = now
        for number in busy:
            try:
                # One that had nothing to do was silent, and rightly.
                self.alive[number].check_heard(max(self._watched_from, self._sent.get(number, 0.0)))
            except WorkerDiedError as error:
                return number, self._lose(number, error)
        return None

    def _lose(self, number: int, error: WorkerDiedError) -> WorkerDiedError:
        self.alive.pop(number).close()
        self.died = error
        return error
