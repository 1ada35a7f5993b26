"""A plugin of pytest that writes one line of JSON for each outcome, as it comes, to the file in `$OVERLAY_OUTCOMES`.

It is copied to where upstream's tests run and imports nothing but pytest and the package under test, which
`$OVERLAY_PACKAGE` names. With pytest-xdist the controller writes.
"""

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

EXCERPT = 3000
"""Characters of a failure that are kept, from its end."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(os.environ["OVERLAY_OUTCOMES"])), "overlay-recorder")


class Recorder:
    def __init__(self, file: Path) -> None:
        self.file = file

    def write(self, **line: object) -> None:
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def pytest_sessionstart(self) -> None:
        package = importlib.import_module(os.environ["OVERLAY_PACKAGE"])
        self.write(version=package.__version__, path=str(package.__file__))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.write(collected=len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self.write(collected=len(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(test=f"(collecting) {report.nodeid}", outcome="failed", said=report.longreprtext[-EXCERPT:])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        context = getattr(report, "context", None)  # that of a subtest
        if report.when != "call" and report.passed:
            return
        outcome = str(report.outcome)
        if hasattr(report, "wasxfail"):
            outcome = "xpassed" if report.passed else "xfailed"
        name = report.nodeid
        if context is not None:
            told = ", ".join(f"{key}={value}" for key, value in context.kwargs.items())
            name += f" [{' '.join(filter(None, (context.msg, told)))}]"
        self.write(
            test=name,
            outcome=outcome,
            subtest=context is not None,
            said=report.longreprtext[-EXCERPT:] if report.failed else "",
        )
