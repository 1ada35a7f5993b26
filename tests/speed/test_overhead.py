"""What the suite of times finds too slow; the times themselves are measured by `scripts/test.sh overhead`."""

import os

from overlay import environments
from overlay.measure.turns import turn
from tests.speed import overhead
from tests.speed.overhead import BUILDS, ROWS, Overhead
from tests.variants import LATEST, PATCHED, ROOT, STOCK, installed

OFF = ROWS[2]


def figures(**other: float) -> Overhead:
    """100 in each round and row, apart from the row of an empty layer with checkpointing off."""
    found = {row: {build: [100.0, 200.0, 100.0] for build in BUILDS} for row in ROWS}
    for name, factor in other.items():
        build = next(build for build in BUILDS if str(build).replace("-", "_").replace(".", "_") == name)
        found[OFF][build] = [100.0 * factor, 200.0 * factor, 500.0]
    return Overhead(found)


def test_as_fast_as_stock_misses_nothing() -> None:
    assert figures().missed() == set()
    assert figures(patched_5_14_1=1.02).missed() == set()


def test_slower_than_stock_and_than_the_latest_is_found() -> None:
    missed = figures(patched_5_14_1=1.5).missed()
    assert {(miss.row, miss.patched, miss.base) for miss in missed} == {
        (OFF, PATCHED[0], STOCK[0]),
        (OFF, PATCHED[0], LATEST),
    }
    assert {str(miss) for miss in missed} == {
        "layer, off: patched-5.14.1 is 1.50 of stock-5.14.1",
        "layer, off: patched-5.14.1 is 1.50 of latest-5.24.0",
    }


def test_an_aim_that_is_met_again_is_found() -> None:
    assert {row.name for row in figures().met()} == {"layer, on, hooks"}


def test_the_table_fits() -> None:
    assert max(map(len, figures().table().splitlines())) <= 100


def test_every_row_can_be_measured() -> None:
    """On one build, with hardly any calls."""
    variables = os.environ | {"PYTHONPATH": f"{installed(PATCHED[0])}{os.pathsep}{ROOT}"}
    command = [str(environments.python("train-2.13")), "-P", str(overhead.WORKER)]
    with turn(command, variables) as worker:
        for row in ROWS:
            *question, _ = row.question
            assert worker.ask(*question, 10) > 0, row.name
