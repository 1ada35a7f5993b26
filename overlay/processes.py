"""The end of a process and of what it has started. Standard library only."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Seconds that the kernel has to end what is killed: more than it takes under load, for a process whose disk hangs."""


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kills a process that was started with `start_new_session`, and its process group; when this returns none of them
    runs. What ended already is no error.

    kill(2) returns before the kernel has taken a process down, and only for one's own child is there a wait. So
    without this what a killed child had started still writes files while its caller cleans up.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + PATIENCE
    while _runs(process.pid) and time.monotonic() < deadline:
        time.sleep(0.001)


def _runs(group: int) -> bool:
    """Whether a process of the group runs. Not one that has ended and that its parent, perhaps an init that never does,
    has not waited for."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # macOS says the latter where all have ended
        return False
    if not Path("/proc/self/stat").exists():
        return True
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, found, *_ = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(found) == group and state not in "ZX":
                return True
    return False
