"""The pinned releases as unpacked package trees: each is patched as in its wheel, and so is a fork with the same
files."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from overlay.queue import git, lock, series, source
from tests import variants
from tests.deliver.test_package_tree import check_record

LOCK = lock.read(variants.ROOT / "upstream.lock")
PINS = [(name, release) for name, package in LOCK.packages.items() for release in package.releases if release.files]
TE = "transformer_engine"
FUSER = f"{TE}/pytorch/ops/fuser.py"


def exchanged(name: str, release: lock.Release) -> dict[str, str]:
    """The blob ids after the series of what the overlay exchanges, by path in the wheel."""
    assert release.series is not None
    paths = series.read(variants.ROOT / "patches" / release.series).paths("overlay")
    inside = {path.removeprefix(LOCK.packages[name].prefix) for path in paths}
    return {file.path: file.after for file in release.files if file.path in inside}


def unpacked(name: str, release: lock.Release, tree: Path) -> Path:
    with zipfile.ZipFile(source.fetch(name, release.wheel)) as wheel:
        wheel.extractall(tree)
    return tree


def apply(tree: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "overlay", "apply", "--from-tree", str(tree), "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(variants.ROOT)}
    return subprocess.run(command, cwd=tree.parent, env=environment, capture_output=True, text=True, check=False)


def patched(tree: Path, out: Path) -> str:
    done = apply(tree, out)
    assert done.returncode == 0, done.stderr
    return done.stderr


def te(version: str) -> lock.Release:
    return LOCK.find(f"{TE}=={version}")[2]


@pytest.mark.parametrize(("name", "release"), PINS, ids=[f"{name}-{release.version}" for name, release in PINS])
def test_every_pin(name: str, release: lock.Release, tmp_path: Path) -> None:
    tree, out = unpacked(name, release, tmp_path / "tree"), tmp_path / "out"
    said = patched(tree, out)
    assert release.version in said.partition(f"the files of {name} ")[2].partition(f", {release.series} fits")[0].split(
        ", "
    )
    expected = exchanged(name, release)
    assert expected
    metadata = f"{name}-{release.version}.dist-info"
    for file in tree.rglob("*"):
        path = file.relative_to(tree).as_posix()
        if path in expected:
            assert git.blob_id((out / path).read_bytes()) == expected[path]
        elif file.is_file() and path != f"{metadata}/RECORD":
            assert (out / path).read_bytes() == file.read_bytes(), path
    assert len(list(out.rglob("*"))) == len(list(tree.rglob("*")))
    check_record(out, metadata)


@pytest.mark.parametrize("folder", [TE, "transformer_engine_npu"])
def test_a_fork_with_the_same_fuser(folder: str, tmp_path: Path) -> None:
    """Its version checks, and its name for the package, are its own."""
    tree = unpacked(TE, te("2.13.0"), tmp_path / "tree")
    shutil.rmtree(tree / "transformer_engine-2.13.0.dist-info")
    for path in ("__init__.py", "common/__init__.py", "pytorch/__init__.py", "pytorch/ops/__init__.py"):
        (tree / TE / path).write_text("# of the fork\n", "utf-8")
    (tree / "setup.py").write_text("# of the fork\n", "utf-8")
    (tree / "foo-1.0.dist-info").mkdir()
    (tree / TE).rename(tree / folder)
    said = patched(tree, tmp_path / "out")
    assert f"{tree / folder}: the files of {TE} 2.13.0, " in said
    place = FUSER.replace(TE, folder, 1)
    assert git.blob_id((tmp_path / "out" / place).read_bytes()) == exchanged(TE, te("2.13.0"))[FUSER]
    for path in (f"{folder}/common/__init__.py", "setup.py"):
        assert (tmp_path / "out" / path).read_text("utf-8") == "# of the fork\n"


def test_a_fork_that_has_changed_the_fuser(tmp_path: Path) -> None:
    """As those do that put their own line of copyright into it."""
    tree = unpacked(TE, te("2.13.0"), tmp_path / "tree")
    content = (tree / FUSER).read_bytes()
    found = content.replace(b"\n", b"\n# Copyright (c) 2026, a vendor.\n", 1)
    (tree / FUSER).write_bytes(found)
    done = apply(tree, tmp_path / "out")
    assert done.returncode == 1
    assert f"{FUSER}: expected the blob {git.blob_id(content)[:10]} (2.13.0)" in done.stderr
    assert (
        f", found {git.blob_id(found)[:10]}: no series applies (0003-notice-fuser.patch does not fit {FUSER}), use"
        in done.stderr
    )
    assert not (tmp_path / "out").exists()


def test_files_of_two_releases(tmp_path: Path) -> None:
    name = "transformers"
    tree = unpacked(name, LOCK.find(f"{name}==5.14.1")[2], tmp_path / "tree")
    with zipfile.ZipFile(source.fetch(name, LOCK.find(f"{name}==5.2.0")[2].wheel)) as wheel:
        wheel.extract("transformers/utils/generic.py", tree)
    done = apply(tree, tmp_path / "out")
    assert done.returncode == 1
    assert "transformers/utils/generic.py: expected the blob 9a5a97a023 (5.14.1), " in done.stderr
    assert "found 23eaa418cf, which is that of 5.2.0: " in done.stderr


def test_the_sources_of_transformers(tmp_path: Path) -> None:
    """An sdist, unpacked."""
    name, _, release = LOCK.find("transformers==5.14.1")
    assert release.sdist is not None
    shutil.unpack_archive(source.fetch(name, release.sdist), tmp_path / "tree", filter="data")
    (tree,) = (tmp_path / "tree").iterdir()
    patched(tree, tmp_path / "out")
    for path, after in exchanged(name, release).items():
        assert git.blob_id((tmp_path / "out" / "src" / path).read_bytes()) == after
    assert (tmp_path / "out" / "pyproject.toml").read_bytes() == (tree / "pyproject.toml").read_bytes()
