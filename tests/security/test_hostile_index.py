"""An index, or a server that it leads to, which means no good: credentials, redirects, and answers without an end."""

import gzip
import io
import json
import sys
import time
import tracemalloc
import zipfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest
from packaging.version import Version

from overlay.errors import OverlayError
from overlay.queue import client, members, source
from overlay.queue.lock import Artefact
from overlay.queue.source import Offer, PipSettings
from tests.queue.server import Answer, Handler, Server, serving
from tests.queue.test_members import cached
from tests.sample import archive, digest

__all__ = ["cached"]

NAME = "demo-1.0-py3-none-any.whl"
WHEEL = archive({"demo/core.py": b"VALUE = 1\n" * 9})
ARTEFACT = Artefact(file=NAME, size=len(WHEEL), sha256=digest(WHEEL))
SECRET = "Basic " + b64encode(b"user:geheim").decode()
LINK = f'<a href="{NAME}">{NAME}</a>'.encode()


@dataclass
class Two:
    """The user's index, with credentials, and another server. `seen` is what each was sent as credentials."""

    index: Server
    other: Server
    seen: dict[str, list[str | None]] = field(default_factory=lambda: {"index": [], "other": []})

    def answer(self, which: str, path: str, answer: Answer) -> None:
        """An answer that takes down the credentials."""

        def noting(handler: Handler) -> None:
            self.seen[which].append(handler.headers.get("Authorization"))
            answer(handler)

        {"index": self.index, "other": self.other}[which].answers[path] = noting

    def settings(self, credentials: str = "user:geheim@") -> PipSettings:
        return PipSettings(index_urls=[f"http://{credentials}{self.index.place}"], timeout=600)

    def fetch(self, credentials: str = "user:geheim@") -> bytes:
        with self.settings(credentials).client() as opened:
            link = source._find(opened, self.settings(credentials), "demo", ARTEFACT)
            file = self.index.folder / "fetched"
            file.unlink(missing_ok=True)
            source._save(opened, link, file, ARTEFACT)
            return file.read_bytes()

    def fails(self, *parts: str) -> str:
        with pytest.raises(OverlayError) as caught:
            self.fetch()
        said = str(caught.value)
        assert all(part in said for part in parts), said
        assert "geheim" not in said
        return said


@pytest.fixture(params=["127.0.0.1", "localhost"])
def two(request: pytest.FixtureRequest, cached: Path, tmp_path: Path) -> Iterator[Two]:
    """Two origins: of the same host at another port, and of another host."""
    for name in ("index", "other"):
        (tmp_path / name / "demo").mkdir(parents=True)
        (tmp_path / name / "demo" / NAME).write_bytes(WHEEL)
    with ExitStack() as stack:
        one, other = (stack.enter_context(serving(tmp_path / name)) for name in ("index", "other"))
        one.ranges = other.ranges = True
        other.host = request.param
        yield Two(one, other)


@pytest.fixture
def one(cached: Path, tmp_path: Path) -> Iterator[Two]:
    """An index alone."""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / NAME).write_bytes(WHEEL)
    with serving(tmp_path) as server:
        server.answers["/demo/"] = lambda handler: handler.answer(LINK)
        yield Two(server, server)


def ask(answer: Answer) -> Answer:
    """Asks for credentials first."""

    def answering(handler: Handler) -> None:
        if "Authorization" in handler.headers:
            answer(handler)
        else:
            handler.answer(b"", status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})

    return answering


def test_credentials_do_not_follow_a_redirect_of_the_page(two: Two) -> None:
    two.answer("index", "/demo/", lambda handler: handler.redirect(f"{two.other.url}/demo/"))
    two.answer("other", "/demo/", lambda handler: handler.answer(LINK))
    two.answer("other", f"/demo/{NAME}", lambda handler: handler.answer(WHEEL))
    assert two.fetch() == WHEEL
    assert two.seen == {"index": [SECRET], "other": [None, None]}


def test_credentials_are_not_given_to_another_host_that_asks(two: Two) -> None:
    """Its 401 is no question to the index, and what is kept for the index is not kept for it."""
    two.answer("index", "/demo/", lambda handler: handler.redirect(f"{two.other.url}/demo/"))
    two.answer("other", "/demo/", ask(lambda handler: handler.answer(LINK)))
    for _ in range(2):
        two.fails(f"expected {NAME} on {two.index.url}", "401")
    two.answer(
        "index", "/demo/", lambda handler: handler.answer(f'<a href="{two.other.url}/demo/{NAME}">x</a>'.encode())
    )
    two.answer("other", f"/demo/{NAME}", ask(lambda handler: handler.answer(WHEEL)))
    two.fails(f"{two.other.url}/demo/{NAME}", "401")
    assert set(two.seen["other"]) == {None}
    assert set(two.seen["index"]) == {SECRET}


def test_credentials_are_not_kept_for_another_host_that_asks(two: Two) -> None:
    """It asks once, and then leads to a file of its own."""

    def page(handler: Handler) -> None:
        handler.answer(LINK)

    answers = iter([ask(page), page, page, page])
    two.answer("index", "/demo/", lambda handler: handler.redirect(f"{two.other.url}/demo/"))
    two.answer("other", "/demo/", lambda handler: next(answers)(handler))
    two.answer("other", f"/demo/{NAME}", lambda handler: handler.answer(WHEEL))
    with two.settings().client() as opened:
        for _ in range(3):
            opened.get(f"http://user:geheim@{two.index.place}/demo/")
        opened.get(f"{two.other.url}/demo/{NAME}")
    assert set(two.seen["other"]) == {None}


def test_credentials_do_not_follow_a_redirect_of_the_file_or_of_a_part(two: Two) -> None:
    two.answer("index", f"/demo/{NAME}", lambda handler: handler.redirect(f"{two.other.url}/demo/{NAME}"))
    two.answer("index", "/demo/", lambda handler: handler.answer(LINK))
    two.answer("other", f"/demo/{NAME}", lambda handler: handler.part(WHEEL))
    assert two.fetch() == WHEEL
    offer = Offer(Version("1.0"), NAME, f"http://user:geheim@{two.index.place}/demo/{NAME}", None, None, False)
    with two.settings().client() as opened:
        assert members.read(opened, offer, ["demo/core.py"]) == {"demo/core.py": b"VALUE = 1\n" * 9}
    assert len(two.seen["other"]) > 3
    assert set(two.seen["other"]) == {None}
    assert set(two.seen["index"]) == {SECRET}


def test_credentials_of_netrc_and_of_a_keyring_stay_with_their_host(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are by host: of another port of the same host they know nothing else."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password geheim\n")
    monkeypatch.setenv("NETRC", str(netrc))
    two.answer("index", "/demo/", lambda handler: handler.redirect(f"{two.other.url}/demo/"))
    two.answer(
        "other", "/demo/", lambda handler: handler.answer(LINK.replace(b'"', f'"{two.other.url}/demo/'.encode(), 1))
    )
    two.answer("other", f"/demo/{NAME}", lambda handler: handler.answer(WHEEL))
    assert two.fetch("") == WHEEL
    assert two.seen["index"] == [SECRET]
    assert two.seen["other"] == [None, SECRET if two.other.host == "127.0.0.1" else None]
    monkeypatch.setenv("NETRC", "/dev/null")
    monkeypatch.setitem(sys.modules, "keyring", None)  # so that its program is used
    monkeypatch.setattr("unearth.auth.KEYRING_DISABLED", False)
    program = tmp_path / "keyring"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nprintf "user\\ngeheim\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    two.seen.update(index=[], other=[])
    two.answer("index", "/demo/", ask(lambda handler: handler.redirect(f"{two.other.url}/demo/")))
    two.answer("other", "/demo/", lambda handler: handler.answer(b"", status=401))
    with two.settings("").client() as opened:
        assert opened.get(f"{two.index.url}/demo/").status_code == 401
    assert two.seen == {"index": [None, SECRET], "other": [None]}
    assert two.other.place not in (tmp_path / "asked").read_text()


@pytest.mark.parametrize(
    "target", ["http://index.example/demo/", "http://other.example/", "file:///etc/passwd", "ftp://x/"]
)
def test_a_redirect_away_from_https(target: str) -> None:
    transport = httpx2.MockTransport(lambda request: httpx2.Response(302, headers={"Location": target}))
    with client.Client(transport=transport) as opened, pytest.raises(httpx2.UnsupportedProtocol) as caught:
        opened.get("https://index.example/demo/")
    assert "expected a redirect to https, found one from https://index.example to " in str(caught.value)


def test_a_redirect_to_a_file_of_this_machine(one: Two) -> None:
    local = one.index.folder / "demo" / NAME
    one.index.answers["/demo/"] = lambda handler: handler.redirect(local.parent.as_uri() + "/index.html")
    one.fails("expected a redirect to http or https, found one from http://127.0.0.1 to file://")
    one.index.answers["/demo/"] = lambda handler: handler.answer(LINK)
    one.index.answers[f"/demo/{NAME}"] = lambda handler: handler.redirect(local.as_uri())
    one.fails("expected a redirect to http or https, found one from http://127.0.0.1 to file://")


def test_a_page_that_links_to_a_file_of_this_machine(one: Two) -> None:
    local = (one.index.folder / "demo" / NAME).as_uri()
    one.index.answers["/demo/"] = lambda handler: handler.answer(f'<a href="{local}">x</a>'.encode())
    one.fails("found no such file", f"expected links to http or https, found {local}")


def test_an_endless_body_of_a_redirect_is_not_read(one: Two) -> None:
    def pour(handler: Handler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "/elsewhere/")
        handler.end_headers()
        while True:
            handler.wfile.write(bytes(1 << 20))

    one.index.answers["/demo/"] = pour
    one.index.answers["/elsewhere/"] = lambda handler: handler.answer(
        LINK.replace(NAME.encode(), f"/demo/{NAME}".encode(), 1)
    )
    assert one.fetch() == WHEEL


@cache
def zeros(size: int) -> bytes:
    return gzip.compress(bytes(size), 9)


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", ""])
def test_a_page_that_is_too_large(one: Two, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"gzip": zeros(40 << 20), "gzip, gzip": gzip.compress(zeros(40 << 20)), "": bytes(40 << 20)}[encoding]
    headers = {"Content-Encoding": encoding} if encoding else {}
    one.index.answers["/demo/"] = lambda handler: handler.answer(content, headers=headers)
    one.fails(
        f"expected {NAME} on {one.index.url}", f"expected a page of at most {client.MAXIMUM_PAGE} bytes, found more"
    )


def test_a_file_that_is_larger_when_it_is_unpacked(one: Two) -> None:
    headers = {"Content-Encoding": "gzip"}
    one.index.answers[f"/demo/{NAME}"] = lambda handler: handler.answer(zeros(40 << 20), headers=headers)
    one.fails(f"found more than {len(WHEEL)} bytes")


@pytest.mark.parametrize("path", ["/demo/", f"/demo/{NAME}"])
def test_an_answer_that_is_slow_for_ever(one: Two, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower than a byte in each of pip's timeouts it cannot be; as slow as that it could last for weeks."""
    monkeypatch.setattr(client, "PATIENCE", 0.4)

    def drip(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.end_headers()
        while True:
            handler.wfile.write(b" ")
            time.sleep(0.05)

    one.index.answers[path] = drip
    one.fails("expected 1024 bytes a second, found")


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        pytest.param(b"[]", "json", id="no table"),
        pytest.param(b'{"files": 1}', "json", id="no list"),
        pytest.param(b'{"files": [1]}', "json", id="no file"),
        pytest.param(b'{"files": [{"url": 1}]}', "json", id="no address"),
        pytest.param(b'{"files": ' + DEEP, "json", id="deep"),
        pytest.param(b'{"files": [{"url": "http://[::1/x.whl"}]}', "json", id="no host"),
        pytest.param(b'{"files": [{"url": "x.whl", "hashes": 1}]}', "json", id="no hashes"),
        pytest.param(b'{"files": [{"url": "x.whl", "upload-time": 1}]}', "json", id="no time"),
        pytest.param(b"\xff", "html", id="no text"),
        pytest.param(b'<a href="http://[::1/demo-1.0-py3-none-any.whl">', "html", id="no host in a link"),
        pytest.param(b"<![x[", "html", id="no markup"),
        pytest.param(b"", "html", id="nothing"),
    ],
)
def test_a_page_that_is_none(one: Two, content: bytes, kind: str) -> None:
    named = {"json": "application/vnd.pypi.simple.v1+json", "html": "text/html"}[kind]
    one.index.answers["/demo/"] = lambda handler: handler.answer(content, kind=named)
    one.fails(f"expected {NAME} on {one.index.url}, found no such file")


@pytest.mark.parametrize(
    "place", ["http://127.0.0.1:99999", "http://[::1", "http://a..b", "http://\u202e.example", "http://"]
)
def test_a_link_to_no_address(one: Two, place: str) -> None:
    page = json.dumps({"files": [{"url": f"{place}/{NAME}"}]}).encode()
    one.index.answers["/demo/"] = lambda handler: handler.answer(page, kind="application/vnd.pypi.simple.v1+json")
    said = one.fails("expected")
    assert said.isprintable()


def test_names_on_a_page_are_printed_without_escapes(one: Two, capsys: pytest.CaptureFixture[str]) -> None:
    """`drift` says which wheel has to be fetched as a whole; its name is the index's."""
    name = "demo-1.0-py3-none-any\x1b[2J\u202e.whl"
    (one.index.folder / "demo" / "x").write_bytes(WHEEL)
    with one.settings().client() as opened:
        members.read(
            opened, Offer(Version("1.0"), name, f"{one.index.url}/demo/x", None, None, False), ["demo/core.py"]
        )
    assert "demo-1.0-py3-none-any\\x1b[2J\\u202e.whl: no single files" in capsys.readouterr().err


@cache
def bomb(content: bytes, **changes: Any) -> bytes:
    """A wheel of one member with this content, whose entry in the directory lies."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("demo/core.py", content)
        for name, value in changes.items():
            setattr(target.filelist[0], name, value)
    return made.getvalue()


def directory(size: int, count: int) -> bytes:
    """An archive whose end says that the directory before it has this size."""
    return bytes(100) + b"PK\5\6" + bytes(4) + count.to_bytes(2, "little") * 2 + size.to_bytes(4, "little") + bytes(6)


REMOTE: list[tuple[str, Callable[[], bytes], str]] = [
    ("a member that unpacks to a quarter of a gibibyte", lambda: bomb(bytes(1 << 28), file_size=9), "exceeds limit"),
    ("a member with a huge size", lambda: bomb(b"x", file_size=0xFFFF_FFF0), "exceeds limit"),
    ("a member with a huge packed size", lambda: bomb(b"x", compress_size=0xFFFF_FFF0), "is larger than"),
    ("a member that begins elsewhere", lambda: bomb(b"x", header_offset=0xFFFF_FFF0), "header"),
    (
        "a zip64 field that is cut",
        lambda: bomb(b"x", file_size=0xFFFF_FFFF, extra=b"\1\0\10\0\0"),
        "files cannot be read",
    ),
    ("a huge directory", lambda: directory(0xFFFF_FFF0, 9), "expected parts of at most"),
    ("a directory of nothing", lambda: directory(99, 9), "signature"),
    ("more entries than there are", lambda: directory(0, 0xFFFE), "truncated"),
]


@pytest.mark.parametrize(("content", "said"), [pytest.param(*row[1:], id=row[0]) for row in REMOTE])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_wheel_that_no_lock_names(one: Two, content: Callable[[], bytes], said: str, ranges: bool) -> None:
    """As `drift` reads it, where the page has no hash; no part of it takes more memory than it may."""
    one.index.ranges = ranges
    made = content()
    (one.index.folder / "demo" / NAME).write_bytes(made)
    offer = Offer(Version("1.0"), NAME, f"{one.index.url}/demo/{NAME}", None, None, False)
    tracemalloc.start()
    try:
        with one.settings().client() as opened, pytest.raises(OverlayError) as caught:
            members.read(opened, offer, ["demo/core.py"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert f"{NAME}: expected a wheel, found that its files cannot be read" in str(caught.value)
    assert said in str(caught.value)
    assert peak < 64 << 20


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_is_doubled_on_the_index(one: Two) -> None:
    pairs = [("demo/core.py", b"one\n"), ("demo/core.py", b"two\n")]
    (one.index.folder / "demo" / NAME).write_bytes(archive(pairs))
    offer = Offer(Version("1.0"), NAME, f"{one.index.url}/demo/{NAME}", None, None, False)
    with one.settings().client() as opened, pytest.raises(OverlayError, match=r"'demo/core\.py' is doubled"):
        members.read(opened, offer, ["demo/core.py"])
