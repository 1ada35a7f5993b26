"""A package index on the loopback interface, which can be told to misbehave."""

import base64
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Serves the files of its server's folder, and `index.html` for a folder."""

    server: "Server"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.command == "GET":
            self.server.requests.append(self.path)
        path = unquote(urlsplit(self.path).path)
        known = self.server.credentials
        expected = "Basic " + base64.b64encode((known or "").encode()).decode()
        if known is not None and self.headers.get("Authorization") != expected:
            self.answer(b"", status=HTTPStatus.UNAUTHORIZED, headers={"WWW-Authenticate": 'Basic realm="index"'})
        elif path in self.server.answers:
            self.server.answers[path](self)
        else:
            self.file(path)

    def file(self, path: str) -> None:
        """Answers with the file at `path`."""
        file = self.server.folder / path.strip("/")
        if file.is_dir():
            file /= "index.html"
        if file.suffix == ".html" and file.is_file():
            self.answer(file.read_bytes())
        elif file.is_file():
            self.part(file.read_bytes())
        else:
            self.answer(b"", status=HTTPStatus.NOT_FOUND)

    def part(self, content: bytes) -> None:
        """Answers with the part of `content` that was asked for, if the server does so (RFC 9110, section 14)."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        kind, headers = "application/octet-stream", {"Accept-Ranges": "bytes"} if self.server.ranges else {}
        if asked is None or not self.server.ranges:
            self.answer(content, kind, headers=headers)
            return
        first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.answer(content[first : last + 1], kind, HTTPStatus.PARTIAL_CONTENT, headers=headers)

    def answer(
        self,
        content: bytes,
        kind: str = "text/html",
        status: int = HTTPStatus.OK,
        length: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Answers with `content`, and says that it has `length` bytes."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.server.sent += len(content)
            self.wfile.write(content)

    def redirect(self, location: str) -> None:
        """Answers that it is somewhere else."""
        self.answer(b"", status=HTTPStatus.FOUND, headers={"Location": location})

    def log_message(self, *_arguments: object) -> None:
        """Says nothing."""


class Server(ThreadingHTTPServer):
    """`answers` are by path and come before files; with `credentials` (`user:password`) it asks for them; with
    `ranges` it answers with parts of files. `host` is the name that its address has, `sent` counts the bytes of its
    answers."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait: of the 5 of the standard library the kernel may drop some

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.requests: list[str] = []
        self.answers: dict[str, Answer] = {}
        self.credentials: str | None = None
        self.ranges = False
        self.host = "127.0.0.1"
        self.sent = 0

    @property
    def place(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.server_address[1]}"

    @property
    def url(self) -> str:
        """The address of its folder."""
        return f"http://{self.place}"

    def handle_error(self, *_arguments: object) -> None:
        """Says nothing: some clients are told to go away in the middle."""


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server of `folder` in a thread."""
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
