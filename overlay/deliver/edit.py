"""Opens a series for editing: a git work tree of a pinned release's files, with a commit for each patch.

`overlay.deliver.refresh` exports it back. What both know of the tree is in `.git/overlay.json`.
"""

import hashlib
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path

from overlay import atomic
from overlay.deliver import output
from overlay.deliver.wheel import Wheel
from overlay.errors import OverlayError
from overlay.progress import say
from overlay.queue import lock, series, source
from overlay.queue.lock import Package, Release
from overlay.queue.series import Series
from overlay.queue.worktree import WorkTree

ADVICE = "name another folder with --tree"


@dataclass
class Upstream:
    """The files of a pinned release, by their paths in upstream's git tree: from its wheel, or else from its sdist, if
    that is pinned."""

    project: str
    package: Package
    release: Release
    _looked_up: dict[str, bytes | None] = field(default_factory=dict)

    @cached_property
    def wheel(self) -> Wheel:
        """Upstream's wheel. Raises OverlayError as `source.read` and `Wheel.read` do."""
        return Wheel.pinned(self.project, self.release.wheel)

    def member(self, path: str) -> bytes:
        """The content of a file by its path in the wheel. Raises OverlayError where there is none."""
        return self.wheel.member(path).content()

    def read(self, path: str) -> bytes | None:
        """The content of a file, or None where the release has no such one or it cannot be had."""
        inside = path.removeprefix(self.package.prefix)
        if path.startswith(self.package.prefix) and inside.startswith(f"{self.project}/") and self.wheel.has(inside):
            return self.wheel.member(inside).content()
        return self._in_sdist(path)

    def package_files(self) -> dict[str, bytes]:
        """Every file of the package in the wheel, without the metadata."""
        return {
            f"{self.package.prefix}{member.name}": member.content()
            for member in self.wheel.members
            if member.name.startswith(f"{self.project}/")
        }

    @cached_property
    def _sdist(self) -> bytes | None:
        if self.release.sdist is None:
            return None
        try:
            return source.read(self.project, self.release.sdist)
        except OverlayError as error:
            say(f"{self.release.sdist.file}: not looked at: {error}")
            return None

    def _in_sdist(self, path: str) -> bytes | None:
        if path not in self._looked_up and self._sdist is not None and self.release.sdist is not None:
            name = self.release.sdist.file.removesuffix(".tar.gz")
            try:
                with tarfile.open(fileobj=BytesIO(self._sdist)) as archive:
                    file = archive.extractfile(f"{name}/{path}")
                    self._looked_up[path] = None if file is None else file.read()
            except (KeyError, tarfile.TarError):  # it has no such file, or is no archive
                self._looked_up[path] = None
        return self._looked_up.get(path)


@dataclass(frozen=True)
class State:
    """What is known of a tree: the release and the series that it is of, the commit of upstream's files, that of the
    last patch as the tree was made, the one that was exported last, the digests of the series as it was each time, and
    whether all files are there."""

    requirement: str
    series: str
    upstream: str
    made: str
    exported: str
    digests: Sequence[str]
    everything: bool

    @classmethod
    def read(cls, folder: Path) -> "State | None":
        """The state of the tree in `folder`; None where it is none of ours."""
        try:
            return cls(**json.loads((folder / ".git" / "overlay.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        """Writes it into the tree, at once."""
        with atomic.replacing(folder / ".git" / "overlay.json") as draft:
            draft.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a series: `series`, and the patches."""
    return {file.name: file.read_bytes() for file in sorted([folder / "series", *folder.glob("*.patch")])}


def digest(files: Mapping[str, bytes]) -> str:
    """One sha256 over the files of a series."""
    rows = [f"{name} {hashlib.sha256(content).hexdigest()}\n" for name, content in sorted(files.items())]
    return hashlib.sha256("".join(rows).encode("utf-8")).hexdigest()


def start(path: Path, requirement: str, tree: Path, everything: bool = False) -> None:
    """Makes the work tree of a release in `tree`: upstream's files as its first commit, and one for each patch.

    A tree that is there already is left alone where nothing has changed since, and made anew where the series has.

    Args:
        path: the lock; `patches/` lies beside it.
        requirement: a pinned `name==version` with a series.
        tree: the new folder.
        everything: the whole package, in the place of the files that the series touches.

    Raises:
        OverlayError: no such pin, a patch does not fit, or `tree` holds something else, or work that is not exported.
    """
    name, package, release = lock.read(path).find(requirement)
    label = f"{name}=={release.version}"
    if release.series is None:
        raise OverlayError(f"{label}: expected a release with a series, found none: only what is patched can be edited")
    queue = series.read(path.parent / "patches" / release.series)
    now = digest(contents(queue.folder))
    _check(tree)
    state = State.read(tree)
    if state is not None:
        _check_exported(tree, state, now)
        found = (state.requirement, state.series, state.digests[-1], state.everything)
        if found == (label, queue.name, now, everything):
            say(f"{tree} has {label} with {queue.name} already")
            return
    with output.replaced(tree, lambda _: True, ADVICE) as staging:
        upstream = Upstream(name, package, release)
        made, first = _filled(staging, upstream, queue, everything)
        made.git("tag", "upstream", first)
        State(label, queue.name, first, made.head(), made.head(), [now], everything).write(staging)
    say(f"{tree} has {label} as its first commit, and a commit for each patch of {queue.name}")
    say("amend, rebase or add commits there, and run overlay refresh")


def _check(tree: Path) -> None:
    """Raises OverlayError where something else than a tree of ours is at `tree`."""
    output.check(tree, ADVICE)
    if tree.is_dir() and any(tree.iterdir()) and State.read(tree) is None:
        raise OverlayError(f"{tree}: expected a new folder, or a tree of overlay edit, found another one: {ADVICE}")


def _check_exported(tree: Path, state: State, now: str) -> None:
    """Raises OverlayError where the tree has something that its series has not."""
    work = WorkTree(tree)
    unfinished = work.unfinished()
    found = f"{unfinished} in progress" if unfinished else ", ".join(work.changed()[:3])
    if not found and work.head() != (state.exported if now == state.digests[-1] else state.made):
        found = "other commits than the series has"
    if not found:
        found = ", ".join(work.other_work(state.exported)[:3])
    if found:
        raise OverlayError(
            f"{tree}: expected a tree whose work is exported, found {found}: run overlay refresh --tree {tree}, or "
            "remove the folder to throw it away"
        )


def _filled(folder: Path, upstream: Upstream, queue: Series, everything: bool = False) -> tuple[WorkTree, str]:
    release = upstream.release
    aside = kept_aside(queue, upstream)
    files = base(queue, upstream, aside)
    if everything:
        files = upstream.package_files() | files
    work = WorkTree.create(folder, files, f"upstream {upstream.project} {release.version}")
    first = work.head()
    for patch in queue.patches:
        if patch.file.name in aside:
            label = f"{upstream.project} {release.version}"
            where = f"{aside[patch.file.name]} is not among the files of {label} that are pinned."
            say(f"{patch.file.name}: {where} The patch is kept as it is")
            work.hold_place(patch.file.name, patch.subject, where)
        elif not work.take(patch.file):
            rows = series.failures([patch], {path: (folder / path).read_bytes() for path in files})
            raise OverlayError(
                f"{upstream.project} {release.version}: expected a series that git am takes, found that "
                f"{'; '.join(rows) or patch.file.name} does not fit: restore the patch, or run overlay lock check"
            )
    return work, first


def kept_aside(queue: Series, upstream: Upstream) -> dict[str, str]:
    """The patches for pull requests alone, by their file names, that change a file which the pinned artefacts of the
    release do not have, and that file."""
    created: set[str] = set()
    aside = {}
    for patch in queue.patches:
        needed = [path for path in patch.paths if path not in patch.created | created]
        missing = [path for path in needed if upstream.read(path) is None]
        if missing and patch.delivery == {"pull-request"}:
            aside[patch.file.name] = missing[0]
        else:
            created |= patch.created
    return aside


def base(queue: Series, upstream: Upstream, aside: Mapping[str, str]) -> dict[str, bytes]:
    """The files that the series touches, as they are before it, by path."""
    paths = dict.fromkeys(path for patch in queue.patches if patch.file.name not in aside for path in patch.paths)
    found = {path: upstream.read(path) for path in paths}
    return {path: content for path, content in found.items() if content is not None}


def found(root: Path, tree: Path | None, here: Sequence[Path]) -> Path:
    """The tree that is meant: the one that is named, the one around the current folder, or the only one under `edit/`.

    Raises:
        OverlayError: it is no tree of ours, or none or several are there.
    """
    if tree is not None:
        if State.read(tree) is None:
            raise OverlayError(f"{tree}: expected a tree of overlay edit, found none: name the folder of one")
        return tree
    around = [folder for folder in here if State.read(folder) is not None]
    if around:
        return around[0]
    below = [folder for folder in sorted((root / "edit").glob("*")) if State.read(folder) is not None]
    if len(below) != 1:
        listed = ", ".join(str(folder) for folder in below) or "none"
        raise OverlayError(
            f"expected one tree of overlay edit in {root / 'edit'}, found {listed}: "
            + ("name one with --tree" if below else "run overlay edit NAME==VERSION first, or name one with --tree")
        )
    return below[0]
