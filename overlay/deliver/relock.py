"""Writes into the lock what a build finds: blob ids before and after each series, revisions, and the sha256 of each
built wheel."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from overlay import cache
from overlay.deliver import archive
from overlay.deliver.apply import Patched, derive
from overlay.deliver.wheel import Wheel
from overlay.errors import OverlayError
from overlay.progress import say
from overlay.queue import checkout, history, images, lock, series, source
from overlay.queue.history import Committed
from overlay.queue.lock import Exchanged, Location, Lock, Package, Release


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keeps every other run off the lock and the series beside it, as long as it changes them."""
    with cache.locked("queue", path):
        for left in path.resolve().parent.glob(f".{path.name}.overlay-*"):  # of a killed run
            left.unlink(missing_ok=True)
        yield


def update(path: Path, requirements: Sequence[str] = ()) -> None:
    """Brings `files`, `revision` and `built` of the named releases (or all) up to date with their series.

    Where the bytes of a built wheel differ from what the lock names, the revision rises: one version never has two
    contents.

    Args:
        path: the lock; `patches/` lies beside it.
        requirements: `name==version` each; none means all.

    Raises:
        OverlayError: an artefact or a series is not as it must be; the lock is as it was then.
    """
    with alone(path):
        pins = lock.read(path)
        chosen = [pins.find(text)[::2] for text in requirements]
        found = changes(path, pins, lambda name, release: not chosen or (name, release) in chosen)
        if found:
            lock.write(path, found)
    for where in found:
        say(f"{path.name}: wrote {lock.key(where)}")
    if not found:
        say(f"{path.name} is up to date")


def changes(
    path: Path, pins: Lock, wanted: Callable[[str, Release], bool], patches: Path | None = None
) -> dict[Location, Any]:
    """What `update` would write, by its place in the lock.

    Args:
        path: the lock.
        pins: what is in it.
        wanted: whether a release, with the name of its project, is looked at.
        patches: where the series lie, if not in `patches/` beside the lock.

    Raises:
        OverlayError: as `update` does.
    """
    patches = patches or path.parent / "patches"
    committed = history.committed(path)
    found: dict[Location, Any] = {}
    for name, package in pins.packages.items():
        for position, release in enumerate(package.releases):
            if release.series is not None and wanted(name, release):
                at: Location = ("packages", name, "releases", position)
                known = release.model_dump(by_alias=True)
                found |= _changes(at, known, derived(patches, name, package, release, committed))
    return found


def derived(
    patches: Path, name: str, package: Package, release: Release, committed: Committed = MappingProxyType({})
) -> dict[str, Any]:
    """What the lock has to say of a release with a series, by key."""
    return (
        _delivered(patches, name, package, release, committed)
        if release.use == "deliver"
        else _tested(patches, name, package, release)
    )


def _changes(at: Location, known: dict[str, Any], found: dict[str, Any]) -> dict[Location, Any]:
    """What is to be written: of files that are there, only the blob ids, so that comments between them stay."""
    changes: dict[Location, Any] = {}
    for key, value in found.items():
        old = list(known[key]) if key == "files" else known[key]
        if key == "files" and [file["path"] for file in old] == [file["path"] for file in value]:
            for position, (before, after) in enumerate(zip(old, value, strict=True)):
                changes |= {(*at, key, position, side): after[side] for side in after if after[side] != before[side]}
        elif old != value:
            changes[(*at, key)] = value
    return changes


def _delivered(patches: Path, name: str, package: Package, release: Release, committed: Committed) -> dict[str, Any]:
    known = None if release.built is None else release.built.sha256
    if release.revision is None:
        release = release.model_copy(update={"revision": 1})
    built, sha256 = _build(patches, name, package, release)
    earlier = known or sha256
    while {earlier, committed.get((name, release.version, release.revision), sha256)} != {sha256}:
        assert release.revision is not None
        release = release.model_copy(update={"revision": release.revision + 1})
        built, sha256 = _build(patches, name, package, release)
        earlier = sha256
        say(f"{name} {release.version}: the wheel's bytes changed, so its revision rises to {release.revision}")
    return {
        "revision": release.revision,
        "files": _dumped([image.exchanged for image in built.exchanged]),
        "built": {"file": built.release.built_file, "sha256": sha256},
    }


def _build(patches: Path, name: str, package: Package, release: Release) -> tuple[Patched, str]:
    built = derive(patches, name, package, release)
    digest = hashlib.sha256()
    for piece in archive.write(built.members):
        digest.update(piece)
    return built, digest.hexdigest()


def _tested(patches: Path, name: str, package: Package, release: Release) -> dict[str, Any]:
    assert release.series is not None
    made = _images(series.read(patches / release.series), name, package, release)
    return {"files": _dumped([image.exchanged for image in made])}


def _dumped(files: Sequence[Exchanged]) -> list[dict[str, str]]:
    return [file.model_dump() for file in files]


def complete(path: Path, folder: Path) -> None:
    """Completes a commit pin from a checkout that has the commit: full id, the series that fits, blob ids before and
    after.

    Args:
        path: the lock; `patches/` lies beside it.
        folder: the checkout.

    Raises:
        OverlayError: it is no checkout of a pinned project, lacks the commit, or no single series fits.
    """
    with alone(path):
        pins = lock.read(path)
        name, package = checkout.project_of(pins, checkout.Checkout.open(folder))
        if package.commit is None:
            raise OverlayError(
                f"{path}: expected a commit pin under packages.{name}, found none: add [packages.{name}.commit] with "
                "id and verified = false"
            )
        at = checkout.Checkout.open(folder, package.commit.id)
        queue, made = checkout.fitting(path.parent / "patches", name, package, at)
        where: Location = ("packages", name, "commit")
        files = _dumped([image.exchanged for image in made])
        lock.write(
            path,
            {
                (*where, "id"): at.commit,
                (*where, "verified"): True,
                (*where, "series"): queue.name,
                (*where, "files"): files,
            },
        )
        say(f"{path.name}: packages.{name}.commit is {at.commit}, verified; {queue.name} fits")


def _check_images(queue: series.Series, name: str, package: Package, release: Release) -> None:
    """Whether the series gives what the lock names, if the release's wheel is in the cache."""
    if not source.path(release.wheel).is_file():
        say(
            f"{release.wheel.file} is not in the cache: whether {queue.name} gives what the lock names was not "
            "looked at"
        )
        return
    made = _images(queue, name, package, release)
    images.check(
        made, [file for file in release.files if file.path != package.version_file], f"{name} {release.version}"
    )


def _images(queue: series.Series, name: str, package: Package, release: Release) -> list[images.Image]:
    wheel = Wheel.pinned(name, release.wheel)
    return images.make(queue, package.prefix, lambda file: wheel.member(file).content())


def check(path: Path) -> None:
    """Whether the lock is sound: its fields, and that it and `patches/` agree. Needs no network.

    Where the artefact is in the cache, the series is applied and compared too; where it is not, that is said.

    Raises:
        OverlayError: the first thing that is not.
    """
    pins = lock.read(path)
    text = lock.read_text(path)
    used: set[str] = set()
    for name, package in pins.packages.items():
        pinned: list[Release | lock.Commit] = [*package.releases, *([package.commit] if package.commit else [])]
        for position, release in enumerate(pinned):
            if release.series is None:
                continue
            used.add(release.series)
            at: Location = (
                ("packages", name, "releases", position)
                if isinstance(release, Release)
                else ("packages", name, "commit")
            )
            queue = series.read(path.parent / "patches" / release.series)
            expected = {file.removeprefix(package.prefix) for file in queue.paths("wheel")}
            if isinstance(release, Release) and release.use == "deliver":
                expected |= {package.version_file} if package.version_file else set()
                if release.built is None:
                    raise OverlayError(
                        f"{path}:{lock.line(text, at)}: {lock.key(at)}.built: missing: expected the sha256 of the "
                        "patched wheel: run overlay lock update"
                    )
            found = {file.path for file in release.files}
            if found != expected:
                differing = min(found ^ expected)
                what = "no patch changes it" if differing in found else "it is missing"
                raise OverlayError(
                    f"{path}:{lock.line(text, (*at, 'files'))}: {lock.key(at)}.files: {differing}: {what}: run "
                    "overlay lock update"
                )
            if isinstance(release, Release):
                _check_images(queue, name, package, release)
    for folder in sorted((path.parent / "patches").iterdir()):
        if folder.is_dir() and folder.name not in used and not folder.name.startswith("."):
            series.read(folder)
    history.check(path, pins)
