"""Training by what transformers integrates gives, with activation checkpointing, the gradients of training without."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.distributed.measured import Expected, Measured, columns, words
from tests.variants import PATCHED, STOCK, Variant

WORKER = Path(__file__).with_name("integrations_worker.py")

EXACT = ("exact", "exact")
SHORT = {"1 forward": EXACT, "2 forwards": EXACT}
REDUCED = {"1 forward": EXACT, "2 forwards": ("rounding", "exact")}
"""In reentrant mode FSDP2 reduces the gradients of each forward, otherwise those of both forwards at once."""

ZERO3 = Expected(
    {"1 forward": EXACT, "1 forward, next step": EXACT, "2 forwards": ("AssertionError", "exact")},
)
"""DeepSpeed reduces a layer's gradients once a step, but in reentrant mode there are two backwards of it."""

EXPECTED: Mapping[tuple[int, str], Expected] = {
    (1, "quantised to 4 bits"): Expected(SHORT, whole=math.inf),  # a model that is not quantised is another
    (2, "transformers' FSDP2"): Expected(REDUCED),
    (2, "transformers' FSDP2 in bf16"): Expected(REDUCED, whole=2e-2, rounding=2e-3),
    (2, "transformers' tensor parallelism"): Expected(SHORT),
    (2, "ZeRO-3"): ZERO3,
    (2, "ZeRO-3, layers that own parameters"): ZERO3,
    (2, "ZeRO-3, frozen layers"): ZERO3,
}
"""By the number of ranks."""

LOST = {"1 forward": EXACT, "2 forwards": ("lost", "exact")}
ON_STOCK = {(2, "transformers' FSDP2"): LOST, (2, "transformers' FSDP2 in bf16"): LOST}

COLUMNS = [*STOCK, *PATCHED]


@pytest.fixture(scope="module")
def measured() -> dict[Variant, Measured]:
    return columns(WORKER, COLUMNS, environment="integrations")


@pytest.mark.parametrize("variant", COLUMNS, ids=str)
def test_no_set_up_is_left_out(measured: dict[Variant, Measured], variant: Variant) -> None:
    label = variant.label
    assert measured[variant]["transformers"].startswith(variant.release + label)
    assert {(row["ranks"], row["set-up"]) for row in measured[variant]["rows"]} == set(EXPECTED)


@pytest.mark.parametrize("key", EXPECTED, ids=lambda key: f"{key[0]} ranks, {key[1]}")
@pytest.mark.parametrize("variant", COLUMNS, ids=str)
def test_gradients(measured: dict[Variant, Measured], variant: Variant, key: tuple[int, str]) -> None:
    expected = EXPECTED[key].schedules
    if variant.kind == "stock":
        expected = ON_STOCK.get(key, expected)
    assert words(measured[variant], *key, EXPECTED[key]) == expected
