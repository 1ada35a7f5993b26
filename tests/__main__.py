"""`scripts/test.sh [SUITE] [ARGUMENT...]`: all the tests, or one suite of them; the arguments go to pytest."""

import os
import sys
from pathlib import Path

import pytest

SUITES = {"fsdp2": ["tests/distributed/test_fsdp2.py"], "speed": ["tests/deliver/test_release_speed.py"]}
"""What a first word stands for. `fsdp2 --torch 2.11` (or 2.13, 2.14), `fsdp2 --markdown`: see conftest.py."""


def main(arguments: list[str]) -> int:
    os.chdir(Path(__file__).resolve().parents[1])
    suite = SUITES.get(arguments[0] if arguments else "")
    return pytest.main(arguments if suite is None else [*suite, *arguments[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
