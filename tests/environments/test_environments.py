"""The environments that the pins files name, and the folders that are laid over them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from overlay import environments
from overlay.errors import OverlayError
from tests.environments.conftest import make_wheel

FOLDER = Path(environments.__file__).parent
FILES = sorted(FOLDER.rglob("*.txt"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "modeling-overlay"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_pins_are_exact_and_name_no_index(path: Path) -> None:
    comment, *lines = path.read_text("utf-8").splitlines()
    assert comment.startswith("# ")
    for line in lines:
        kind, _, name = line.partition(" ")
        if kind in ("-r", "-c"):
            assert (path.parent / name).is_file()
        else:
            assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)


def test_the_training_environments_differ_in_torch_alone() -> None:
    torch = {"2.11": "2.11.0", "2.13": "2.13.0", "2.14": "2.14.1"}
    for short, version in torch.items():
        lines = environments.pins(f"train-{short}").read_text("utf-8").splitlines()
        assert f"torch=={version}" in lines
        assert {line.partition("==")[0] for line in lines[1:]} == {
            "-r shared/train.txt",
            f"-c shared/torch-{short}.txt",
            "setuptools",
            "torch",
        }


def test_an_unknown_name() -> None:
    with pytest.raises(
        OverlayError, match=r"no environment 'nope': expected one of .*queue, te-2\.14, test, .*train-2\.11,"
    ):
        environments.python("nope")


def test_a_python_that_cannot_make_environments(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(OverlayError, match="python3-venv"):
        environments.python("queue")
    assert not list(cache.glob("environments/*"))


def test_a_command_that_fails_is_quoted_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    said = "Looking\nERROR: No versions\nERROR: No matching distribution found for tiny==3.0\n[notice] new pip\n"
    with pytest.raises(OverlayError) as raised:
        environments._run("tiny", ["sh", "-c", f"printf '{said}'; exit 1"], log, lock=0)
    reason = "No matching distribution found for tiny==3.0"
    assert str(raised.value) == f"tiny cannot be made: {reason}; all that was said is in {log}"
    assert log.read_text("utf-8") == said


def test_a_command_that_cannot_say_that_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is on that disk, too."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(
        OverlayError, match=r"exit status 1 \(no space is left on the disk of .+: free some, or set XDG"
    ):
        environments._run("tiny", ["sh", "-c", "exit 1"], tmp_path / "log", lock=0)


def test_a_wheel_is_unpacked_once_whatever_its_path(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wheel = make_wheel(tmp_path, "1.0")
    home = environments.variant(wheel)
    assert (home / "tiny.py").read_text("utf-8") == "VERSION = '1.0'\n"
    assert (home / "tiny-1.0.dist-info" / "METADATA").is_file()
    assert "installing tiny-1.0-py3-none-any.whl (about 10 s) in " in capfd.readouterr().err

    (tmp_path / "elsewhere").mkdir()
    assert environments.variant(wheel.rename(tmp_path / "elsewhere" / wheel.name)) == home
    assert capfd.readouterr().err == ""


def test_other_bytes_are_another_variant(tmp_path: Path) -> None:
    first = environments.variant(make_wheel(tmp_path, "1.0"))
    with make_wheel(tmp_path, "1.0").open("ab") as wheel:
        wheel.write(b"\0")
    assert environments.variant(tmp_path / "tiny-1.0-py3-none-any.whl") != first


def test_a_wheel_that_pip_does_not_take_leaves_nothing_that_looks_whole(cache: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "1.0")
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:100])
    with pytest.raises(
        OverlayError, match=r"tiny-1\.0-py3-none-any\.whl cannot be made: .*; all that was said is in .*\.log"
    ):
        environments.variant(wheel)
    assert not [path for path in cache.glob("variants/*") if path.is_dir() and path.suffix != ".part"]


def test_what_a_killed_run_left_of_a_variant_is_removed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path, "1.0")

    def killed(what: str, command: list[str], log: Path, lock: int) -> None:
        Path(command[-2]).mkdir()
        (Path(command[-2]) / "left behind").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environments, "_run", killed)
        with pytest.raises(KeyboardInterrupt):
            environments.variant(wheel)
    assert list(cache.glob("variants/*.part/left behind"))
    assert sorted(path.name for path in environments.variant(wheel).iterdir()) == ["tiny-1.0.dist-info", "tiny.py"]
    assert not list(cache.glob("variants/*.part"))


def test_a_wheel_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OverlayError, match=r"none\.whl cannot be read \(No such file or directory\)"):
        environments.variant(tmp_path / "none.whl")


def test_a_wheel_takes_the_place_of_what_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pins = tmp_path / "one.txt"
    pins.write_text("# one package\ntiny==1.0\n", "utf-8")
    monkeypatch.setattr(environments, "pins", lambda name: pins)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    make_wheel(tmp_path, "1.0")
    newer = make_wheel(tmp_path, "2.0")

    def version(python: Path) -> str:
        return subprocess.check_output([python, "-c", "import tiny; print(tiny.VERSION)"], text=True).strip()

    assert [version(environments.python("one")), version(environments.python("one", newer))] == ["1.0", "2.0"]
    capfd.readouterr()
    assert version(environments.python("one", newer)) == "2.0"
    assert capfd.readouterr().err == ""
