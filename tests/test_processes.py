"""What a process has started ends with it, however it ends."""

import os
import sys
import time
from pathlib import Path

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
if sys.argv[1] == "hang":
    child.wait()
sys.exit(3)
"""
"""What it has started has so much memory that the kernel takes a while to end it."""


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for init to notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(("ending", "code"), [("hang", None), ("fail", 3)])
def test_none_is_left_behind(ending: str, code: int | None) -> None:
    found, said = run_group([sys.executable, "-c", CHILD, ending], dict(os.environ), timeout=5)
    assert found == code
    assert not alive(int(said))


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
