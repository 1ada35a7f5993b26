"""Options of the test run, and the table that it ends with."""

import pytest

from tests.distributed.table import MEASURED, Table


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("overlay")
    group.addoption("--torch", choices=("2.11", "2.13", "2.14"), default="2.13", help="the torch that trains (2.13)")
    group.addoption("--markdown", action="store_true", help="print the FSDP2 table as README.md has it")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = Table()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    table = config.stash[MEASURED]
    if table.columns:
        terminalreporter.write_sep("=", "FSDP2")
        terminalreporter.write_line(table.markdown() if config.getoption("--markdown") else table.text())
