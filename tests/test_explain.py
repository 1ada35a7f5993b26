"""`overlay explain`: it says what is changed and why from the SBOM alone, wherever that is."""

import copy
import functools
import json
import operator
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overlay import explain
from overlay.deliver import sbom
from overlay.errors import OverlayError
from tests import sample as make
from tests import variants
from tests.sample import PRODUCTS, Done, Sample, overlay_wheel_in

FAULT = "Fault: lost: gradients, without an error\n"
PROGRAM = "import sys; from overlay import cli; cli.main(sys.argv[1:])"


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    folder = tmp_path_factory.getbasetemp() / "template"
    return Sample(folder) if folder.exists() else make.make(folder)


@pytest.fixture(scope="module")
def built(template: Sample, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """A sample with its products, which no test here changes: a patch mends a fault, another is a backport."""
    sample = make.copy(template, tmp_path_factory.mktemp("explained") / "sample")
    sample.rewrite(1, "Bug: https", f"{FAULT}Bug: https")
    sample.rewrite(2, "Origin: this project", "Origin: backport, https://git.example/demo/2")
    sample.rewrite(2, "Applied-Upstream: no", "Applied-Upstream: 3.0")
    sample.overlay("lock", "update").succeeds()
    sample.apply().succeeds()
    return sample


@pytest.fixture(scope="module")
def wheel(built: Sample) -> Path:
    """The patched wheel of demo 1.0."""
    return next(built.out.glob("demo-1.0+overlay.*.whl"))


def explained(
    *arguments: object, at: Path, program: Path | None = None, path: tuple[Path, ...] = (), **variables: str
) -> Done:
    """Runs `overlay explain` with what is in `program` in the place of this checkout, and no library."""
    command = [sys.executable, "-S", "-P", "-c", PROGRAM, "explain", *map(str, arguments)]
    found = os.pathsep.join(map(str, (*path, program or variants.ROOT)))
    environment = {**os.environ, "PYTHONPATH": found, **variables}
    done = subprocess.run(command, cwd=at, env=environment, capture_output=True, encoding="utf-8", check=False)
    return Done(command, done.returncode, done.stdout, done.stderr)


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_wheel(built: Sample, wheel: Path, tmp_path: Path) -> None:
    """With nothing beside it: no lock, no patches, no libraries."""
    handed = tmp_path / "handed"
    shutil.copyfile(wheel, handed)
    done = explained(handed, at=tmp_path).succeeds()
    said = words(done.stdout)
    version = wheel.name.split("-")[1]
    stock = built.wheel()
    for part in (
        f"read in {handed} demo {version} made of {stock.name} sha256 {make.digest(stock.read_bytes())} "
        "from https://git.example/demo",
        "2 patches of demo-1.0-1.1 change demo/core.py, demo/layers/block.py. The version label, and the hashes of all "
        f"that, change demo-{version}.dist-info/METADATA, demo-{version}.dist-info/RECORD, demo/__init__.py.",
        "1. Subtract in the core The sample is wrong there, and this mends it. mends lost: gradients, without an error "
        "origin this project's own; upstream has nothing like it so far issue https://bugs.example/1 patch 0001-",
        "changes src/demo/core.py +1 -1 2. Multiply in the block and the core",
        "origin backport of https://git.example/demo/2; upstream has it since 3.0 issue",
        "changes src/demo/core.py +1 -1 changes src/demo/layers/block.py +1 -1",
    ):
        assert words(part) in said
    assert "Test it" not in said, "a patch that is only for the pull request is not in the wheel"
    assert max(map(len, done.stdout.splitlines())) <= 80 or str(handed) in done.stdout
    assert "diff --git" not in done.stdout


def test_diffs(wheel: Path, tmp_path: Path) -> None:
    done = explained(wheel, "--diff", at=tmp_path).succeeds()
    assert "\n-    return value + 30\n+    return value - 30\n" in done.stdout


def test_for_a_program(wheel: Path, tmp_path: Path) -> None:
    found: dict[str, Any] = json.loads(explained(wheel, "--json", at=tmp_path).succeeds().stdout)
    assert (found["format"], found["source"]) == (1, str(wheel))
    (release,) = found["releases"]
    assert (release["project"], release["upstream"]["version"], release["laid_over"]) == ("demo", "1.0", False)
    assert release["patches"][0]["faults"] == [{"code": "lost", "text": "gradients, without an error"}]
    assert release["patches"][1]["files"] == [
        {"path": "src/demo/core.py", "added": 1, "removed": 1},
        {"path": "src/demo/layers/block.py", "added": 1, "removed": 1},
    ]
    assert {file["path"]: file["change"] for file in release["files"]}["demo/__init__.py"] == "the version label"
    assert explained(wheel, "--json", "--diff", at=tmp_path).code == 2


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is unpacked, as it is installed."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    return folder


def test_what_is_installed(wheel: Path, site: Path, tmp_path: Path) -> None:
    version = wheel.name.split("-")[1]
    expected = explained(wheel, at=tmp_path).succeeds().stdout.partition("\n\n")[2]
    info = site / f"demo-{version}.dist-info"
    for target in (site, info, site / "demo", info / sbom.MEMBER, info / "sboms"):
        assert explained(target, at=tmp_path).succeeds().stdout.partition("\n\n")[2] == expected
    for named in ("demo", "demo==1.0", f"demo=={version}", f"Demo==={version}"):
        done = explained(named, at=tmp_path, path=(site,)).succeeds()
        assert done.stdout.partition("\n\n")[2] == expected
        assert words(done.stdout).startswith(f"read in {site}")
    explained("demo==2.0", at=tmp_path, path=(site,)).fails(
        "expected demo==2.0 from this project: ", f"found demo {version} installed: name the"
    )


def test_a_release_in_dist(built: Sample, wheel: Path, tmp_path: Path) -> None:
    shutil.copytree(built.out, tmp_path / "dist")
    for target in ("demo==1.0", f"demo=={wheel.name.split('-')[1]}", "plain"):
        assert words(explained(target, at=tmp_path).succeeds().stdout).startswith("read in dist/")
    explained("demo", at=tmp_path).fails("expected one wheel of demo, found demo-1.0+overlay", "in dist: name one")
    with zipfile.ZipFile(built.wheel("demo-1.0")) as opened:
        opened.extractall(tmp_path / "stock")
    explained("demo", at=tmp_path, path=(tmp_path / "stock",)).fails(
        "in dist (demo 1.0 is installed, without an SBOM of this project): name one of them"
    )
    explained("demo==1.0+overlay.99", at=tmp_path).fails("expected demo==1.0+overlay.99 from this project")


def test_the_overlay_wheel_alone(built: Sample, tmp_path: Path) -> None:
    """It has releases that are laid over; installed beside a stock one it says what becomes of that."""
    name = overlay_wheel_in(built.out)
    done = explained(built.out / name, at=tmp_path).succeeds()
    said = words(done.stdout)
    assert "demo 1.0, laid over an installed one by the overlay made of demo-1.0-py3-none-any.whl" in said
    assert said.count("Multiply in the block and the core") == 3, "what releases have alike is said once"
    site, bare = tmp_path / "site", tmp_path / "bare"
    for file, folder in ((name, site), (name, bare), (built.wheel("demo-1.0"), site)):
        with zipfile.ZipFile(built.out / file) as opened:
            opened.extractall(folder)
    for target, place in (("demo", site), ("demo==1.0", site), ("demo==1.0", bare)):
        done = explained(target, at=tmp_path, path=(variants.ROOT, place)).succeeds()
        assert words(done.stdout).startswith("read in the overlay, modeling-overlay 1.0+g")
        assert "demo 1.0, laid over an installed one" in words(done.stdout)
        assert "demo 1.1, laid over" not in words(done.stdout)


def test_what_has_no_sbom(built: Sample, tmp_path: Path) -> None:
    stock = built.wheel()
    said = explained(stock, at=tmp_path).fails(f"{stock}: expected an SBOM of this project in it, found none")
    assert said.endswith("it is upstream's own wheel, or of a revision that had none")
    with zipfile.ZipFile(stock) as opened:
        opened.extractall(tmp_path / "site")
    explained("demo", at=tmp_path, path=(tmp_path / "site",)).fails(
        "expected demo from this project: ", "found demo 1.0 installed, without an SBOM of this project"
    )
    explained("demo==1.0", at=tmp_path).fails("expected demo==1.0", "found none")
    explained(tmp_path / "site", at=tmp_path).fails("expected an SBOM of this project in", "found none")
    explained(tmp_path / "nowhere.whl", at=tmp_path).fails("found no file", "nowhere.whl: name one that is there")


def test_two_in_one_folder(built: Sample, wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    for file in (wheel, built.out / PRODUCTS[2]):
        with zipfile.ZipFile(file) as opened:
            opened.extractall(site)
    explained(site, at=tmp_path).fails("expected one SBOM", "found those of demo-1.0+overlay", "name one of them")
    assert "plain 3.0+overlay.1" in explained(site / "plain", at=tmp_path).succeeds().stdout


def test_a_document_that_is_another_or_hostile(site: Path, tmp_path: Path) -> None:
    (document,) = site.glob(f"*/{sbom.MEMBER}")
    other = tmp_path / "other.cdx.json"
    for content in (
        "",
        "[]",
        "[" * 100000,
        '{"metadata": {"component": {"name": "other"}}}',
        document.read_text("utf-8").replace("modeling-overlay:series", "x"),
    ):
        other.write_text(content, "utf-8")
        explained(other, at=tmp_path).fails(f"{other}: expected an SBOM as this version of modeling-overlay writes it")
    other.write_text(document.read_text("utf-8").replace("Subtract in the core", r"Sub\u001b[2J\u202etract"), "utf-8")
    said = explained(other, at=tmp_path).succeeds().stdout
    assert r"Sub\x1b[2J\u202etract" in said
    (tmp_path / "README.md").write_text("# A page", "utf-8")
    explained(tmp_path / "README.md", at=tmp_path).fails("README.md: expected a wheel or an SBOM, found neither")
    (tmp_path / "broken.whl").write_bytes(b"PK\5\6" + bytes(18))
    explained(tmp_path / "broken.whl", at=tmp_path).fails("broken.whl: expected an SBOM")


def leaves(found: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of everything below an object."""
    pairs = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for key, value in pairs:
        yield (*at, key)
        yield from leaves(value, (*at, key))


def test_an_output_that_has_not_all_letters(site: Path, tmp_path: Path) -> None:
    (document,) = site.glob(f"*/{sbom.MEMBER}")
    other = tmp_path / os.fsdecode(b"\xff.cdx.json")
    other.write_text(document.read_text("utf-8").replace("Subtract in the core", "Größe"), "utf-8")
    assert r"Gr\xf6\xdfe" in explained(other, at=tmp_path, PYTHONIOENCODING="ascii:strict").succeeds().stdout
    assert r"\udcff.cdx.json" in explained(other, at=tmp_path, PYTHONIOENCODING="utf-8:strict").succeeds().stdout


VALUES: tuple[Any, ...] = (None, 5, 1.5, True, "\ud800", [], {}, ["x"], [[]], {"a": 1}, ...)
"""The last one is none at all."""


def test_values_of_other_types(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each place in turn: it is read, or an error says that it is no SBOM of this project."""
    (document,) = site.glob(f"*/{sbom.MEMBER}")
    whole = json.loads(document.read_text("utf-8"))
    other = tmp_path / "other.cdx.json"
    refused = 0
    for place in leaves(whole):
        for value in VALUES:
            found = copy.deepcopy(whole)
            *above, last = place
            inner = functools.reduce(operator.getitem, above, found)
            if value is ...:
                del inner[last]
            else:
                inner[last] = value
            other.write_text(json.dumps(found), "ascii")
            for form in ("text", "json"):
                try:
                    explain.main(str(other), form, diff=True)
                except OverlayError as error:
                    assert "expected an SBOM as this version" in str(error)  # noqa: PT017
                    refused += 1
                else:
                    capsys.readouterr().out.encode("utf-8")
    assert refused > 500


def test_a_wheel_that_is_damaged_or_a_bomb(site: Path, tmp_path: Path) -> None:
    (document,) = site.glob(f"*/{sbom.MEMBER}")
    name = document.relative_to(site).as_posix()
    bomb = tmp_path / "bomb.whl"

    def write(content: bytes, method: int, size: int | None = None) -> bytes:
        with zipfile.ZipFile(bomb, "w", method) as opened:
            opened.writestr(name, content)
        found = bytearray(bomb.read_bytes())
        if size is not None:
            entry = found.rindex(b"PK\1\2")
            found[entry + 20 : entry + 24] = size.to_bytes(4, "little")  # of what is compressed
        bomb.write_bytes(found)
        return bytes(found)

    content = document.read_bytes()
    write(b"[" + b"[]," * (6 << 20) + b"[]]", zipfile.ZIP_DEFLATED)
    explained(bomb, at=tmp_path).fails("bomb.whl: expected an SBOM of at most 16777216 bytes", "do not use this file")
    write(content, zipfile.ZIP_LZMA)
    explained(bomb, at=tmp_path).fails("stored or deflated", "by method 14: do not use this file")
    write(content, zipfile.ZIP_DEFLATED, 100)
    explained(bomb, at=tmp_path).fails("bomb.whl: expected a wheel, found no sound zip file")


def test_lines_are_counted_by_their_hunks() -> None:
    """A removed line of SQL comment looks like a header."""
    diff = (
        "diff --git a/x b/x\nindex 1..2 100644\n--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n one\n--- two\n+++ two\n three\n"
        "@@ -9 +9,2 @@\n-a\n+b\n+c\n\\ No newline at end of file\n"
        "diff --git a/y b/y\n--- a/y\n+++ b/y\n@@ -1,2 +1,1 @@\n-a\n b\n"
    )
    assert list(explain._counted(diff)) == [explain.Counted("x", 3, 2), explain.Counted("y", 0, 1)]


def test_a_narrow_terminal(wheel: Path, tmp_path: Path) -> None:
    releases = explain.find(str(wheel))[1]
    lines = [line for line in explain._lines("here", releases, 40, diff=False) if " " in line.strip()]
    assert sum(len(line) > 40 for line in lines) <= 8, "only what cannot be broken: paths and hashes"


def test_the_wheels_of_the_releases() -> None:
    files = sorted(variants.products().glob("*.whl"))
    assert files
    for file in files:
        source, releases = explain.find(str(file))
        assert source == str(file)
        for release in releases:
            assert release.patches
            assert all(patch.files and patch.reason for patch in release.patches)
            assert all(count.added + count.removed for patch in release.patches for count in patch.files)
