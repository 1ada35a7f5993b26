"""What earlier commits of this checkout say of the lock: one version of a built wheel never has two contents.

What is committed may have been delivered, so a revision that is in a commit keeps its bytes; one that is in no commit
yet may change.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from overlay.errors import OverlayError
from overlay.progress import say
from overlay.queue import git, lock
from overlay.queue.lock import Lock

Committed = Mapping[tuple[str, str, int | None], str]
"""The sha256 of built wheels, by project, release and revision."""


def check(path: Path, pins: Lock) -> None:
    """Compares the lock with what is committed.

    Raises:
        OverlayError: a wheel has other bytes under a revision that is committed.
    """
    text = lock.read_text(path)
    for commit, committed in _bases(path):
        for name, package in pins.packages.items():
            for position, release in enumerate(package.releases):
                found = release.built and release.built.sha256
                expected = committed.get((name, release.version, release.revision), found)
                if found != expected:
                    at: lock.Location = ("packages", name, "releases", position, "built", "sha256")
                    raise OverlayError(
                        f"{path}:{lock.line(text, at)}: {lock.key(at)}: expected {expected} for revision "
                        f"{release.revision}, as commit {commit[:12]} has it, found {found}: other bytes need another "
                        f"revision: set it back, and run overlay lock update {name}=={release.version}"
                    )


def committed(path: Path) -> Committed:
    """What is committed of built wheels; nothing where the lock is in no git repository."""
    return {key: sha256 for _, pins in reversed(list(_bases(path))) for key, sha256 in pins.items()}


def _bases(path: Path) -> Iterator[tuple[str, Committed]]:
    """HEAD, and what its branch is compared with: where it left the branch that it follows, or else the commit
    before."""
    folder = path.resolve().parent
    said = git.run("rev-parse", "--git-dir", folder=folder).stderr.decode("utf-8", "replace")
    if "dubious ownership" in said:
        say(f"{folder} belongs to another user, so git does not trust it: what is committed was not looked at")
    head = _revision(folder, "HEAD")
    if head is None:
        return
    base = None
    for followed in ("@{upstream}", "refs/remotes/origin/HEAD", "refs/remotes/origin/main"):
        other = _revision(folder, followed)
        if other is not None:
            done = git.run("merge-base", head, other, folder=folder)
            base = done.stdout.decode("ascii").strip() if done.returncode == 0 else None
            break
    if base in (None, head):
        base = _revision(folder, "HEAD^1")
    for commit in dict.fromkeys(filter(None, (head, base))):
        done = git.run("show", f"{commit}:./{path.name}", folder=folder)
        if done.returncode == 0:
            yield commit, _built(done.stdout)


def _revision(folder: Path, name: str) -> str | None:
    done = git.run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", folder=folder)
    return done.stdout.decode("ascii").strip() if done.returncode == 0 else None


def _built(content: bytes) -> Committed:
    """What a lock says, however sound the rest of it is: it may be of an older form."""
    found = {}
    try:
        for name, package in tomllib.loads(content.decode("utf-8"))["packages"].items():
            for release in package["releases"]:
                if "built" in release:
                    found[name, release["version"], release["revision"]] = release["built"]["sha256"]
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, LookupError, TypeError, AttributeError):
        return {}
    return found
