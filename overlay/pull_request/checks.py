"""Upstream's own checks of a branch: its formatter, and the tests of what is touched, where they can run."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from overlay import processes
from overlay.pull_request import own
from overlay.queue.checkout import Checkout
from overlay.queue.lock import Package

LIMIT = 900
"""Seconds for the tests of a branch."""


@dataclass(frozen=True)
class Outcome:
    """What a check said. `passed` is None where it says nothing of the branch; `command` is how to run it, in the work
    tree; `hint` is for the user alone, and in no pull request."""

    what: str
    passed: bool | None
    said: str
    command: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.said}"


def _not_run(what: str, why: str, command: str, hint: str = "") -> Outcome:
    return Outcome(what, None, f"not run: {why}", command, hint)


@dataclass(frozen=True)
class Formatter:
    """A formatter as an upstream uses it.

    Attributes:
        name: its module and program.
        config: the file of upstream's that pins its version.
        pin: a pattern of the version in that file; a second group has the arguments that upstream gives it.
        fix, look: its command lines before the paths, that change files and that only look.
        whole: how upstream runs all of its checks of style.
    """

    name: str
    config: str
    pin: str
    fix: tuple[tuple[str, ...], ...]
    look: tuple[tuple[str, ...], ...]
    whole: str


@dataclass(frozen=True)
class Suite:
    """Upstream's tests.

    Attributes:
        needs: modules that the interpreter must have.
        of: for a file, by its path from the root: the pytest arguments that test it.
        build: what they need besides, that a work tree alone does not have.
    """

    needs: tuple[str, ...]
    of: Mapping[str, tuple[str, ...]]
    build: str = ""


_LLAMA = ("tests/models/llama/test_modeling_llama.py", "-k", "gradient_checkpointing")
FORMATTERS = {
    "transformers": Formatter(
        "ruff",
        "setup.py",
        r'"ruff==([0-9.]+)"',
        (("check", "--fix", "--quiet"), ("format", "--quiet")),
        (("check", "--quiet"), ("format", "--check", "--quiet")),
        "make style",
    ),
    "transformer_engine": Formatter(
        "black",
        ".pre-commit-config.yaml",
        r"repo: https://github\.com/psf/black\n\s+rev: ([0-9.]+)\n(?:.*\n)*?\s+args: \[(.*)\]",
        (("--quiet",),),
        (("--check", "--quiet"),),
        "bash qa/format.sh",
    ),
}
SUITES = {
    "transformers": Suite(
        ("pytest", "torch", "parameterized"),
        {
            "src/transformers/modeling_layers.py": _LLAMA,
            "tests/test_modeling_common.py": _LLAMA,  # a mixin, which has no tests of its own
            "src/transformers/utils/generic.py": ("tests/utils/test_generic.py",),
        },
    ),
    "transformer_engine": Suite(
        ("pytest", "torch"),
        {"transformer_engine/pytorch/ops/fuser.py": ("tests/pytorch/test_fusible_ops.py",)},
        "a build of TransformerEngine from this tree (pip install --no-build-isolation .) and a GPU",
    ),
}


def formatted(project: str, tree: Path, paths: Sequence[str], interpreter: str) -> Outcome:
    """Runs upstream's formatter on the touched files, with upstream's configuration.

    With the version that upstream pins, what it changes is committed; another version only looks.

    Args:
        project: the name in the lock.
        tree: the work tree.
        paths: the touched files.
        interpreter: the Python that may have the formatter; else the one on PATH is taken.
    """
    formatter = FORMATTERS.get(project)
    if formatter is None:
        return _not_run("formatter", f"none is known for {project}", "")
    config = tree / formatter.config
    found = re.search(formatter.pin, config.read_text("utf-8", "replace")) if config.is_file() else None
    pinned, *given = found.groups() if found else ("",)
    arguments = re.findall(r"[^\s,]+", given[0]) if given else []
    requirement = f"{formatter.name}=={pinned}" if pinned else formatter.name
    command = f"pip install {requirement} && {formatter.whole}"
    program, version = _program(formatter.name, interpreter, tree)
    if not program:
        hint = f"neither {interpreter} nor PATH has {formatter.name}: name a Python that has it with --python"
        return _not_run("formatter", f"{formatter.name} was not there", command, hint)
    name = f"{formatter.name} {version}"
    files = [path for path in paths if path.endswith(".py")]
    own_version = version == pinned
    for words in formatter.fix if own_version else formatter.look:
        done = _run([*program, *words, *arguments, "--", *files], tree, timeout=120)
        if done.returncode != 0:
            told = (done.stdout + done.stderr).strip().splitlines() or ["files would be changed"]
            other = "" if own_version else f", which is not the {pinned or 'version'} that upstream pins"
            return Outcome("formatter", False if own_version else None, f"{name}{other}: {told[0].strip()}", command)
    if not own_version:
        pins = f"; upstream pins {pinned}" if pinned else ""
        return Outcome("formatter", True, f"{name} would change nothing{pins}", command)
    if not own.out("diff", "--name-only", folder=tree):
        return Outcome("formatter", True, f"{name} changed nothing", command)
    kept = own.run("commit", "--quiet", "--all", "--signoff", "--message", f"Format with {name}", folder=tree)
    if kept.returncode != 0:
        return Outcome("formatter", False, f"{name}: git commit failed: {own.said(kept)}", command)
    return Outcome("formatter", True, f"{name} changed files, in a commit of its own", command)


def tested(
    project: str, package: Package, tree: Path, base: Checkout, paths: Sequence[str], interpreter: str
) -> list[Outcome]:
    """Runs the tests of what is touched, each by itself: what `SUITES` names, and the other test files.

    What fails runs on the base as well: a failure that is there already is none of the branch.

    Args:
        project: the name in the lock.
        package: its pins.
        tree: the work tree, whose package the tests import.
        base: the commit that the branch starts at.
        paths: the touched files.
        interpreter: the Python that runs them.
    """
    suite = SUITES.get(project, Suite(("pytest",), {}))
    named = [
        suite.of.get(path) or (path,)
        for path in paths
        if path in suite.of or re.fullmatch(r"tests/(.*/)?test_\w+\.py", path)
    ]
    runs = [run for run in dict.fromkeys(named) if (tree / run[0]).is_file()]
    if not runs:
        return [_not_run("tests", "this tree has none of what is touched", "")]
    commands = [f"PYTHONPATH={package.prefix.rstrip('/') or '.'} python -m pytest {shlex.join(run)}" for run in runs]
    if suite.build:
        return [_not_run("tests", f"they need {suite.build}", command) for command in commands]
    looked = f"import importlib.util as u; print(*(n for n in {suite.needs!r} if not u.find_spec(n)))"
    missing = _run([interpreter, "-c", looked], tree, timeout=60)
    if missing.returncode != 0 or missing.stdout.strip():
        lacking = ", ".join(missing.stdout.split()) or "Python that runs"
        hint = f"{interpreter} has no {lacking}: name a Python that has it with --python"
        return [_not_run("tests", f"there was no {lacking}", command, hint) for command in commands]
    return [
        _outcome(run, command, package, tree, base, interpreter) for run, command in zip(runs, commands, strict=True)
    ]


def _outcome(
    run: Sequence[str], command: str, package: Package, tree: Path, base: Checkout, interpreter: str
) -> Outcome:
    done = _pytest(run, package, tree, interpreter)
    told = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["nothing was said"]
    last = told[-1].strip("= ")
    if done.returncode == 0:
        return Outcome("tests", True, last, command)
    if done.returncode == _FAILED:
        failed = _failed(done)
        with _work_tree(base) as before:
            there = [name for name in failed if (before / name.partition("::")[0]).is_file()]
            known = _failed(_pytest(there, package, before, interpreter)) if there else set()
        if failed and failed <= known:
            return Outcome("tests", None, f"{last}; what failed fails without this change as well", command)
        names = ", ".join(sorted(failed - known))
        return Outcome("tests", False, f"{last}; not without this change: {names}", command)
    if done.returncode == _STOPPED:
        return _not_run("tests", f"stopped after {LIMIT} s", command)
    if done.returncode == _NO_TESTS:
        return _not_run("tests", "none of these files has a test of its own", command)
    errors = [row for row in told if row.startswith("E   ")]
    return _not_run("tests", f"{last}{f': {errors[-1][4:].strip()}' if errors else ''}", command)


def _pytest(
    arguments: Sequence[str], package: Package, tree: Path, interpreter: str
) -> "subprocess.CompletedProcess[str]":
    variables = {"PYTHONPATH": str(tree / package.prefix), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    command = [interpreter, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *arguments]
    return _run(command, tree, LIMIT, variables)


def _failed(done: "subprocess.CompletedProcess[str]") -> set[str]:
    """The names of the tests that failed, as pytest's summary has them."""
    return {row.partition(" - ")[0] for row in re.findall(r"^(?:FAILED|ERROR) (\S.*)$", done.stdout, re.MULTILINE)}


@contextlib.contextmanager
def _work_tree(base: Checkout) -> Iterator[Path]:
    """A work tree of the base, for as long as it is looked at."""
    with tempfile.TemporaryDirectory(prefix="overlay-") as temporary:
        tree = Path(temporary, "base")
        try:
            own.run("worktree", "add", "--quiet", "--detach", str(tree), base.commit, folder=base.folder)
            yield tree
        finally:
            own.run("worktree", "remove", "--force", "--force", str(tree), folder=base.folder)


_FAILED = 1
"""pytest's exit code where a test failed."""
_NO_TESTS = 5
"""pytest's exit code where no test was collected."""
_STOPPED = 124
"""As timeout(1) has it."""


def _program(name: str, interpreter: str, tree: Path) -> tuple[list[str], str]:
    """How to start a formatter, and its version; nothing where there is none."""
    for program in ([interpreter, "-m", name], [shutil.which(name) or ""]):
        if program[0]:
            done = _run([*program, "--version"], tree, timeout=60)
            found = re.search(r"\d+(\.\d+)+", done.stdout)
            if done.returncode == 0 and found:
                return program, found[0]
    return [], ""


def _run(
    command: Sequence[str], folder: Path, timeout: float, variables: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Runs a program of upstream's or the user's; none of the processes that it starts outlives the call."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") and name != "PYTHONPATH"}
    environment = kept | {"PYTHONSAFEPATH": "1", "RUFF_NO_CACHE": "true", **(variables or {})}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out, tempfile.TemporaryFile("w+") as err:
        try:
            process = processes.start(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        except OSError as error:
            return subprocess.CompletedProcess(command, 127, "", str(error))
        try:
            process.wait(timeout)
            code = process.returncode
        except subprocess.TimeoutExpired:
            code = _STOPPED
        finally:
            processes.kill_group(process)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
        return subprocess.CompletedProcess(command, code, *texts)
