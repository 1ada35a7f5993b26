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
    for commit, committed in _commits(path):
        _compare(path, pins, commit[:12], committed)


def check_head(path: Path, pins: Lock) -> None:
    """The same against HEAD alone, for what has no time for all: of a lock that is as it is there, one process."""
    done = git.run("cat-file", "blob", f"HEAD:./{path.name}", folder=path.resolve().parent)
    if done.returncode == 0 and done.stdout != path.read_bytes():
        _compare(path, pins, "HEAD", _built(done.stdout))


def _compare(path: Path, pins: Lock, commit: str, committed: Committed) -> None:
    for name, package in pins.packages.items():
        for position, release in enumerate(package.releases):
            found = release.built and release.built.sha256
            expected = committed.get((name, release.version, release.revision), found)
            if found != expected:
                at: lock.Location = ("packages", name, "releases", position, "built", "sha256")
                raise OverlayError(
                    f"{path}:{lock.line(lock.read_text(path), at)}: {lock.key(at)}: expected {expected} for revision "
                    f"{release.revision}, as commit {commit} has it, found {found}: other bytes need another "
                    f"revision: set it back, and run overlay lock update {name}=={release.version}"
                )


def committed(path: Path) -> Committed:
    """What is committed of built wheels; nothing where the lock is in no git repository."""
    return {key: sha256 for _, pins in reversed(list(_commits(path))) for key, sha256 in pins.items()}


def _commits(path: Path) -> Iterator[tuple[str, Committed]]:
    """HEAD, what it is compared with, and of every commit before what those behind it do not say: a revision that was
    taken out, or set back, keeps its bytes too."""
    folder = path.resolve().parent
    done = git.run("rev-parse", "--git-dir", "--is-shallow-repository", folder=folder)
    if b"dubious ownership" in done.stderr:
        say(f"{folder} belongs to another user, so git does not trust it: what is committed was not looked at")
    if done.stdout.split()[-1:] == [b"true"]:
        say(f"{folder} is a shallow clone: what its commits lack was not looked at: run git fetch --unshallow")
    head = _revision(folder, "HEAD")
    if head is None:
        return
    seen: set[tuple[str, str, int | None]] = set()
    for commit in dict.fromkeys((head, *_bases(folder, head))):
        found = _built(_content(folder, path.name, commit))
        seen |= found.keys()
        yield commit, found
    listed = git.run("rev-list", "--topo-order", head, "--", path.name, folder=folder).stdout.decode("ascii").split()
    for commit in listed:
        found = {key: value for key, value in _built(_content(folder, path.name, commit)).items() if key not in seen}
        seen |= found.keys()
        yield commit, found


def _bases(folder: Path, head: str) -> list[str]:
    """What a branch is compared with: where it left the branches that it follows, or else the commit before."""
    found = []
    for followed in ("@{upstream}", "refs/remotes/origin/HEAD", "refs/remotes/origin/main"):
        other = _revision(folder, followed)
        if other is not None:
            done = git.run("merge-base", head, other, folder=folder)
            found += done.stdout.decode("ascii").split() if done.returncode == 0 else []
    bases = [base for base in found if base != head]
    before = None if bases else _revision(folder, "HEAD^1")
    return [before] if before else bases


def _revision(folder: Path, name: str) -> str | None:
    done = git.run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", folder=folder)
    return done.stdout.decode("ascii").strip() if done.returncode == 0 else None


def _content(folder: Path, name: str, commit: str) -> bytes:
    return git.run("cat-file", "blob", f"{commit}:./{name}", folder=folder).stdout


def _built(content: bytes) -> Committed:
    """What a lock says, however sound the rest of it is: it may be of an older form."""
    found = {}
    try:
        for project, package in tomllib.loads(content.decode("utf-8"))["packages"].items():
            for release in package["releases"]:
                if "built" in release:
                    found[project, release["version"], release["revision"]] = release["built"]["sha256"]
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, LookupError, TypeError, AttributeError):
        return {}
    return found
