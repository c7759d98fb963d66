"""A small model hub on the loopback address, as `huggingface_hub` asks one: listings, files, ranges, refusals."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class Repository:
    """`files`: path -> content, the same for every revision. `refuses`: an error code for files, such as GatedRepo."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    refuses: str = ""

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class Hub:
    """What is served, and what was asked for.

    Attributes:
        sent: (path, first byte, number of bytes) of each part of a file that was sent.
        stalls_after: bytes of one answer after which no more come, until `resumes` is set.
        sends_ranges: False: whole files, whatever is asked for.
    """

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    sent: list[tuple[str, int, int]] = field(default_factory=list)
    stalls_after: int | None = None
    resumes: threading.Event = field(default_factory=threading.Event)
    sends_ranges: bool = True

    def bytes_of(self, ending: str) -> int:
        return sum(count for path, _, count in self.sent if path.endswith(ending))

    def add(self, name: str, folder: Path, **more: Any) -> Repository:
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repositories[name] = Repository(files, **more)
        return self.repositories[name]


@contextmanager
def hub_server() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.resumes.set()
        server.shutdown()
        thread.join()
        server.server_close()


def use_hub(hub: Hub, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """As with HF_ENDPOINT and HF_HUB_CACHE set, which huggingface_hub reads when it is imported."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # whoever asked was killed
            super().handle()

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)(/.*)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        name, revision = (listing[1], listing[3]) if listing else (file[1], file[2]) if file else ("", "")
        repository = hub.repositories.get(name)
        if repository is None:
            self._refuse(401, "RepoNotFound")
        elif revision not in (*repository.revisions, repository.commit):
            self._refuse(404, "RevisionNotFound")
        elif listing:
            self._list(repository, name, listing[2])
        elif repository.refuses:
            self._refuse(403, repository.refuses)
        elif file is None or file[3] not in repository.files:
            self._refuse(404, "EntryNotFound")
        else:
            self._send_file(hub, repository, file[3])

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _list(self, repository: Repository, name: str, what: str) -> None:
        answer: Any = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in repository.files.items()
        ]
        if what == "revision":
            answer = {
                "id": name,
                "sha": repository.commit,
                "siblings": [{"rfilename": item["path"]} for item in answer],
            }
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send_file(self, hub: Hub, repository: Repository, path: str) -> None:
        data = repository.files[path]
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if hub.sends_ranges else None
        start, end = (int(wanted[1]), int(wanted[2] or len(data) - 1) + 1) if wanted else (0, len(data))
        part = data[start:end]
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
        if self.command == "GET":
            hub.sent.append((path, start, len(part)))
        self._send(206 if wanted else 200, part, headers | {"Accept-Ranges": "bytes"}, hub)

    def _send(self, status: int, body: bytes, headers: dict[str, str], hub: Hub | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        stalls = hub.stalls_after if hub is not None else None
        try:
            self.wfile.write(body[:stalls])
            if hub is not None and stalls is not None and stalls < len(body):
                self.wfile.flush()
                hub.resumes.wait()
                self.wfile.write(body[stalls:])
        except OSError:
            self.close_connection = True  # whoever asked is gone
