"""The rule about the operation fuser, on the real operations. Needs no native library."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.transformer_engine.releases import MENDED
from tests.variants import Variant, run

WORKER = Path(__file__).with_name("rule_worker.py")
RELEASE = "2.13.0"
STOCK = Variant("stock", RELEASE, "transformer_engine")
RIGHT = [Variant("patched", RELEASE, "transformer_engine"), Variant("stock", MENDED, "transformer_engine")]

EXPECTED: dict[str, list[list[str]]] = {
    "not checkpointed": [["warning", "1, 1.0"]],
    "non-reentrant": [["warning", "_checkpoint_wrapped_module.1, _checkpoint_wrapped_module.1.0"]],
    "reentrant": [["error", "1._checkpoint_wrapped_module, 1._checkpoint_wrapped_module.0"]],
    "no operations": [],
}


@functools.cache
def measured(variant: Variant) -> dict[str, Any]:
    found: dict[str, Any] = run(WORKER, variant=variant)
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_findings_on_stock(name: str) -> None:
    assert measured(STOCK)["rows"][name]["findings"] == EXPECTED[name]


def test_stock_raises_in_a_reentrant_checkpoint_alone() -> None:
    steps = {name: row["step"] for name, row in measured(STOCK)["rows"].items()}
    assert steps.pop("reentrant").startswith("you can only change requires_grad flags of leaf variables")
    assert set(steps.values()) == {"trains"}


def test_the_environment() -> None:
    assert measured(STOCK)["environment"] == [["warning", f"transformer_engine {RELEASE}"]]


@pytest.mark.parametrize("variant", RIGHT, ids=str)
def test_silent_where_it_is_mended(variant: Variant) -> None:
    assert measured(variant)["environment"] == []
    assert [name for name, row in measured(variant)["rows"].items() if row["findings"]] == []
    assert {row["step"] for row in measured(variant)["rows"].values()} == {"trains"}
