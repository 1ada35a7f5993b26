"""Whether a mode trains as without checkpointing: losses, gradients, and a validation metric."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, equal

SMALL = 1e-3
"""Of the norm of all gradients: a gradient below it is measured by this, as rounding alone makes up those of some
biases (those of keys in attention are 0 in exact arithmetic)."""


@dataclass
class Trained:
    """What a few steps from the same weights gave.

    Attributes:
        losses: of each micro-batch.
        gradients: of the first step, on the CPU, by parameter; None where there is none.
        metrics: name -> value on the validation batch, after the steps.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """Relative differences from `off`; 0 is the same, bit for bit, where `exact` says so.

    Attributes:
        exact: everything is the same, bit for bit.
        loss: the largest of all micro-batches.
        gradient: the largest of all parameters: the norm of the difference, by that of the parameter's gradient, or by
            `SMALL` of the norm of all where that is larger.
        worst: the parameter with that difference; empty where there is none.
        metric: the largest of the metrics.
        lost: parameters that have a gradient without checkpointing, and none with it.
    """

    exact: bool
    loss: float
    gradient: float
    worst: str
    metric: float
    lost: int

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def compare(found: Trained, base: Trained) -> Difference:
    """How far `found` is from `base`, which was trained from the same weights on the same batches."""
    largest, worst, exact, lost = 0.0, "", True, 0
    norms = {name: 0.0 if one is None else float(one.double().norm()) for name, one in base.gradients.items()}
    small = SMALL * sum(norm**2 for norm in norms.values()) ** 0.5
    for name, expected in base.gradients.items():
        one = found.gradients.get(name)
        if one is None and expected is None:
            continue
        if one is not None and expected is not None and equal(one, expected):
            continue
        exact = False
        lost += one is None
        difference = _zero(expected, one) - _zero(one, expected)
        distance = float(difference.double().norm()) / (max(norms[name], small) or 1.0)
        if not distance <= largest:  # NaN as well
            largest, worst = distance, name
    loss = _largest(found.losses, base.losses)
    metric = _largest(list(found.metrics.values()), list(base.metrics.values()))
    same = found.losses == base.losses and found.metrics == base.metrics
    return Difference(exact and same, loss, largest, worst, metric, lost)


def _zero(one: Tensor | None, other: Tensor | None) -> Tensor:
    if one is not None:
        return one
    assert other is not None
    return other.new_zeros(other.shape)


def _largest(found: Sequence[float], base: Sequence[float]) -> float:
    largest = 0.0
    for one, other in zip(found, base, strict=True):
        if one != other:
            distance = abs(one - other) / (abs(other) or 1.0)
            if not distance <= largest:
                largest = distance
    return largest


def worst(answers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """That of the rank with the largest difference."""
    largest = max(answers, key=lambda one: (one["gradient"] != one["gradient"], one["gradient"]))
    return {**largest, "exact": all(one["exact"] for one in answers), "lost": max(one["lost"] for one in answers)}
