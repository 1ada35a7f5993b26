"""A published index can be installed from at every moment, by pip and by uv, whatever serves it."""

import errno
import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from overlay import cache
from overlay.deliver import index, publish
from overlay.errors import OverlayError
from overlay.queue import lock
from tests.deliver import servers
from tests.deliver.servers import Answer, Index
from tests.deliver.test_output import mounted, needs_root
from tests.sample import (
    PRODUCTS,
    PROJECT,
    Done,
    Sample,
    archive,
    copy,
    digest,
    lay,
    members,
    overlay_wheel_in,
    snapshot,
)

FIRST = "demo-1.0+overlay.1-py3-none-any.whl"
assert FIRST in PRODUCTS


@pytest.fixture(scope="module")
def built(template: Sample, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """The sample with everything built in `out`, which no test changes."""
    sample = copy(template, tmp_path_factory.mktemp("built") / "sample")
    sample.apply().succeeds()
    for release in ("1.0", "2.0"):
        sample.apply(f"demo=={release}", "--out", sample.folder / f"dist-{release}").succeeds()
    sample.variables.update(
        UV_DEFAULT_INDEX=sample.index.as_uri(), UV_NO_CONFIG="1", PYTHON_KEYRING_BACKEND="keyring.backends.null.Keyring"
    )
    return sample


def to(sample: Sample, folder: Path, source: Path | None = None) -> Done:
    return sample.overlay("publish", "--from", source or sample.out, "--to", folder)


def consistent(folder: Path) -> set[str]:
    """Every page leads to what is there, with the hashes that it says; gives the files that they list."""
    root = folder / "simple" / "index.html"
    listed = set()
    for link in index.links(root.read_text("utf-8")) if root.exists() else []:
        assert (root.parent / unquote(link.href) / "index.html").is_file()
    for page in folder.glob("simple/*/index.html"):
        for link in index.links(page.read_text("utf-8")):
            path, fragment = urldefrag(link.href)
            content = (page.parent / unquote(path)).read_bytes()
            assert fragment == f"sha256={digest(content)}"
            metadata = (page.parent / unquote(f"{path}.metadata")).read_bytes()
            assert link.attributes["data-core-metadata"] == f"sha256={digest(metadata)}"
            listed.add(link.name)
    return listed


def test_a_folder_becomes_an_index(built: Sample, tmp_path: Path) -> None:
    done = to(built, tmp_path / "new" / "index").succeeds()
    folder = tmp_path / "new" / "index"
    assert consistent(folder) == {*PRODUCTS, overlay_wheel_in(built.out)}
    found = snapshot(folder)
    assert found is not None
    assert not [name for name in found if publish.DRAFT in name]
    assert "constraints.txt" not in found, "a hash from where the wheel comes from proves nothing"
    page = (folder / "simple" / "demo" / "index.html").read_text("utf-8")
    assert 'href="../../demo-1.0%2Boverlay.1-py3-none-any.whl#sha256=' in page
    assert 'data-requires-python="&gt;=3.9"' in page
    address = f"{folder.as_uri()}/simple/"
    constraints = built.out / "constraints.txt"
    assert done.stdout.splitlines() == [
        f"pip install --extra-index-url {address} -c {constraints} demo",
        f"uv pip install --index {address} -c {constraints} demo",
    ]
    assert [line for line in done.stderr.splitlines() if "published" in line] == [
        f"overlay: published {name}" for name in (*PRODUCTS, overlay_wheel_in(built.out))
    ]
    assert folder.joinpath(FIRST).stat().st_mode & 0o777 == 0o644


def test_again_is_nothing_to_do(built: Sample, tmp_path: Path) -> None:
    to(built, tmp_path / "index").succeeds()
    before = times(tmp_path / "index")
    done = to(built, tmp_path / "index").succeeds()
    assert "has all of them already, the same files: nothing to publish" in done.stderr
    assert times(tmp_path / "index") == before
    assert len(done.stdout.splitlines()) == 2


def times(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_in_any_order_it_is_the_same_index(built: Sample, tmp_path: Path) -> None:
    parts = [built.folder / "dist-1.0", built.folder / "dist-2.0", built.out]
    for name, order in {"one": parts, "two": parts[::-1], "three": [built.out]}.items():
        for part in order:
            to(built, tmp_path / name, part).succeeds()
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two") == snapshot(tmp_path / "three")


def test_what_was_there_stays(built: Sample, tmp_path: Path) -> None:
    """Older revisions, files and projects of others, and what their pages say, in whatever form."""
    folder = tmp_path / "index"
    (folder / "simple" / "demo").mkdir(parents=True)
    (folder / "simple" / "other").mkdir()
    others = {
        "notes.txt": "mine",
        "constraints.txt": "mine",
        "simple/other/index.html": "<a href='../../o.whl'>o.whl</a>",
    }
    for name, text in others.items():
        (folder / name).write_text(text)
    (folder / "simple" / "index.html").write_text(
        "<HTML><body><A HREF='/simple/other/' rel=internal><b>Other</b>&amp;</A><a href='Demo/'>Demo</a></body></HTML>"
    )
    (folder / "simple" / "demo" / "index.html").write_text(
        "<html><head><meta name='pypi:repository-version' content='1.1'>"
        "<meta name='pypi:tracks' content='https://index.example/demo/'></head><body>"
        "<a href='../../demo-1.0%2Boverlay.0-py3-none-any.whl#sha256=00' data-yanked='it&#39;s old'\n"
        "   data-requires-python='&gt;=3.9'>demo-1.0+overlay.0-py3-none-any.whl</a>"
        f"<a href='{FIRST}#sha256={digest((built.out / FIRST).read_bytes())}' data-yanked=''>{FIRST}</a></body></html>"
    )
    to(built, folder).succeeds()
    for name, text in others.items():
        assert (folder / name).read_text() == text
    root = {link.text: link for link in index.links((folder / "simple" / "index.html").read_text("utf-8"))}
    assert set(root) == {"Other&", "demo", "plain", "modeling-overlay"}
    assert root["Other&"].attributes == {"href": "/simple/other/", "rel": "internal"}
    page = (folder / "simple" / "demo" / "index.html").read_text("utf-8")
    assert page.count("<meta") == 2
    assert '<meta name="pypi:tracks" content="https://index.example/demo/">' in page
    links = {link.name: link for link in index.links(page)}
    assert set(links) == {"demo-1.0+overlay.0-py3-none-any.whl", *PRODUCTS[:2]}
    older = links["demo-1.0+overlay.0-py3-none-any.whl"]
    assert older.attributes["data-yanked"] == "it's old"
    assert older.attributes["data-requires-python"] == ">=3.9"
    assert links[FIRST].href.startswith("../../"), "the link to ours is ours"
    assert links[FIRST].attributes["data-yanked"] == "", "and what else the old one said stays"
    again = snapshot(folder)
    to(built, folder).succeeds()
    assert snapshot(folder) == again


def test_projects_that_no_page_lists_are_listed(built: Sample, tmp_path: Path) -> None:
    """A server may make the list by itself as long as there is no page."""
    (tmp_path / "simple" / "other").mkdir(parents=True)
    (tmp_path / "simple" / "other" / "index.html").write_text("")
    to(built, tmp_path, built.folder / "dist-1.0").succeeds()
    listed = index.links((tmp_path / "simple" / "index.html").read_text("utf-8"))
    assert [link.href for link in listed] == ["demo/", "other/"]


def exchanged_wheel(folder: Path, _: Path) -> None:
    (folder / FIRST).write_bytes(b"another")


def exchanged_metadata(folder: Path, _: Path) -> None:
    (folder / f"{FIRST}.metadata").write_bytes(b"another")


Change = Callable[[Path, Path], None]
"""Of a folder, with the file that is to be published there."""


def listed_with(link: str) -> Change:
    def write(folder: Path, _: Path) -> None:
        (folder / "simple" / "demo").mkdir(parents=True)
        (folder / "simple" / "demo" / "index.html").write_text(link)

    return write


def listed_elsewhere(folder: Path, own: Path) -> None:
    """Beside our own file, of which the page knows nothing."""
    shutil.copy(own, folder)
    listed_with(f"<a href='{FIRST}'>x</a>")(folder, own)
    (folder / "simple" / "demo" / FIRST).write_bytes(b"another")


def listed_with_other_metadata(folder: Path, own: Path) -> None:
    digested = digest(own.read_bytes())
    listed_with(f"<a href='../../{FIRST}#sha256={digested}' data-dist-info-metadata='sha256={'0' * 64}'>x</a>")(
        folder, own
    )


MD5 = "md5=" + "0" * 32
REFUSED: dict[str, tuple[Change, str]] = {
    "the wheel": (exchanged_wheel, f"{FIRST}: expected {FIRST} with sha256"),
    "its metadata": (exchanged_metadata, f"{FIRST}.metadata: expected {FIRST} with sha256"),
    "the page": (listed_with(f"<a href='../../{FIRST}#sha256={'0' * 64}'>x</a>"), "demo/index.html: expected"),
    "the page, by another hash": (listed_with(f"<a href='../../{FIRST}#{MD5}'>x</a>"), f"found {MD5}"),
    "the page, by no hash": (listed_with(f"<a href='/files/{FIRST}'>x</a>"), "found no hash"),
    "the page, by no hash, and that file": (listed_elsewhere, "found no hash"),
    "the page, by other metadata": (listed_with_other_metadata, f"metadata sha256={'0' * 64}"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_changed_file_under_an_old_name_is_refused(built: Sample, tmp_path: Path, what: str) -> None:
    change, said = REFUSED[what]
    change(tmp_path, built.out / FIRST)
    before = snapshot(tmp_path)
    to(built, tmp_path).fails(said, "a published file never changes")
    assert snapshot(tmp_path) == before


def test_pages_that_cannot_be_added_to_are_refused(built: Sample, tmp_path: Path) -> None:
    listed_with("<base href='/elsewhere/'>")(tmp_path, tmp_path)
    to(built, tmp_path).fails("demo/index.html: expected", "found <base>")
    (tmp_path / "simple" / "demo" / "index.html").rename(tmp_path / "simple" / "demo" / "demo-0.9.tar.gz")
    to(built, tmp_path).fails("demo/index.html: expected a page, found none, and a folder with files")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["demo", "demo-0.9.tar.gz", "simple"]


NOT_PAGES: dict[str, tuple[dict[str, bytes], str]] = {
    "of another encoding": (
        {"simple/demo/index.html": "<a href='x'>Größe</a>".encode("latin-1")},
        "demo/index.html: expected a page in UTF-8, found byte 0xf6 at 14",
    ),
    "with an address that is none": (
        {"simple/index.html": b"<a href='http://[x/y'>y</a>"},
        "simple/index.html: expected links to addresses, found http://[x/y",
    ),
    "a folder": ({"simple/index.html/x": b""}, "simple/index.html: Is a directory"),
    "below a file": ({"simple": b""}, "simple: expected a folder, found a file"),
    "below a file of the project's name": ({"simple/plain": b""}, "simple/plain: expected a folder, found a file"),
}


@pytest.mark.parametrize("what", NOT_PAGES)
def test_what_is_no_page_is_an_error_before_anything_is_written(built: Sample, tmp_path: Path, what: str) -> None:
    files, said = NOT_PAGES[what]
    lay(tmp_path, files)
    before = snapshot(tmp_path)
    assert "fault" not in to(built, tmp_path).fails(said)
    assert snapshot(tmp_path) == before


def test_an_empty_page_is_a_page(built: Sample, tmp_path: Path) -> None:
    """And an odd name of a project stands in an address as it has to."""
    lay(tmp_path, {"simple/demo/index.html": b"", "simple/a#b/index.html": b""})
    to(built, tmp_path).succeeds()
    assert consistent(tmp_path) == {*PRODUCTS, overlay_wheel_in(built.out)}
    links = index.links((tmp_path / "simple" / "index.html").read_text("utf-8"))
    assert links[0].href == "a%23b/"


def test_only_what_apply_built_is_published(built: Sample, tmp_path: Path) -> None:
    source = tmp_path / "dist"

    def fails(*said: str) -> None:
        to(built, tmp_path / "index", source).fails(*said)
        assert not (tmp_path / "index").exists()

    source.mkdir()
    fails(f"expected wheels in {source}, found none: run scripts/apply.sh first")
    shutil.copytree(built.out, source, dirs_exist_ok=True)
    stock = shutil.copy(built.wheel(), source)
    fails(f"{stock}: expected a wheel that upstream.lock names, or the overlay wheel, found neither")
    Path(stock).unlink()
    (source / FIRST).write_bytes(b"another")
    fails(f"{source / FIRST}: expected sha256 ", digest(b"another"))
    shutil.copy(built.out / FIRST, source)
    overlay_wheel = source / overlay_wheel_in(source)
    content = overlay_wheel.read_bytes()
    overlay_wheel.write_bytes(content + b"x")
    fails(f"{overlay_wheel}: expected sha256 {digest(content)}")
    (source / "constraints.txt").write_bytes(b"\xff")
    fails(f"{overlay_wheel}: expected modeling-overlay==1.0+g", "found none")
    (source / "constraints.txt").unlink()
    fails(f"{overlay_wheel}: expected modeling-overlay==1.0+g", "found none")
    odd = overlay_wheel.rename(source / "modeling_overlay-one-py3-none-any.whl")
    fails(f"{odd}: expected a wheel that upstream.lock names, or the overlay wheel, found neither")


def test_where_nothing_can_be_written(built: Sample, tmp_path: Path) -> None:
    to(built, built.out).fails(f"{built.out} is what is published: expected another folder")
    (tmp_path / "file").touch()
    to(built, tmp_path / "file").fails("expected a folder, found a file", "--to")
    to(built, tmp_path / "file" / "index").fails(f"{tmp_path / 'file'}: expected a folder, found a file", "--to")
    (tmp_path / "index").mkdir()
    for place, folder in (("nowhere", "nowhere"), ("index/simple", "index")):
        (tmp_path / place).symlink_to("nothing")
        to(built, tmp_path / folder).fails(f"{tmp_path / place}: expected a folder, found a link to nothing", "--to")
    assert [path.name for path in (tmp_path / "index").iterdir()] == ["simple"]


@needs_root
def test_a_mount_point_that_is_full_or_read_only(built: Sample, tmp_path: Path) -> None:
    """What is listed is there each time, and more room is all it needs."""
    for size in (40, 100, 200):
        with mounted(tmp_path / str(size), "-t", "tmpfs", "-o", f"size={size}k", "tmpfs") as folder:
            to(built, folder).fails(f"{folder}/", "no space left on the disk", "are free there: free some and run")
            consistent(folder)
            assert not list(folder.rglob(f"*{publish.DRAFT}"))
            subprocess.run(["mount", "-o", "remount,size=2m", str(folder)], check=True)
            to(built, folder).succeeds()
            assert consistent(folder) == {*PRODUCTS, overlay_wheel_in(built.out)}
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
            to(built, folder / "new").fails(f"{folder}: expected a folder that can be written", "--to")


def test_usage(built: Sample, tmp_path: Path) -> None:
    for words in (
        ["publish"],
        ["publish", "--to", "x", "--repository-url", "http://x"],
        ["publish", "--to", "x", "--index-url", "http://x"],
    ):
        assert built.overlay(*words).code == 2


def test_a_folder_needs_no_twine(built: Sample, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('twine', 'requests'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    without = Sample(built.folder, built.variables | {"PYTHONPATH": f"{PROJECT}:{tmp_path}"})
    where = ["publish", "--from", str(built.out)]
    without.overlay(*where, "--to", tmp_path / "index", own=True).succeeds()
    without.overlay(*where, "--repository-url", "http://127.0.0.1:1/", own=True).fails(
        "expected the library", "this command needs the extra `publish`", "pip install --editable '.[publish]'"
    )


def killed_at(moment: int, wheels: publish.Wheels, folder: Path) -> bool:
    """Publishes in a fork that is killed when it is about to change its `moment`-th name; whether it was."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            if event in ("os.rename", "os.remove", "os.mkdir", "shutil.copyfile") or (
                event == "open" and arguments[1] in ("w", "wb")
            ):
                seen += 1
                if seen == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            publish.to_folder(wheels, folder)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_kill_at_any_moment_leaves_an_index(built: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was listed stays listed, and nothing is listed that is not there: what a web server could show."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and a killed process loses nothing without it
    pins = lock.read(built.lock)
    older, newer = publish.wheels(pins, built.folder / "dist-1.0"), publish.wheels(pins, built.out)
    publish.to_folder(older, tmp_path / "before")
    publish.to_folder(newer, tmp_path / "after")
    shutil.copytree(tmp_path / "before", tmp_path / "index")
    moment, seen = 1, set()
    while killed_at(moment, newer, tmp_path / "index"):
        listed = consistent(tmp_path / "index")
        assert listed >= {FIRST}
        seen.add(len(listed))
        shutil.rmtree(tmp_path / "index")
        shutil.copytree(tmp_path / "before", tmp_path / "index")
        moment += 1
    assert moment > 15
    assert seen == {1, 2, 3, 4}
    assert snapshot(tmp_path / "index") == snapshot(tmp_path / "after")
    shutil.rmtree(tmp_path / "index")
    drafts = (
        [*(tmp_path / "index").glob(f".*{publish.DRAFT}")]
        for at in range(1, 9)
        if killed_at(at, newer, tmp_path / "index")
    )
    (left,) = next(filter(None, drafts))
    left.rename(left.with_name(f".of-another-release.whl{publish.DRAFT}"))
    publish.to_folder(newer, tmp_path / "index")
    assert snapshot(tmp_path / "index") == snapshot(tmp_path / "after"), "the draft of the killed run is gone"


def test_two_at_once_lose_nothing(built: Sample, tmp_path: Path) -> None:
    """The second one waits, and adds to what the first one wrote."""
    folder = tmp_path / "index"
    folder.mkdir()
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    second = built.start("publish", "--from", built.folder / "dist-2.0", "--to", folder)
    assert second.stderr is not None
    assert "another process publishes to" in second.stderr.readline()
    to(built, tmp_path / "first", built.folder / "dist-1.0").succeeds()
    shutil.copytree(tmp_path / "first", folder, dirs_exist_ok=True)
    os.close(held)
    second.communicate(timeout=600)
    assert second.returncode == 0
    assert consistent(folder) == set(PRODUCTS[:2])


def test_on_a_file_system_without_locks_the_cache_has_one(
    built: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    monkeypatch.setenv("XDG_CACHE_HOME", str(built.cache))
    with cache.locked("publish", folder):
        second = built.start("publish", "--from", built.folder / "dist-1.0", "--to", folder)
        assert second.stderr is not None
        assert "waiting" in second.stderr.readline()
    second.communicate(timeout=600)
    assert second.returncode == 0

    def flock(_: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(publish, "fcntl", types.SimpleNamespace(flock=flock, LOCK_EX=0, LOCK_NB=0))
    assert "let no other machine publish there" in to(built, folder).succeeds().stderr


def test_a_wheel_that_changes_while_it_is_read(built: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(built.folder / "dist-1.0", tmp_path / "dist")
    found = publish.wheels(lock.read(built.lock), tmp_path / "dist")
    (tmp_path / "dist" / FIRST).write_bytes(b"another")
    with pytest.raises(OverlayError, match="it changed while it was read, run this again"):
        publish.to_folder(found, tmp_path / "index")
    assert snapshot(tmp_path / "index") == {}


@pytest.fixture(scope="module")
def published(built: Sample, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    to(built, folder).succeeds()
    return folder


@pytest.fixture(scope="module", params=["http.server", "nginx"])
def address(request: pytest.FixtureRequest, published: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a web server has the published folder."""
    serve = servers.static if request.param == "http.server" else servers.nginx
    with serve(published, tmp_path_factory.mktemp("web")) as found:
        yield found


@pytest.fixture(scope="module", params=["pypiserver", "devpi"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """A server that takes uploads; nothing is on it at first."""
    start = servers.pypiserver if request.param == "pypiserver" else servers.devpi
    with start(tmp_path_factory.mktemp(request.param)) as found:
        yield found


def install(sample: Sample, command: str, folder: Path) -> str:
    """Runs a line that `publish` printed, or one of its form; gives the version of demo that is in `folder` then."""
    words = shlex.split(command)
    verb = words.index("install") + 1
    program = [sys.executable, "-P", "-m", *words[:verb], "--target", str(folder), "--quiet"]
    if words[0] == "uv":
        program += ["--python", sys.executable]
    done = subprocess.run(
        [*program, *words[verb:]], env=sample.environment(), cwd=sample.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("demo-*.dist-info")
    assert b"value - 30" in (folder / "demo" / "core.py").read_bytes(), "the patched file"
    return found.name.removeprefix("demo-").removesuffix(".dist-info")


INSTALLERS = ("pip", "uv")


def by(installer: str, commands: list[str]) -> str:
    (found,) = (command for command in commands if command.startswith(f"{installer} "))
    return found


@pytest.mark.parametrize("installer", INSTALLERS)
def test_from_a_web_server(built: Sample, published: Path, address: str, installer: str, tmp_path: Path) -> None:
    """By the line that is printed, with the server's address; twice: by files, and by the address of a web server."""
    line = by(installer, to(built, published).succeeds().stdout.splitlines())
    assert install(built, line, tmp_path / "by-file") == "1.0+overlay.1"
    line = line.replace(published.as_uri(), address)
    assert install(built, line, tmp_path / "by-http") == "1.0+overlay.1"


@pytest.mark.parametrize("installer", INSTALLERS)
def test_from_a_bucket(built: Sample, address: str, installer: str, tmp_path: Path) -> None:
    """One that has files, and no `index.html` for a folder: by the name of the page."""
    program = "pip" if installer == "pip" else "uv pip"
    page = f"{address}/simple/demo/index.html"
    line = f"{program} install --find-links {page} -c {built.out / 'constraints.txt'} demo"
    assert install(built, line, tmp_path / "target") == "1.0+overlay.1"


def upload(sample: Sample, place: Index, source: Path, password: str = servers.PASSWORD, *more: str) -> Done:
    known: dict[str, str | None] = {"TWINE_USERNAME": servers.USER, "TWINE_PASSWORD": password}
    return Sample(sample.folder, sample.variables | known).overlay(
        "publish", "--from", source, "--repository-url", place.uploads, *more
    )


def test_to_a_server(built: Sample, server: Index, tmp_path: Path) -> None:
    """A wrong password; then one release, then the rest, then nothing."""
    refused = upload(built, server, built.folder / "dist-1.0", "a wrong one")
    refused.fails(server.uploads.partition("://")[2].partition("/")[0])
    assert "a wrong one" not in refused.stdout + refused.stderr
    done = upload(built, server, built.folder / "dist-1.0").succeeds()
    assert [line for line in done.stderr.splitlines() if "published" in line] == [f"overlay: published {FIRST}"]
    done = upload(built, server, built.out).succeeds()
    assert done.stderr.count("overlay: published ") == 3
    assert servers.PASSWORD not in done.stdout + done.stderr
    again = upload(built, server, built.out).succeeds()
    assert "has all of them already, the same files: nothing to publish" in again.stderr
    for installer in INSTALLERS:
        line = by(installer, again.stdout.splitlines())
        assert server.pages in line
        assert install(built, line, tmp_path / installer) == "1.0+overlay.1"


def test_a_server_that_takes_another_file_is_not_given_one(built: Sample, tmp_path: Path) -> None:
    """A volatile index of devpi, where somebody has uploaded a file under our name."""
    other = tmp_path / FIRST
    other.write_bytes(archive(members("demo", "1.0+overlay.1")))
    with servers.devpi(tmp_path) as place:
        known = {"TWINE_USERNAME": servers.USER, "TWINE_PASSWORD": servers.PASSWORD}
        twine = [sys.executable, "-P", "-m", "twine", "upload", "--repository-url", place.uploads, str(other)]
        subprocess.run(twine, env=built.environment() | known, check=True, capture_output=True)
        upload(built, place, built.out).fails(f"expected {FIRST}", digest(other.read_bytes()), "never changes")


def test_a_server_with_another_file_is_refused(built: Sample, tmp_path: Path) -> None:
    """Also where the server gives no hash, and would take the other file."""
    for number, more in enumerate([(), ("--hash-algo", "off"), ("--hash-algo", "md5")]):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        with servers.pypiserver(scratch, "--overwrite", *more) as place:
            (scratch / "packages" / FIRST).write_bytes(b"another")
            found = "md5=" if "md5" in more else hashlib.sha256(b"another").hexdigest()
            upload(built, place, built.out).fails(f"expected {FIRST}", found, "a published file never changes")
            assert [path.name for path in (scratch / "packages").iterdir()] == [FIRST]
            shutil.copy(built.out / FIRST, scratch / "packages")
            done = upload(built, place, built.folder / "dist-1.0", "a wrong one").succeeds()
            assert "nothing to publish" in done.stderr


def test_credentials_of_the_pypirc(built: Sample, tmp_path: Path) -> None:
    """Those of the section with the address."""
    with servers.pypiserver(tmp_path) as place:
        sections = f"[distutils]\nindex-servers = here\n[here]\nrepository = {place.uploads.rstrip('/')}\n"
        (tmp_path / ".pypirc").write_text(f"{sections}username = {servers.USER}\npassword = {servers.PASSWORD}\n")
        sample = Sample(built.folder, built.variables | {"HOME": str(tmp_path)})
        sample.overlay("publish", "--from", built.out, "--repository-url", place.uploads).succeeds()


def test_a_server_that_cannot_be_asked(built: Sample, address: str) -> None:
    def fails(place: str, *said: str, more: tuple[str, ...] = ()) -> str:
        return upload(built, Index(place, ""), built.out, servers.PASSWORD, *more).fails(*said)

    fails("http://127.0.0.1:9/", "http://127.0.0.1:9/: ", "check the network and the address")
    fails("ftp://x/", "expected an address that begins with http:// or https://")
    assert "secret" not in fails("http://me:secret@x/", "expected an address without a password")
    fails(f"{address}/demo/", f"{address}/demo/simple/: 404", f"{address}/demo/+simple/: 404", "--index-url")
    fails(f"{address}/demo/", "nowhere/: 404", "--index-url", more=("--index-url", f"{address}/nowhere"))
    done = upload(built, Index(f"{address}/x/", ""), built.out, "x", "--index-url", f"{address}/simple").succeeds()
    assert "nothing to publish" in done.stderr
    done = built.overlay("publish", "--from", built.out, "--repository-url", f"{address}/")
    done.fails("redential", "TWINE_USERNAME")


HTML = {"Content-Type": "text/html; charset=utf-8"}
PAGE: Answer = (200, HTML, b"<html><body></body></html>")


def debugged(done: Done, *said: str) -> None:
    """It failed with --debug, and said so in its last line; the password stands nowhere."""
    assert done.code == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("overlay: ")
    assert all(part in last for part in said), last
    assert "fault of" not in last
    assert servers.PASSWORD not in done.stdout + done.stderr


def asking(sample: Sample, answer: Callable[[str, str], Answer], *said: str) -> list[tuple[str, str, str, bool]]:
    """Publishes to a server that answers so, which is to fail; gives what the server was asked."""
    with servers.scripted(answer) as (address, asked):
        debugged(upload(sample, Index(address, ""), sample.out, servers.PASSWORD, "--debug"), *said)
    return asked


NO_INDEX: dict[str, tuple[Callable[[str], Answer], str]] = {
    "a page to log in": (
        lambda path: PAGE if path == "/login" else (302, {"Location": "/login"}, b""),
        "/simple/demo/: expected the page of that project, found http://127.0.0.1",
    ),
    "json": (lambda _: (200, {"Content-Type": "application/json"}, b"{}"), "200 OK (application/json)"),
    "a file for a project": (
        lambda path: PAGE if path == "/simple/" else (200, {"Content-Type": "text/plain"}, b""),
        "/simple/demo/: expected the page of that project",
    ),
    "an address that is none": (lambda _: (302, {"Location": "http://[x/"}, b""), "check the network and the address"),
    "a link that is none": (lambda _: (200, HTML, b"<a href='http://[x/'>x</a>"), "/simple/demo/: expected links to"),
    "a refusal": (lambda path: PAGE if path == "/simple/" else (403, HTML, b"\x1b[2J"), "403 Forbidden (\\x1b[2J)"),
}


@pytest.mark.parametrize("what", NO_INDEX)
def test_nothing_is_uploaded_to_what_shows_no_index(built: Sample, what: str) -> None:
    """What it has cannot be seen, so another file could be exchanged."""
    answer, said = NO_INDEX[what]
    asked = asking(built, lambda _, path: answer(path), said)
    assert {method for method, *_ in asked} == {"GET"}


@pytest.mark.parametrize("code", [302, 401, 403, 500])
def test_a_server_that_takes_nothing(built: Sample, code: int) -> None:
    refusal = (code, {**HTML, "Location": "http://localhost:1/"}, b"<p>No</p>")
    asked = asking(built, lambda method, _: PAGE if method == "GET" else refusal, "redirect" if code == 302 else "(No)")
    assert {host for _, _, host, _ in asked} == {"127.0.0.1"}


def test_what_is_uploaded_is_looked_for(built: Sample) -> None:
    """A proxy that says yes to everything takes nothing."""
    with servers.scripted(lambda *_: PAGE) as (address, _):
        done = upload(built, Index(address, ""), built.folder / "dist-1.0").succeeds()
    assert f"{address}simple/ does not list {FIRST} so far" in done.stderr


def test_credentials_go_to_no_other_host(built: Sample) -> None:
    """A page without hashes may link anywhere."""

    def answer(_: str, path: str) -> Answer:
        if path.endswith("/demo/"):
            return 200, HTML, f'<a href="//localhost:{port}/files/{FIRST}">x</a>'.encode()
        return (200, {}, b"another") if path.startswith("/files/") else PAGE

    with servers.scripted(answer) as (address, asked):
        port = address.rpartition(":")[2].strip("/")
        upload(built, Index(address, ""), built.out).fails(f"expected {FIRST}", digest(b"another"))
    assert [(host, known) for _, _, host, known in asked] == [("127.0.0.1", True)] * 2 + [("localhost", False)]


def test_a_silent_server_is_not_waited_for(built: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlay.deliver.upload.TIMEOUT", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        place = Index(f"http://127.0.0.1:{silent.getsockname()[1]}/", "")
        upload(built, place, built.out).fails("timed out", "check the network and the address")


NO_ADDRESS = "expected an address that begins with http:// or https:// and names a host, found another with"
TOLD = "expected an address without a password, found one with"
ADDRESSES = {
    f"http://me:{servers.PASSWORD}@x/": TOLD,
    f"http://me:{servers.PASSWORD}@[::1/": TOLD,
    "http://[::1/": NO_ADDRESS,
    "http://x:port/": NO_ADDRESS,
    f"me:{servers.PASSWORD}@x/": NO_ADDRESS,
}


@pytest.mark.parametrize("option", ["--repository-url", "--index-url"])
@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses(built: Sample, address: str, option: str) -> None:
    first = ["--repository-url", "http://127.0.0.1:9/"] if option == "--index-url" else []
    done = built.overlay("publish", "--from", built.out, *first, option, address, "--debug")
    debugged(done, f"{ADDRESSES[address]} {option}")


def test_the_public_index_is_refused_before_it_is_asked(built: Sample) -> None:
    from twine import utils

    dotted = utils.DEFAULT_REPOSITORY.replace(".org/", ".org./")
    for known in (utils.DEFAULT_REPOSITORY, utils.TEST_REPOSITORY, dotted):
        upload(built, Index(known, ""), built.out).fails("takes no version with a local label (PEP 440)")
