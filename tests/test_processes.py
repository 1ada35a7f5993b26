"""What a process has started ends with it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from overlay import processes
from tests.variants import run_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by /proc which processes run")

CHILD = """
import subprocess, sys
code = "import time; taken = bytearray(b'x') * (400 << 20); print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, file=sys.stderr, flush=True)
sys.exit(3) if sys.argv[1] == "fail" else child.wait()
"""
"""What it has started has so much memory that the kernel takes a while to end it."""


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for init to notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_none_is_left_behind_by_what_is_killed() -> None:
    command = [sys.executable, "-c", CHILD, "hang"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    with process.stderr:
        pid = int(process.stderr.readline())
        processes.kill_group(process)
    assert not alive(pid)


def test_none_is_left_behind_by_what_fails() -> None:
    found, said = run_group([sys.executable, "-c", CHILD, "fail"], dict(os.environ), timeout=600)
    assert found == 3
    assert not alive(int(said))


def test_what_takes_too_long_is_killed() -> None:
    """However far it has come by then."""
    assert run_group(["sleep", "600"], dict(os.environ), timeout=0.1) == (None, "")


def test_what_is_interrupted_while_it_starts_does_not_stay() -> None:
    """As Ctrl-C where a loaded machine takes its time: the child is the other program before this process goes on."""
    ours, theirs = os.pipe()

    def interrupt() -> None:
        os.write(theirs, f"{os.getpid()}\n".encode())
        os.kill(os.getppid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            processes.start(["sleep", "3600"], preexec_fn=interrupt)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(theirs)
    with os.fdopen(ours) as told:
        assert not alive(int(told.read()))


@pytest.mark.parametrize("step", [1, 3], ids=["before", "after"])
def test_signals_are_handled_as_before_also_where_one_comes_while_that_is_arranged(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The first handler has been exchanged then, or put back; the next one has not."""
    number = (signal.SIGTERM, signal.SIGINT)[step > 1]
    handlers = {one: signal.signal(one, signal.default_int_handler) for one in (signal.SIGINT, signal.SIGTERM)}
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # so that two are exchanged
    exchange, popen = signal.signal, subprocess.Popen
    steps: list[int] = []
    started: list[int] = []

    def exchanging(which: int, handler: Any) -> Any:
        found = exchange(which, handler)
        steps.append(which)
        if len(steps) == step:
            signal.raise_signal(number)
        return found

    def starting(*arguments: Any, **options: Any) -> Any:
        process = popen(*arguments, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", starting)
    monkeypatch.setattr(signal, "signal", exchanging)
    try:
        with pytest.raises(KeyboardInterrupt):
            processes.start(["sleep", "3600"])
        assert {signal.getsignal(one) for one in handlers} == {signal.default_int_handler}
        assert not any(map(alive, started))
    finally:
        monkeypatch.undo()
        for pid in filter(alive, started):
            os.kill(pid, signal.SIGKILL)
        for one, handler in (*handlers.items(), (signal.SIGHUP, hangup)):
            signal.signal(one, handler)


def test_what_has_ended_and_is_waited_for_by_nobody_does_not_run() -> None:
    """As below an init that waits for nobody, in a container."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os._exit(0)
    try:
        while alive(pid):
            time.sleep(0.001)
        os.killpg(pid, 0)  # there still is such a group
        assert not processes._runs(pid)
    finally:
        os.waitpid(pid, 0)
