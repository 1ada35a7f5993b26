"""`docs/compatibility.md` says what each build was seen to do.

`scripts/test.sh tests/contracts/test_compatibility.py --markdown` prints its tables.
"""

from pathlib import Path

import pytest

from tests.contracts.columns import TABLES, Columns, measure, published, table
from tests.variants import PATCHED, STOCK, VARIANTS, Variant

WORKER = Path(__file__).with_name("compatibility_worker.py")
NAMES = ("on-purpose-table", "upstream-table", "not-mended-table")


@pytest.fixture(scope="module")
def columns(pytestconfig: pytest.Config) -> Columns:
    columns = measure(WORKER, VARIANTS)
    printed = pytestconfig.stash.setdefault(TABLES, {})
    printed.update({name: table(rows(columns, name)) for name in NAMES})
    return columns


def rows(columns: Columns, name: str) -> dict[str, dict[Variant, str]]:
    """Row -> what each variant does."""
    names = list(columns[STOCK[0]][name])
    return {row: {variant: column[name][row] for variant, column in columns.items()} for row in names}


def test_no_table_is_left_out(columns: Columns) -> None:
    assert all(tuple(column) == NAMES for column in columns.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_this_table(columns: Columns, name: str) -> None:
    assert published(name) == table(rows(columns, name)), (
        f"put between <!-- {name} --> and <!-- /{name} -->: scripts/test.sh {__file__} --markdown"
    )


def test_what_is_said_to_be_as_on_stock_is(columns: Columns) -> None:
    for row, cells in rows(columns, "upstream-table").items():
        assert len({cells[variant] for variant in (*STOCK, *PATCHED)}) == 1, row
