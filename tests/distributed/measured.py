"""What the workers of `parallel` measured, in words that a test can write down."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from tests.variants import Variant, installed, run

LOST = 0.1
"""Relative error of gradients of which a part is missing."""


class Mode(TypedDict):
    """Relative errors against the same without checkpointing and against the whole model; layers a forward."""

    same: float
    whole: float
    recomputed: float


Row = TypedDict(
    "Row",
    {
        "ranks": int,
        "set-up": str,
        "schedule": str,
        "not checkpointed": float | str,
        "reentrant": Mode | str,
        "non-reentrant": Mode | str,
    },
)
"""A schedule of a set-up; a string is the name of an exception."""


class Measured(TypedDict):
    transformers: str
    torch: str
    rows: list[Row]


@dataclass(frozen=True)
class Expected:
    """What a set-up gives, in words, for each schedule: the reentrant mode's and the non-reentrant mode's.

    `exact`: bit for bit the gradients of no checkpointing. `rounding`: within `rounding` of them. Both are also within
    `whole` of the whole model's, and every layer is recomputed once. `lost`: a part of the gradients is missing.
    """

    schedules: Mapping[str, tuple[str, str]]
    whole: float = 1e-5
    rounding: float = 1e-6
    recomputed: int = 3


def columns(
    worker: Path, variants: Sequence[Variant], environment: str = "train", torch: str = "2.13"
) -> dict[Variant, Measured]:
    """What a worker measured with each variant, two at a time."""
    for variant in variants:
        installed(variant)  # builds and installs, which must not happen twice at once
    with ThreadPoolExecutor(2) as pool:
        results = [
            pool.submit(run, worker, variant=variant, environment=environment, torch=torch) for variant in variants
        ]
        return {variant: result.result() for variant, result in zip(variants, results, strict=True)}


def words(measured: Measured, ranks: int, set_up: str, expected: Expected) -> dict[str, tuple[str, str]]:
    """What was measured, as `Expected.schedules` says it, or with the figure that does not fit."""
    return {
        row["schedule"]: (
            _word(row["reentrant"], row["not checkpointed"], expected),
            _word(row["non-reentrant"], row["not checkpointed"], expected),
        )
        for row in measured["rows"]
        if (row["ranks"], row["set-up"]) == (ranks, set_up)
    }


def _word(mode: Mode | str, plain: float | str, expected: Expected) -> str:
    if isinstance(mode, str):
        return mode
    if isinstance(plain, str) or not plain <= expected.whole:
        return f"without checkpointing {plain} from the whole model"
    if mode["recomputed"] != expected.recomputed:
        return f"{mode['recomputed']} layers recomputed a forward"
    if LOST < mode["same"] < math.inf:
        return "lost"
    if not mode["whole"] <= expected.whole:
        return f"{mode['whole']} from the whole model"
    if mode["same"] == 0:
        return "exact"
    return "rounding" if mode["same"] <= expected.rounding else f"{mode['same']} from the same without checkpointing"
