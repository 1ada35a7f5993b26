"""`scripts/test.sh upstream --checkout PATH` says what a patched wheel loses, on a tree in the shape of upstream's."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import signals
from tests.test_processes import alive
from tests.upstream import compare, comparison
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
        assert Path(transformers.__file__).parent.samefile("src/transformers")

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
    assert lines[0].startswith("stock-5.14.1: 7 passed, 2 failed in ")
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
    assert any(line.startswith("    | ") and line.endswith("assert not True") for line in lines), out
    assert "overlay: stock-5.14.1: 6 tests" in said.splitlines()
    assert compare.main(["--checkout", str(tree), *release, f"{DEMO}test_passes", "-n0"]) == 0


def test_the_release_is_the_one_with_the_layers_of_the_tree(tree: Path) -> None:
    layers = tree / "src" / compare.LAYERS
    layers.write_bytes((installed(STOCK[1]) / compare.LAYERS).read_bytes())
    assert compare.release_of(tree) == STOCK[1].release


def test_a_tree_of_no_pinned_release_needs_the_release(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--checkout", str(tree)]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(
        f"overlay: {tree}/src/transformers/modeling_layers.py: expected that of a pinned release (5.14.1"
    )
    assert said.endswith(": name the release to test with --release")


def test_a_folder_that_is_no_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--checkout", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"overlay: {tmp_path}: expected tests and conftest.py, found none: name the folder of a tree of transformers\n"
    )


def test_a_run_in_which_nothing_passes_is_no_comparison(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--checkout", str(tree), "--release", "5.14.1", "-n0", "-k", "test_fails"]) == 1
    out, said = capsys.readouterr()
    assert out == ""
    assert (
        "overlay: stock-5.14.1: expected a run of pytest in which a test passes, found exit status 1 and 1 failed"
        in said
    )


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--relese"], "unrecognized arguments: --relese"),
        (["-k", "a("], "Wrong expression passed to '-k': a("),
        (["tests/nowhere.py"], "file or directory not found: tests/nowhere.py"),
        ([f"{FILE}::Gone"], f"not found: {FILE}::Gone"),
    ],
)
def test_an_argument_that_pytest_does_not_know(
    tree: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], found: str
) -> None:
    assert compare.main(["--checkout", str(tree), "--release", "5.14.1", "-n0", *arguments]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    line = said.splitlines()[-1]
    assert line.startswith(f"overlay: pytest did not understand an argument: {found}")
    assert line.endswith(" (upstream --checkout PATH --help)")


def test_a_conftest_that_fails_is_no_wrong_usage(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "conftest.py").write_text("raise ImportError('of the tree')", "utf-8")
    assert compare.main(["--checkout", str(tree), "--release", "5.14.1", "-n0"]) == 1
    said = capsys.readouterr().err
    assert "expected a run of pytest in which a test passes, found exit status 4 and no test" in said
    assert "of the tree" in said


@pytest.mark.parametrize("processes", ["-n0", "-n2"])
def test_no_test_that_is_asked_for(tree: Path, capsys: pytest.CaptureFixture[str], processes: str) -> None:
    assert compare.main(["--checkout", str(tree), "--release", "5.14.1", processes, "-k", "zzz"]) == 1
    out, said = capsys.readouterr()
    assert out == ""
    assert said.splitlines()[-1].startswith(f"overlay: no test matches: {processes} -k zzz tests/models (pytest: ")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by /proc which processes run")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_it_leaves_no_processes_and_no_files(tree: Path, tmp_path: Path, number: signal.Signals) -> None:
    processes, temporary = tmp_path / "processes", tmp_path / "tmp"
    processes.mkdir()
    temporary.mkdir()
    installed(STOCK[0])
    process = subprocess.Popen(
        [
            ROOT / "scripts" / "test.sh",
            "upstream",
            "--checkout",
            tree.name,
            "--release",
            "5.14.1",
            "-k",
            "hangs",
            "-n2",
        ],
        cwd=tree.parent,
        env=os.environ | {"DEMO_PROCESSES": str(processes), "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        encoding="utf-8",
        preexec_fn=signals.heard,
    )
    try:
        wait_for(lambda: any(processes.iterdir()))
        process.send_signal(number)
        said = process.communicate(timeout=600)[1]
    finally:
        process.kill()
    assert (process.returncode, said.splitlines()[-1]) == (130, "overlay: stopped")
    (worker,) = processes.iterdir()
    wait_for(lambda: not alive(int(worker.name)))
    assert list(temporary.iterdir()) == []


def test_outcomes_are_read_while_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.jsonl"
    assert Outcomes.read(file) == Outcomes()
    lines = [
        '{"version": "5.14.1", "path": "/x"}',
        '{"collected": 2}',
        '{"test": "a", "outcome": "passed", "subtest": false, "said": ""}',
        '{"test": "a", "outcome": "failed", "subtest": false, "said": "in teardown"}',
        '{"test": "b [p]", "outcome": "passed", "subtest": true, "said": ""}',
        '{"test": "b [p]", "outcome": "failed", "subtest": true, "said": "why"}',
        '{"test": "b", "outcome": "pas',
    ]
    file.write_text("\n".join(lines), "utf-8")
    outcomes = Outcomes.read(file)
    assert (outcomes.version, outcomes.path, outcomes.collected, outcomes.finished) == ("5.14.1", "/x", 2, 1)
    assert outcomes.tests == {"a": "failed", "b [p]": "passed", "b [p] #2": "failed"}
    assert outcomes.said == {"a": "in teardown", "b [p] #2": "why"}
    assert str(outcomes) == "1 passed, 2 failed"


def test_what_is_missing_is_lost() -> None:
    stock = Outcomes(
        tests={"gone": "passed", "new": "failed", "same": "failed", "skip": "skipped", "kept": "passed", "x": "xpassed"}
    )
    patched = Outcomes(tests={"new": "passed", "same": "failed", "skip": "failed", "kept": "passed", "x": "xfailed"})
    difference = Difference.between(stock, patched)
    assert difference == Difference(lost=["gone", "x"], gained=["new"], failing=["same"], other=["skip"])
    assert comparison.report(stock, patched, difference).splitlines() == [
        "1 fail on both:",
        "  same",
        "1 differ otherwise:",
        "  skip  (skipped, now failed)",
        "1 pass on patched alone:",
        "  new  (failed, now passed)",
        "2 pass on stock alone:",
        "  gone  (passed, now not run)",
        "  x  (xpassed, now xfailed)",
    ]


def wait_for(condition: Callable[[], bool], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)
