"""What bench accepts, at the limits, and what it advises."""

from typing import Any

import pytest

from overlay.measure import card, judge
from tests.measure.cards import finding, mode, parity

OFF = mode("off")
GOOD: dict[str, Any] = {"found": 8, "checkpointed": 8, "twice": 0, "findings": []}


def test_what_is_accepted() -> None:
    assert judge.off(mode("reentrant", peak=70, slowdown=1.4, parity=parity(1e-4, 1e-4, 1e-4)), OFF) == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (mode("reentrant", peak=71), "memory is down by 29%, expected at least 30%"),
        (mode("reentrant", peak=102), "memory is up by 2%, expected down by at least 30%"),
        (mode("reentrant", peak=70, slowdown=1.4003), "a step is 40.03% slower, expected at most 40%"),
        (mode("reentrant", peak=70, slowdown=1.41), "a step is 41% slower, expected at most 40%"),
        (mode("reentrant", peak=70, parity=parity(loss=2e-4)), "losses differ from off by 2.0e-04"),
        (
            mode("reentrant", peak=70, parity=parity(gradient=0.5)),
            "gradients differ from off by 5.0e-01 (layers.0.weight), expected at most 1e-04",
        ),
        (mode("reentrant", peak=70, parity=parity(gradient=float("nan"))), "gradients differ from off by nan"),
        (mode("reentrant", peak=70, parity=parity(metric=1e-3)), "metrics differ from off by 1.0e-03"),
        (mode("reentrant", peak=70, parity=parity(lost=3)), "3 parameters have lost their gradient"),
        (
            mode("reentrant", peak=70, granularity=card.Granularity(**GOOD | {"checkpointed": 6})),
            "6 of 8 blocks are checkpointed",
        ),
        (
            mode("reentrant", peak=70, granularity=card.Granularity(**GOOD | {"twice": 2})),
            "2 blocks are checkpointed more than once",
        ),
        (
            mode("reentrant", peak=70, granularity=card.Granularity(**GOOD | {"findings": [finding("warning")]})),
            "in-place-operation: layers.0: `x += 1` changes the argument `x` in place (model.py:7)",
        ),
        (card.Mode(mode="reentrant", outcome="out of memory", message="killed"), "out of memory: killed"),
    ],
)
def test_what_is_off(found: card.Mode, said: str) -> None:
    [line] = judge.off(found, OFF)
    assert line.startswith(said)


def test_an_info_is_not_off() -> None:
    granularity = card.Granularity(**GOOD | {"findings": [finding("info")]})
    assert judge.off(mode("reentrant", peak=70, granularity=granularity), OFF) == []


def test_a_mode_that_fails_is_off_with_what_the_checks_found() -> None:
    granularity = card.Granularity(**GOOD | {"findings": [finding()]})
    failed = card.Mode(mode="reentrant", outcome="failed", message="RuntimeError: modified", granularity=granularity)
    assert [line.partition(":")[0] for line in judge.off(failed, OFF)] == ["failed", "in-place-operation"]


def test_a_loss_that_is_not_finite_is_told_once_and_of_off() -> None:
    """In float16 without a scaler for instance: the modes are not to blame."""
    broken = parity(loss=float("nan"), metric=float("nan")).model_copy(update={"losses": [1.0, float("nan")]})
    off, other = mode("off", parity=broken), mode("reentrant", peak=60, parity=broken)
    assert judge.off(off, off) == [
        "a loss is nan, so that parity cannot be judged: take another --dtype (float32 with --autocast), --optimizer "
        "or --seed"
    ]
    assert judge.off(other, off) == []
    assert judge.best_within([off, other], 70 * 2**20) == other


def test_where_off_does_not_fit_memory_is_not_compared() -> None:
    assert judge.off(mode("reentrant"), card.Mode(mode="off", outcome="out of memory")) == []


def advised(activations: int, optimizer: int, best: float | None = None, **other: bool) -> str:
    """Of a peak of 100."""
    memory = mode("off").memory
    assert memory is not None
    found = memory.model_copy(
        update={"peak": 100, "parameters": 10, "optimizer": optimizer, "activations": activations}
    )
    return "\n".join(judge.advice(found, best, **other))


def test_advice() -> None:
    assert "activations 80%: activations first" in advised(80, 10)
    assert "checkpointing can help" in advised(80, 10)
    assert "checkpointing can help: it works on the activations; it took 30% off" in advised(80, 10, best=0.3)
    assert "checkpointing is of little help; it took 9% off the peak here: what a block" in advised(80, 10, best=0.09)
    assert "another optimizer" not in advised(80, 10)
    assert "checkpointing cannot take 30% off: activations are 20%" in advised(20, 70)
    assert "another optimizer would help: its state is 70%" in advised(20, 70)
    assert "sharding over N ranks (fully_shard) divides the 80%" in advised(20, 70)
    assert "sharding" not in advised(20, 70, sharded=True)


def test_the_best_within_a_budget() -> None:
    modes = [
        mode("off", peak=100),
        mode("reentrant", peak=60, slowdown=1.3),
        mode("every:2", peak=70, slowdown=1.1),
        mode("wrong", peak=50, slowdown=1.0, parity=parity(gradient=0.5)),
        card.Mode(mode="offload", outcome="not available"),
    ]
    found = [judge.best_within(modes, peak * 2**20) for peak in (100, 99, 65, 59)]
    assert [None if one is None else one.mode for one in found] == ["off", "every:2", "reentrant", None]
