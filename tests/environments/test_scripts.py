"""`scripts/apply.sh`: finds a Python, makes its environment once, and is quick from then on."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests import __main__ as suites
from tests.environments.conftest import Checkout, make_checkout
from tests.variants import ROOT


def programs(folder: Path, *names: str) -> Path:
    """A folder for PATH with what the scripts use, and nothing else."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


TOOLS = ("bash", "cat", "dirname", "readlink", "git")


def broken(folder: Path, name: str) -> None:
    """A program of that name that does not run, as a version manager leaves one behind."""
    (folder / name).write_text("#!/bin/sh\necho 'no such version' >&2\nexit 127\n", "utf-8")
    (folder / name).chmod(0o755)


def one_line(said: str) -> str:
    """stderr, which has to be one line of ours."""
    assert said.count("\n") == 1, said
    assert said.startswith("overlay: "), said
    return said


@dataclass(frozen=True)
class Made:
    """A checkout after its first command, and what that one said."""

    checkout: Checkout
    path: str
    """The PATH on which it found its Python."""

    code: int
    out: str
    said: str

    @property
    def prefix(self) -> str:
        return str(json.loads(self.out)[3])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Called through a link, where the only Python that runs is the last that is looked for."""
    folder = tmp_path_factory.mktemp("made")
    checkout = make_checkout(folder)
    link = folder / "a link"
    link.symlink_to(checkout.root / "scripts" / "apply.sh")
    path = programs(folder / "programs", *TOOLS)
    for name in ("python3", "python3.14", "python3.13", "python3.12"):
        broken(path, name)
    (path / "python3.11").symlink_to(sys.executable)
    result = checkout.run("--out", "two words", script=link, PATH=str(path), PYTHON="")
    return Made(checkout, str(path), *result)


def test_it_makes_the_environment_says_so_and_goes_on(made: Made) -> None:
    assert made.code == 0, made.said
    assert json.loads(made.out)[:3] == [["apply", "--out", "two words"], str(made.checkout.root.parent), "1.0"]
    first, last = made.said.splitlines()
    assert first == f"overlay: making the environment queue (a package for the tests; at once) in {made.prefix}"
    assert last.startswith("overlay: made the environment queue in ")


def test_the_second_time_it_starts_no_python_to_find_the_environment(made: Made, tmp_path: Path) -> None:
    bare = programs(tmp_path / "bare", *TOOLS)
    again = made.checkout.run("--out", "two words", PATH=str(bare), PYTHON="")
    assert again == (0, made.out, "")


def test_sh_before_it_is_no_other_shell(made: Made) -> None:
    """As many type it; the `sh` of Debian and Ubuntu is none that could read it."""
    script = made.checkout.root / "scripts" / "apply.sh"
    environment = {**made.checkout.environment, "PATH": made.path, "PYTHON": ""}
    shell = shutil.which("dash") or shutil.which("sh") or "/bin/sh"
    command = [shell, str(script), "--out", "two words"]
    done = subprocess.run(
        command, cwd=made.checkout.root.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, made.out, "")


def test_other_pins_make_another_environment_and_the_first_one_stays(made: Made) -> None:
    made.checkout.pin("2.0")
    code, out, said = made.checkout.run(PATH=made.path, PYTHON="")
    assert (code, json.loads(out)[2]) == (0, "2.0"), said
    assert json.loads(out)[3] != made.prefix
    made.checkout.pin("1.0")
    code, out, said = made.checkout.run(PATH=made.path, PYTHON="")
    assert (code, json.loads(out)[2:], said) == (0, ["1.0", made.prefix], "")


@contextlib.contextmanager
def silent_index() -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """A server that answers nothing, and what has pip wait for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(600)
        index = {"PIP_INDEX_URL": f"http://127.0.0.1:{server.getsockname()[1]}/", "PIP_TIMEOUT": "3600"}
        yield server, {"PIP_NO_INDEX": "", "PIP_FIND_LINKS": "", "PIP_RETRIES": "0", **index}


def test_after_a_kill_the_next_one_waits_for_what_is_still_running_and_makes_it_again(checkout: Checkout) -> None:
    command = [sys.executable, "-P", "-m", "overlay.environments", "queue"]
    with silent_index() as (server, settings):
        environment = {**checkout.environment, **settings, "PYTHONPATH": str(checkout.root)}
        killed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        connection, _ = server.accept()
        killed.kill()  # itself alone: the installer that it had started goes on
        killed.wait()
        (home,) = checkout.cache.glob("environments/queue-*/")
        (home / "left behind").touch()

        both = [checkout.start(), checkout.start()]
        for process in both:
            assert process.stderr is not None
            assert process.stderr.readline().endswith("; waiting for it\n")
        connection.close()
    results = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert [json.loads(out)[2:] for out, _ in results] == [["1.0", str(home)]] * 2
    assert not (home / "left behind").exists()
    assert "".join(said for _, said in results).count("making the environment") == 1


def test_no_network(checkout: Checkout) -> None:
    index = "http://127.0.0.1:9/"  # the discard port: nobody listens there
    code, _, said = checkout.run(
        PIP_NO_INDEX="", PIP_FIND_LINKS="", PIP_INDEX_URL=index, PIP_RETRIES="1", PIP_TIMEOUT="1"
    )
    assert code == 1
    assert "(a package index did not answer: check the network, " in one_line(said.split("\n", 1)[1])


def test_a_full_disk(checkout: Checkout) -> None:
    # A limit on the size of a file does to a writer what a full disk does.
    command = f'ulimit -f 64; exec "{checkout.root}/scripts/apply.sh"'
    done = subprocess.run(
        ["bash", "-c", command], env=dict(checkout.environment), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "the environment queue cannot be made: " in one_line(done.stderr.split("\n", 1)[1])
    assert checkout.run()[0] == 0


def test_a_cache_folder_that_cannot_be_made(checkout: Checkout) -> None:
    code, _, said = checkout.run(XDG_CACHE_HOME="/dev/null/cache")
    assert code == 1
    assert "/dev/null/cache/modeling-overlay" in one_line(said)
    assert "XDG_CACHE_HOME" in said


def test_no_python(checkout: Checkout, tmp_path: Path) -> None:
    bare = programs(tmp_path / "bare", *TOOLS)
    broken(bare, "python3")
    code, _, said = checkout.run(PATH=str(bare), PYTHON="")
    assert (code, one_line(said)) == (
        1,
        "overlay: no Python 3.11 or later was found on PATH: install one, or set PYTHON to its path\n",
    )


def test_a_chosen_python_that_does_not_run(checkout: Checkout, tmp_path: Path) -> None:
    broken(tmp_path, "python")
    code, _, said = checkout.run(PYTHON=str(tmp_path / "python"))
    assert code == 1
    assert f"PYTHON is {tmp_path / 'python'}, which is no Python 3.11 or later that runs" in one_line(said)


def test_no_git(checkout: Checkout, tmp_path: Path) -> None:
    bare = programs(tmp_path / "bare", *TOOLS[:-1])
    code, _, said = checkout.run(PATH=str(bare))
    assert (code, one_line(said)) == (1, "overlay: git was not found on PATH: install it\n")


@pytest.mark.parametrize(
    ("arguments", "to_pytest"),
    [
        (["-k", "fsdp2"], ["-k", "fsdp2"]),
        (["--collect-only"], ["--collect-only"]),
        (["fsdp2", "--torch", "2.11"], ["tests/distributed/test_fsdp2.py", "--torch", "2.11"]),
    ],
)
def test_the_first_word_of_test_sh_may_name_a_suite(
    arguments: list[str], to_pytest: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    calls = []

    def pytest_main(given: list[str]) -> int:
        calls.append((given, Path.cwd()))
        return 3

    monkeypatch.setattr(pytest, "main", pytest_main)
    assert suites.main(arguments) == 3
    assert calls == [(to_pytest, ROOT)]


@pytest.mark.parametrize(("first", "second", "code"), [(0, 0, 0), (0, 1, 1), (1, 0, 1), (2, 0, 2)])
def test_what_measures_time_runs_after_everything_else(
    first: int, second: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, calls = [first, second], []

    def pytest_main(given: list[str]) -> int:
        calls.append(given)
        return codes[len(calls) - 1]

    monkeypatch.setattr(pytest, "main", pytest_main)
    monkeypatch.chdir("/")
    assert suites.main(["--delivery=overlay"]) == code
    side_by_side = [f"--numprocesses={suites.PROCESSES}", "--dist=loadfile", "-m", "not alone"]
    expected = [[*side_by_side, "--delivery=overlay"], ["-m", "alone", "--delivery=overlay"]]
    assert calls == expected[: 1 if first == 2 else 2]


def test_temporary_files_go_with_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of processes that a test kills; and all is as before."""
    made: list[Path] = []

    def pytest_main(given: list[str]) -> int:
        made.append(Path(tempfile.mkdtemp()))
        made.append(Path(subprocess.check_output(["mktemp"], text=True).strip()))
        return 0

    monkeypatch.setattr(pytest, "main", pytest_main)
    monkeypatch.chdir("/")
    before = tempfile.gettempdir(), dict(os.environ)
    assert suites.main(["--collect-only"]) == 0
    assert [path.exists() for path in made] == [False, False]
    assert (tempfile.gettempdir(), dict(os.environ)) == before


def test_pip_settings_that_would_install_elsewhere_are_left_out(checkout: Checkout, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    code, out, said = checkout.run(PIP_TARGET=str(elsewhere), PIP_USER="0", PIP_DRY_RUN="1")
    assert (code, elsewhere.exists()) == (0, False), said
    assert out


def test_an_environment_that_pip_left_empty_is_not_complete(checkout: Checkout, tmp_path: Path) -> None:
    settings = tmp_path / "pip.conf"
    settings.write_text(f"[install]\ntarget = {tmp_path / 'elsewhere'}\n", "utf-8")
    code, _, said = checkout.run(PIP_CONFIG_FILE=str(settings))
    assert code == 1
    assert said.splitlines()[-1].startswith("overlay: the environment queue cannot be made: pip said that it installed")
    assert checkout.run()[0] == 0


def test_variables_of_another_python_do_no_harm(checkout: Checkout) -> None:
    code, out, said = checkout.run(PYTHONHOME="/nowhere", PYTHONPLATLIBDIR="nowhere", PYTHONINSPECT="1")
    assert code == 0, said
    assert out


def test_a_misspelt_suite_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert suites.main(["speeed"]) == 2
    said = capsys.readouterr().err
    assert "expected a suite (fsdp2, gpu, overhead, speed, startup, te, upstream) or a path, found 'speeed'" in said


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by /proc which processes run")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_who_stops_it_while_it_makes_the_environment_stops_the_installer(
    checkout: Checkout, number: signal.Signals
) -> None:
    with silent_index() as (_, settings):  # so that it is not done before the signal
        process = replace(checkout, environment={**checkout.environment, **settings}).start()
        while not list(checkout.cache.glob("environments/queue-*/lib*/python*/site-packages/pip")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=600)
    assert (process.returncode, said.splitlines()[-1]) == (
        130,
        "overlay: interrupted: the environment is made anew by the next run",
    )
    place = os.fsencode(checkout.cache)
    running = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            running.append(path.read_bytes())
    assert not [command for command in running if place in command]
