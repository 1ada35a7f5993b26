"""`scripts/test.sh te --checkout PATH`: upstream's own tests of the fused operations, from a tree of upstream's, on the
stock and on the patched wheel, without a GPU, and what is different."""

import argparse
import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from overlay.errors import OverlayError
from tests.transformer_engine.native import devices, stack
from tests.transformer_engine.releases import DELIVERED
from tests.upstream import comparison, session
from tests.upstream.outcomes import Difference, Outcomes
from tests.variants import Variant

FOLDER = "tests/pytorch"
TESTS = f"{FOLDER}/test_fusible_ops.py"
FUSER = "transformer_engine/pytorch/ops/fuser.py"

NO_GPU = re.compile("Found no NVIDIA driver|CUDA driver version is insufficient|TransformerEngine needs CUDA")
"""What torch, CUDA and TransformerEngine say for want of a GPU."""


def main(arguments: Sequence[str]) -> int:
    """0 where nothing is lost, 1 where something is or a run did not come to its end, 2 for wrong usage, 130 where
    somebody stopped it."""
    parser = argparse.ArgumentParser(
        prog="scripts/test.sh te",
        description="Upstream's own tests of the fused operations, on the stock and on the patched wheel, without a "
        "GPU, and what is different. All other arguments go to pytest: -k EXPRESSION, paths that begin with tests/ "
        f"(default {TESTS}).",
        allow_abbrev=False,
    )
    parser.add_argument("--checkout", type=Path, required=True, metavar="PATH", help="a tree of TransformerEngine")
    parser.add_argument(
        "--release",
        choices=sorted(DELIVERED, key=Version),
        help="the release to test (default: the one with the tree's fuser.py); its extension is built the first time",
    )
    options, rest = parser.parse_known_args(arguments)
    return comparison.status(lambda scratch: compare(options.checkout, options.release, rest, scratch), "te")


def compare(tree: Path, release: str | None, arguments: Sequence[str], scratch: Path) -> int:
    """Runs both and prints the difference; returns the exit status."""
    tree = tree.resolve()
    if not (tree / FOLDER).is_dir():
        raise OverlayError(f"{tree}: expected {FOLDER}, found none: name the folder of a tree of TransformerEngine")
    release = release or comparison.release_of(tree, FUSER, stack.PROJECT, DELIVERED)
    stock, patched = (
        _run(variant, tree, scratch / variant.kind, arguments)
        for variant in (stack.stock(release), stack.patched(release))
    )
    difference = Difference.between(stock, patched)
    wanting = [name for name in difference.failing if all(_no_gpu(run, name) for run in (stock, patched))]
    failing = [name for name in difference.failing if name not in wanting]
    sys.stdout.write(_counted(wanting, patched))
    sys.stdout.write(comparison.report(stock, patched, dataclasses.replace(difference, failing=failing)))
    return 1 if difference.lost else 0


def _no_gpu(outcomes: Outcomes, name: str) -> bool:
    return NO_GPU.search(outcomes.said.get(name, "")) is not None


def _counted(names: Sequence[str], outcomes: Outcomes) -> str:
    """How many of the tests failed for each reason, as text."""
    found = (NO_GPU.search(outcomes.said[name]) for name in names)
    reasons = Counter(reason[0] for reason in found if reason is not None)
    lines = [f"{len(names)} fail on both for want of a GPU{':' if names else ''}"]
    lines += [f"  {count} {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def _run(variant: Variant, tree: Path, home: Path, arguments: Sequence[str]) -> Outcomes:
    """The outcomes of the tree's tests with a build, as of `comparison.run`."""
    native, folder = variant.release, home / "tree"
    comparison.copy(tree, [FOLDER], folder)
    paths = [] if any(argument.startswith("tests/") for argument in arguments) else [TESTS]
    setup = session.Setup(
        stack.PROJECT,
        stack.interpreter(native),
        [stack.installed(variant)],
        stack.variables(native),
        [Path(devices.__file__)],
    )
    return comparison.run(variant, folder, [*arguments, *paths], setup)
