"""The build of TransformerEngine's extension: what is kept, what is said, and what goes wrong. Nothing is compiled."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overlay import progress
from overlay.errors import OverlayError
from tests import signals
from tests.transformer_engine.native import extension
from tests.variants import ROOT

WHEEL = "transformer_engine_torch-1.0-cp311-cp311-linux_x86_64.whl"

BUILDS = f"""
env | sort > "$folder/variables"
echo "$@" >> "$folder/builds"
while [[ $1 != --wheel-dir ]]; do shift; done
mkdir -p "$2"; echo wheel > "$2/{WHEEL}"
"""
COMPILES = """
echo '[1/2] c++ one.o'
until [[ -e $folder/shown ]]; do sleep 0.05; done
echo '[2/2] c++ two.o'
"""
FAILS = "echo \"one.cpp:3:1: fatal error: nothing.h: No such file\"; echo 'ERROR: Failed building wheel'; exit 1"
HANGS = 'echo $$ > "$folder/running"; sleep 3600'


class Environment:
    """An environment whose Python is a script in the place of `pip wheel`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "te-0123" / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        self.sdist = folder / "transformer_engine_torch-1.0.tar.gz"
        self.sdist.write_bytes(b"sources")
        self.cuda = folder / "te-0123/lib/python3.11/site-packages/nvidia/cu13"
        for name in ("bin/nvcc", "include/cuda_runtime.h", "include/cublas_v2.h", "../cudnn/include/cudnn.h"):
            (self.cuda / name).parent.mkdir(parents=True, exist_ok=True)
            (self.cuda / name).touch()
        self.does(BUILDS)

    def does(self, script: str) -> None:
        self.python.write_text(f"#!/usr/bin/env bash\nfolder={shlex.quote(str(self.folder))}\n{script}", "utf-8")
        self.python.chmod(0o755)

    def built(self) -> Path:
        return extension.built(self.sdist, self.python)

    def builds(self) -> int:
        return len((self.folder / "builds").read_text("utf-8").splitlines())


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MAX_JOBS", "3")
    return Environment(tmp_path)


def test_it_is_built_once_and_shows_that_it_is_alive(
    environment: Environment, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(text: str) -> None:
        progress.say(text)
        if text.startswith("compiled 1 "):
            (environment.folder / "shown").touch()

    monkeypatch.setattr(extension, "say", say)
    monkeypatch.setattr(extension, "EVERY", 0)
    environment.does(COMPILES + BUILDS)
    wheel = environment.built()
    assert wheel.name == WHEEL
    said = capfd.readouterr().err
    assert "with 3 compilers at once (about 7 minutes with 2)" in said
    assert "compiled 1 of 2 files" in said
    assert "built transformer_engine_torch-1.0.tar.gz in " in said
    assert environment.built() == wheel
    assert environment.builds() == 1
    assert capfd.readouterr().err == ""
    assert sorted(path.name for path in wheel.parent.parent.iterdir()) == [wheel.parent.name]


def test_other_sources_another_environment_and_another_compiler_are_built_anew(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = {environment.built()}
    environment.sdist.write_bytes(b"other sources")
    wheels.add(environment.built())
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho compiler 99\n", "utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    wheels.add(environment.built())
    environment.python = (tmp_path / "te-0123").rename(tmp_path / "te-4567") / "bin" / "python"
    wheels.add(environment.built())
    assert len(wheels) == environment.builds() == 4


def test_the_callers_settings_change_nothing(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("CFLAGS", "CXXFLAGS", "CPATH", "LIBRARY_PATH", "LDSHARED", "NINJA_STATUS", "DIST_EXTRA_CONFIG")
    for name in (*flags, "NVTE_UB_WITH_MPI", "CUDA_HOME", "PYTHONPATH", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, "the caller's")
    environment.built()
    variables = dict(
        line.split("=", 1) for line in (environment.folder / "variables").read_text("utf-8").splitlines() if "=" in line
    )
    assert "the caller's" not in variables.values()
    assert variables["CUDA_HOME"] == str(environment.cuda)
    assert variables["CPLUS_INCLUDE_PATH"].split(os.pathsep) == [
        str(environment.cuda / "include"),
        str(environment.cuda.parent / "cudnn" / "include"),
    ]


def test_without_a_compiler_it_says_what_to_install(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OverlayError, match=r"expected a C\+\+ compiler, found no no-such-compiler on PATH: install"):
        environment.built()


def test_what_is_no_compiler_is_refused_before_anything_is_built(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(OverlayError, match="expected false to say its version, found exit status 1: set CXX"):
        environment.built()


def test_a_compiler_may_have_arguments(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env LC_ALL=C c++")
    environment.built()
    assert "CXX=/usr/bin/env LC_ALL=C c++" in (environment.folder / "variables").read_text("utf-8").splitlines()


def test_a_wheel_that_somebody_took_out_is_built_anew(environment: Environment) -> None:
    environment.built().unlink()
    assert environment.built().is_file()
    assert environment.builds() == 2


def test_an_interpreter_that_does_not_run_is_one_line(environment: Environment) -> None:
    environment.python.chmod(0o644)
    with pytest.raises(OverlayError, match=r"1\.0\.tar\.gz cannot be built in .*extensions: Permission denied: mend"):
        environment.built()


@pytest.mark.parametrize("part", ["bin/nvcc", "include/cuda_runtime.h"])
def test_without_a_cuda_toolkit_it_says_where_it_comes_from(environment: Environment, part: str) -> None:
    (environment.cuda / part).unlink()
    with pytest.raises(OverlayError, match=rf"expected a CUDA toolkit at .*cu13, found no {part}: remove .*te-0123"):
        environment.built()


def test_a_failure_is_quoted_in_one_line_and_leaves_nothing(environment: Environment) -> None:
    environment.does(FAILS)
    with pytest.raises(OverlayError) as raised:
        environment.built()
    said = str(raised.value)
    assert said.startswith("transformer_engine_torch-1.0.tar.gz cannot be built: one.cpp:3:1: fatal error: nothing.h")
    log = Path(said.rpartition(" ")[2])
    assert "Failed building wheel" in log.read_text("utf-8")
    assert list(log.parent.iterdir()) == [log]
    environment.does(BUILDS)
    assert environment.built().is_file()
    assert not log.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_build_stops_no_later_one(environment: Environment, number: signal.Signals) -> None:
    environment.does(HANGS)
    code = f"""
import pathlib
from tests.transformer_engine.native import extension
extension.built(pathlib.Path({str(environment.sdist)!r}), pathlib.Path({str(environment.python)!r}))
"""
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=variables, stderr=subprocess.DEVNULL, preexec_fn=signals.heard
    )
    running = environment.folder / "running"
    while not (running.is_file() and running.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(600)
    child = int(running.read_text())
    if number == signal.SIGINT:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    else:
        os.killpg(child, signal.SIGKILL)  # it holds the lock: a second build waits for it
    environment.does(BUILDS)
    assert environment.built().is_file()
