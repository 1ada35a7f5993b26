"""Artefacts: taken from the user's index with the settings of their pip, and nothing but what the lock names."""

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from overlay.errors import OverlayError
from overlay.queue import lock, source
from tests.deliver.test_relock import without_network
from tests.queue.server import Handler, Server, serving
from tests.sample import Done, Sample, digest

NAME = "demo-1.0-py3-none-any.whl"
Damage = Callable[[bytes], bytes]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES = [
    pytest.param(flipped, id="flipped byte"),
    pytest.param(lambda content: content[:-1], id="truncated by one"),
    pytest.param(lambda content: content[: len(content) // 2], id="truncated"),
    pytest.param(lambda _: b"", id="empty"),
    pytest.param(lambda content: content + b"\0", id="one byte more"),
    pytest.param(lambda content: content * 3, id="much more"),
    pytest.param(lambda _: b"PK\3\4another wheel of the same name", id="wrong file"),
]


@pytest.fixture
def fresh(sample: Sample) -> Sample:
    """A sample with nothing in the cache."""
    shutil.rmtree(sample.cache)
    return sample


@pytest.fixture
def server(fresh: Sample) -> Iterator[Server]:
    """A server of the sample's index, which the sample uses."""
    with serving(fresh.index) as server:
        fresh.variables["PIP_INDEX_URL"] = server.url
        yield server


@contextmanager
def source_environment(sample: Sample) -> Iterator[None]:
    """This process with the sample's environment, for what need not be a command of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            patch.delenv(name)
        for name, value in sample.environment().items():
            patch.setenv(name, value)
        yield


def first(sample: Sample) -> Done:
    return sample.apply("demo==1.0")


def kept(sample: Sample) -> list[str]:
    """Every file that the cache has of artefacts."""
    return sorted(file.name for file in (sample.cache / "modeling-overlay" / "artefacts").rglob("*") if file.is_file())


def recovers(sample: Sample) -> None:
    """The same command succeeds, now that the fault is gone, and nothing is left of it."""
    assert not sample.out.exists()
    assert not sample.patched.exists()
    first(sample).succeeds()
    assert sample.cached().read_bytes() == sample.wheel().read_bytes()
    assert kept(sample) == [NAME]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_in_the_cache(sample: Sample, damage: Damage) -> None:
    content = sample.cached().read_bytes()
    sample.cached().write_bytes(damage(content))
    said = first(sample).fails(
        f"{sample.cached()}: expected {len(content)} bytes with sha256 {digest(content)}, found", "run this again"
    )
    assert digest(damage(content)) in said
    assert not sample.out.exists()
    first(sample).succeeds()
    assert sample.cached().read_bytes() == content


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_in_the_download(fresh: Sample, damage: Damage) -> None:
    content = fresh.wheel().read_bytes()
    fresh.wheel().write_bytes(damage(content))
    first(fresh).fails(
        f"{NAME}: expected {len(content)} bytes with sha256 {digest(content)}, found", "nothing was kept"
    )
    assert kept(fresh) == []
    fresh.wheel().write_bytes(content)
    recovers(fresh)


def test_what_is_in_the_cache_is_not_fetched(sample: Sample) -> None:
    shutil.rmtree(sample.index)
    sample.variables["PIP_CONFIG_FILE"] = str(sample.folder / "missing")
    sample.overlay("apply", prefix=without_network()).succeeds()


def test_an_index_that_offers_another_file(fresh: Sample) -> None:
    content = fresh.wheel().read_bytes()
    fresh.wheel().write_bytes(flipped(content))
    fresh.list_page("demo")
    first(fresh).fails(
        f"{NAME}: expected sha256 {digest(content)}, found sha256 {digest(flipped(content))} at file:",
        "the index offers another file",
    )
    assert kept(fresh) == []
    fresh.wheel().write_bytes(content)
    fresh.list_page("demo")
    recovers(fresh)


def test_the_second_index_may_have_the_right_file(fresh: Sample) -> None:
    content = fresh.wheel().read_bytes()
    other = fresh.folder / "other index"
    shutil.copytree(fresh.index, other)
    fresh.variables["PIP_EXTRA_INDEX_URL"] = other.as_uri()
    fresh.wheel().write_bytes(flipped(content))
    fresh.list_page("demo")
    first(fresh).succeeds()
    assert fresh.cached().read_bytes() == content


def test_a_page_without_hashes(fresh: Sample) -> None:
    fresh.list_page("demo", hashes=False)
    content = fresh.wheel().read_bytes()
    fresh.wheel().write_bytes(flipped(content))
    first(fresh).fails(f"expected {len(content)} bytes with sha256 {digest(content)}, found", "nothing was kept")
    fresh.wheel().write_bytes(content)
    recovers(fresh)


def test_a_page_as_json(fresh: Sample, server: Server) -> None:
    """PEP 691, as the large indexes answer to who accepts it."""
    content = fresh.wheel().read_bytes()
    page = {
        "meta": {"api-version": "1.0"},
        "name": "demo",
        "files": [{"filename": NAME, "url": NAME, "hashes": {"sha256": digest(content)}}],
    }
    server.answers["/demo/"] = lambda handler: handler.answer(
        json.dumps(page).encode(), kind="application/vnd.pypi.simple.v1+json"
    )
    recovers(fresh)


def test_a_page_without_the_file(fresh: Sample, server: Server) -> None:
    fresh.wheel().rename(fresh.folder / NAME)
    fresh.list_page("demo")
    first(fresh).fails(
        f"expected {NAME} on {server.url}, found no such file",
        "check the network and the index in your pip configuration",
    )
    (fresh.folder / NAME).rename(fresh.wheel())
    fresh.list_page("demo")
    recovers(fresh)


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_a_page_that_is_not_served(fresh: Sample, server: Server, status: int) -> None:
    server.answers["/demo/"] = lambda handler: handler.answer(b"no", status=status)
    first(fresh).fails(f"expected {NAME} on {server.url}, found no such file", str(status), "check the network")
    server.answers.clear()
    recovers(fresh)


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_a_file_that_is_not_served(fresh: Sample, server: Server, status: int) -> None:
    server.answers[f"/demo/{NAME}"] = lambda handler: handler.answer(b"no", status=status)
    first(fresh).fails(f"{server.url}/demo/{NAME}", "expected", str(status), "run this again")
    server.answers.clear()
    recovers(fresh)


def test_a_server_that_breaks_off(fresh: Sample, server: Server) -> None:
    content = fresh.wheel().read_bytes()
    server.answers[f"/demo/{NAME}"] = lambda handler: handler.answer(content[:20000], length=len(content))
    first(fresh).fails(
        f"{server.url}/demo/{NAME}: expected {len(content)} bytes, found 20000", "check the network and run this again"
    )
    assert kept(fresh) == []
    server.answers.clear()
    recovers(fresh)


def test_a_server_that_never_ends(fresh: Sample, server: Server) -> None:
    def pour(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(bytes(1 << 20))

    server.answers[f"/demo/{NAME}"] = pour
    first(fresh).fails("expected", "bytes with sha256", f"found more than {fresh.wheel().stat().st_size} bytes")
    server.answers.clear()
    recovers(fresh)


def test_a_server_that_says_nothing(fresh: Sample, server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        fresh.variables.update({"PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}", "PIP_TIMEOUT": "0.3"})
        first(fresh).fails(f"expected {NAME} on http://127.0.0.1:", "timed out", "check the network")
    fresh.variables["PIP_INDEX_URL"] = server.url
    recovers(fresh)


def test_a_closed_port(fresh: Sample) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    fresh.variables["PIP_INDEX_URL"] = f"http://user:geheim@127.0.0.1:{port}/simple"
    said = first(fresh).fails(f"expected {NAME} on http://127.0.0.1:{port}/simple", "onnect", "check the network")
    assert "geheim" not in said
    fresh.variables["PIP_INDEX_URL"] = fresh.index.as_uri()
    recovers(fresh)


def test_no_network_at_all(fresh: Sample) -> None:
    fresh.variables["PIP_INDEX_URL"] = "https://index.example/simple"
    fresh.overlay("apply", "demo==1.0", prefix=without_network()).fails(
        f"expected {NAME} on https://index.example/simple", "check the network"
    )
    fresh.variables["PIP_INDEX_URL"] = fresh.index.as_uri()
    recovers(fresh)


def test_no_index_at_all(fresh: Sample) -> None:
    fresh.variables["PIP_NO_INDEX"] = "1"
    first(fresh).fails(f"expected {NAME} on no index at all")
    del fresh.variables["PIP_NO_INDEX"]
    recovers(fresh)


def test_redirects_are_followed(fresh: Sample, server: Server) -> None:
    server.answers["/demo/"] = lambda handler: handler.redirect("/elsewhere/demo/")
    server.answers["/elsewhere/demo/"] = lambda handler: handler.file("/demo/")
    server.answers[f"/elsewhere/demo/{NAME}"] = lambda handler: handler.redirect(
        f"{server.url}/demo/{NAME}?from=elsewhere"
    )
    recovers(fresh)
    assert server.requests[-1] == f"/demo/{NAME}?from=elsewhere"


def test_a_ring_of_redirects(fresh: Sample, server: Server) -> None:
    server.answers["/demo/"] = lambda handler: handler.redirect("/demo/")
    first(fresh).fails(f"expected {NAME} on {server.url}", "redirect")
    server.answers.clear()
    recovers(fresh)


@pytest.mark.parametrize("variable", ["PIP_PROXY", "http_proxy", "all_proxy"])
@pytest.mark.parametrize(
    "index", ["http://127.0.0.2:9/simple", "http://index.example/simple", "http://index.example:9/simple"]
)
def test_the_proxy_is_used(fresh: Sample, server: Server, variable: str, index: str) -> None:
    fresh.variables.update({"PIP_INDEX_URL": index, "PIP_TRUSTED_HOST": "index.example", variable: server.url})
    server.answers["/simple/demo/"] = lambda handler: handler.file("/demo/")
    server.answers[f"/simple/demo/{NAME}"] = lambda handler: handler.file(f"/demo/{NAME}")
    with source_environment(fresh):
        source.fetch("demo", lock.read(fresh.lock).find("demo==1.0")[2].wheel)
    assert server.requests == [f"{index}/demo/", f"{index}/demo/{NAME}"]


def test_credentials_in_the_address_are_used_and_never_shown(fresh: Sample, server: Server) -> None:
    server.credentials = "user:geheim"
    for credentials in ("", "user:falsch@"):
        fresh.variables["PIP_INDEX_URL"] = f"http://{credentials}{server.place}"
        assert "falsch" not in first(fresh).fails(f"expected {NAME} on {server.url}", "401")
    fresh.variables["PIP_INDEX_URL"] = f"http://user:geheim@{server.place}"
    content = fresh.wheel().read_bytes()
    fresh.wheel().write_bytes(flipped(content))
    done = first(fresh)
    done.fails(f"overlay: {server.url}/demo/{NAME}: expected {len(content)} bytes")
    assert "geheim" not in done.stderr
    server.answers[f"/demo/{NAME}"] = lambda handler: handler.answer(b"no", status=404)
    done = first(fresh)
    done.fails(f"overlay: {server.url}/demo/{NAME}: expected", "404")
    assert "geheim" not in done.stderr
    fresh.list_page("demo")
    done = first(fresh)
    done.fails("the index offers another file")
    assert "geheim" not in done.stderr
    fresh.wheel().unlink()
    fresh.list_page("demo")
    done = first(fresh)
    done.fails(f"expected {NAME} on {server.url}")
    assert "geheim" not in done.stderr
    server.answers.clear()
    fresh.wheel().write_bytes(content)
    fresh.list_page("demo")
    recovers(fresh)


def test_credentials_in_netrc_are_used(fresh: Sample, server: Server) -> None:
    server.credentials = "user:geheim"
    netrc = fresh.folder / "home" / ".netrc"
    netrc.parent.mkdir(exist_ok=True)
    netrc.write_text("machine 127.0.0.1 login user password geheim\n")
    netrc.chmod(0o600)
    recovers(fresh)


def test_find_links(fresh: Sample, server: Server) -> None:
    fresh.variables["PIP_NO_INDEX"] = "1"
    places: list[str] = [str(fresh.wheel().parent), fresh.wheel().parent.as_uri(), f"{server.url}/demo/"]
    for place in places:
        fresh.variables["PIP_FIND_LINKS"] = place
        first(fresh).succeeds()
        assert kept(fresh) == [NAME], place
        shutil.rmtree(fresh.cache)
    fresh.variables["PIP_FIND_LINKS"] = str(fresh.folder / "missing")
    first(fresh).fails(f"expected {NAME} on {fresh.folder / 'missing'}")


def test_the_configuration_file_of_pip_is_read(fresh: Sample) -> None:
    other = fresh.folder / "another index"
    fresh.index.rename(other)
    configuration = fresh.folder / "pip.conf"
    configuration.write_text(f"[global]\nindex-url = {fresh.index.as_uri()}\n[install]\nindex-url = {other.as_uri()}\n")
    fresh.variables.update({"PIP_CONFIG_FILE": str(configuration), "PIP_INDEX_URL": None})
    first(fresh).succeeds()


def test_a_configuration_that_pip_cannot_read(fresh: Sample) -> None:
    configuration = fresh.folder / "pip.conf"
    configuration.write_text("no section\n")
    fresh.variables["PIP_CONFIG_FILE"] = str(configuration)
    first(fresh).fails(
        "pip config list` to print your pip settings, found: ", str(configuration), "mend pip or your pip configuration"
    )
    fresh.variables["PIP_CONFIG_FILE"] = "/dev/null"
    recovers(fresh)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PIP_CERT", "/missing/certificates", "expected certificates at /missing/certificates"),
        ("PIP_CLIENT_CERT", "/missing/certificate", "expected certificates at /missing/certificate"),
        ("PIP_TIMEOUT", "soon", "soon"),
    ],
)
def test_a_setting_that_is_wrong(fresh: Sample, name: str, value: str, said: str) -> None:
    fresh.variables[name] = value
    first(fresh).fails(said, "pip configuration")
    del fresh.variables[name]
    recovers(fresh)


def test_a_module_beside_the_user_is_not_run(fresh: Sample, tmp_path: Path) -> None:
    """`python -m pip` would take a pip.py in the folder that it is run from."""
    for name in ("pip", "unearth", "ssl"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('run by mistake')\n")
    fresh.overlay("apply", "demo==1.0", cwd=tmp_path, own=True).succeeds()


def test_the_settings_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = source.PipSettings.parse(
        "global.index-url='https://a.example/simple'\n"
        "global.extra-index-url='\\nhttps://b.example/simple\\nhttps://c.example/simple'\n"
        "global.find-links='/one two'\n"
        "global.timeout='60'\n"
        "install.proxy='http://proxy.example:3128'\n"
        "freeze.timeout='1'\n"
        ":env:.index-url='https://e.example/simple'\n"
        ":env:.trusted-host='one.example two.example'\n"
        "no line of pip's\n"
        "global.broken='\n"
    )
    assert found == source.PipSettings(
        index_urls=["https://e.example/simple", "https://b.example/simple", "https://c.example/simple"],
        find_links=["/one", "two"],
        trusted_hosts=["one.example", "two.example"],
        proxy="http://proxy.example:3128",
        timeout=60.0,
    )
    assert source.PipSettings.parse(":env:.no-index='true'\nglobal.index-url='https://a.example'\n").index_urls == []


def test_a_python_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(OverlayError, match="pip config list` to print your pip settings, found: no message"):
        source.PipSettings.read()
