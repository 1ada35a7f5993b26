"""The end of a process and of what it has started. Standard library only."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Seconds that the kernel has to end what is killed: more than it takes under load, for a process whose disk hangs."""


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """A process with a process group of its own, for `kill_group`; `options` are those of subprocess.Popen.

    A signal that comes meanwhile is handled when it has started, which is killed where the handler raises: subprocess
    waits until a child is the other program, and an exception in there would leave that running, known to nobody.
    """
    process: subprocess.Popen[Any] | None = None
    came: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other handles signals
        before = {number: signal.getsignal(number) for number in _HANDLED}
        before = {number: handler for number, handler in before.items() if callable(handler)}
    try:
        for number in before:
            signal.signal(number, lambda number, _: came.append(number))
        process = subprocess.Popen(command, start_new_session=True, **options)
    finally:
        try:
            _handle(before)
            for number in came:
                before[number](number, None)
        except BaseException:
            _handle(before)  # one may have raised while the others were still put back
            if process is not None:
                kill_group(process)
            raise
    return process


def _handle(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kills a process that has a process group of its own (`start`), and that group: none of them runs afterwards.
    What ended already is no error.

    kill(2) returns before the kernel has taken a process down, and only for one's own child is there a wait. So
    without this what a killed child had started still writes files while its caller cleans up.
    """
    with contextlib.suppress(*_GONE):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + PATIENCE
    while _runs(process.pid) and time.monotonic() < deadline:
        time.sleep(0.001)


_GONE = (ProcessLookupError, PermissionError)
"""What is said of a group in which none runs; the latter by macOS, where some are not waited for."""


def _runs(group: int) -> bool:
    """Whether a process of the group runs. Not one that has ended and that its parent, perhaps an init that never does,
    has not waited for."""
    try:
        os.killpg(group, 0)
    except _GONE:
        return False
    if not Path("/proc/self/stat").exists():
        return True
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, found, *_ = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(found) == group and state not in "ZX":
                return True
    return False
