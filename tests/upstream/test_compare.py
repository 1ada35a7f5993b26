"""`scripts/test.sh upstream --checkout PATH` says what a patched wheel loses, on a tree in the shape of upstream's."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.upstream import compare
from tests.upstream.outcomes import Difference, Outcomes
from tests.variants import ROOT, STOCK, installed

TREE = {
    "conftest.py": """
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parent / "src"))
""",
    "tests/__init__.py": "",
    "tests/models/__init__.py": "",
    "tests/models/demo/__init__.py": "",
    "tests/models/demo/test_modeling_demo.py": """
import os
import time
import unittest
from pathlib import Path

import pytest
import transformers

PATCHED = "+overlay." in transformers.__version__


class DemoTest(unittest.TestCase):
    def test_passes(self):
        assert (Path(transformers.__file__).parent / "modeling_layers.py").samefile("src/transformers/modeling_layers.py")

    def test_passes_on_stock(self):
        assert not PATCHED

    def test_passes_on_patched(self):
        assert PATCHED

    def test_fails(self):
        raise ValueError("on both")

    def test_parts(self):
        for part in "abb":
            with self.subTest(part):
                assert part == "a" or not PATCHED

    @unittest.skipIf(PATCHED, "because it is patched")
    def test_skips_on_patched(self):
        pass


def test_hangs():
    Path(os.environ["DEMO_PROCESSES"], str(os.getpid())).touch()
    time.sleep(600)
""",
    "src/transformers/__init__.py": "raise RuntimeError('the tree itself is tested, not a wheel')",
    "src/transformers/modeling_layers.py": "",
}
FILE = "tests/models/demo/test_modeling_demo.py"
DEMO = f"{FILE}::DemoTest::"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        file = tmp_path / "tree" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    return tmp_path / "tree"


def test_the_difference_is_printed(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = "--release", "5.14.1"
    assert compare.main(["--checkout", str(tree), *release, "-k", "not hangs", "-n", "2"]) == 1
    out, said = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("stock-5.14.1: 8 passed, 2 failed in ")
    assert lines[1].startswith("patched-5.14.1: 4 passed, 1 skipped, 4 failed in ")
    assert [line for line in lines[2:] if "|" not in line] == [
        "1 fail on both:",
        f"  {DEMO}test_fails",
        "0 differ otherwise",
        "1 pass on patched alone:",
        f"  {DEMO}test_passes_on_patched  (failed, now passed)",
        "4 pass on stock alone:",
        f"  {DEMO}test_parts [b]  (passed, now failed)",
        f"  {DEMO}test_parts [b] #2  (passed, now failed)",
        f"  {DEMO}test_passes_on_stock  (passed, now failed)",
        f"  {DEMO}test_skips_on_patched  (passed, now skipped)",
    ]
    assert "    | E       assert not True" in lines
    assert "overlay: stock-5.14.1: 6 tests" in said.splitlines()
    assert compare.main(["--checkout", str(tree), *release, f"{DEMO}test_passes", "-n0"]) == 0
