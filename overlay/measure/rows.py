"""A worker that finds one row after the other, and whoever reads them as they come.

The worker calls `told`, then `put` for each row and `done` at its end. Neither it nor what it starts outlives who
reads, however that one ends. Standard library only: both ends run beside other people's packages.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from overlay import processes
from overlay.errors import OverlayError
from overlay.progress import say

CHANNEL = "OVERLAY_ROWS"
"""The variable that tells a worker what it is asked, the descriptor for its rows, and who reads them."""

_LONGEST = 4000
"""Characters of what a worker wrote to stderr that its error has."""

_LAST_WORDS = 30.0
"""Seconds that a worker has to end, once it has closed its channel."""

_PR_SET_PDEATHSIG = 1

_ALIVE, _REFUSAL, _LOSS, _MET = b"~", b"!", b"?", b"="
"""What a line that is no row begins with; a reason, as JSON, is behind it, but for the last."""


class WorkerError(Exception):
    """A worker ended before it was done, or took too long: the first line says which, the last what it said last."""


class LostError(WorkerError):
    """Others that a worker needs are gone, and none that comes after it will meet them either; says who and why."""


def _nothing() -> None:
    pass


def read(
    command: Sequence[str],
    environment: Mapping[str, str],
    told: Any,
    patience: float,
    met: Callable[[], None] = _nothing,
) -> Generator[Any, None, None]:
    """Starts a worker, and yields its rows. It and what it started are gone when this ends, and their temporary files.

    Args:
        told: what it is asked, for JSON.
        patience: seconds that a row may take.
        met: is called when it has met others that it needs (`met`).

    Raises:
        WorkerError: it ended before it was done, or took too long.
        LostError: it says that it has lost others that it needs (`lost`).
        OverlayError: it says that it can be run on no build (`refuse`).
    """
    ours, theirs = os.pipe()
    with (
        # It is killed, so it cannot clean up itself
        tempfile.TemporaryDirectory(prefix="overlay-worker-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said,
        os.fdopen(ours, "rb", buffering=0) as source,
    ):
        channel = json.dumps({"told": told, "descriptor": theirs, "reader": os.getpid()})
        waiting = ""
        try:
            process = processes.start(
                command,
                env={**environment, CHANNEL: channel, "TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=(theirs,),
            )
        except BaseException:
            os.close(theirs)
            raise
        try:
            os.close(theirs)
            for line in _lines(source, patience):
                if line.startswith(_ALIVE):
                    why = json.loads(line.removeprefix(_ALIVE))
                    if why and why != waiting:
                        say(why)
                    waiting = why
                    continue
                if line == _MET:
                    met()
                    continue
                if line.startswith(_REFUSAL):
                    raise OverlayError(json.loads(line.removeprefix(_REFUSAL)))
                if line.startswith(_LOSS):
                    raise LostError(json.loads(line.removeprefix(_LOSS)))
                try:
                    row = json.loads(line)
                except ValueError:
                    raise WorkerError(f"gave {line[:80]!r} as an answer, which is no JSON\n{_end(said)}") from None
                if row is None:
                    return
                yield row
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS)
        except TimeoutError:
            raise WorkerError(f"took more than {patience:.0f} s for one answer\n{_end(said)}") from None
        finally:
            code = process.poll()
            processes.kill_group(process)
        raise WorkerError(f"{'closed its channel' if code is None else how(code)} before it was done\n{_end(said)}")


def how(code: int) -> str:
    """How a process ended, by its exit code, which is below 0 for a signal."""
    if code >= 0:
        return f"ended with exit status {code}"
    number = -code
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    memory = ", as when memory runs out" if number == signal.SIGKILL else ""
    return f"was killed ({name}{memory})"


def _lines(source: Any, patience: float) -> Iterator[bytes]:
    """Whole lines of a pipe, as they come; a buffered reader would keep some where `select` does not see them."""
    begun = b""
    deadline = time.monotonic() + patience
    while True:
        ready, _, _ = select.select([source], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        chunk = source.read(65536)
        if not chunk:
            return
        *lines, begun = (begun + chunk).split(b"\n")
        for line in lines:
            yield line
            deadline = time.monotonic() + patience


def _end(said: Any) -> str:
    said.seek(0)
    return str(said.read()[-_LONGEST:]).strip()


def told() -> Any:
    """In a worker: what it is asked. From here on it ends with who reads its rows."""
    end_with_parent(_channel()["reader"])
    return asked()


def asked() -> Any:
    """In a worker, or a rank that it has started: what the worker is asked."""
    return _channel()["told"]


def put(row: Any) -> None:
    """In a worker: one more row, for JSON. Not None."""
    _write(json.dumps(row).encode())


def alive(why: str = "") -> None:
    """In a worker: it waits for what may take longer than a row may, and the time for the next row begins anew.

    Who reads says `why`, once.
    """
    _write(_ALIVE + json.dumps(why).encode())


def refuse(why: str) -> NoReturn:
    """In a worker: what it is asked can be done with no build here; whoever reads raises `why`, and it ends."""
    _write(_REFUSAL + json.dumps(why).encode())
    sys.exit(why)


def met() -> None:
    """In a worker: others that it needs are there."""
    _write(_MET)


def lost(why: str) -> None:
    """In a worker: others that it needs are gone; whoever reads raises `why`, and ends it."""
    _write(_LOSS + json.dumps(why).encode())


def done() -> None:
    """In a worker: there are no more rows. Without it, its end is a failure."""
    put(None)


def _write(line: bytes) -> None:
    data = line + b"\n"
    while data:
        data = data[os.write(_channel()["descriptor"], data) :]


def _channel() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ[CHANNEL])
    return found


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when `parent`, which started it, ends: also where that one is killed itself.

    On Linux (prctl(2), PR_SET_PDEATHSIG); elsewhere only an end that runs `finally` takes the children with it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)


def end_with_launcher() -> None:
    """Has this process end with what launched it (`torchrun`), as `end_with_parent`."""
    end_with_parent(os.getppid())
