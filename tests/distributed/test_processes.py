"""The processes of a test end with it, however it ends."""

import os
import sys
import time
from pathlib import Path

import pytest

from tests.variants import run_group

CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, file=sys.stderr, flush=True)
if sys.argv[1] == "hang":
    child.wait()
sys.exit(3)
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for init to notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by /proc which processes run")
@pytest.mark.parametrize(("ending", "code"), [("hang", None), ("fail", 3)])
def test_none_is_left_behind(ending: str, code: int | None) -> None:
    found, said = run_group([sys.executable, "-c", CHILD, ending], dict(os.environ), timeout=2)
    assert found == code
    deadline = time.monotonic() + 10  # the kernel takes its time over a kill
    while alive(int(said)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(int(said))
