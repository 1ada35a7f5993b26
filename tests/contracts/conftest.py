"""The tables of `docs/compatibility.md`, printed at the end of a test run with `--markdown`."""

import pytest

from tests.contracts.columns import TABLES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--markdown"):
        for name, text in config.stash.get(TABLES, {}).items():
            terminalreporter.write_sep("=", name)
            terminalreporter.write_line(text)
