"""The Python environments that the commands run in, made from pins files on first use.

An environment is a venv in the cache folder, named by a hash over everything that went into it. It is complete or it
is not there: its marker is written last, and one without a marker is removed and made again. Standard library only,
because this runs before anything is installed; what only the making needs is imported there, because every command
comes through here.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from overlay import cache
from overlay.errors import OverlayError
from overlay.progress import say

FORMAT = 1
"""Raise it when an environment made by an older version of this module must not be used again."""

MARKER = "complete"


def names() -> list[str]:
    """The environments there are: one pins file each."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.txt"))


def pins(name: str) -> Path:
    """The pins file of an environment. Its first line is a comment for the user: what it holds, how long it takes.

    Raises:
        OverlayError: there is no such environment.
    """
    if name not in names():
        raise OverlayError(f"there is no environment {name!r}: expected one of {', '.join(names())}")
    return Path(__file__).with_name(f"{name}.txt")


def python(name: str, *wheels: Path) -> Path:
    """The interpreter of the environment `name`, which is made if it is not there.

    Args:
        wheels: files, known by their bytes, that are installed last, in the place of what is pinned of the same
            projects, and without what they require: for where what is pinned asks for another version in vain.

    Raises:
        OverlayError: there is no such environment, or it cannot be made.
    """
    requirements = pins(name)
    home = cache.folder() / "environments" / f"{name}-{_digest(*_texts(requirements), *map(_sha256, wheels))}"
    if not (home / MARKER).is_file():
        with cache.locked(home.name) as lock:
            if not (home / MARKER).is_file():
                _make(name, requirements, wheels, home, lock)
    return home / "bin" / "python"


def variant(*requirements: Path | str) -> Path:
    """A folder with wheels in it, for `PYTHONPATH`: what is in it comes before what an environment has.

    So one installation of torch serves every build of transformers.

    Args:
        requirements: a wheel's file, known by its bytes, or an exact pin (`"tokenizers==0.22.2"`). Nothing that they
            require comes with them.

    Raises:
        OverlayError: a wheel cannot be read, or pip does not take it.
    """
    found = [item if isinstance(item, str) else _sha256(item) for item in requirements]
    home = cache.folder() / "variants" / _digest(*found)
    if not home.is_dir():
        with cache.locked(f"variant-{home.name}") as lock:
            if not home.is_dir():
                _install([str(item.resolve() if isinstance(item, Path) else item) for item in requirements], home, lock)
    return home


def remember(name: str, interpreter: Path) -> None:
    """Write down where an environment lies, for the scripts, which read it without starting Python.

    A note has in it the format, the interpreter, the caller's `$PYTHON`, and from there to the end all pins files. The
    scripts use no note that does not agree with what they see, or that leads nowhere.
    """
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("*.txt")), *sorted(folder.glob("*/*.txt"))]
    head = f"environment {FORMAT}\n{interpreter}\n{os.environ.get('PYTHON', '')}\n"
    text = head + "".join(path.read_text("utf-8") for path in files)
    note = cache.folder() / "environments" / name
    try:
        if not note.is_file() or note.read_text("utf-8") != text:
            _write(note, text)
    except OverlayError:
        return  # without a note the next command takes a little longer, no more


def _texts(requirements: Path, options: tuple[str, ...] = ("-r ", "-c ")) -> Iterator[str]:
    """A pins file's text, and that of each that it names with one of `options`."""
    text = requirements.read_text("utf-8")
    yield text
    for line in text.splitlines():
        if line.startswith(options):
            yield from _texts(requirements.parent / line[2:].strip(), options)


def _digest(*parts: str) -> str:
    """16 hex digits that stand for `parts`, as installed by this interpreter on this system."""
    import hashlib

    system = (str(FORMAT), sys.version, sys.platform, os.uname().machine, str(_base()))
    return hashlib.sha256("\0".join((*system, *parts)).encode()).hexdigest()[:16]


def _sha256(wheel: Path) -> str:
    import hashlib

    try:
        with wheel.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise OverlayError(f"the wheel {wheel} cannot be read ({error.strerror})") from error


def _base() -> Path:
    """The interpreter to make environments from: not a venv's own, and not a name that may come to mean another."""
    return Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()


def _make(name: str, requirements: Path, wheels: Sequence[Path], home: Path, lock: int) -> None:
    """Make an environment; the caller holds its lock."""
    import importlib.util
    import time

    started = time.monotonic()
    if not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
        raise OverlayError(
            f"{_base()} cannot make environments, it has no venv or no ensurepip module: install it "
            f"(on Debian and Ubuntu the package python3-venv), or set PYTHON to a complete Python 3.11 or later"
        )
    cache.make(home.parent)
    about = requirements.read_text("utf-8").splitlines()[0].lstrip("# ")
    say(f"making the environment {name} ({about}) in {home}")
    _remove(home)
    log = _beside(home, "log")
    _run(f"the environment {name}", [str(_base()), "-m", "venv", str(home)], log, lock)
    install = [str(home / "bin" / "python"), "-m", "pip", "install", *_PIP]
    _run(f"the environment {name}", [*install, "--requirement", str(requirements)], log, lock)
    _verify(name, requirements, home)
    if wheels:
        _run(f"the environment {name}", [*install, "--no-deps", *map(str, wheels)], log, lock)
    _write(home / MARKER, "\n".join(_texts(requirements)))
    log.unlink(missing_ok=True)
    say(f"made the environment {name} in {time.monotonic() - started:.0f} s")


def _verify(name: str, requirements: Path, home: Path) -> None:
    """Whether everything that is pinned is there: pip's own configuration can make it install elsewhere, or nothing.

    Raises:
        OverlayError: something is not.
    """
    from importlib.metadata import distributions

    folders = [str(path) for path in home.glob("lib*/python3.*/site-packages")]
    found = {_canonical(item.metadata["Name"]): item.version for item in distributions(path=folders)}
    for line in "\n".join(_texts(requirements, ("-r ",))).splitlines():
        project, equals, version = line.partition("==")
        if not equals or ";" in line or line.startswith("#"):
            continue
        there = found.get(_canonical(project), "")
        # A build with a local label satisfies a pin without one (PEP 440): `2.13.0+cpu` is torch 2.13.0
        if version.strip() not in (there, there.partition("+")[0]):
            raise OverlayError(
                f"the environment {name} cannot be made: pip said that it installed {line}, but it is not in {home}: "
                "look in `pip config list` for options such as target, prefix or root, and unset them"
            )


def _canonical(project: str) -> str:
    """The name of a project as PEP 503 compares it."""
    import re

    return re.sub(r"[-_.]+", "-", project).lower()


def _install(requirements: Sequence[str], home: Path, lock: int) -> None:
    """Install wheels into a folder of their own; the caller holds its lock."""
    what = " and ".join(Path(requirement).name for requirement in requirements)
    cache.make(home.parent)
    say(f"installing {what} (about 10 s) in {home}")
    draft = _beside(home, "part")
    _remove(draft)
    log = _beside(home, "log")
    options = ("--no-deps", "--no-compile", "--target", str(draft))
    _run(what, [sys.executable, "-m", "pip", "install", *_PIP, *options, *requirements], log, lock)
    draft.rename(home)
    log.unlink(missing_ok=True)


_PIP = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")


_ELSEWHERE = {f"PIP_{name}" for name in ("TARGET", "PREFIX", "ROOT", "USER", "DRY_RUN", "NO_DEPS", "REQUIRE_HASHES")}
"""What a user may have set for pip that would leave an environment empty or without what it needs."""


def _run(what: str, command: Sequence[str], log: Path, lock: int) -> None:
    """Run a command, which shares the lock, with its output in `log`.

    Raises:
        OverlayError: it did not succeed; says what pip said last, and where the rest is.
    """
    import shutil
    import subprocess

    from overlay import processes

    try:
        with (
            log.open("wb") as output,
            processes.start(
                command,
                env={key: value for key, value in os.environ.items() if key not in _ELSEWHERE},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(lock,),
            ) as process,
        ):
            try:
                process.wait()
            finally:  # interrupted: `venv` and pip start others
                processes.kill_group(process)
        if process.returncode == 0:
            return
        said = log.read_text("utf-8", "replace")
    except OSError as error:
        raise OverlayError(f"{what} cannot be made in {log.parent}: {error.strerror or error}") from error
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [f"exit status {process.returncode}"]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1]).removeprefix("ERROR: ")
    if not shutil.disk_usage(log.parent).free >> 20:  # pip then says so, or dies where it would say it
        reason += f" (no space is left on the disk of {log.parent}: free some, or set XDG_CACHE_HOME)"
    if "connection broken by" in said:  # pip itself ends with "no matching distribution" then
        reason += " (a package index did not answer: check the network, and `pip config list` for the index)"
    raise OverlayError(f"{what} cannot be made: {reason}; all that was said is in {log}")


def _remove(path: Path) -> None:
    """Remove what an earlier run left half made."""
    import shutil

    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OverlayError(f"{path} is half made and cannot be removed: {error.strerror or error}") from error


def _beside(path: Path, ending: str) -> Path:
    """A path for what belongs to `path`; the dots in an environment's name are no suffixes."""
    return path.with_name(f"{path.name}.{ending}")


def _write(path: Path, text: str) -> None:
    """Write a whole file or none, so that a marker is never seen half written."""
    draft = _beside(path, f"{os.getpid()}.part")
    try:
        draft.write_bytes(os.fsencode(text))
        draft.replace(path)
    except OSError as error:
        raise OverlayError(f"{path} cannot be written: {error.strerror or error}") from error
