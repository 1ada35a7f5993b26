"""A pull request from a checkout of upstream: the order of things, and what is said of each."""

import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from overlay.errors import OverlayError
from overlay.pull_request import checks, evidence, mails, own, plan, target, text
from overlay.pull_request.checks import Outcome
from overlay.pull_request.plan import Plan
from overlay.pull_request.target import Target
from overlay.queue.checkout import Checkout, project_of
from overlay.queue.lock import Lock, Package

_AM = (
    *("am", "--3way", "--signoff", "--ignore-date", "--keep-non-patch", "--no-keep-cr", "--no-scissors"),
    *("--no-message-id", "--whitespace=nowarn"),
)


def run(
    lock: Lock,
    root: Path,
    project: str,
    folder: Path,
    *,
    base: str | None = None,
    only: Sequence[str] = (),
    branch: str | None = None,
    tree: Path | None = None,
    interpreter: str = sys.executable,
) -> None:
    """Makes a branch in a new work tree of the user's checkout, applies the patches there, checks it, and writes the
    text beside it. What was done is printed to stdout. Nothing is pushed, and nothing fetched.

    Where upstream has all of it, nothing is made, and what is left is said.

    Args:
        lock: the pins.
        root: the checkout of this project.
        project: as the lock or an index spells it.
        folder: the user's checkout of upstream.
        base: what the branch starts at: a branch, tag or commit (default: HEAD).
        only: the patches that are wanted, by the names of their files (default: all).
        branch: its name (default: after the first patch, and the base where one is named).
        tree: the folder of the new work tree (default: beside the checkout).
        interpreter: the Python that runs upstream's formatter and tests.

    Raises:
        OverlayError: the checkout is not clean or another project's, no series is for it, it has no such patch or one
            that needs others, something would be overwritten, a patch does not apply, or upstream's checks fail. In the
            last two cases the branch stays, and the message says how to go on and how to take it away; else all is as
            before.
    """
    Checkout.open(folder)
    # The new work tree lies beside the whole checkout, not in it; a bare repository has none
    folder = Path(own.out("rev-parse", "--show-toplevel", folder=folder) or folder).resolve()
    start = target.base(folder, "HEAD" if base is None else base)
    name, package = project_of(lock, start)
    known = lock.spelled(project)
    if known != name:
        raise OverlayError(
            f"{folder}: expected a checkout of {known or project}, found one of {name}: name "
            f"{'its checkout' if known else 'one of ' + ', '.join(lock.packages)}"
        )
    target.check(folder)
    author = own.identity(folder)
    made = plan.make(root / "patches", name, package, start)
    _say(f"{name} {made.version or ''} at {start.commit[:12]}: series {made.series.name}".replace("  ", " "))
    for held in made.held:
        _say(f"upstream has: {held}")
    if not made.patches:
        _nothing_left(made, name, package, folder)
        return
    if only:
        made = plan.only(made, only, start)
    place = _target(folder, made, base, branch, tree)
    target.check_free(place)
    codes = [fault.code for patch in made.patches for fault in patch.faults]
    measured = evidence.collect(root, package, made.series, codes, made.version)
    form = text.template(start)
    with tempfile.TemporaryDirectory(prefix="overlay-") as temporary:
        files = mails.write(made.patches, author, Path(temporary))
        with target.made(place, start):
            stopped = _apply(made, place, files)
            outcomes = [] if stopped else _check(name, package, place, start, interpreter)
            tests = any(path.startswith("tests/") for patch in made.patches for path in patch.paths)
            text.save(text.write(form, made, start, measured, outcomes, tests), place.text)
    for later in made.later:
        _say(f"later, upstream has: {later}")
    if made.later:
        _say("This is for a branch of an older release. For upstream's main branch, name that with --base.")
    subjects = own.out("log", "--format=%h %s", f"{start.commit}..{place.branch}", folder=folder).splitlines()
    _say(f"branch        {place.branch}, on {start.commit[:12]}, by {author.name} <{author.email}>")
    for subject in reversed(subjects):
        _say(f"              {subject}")
    _say(f"work tree     {place.tree}")
    _say(f"text          {place.text}")
    for outcome in outcomes:
        _say(f"{outcome.what:14}{str(outcome).partition(': ')[2]}")
        if outcome.hint:
            _say(f"              {outcome.hint}")
        if outcome.passed is not True and outcome.command:
            _say(f"              to run it in the work tree: {outcome.command}")
    if stopped:
        _say(stopped)
        raise OverlayError(
            f"{place.tree}: a patch does not apply to {start.commit[:12]}: mend it there and git am --continue, or "
            "take everything away, both as said above"
        )
    _say(f"take it away  {'; '.join(place.undo)}")
    _say("Nothing was pushed. Read the branch and the text, change what is not yours to say, and send them yourself.")
    failed = [outcome for outcome in outcomes if outcome.passed is False]
    if failed:
        raise OverlayError(
            f"{place.tree}: expected upstream's checks to pass, found {failed[0]}: mend it on the branch"
        )


def _say(line: str) -> None:
    print(line)  # noqa: T201


def _target(folder: Path, made: Plan, base: str | None, branch: str | None, tree: Path | None) -> Target:
    topic = plan.topic(made.patches[0].file.name)
    suffix = "" if base is None else "-" + (re.sub(r"[^A-Za-z0-9.]+", "-", base).strip("-.") or "base")
    place = tree or folder.with_name(f"{folder.name}-pull-request{suffix}")
    return Target(folder, branch or f"{topic}{suffix}", place.absolute())


def _nothing_left(made: Plan, project: str, package: Package, folder: Path) -> None:
    """Says that there is nothing to send, and where else the change could go."""
    _say("Nothing is left for a pull request here, and nothing was made.")
    others = plan.places(made.series, project, package, folder)
    if others:
        _say(f"These lack it, and {made.series.name} fits them; a backport of it:")
        for one in others:
            _say(f"  {shlex.join(['overlay', 'pr', project, '--checkout', str(folder), '--base', one.name])}")
    else:
        _say(f"No branch or tag of a release that {made.series.name} is for is here: fetch one for a backport of it.")


def _apply(made: Plan, place: Target, files: Sequence[Path]) -> str:
    """Applies the mails; "" or, where one does not apply, where that stands and how to go on.

    Raises:
        OverlayError: git fails for another reason, as where it cannot sign.
    """
    done = own.run(*_AM, *map(str, files), folder=place.tree)
    if done.returncode == 0:
        return ""
    told = (done.stdout + done.stderr).decode("utf-8", "replace")
    if "Patch failed at" not in told:
        raise OverlayError(
            f"{place.tree}: git am failed: {own.said(done)}: mend that and run this again; nothing is left of it"
        )
    state = Path(own.out("rev-parse", "--absolute-git-dir", folder=place.tree), "rebase-apply", "next")
    number = int(state.read_text("ascii"))
    patch = made.patches[number - 1]
    merged = own.out("diff", "--name-only", "--diff-filter=U", folder=place.tree).splitlines()
    lines = ["", f"Patch {number} of {len(files)} does not apply: {patch.subject}"]
    if merged:
        lines += [f"  in conflict, with markers in the file: {path}" for path in merged]
        how = [shlex.join(["git", "add", *merged])]
    else:
        refused = dict.fromkeys(re.findall(r"^error: patch failed: (.+):\d+$", told, re.MULTILINE)) or patch.paths
        lines += [f"  unchanged, for git has not the file that the patch was made of: {path}" for path in refused]
        how = ["git am --show-current-patch=diff | git apply --reject", shlex.join(["git", "add", *patch.paths])]
    lines += [
        f"The {number - 1} before it are on the branch; {len(files) - number} come after it.",
        f"To go on:   cd {shlex.quote(str(place.tree))}; mend the files; {'; '.join(how)}; git am --continue",
        "To skip it: git am --skip",
        f"To undo:    {'; '.join(place.undo)}",
        "The text is written; upstream's formatter and tests were not run.",
    ]
    return "\n".join(lines)


def _check(project: str, package: Package, place: Target, start: Checkout, interpreter: str) -> list[Outcome]:
    listed = own.out("diff", "--name-only", "-z", start.commit, "HEAD", folder=place.tree)
    paths = [path for path in listed.split("\0") if path]
    return [
        checks.formatted(project, place.tree, paths, interpreter),
        *checks.tested(project, package, place.tree, start, paths, interpreter),
    ]
