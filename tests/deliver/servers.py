"""Real servers of packages, each a process of its own on the loopback interface, and what installs from them."""

import base64
import contextlib
import hashlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from overlay import environments, processes
from tests.ports import reserved

Answer = tuple[int, Mapping[str, str], bytes]
"""Status, headers and body."""

USER, PASSWORD = "somebody", "a secret of the tests"


@contextlib.contextmanager
def running(command: Sequence[object], port: int, log: Path) -> Iterator[str]:
    """A server's process; gives its address as soon as it answers, and leaves nothing running.

    Args:
        port: which it listens to, and which is reserved.
    """
    with log.open("wb") as output:
        process = processes.start(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 600
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, log.read_text("utf-8", "replace")
            assert time.monotonic() < deadline, log.read_text("utf-8", "replace")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        processes.kill_group(process)


@contextlib.contextmanager
def static(folder: Path, scratch: Path) -> Iterator[str]:
    """Python's own file server."""
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", folder]
    with reserved() as port, running([*command, port], port, scratch / "http.log") as address:
        yield address


@contextlib.contextmanager
def scripted(answer: Callable[[str, str], Answer]) -> Iterator[tuple[str, list[tuple[str, str, str, bool]]]]:
    """A server in a thread that answers what `answer` gives for a method and a path.

    Yields:
        Its address, and what it is asked: method, path, host, and whether credentials came with it.
    """
    asked: list[tuple[str, str, str, bool]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            host = str(self.headers["Host"]).partition(":")[0]
            asked.append((self.command, self.path, host, "Authorization" in self.headers))
            code, headers, body = answer(self.command, self.path)
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


NGINX = """\
daemon off;
master_process off;
pid {scratch}/nginx.pid;
error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path {scratch}/body;
  proxy_temp_path {scratch}/proxy;
  fastcgi_temp_path {scratch}/fastcgi;
  uwsgi_temp_path {scratch}/uwsgi;
  scgi_temp_path {scratch}/scgi;
  types {{ text/html html; }}
  server {{ listen 127.0.0.1:{port}; root {folder}; }}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, scratch: Path) -> Iterator[str]:
    """nginx with a configuration of its own, in the foreground."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not on PATH")
    configuration = scratch / "nginx.conf"
    command = [program, "-c", configuration, "-e", "stderr"]
    with reserved() as port:
        configuration.write_text(NGINX.format(scratch=scratch, port=port, folder=folder), "utf-8")
        with running(command, port, scratch / "nginx.log") as address:
            yield address


@dataclass(frozen=True)
class Index:
    """A server that takes uploads."""

    uploads: str
    pages: str


@contextlib.contextmanager
def pypiserver(scratch: Path, *more: str) -> Iterator[Index]:
    """pypiserver, of which uploads ask for a password; with `more` options."""
    packages, passwords = scratch / "packages", scratch / "htpasswd"
    packages.mkdir()
    hashed = base64.b64encode(hashlib.sha1(PASSWORD.encode(), usedforsecurity=False).digest()).decode()
    passwords.write_text(f"{USER}:{{SHA}}{hashed}\n", "utf-8")
    program = environments.python("indexes").with_name("pypi-server")
    options = ["-i", "127.0.0.1", "--disable-fallback", "-a", "update", "-P", passwords, *more]
    with (
        reserved() as port,
        running([program, "run", "-p", port, *options, packages], port, scratch / "pypiserver.log") as address,
    ):
        yield Index(f"{address}/", f"{address}/simple/")


@contextlib.contextmanager
def devpi(scratch: Path) -> Iterator[Index]:
    """devpi-server, with one user and one index that knows no other."""
    programs = environments.python("indexes").parent
    storage = ["--serverdir", str(scratch / "devpi")]
    subprocess.run(
        [programs / "devpi-init", *storage, "--no-root-pypi", "--root-passwd", PASSWORD],
        check=True,
        capture_output=True,
    )
    command = [programs / "devpi-server", *storage, "--host", "127.0.0.1"]
    command += ["--argon2-memory-cost=8", "--argon2-parallelism=1", "--argon2-time-cost=1"]  # else ten seconds
    with reserved() as port, running([*command, "--port", port], port, scratch / "devpi.log") as address:
        ask(f"{address}/{USER}", "PUT", {"password": PASSWORD})
        token = ask(f"{address}/+login", "POST", {"user": USER, "password": PASSWORD})["result"]["password"]  # type: ignore[index]
        known = base64.b64encode(f"{USER}:{token}".encode()).decode()
        ask(f"{address}/{USER}/packages", "PUT", {"type": "stage", "bases": [], "volatile": True}, known)
        yield Index(f"{address}/{USER}/packages/", f"{address}/{USER}/packages/+simple/")


def ask(address: str, method: str, body: Mapping[str, object], known: str = "") -> dict[str, object]:
    """What devpi answers."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"} | (
        {"X-Devpi-Auth": known} if known else {}
    )
    request = urllib.request.Request(address, json.dumps(body).encode(), headers, method=method)  # noqa: S310
    with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310
        answer: dict[str, object] = json.load(response)
    return answer
