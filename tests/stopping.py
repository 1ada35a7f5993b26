"""Whoever stops `scripts/test.sh`, by Ctrl-C, by `kill` or by closing the terminal, stops all that it has started.

What runs in this process unwinds, so that temporary files go; so do the processes that share the tests (pytest-xdist,
see conftest.py). Other processes are told to end, and what still runs after `GRACE` is killed, processes
with a session of their own too, and such whose parent has gone: prctl(2), PR_SET_CHILD_SUBREAPER. Without /proc, which
Linux alone has, there is the unwinding, which kills the processes that a test waits for.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

GRACE = 30.0
"""Seconds for cleaning up."""

_PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[list[int]]:
    """SIGINT, SIGTERM and SIGHUP (if nohup has not turned it off) raise KeyboardInterrupt, once, and end with the block
    what was started. Gives a list, which has the signal then."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    received: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        if received:  # it is cleaning up, which does not take long
            return
        received.append(number)
        if Path("/proc/self/stat").exists():
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _send(signal.SIGTERM)
        killer = threading.Timer(GRACE, _kill)
        killer.daemon = True
        killer.start()
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield received
    finally:
        if received:
            _kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def in_worker() -> None:
    """In a process that shares the tests SIGTERM, which it is sent then, raises KeyboardInterrupt as well."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _kill() -> None:
    """Kills what this process has started, and what that starts meanwhile."""
    while _send(signal.SIGKILL):
        time.sleep(0.01)


def _send(number: signal.Signals) -> bool:
    """Sends a signal to all descendants of this process; whether there are any."""
    found = _descendants()
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(found)


def _descendants() -> list[int]:
    """The processes that this one has started, and those that these have, without what has ended."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent, *_ = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, ())
    return found[1:]
