"""TRL's DPO loss on a fully sharded model (FSDP2, two ranks) has the gradients of the whole model."""

from pathlib import Path
from typing import Any

import pytest

from tests.third_party.columns import Columns, measure
from tests.variants import STOCK, VARIANTS, Variant

WORKER = Path(__file__).with_name("dpo_worker.py")
ROUNDING = 1e-6
LOSS = 0.1

CASES = {
    (case, reentrant)
    for case in ("1 loss, LoRA", "2 losses, LoRA", "1 loss, a reference model", "2 losses, a reference model")
    for reentrant in (True, False)
}
LOST_ON_STOCK = {("2 losses, LoRA", True), ("2 losses, a reference model", True)}
"""Both losses before one backward, as RL and accumulation by a sum of losses have it."""


@pytest.fixture(scope="module")
def columns() -> Columns:
    return measure(WORKER)


def errors(columns: Columns, variant: Variant) -> dict[tuple[str, bool], Any]:
    label = variant.label
    assert columns[variant]["transformers"].startswith(variant.release + label)
    return {(row["case"], row["reentrant"]): row["error"] for row in columns[variant]["rows"]}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradients(columns: Columns, variant: Variant) -> None:
    found = errors(columns, variant)
    assert found.keys() == CASES
    lost = LOST_ON_STOCK if variant.kind == "stock" else set()
    assert {case for case, error in found.items() if isinstance(error, str) or not error <= ROUNDING} == lost


@pytest.mark.parametrize("variant", STOCK, ids=str)
def test_what_stock_loses_is_no_rounding(columns: Columns, variant: Variant) -> None:
    assert all(errors(columns, variant)[case] > LOSS for case in LOST_ON_STOCK)
