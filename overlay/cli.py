"""The command line: one thin command a verb.

Exit codes: 0 done, 1 something is not as expected (one line says what), 2 wrong usage, 130 interrupted. Only the
command that was asked for is imported, so that a missing library is missed by the commands that need it, and by no
other.
"""

import argparse
import contextlib
import errno
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from overlay import __version__
from overlay.errors import OverlayError


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits."""
    gc.disable()  # a run is short; looking for cycles while libraries are imported takes a tenth of it
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    with _terminated_like_interrupted():
        sys.exit(_run(options))


def _run(options: argparse.Namespace) -> int:
    try:
        command: Callable[[argparse.Namespace], int | None] = options.command
        code = command(options) or 0
        sys.stdout.flush()  # here, so that a reader who has gone is noticed here
        return code
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return _failed(options, "interrupted: what was to be replaced is as before or as after, run this again", 130)
    except OverlayError as error:
        return _failed(options, str(error), 1)
    except OSError as error:
        return _failed(options, _system(error), 1)
    except ModuleNotFoundError as error:
        return _failed(options, _missing(error) if options.extra else _fault(error), 1)
    except MemoryError:
        return _failed(options, "expected enough memory, found none left: free some and run this again", 1)
    except Exception as error:
        return _failed(options, _fault(error), 1)


def _failed(options: argparse.Namespace, message: str, code: int) -> int:
    if options.debug:
        traceback.print_exc()
    print(f"overlay: {' '.join(message.splitlines())}", file=sys.stderr)  # noqa: T201
    return code


def _missing(error: ModuleNotFoundError) -> str:
    return (
        f"expected the library {error.name}, found none: this command needs the extra `queue`: in a checkout "
        "of modeling-overlay, pip install '.[queue]', or run scripts/apply.sh"
    )


def _fault(error: Exception) -> str:
    return (
        f"{type(error).__name__}: {error}: this is a fault of modeling-overlay, run again with --debug and report what "
        "it prints"
    )


def _system(error: OSError) -> str:
    place = error.filename or "a file"
    if isinstance(place, bytes):
        place = os.fsdecode(place)
    if error.errno == errno.ENOSPC:
        return f"{place}: no space left on the disk{_free(Path(place))}: free some and run this again"
    if error.errno == errno.EROFS:
        return f"{place}: expected a place that can be written, found a read-only file system: name another with --out"
    return f"{place}: {error.strerror or error}: mend that and run this again"


def _free(place: Path) -> str:
    """What is left there, which may be a reserve for root, or enough of everything but inodes."""
    folder = next((path for path in (place, *place.parents) if path.is_absolute() and path.exists()), None)
    if folder is None:
        return ""
    status = os.statvfs(folder)
    return (
        f", {status.f_bavail * status.f_frsize} bytes are free there"
        if status.f_favail
        else ", no inodes are free there"
    )


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that temporary folders go."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="print the traceback of an error")
    debug.set_defaults(extra=False)  # the wheel is enough
    common = argparse.ArgumentParser(add_help=False, parents=[debug])
    common.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="the checkout with upstream.lock and patches/ (default: the one that this program lies in)",
    )
    common.set_defaults(extra=True)
    parser = argparse.ArgumentParser(
        prog="overlay", description="Patched wheels of transformers and TransformerEngine."
    )
    parser.add_argument("--version", action="version", version=f"modeling-overlay {__version__}")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)

    apply = verbs.add_parser(
        "apply", parents=[common], help="patch what is pinned; build wheels, index and constraints"
    )
    apply.add_argument(
        "releases", nargs="*", metavar="NAME==VERSION", help="pinned releases (default: every one that is delivered)"
    )
    apply.add_argument("--out", type=Path, metavar="DIR", help="where the products go (default: dist in the checkout)")
    sources = apply.add_mutually_exclusive_group()
    sources.add_argument(
        "--from-git",
        type=Path,
        metavar="PATH",
        help="patch what is committed in a git checkout of upstream; writes a wheel to --out, and nothing else",
    )
    sources.add_argument(
        "--from-tree",
        type=Path,
        metavar="PATH",
        help="patch an unpacked package tree whose files are those of a pin; writes a copy of it to --out, and nothing "
        "else",
    )
    apply.add_argument(
        "--any-commit", action="store_true", help="with --from-git: also where HEAD is not the commit that is pinned"
    )
    apply.add_argument(
        "--metadata-from",
        metavar="WHEEL",
        help="with --from-git: the wheel, or the pinned NAME==VERSION, that the metadata comes from",
    )
    apply.add_argument(
        "--run-upstream-build",
        action="store_true",
        help="with --from-git: build by upstream's own build, which runs its code, in isolation",
    )
    apply.set_defaults(command=_apply, parser=apply)

    drift = verbs.add_parser("drift", parents=[common], help="say for each release on the index which series fits")
    drift.add_argument("name", nargs="?", metavar="NAME", help="a pinned project (default: all)")
    forms = drift.add_mutually_exclusive_group()
    forms.add_argument("--json", dest="form", action="store_const", const="json", help="everything, for a program")
    forms.add_argument(
        "--markdown", dest="form", action="store_const", const="markdown", help="the tables as README.md has them"
    )
    drift.set_defaults(command=_drift, parser=drift, form="text")

    doctor = verbs.add_parser(
        "doctor",
        parents=[debug],
        help="say of the packages of this Python which fault is live, and what mends it; exits 1 where one is",
    )
    doctor.add_argument(
        "--json", dest="form", action="store_const", const="json", default="text", help="everything, for a program"
    )
    doctor.set_defaults(command=_doctor, parser=doctor)

    findings = verbs.add_parser(
        "check",
        parents=[debug],
        help="say what may go wrong with what is installed for this Python (docs/checks.md); exits 0, or 1 where a "
        "rule has an error, as none has for an environment alone: `overlay doctor` exits 1 where a fault is live",
    )
    findings.add_argument(
        "--json", dest="form", action="store_const", const="json", default="text", help="the findings, for a program"
    )
    findings.set_defaults(command=_check, parser=findings)

    lock = verbs.add_parser("lock", help="check, update and complete upstream.lock").add_subparsers(
        metavar="COMMAND", required=True
    )
    check = lock.add_parser("check", parents=[common], help="say whether the lock is sound; needs no network")
    check.set_defaults(command=_lock_check, parser=check)
    update = lock.add_parser("update", parents=[common], help="write blob ids, revisions and hashes of built wheels")
    update.add_argument("releases", nargs="*", metavar="NAME==VERSION", help="pinned releases (default: all)")
    update.set_defaults(command=_lock_update, parser=update)
    complete = lock.add_parser("complete", parents=[common], help="complete a commit pin from a checkout")
    complete.add_argument(
        "--checkout", type=Path, required=True, metavar="PATH", help="a git checkout that has the commit"
    )
    complete.set_defaults(command=_lock_complete, parser=complete)
    return parser


def _root(options: argparse.Namespace) -> Path:
    here = Path.cwd()
    for root in (
        [options.root.resolve()] if options.root else [Path(__file__).resolve().parent.parent, here, *here.parents]
    ):
        if (root / "upstream.lock").is_file():
            return Path(root)
    raise OverlayError(
        f"expected upstream.lock in {options.root or here}, found none: run this from a checkout of modeling-overlay, "
        "or name it with --root"
    )


def _relative(path: Path) -> Path:
    """`path` as seen from the current folder, where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _apply(options: argparse.Namespace) -> None:
    only = [name for name in ("any_commit", "metadata_from", "run_upstream_build") if getattr(options, name)]
    if options.from_git is None and only:
        options.parser.error(f"--{only[0].replace('_', '-')} goes with --from-git")
    for name in ("from_git", "from_tree"):
        if getattr(options, name) is not None and options.releases:
            options.parser.error(f"--{name.replace('_', '-')} takes a PATH in place of NAME==VERSION")
    if options.from_tree is not None and options.out is None:
        options.parser.error("--from-tree needs --out")
    if options.metadata_from and options.run_upstream_build:
        options.parser.error("--metadata-from and --run-upstream-build exclude each other")
    root = _root(options)
    out = options.out or _relative(root / "dist")
    lock = importlib.import_module("overlay.queue.lock").read(root / "upstream.lock")
    if options.from_tree is not None:
        importlib.import_module("overlay.deliver.package_tree").from_tree(lock, root, options.from_tree, out)
    elif options.from_git is None:
        importlib.import_module("overlay.deliver.apply").run(lock, root, options.releases, out)
    else:
        importlib.import_module("overlay.deliver.tree").from_git(
            lock,
            root,
            options.from_git,
            out,
            any_commit=options.any_commit,
            metadata_from=options.metadata_from,
            run_upstream_build=options.run_upstream_build,
        )


def _drift(options: argparse.Namespace) -> None:
    root = _root(options)
    lock = importlib.import_module("overlay.queue.lock").read(root / "upstream.lock")
    print(importlib.import_module("overlay.queue.drift").report(lock, root, options.name, options.form))  # noqa: T201


def _doctor(options: argparse.Namespace) -> int:
    return int(importlib.import_module("overlay.doctor").main(options.form))


def _check(options: argparse.Namespace) -> int:
    return int(importlib.import_module("overlay.checks.report").main(options.form))


def _lock_check(options: argparse.Namespace) -> None:
    path = _root(options) / "upstream.lock"
    importlib.import_module("overlay.deliver.relock").check(path)
    print(f"{path} is sound")  # noqa: T201


def _lock_update(options: argparse.Namespace) -> None:
    importlib.import_module("overlay.deliver.relock").update(_root(options) / "upstream.lock", options.releases)


def _lock_complete(options: argparse.Namespace) -> None:
    importlib.import_module("overlay.deliver.relock").complete(_root(options) / "upstream.lock", options.checkout)
