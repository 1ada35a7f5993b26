"""The user's cache folder, and the locks between processes that share it. Standard library only."""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from overlay import atomic
from overlay.errors import OverlayError
from overlay.progress import say

NAME = "modeling-overlay"


def folder() -> Path:
    """The cache folder of this project; it need not exist yet.

    `$XDG_CACHE_HOME` decides; a relative one is ignored, as the XDG Base Directory Specification (0.8) says.
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():
        return chosen / NAME
    try:
        home = Path.home()
    except RuntimeError as error:
        raise OverlayError(
            "no home folder is known, so no cache folder: set HOME or XDG_CACHE_HOME to an absolute path"
        ) from error
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / NAME


def make(path: Path) -> Path:
    """`path`, made with its parents if it is not there.

    Raises:
        OverlayError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OverlayError(
            f"the cache folder {path} cannot be made ({error.strerror}): "
            "make it writable, or set XDG_CACHE_HOME to a folder that is"
        ) from error
    return path


def write(path: Path, text: str) -> None:
    """Writes the whole file or none, and makes its folder. Another thread or process may write it at the same time.

    Raises:
        OverlayError: the folder cannot be made.
    """
    make(path.parent)
    with atomic.replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def locked(name: str, place: Path | None = None) -> Iterator[int]:
    """Hold the lock `name` of the cache folder, or the one of that name that `place` has, against every other process;
    says so on stderr when it has to wait.

    The kernel lets go of an flock(2) when its holder ends, however it ends, so a lock never has to be cleaned up;
    the lock's file stays, because removing it would let two holders in.

    Yields:
        The file descriptor that holds it. A child process that inherits it (`pass_fds`) holds the lock as well, so that
        what a killed command leaves running cannot meet its successor.

    Raises:
        OverlayError: the lock's file cannot be made.
    """
    if place is not None:
        from hashlib import sha256

        name = f"{name}-{sha256(os.fsencode(place.resolve())).hexdigest()[:16]}"
    path = make(folder() / "locks") / f"{name}.lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise OverlayError(
            f"the lock {path} cannot be opened ({error.strerror}): "
            f"make the cache folder writable, or set XDG_CACHE_HOME to a folder that is"
        ) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process holds {name!r}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)
