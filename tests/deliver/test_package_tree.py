"""`overlay apply --from-tree`: a patched copy of an unpacked package tree, or one line that says which files are not as
in any pin."""

import base64
import csv
import fcntl
import hashlib
import importlib
import io
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from overlay.queue import git as blobs
from tests import sample as make
from tests.deliver.test_output import Killed, foreign, forked, needs_root, read_only
from tests.sample import Sample, lay, snapshot, upstream

TOUCHED = ("core.py", "layers/block.py")
"""What the series of the sample exchange, by path in the package."""


OTHER = b"other\n"


def unpacked(sample: Sample, *names: str, under: str = "") -> Path:
    """The tree of the named stock wheels, unpacked."""
    tree = sample.folder / "tree"
    for name in names or ("demo-1.0",):
        with zipfile.ZipFile(sample.wheel(name)) as wheel:
            wheel.extractall(tree / under)
    return tree


def images(name: str) -> dict[str, bytes]:
    """What the files of a release are to be after its series, by path in the package."""
    project, _, version = name.partition("-")
    files = upstream(project, version)
    first = "kernel" if version == "2.0" else "core"
    core = files[f"{project}/core.py"].replace(
        f"def {first}_30(value):\n    return value + 30".encode(),
        f"def {first}_30(value):\n    return value - 30".encode(),
    )
    return {
        "core.py": core.replace(b"return value + 50\n", b"return value * 50\n"),
        "layers/block.py": files[f"{project}/layers/block.py"].replace(b"return value + 7\n", b"return value * 7\n"),
    }


def patch(sample: Sample, tree: Path) -> str:
    """Patches `tree` into `out`, which changes neither the tree nor anything else; gives what is said."""
    before = snapshot(tree), snapshot(sample.root)
    said = sample.apply("--from-tree", tree).succeeds().stderr
    assert (snapshot(tree), snapshot(sample.root)) == before
    assert [path.name for path in sample.out.parent.iterdir()] == ["dist"]
    assert "no lock names this tree, so its copy is for you alone" in said
    return said


def refused(sample: Sample, tree: Path, *parts: str) -> str:
    """What is said where `tree` is refused, and nothing is written."""
    before = snapshot(sample.folder)
    said = sample.apply("--from-tree", tree).fails(*parts)
    after = {path: entry for path, entry in (snapshot(sample.folder) or {}).items() if not path.startswith("home")}
    assert after == {path: entry for path, entry in (before or {}).items() if not path.startswith("home")}
    return said


def changed(tree: Path, out: Path) -> set[str]:
    """The paths at which the two differ."""
    one, other = snapshot(tree) or {}, snapshot(out) or {}
    return {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}


def check_record(place: Path, metadata: str) -> None:
    """Every row of a RECORD with a hash is true, and every row has its file."""
    rows = list(csv.reader(io.StringIO((place / metadata / "RECORD").read_text("utf-8"))))
    for path, digest, size in rows:
        content = (place / path).read_bytes()
        if digest:
            found = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={found}", str(len(content))), path


@pytest.mark.parametrize("name", make.WHEELS)
def test_an_unpacked_wheel(sample: Sample, name: str) -> None:
    """Of every pin, those for the tests too; its version stays what it was."""
    project, _, version = name.partition("-")
    tree = unpacked(sample, name)
    said = patch(sample, tree)
    assert f"overlay: {tree}/{project}: the files of {project} {version}, " in said
    assert said.splitlines()[-1] == f"overlay: wrote {sample.out}"
    expected = {f"{project}/{path}" for path in TOUCHED}
    assert changed(tree, sample.out) == {*expected, f"{name}.dist-info/RECORD"}
    for path, content in images(name).items():
        assert (sample.out / project / path).read_bytes() == content
        assert f"overlay: patched {sample.out}/{project}/{path}" in said
    check_record(sample.out, f"{name}.dist-info")


def test_the_files_are_those_of_the_overlay(sample: Sample) -> None:
    sample.apply("demo==1.0").succeeds()
    shutil.rmtree(sample.out)
    patch(sample, unpacked(sample))
    for path in TOUCHED:
        expected = (sample.patched / "demo" / "1.0" / "demo" / path).read_bytes()
        assert (sample.out / "demo" / path).read_bytes() == expected


def package(sample: Sample) -> Path:
    return unpacked(sample) / "demo"


def renamed_package(sample: Sample) -> Path:
    return (unpacked(sample) / "demo").rename(sample.folder / "fork")


def renamed(sample: Sample) -> Path:
    tree = unpacked(sample)
    (tree / "demo").rename(tree / "demo_npu")
    shutil.rmtree(tree / "demo-1.0.dist-info")
    return tree


def vendored(sample: Sample) -> Path:
    return unpacked(sample, under="third party/_vendor")


def sources(sample: Sample) -> Path:
    """As an sdist, or a checkout without git: the prefix of the lock, and what is around the package."""
    tree = sample.folder / "tree"
    shutil.copytree(sample.checkouts / "demo-1.0", tree, ignore=shutil.ignore_patterns(".git"))
    lay(tree, {"PKG-INFO": b"Name: demo\n", "setup.py": b"x\n"})
    return tree


def checkout(sample: Sample) -> Path:
    return sample.checkouts / "demo-1.0"


@pytest.mark.parametrize(
    ("layout", "inside"),
    [
        (package, "."),
        (renamed_package, "."),
        (renamed, "demo_npu"),
        (vendored, "third party/_vendor/demo"),
        (sources, "src/demo"),
        (checkout, "src/demo"),
    ],
)
def test_where_the_package_lies(sample: Sample, layout: Callable[[Sample], Path], inside: str) -> None:
    tree = layout(sample)
    patch(sample, tree)
    for path, content in images("demo-1.0").items():
        assert (sample.out / inside / path).read_bytes() == content
    records = {path for path in changed(tree, sample.out) if path.endswith("RECORD")}
    assert changed(tree, sample.out) - records == {os.path.normpath(f"{inside}/{path}") for path in TOUCHED}


@pytest.mark.parametrize("how", ["relative", "here", "link", "slash"])
def test_how_the_tree_is_named(sample: Sample, how: str) -> None:
    tree = unpacked(sample)
    (sample.folder / "link").symlink_to(tree)
    named = {"relative": "tree", "here": ".", "link": "link", "slash": f"{tree}/"}[how]
    where = tree if how == "here" else sample.folder
    sample.overlay("apply", "--from-tree", named, cwd=where).succeeds()
    assert len(changed(tree, sample.out)) == 3


def test_a_fork_with_other_files_beside_the_same_ones(sample: Sample) -> None:
    """A version file and everything else of its own: only what is exchanged has to be the same."""
    tree = unpacked(sample)
    lay(tree / "demo", {"__init__.py": b'__version__ = "1.0+npu"\nimport demo.npu\n', "npu.py": b"", "table.bin": b"x"})
    patch(sample, tree)
    assert (sample.out / "demo" / "core.py").read_bytes() == images("demo-1.0")["core.py"]
    assert (sample.out / "demo" / "__init__.py").read_bytes() == (tree / "demo" / "__init__.py").read_bytes()


def test_two_projects(sample: Sample) -> None:
    tree = unpacked(sample, "demo-1.0", "plain-3.0")
    said = patch(sample, tree)
    assert ": the files of demo 1.0, " in said
    assert ": the files of plain 3.0, " in said
    assert len(changed(tree, sample.out)) == 6
    for name in ("demo-1.0", "plain-3.0"):
        check_record(sample.out, f"{name}.dist-info")


def test_two_wheels_unpacked_side_by_side(sample: Sample) -> None:
    unpacked(sample, "demo-1.0", under="one")
    tree = unpacked(sample, "plain-3.0", under="other")
    patch(sample, tree)
    assert len(changed(tree, sample.out)) == 6
    check_record(sample.out / "one", "demo-1.0.dist-info")
    check_record(sample.out / "other", "plain-3.0.dist-info")


def test_two_copies_of_one_package(sample: Sample) -> None:
    """An old build beside the sources: both are patched, so that neither is taken in its stock form."""
    tree = unpacked(sample)
    shutil.copytree(tree / "demo", tree / "build" / "lib" / "demo")
    patch(sample, tree)
    for folder in ("demo", "build/lib/demo"):
        for path, content in images("demo-1.0").items():
            assert (sample.out / folder / path).read_bytes() == content


def test_one_of_two_copies_does_not_match(sample: Sample) -> None:
    tree = unpacked(sample)
    shutil.copytree(tree / "demo", tree / "build" / "lib" / "demo")
    lay(tree / "build" / "lib" / "demo", {"core.py": OTHER})
    refused(sample, tree, "build/lib/demo/core.py: expected the blob", f", or name {tree / 'demo'} to patch that alone")
    patch(sample, tree / "demo")


def blob(content: bytes) -> str:
    """As messages abbreviate it."""
    return blobs.blob_id(content)[:10]


def test_a_file_that_is_as_in_no_pin(sample: Sample) -> None:
    tree = unpacked(sample)
    lay(tree, {"demo/core.py": OTHER})
    before = [blob(upstream("demo", version)["demo/core.py"]) for version in ("1.0", "1.1", "2.0")]
    said = refused(
        sample,
        tree,
        f"overlay: {tree}: demo/core.py: expected the blob {before[0]} (1.0) or {before[1]} (1.1) or {before[2]} (2.0)",
        f", found {blob(OTHER)}: no series applies (0001-Subtract-in-the-core.patch does not fit src/demo/core.py), ",
    )
    assert "layers/block.py" not in said


def test_no_file_is_as_in_any_pin(sample: Sample) -> None:
    tree = unpacked(sample, "plain-3.0")
    lay(tree, {"plain/core.py": OTHER, "plain/layers/block.py": b"too\n"})
    refused(
        sample,
        tree,
        f"plain/core.py: expected the blob {blob(upstream('plain', '3.0')['plain/core.py'])} (3.0), found ",
        f"; plain/layers/block.py: expected the blob {blob(upstream('plain', '3.0')['plain/layers/block.py'])} (3.0), ",
        ": no series applies (0001-Subtract-in-the-core.patch does not fit plain/core.py), use the files of a pinned",
    )


def test_no_file_is_as_in_any_of_several_pins(sample: Sample) -> None:
    tree = unpacked(sample)
    lay(tree, {f"demo/{path}": OTHER for path in TOUCHED})
    refused(
        sample,
        tree,
        "demo/core.py: expected the blob ",
        "(1.0) or ",
        "(1.1) or ",
        "(2.0), found ",
        "(1.0, 1.1, 2.0), f",
    )


@pytest.mark.parametrize("how", ["both are changed", "one is missing"])
def test_a_renamed_package_that_does_not_match(sample: Sample, how: str) -> None:
    """It is known by what it has, and what it has not is named."""
    tree = renamed(sample)
    if how == "one is missing":
        (tree / "demo_npu" / "layers" / "block.py").unlink()
        refused(sample, tree, ": demo_npu/layers/block.py: expected the blob ", ", found no such file")
    else:
        lay(tree / "demo_npu", dict.fromkeys(TOUCHED, OTHER))
        refused(
            sample, tree, ": demo_npu/core.py: expected the blob ", "; demo_npu/layers/block.py: expected the blob "
        )


def test_one_file_is_as_in_a_pin(sample: Sample) -> None:
    """Then the other is measured against that pin alone, and it is not named itself."""
    tree = unpacked(sample, "demo-2.0")
    before = blob(upstream("demo", "2.0")["demo/layers/block.py"])
    lay(tree, {"demo/layers/block.py": OTHER})
    refused(sample, tree, f"{tree}: demo/layers/block.py: expected the blob {before} (2.0), found {blob(OTHER)}: no")


@pytest.mark.parametrize("path", ["demo/core.py", "demo/layers/block.py"])
def test_a_file_that_is_missing(sample: Sample, path: str) -> None:
    tree = unpacked(sample)
    (tree / path).unlink()
    refused(sample, tree, f"{path}: expected the blob ", "found no such file: use a complete tree that nobody")


def test_a_package_with_none_of_the_files(sample: Sample) -> None:
    """It has the name of the project, so it is what is meant."""
    tree = unpacked(sample)
    shutil.rmtree(tree / "demo" / "layers")
    lay(tree, {"demo/core.py": OTHER})
    for place, inside in ((tree, "demo/"), (tree / "demo", "")):
        refused(
            sample, place, f": {inside}core.py: expected ", f"; {inside}layers/block.py: expected ", "no such file: "
        )


def test_a_tree_that_is_patched_already(sample: Sample) -> None:
    patch(sample, unpacked(sample))
    tree = sample.out.rename(sample.folder / "patched")
    refused(
        sample, tree, f"{tree}: demo is patched already: it has the files of 1.0 after demo-1.0-1.1: use it as it is"
    )
    refused(sample, tree / "demo", f"{tree}/demo: demo is patched already")


def test_a_patched_and_a_changed_copy(sample: Sample) -> None:
    patch(sample, unpacked(sample))
    tree = sample.out.rename(sample.folder / "patched")
    shutil.copytree(tree / "demo", tree / "old" / "demo")
    lay(tree / "old" / "demo", {"core.py": OTHER})
    said = refused(sample, tree, ": demo is patched already", "; old/demo/core.py: expected the blob ")
    assert "use it as it is" not in said


def test_a_tree_that_is_patched_in_part(sample: Sample) -> None:
    tree = unpacked(sample)
    content = images("demo-1.0")["core.py"]
    lay(tree, {"demo/core.py": content})
    said = refused(sample, tree, "demo/core.py: expected the blob ", f"(1.0), found {blob(content)}, which is patched")
    assert "(2.0)" not in said
    assert "block" not in said


def test_crlf_line_ends(sample: Sample) -> None:
    tree = unpacked(sample)
    content = upstream("demo", "1.0")["demo/core.py"].replace(b"\n", b"\r\n")
    lay(tree, {"demo/core.py": content})
    said = refused(
        sample, tree, f"found {blob(content)}, the same with CRLF line ends: write the files with LF line ends"
    )
    assert "(2.0)" not in said


def test_a_series_that_applies_to_what_no_pin_names(sample: Sample) -> None:
    """It may be right, and only the user can say so: the way is by git."""
    tree = checkout(sample)
    content = upstream("demo", "1.0")["demo/core.py"] + b"\nMORE = 1\n"
    lay(tree, {"src/demo/core.py": content})
    refused(
        sample,
        tree,
        f"found {blob(content)}: demo-1.0-1.1 applies all the same: commit the tree and use --from-git "
        "with --any-commit and --metadata-from demo==1.0",
    )
    make.commit(tree, "More")
    sample.apply("--from-git", tree, "--any-commit", "--metadata-from", "demo==1.0").succeeds()
    shutil.rmtree(sample.out)
    wheel = unpacked(sample)
    lay(wheel, {"demo/core.py": content})
    refused(sample, wheel, f"the patches in {sample.root}/patches/demo-1.0-1.1 apply to these files all the same")


def test_a_verified_commit_is_a_pin(sample: Sample) -> None:
    sample.overlay("lock", "complete", "--checkout", checkout(sample)).succeeds()
    pinned = make.git("rev-parse", "HEAD", folder=checkout(sample))[:12]
    assert f": the files of demo 1.0, commit {pinned}, demo-1.0-1.1 fits" in patch(sample, unpacked(sample))


def test_a_lock_that_is_not_of_the_series(sample: Sample) -> None:
    content = upstream("demo", "2.0")["demo/core.py"]
    sample.edit(blobs.blob_id(images("demo-2.0")["core.py"]), "0" * 40)
    assert blobs.blob_id(content) in sample.lock.read_text()
    refused(sample, unpacked(sample, "demo-2.0"), "demo 2.0: demo/core.py: expected the blob 0000000000", "lock update")


def test_nothing_of_a_pinned_project(sample: Sample) -> None:
    tree = sample.folder / "tree"
    lay(tree, {"other/__init__.py": b"", "other/core.py": b"x", "core.py": b"x", "block.py": b"x"})
    refused(
        sample,
        tree,
        f"{tree}: expected a package of demo or plain in it, found none with the files that the patches change: name "
        "the folder of a package, or one that holds it",
    )
    refused(sample, sample.folder / "nowhere", "expected the folder of an unpacked package", "no such folder")
    refused(sample, sample.wheel(), "expected the folder of an unpacked package", "found a file: unpack it first")


def test_a_package_behind_a_link(sample: Sample) -> None:
    """Nothing outside of the tree is read for it, and no stock file is left behind a link in the copy."""
    elsewhere = unpacked(sample).rename(sample.folder / "elsewhere")
    tree = sample.folder / "tree"
    tree.mkdir()
    (tree / "demo").symlink_to(elsewhere / "demo")
    refused(sample, tree, "found none with", "name the folder that demo leads to")
    (tree / "demo").unlink()
    unpacked(sample)
    shutil.rmtree(tree / "demo" / "layers")
    (tree / "demo" / "layers").symlink_to(elsewhere / "demo" / "layers")
    refused(
        sample,
        tree,
        "demo/layers/block.py: expected",
        "found it behind a symbolic link to a folder: put the folder that demo/layers leads to, "
        f"{elsewhere}/demo/layers, in the place of that link",
    )


@pytest.mark.parametrize(
    "shadow",
    [
        "core.cpython-311-x86_64-linux-gnu.so",
        "layers/block.abi3.so",
        "core.so",
        "core.cp311-win_amd64.pyd",
        "core/__init__.py",
    ],
)
def test_what_is_imported_in_place_of_a_patched_file(sample: Sample, shadow: str) -> None:
    """An extension module or a package of the same name goes before a source file (importlib.machinery.FileFinder)."""
    tree = unpacked(sample)
    lay(tree, {"demo/core_more.so": b"", "demo/core.txt": b"", "demo/core.pyi": b"", "core.so": b""})
    lay(tree, {f"demo/{shadow}": b""})
    stem = "layers/block" if shadow.startswith("layers") else "core"
    refused(
        sample,
        tree,
        f"{tree}: expected Python to import demo/{stem}.py, found demo/{shadow.removesuffix('/__init__.py')}, which it "
        "imports in its place: ",
    )


def test_a_file_that_is_a_link(sample: Sample) -> None:
    """As uv installs with --link-mode symlink: the copy gets a file of its own."""
    tree = unpacked(sample)
    kept = (tree / "demo" / "core.py").rename(sample.folder / "cached.py")
    (tree / "demo" / "core.py").symlink_to(kept)
    patch(sample, tree)
    copy = sample.out / "demo" / "core.py"
    assert not copy.is_symlink()
    assert copy.read_bytes() == images("demo-1.0")["core.py"]
    assert kept.read_bytes() == upstream("demo", "1.0")["demo/core.py"]


def kept(folder: Path) -> dict[str, tuple[object, ...]]:
    """Kind, mode and time of everything, and where a link leads."""
    found: dict[str, tuple[object, ...]] = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        target = path.readlink() if path.is_symlink() else None
        found[path.relative_to(folder).as_posix()] = (status.st_mode, status.st_mtime_ns, target)
    return found


def test_modes_times_links_and_strange_names_stay(sample: Sample) -> None:
    tree = unpacked(sample)
    foreign(tree / "around")
    (tree / os.fsdecode(b"not \xff utf-8")).write_text("x")
    (tree / "demo" / os.fsdecode(b"\xfe.py")).write_text("x")
    (tree / "demo" / "new\nline").write_text("x")
    (tree / "demo" / "tool").write_text("#!/bin/sh\n")
    (tree / "demo" / "tool").chmod(0o755)
    (tree / "demo" / "core.py").chmod(0o755)
    (tree / "demo" / "locked").mkdir()
    (tree / "demo" / "locked" / "file").write_text("x")
    (tree / "demo" / "locked" / "file").chmod(0o444)
    (tree / "demo" / "locked").chmod(0o555)
    os.utime(tree / "demo" / "locked", (1_000_000_000, 1_100_000_000))
    os.utime(tree / "demo" / "core.py", (1_000_000_000, 1_100_000_000))
    patch(sample, tree)
    one, other = kept(tree), kept(sample.out)
    assert one.keys() == other.keys()
    new = {"demo/core.py", "demo/layers/block.py", "demo-1.0.dist-info/RECORD"}
    assert {path for path in one if one[path] != other[path]} == new
    for path in new:
        assert one[path][0] == other[path][0], "the mode"
    assert other["demo/core.py"][1] != one["demo/core.py"][1], "what is compiled by time has to be compiled anew"
    for file in sample.out.rglob("*"):
        if file.is_file() and not file.is_symlink():
            assert not file.samefile(tree / file.relative_to(sample.out)), "no file is shared with the tree"


def installed(sample: Sample, *names: str) -> Path:
    """A folder that pip has installed the named wheels into, and compiled."""
    site = sample.folder / "tree" / "lib" / "site-packages"
    command = [sys.executable, "-P", "-m", "pip", "install", "--no-index", "--no-deps", "--compile", "--quiet"]
    command += ["--disable-pip-version-check", "--target", str(site)]
    wheels = [str(sample.wheel(name)) for name in names]
    done = subprocess.run([*command, *wheels], env=sample.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site


def test_a_folder_of_installed_packages(sample: Sample) -> None:
    """Only what is patched is copied, to stand before the rest; what was compiled of the old files is not."""
    site = installed(sample, "demo-1.0", "plain-3.0")
    shutil.rmtree(site / "plain-3.0.dist-info")
    lay(site, {"plain/core.py": b"# not what it was\n", "plain/layers/block.py": b"x = 1\n", "plain/__init__.py": b""})
    refused(sample, site, "plain/core.py: expected the blob", f", or name {site}/demo to patch that alone")
    shutil.rmtree(site / "plain")
    lay(site, {"plain/__init__.py": b"", "plain/core.py": b"", "other.py": b""})
    lay(site, {"plain-3.0.dist-info/RECORD": b"plain/core.py,,\n", "nothing-1.dist-info/METADATA": b""})
    shutil.move(site / "plain", site / "another")
    compiled = {path.relative_to(site) for path in site.glob("demo/**/*.pyc")}
    assert compiled
    said = patch(sample, site.parents[1])
    assert said.splitlines()[-1].endswith(", with lib/site-packages/demo, lib/site-packages/demo-1.0.dist-info alone")
    copy = sample.out / "lib" / "site-packages"
    assert {path.name for path in copy.iterdir()} == {"demo", "demo-1.0.dist-info"}
    old = {path for path in compiled if path.name.startswith(("core.", "block."))}
    assert {path.relative_to(copy) for path in copy.glob("demo/**/*.pyc")} == compiled - old
    assert len(old) == 2
    check_record(copy, "demo-1.0.dist-info")
    record = (copy / "demo-1.0.dist-info" / "RECORD").read_bytes()
    assert record.count(b"\r\n") == record.count(b"\n") > 10, "as pip writes them"
    assert (site / "demo-1.0.dist-info" / "RECORD").read_bytes().count(b"\n") == record.count(b"\n") + 2
    program = "import demo, demo.core, demo.layers.block as b, another; print(demo.core.core_30(1), b.block_7(2))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=sample.environment() | {"PYTHONPATH": f"{copy}:{site}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "-29 14\n"


def others(record: bytes = b"") -> dict[str, bytes]:
    """Another installed package."""
    return {"foo-1.0.dist-info/METADATA": b"Name: foo\n", "foo-1.0.dist-info/RECORD": record, "foo.py": b""}


def own(sample: Sample) -> bytes:
    with zipfile.ZipFile(sample.wheel()) as wheel:
        return wheel.read("demo-1.0.dist-info/METADATA")


@pytest.mark.parametrize("beside", ["nothing", "sources", "another RECORD"])
def test_a_fork_beside_metadata_of_something_else(sample: Sample, beside: str) -> None:
    """That makes no folder of installed packages of it: all of it is copied. `demo.egg-info` is what setuptools leaves
    in sources."""
    tree = unpacked(sample)
    shutil.rmtree(tree / "demo-1.0.dist-info")
    lay(tree, {"setup.py": b"x", "tests/test_fork.py": b"x"} | others())
    if beside == "sources":
        lay(tree, {"demo.egg-info/PKG-INFO": own(sample)})
    if beside == "another RECORD":
        lay(tree, others(b"foo/demo/core.py,,\nfoo.py,,\n"))
    said = patch(sample, tree)
    assert said.splitlines()[-1] == f"overlay: wrote {sample.out}"
    assert changed(tree, sample.out) == {f"demo/{path}" for path in TOUCHED}


@pytest.mark.parametrize(
    "metadata",
    [
        {"demo-1.0.dist-info/METADATA": b"Name: Demo\n"},
        {"demo-1.0.dist-info/INSTALLER": b"apt"},
        {"odd-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: DEMO\n\nName: foo\n"},
        {"Demo-1.0-py3.11.egg-info/PKG-INFO": b"Name: demo\n"},
        {"demo-1.0.egg-info": b"Name: demo\n"},
        {"demo-1.0.dist-info/RECORD": b"/usr/lib/demo/core.py,,\n/usr/lib/demo/layers/block.py,,\n"},
    ],
    ids=["no RECORD", "no METADATA", "the name inside", "egg-info", "an egg-info file", "absolute paths"],
)
def test_metadata_that_lists_no_files(sample: Sample, metadata: dict[str, bytes]) -> None:
    """As distributions ship it. What is installed is found by the name of its project (PEP 503)."""
    tree = unpacked(sample)
    shutil.rmtree(tree / "demo-1.0.dist-info")
    lay(tree, metadata | others())
    said = patch(sample, tree)
    (name,) = {path.partition("/")[0] for path in metadata}
    assert {path.name for path in sample.out.iterdir()} == {"demo", name}
    assert said.splitlines()[-1].endswith(f", with {', '.join(sorted(('demo', name)))} alone")
    assert {path for path in changed(tree, sample.out) if path.startswith(("demo/", name))} == {
        f"demo/{path}" for path in TOUCHED
    }


def test_a_record_that_lists_other_files_of_the_package(sample: Sample) -> None:
    """So the native library of TransformerEngine is installed: this is a folder of installed packages."""
    tree = unpacked(sample)
    shutil.rmtree(tree / "demo-1.0.dist-info")
    lay(tree, others(b"demo/table.bin,,\n"))
    assert patch(sample, tree).splitlines()[-1].endswith(", with demo alone")


MALFORMED = (b"core.py\n", b"core.py,\xff,\n")


@pytest.mark.parametrize("content", MALFORMED)
def test_a_malformed_record_of_something_else(sample: Sample, content: bytes) -> None:
    tree = unpacked(sample)
    lay(tree, others(content))
    patch(sample, tree)
    assert {path.name for path in sample.out.iterdir()} == {"demo", "demo-1.0.dist-info"}
    check_record(sample.out, "demo-1.0.dist-info")
    shutil.rmtree(sample.out)
    shutil.rmtree(tree / "demo-1.0.dist-info")
    patch(sample, tree)


@pytest.mark.parametrize("content", MALFORMED)
def test_a_malformed_record_of_the_project(sample: Sample, content: bytes) -> None:
    tree = unpacked(sample)
    lay(tree, {"demo-1.0.dist-info/RECORD": content})
    refused(sample, tree, "demo-1.0.dist-info: RECORD: expected ")


def test_a_package_inside_of_an_installed_one(sample: Sample) -> None:
    """Then it is that one that is copied, whole."""
    site = unpacked(sample, under="lib/other/_vendor") / "lib"
    shutil.move(site / "other" / "_vendor" / "demo-1.0.dist-info", site / "demo_beside-1.dist-info")
    files = {path.relative_to(site).as_posix(): path.read_bytes() for path in site.glob("other/**/*") if path.is_file()}
    lay(site, {"other-1.dist-info/RECORD": make.record(files, "other-1.dist-info"), "third/__init__.py": b""})
    said = patch(sample, site.parent)
    assert said.splitlines()[-1].endswith(", with lib/other, lib/other-1.dist-info alone")
    check_record(sample.out / "lib", "other-1.dist-info")


def test_the_copy_is_there_already(sample: Sample) -> None:
    tree = unpacked(sample)
    patch(sample, tree)
    before = sample.out.stat().st_ino, kept(sample.out)
    (sample.out / "demo" / "__pycache__").mkdir()
    (sample.out / "demo" / "__pycache__" / "core.cpython-311.pyc").write_bytes(b"what Python leaves there")
    said = sample.apply("--from-tree", tree).succeeds().stderr
    assert said.splitlines()[-1] == f"overlay: {sample.out} is this copy already"
    shutil.rmtree(sample.out / "demo" / "__pycache__")
    os.utime(sample.out / "demo", ns=(0, before[1]["demo"][1]))  # type: ignore[arg-type]
    assert (sample.out.stat().st_ino, kept(sample.out)) == before


@pytest.mark.parametrize("meanwhile", ["this copy", "something else"])
def test_another_run_writes_the_copy_meanwhile(sample: Sample, meanwhile: str) -> None:
    tree = unpacked(sample)
    patch(sample, tree)
    made = sample.out.rename(sample.folder / "made")
    (held,) = (sample.cache / "modeling-overlay" / "locks").glob("output-*.lock")
    with held.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = sample.start("apply", "--from-tree", tree)
        assert run.stderr is not None
        line = next(line for line in run.stderr if "waiting for it" in line)
        assert held.stem in line
        if meanwhile != "this copy":
            lay(made, {"mine": b"mine"})
        made.rename(sample.out)
        before = sample.out.stat().st_ino, kept(sample.out)
    said = run.communicate(timeout=600)[1].splitlines()
    if meanwhile == "this copy":
        assert (run.returncode, said) == (0, [f"overlay: {sample.out} is this copy already"])
    else:
        assert run.returncode == 1
        assert "or this very copy, found something else (mine)" in said[-1]
    assert (sample.out.stat().st_ino, kept(sample.out)) == before
    assert [path.name for path in sample.out.parent.iterdir()] == ["dist"]


def edit(path: Path) -> None:
    path.write_bytes(b"mine")


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("demo/core.py", edit),
        ("demo/table.bin", edit),
        ("demo-1.0.dist-info/RECORD", edit),
        ("demo/new.py", edit),
        ("demo/table.bin", Path.unlink),
        ("demo/new", Path.mkdir),
        ("demo/table.bin", lambda path: path.chmod(0o755)),
        ("demo/link", lambda path: (path.unlink(), path.symlink_to("core.py"))),
        ("demo/link", lambda path: (path.unlink(), path.write_text("x"))),
    ],
)
def test_out_holds_something_else(sample: Sample, path: str, change: Callable[[Path], object]) -> None:
    """Whatever it is, and be it a copy that was changed since: it stays as it is."""
    tree = unpacked(sample)
    (tree / "demo" / "link").symlink_to("table.bin")
    patch(sample, tree)
    change(sample.out / path)
    before = snapshot(sample.out), kept(sample.out)
    sample.apply("--from-tree", tree).fails(
        f"{sample.out}: expected a folder that is empty or not there, or this very copy, found something else ({path})"
    )
    assert (snapshot(sample.out), kept(sample.out)) == before
    assert [found.name for found in sample.out.parent.iterdir()] == ["dist"]


def test_out_is_empty_or_a_link_or_a_file(sample: Sample) -> None:
    tree = unpacked(sample)
    sample.out.mkdir(parents=True)
    patch(sample, tree)
    shutil.rmtree(sample.out)
    (sample.folder / "place").mkdir()
    sample.out.symlink_to(sample.folder / "place")
    patch(sample, tree)
    assert sample.out.is_symlink()
    sample.out.unlink()
    sample.out.write_text("mine")
    refused(sample, tree, f"expected a folder at {sample.out}, found a file")


def test_out_and_the_tree_do_not_hold_each_other(sample: Sample) -> None:
    tree = unpacked(sample, under="inside")
    before = snapshot(sample.folder)
    (sample.folder / "link").symlink_to(tree)
    for out in (tree, tree / "new", tree / "inside" / "demo", sample.folder, sample.folder / "link" / "new"):
        sample.overlay("apply", "--from-tree", tree, "--out", out).fails(
            f"{out}: expected a folder outside of {tree}, which does not change, found one inside or around it"
        )
    for out in (sample.root, sample.root / "patches" / "x"):
        sample.overlay("apply", "--from-tree", tree, "--out", out).fails("holds this project itself")
    (sample.folder / "link").unlink()
    assert snapshot(sample.folder) == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("there", ["nothing there", "an empty folder there"])
def test_a_kill_before_every_step(sample: Sample, there: str) -> None:
    tree = unpacked(sample)
    (tree / "demo" / "link").symlink_to("core.py")
    command = ["apply", "--root", str(sample.root), "--from-tree", str(tree), "--out", str(sample.out)]
    importlib.import_module("overlay.deliver.package_tree")  # once, and not in every fork
    assert forked(sample, command) == 0
    stock, after = snapshot(tree), snapshot(sample.out)
    seen = set()
    step = 0
    while True:
        step += 1
        shutil.rmtree(sample.out.parent, ignore_errors=True)
        if there != "nothing there":
            sample.out.mkdir(parents=True)
        before = snapshot(sample.out)
        ended = forked(sample, command, killed_at=step)
        found = snapshot(sample.out)
        assert found in (before, after), f"in between after a kill at step {step}"
        assert snapshot(tree) == stock
        seen.add(found == after)
        if ended == 0:
            break
        assert os.WTERMSIG(ended) == signal.SIGKILL, f"ended with {ended} at step {step}"
        if step % 4 == 0:
            assert forked(sample, command) == 0
            assert snapshot(sample.out) == after
            assert [path.name for path in sample.out.parent.iterdir() if any(path.iterdir())] == ["dist"], step
    assert step > 30
    assert seen == {False, True}


class Unreadable(Killed):
    """Lets nobody, root included, open the file `place`."""

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.scandir") and str(arguments[0]).endswith("/secret"):
            raise PermissionError(13, "Permission denied", str(arguments[0]))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_something_that_cannot_be_read(sample: Sample, kind: str) -> None:
    tree = unpacked(sample)
    lay(tree, {"demo/secret" if kind == "file" else "demo/secret/file": b"x"})
    command = ["apply", "--root", str(sample.root), "--from-tree", str(tree), "--out", str(sample.out)]
    assert os.waitstatus_to_exitcode(forked(sample, command, killed_at=1, how=Unreadable)) == 1
    assert not sample.out.parent.exists() or list(sample.out.parent.iterdir()) == []
    if os.geteuid() != 0:
        (tree / "demo" / "secret").chmod(0)
        sample.apply("--from-tree", tree).fails(f"{tree}/demo/secret: Permission denied: mend that")
        (tree / "demo" / "secret").chmod(0o700)
    patch(sample, tree)


def test_a_tree_that_is_read_only(sample: Sample) -> None:
    tree = unpacked(sample)
    for path in (tree, *tree.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        patch(sample, tree)
        assert stat.S_IMODE((sample.out / "demo" / "core.py").stat().st_mode) == 0o444
        assert stat.S_IMODE((sample.out / "demo" / "layers").stat().st_mode) == 0o555
        assert "is this copy already" in sample.apply("--from-tree", tree).succeeds().stderr
    finally:
        for path in (*tree.rglob("*"), tree, *sample.out.rglob("*")):
            path.chmod(0o755)


@needs_root
def test_a_tree_on_a_read_only_file_system(sample: Sample) -> None:
    tree = unpacked(sample)
    with read_only(tree):
        patch(sample, tree)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_is_no_file(sample: Sample, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = unpacked(sample)
    if kind == "pipe":
        os.mkfifo(tree / "demo" / "odd")
    else:
        monkeypatch.chdir(tree / "demo")  # a socket's address is short
        socket.socket(socket.AF_UNIX).bind("odd")
    sample.apply("--from-tree", tree).fails(f"{tree}/demo/odd: expected a file, a folder or a link, found a pipe, a")
    assert list(sample.out.parent.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--from-tree", "x"],
        ["--from-tree", "x", "--out", "y", "demo==1.0"],
        ["--from-tree", "x", "--out", "y", "--from-git", "z"],
        ["--from-tree", "x", "--out", "y", "--any-commit"],
        ["--from-tree", "x", "--out", "y", "--metadata-from", "z"],
        ["--from-tree", "x", "--out", "y", "--run-upstream-build"],
        ["--from-tree"],
    ],
)
def test_wrong_usage(sample: Sample, arguments: list[str]) -> None:
    command = [sys.executable, "-P", "-m", "overlay", "apply", "--root", str(sample.root), *arguments]
    done = subprocess.run(
        command, cwd=sample.folder, env=sample.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("usage: overlay apply ")
    assert not (sample.folder / "y").exists()
