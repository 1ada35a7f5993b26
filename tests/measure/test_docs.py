"""docs/bench.md: what it does not run in `sh` blocks, because that takes minutes, the command takes at least."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.variants import ROOT

PAGE = (ROOT / "docs" / "bench.md").read_text("utf-8")
PROGRAM = ".venv/bin/overlay bench "
LONG = [
    line.removeprefix(PROGRAM)
    for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if line.startswith(PROGRAM)
]


def bench(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "overlay", "bench", *arguments]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", LONG)
def test_long_commands(command: str, tmp_path: Path) -> None:
    done = bench(*shlex.split(command), "--dry-run", folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_there_are_long_commands() -> None:
    assert len(LONG) >= 10


def test_options(tmp_path: Path) -> None:
    """All that the command has are in the page, and no other."""
    said = bench("--help", folder=tmp_path).stdout
    options = set(re.findall(r"^  (--[a-z-]+)", said, re.MULTILINE)) - {"--debug", "--root"}
    named = set(re.findall(r"--[a-z]+(?:-[a-z]+)*", PAGE)) - {"--editable"}
    assert named - {"--debug"} <= options
    assert options <= named
