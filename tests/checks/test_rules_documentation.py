"""Every rule is documented, and docs/checks.md says what their docstrings say."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from overlay import checks
from tests.variants import ROOT

NO_RULES = {"__init__", "__main__", "environment", "finding", "report", "subject"}


def test_the_page_is_what_the_docstrings_say() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "overlay.checks"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    page = (ROOT / "docs" / "checks.md").read_text("utf-8")
    assert page == done.stdout, "run: python -m overlay.checks > docs/checks.md"


def test_each_module_is_a_rule() -> None:
    modules = {file.stem for file in Path(checks.__file__).parent.glob("*.py")} - NO_RULES
    assert {rule.__name__.rpartition(".")[2] for rule in checks.rules()} == modules


@pytest.mark.parametrize("rule", checks.rules(), ids=lambda rule: rule.CODE)
def test_a_rule_has_the_name_of_its_file_a_title_and_a_text(rule: ModuleType) -> None:
    assert rule.__name__.rpartition(".")[2].replace("_", "-") == rule.CODE
    assert hasattr(rule, "in_model") or hasattr(rule, "in_environment")
    title, empty, *text = (rule.__doc__ or "").strip().splitlines()
    assert title.endswith(".")
    assert empty == ""
    assert text
