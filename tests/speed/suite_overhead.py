"""`scripts/test.sh overhead`: the patch costs next to nothing. No part of the plain run, which measures no times."""

import sys

import pytest

from tests.speed import overhead


def test_the_patch_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    """Other load can only lengthen a figure, so what is over its limit is measured again, twice at most."""
    missed, rows = set[overhead.Comparison](), overhead.ROWS
    for attempt in range(3):
        measured = overhead.measure(rows)
        with capsys.disabled():
            sys.stdout.write(f"\n{measured.table()}\n")
        if attempt == 0:
            assert not measured.met(), "an aim is met now: take `today` from these rows"
        missed = measured.missed() if attempt == 0 else missed & measured.missed()
        if not missed:
            return
        rows = tuple(row for row in rows if any(miss.row is row for miss in missed))
    pytest.fail("\n".join(sorted(map(str, missed))))
