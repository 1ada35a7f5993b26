"""What the comparisons of upstream's own tests share: a run of a tree's tests with each of two builds, and what is
different."""

import contextlib
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from overlay.errors import OverlayError
from overlay.progress import Progress, say
from overlay.queue import git, lock
from tests.upstream import session
from tests.upstream.outcomes import Difference, Outcomes
from tests.variants import ROOT, Variant

OPTIONS = ("-q", "--disable-warnings", "--continue-on-collection-errors", "--tb=native")
"""pytest's own tracebacks parse the whole file for each test that fails, which are thousands."""

EVERY = 60
"""Seconds between two lines of progress where there is no terminal."""


NOT_UNDERSTOOD = re.compile(
    r"^(?:.*: error: |ERROR: )"
    r"((?:unrecognized arguments|argument|ambiguous option|file or directory not found|not found|Wrong expression).*)$",
    re.MULTILINE,
)
"""What pytest says of its command line. Its exit status is also that of a conftest.py which cannot be imported."""


class WrongUsage(OverlayError):
    """pytest did not understand what it was told."""


def status(compare: Callable[[Path], int], suite: str) -> int:
    """What a comparison returns, which is given an empty folder; 1 where it cannot be made, 2 for wrong usage, 130
    where somebody stopped it.

    Args:
        suite: the word of `scripts/test.sh` for it.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="overlay-upstream-") as scratch:
            return compare(Path(scratch))
    except WrongUsage as error:
        sys.stderr.write(f"overlay: {error} ({suite} --checkout PATH --help)\n")
        return 2
    except OverlayError as error:
        sys.stderr.write(f"overlay: {error}\n")
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 130


def release_of(tree: Path, file: str, project: str, pinned: Sequence[str]) -> str:
    """The release, one of those that are pinned, that has the file of the tree; the last one where several have.

    Args:
        file: below `tree`.

    Raises:
        OverlayError: none has it.
    """
    releases = {
        touched.before: release.version
        for name, _, release in lock.read(ROOT / "upstream.lock").deliveries()
        for touched in release.files
        if name == project and file.endswith(touched.path) and release.version in pinned
    }
    path = tree / file
    found = git.blob_id(path.read_bytes()) if path.is_file() else "no such file"
    if found not in releases:
        raise OverlayError(
            f"{path}: expected that of a pinned release ({', '.join(releases.values())}), found {found}: "
            "name the release to test with --release"
        )
    return releases[found]


def copy(tree: Path, parts: Sequence[str], folder: Path) -> None:
    """Copies the parts of a tree that are there into a folder, without what Python compiled."""
    for part in parts:
        source, target = tree / part, folder / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            shutil.copy(source, target)


def run(
    variant: Variant, folder: Path, arguments: Sequence[str], setup: session.Setup, options: Sequence[str] = ()
) -> Outcomes:
    """The outcomes of the tests in a folder with a build, which are printed.

    Args:
        folder: as of `session.run`.
        arguments: of pytest, beside `OPTIONS`.
        options: more of pytest, which nobody asked for.

    Raises:
        WrongUsage: pytest did not understand an argument.
        OverlayError: the run did not come to its end, no test passed, or another build was tested.
    """
    started = time.monotonic()
    with _Watch(str(variant)) as watch:
        code, outcomes = session.run(folder, [*OPTIONS, *options, *arguments], setup, watch=watch)
    said = (folder.parent / "output.txt").read_text("utf-8", "replace")[-3000:]
    if code == pytest.ExitCode.USAGE_ERROR and (found := NOT_UNDERSTOOD.search(said)):
        raise WrongUsage(f"pytest did not understand an argument: {found[1].replace(f'{folder.resolve()}/', '')}")
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        last = said.strip().rpartition("\n")[2]
        raise OverlayError(f"no test matches: {shlex.join(arguments)} (pytest: {last})")
    if code not in session.CLEAN or not outcomes.having("passed"):
        raise OverlayError(
            f"{variant}: expected a run of pytest in which a test passes, found exit status {code} and {outcomes}; "
            f"it said last:\n{said}"
        )
    if Path(outcomes.path).parent != setup.paths[0] / setup.package:
        raise OverlayError(f"{variant}: expected the tests to import it from {setup.paths[0]}, found {outcomes.path}")
    sys.stdout.write(f"{variant}: {outcomes} in {time.monotonic() - started:.0f} s\n")
    sys.stdout.flush()
    return outcomes


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
