"""A model with checkpointing compiles whole, once, and as on stock; with hooks on its layers too."""

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.columns import Columns, measure, pair
from tests.variants import PATCHED, PINNED, STOCK

WORKER = Path(__file__).with_name("compile_worker.py")

ONCE = {"frames": [1, 1], "gradients": [True, True]}
BROKEN_UP = {"frames": [2, 2], "gradients": [True, True]}
EXPECTED: dict[str, dict[str, Any]] = {
    "model, reentrant": ONCE,
    "model, reentrant, hooks": ONCE,
    "model, non-reentrant": ONCE,
    "model, non-reentrant, hooks": ONCE,
    "model, non-reentrant, hooks, layer's forward replaced": ONCE,
    "model, non-reentrant, hooks, class's forward replaced": ONCE,
    "layer.compile(), reentrant": BROKEN_UP,
    "layer.compile(), reentrant, hooks": ONCE,
    "layer.compile(), non-reentrant": ONCE,
    "layer.compile(), non-reentrant, hooks": ONCE,
    "layer.compile(), own checkpoint function, hooks": ONCE,
    "torch.compile(layer), non-reentrant, hooks": ONCE,
    "torch.export in eval mode": {"operators": 167, "checkpoints": 0, "outputs": True},
}
"""Graphs compiled after the first and after the second step; what is not compiled once is so on stock."""

OTHERWISE_ON_STOCK = {"layer.compile(), reentrant, hooks": BROKEN_UP}
"""There the compiled call, and the hooks with it, lies inside the checkpoint, which runs it without gradients first."""


@pytest.fixture(scope="module")
def columns() -> Columns:
    return measure(WORKER, [*STOCK, *PATCHED])


@pytest.mark.parametrize("release", PINNED)
def test_no_case_is_left_out(columns: Columns, release: str) -> None:
    stock, patched = pair(columns, release)
    assert set(stock) == set(patched) == set(EXPECTED)


@pytest.mark.parametrize("release", PINNED)
@pytest.mark.parametrize("case", EXPECTED)
def test_patched(columns: Columns, release: str, case: str) -> None:
    _, patched = pair(columns, release)
    assert patched[case] == EXPECTED[case]


@pytest.mark.parametrize("release", PINNED)
@pytest.mark.parametrize("case", EXPECTED)
def test_stock(columns: Columns, release: str, case: str) -> None:
    stock, _ = pair(columns, release)
    assert stock[case] == OTHERWISE_ON_STOCK.get(case, EXPECTED[case])
