"""Options of the test run, and the table that it ends with."""

from typing import Any

import pytest

from tests import stopping, variants
from tests.distributed.table import MEASURED, Table


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("overlay")
    group.addoption("--torch", choices=("2.11", "2.13", "2.14"), default="2.13", help="the torch that trains (2.13)")
    group.addoption(
        "--delivery",
        choices=("wheel", "overlay", "both"),
        default="both",
        help="how the patched builds are delivered; both: one release by its wheel, the others by the overlay (both)",
    )
    group.addoption("--markdown", action="store_true", help="print the FSDP2 table as README.md has it")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        stopping.in_worker()
    variants.deliver_by(config.getoption("--delivery"))
    config.stash[MEASURED] = Table()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of the processes that share the tests (pytest-xdist) is done: what it measured is printed by this one."""
    node.config.stash[MEASURED].columns.update(getattr(node, "workeroutput", {}).get("fsdp2", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["fsdp2"] = session.config.stash[MEASURED].columns


def pytest_report_header() -> str:
    told = ", ".join(
        f"{variant.release} by the {variant.delivery}" for variant in variants.VARIANTS if variant.kind == "patched"
    )
    return f"patched builds: {told}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    table = config.stash[MEASURED]
    if table.columns:
        terminalreporter.write_sep("=", "FSDP2")
        terminalreporter.write_line(table.markdown() if config.getoption("--markdown") else table.text())
