"""The role of a rank that serves one `LLM` after the other: starting a process takes longer than a tiny model."""

from __future__ import annotations

from llm.setup import ranks
from llm.workers.connection import Connection
from llm.workers.messages import Message

SCHEMA = ranks.SCHEMA


class OneModel:
    """The connection until the message "over", which is the end for the role that is tested."""

    def __init__(self, connection: Connection, first: Message) -> None:
        self._connection = connection
        self._first: Message | None = first
        self.send = connection.send

    def receive(self, seconds: float | None = None) -> Message | None:
        message, self._first = self._first or self._connection.receive(seconds), None
        if message is not None and message.kind == "over":
            raise EOFError
        return message


def serve(connection: Connection, number: int) -> None:
    while True:
        message = connection.receive()
        if message is None or message.kind == "over":
            continue
        try:
            ranks.serve(OneModel(connection, message), number)  # type: ignore[arg-type]
        except EOFError:
            connection.send("over")
