"""The command line: runs one command of `overlay.commands`, and says in one line what went wrong.

Exit codes: 0 done, 1 something is not as expected (one line says what), 2 wrong usage, 130 interrupted. Only the
command that was asked for is imported, so that a missing library is missed by the commands that need it, and by no
other.
"""

import argparse
import contextlib
import errno
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from overlay import commands
from overlay.errors import OverlayError, plain


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits."""
    gc.disable()  # a run is short; looking for cycles while libraries are imported takes a tenth of it
    _open_what_is_closed()
    words = _command_first(sys.argv[1:] if arguments is None else list(arguments))
    parser = commands.parser(next(iter(words), None))
    if words and words[0].startswith("-") and not any(option.startswith(words[0]) for option in _OF_THE_PROGRAM):
        parser.error(f"expected the command before its options, found {words[0]}: type overlay COMMAND {words[0]}")
    options, unknown = parser.parse_known_args(words)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files and words of others may be no such text
    with _terminated_like_interrupted():
        sys.exit(_run(options))


def _open_what_is_closed() -> None:
    """Standard streams that are closed (`>&-`) become /dev/null. Python has None for them, which cannot say whether it
    is a terminal, and a file or pipe would get their numbers, which a child takes for its own streams."""
    for number, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)  # something else has it already
            except OSError:
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


_OF_THE_PROGRAM = ("-h", "--help", "--version")
"""Options that need no command; `argparse` takes the beginning of one, too."""


def _command_first(words: Sequence[str]) -> list[str]:
    """The command line with `--debug` and `--root DIR`, which most commands have, behind the command that they stand
    before, `lock check` too: as options of the whole program they would be lost, for what the parser of a command has
    by default replaces them."""
    words = _behind(words)
    return [*words[:1], *_behind(words[1:])]


def _behind(words: Sequence[str]) -> list[str]:
    at = 0
    while at < len(words) and (words[at] in ("--debug", "--root") or words[at].startswith("--root=")):
        at += 2 if words[at] == "--root" else 1
    rest = list(words[at:])
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], *words[:at], *rest[end:]]


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
        return _failed(options, _missing(error, options) if options.extra else _fault(error), 1)
    except MemoryError:
        return _failed(options, "expected enough memory, found none left: free some and run this again", 1)
    except RecursionError:
        return _failed(options, "expected folders or tables a few levels deep, found hundreds: use another input", 1)
    except Exception as error:
        return _failed(options, _fault(error), 1)


def _failed(options: argparse.Namespace, message: str, code: int) -> int:
    if options.debug:
        traceback.print_exc()
    print(f"overlay: {plain(message)}", file=sys.stderr)  # noqa: T201
    return code


def _missing(error: ModuleNotFoundError, options: argparse.Namespace) -> str:
    """Editable, for a copy would stay behind the checkout, and its `.pth` file would lay the overlay over whatever
    that environment trains with."""
    also = ", or run scripts/apply.sh" if options.parser.prog.endswith(" apply") else ""
    return (
        f"expected the library {error.name}, found none: this command needs the extra `{options.extra}`: in a checkout "
        f"of modeling-overlay and an environment of its own, pip install --editable '.[{options.extra}]'{also}"
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
    """SIGTERM, and SIGHUP where nohup has not turned it off, unwind as Ctrl-C does, so that temporary folders go."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    known = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]  # Windows has it not
    numbers = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
