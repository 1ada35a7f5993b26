"""Whoever stops `scripts/test.sh` leaves nothing behind: no process, and no temporary file of what ran."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import signals
from tests.test_processes import alive
from tests.variants import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by /proc which processes run")

HANGS = """
import os, subprocess, tempfile

SHELL = "trap '' TERM; sleep 3600 & echo $$ $! >$0.part; mv $0.part $0; wait"

def test_hangs():
    tempfile.mkdtemp()
    with tempfile.TemporaryDirectory():
        subprocess.Popen(["sh", "-c", SHELL, os.environ["PIDS"] + __name__], start_new_session=True)
        subprocess.Popen(["sleep", "3600"], start_new_session=True).wait()
"""
"""A process of its own session that SIGTERM does not end, with a child; another; and a folder that nobody removes."""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "workers"),
    [(signal.SIGTERM, 2), (signal.SIGHUP, 2), (signal.SIGINT, 2), (signal.SIGTERM, 0)],
    ids=["SIGTERM", "SIGHUP", "SIGINT", "SIGTERM-one-process"],
)
def test_all_that_it_has_started_ends(tmp_path: Path, number: signal.Signals, workers: int) -> None:
    tests, pids, temporary = (tmp_path / name for name in ("tests", "pids", "temporary"))
    for folder in (tests, pids, temporary):
        folder.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    for index in range(max(workers, 1)):
        (tests / f"test_{index}.py").write_text(HANGS, "utf-8")
    # Nothing but options: all tests, here those of another folder, in processes that share them
    asked = f"--override-ini=testpaths={tests}" if workers else str(tests)
    variables = {"PIDS": f"{pids}/", "TMPDIR": str(temporary), "PYTEST_ADDOPTS": "-p no:hypothesispytest"}
    process = subprocess.Popen(
        [ROOT / "scripts" / "test.sh", asked],
        env=os.environ | variables | {"PYTEST_DEBUG_TEMPROOT": ""},  # pytest's own go with these, too
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        preexec_fn=signals.heard,
    )
    try:
        until(lambda: len([path for path in pids.iterdir() if not path.suffix]) == max(workers, 1))
        process.send_signal(number)
        said = process.communicate(timeout=600)[0]
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "KeyboardInterrupt" in said
    assert not any(alive(int(pid)) for path in pids.iterdir() for pid in path.read_text("utf-8").split())
    assert [path.name.partition("-of-")[0] for path in temporary.iterdir()] == ["pytest"] * (workers > 0)
