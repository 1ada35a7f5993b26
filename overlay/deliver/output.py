"""A folder is replaced at once: after a failure or a kill, at any moment, it is as before or as after.

What is to come is made in a sibling folder, together with hard links to everything in the old one that is not ours;
then the two folders change places in a single system call (renameat2(2) with RENAME_EXCHANGE on Linux, renamex_np(2)
with RENAME_SWAP on macOS).
"""

import ctypes
import errno
import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from overlay import cache
from overlay.errors import OverlayError, naming
from overlay.progress import say

ADVICE = "name another folder with --out"


@contextmanager
def replaced(
    target: Path, ours: Callable[[str], bool], advice: str = ADVICE, leftovers: Callable[[str], bool] | None = None
) -> Iterator[Path]:
    """Yields an empty folder; what is in it at the end replaces what was ours in `target`.

    Args:
        target: the folder to replace; it need not exist.
        ours: whether a file, by its POSIX path inside `target`, is this project's. All others are left as they are.
        leftovers: whether a file in what a killed run left is this project's; `ours`, if it is not given.
        advice: what a message tells the reader to do where `target` cannot be replaced.

    Raises:
        OverlayError: `target` cannot be replaced: it is no folder, or a mount point, or it or the folder that holds
            it cannot be written.
    """
    target = Path(os.path.realpath(target))
    with cache.locked("output", target):
        _check(target, advice)
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{target.name}.overlay-"
        with _alone(target.parent):
            _clear_leftovers(target, prefix, leftovers or ours)
            staging, held = _made(target, prefix)
        try:
            with naming(target):
                yield staging
            with _alone(target.parent):
                if target.is_dir():
                    _link_others(target, staging, ours)
                    _own_alike(target, staging)
                    shutil.copymode(target, staging)
                    _exchange(staging, target)
                else:
                    staging.chmod(0o777 & ~_umask())
                    staging.rename(target)
        finally:
            os.close(held)
            with _alone(target.parent):
                _clear(staging, target, ours)


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """Keeps every other run off the folders in `parent`: one in another container has other locks in its cache.

    Only for the moments in which names change. A file system that locks no folders, as some network ones, and somebody
    who holds the folder for more than a minute are passed over: then each step is still made at once.
    """
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
            else:
                break
        yield
    finally:
        os.close(descriptor)


def _clear_leftovers(target: Path, prefix: str, ours: Callable[[str], bool]) -> None:
    """Removes what killed runs left beside `target`; what another run holds stays."""
    for left in list(target.parent.iterdir()):
        if re.fullmatch(rf"{re.escape(prefix)}([0-9]+|new)", left.name):
            with suppress(FileNotFoundError), _held(left) as free:
                if free:
                    _clear(left, target, ours)


def _made(target: Path, prefix: str) -> tuple[Path, int]:
    """A new staging folder, and the descriptor that locks it as long as its run lives.

    Its inode is in its name: an old folder that changed places with it has another inode.
    """
    new = target.with_name(f"{prefix}new")
    new.mkdir(mode=0o700)
    descriptor = os.open(new, os.O_RDONLY)
    with suppress(OSError):  # a file system that locks no folders
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return new.rename(target.with_name(f"{prefix}{os.fstat(descriptor).st_ino}")), descriptor


def _never_exchanged(left: Path) -> bool:
    return left.name.rpartition("-")[2] in ("new", str(left.stat().st_ino))


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Locks a staging folder, and says whether it was free: a run in another container may be filling it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system that locks no folders, as some network ones
            pass
        yield True
    finally:
        os.close(descriptor)


def check(target: Path, advice: str = ADVICE) -> None:
    """Whether `target` can be replaced, asked before work is done for it. Raises OverlayError as `replaced` does."""
    _check(Path(os.path.realpath(target)), advice)


def _check(target: Path, advice: str) -> None:
    if target.exists() and not target.is_dir():
        raise OverlayError(f"expected a folder at {target}, found a file: {advice}")
    if target.exists() and os.statvfs(target).f_flag & os.ST_RDONLY:
        raise OverlayError(f"{target}: expected a folder that can be written, found a read-only file system: {advice}")
    if target == target.parent or os.path.ismount(target):
        raise OverlayError(
            f"{target} is a mount point, which cannot be replaced at once: name a folder inside it with --out"
        )
    parent = next(folder for folder in target.parents if folder.exists())
    for folder in (target, parent) if target.exists() else (parent,):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OverlayError(f"{folder}: expected a folder that can be written, found that it cannot: {advice}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _link_others(source: Path, staging: Path, ours: Callable[[str], bool], inside: str = "") -> None:
    """Links everything in `source` that is not ours into `staging`. Raises OverlayError where that cannot be done."""
    for entry in os.scandir(source):
        path = f"{inside}{entry.name}"
        copy = staging / entry.name
        folder = entry.is_dir(follow_symlinks=False)
        if _only_ours(Path(entry.path), ours, f"{path}/") if folder else ours(path):
            continue
        if os.path.lexists(copy) and not (folder and copy.is_dir()):
            raise OverlayError(
                f"{entry.path} stands where a product goes, and is not this project's: move it away, or name another "
                "folder with --out"
            )
        if not folder:
            _link(Path(entry.path), copy)
            continue
        if os.path.ismount(entry.path) or not os.access(entry.path, os.R_OK | os.W_OK | os.X_OK):
            raise OverlayError(
                f"{entry.path} is a mount point or cannot be written, so the folder around it cannot be replaced at "
                "once: name another folder with --out"
            )
        made = not copy.exists()
        copy.mkdir(exist_ok=True)
        _link_others(Path(entry.path), copy, ours, f"{path}/")
        if made:
            _own_alike(Path(entry.path), copy)
            shutil.copystat(entry.path, copy)


def _own_alike(folder: Path, copy: Path) -> None:
    """Gives `copy` the owner of `folder`, where this user may do that."""
    old, new = folder.stat(), copy.stat()
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        with suppress(PermissionError):
            os.chown(copy, old.st_uid, old.st_gid)


def _only_ours(folder: Path, ours: Callable[[str], bool], inside: str) -> bool:
    """Whether `folder` holds something, and nothing but what is ours."""
    entries = list(os.scandir(folder))
    return bool(entries) and all(
        _only_ours(Path(entry.path), ours, f"{inside}{entry.name}/")
        if entry.is_dir(follow_symlinks=False)
        else ours(f"{inside}{entry.name}")
        for entry in entries
    )


def _link(file: Path, copy: Path) -> None:
    try:
        os.link(file, copy, follow_symlinks=False)
    except OSError as error:
        # Another mount, an immutable file, one that fs.protected_hardlinks guards, a file system without hard links.
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
            raise
        raise OverlayError(
            f"{file} cannot be linked ({error.strerror}), so the folder around it cannot be replaced at once: move it "
            "away, or name another folder with --out"
        ) from None


def _exchange(one: Path, other: Path) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if sys.platform == "darwin":
        failed = library.renamex_np(*names, ctypes.c_uint(2))
    else:
        here = ctypes.c_int(-100)  # AT_FDCWD; both paths are absolute
        failed = library.renameat2(here, names[0], here, names[1], ctypes.c_uint(2))
    if failed:
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV):
            raise OverlayError(
                f"{other}: expected a file system that can exchange two folders at once, found one that cannot "
                f"({os.strerror(number)}): name a folder that is not there yet with --out"
            )
        raise OSError(number, os.strerror(number), str(other))


def _clear(old: Path, target: Path, ours: Callable[[str], bool]) -> None:
    """Removes a staging folder, or the old folder after the exchange; says so where that cannot be done."""
    try:
        if old.is_dir() and _never_exchanged(old):
            shutil.rmtree(old)
        elif old.is_dir():
            _retire(old, target, ours)
    except FileNotFoundError:
        pass  # another run removes it at the same time
    except OSError as error:
        say(f"{error.filename} cannot be removed ({error.strerror}): remove it by hand")


def _retire(old: Path, target: Path, ours: Callable[[str], bool], inside: str = "") -> None:
    """Removes everything in an old folder, and it. What others put into it at the last moment moves to `target`."""
    for entry in os.scandir(old):
        path = f"{inside}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            _retire(Path(entry.path), target, ours, f"{path}/")
        elif ours(path) or os.path.lexists(target / path):
            Path(entry.path).unlink()
        else:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            Path(entry.path).rename(target / path)
    with suppress(OSError):  # a mount point stays
        old.rmdir()
