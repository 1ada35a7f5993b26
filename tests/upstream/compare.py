"""`scripts/test.sh upstream --checkout PATH`: upstream's own tests of each model, from a tree of upstream's, on the
stock and on the patched wheel, and what is different."""

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from overlay.errors import OverlayError
from overlay.progress import Progress, say
from overlay.queue import git, lock
from tests.upstream import session
from tests.upstream.outcomes import Difference, Outcomes
from tests.variants import PINNED, ROOT, Variant, installed

PARTS = ("tests", "utils", "examples", "conftest.py", "pyproject.toml", "setup.py", "setup.cfg")
"""What of a tree is copied, where it is there: what the tests need, without `src`."""

NEEDED = ("tests", "conftest.py")
TESTS = "tests/models"
LAYERS = "transformers/modeling_layers.py"
OPTIONS = ("-q", "--disable-warnings", "--continue-on-collection-errors", "--tb=native", "--dist=worksteal")
"""pytest's own tracebacks parse the whole file for each subtest that fails, which are thousands."""

EVERY = 60
"""Seconds between two lines of progress where there is no terminal."""


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
    try:
        with _stopped_by_signals(), tempfile.TemporaryDirectory(prefix="overlay-upstream-") as scratch:
            return compare(options.checkout, options.release, rest, Path(scratch))
    except OverlayError as error:
        sys.stderr.write(f"overlay: {error}\n")
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 130


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
    sys.stdout.write(report(stock, patched, difference))
    return 1 if difference.lost else 0


def report(stock: Outcomes, patched: Outcomes, difference: Difference) -> str:
    """The difference, as text: what is lost comes last, with what was said."""
    lines = []
    for what, names in (
        ("fail on both", difference.failing),
        ("differ otherwise", difference.other),
        ("pass on patched alone", difference.gained),
        ("pass on stock alone", difference.lost),
    ):
        lines.append(f"{len(names)} {what}{':' if names else ''}")
        for name in names:
            before, after = (outcomes.tests.get(name, "not run") for outcomes in (stock, patched))
            lines.append(f"  {name}" + ("" if before == after else f"  ({before}, now {after})"))
            if names is difference.lost:
                lines += [f"    | {line}" for line in patched.said.get(name, "").splitlines()]
    return "\n".join(lines) + "\n"


def release_of(tree: Path) -> str:
    """The pinned release that has the tree's `modeling_layers.py`."""
    pinned = {
        file.before: release.version
        for _, _, release in lock.read(ROOT / "upstream.lock").deliveries()
        for file in release.files
        if file.path == LAYERS and release.version in PINNED
    }
    layers = tree / "src" / LAYERS
    found = git.blob_id(layers.read_bytes()) if layers.is_file() else "no such file"
    if found not in pinned:
        raise OverlayError(
            f"{layers}: expected that of a pinned release ({', '.join(pinned.values())}), found {found}: "
            "name the release to test with --release"
        )
    return pinned[found]


def _run(variant: Variant, tree: Path, home: Path, arguments: Sequence[str]) -> Outcomes:
    """The outcomes of the tree's tests with a build, which are printed.

    The build takes the place of `src` in a copy of the tree, because upstream's conftest.py puts that on the path and
    some tests read it.

    Raises:
        OverlayError: the run did not come to its end, no test passed, or another transformers was tested.
    """
    build, folder, started = installed(variant), home / "tree", time.monotonic()
    folder.mkdir(parents=True)
    for part in PARTS:
        source = tree / part
        if source.is_dir():
            shutil.copytree(source, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            shutil.copy(source, folder / part)
    shutil.copytree(build / "transformers", folder / "src" / "transformers")
    paths = [] if any(argument.startswith("tests/") for argument in arguments) else [TESTS]
    parallel = [] if any(argument.startswith(("-n", "--numprocesses")) for argument in arguments) else ["-n", "auto"]
    command = [*OPTIONS, *parallel, *arguments, *paths]
    with _Watch(str(variant)) as watch:
        code, outcomes = session.run(folder, command, [folder / "src", build], watch=watch)
    said = (home / "output.txt").read_text("utf-8", "replace")[-3000:]
    if code not in session.CLEAN or not outcomes.having("passed"):
        raise OverlayError(
            f"{variant}: expected a run of pytest in which a test passes, found exit status {code} and {outcomes}; "
            f"it said last:\n{said}"
        )
    if Path(outcomes.path).parent != folder / "src" / "transformers":
        raise OverlayError(f"{variant}: expected the tests to import it from {folder}/src, found {outcomes.path}")
    sys.stdout.write(f"{variant}: {outcomes} in {time.monotonic() - started:.0f} s\n")
    sys.stdout.flush()
    return outcomes


class _Watch:
    """Progress of a run: a bar, or a line a minute."""

    def __init__(self, what: str) -> None:
        self._what, self._done, self._due = what, 0, time.monotonic() + EVERY
        self._progress: Progress | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "_Watch":
        say(f"{self._what}: collecting")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, outcomes: Outcomes) -> None:
        if self._progress is None and outcomes.collected:
            self._progress = self._stack.enter_context(Progress(self._what, outcomes.collected, "tests"))
        if self._progress is not None:
            self._progress.advance(outcomes.finished - self._done)
            self._done = outcomes.finished
        if not sys.stderr.isatty() and time.monotonic() > self._due:
            say(f"{self._what}: {outcomes.finished} of {outcomes.collected} tests, {outcomes}")
            self._due = time.monotonic() + EVERY


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP stop it as Ctrl-C does. A second signal does not keep it from cleaning up."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
