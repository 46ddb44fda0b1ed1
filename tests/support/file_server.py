"""A web server for a folder, with ranges, that counts what it is asked for and fails as it is told
to."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class FileServer(ThreadingHTTPServer):
    """Attributes: requests: number of requests for each (method, path, range). failing: statuses of
    the next responses, before those that succeed. always: status of all responses whose path
    contains a text. sent: bytes of files that were sent. dies_after: number of ranges of `.bin`
    files after which they are answered with 503; None: never.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.failing: list[int] = []
        self.always: dict[str, int] = {}
        self.sent = 0
        self.dies_after: int | None = None
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def ranges(self, name: str) -> dict[str, int]:
        """How often each range of a file was asked for."""
        return {
            span: count
            for (method, path, span), count in self.requests.items()
            if (method, path) == ("GET", f"/{name}")
        }

    def forget(self) -> None:
        self.requests.clear()
        self.sent = 0


class _Handler(SimpleHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, body: bool) -> None:
        span = self.headers.get("Range", "")
        with self.server.lock:
            self.server.requests[self.command, self.path, span] += 1
            status = next(
                (code for text, code in self.server.always.items() if text in self.path), None
            )
            if self.server.dies_after is not None and span and self.path.endswith(".bin"):
                self.server.dies_after -= 1
                status = 503 if self.server.dies_after < 0 else None
            status = status or (self.server.failing.pop(0) if self.server.failing else 200)
        file = self.server.folder / self.path.lstrip("/")
        if status != 200 or not file.is_file():
            self.send_response(status if status != 200 else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        contents = file.read_bytes()
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", span)
        part = contents[int(found[1]) : int(found[2]) + 1] if found else contents
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Last-Modified", self.date_time_string(file.stat().st_mtime))
        self.end_headers()
        if body:
            self.wfile.write(part)
            with self.server.lock:
                self.server.sent += len(part)

    def log_message(self, *words: Any) -> None:
        """Print nothing."""


@contextmanager
def serving(folder: Path) -> Iterator[FileServer]:
    server = FileServer(folder)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
