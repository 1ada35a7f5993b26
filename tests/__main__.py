"""`scripts/test.sh [SUITE] [ARGUMENT...]`: all the tests, or one suite of them; the arguments go to pytest."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests import stopping

SUITES = {
    "fsdp2": ["tests/distributed/test_fsdp2.py"],
    "gpu": ["tests/speed/test_gpu.py"],
    "overhead": ["tests/speed/suite_overhead.py"],
    "speed": ["tests/deliver/test_release_speed.py"],
    "startup": ["tests/runtime/test_startup.py"],
    "te": ["tests/transformer_engine/native", "-o", "python_files=suite_*.py"],
    "upstream": ["tests/upstream"],
}
"""What a first word stands for. `fsdp2 --torch 2.11` (or 2.13, 2.14), `fsdp2 --markdown`: see conftest.py."""


PROCESSES = min(2, os.cpu_count() or 1)
"""How many share the tests. Each starts processes of its own, with torch, up to two ranks of several threads."""

USAGE = """usage: scripts/test.sh [SUITE] [PYTEST ARGUMENT...]

Without a suite: all the tests, or those that the arguments name. Suites:
  fsdp2    the table of gradients alone; --torch 2.11, 2.13 or 2.14; --markdown as in README.md
  overhead what a patched layer costs, against stock and 5.24.0, as ratios
  gpu      checkpointing on a GPU, in five minutes; its own options: gpu --help
  speed    how long a build takes, as ratios
  startup  what the overlay costs when an interpreter starts
  te       the patched TransformerEngine with its real native library, on a machine without a GPU; --release X; with
           --checkout PATH upstream's own tests of its operations from that tree, on the stock and on the patched wheel,
           and what is different; with --gpu what needs one, in five minutes (te --help)
  upstream upstream's own tests on small models of each family; with --checkout PATH those of each model in that tree of
           transformers, on the stock and on the patched wheel, and what is different (upstream --help)
All options of pytest: scripts/test.sh --help-pytest
"""


def main(arguments: list[str]) -> int:
    """The exit status: that of pytest or of a suite, 2 for wrong usage, 130 where somebody stopped it."""
    with _temporary_files(), stopping.stopped_by_signals() as stopped:
        try:
            status = _run(arguments)
        except KeyboardInterrupt:
            sys.stderr.write("overlay: stopped\n")
    return 130 if stopped else status


@contextlib.contextmanager
def _temporary_files() -> Iterator[None]:
    """Those of all tests are in a folder that goes with them: what a test kills cleans nothing up.

    pytest keeps its own for a while, and where they were.
    """
    kept = os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="overlay-tests-", ignore_cleanup_errors=True) as folder:
        variables = {"TMPDIR": folder, "PYTEST_DEBUG_TEMPROOT": kept}
        with mock.patch.dict(os.environ, variables), mock.patch.object(tempfile, "tempdir", folder):
            yield


def _run(arguments: list[str]) -> int:
    first = arguments[0] if arguments else ""
    if first == "upstream" and any(word in ("-h", "--help") or word.startswith("--checkout") for word in arguments):
        from tests.upstream import compare  # only here: pytest rewrites the asserts of what it imports itself

        return compare.main(arguments[1:])
    if first == "te" and "--collect-only" not in arguments:
        from tests.transformer_engine.native import suite

        return suite.main(arguments[1:])
    if first == "gpu" and "--collect-only" not in arguments:
        from tests.speed import gpu

        return gpu.main(arguments[1:])
    os.chdir(Path(__file__).resolve().parents[1])
    if first in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    if first == "--help-pytest":
        return pytest.main(["--help"])
    if first in SUITES:
        return pytest.main([*SUITES[first], *arguments[1:]])
    if first and not first.startswith("-") and not Path(first.partition("::")[0]).exists():
        sys.stderr.write(f"overlay: expected a suite ({', '.join(SUITES)}) or a path, found {first!r}\n{USAGE}")
        return 2
    # Nothing but options: one whose value stands in a word of its own may choose tests, as -k does
    if all(argument.startswith("-") for argument in arguments) and not {"--collect-only", "--pdb"} & {*arguments}:
        return _everything(arguments)
    return pytest.main(arguments)


def _everything(arguments: list[str]) -> int:
    """All the tests, some at the same time, a file's together; and then those that measure time, with nothing beside
    them."""
    found = pytest.main([f"--numprocesses={PROCESSES}", "--dist=loadfile", "-m", "not alone", *arguments])
    if found == pytest.ExitCode.INTERRUPTED:
        return found
    return max(found, pytest.main(["-m", "alone", *arguments]))  # both say what failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
