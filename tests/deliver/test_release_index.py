"""pip and uv install the patched wheel from our index beside the public one, over stock and over an older revision."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from overlay.queue import lock, source
from tests import variants
from tests.deliver.test_release_wheels import copied_root

STOCK = "5.14.1"
REVISION = lock.read(variants.ROOT / "upstream.lock").find(f"transformers=={STOCK}")[2].revision or 0
FIRST, SECOND = f"{STOCK}+overlay.{REVISION}", f"{STOCK}+overlay.{REVISION + 1}"


@pytest.fixture(scope="module")
def second_revision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The products of a queue whose lock has the next revision of 5.14.1."""
    folder = tmp_path_factory.mktemp("second")
    root = copied_root(folder)
    path = root / "upstream.lock"
    pins = lock.read(path)
    position = [release.version for release in pins.packages["transformers"].releases].index(STOCK)
    at = ("packages", "transformers", "releases", position)
    lock.write(path, {(*at, "revision"): REVISION + 1, (*at, "built"): None})
    for arguments in (
        ["lock", "update", f"transformers=={STOCK}"],
        ["apply", f"transformers=={STOCK}", "--out", str(folder / "dist")],
    ):
        command = [sys.executable, "-P", "-m", "overlay", *arguments, "--root", str(root)]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(variants.ROOT)}, check=True)
    return folder / "dist"


@pytest.fixture(scope="module")
def first_revision() -> Path:
    return variants.products()


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], str]]:
    """Serves a folder by HTTP on loopback; gives the address of its index."""
    servers = []

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    def serve(folder: Path) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/simple/"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


class Environment:
    """A new virtual environment, and one installer to fill it with; the public index is that of the user's settings."""

    def __init__(self, folder: Path, installer: str) -> None:
        self.folder = folder
        self.installer = installer
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)

    def install(self, *arguments: str, index: str) -> str:
        """The version of transformers that is there afterwards."""
        python = self.folder / "bin" / "python"
        if self.installer == "pip":
            command = [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(python),
                "install",
                "--quiet",
                "--no-compile",
                "--extra-index-url",
                index,
            ]
        else:
            command = [
                sys.executable,
                "-m",
                "uv",
                "pip",
                "install",
                "--quiet",
                "--python",
                str(python),
                "--index",
                index,
            ]
        done = subprocess.run([*command, "--no-deps", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return self.version()

    def version(self) -> str:
        code = "import importlib.metadata; print(importlib.metadata.version('transformers'))"
        return subprocess.run(
            [str(self.folder / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()


@pytest.fixture(params=["pip", "uv"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    return Environment(tmp_path / "env", request.param)


@pytest.fixture(scope="module")
def stock() -> str:
    """The stock wheel, from the cache: what a user has installed already."""
    project, _, release = lock.read(variants.ROOT / "upstream.lock").find(f"transformers=={STOCK}")
    return str(source.fetch(project, release.wheel))


def test_over_http_into_an_empty_environment(
    environment: Environment, first_revision: Path, served: Callable[[Path], str]
) -> None:
    constraints = str(first_revision / "constraints.txt")
    assert environment.install("transformers==5.14.1", "-c", constraints, index=served(first_revision)) == FIRST


def test_over_stock_and_over_an_older_revision(
    environment: Environment, first_revision: Path, second_revision: Path, stock: str
) -> None:
    first, second = (folder.joinpath("simple").as_uri() for folder in (first_revision, second_revision))
    assert environment.install(stock, index=first) == STOCK
    assert environment.install("transformers==5.14.1", index=first) == STOCK, "a bare version leaves stock in place"
    assert (
        environment.install("transformers==5.14.1", "-c", str(first_revision / "constraints.txt"), index=first) == FIRST
    )
    assert environment.install("transformers==5.14.1", index=second) == FIRST, "and an older revision too"
    assert (
        environment.install("transformers==5.14.1", "-c", str(second_revision / "constraints.txt"), index=second)
        == SECOND
    )


def test_with_the_hash_an_exchanged_wheel_is_refused(
    environment: Environment, first_revision: Path, tmp_path: Path
) -> None:
    line = next(
        row for row in (first_revision / "constraints.txt").read_text().splitlines() if row.startswith("transformers==")
    )
    pinned, exchanged = tmp_path / "pinned.txt", tmp_path / "exchanged.txt"
    pinned.write_text(line.replace("# --hash", "--hash"))
    exchanged.write_text(re.sub("sha256:.*", "sha256:" + "0" * 64, pinned.read_text()))
    index = (first_revision / "simple").as_uri()
    with pytest.raises(AssertionError, match=r"(?i)hash"):
        environment.install("-r", str(exchanged), index=index)
    assert environment.install("-r", str(pinned), index=index) == FIRST
