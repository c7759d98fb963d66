"""One end of the socket pair between this program and a worker: whole messages in, whole messages out."""

from __future__ import annotations

import socket
import threading
from time import monotonic

from llm.base import system
from llm.workers.messages import PREFIX_BYTES, Message, Schema, sizes_of

# A message that says that the other end computes; it is counted and never handed out.
BEAT = "beat"


class Connection:
    """Sends and receives messages; one thread receives, any thread sends.

    Who sends waits until the other end has read, so an end that may be sent much while it sends has a thread that
    receives all the time.

    Attributes:
        schema: of its messages.
        heard: when the last message came, by `time.monotonic`.
    """

    def __init__(self, end: socket.socket, schema: Schema) -> None:
        self._socket = end
        self.schema = schema
        self._sending = threading.Lock()
        self.heard = monotonic()

    def close(self) -> None:
        self._socket.close()

    def send(self, kind: str, body: object = None) -> None:
        """Raises `ValidationError` if the body has what the schema has not, `EOFError` if the other end is gone."""
        self.send_bytes(self.schema.encode(kind, body))

    def send_bytes(self, data: bytes) -> None:
        """Send an encoded message; raises `EOFError`."""
        with self._sending:
            try:
                self._socket.sendall(data)
            except OSError:
                raise EOFError from None

    def receive(self, seconds: float | None = None) -> Message | None:
        """The next message; None if none came in so many seconds. 0 takes one that is there.

        Raises:
            EOFError: the other end is gone, and everything that it has sent was received.
        """
        end = None if seconds is None else monotonic() + seconds
        while self._is_readable(end):
            header, buffers = sizes_of(self._read(PREFIX_BYTES))
            whole = memoryview(self._read(header + buffers))
            self.heard = monotonic()
            message = self.schema.decode(whole[:header], whole[header:])
            if message.kind != BEAT:
                return message
        return None

    def _is_readable(self, end: float | None) -> bool:
        if end is None:
            return True
        return system.is_readable(self._socket, max(0.0, end - monotonic()))

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            try:
                count = self._socket.recv_into(left)
            except OSError:
                count = 0
            if not count:
                raise EOFError
            left = left[count:]
        return data
