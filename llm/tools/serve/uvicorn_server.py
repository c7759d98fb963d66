"""uvicorn as the endpoint runs it: with an end to waiting for headers, and an exit status of 0 after a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.config import create_ssl_context
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from llm.base.types import JsonObject

HEADER_BYTES = 64 << 10
HEADER_SECONDS = 20.0  # within which a request's headers must have come


class Connection(H11Protocol):
    """Ends when the headers of its first or next request do not come, for which uvicorn waits without end."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set(None)
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering or self.transport.is_closing():
            self._set(None)
        elif self._late is None:
            self._set(self.loop.call_later(HEADER_SECONDS, self.transport.close))

    def _set(self, late: asyncio.TimerHandle | None) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = late


class Server(uvicorn.Server):
    """Ends with a status of 0 when a signal has asked it to, and it has let what ran finish."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def asked(number: int, frame: FrameType | None) -> None:
            self.handle_exit(number, frame)

        # Asked twice to end, it drops requests: each would be logged as an error.
        logging.getLogger("uvicorn.error").addFilter(lambda record: not self.force_exit)
        before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def check_tls(tls: JsonObject) -> None:
    """Raises `OSError` for settings of TLS that cannot be used."""
    config = uvicorn.Config(None, log_level="error", **tls)  # type: ignore[arg-type]
    create_ssl_context(
        keyfile=config.ssl_keyfile,
        certfile=config.ssl_certfile,  # type: ignore[arg-type]
        password=None,
        ssl_version=config.ssl_version,
        cert_reqs=config.ssl_cert_reqs,
        ca_certs=config.ssl_ca_certs,
        ciphers=config.ssl_ciphers,
    )


def server_of(app: ASGIApp, root_path: str, drain_seconds: int, tls: JsonObject) -> Server:
    """`drain_seconds`: of what runs when it is to end. `tls`: uvicorn's settings that begin with ssl_."""
    config = uvicorn.Config(
        app,
        http=Connection,  # uvicorn's faster parser, if it is installed, has no limit on headers
        h11_max_incomplete_event_size=HEADER_BYTES,
        log_level="error",
        access_log=False,
        server_header=False,
        root_path=root_path,
        timeout_graceful_shutdown=drain_seconds,
        ws="none",
        **tls,
    )
    return Server(config)
