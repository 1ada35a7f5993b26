"""Single members of a wheel on an index: by ranges where the server answers them, from the whole wheel elsewhere."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from packaging.version import Version

from overlay.errors import OverlayError
from overlay.queue import members, source
from overlay.queue.source import Offer, PipSettings
from tests.queue.server import Handler, Server, serving
from tests.sample import archive, digest, module

NAME = "demo-1.0-py3-none-any.whl"
CORE = module("core")
NOISE = b"".join(hashlib.sha256(str(number).encode()).digest() for number in range(100_000))
WHEEL = archive({"demo/core.py": CORE, "demo/noise.bin": NOISE, "demo/empty.py": b""})
PATHS = ("demo/core.py", "demo/missing.py", "demo/empty.py")
FOUND = {"demo/core.py": CORE, "demo/missing.py": None, "demo/empty.py": b""}
WHOLE = f"overlay: {NAME}: no single files can be had of it, so all of it is fetched\n"


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache that members are kept in; nothing is there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    return tmp_path / "cache" / "modeling-overlay" / "members"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of the wheel, which answers with parts of it."""
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / NAME).write_bytes(WHEEL)
    with serving(tmp_path / "index") as server:
        server.ranges = True
        yield server


def offered(server: Server, sha256: str | None = digest(WHEEL)) -> Offer:
    """The wheel, as a page of the server's lists it."""
    return Offer(Version("1.0"), NAME, f"{server.url}/{NAME}", sha256, None, False)


def read(server: Server, sha256: str | None = digest(WHEEL), settings: PipSettings | None = None) -> members.Members:
    """The members, as of a wheel that a page of the server's lists with this hash."""
    with (settings or PipSettings()).client() as client:
        return members.read(client, offered(server, sha256), PATHS)


def fails(server: Server, *parts: str, sha256: str | None = digest(WHEEL)) -> str:
    """The error, which must hold `parts`; nothing is kept."""
    with pytest.raises(OverlayError) as caught:
        read(server, sha256)
    said = str(caught.value)
    assert "\n" not in said
    assert all(part in said for part in (f"{server.url}/{NAME}: ", *parts)), said
    return said


def test_the_members_alone_are_fetched_where_ranges_are_answered(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read(server) == FOUND
    assert server.requests == [f"/{NAME}"] * 4  # end of the wheel, its directory, two members
    assert server.sent < len(WHEEL) / 30
    assert capsys.readouterr().err == ""


def test_the_whole_wheel_is_fetched_elsewhere(server: Server, cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.ranges = False
    assert read(server) == FOUND
    assert server.requests == [f"/{NAME}"]
    assert server.sent == len(WHEEL)
    assert capsys.readouterr().err == WHOLE
    assert [file.name for file in cached.iterdir()] == [f"{digest(WHEEL)}.json"]


@pytest.mark.parametrize("ranges", [True, False])
def test_what_is_in_the_cache_is_not_fetched(server: Server, ranges: bool) -> None:
    server.ranges = ranges
    read(server)
    server.requests.clear()
    assert read(server) == FOUND
    assert server.requests == []


def test_what_is_missing_in_the_cache_is_added(server: Server, cached: Path) -> None:
    offer = Offer(Version("1.0"), NAME, f"{server.url}/{NAME}", digest(WHEEL), None, False)
    with PipSettings().client() as client:
        assert members.read(client, offer, PATHS[:1]) == {"demo/core.py": CORE}
        assert members.read(client, offer, PATHS[2:]) == {"demo/empty.py": b""}
    [file] = cached.iterdir()
    assert list(json.loads(file.read_text("utf-8"))) == ["demo/core.py", "demo/empty.py"]


def test_another_wheel_of_the_same_name_is_another(server: Server) -> None:
    read(server)
    other = archive({"demo/core.py": b"other\n", "demo/empty.py": b""})
    (server.folder / NAME).write_bytes(other)
    assert read(server, digest(other)) == {"demo/core.py": b"other\n", "demo/missing.py": None, "demo/empty.py": b""}


def test_nothing_is_kept_of_a_wheel_without_a_hash(server: Server, cached: Path) -> None:
    for _ in range(2):
        server.requests.clear()
        assert read(server, sha256=None) == FOUND
        assert len(server.requests) == 4
    assert not cached.exists()


@pytest.mark.parametrize("damage", ["another content", "no JSON", "no table", "no member", "no content"])
def test_damage_in_the_cache(server: Server, cached: Path, damage: str) -> None:
    read(server)
    [file] = cached.iterdir()
    text = file.read_text("utf-8")
    damaged = {
        "another content": text.replace("value + 30", "value + 31"),
        "no JSON": text[:-1],
        "no table": "[]",
        "no member": '{"demo/core.py": 1, "demo/empty.py": {}}',
        "no content": "",
    }[damage]
    assert damaged != text
    file.write_text(damaged, encoding="utf-8")
    assert read(server) == FOUND
    assert json.loads(file.read_text("utf-8")) == json.loads(text)


PARTS = {"Accept-Ranges": "bytes"}


def without_head(handler: Handler) -> None:
    handler.answer(WHEEL, status=HTTPStatus.METHOD_NOT_ALLOWED if handler.command == "HEAD" else HTTPStatus.OK)


def the_whole(handler: Handler) -> None:
    handler.answer(WHEEL, headers=PARTS)


def another_part(handler: Handler) -> None:
    if "Range" in handler.headers:
        handler.answer(WHEEL[:100], status=HTTPStatus.PARTIAL_CONTENT, headers=PARTS)
    else:
        the_whole(handler)


def more(handler: Handler) -> None:
    if "Range" in handler.headers:
        handler.answer(WHEEL * 2, status=HTTPStatus.PARTIAL_CONTENT, headers=PARTS)
    else:
        the_whole(handler)


def another_length(handler: Handler) -> None:
    if handler.command == "HEAD":
        handler.answer(WHEEL, length=len(WHEEL) - 7, headers=PARTS)
    else:
        handler.part(WHEEL)


def endless(handler: Handler) -> None:
    if "Range" not in handler.headers:
        the_whole(handler)
        return
    handler.send_response(HTTPStatus.PARTIAL_CONTENT)
    handler.end_headers()
    while True:
        handler.wfile.write(bytes(1 << 20))


@pytest.mark.parametrize("answer", [without_head, the_whole, another_part, more, another_length, endless])
def test_a_server_that_answers_ranges_wrongly(
    server: Server, answer: Callable[[Handler], None], capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers[f"/{NAME}"] = answer
    assert read(server) == FOUND
    assert capsys.readouterr().err == WHOLE


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_a_wheel_that_is_not_served(server: Server, cached: Path, status: int) -> None:
    server.answers[f"/{NAME}"] = lambda handler: handler.answer(b"no", status=status)
    fails(server, "expected a wheel, found 0 bytes and then", str(status), "check the network")
    assert not cached.exists()


DAMAGES = [
    pytest.param(lambda content: content[:-1], id="truncated by one"),
    pytest.param(lambda content: content[: len(content) // 2], id="truncated"),
    pytest.param(lambda _: b"", id="empty"),
    pytest.param(lambda content: content[:60] + b"\0\0" + content[62:], id="two bytes"),
    pytest.param(lambda _: b"PK\3\4 no wheel", id="no wheel"),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_wheel(server: Server, cached: Path, damage: Callable[[bytes], bytes]) -> None:
    content = damage(WHEEL)
    (server.folder / NAME).write_bytes(content)
    fails(server, f"expected sha256 {digest(WHEEL)}, found {len(content)} bytes with {digest(content)}")
    found = "that its files cannot be read" if content else f"0 bytes with {digest(content)}"
    fails(server, f"expected a wheel, found {found}", sha256=None)
    assert not cached.exists()


def test_a_whole_wheel_that_is_another(server: Server) -> None:
    server.ranges = False
    (server.folder / NAME).write_bytes(archive({"demo/core.py": CORE}))
    fails(server, f"expected sha256 {digest(WHEEL)}, found", "another file")


@pytest.mark.parametrize("ranges", [True, False])
def test_a_member_that_is_too_large(server: Server, ranges: bool) -> None:
    server.ranges = ranges
    content = archive({"demo/core.py": bytes(members.MAXIMUM_MEMBER + 1)})
    (server.folder / NAME).write_bytes(content)
    fails(server, "expected a wheel, found", "'demo/core.py'", "exceeds limit", sha256=digest(content))


def test_a_wheel_that_is_too_large(server: Server, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.ranges = False
    monkeypatch.setattr(source, "MAXIMUM_WHEEL", 1_000_000)
    said = fails(server, "expected a wheel of at most 1000000 bytes, found more")
    with PipSettings().client() as client, pytest.raises(OverlayError) as caught:
        source.pin(client, offered(server))
    assert str(caught.value) == said
    assert not list(cached.parent.rglob("*.whl"))


def test_a_server_that_breaks_off(server: Server) -> None:
    server.answers[f"/{NAME}"] = lambda handler: handler.answer(WHEEL[:20000], length=len(WHEEL))
    fails(server, "expected a wheel, found 20000 bytes and then", "check the network")


def test_a_server_that_says_nothing(server: Server) -> None:
    server.answers[f"/{NAME}"] = lambda handler: time.sleep(3600)  # in a thread that ends with this process
    with pytest.raises(OverlayError, match=r"expected an answer, found none and then: timed out"):
        read(server, settings=PipSettings(timeout=0.3))


def test_a_file(server: Server) -> None:
    """Of a local index: the members are read where they lie."""
    offer = Offer(Version("1.0"), NAME, (server.folder / NAME).as_uri(), None, None, False)
    with PipSettings().client() as client:
        assert members.read(client, offer, PATHS) == FOUND


def test_credentials_are_used_and_never_shown(server: Server) -> None:
    server.credentials = "user:geheim"
    offer = Offer(Version("1.0"), NAME, f"http://user:geheim@{server.place}/{NAME}", digest(WHEEL), None, False)
    with PipSettings().client() as client:
        assert members.read(client, offer, PATHS[:1]) == {"demo/core.py": CORE}
        server.answers[f"/{NAME}"] = lambda handler: handler.answer(b"no", status=500)
        with pytest.raises(OverlayError) as caught:
            members.read(client, offer, PATHS)
    assert str(caught.value).startswith(f"{server.url}/{NAME}: expected a wheel")
    assert "geheim" not in str(caught.value)
