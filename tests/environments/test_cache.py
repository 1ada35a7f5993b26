"""The cache folder and its locks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from overlay import cache
from overlay.errors import OverlayError
from tests.variants import ROOT

HOLD = """
import sys
from overlay import cache
with cache.locked(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(name: str) -> subprocess.Popen[str]:
    """A process that holds a lock until its standard input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, name],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_folder_is_where_xdg_cache_home_says(home: Path) -> None:
    assert cache.folder() == home / "cache" / "modeling-overlay"


@pytest.mark.parametrize("value", ["", "relative/cache"])
def test_one_that_is_not_absolute_is_ignored(value: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache.folder() == home / ".cache" / "modeling-overlay"


def test_on_macos_it_is_in_library(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.folder() == home / "Library" / "Caches" / "modeling-overlay"


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(OverlayError, match="set HOME or XDG_CACHE_HOME"):
        cache.folder()


def test_a_folder_that_cannot_be_made(home: Path) -> None:
    (home / "file").touch()
    with pytest.raises(OverlayError, match=r"the cache folder .*file/cache cannot be made \(Not a directory\)"):
        cache.make(home / "file" / "cache")


def test_a_lock_that_cannot_be_opened(home: Path) -> None:
    (home / "cache" / "modeling-overlay" / "locks" / "a.lock").mkdir(parents=True)
    with pytest.raises(OverlayError, match=r"a\.lock cannot be opened \(Is a directory\)"), cache.locked("a"):
        pass


def test_the_second_waits_says_so_once_and_goes_on() -> None:
    first = holder("a")
    assert line(first.stdout) == "held\n"
    second = holder("a")
    assert line(second.stderr) == "overlay: another process holds 'a'; waiting for it\n"
    assert second.poll() is None
    first.communicate("")
    assert second.communicate("") == ("held\n", "")


def test_a_killed_holder_lets_go() -> None:
    first = holder("a")
    assert line(first.stdout) == "held\n"
    first.kill()
    first.communicate()
    assert holder("a").communicate("", timeout=600) == ("held\n", "")


def test_other_locks_are_free() -> None:
    first = holder("a")
    assert line(first.stdout) == "held\n"
    assert holder("b").communicate("", timeout=600) == ("held\n", "")
    first.communicate("")
