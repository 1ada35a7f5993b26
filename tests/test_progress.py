"""Progress is a bar on a terminal and plain lines elsewhere."""

import os
import pty
import subprocess
import sys
import termios

from tests.variants import ROOT

CODE = """
from overlay.progress import Progress
with Progress("demo.whl", 10_000_000) as progress:
    for _ in range(10):
        progress.advance(1_000_000)
"""


def run(stderr: int) -> None:
    command = [sys.executable, "-P", "-c", CODE]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}, stderr=stderr, check=True)


def test_plain_line_where_there_is_no_terminal() -> None:
    reading, writing = os.pipe()
    run(writing)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert said.read() == "overlay: demo.whl: 10.0 MB\n"


def test_bar_on_a_terminal() -> None:
    controlling, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    run(terminal)
    said = os.read(controlling, 65536).decode()
    os.close(terminal)
    os.close(controlling)
    assert "demo.whl" in said
    assert "\r" in said
    assert "%|" in said
