"""`scripts/test.sh upstream --checkout PATH`: upstream's own tests of each model, from a tree of upstream's, on the
stock and on the patched wheel, and what is different."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from overlay.errors import OverlayError
from tests.upstream import comparison, session
from tests.upstream.outcomes import Difference, Outcomes
from tests.variants import PINNED, Variant, installed

PARTS = ("tests", "utils", "examples", "conftest.py", "pyproject.toml", "setup.py", "setup.cfg")
"""What of a tree is copied, where it is there: what the tests need, without `src`."""

NEEDED = ("tests", "conftest.py")
TESTS = "tests/models"
LAYERS = "transformers/modeling_layers.py"


def main(arguments: Sequence[str]) -> int:
    """0 where nothing is lost, 1 where something is or a run did not come to its end, 2 for wrong usage, 130 where
    somebody stopped it."""
    parser = argparse.ArgumentParser(
        prog="scripts/test.sh upstream",
        description="Upstream's own tests of each model on the stock and on the patched wheel, and what is different. "
        f"All other arguments go to pytest: -k EXPRESSION, paths that begin with tests/ (default {TESTS}), "
        "-n PROCESSES (default auto).",
        allow_abbrev=False,
    )
    parser.add_argument("--checkout", type=Path, required=True, metavar="PATH", help="a tree of transformers")
    parser.add_argument(
        "--release",
        choices=PINNED,
        help="the pinned release to test (default: the one with the tree's modeling_layers.py)",
    )
    options, rest = parser.parse_known_args(arguments)
    return comparison.status(lambda scratch: compare(options.checkout, options.release, rest, scratch), "upstream")


def compare(tree: Path, release: str | None, arguments: Sequence[str], scratch: Path) -> int:
    """Runs both and prints the difference; returns the exit status."""
    tree = tree.resolve()
    missing = [part for part in NEEDED if not (tree / part).exists()]
    if missing:
        raise OverlayError(
            f"{tree}: expected {' and '.join(missing)}, found none: name the folder of a tree of transformers"
        )
    release = release or release_of(tree)
    stock, patched = (
        _run(variant, tree, scratch / variant.kind, arguments)
        for variant in (Variant("stock", release), Variant("patched", release))
    )
    difference = Difference.between(stock, patched)
    sys.stdout.write(comparison.report(stock, patched, difference))
    return 1 if difference.lost else 0


def release_of(tree: Path) -> str:
    """The pinned release that has the tree's `modeling_layers.py`."""
    return comparison.release_of(tree, f"src/{LAYERS}", "transformers", PINNED)


def _run(variant: Variant, tree: Path, home: Path, arguments: Sequence[str]) -> Outcomes:
    """The outcomes of the tree's tests with a build, as of `comparison.run`.

    The build takes the place of `src` in a copy of the tree, because upstream's conftest.py puts that on the path and
    some tests read it.
    """
    build, folder = installed(variant), home / "tree"
    comparison.copy(tree, PARTS, folder)
    shutil.copytree(build / "transformers", folder / "src" / "transformers")
    paths = [] if any(argument.startswith("tests/") for argument in arguments) else [TESTS]
    parallel = [] if any(argument.startswith(("-n", "--numprocesses")) for argument in arguments) else ["-n", "auto"]
    setup = session.transformers(folder / "src", build)
    return comparison.run(variant, folder, [*arguments, *paths], setup, ["--dist=worksteal", *parallel])
