"""Workers that take turns: what they answer, how they fail, and that none is left."""

import os
import sys

import pytest

from overlay.measure.turns import TurnError, rounds, turn
from tests.variants import ROOT

WORKER = """
import os, sys, time
from overlay.measure.turns import serve

def fail():
    raise ValueError("no\\nmore")

print("what anybody prints is not in the way", flush=True)
serve({
    "add": lambda a, b: print("here, too") or a + b,
    "fail": fail,
    "end": lambda: sys.exit("gone"),
    "kill": lambda: os.kill(os.getpid(), 9),
    "hang": lambda: time.sleep(600),
})
"""
COMMAND = [sys.executable, "-P", "-c", WORKER]
VARIABLES = os.environ | {"PYTHONPATH": str(ROOT)}


def test_answers() -> None:
    with turn(COMMAND, VARIABLES) as worker:
        assert worker.ask("add", 1, 2) == 3
        with pytest.raises(TurnError, match=r"^ValueError: no$"):
            worker.ask("fail")
        assert worker.ask("add", "a", "b") == "ab"


def test_a_worker_that_ends() -> None:
    with turn(COMMAND, VARIABLES) as worker:
        with pytest.raises(TurnError, match=r"(?s)the worker ended: .*what anybody prints is not in the way.*gone"):
            worker.ask("end")
        with pytest.raises(TurnError, match="the worker ended"):
            worker.ask("add", 1, 2)


def test_a_worker_that_is_killed() -> None:
    with turn(COMMAND, VARIABLES) as worker, pytest.raises(TurnError, match="the worker was killed"):
        worker.ask("kill")


def test_a_worker_that_hangs() -> None:
    with turn(COMMAND, VARIABLES, timeout=1) as worker, pytest.raises(TurnError, match="the worker took more than 1 s"):
        worker.ask("hang")


def test_rounds_go_forwards_and_backwards() -> None:
    assert list(rounds(3, "abc")) == ["abc", "cba", "abc"]
