"""The wheels of the pinned releases: what is in them, who takes them, and that the same inputs give the same bytes."""

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from installer.sources import WheelFile

from overlay.deliver import overlay_wheel
from overlay.queue import git, lock, source
from tests import variants

LOCK = lock.read(variants.ROOT / "upstream.lock")
DELIVERED = [(name, release) for name, _, release in LOCK.deliveries()]
each_release = pytest.mark.parametrize(
    ("name", "release"), DELIVERED, ids=[f"{name}-{release.version}" for name, release in DELIVERED]
)


def built(release: lock.Release) -> Path:
    assert release.built is not None
    return variants.products() / release.built.file


@each_release
def test_is_what_the_lock_names(name: str, release: lock.Release) -> None:
    assert release.built is not None
    assert hashlib.sha256(built(release).read_bytes()).hexdigest() == release.built.sha256


@each_release
def test_record_is_true_to_the_bytes(name: str, release: lock.Release) -> None:
    with zipfile.ZipFile(built(release)) as wheel:
        assert wheel.testzip() is None
        record = f"{name}-{release.local_version}.dist-info/RECORD"
        rows = list(csv.reader(io.StringIO(wheel.read(record).decode())))
        assert sorted(row[0] for row in rows) == sorted(wheel.namelist())
        for path, digest, size in rows:
            if path != record:
                content = wheel.read(path)
                assert (
                    digest
                    == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                )
                assert int(size) == len(content)
        WheelFile(wheel).validate_record(validate_contents=True)


@each_release
def test_version_is_the_same_everywhere(name: str, release: lock.Release) -> None:
    package = LOCK.packages[name]
    with zipfile.ZipFile(built(release)) as wheel:
        folders = {path.partition("/")[0] for path in wheel.namelist()} - {name}
        assert folders == {f"{name}-{release.local_version}.dist-info"}
        metadata = wheel.read(f"{folders.pop()}/METADATA")
        assert HeaderParser().parsestr(metadata.decode())["Version"] == release.local_version
        assert built(release).with_name(f"{built(release).name}.metadata").read_bytes() == metadata
        if package.version_file is not None:
            assert f'\n__version__ = "{release.local_version}"' in wheel.read(package.version_file).decode()


@each_release
def test_differs_from_upstream_in_the_named_files_only(name: str, release: lock.Release) -> None:
    files = {file.path: file for file in release.files}
    with zipfile.ZipFile(source.fetch(name, release.wheel)) as stock, zipfile.ZipFile(built(release)) as patched:
        for entry in stock.infolist():
            path = entry.filename.replace(
                f"{name}-{release.version}.dist-info/", f"{name}-{release.local_version}.dist-info/"
            )
            before, after = stock.read(entry), patched.read(path)
            if entry.filename in files:
                assert git.blob_id(before) == files[entry.filename].before
                assert git.blob_id(after) == files[entry.filename].after
                assert re.search(rb"(?i)(modified|changed) by modeling-overlay", after), "the notice of section 4(b)"
                compile(after, entry.filename, "exec")
            elif not entry.filename.endswith(("/METADATA", "/RECORD")):
                assert before == after
                assert patched.getinfo(path).compress_size == entry.compress_size, "copied as it lies in the archive"
        sbom = f"{name}-{release.local_version}.dist-info/sboms/modeling-overlay.cdx.json"
        assert set(patched.namelist()) - {
            path.replace(f"{name}-{release.version}.dist-info/", f"{name}-{release.local_version}.dist-info/")
            for path in stock.namelist()
        } == {sbom}
        assert len(patched.namelist()) == len(stock.namelist()) + 1


@each_release
def test_installer_takes_it(name: str, release: lock.Release, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "installer", "--no-compile-bytecode", "--validate-record", "all"]
    subprocess.run([*command, "--destdir", str(tmp_path), str(built(release))], check=True)
    assert len(list(tmp_path.rglob(f"{name}-{release.local_version}.dist-info/RECORD"))) == 1


def pythons() -> list[str]:
    """One interpreter for each Python that is on this machine, beside the one that runs the tests."""
    found = {sys.version_info[:2]: sys.executable}
    folders = [*os.environ.get("PATH", "").split(os.pathsep), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    for minor in (11, 12, 13, 14):
        for folder in folders:
            program = shutil.which(f"python3.{minor}", path=folder)
            works = (
                program
                and subprocess.run([program, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0
            )
            if program and works:
                found.setdefault((3, minor), program)
    return [program for version, program in sorted(found.items()) if version != sys.version_info[:2]]


def apply(folder: Path, interpreter: str, umask: int, time_zone: str, *, clock: str) -> dict[str, str]:
    """What `scripts/apply.sh` makes of the checkout in `folder` with another Python, umask and time zone."""
    out = folder / "out"
    command = [str(variants.ROOT / "scripts" / "apply.sh"), "--root", str(folder / "root"), "--out", str(out)]
    environment = os.environ | {
        "PYTHON": interpreter,
        "TZ": time_zone,
        "PYTHONHASHSEED": clock,
        "SOURCE_DATE_EPOCH": clock,
    }
    subprocess.run(command, env=environment, umask=umask, check=True, cwd=folder)
    return hashes(out)


def hashes(folder: Path) -> dict[str, str]:
    """The sha256 of each file: of the bytes themselves a failure would show hundreds of megabytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def copied_root(folder: Path) -> Path:
    """What the products are made from, copied, so that the checkout's own `overlay/patched/` is left alone."""
    root = folder / "root"
    shutil.copytree(variants.ROOT / "patches", root / "patches")
    shutil.copytree(
        variants.ROOT / "overlay", root / "overlay", ignore=shutil.ignore_patterns("patched", "__pycache__")
    )
    for name in ("upstream.lock", *overlay_wheel.SOURCES):
        shutil.copy(variants.ROOT / name, root)
    return root


def test_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    others = pythons()
    one, two = tmp_path / "one", tmp_path / "another folder, né"
    shutil.copytree(copied_root(one), two / "root")
    for file in (two / "root").rglob("*"):
        file.chmod(0o755)  # as on a file system without modes
    first = apply(one, sys.executable, 0o022, "UTC", clock="1")
    second = apply(two, others[-1] if others else sys.executable, 0o077, "Asia/Kolkata", clock="2")
    assert first == second
    assert first == hashes(variants.products())
    assert sorted(first) == [
        "constraints.txt",
        *(f"{variants.overlay_wheel().name}{suffix}" for suffix in ("", ".metadata")),
        "simple/index.html",
        "simple/modeling-overlay/index.html",
        "simple/transformer-engine/index.html",
        "simple/transformers/index.html",
        *sorted(
            f"{release.built.file}{suffix}" for _, release in DELIVERED if release.built for suffix in ("", ".metadata")
        ),
    ]
    assert modes(one / "root" / "overlay" / "patched") == {0o644}
    if not others:
        pytest.skip("same bytes under a second Python version: only one Python is on this machine")


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
