"""`docs/compatibility.md` says what each build was seen to do.

`scripts/test.sh tests/contracts/test_compatibility.py --markdown` prints its tables.
"""

from collections.abc import Mapping, Sequence

import pytest

from overlay.measure.experiments import contracts
from overlay.measure.experiments.experiment import Row
from tests.contracts.columns import TABLES, published, table
from tests.variants import LATEST, PATCHED, PATCHED_LATEST, STOCK, VARIANTS, Variant, experiment

Columns = Mapping[Variant, Sequence[Row]]

NAMES = ("on-purpose-table", "upstream-table", "not-mended-table")


@pytest.fixture(scope="module")
def columns(pytestconfig: pytest.Config) -> Columns:
    columns = {variant: experiment(contracts.EXPERIMENT, variant)[1] for variant in VARIANTS}
    printed = pytestconfig.stash.setdefault(TABLES, {})
    printed.update({name: table(rows(columns, name)) for name in NAMES})
    return columns


def rows(columns: Columns, name: str) -> dict[str, dict[Variant, str]]:
    """Row -> what each variant does."""
    found: dict[str, dict[Variant, str]] = {}
    for variant, column in columns.items():
        for row in column:
            if row["table"] == name:
                found.setdefault(row["case"], {})[variant] = row["found"]
    return found


def test_no_table_is_left_out(columns: Columns) -> None:
    for column in columns.values():
        assert tuple(dict.fromkeys(row["table"] for row in column)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_this_table(columns: Columns, name: str) -> None:
    assert published(name) == table(rows(columns, name)), (
        f"put between <!-- {name} --> and <!-- /{name} -->: scripts/test.sh {__file__} --markdown"
    )


def test_what_is_said_to_be_as_on_stock_is(columns: Columns) -> None:
    for row, cells in rows(columns, "upstream-table").items():
        assert len({cells[variant] for variant in (*STOCK, *PATCHED)}) == 1, row


@pytest.mark.parametrize("variant", [*PATCHED, PATCHED_LATEST], ids=str)
def test_every_patched_build_does_what_is_right(columns: Columns, variant: Variant) -> None:
    lines = contracts.lines({"patched": columns[variant]})
    assert len(lines) == len([row for row in columns[variant] if row["right"] is not None]) >= 10
    assert [line for line in lines if not line.cells["patched"].right] == []


def test_stock_and_upstreams_own_fix_are_each_wrong_in_a_part_of_it(columns: Columns) -> None:
    """So none of these is right whatever is done."""
    lines = contracts.lines({"stock": columns[STOCK[0]], "latest": columns[LATEST]})
    assert all(not line.cells["stock"].right or not line.cells["latest"].right for line in lines)
