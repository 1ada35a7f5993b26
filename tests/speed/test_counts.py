"""A patched layer keeps no more in memory than a stock one, and a sharded step communicates no more than it has to."""

from pathlib import Path

import pytest

from tests.contracts.columns import Columns, measure
from tests.variants import LATEST, PATCHED, PATCHED_LATEST, STOCK, VARIANTS, Variant

WORKER = Path(__file__).with_name("counts_worker.py")

SAVED = {"none": 1_265_156, "reentrant": 140_804, "non-reentrant": 140_804}
"""Bytes that autograd has saved after the forward: with checkpointing each of the 4 layers' input, 2·32·64 numbers of 4
bytes, and 75,268 bytes outside of the layers; without, 281,088 in each layer more."""

WHERE = ("", ", hooks", ", fully_shard")

AT_ONE_FORWARD = {"all-gather": 9, "reduce-scatter": 5, "other": 0}
"""4 layers and the root: each gathered in the forward, the layers in the backward again; each reduced once."""

AT_TWO_FORWARDS = {"all-gather": 17, "reduce-scatter": 5, "other": 0}
REDUCED_ONCE_A_FORWARD = {"all-gather": 17, "reduce-scatter": 9, "other": 0}
LOST = {"all-gather": 13, "reduce-scatter": 5, "other": 0}
"""On stock: in reentrant mode the layers of one of the two forwards are neither gathered nor reduced."""

COLLECTIVES = {
    "none, 1 forward": AT_ONE_FORWARD,
    "none, 2 forwards": AT_TWO_FORWARDS,
    "non-reentrant, 1 forward": AT_ONE_FORWARD,
    "non-reentrant, 2 forwards": AT_TWO_FORWARDS,
    "reentrant, 1 forward": AT_ONE_FORWARD,
    "reentrant, 2 forwards": REDUCED_ONCE_A_FORWARD,
}


@pytest.fixture(scope="module")
def columns() -> Columns:
    return measure(WORKER, VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_saved_activations(columns: Columns, variant: Variant) -> None:
    found = {what: counted["saved after the forward"] for what, counted in columns[variant]["activations"].items()}
    assert found == {f"{mode}{where}": saved for mode, saved in SAVED.items() for where in WHERE}


@pytest.mark.parametrize(("stock", "patched"), [*zip(STOCK, PATCHED, strict=True), (LATEST, PATCHED_LATEST)], ids=str)
def test_peaks_are_those_of_stock(columns: Columns, stock: Variant, patched: Variant) -> None:
    assert columns[patched]["activations"] == columns[stock]["activations"]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_checkpointing_lowers_the_peak(columns: Columns, variant: Variant, mode: str) -> None:
    counted = columns[variant]["activations"]
    for where in ("", ", hooks"):
        assert counted[f"{mode}{where}"]["most allocated"] < 0.85 * counted[f"none{where}"]["most allocated"]


@pytest.mark.parametrize("variant", [*PATCHED, LATEST, PATCHED_LATEST], ids=str)
def test_collectives(columns: Columns, variant: Variant) -> None:
    assert columns[variant]["collectives"] == COLLECTIVES


@pytest.mark.parametrize("variant", STOCK, ids=str)
def test_collectives_on_stock(columns: Columns, variant: Variant) -> None:
    assert columns[variant]["collectives"] == COLLECTIVES | {"reentrant, 2 forwards": LOST}
