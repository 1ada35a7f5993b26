"""A worker's rows: they come as they are put, and how it ended is said in two lines."""

import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overlay.measure import rows
from tests.variants import ROOT

HEAD = "import json, os, signal, sys, time\nfrom overlay.measure import rows\ntold = rows.told()\n"
CHANNEL = "json.loads(os.environ['OVERLAY_ROWS'])['descriptor']"


def read(tmp_path: Path, body: str, told: Any = None, patience: float = 600) -> Iterator[Any]:
    """The rows of a worker that does `body`."""
    worker = tmp_path / "stub_worker.py"
    worker.write_text(HEAD + body, "utf-8")
    return rows.read([sys.executable, "-P", str(worker)], {**os.environ, "PYTHONPATH": str(ROOT)}, told, patience)


def error(tmp_path: Path, body: str, patience: float = 600) -> list[str]:
    """The lines of the error that a worker ends with."""
    with pytest.raises(rows.WorkerError) as raised:
        list(read(tmp_path, body, patience=patience))
    return str(raised.value).splitlines()


def test_rows_come_as_they_are_put(tmp_path: Path) -> None:
    go = tmp_path / "go"
    found = read(tmp_path, "rows.put(1)\nwhile not os.path.exists(told): time.sleep(0.02)\nrows.done()", str(go))
    assert next(found) == 1  # the second is not there before this one was read
    go.touch()
    assert list(found) == []


def test_what_is_asked_and_what_is_answered_may_be_anything_that_json_writes(tmp_path: Path) -> None:
    asked = {"cases": ["a", None, 1.5, "\x1b[31m\nü"]}
    (again, large, *many) = read(
        tmp_path, "rows.put(told)\nrows.put('x' * 3_000_000)\nfor i in range(2000): rows.put(i)\nrows.done()", asked
    )
    assert again == asked
    assert large == "x" * 3_000_000
    assert many == list(range(2000))


def test_what_a_worker_prints_is_no_row_and_not_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "print('{}')\nsys.stderr.write('3\\n')\nos.system('echo 4')\nrows.put(1)\nprint(2)\nrows.done()"
    assert list(read(tmp_path, body)) == [1]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("body", "how", "last"),
    [
        ("import no_such_library", "ended with exit status 1 before it was done", "No module named 'no_such_library'"),
        ("rows.put(1)\nsys.exit('no GPU is left')", "ended with exit status 1 before it was done", "no GPU is left"),
        ("rows.put(1)", "ended with exit status 0 before it was done", None),
        (f"os.write({CHANNEL}, b'[1, 2')", "ended with exit status 0 before it was done", None),
        (f"os.write({CHANNEL}, b'hello\\n')", "gave b'hello' as an answer, which is no JSON", None),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "was killed (SIGKILL, as when memory runs out) before it was done",
            None,
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed (SIGSEGV) before it was done", None),
    ],
    ids=["an import", "an exit", "no end", "half a row", "no JSON", "killed", "a fault in native code"],
)
def test_how_a_worker_ended(tmp_path: Path, body: str, how: str, last: str | None) -> None:
    first, *said = error(tmp_path, body)
    assert first == how
    assert last is None or said[-1].endswith(last)


def test_who_reads_is_told_when_a_worker_has_met_others(tmp_path: Path) -> None:
    worker = tmp_path / "stub_worker.py"
    worker.write_text(f"{HEAD}rows.put(1)\nrows.met()\nrows.put(2)\nrows.done()", "utf-8")
    seen: list[Any] = []
    command, variables = [sys.executable, "-P", str(worker)], {**os.environ, "PYTHONPATH": str(ROOT)}
    for row in rows.read(command, variables, None, 600, lambda: seen.append("met")):
        seen.append(row)
    assert seen == [1, "met", 2]


def test_a_worker_that_has_lost_others_is_ended(tmp_path: Path) -> None:
    """Whatever it does meanwhile: it may hang in a connection to them."""
    with pytest.raises(rows.LostError, match="rank 1 did not come"):
        list(read(tmp_path, "rows.put(1)\nrows.lost('rank 1 did not come')\ntime.sleep(3600)"))


def test_a_worker_that_is_silent_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 0.0, 1000.0])  # the wait for the first row begins, and goes on; for the second one
    monkeypatch.setattr(rows, "time", SimpleNamespace(monotonic=clock.__next__))
    body = "sys.stderr.write(f'{os.getpid()}\\n')\nsys.stderr.flush()\nrows.put(1)\ntime.sleep(3600)"
    first, pid = error(tmp_path, body)
    assert first == "took more than 600 s for one answer"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_the_patience_is_for_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rows, "time", SimpleNamespace(monotonic=lambda: clock.now))
    found = []
    for row in read(tmp_path, "for i in range(4):\n    rows.put(i)\n    time.sleep(0.2)\nrows.done()"):
        clock.now += 500
        found.append(row)
    assert found == [0, 1, 2, 3]


def test_a_worker_that_closes_its_channel_and_stays_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_LAST_WORDS", 0.5)
    assert error(tmp_path, f"os.close({CHANNEL})\ntime.sleep(3600)") == ["closed its channel before it was done"]


def test_of_much_that_was_said_the_end_is_there(tmp_path: Path) -> None:
    _, *said = error(tmp_path, "print('noise\\n' * 100_000, flush=True)\nsys.exit('the reason')")
    assert said[-1] == "the reason"
    assert sum(map(len, said)) < 5000


def test_who_reads_no_further_leaves_no_worker(tmp_path: Path) -> None:
    found = read(tmp_path, "rows.put(os.getpid())\ntime.sleep(3600)")
    pid = next(found)
    del found
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_a_worker_has_started_ends_with_it(tmp_path: Path) -> None:
    held = tmp_path / "held"
    body = (
        "import fcntl, subprocess\nfile = open(told, 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "subprocess.Popen(['sleep', '3600'], pass_fds=[file.fileno()])\nrows.put(1)\nrows.done()"
    )
    assert list(read(tmp_path, body, str(held))) == [1]
    with held.open() as file:  # the kernel lets go of the lock when the last who has the file has ended
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
