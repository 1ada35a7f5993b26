"""Bytes are counted exactly, block by block, and parity notices what it is there for."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest

from overlay import environments
from tests.variants import ROOT, run_worker

WORKER = Path(__file__).with_name("counting_worker.py")
MB = 1_000_000
"""Bytes of each tensor there."""


@functools.cache
def counted() -> dict[str, Any]:
    python = environments.python("train-2.13")
    found: dict[str, Any] = run_worker(WORKER, on="modules", interpreter=python, laid_over=[ROOT])
    return found


def test_a_peak_is_counted_to_the_byte() -> None:
    found = counted()["copies"]
    assert (found["peak"], found["left"], found["highest point"]) == (3 * MB, 0, 3 * MB)


def test_what_a_step_leaves() -> None:
    assert (counted()["kept"]["peak"], counted()["kept"]["left"]) == (MB, MB)


def test_a_curve_of_many_events_keeps_its_peak() -> None:
    found = counted()["many"]
    assert found["points"] <= 201
    assert found["highest point"] == found["peak"] == MB


def test_gradients_at_the_peak_and_phases() -> None:
    found = counted()["gradients"]
    assert found["gradients_at_peak"] == 2 * MB
    assert found["peak"] == 10 * MB
    assert found["phases"] == ["early", "late"]


def test_a_forward_keeps_what_its_backward_needs() -> None:
    # Six sines, each with its output; or three pairs, each with its output, and in the last one both for a moment
    assert counted()["forward"]["False"]["peak"] == 6 * MB
    found = counted()["forward"]["True"]
    assert found["peak"] - found["left"] == MB
    assert 3 * MB <= found["left"] < 3.1 * MB, "beside the outputs a checkpoint keeps the state of random numbers"


def test_saved_by_block() -> None:
    names = [f"layers.{i}" for i in range(3)]
    without, checkpointed = counted()["saved"]["False"], counted()["saved"]["True"]
    assert without["by block"] == dict.fromkeys(names, 2 * MB)
    assert without["called"] == []
    assert checkpointed["by block"] == dict.fromkeys(names, MB)
    assert checkpointed["called"] == names


def test_a_storage_is_counted_once() -> None:
    assert counted()["storages"] == MB
    assert counted()["parameters"] == 4 * 110


def difference(name: str) -> dict[str, Any]:
    found: dict[str, Any] = counted()["parity"][name]
    return found


def test_the_same_is_exact() -> None:
    assert difference("the same") == {
        "exact": True,
        "loss": 0.0,
        "gradient": 0.0,
        "worst": "",
        "metric": 0.0,
        "lost": 0,
    }


@pytest.mark.parametrize(("name", "gradient", "lost"), [("one number", 0.1, 0), ("lost", 1.0, 1), ("gained", 100.0, 0)])
def test_gradients(name: str, gradient: float, lost: int) -> None:
    found = difference(name)
    assert not found["exact"]
    assert found["gradient"] == pytest.approx(gradient)
    assert found["lost"] == lost
    assert found["worst"] == ("none" if name == "gained" else "large")


def test_not_a_number_is_a_difference() -> None:
    assert math.isnan(difference("not a number")["gradient"])


def test_rounding_of_a_gradient_of_nothing_is_none() -> None:
    found = difference("rounding of a gradient of nothing")
    assert not found["exact"]
    assert found["gradient"] < 1e-6


def test_losses_and_metrics() -> None:
    assert difference("loss")["loss"] == pytest.approx(0.02)
    assert difference("metric")["metric"] == pytest.approx(0.01)
