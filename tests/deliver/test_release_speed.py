"""Building from a warm cache is quick, against the least that there is to do and against the way by hand."""

import sys

import pytest

from tests.deliver import build_speed


def test_build_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    speed = build_speed.measure()
    with capsys.disabled():
        sys.stdout.write(f"\n{speed.table()}\n")
    assert speed.to_copy <= 10
    assert speed.to_by_hand <= 1 / 6
