"""One end of the socket pair between this program and a worker: whole messages in, whole messages out.

An end that sends also reads what comes meanwhile, so that two ends that send at once never wait for each other.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from time import monotonic

from llm.workers.messages import Message, Schema, sizes_of

# A message that says that the other end computes; it is counted and never handed out.
BEAT = "beat"
_PREFIX = 16
_READ = 1 << 20


class Connection:
    """Sends and receives messages; one thread receives, any thread sends.

    Attributes:
        heard: when the last bytes came, by `time.monotonic`.
    """

    def __init__(self, end: socket.socket, schema: Schema) -> None:
        self._socket = end
        self._schema = schema
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._messages: deque[Message] = deque()
        self._unread = bytearray()  # of a message that is not whole yet
        self._has_ended = False
        self.heard = monotonic()
        end.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, kind: str, body: object = None) -> None:
        """Raises `ValidationError` if the body has what the schema has not, `EOFError` if the other end is gone."""
        parts = self._schema.encode(kind, body)
        with self._sending:
            for part in parts:
                self._send(memoryview(part))

    def receive(self, seconds: float | None = None) -> Message | None:
        """The next message; None if none came in so many seconds. 0 takes what is there.

        Raises:
            EOFError: the other end is gone, and everything that it has sent was received.
        """
        end = None if seconds is None else monotonic() + seconds
        with self._reading:
            while not self._messages:
                if self._has_ended:
                    raise EOFError
                left = None if end is None else max(0.0, end - monotonic())
                poll = select.poll()
                poll.register(self._socket, select.POLLIN)
                if not poll.poll(None if left is None else left * 1000):
                    return None
                self._read()
            return self._messages.popleft()

    def _send(self, data: memoryview) -> None:
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                self._wait_for_room()
            except (BrokenPipeError, ConnectionResetError):
                raise EOFError from None

    def _wait_for_room(self) -> None:
        """Wait until there is room for bytes; what comes meanwhile is kept for `receive`."""
        reads = self._reading.acquire(blocking=False)
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT | (select.POLLIN if reads and not self._has_ended else 0))
            for _, event in poll.poll():
                if reads and event & select.POLLIN:
                    self._read()
        finally:
            if reads:
                self._reading.release()

    def _read(self) -> None:
        """Read what there is, and take the whole messages out of it. The lock is held."""
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._has_ended = True
            return
        self.heard = monotonic()
        self._unread += data
        start = 0
        while len(self._unread) - start >= _PREFIX:
            header, buffers = sizes_of(self._unread[start : start + _PREFIX])
            first = start + _PREFIX
            if len(self._unread) < first + header + buffers:
                break
            whole = memoryview(bytes(self._unread[first : first + header + buffers]))
            message = self._schema.decode(whole[:header], whole[header:])
            if message.kind != BEAT:
                self._messages.append(message)
            start = first + header + buffers
        del self._unread[:start]
