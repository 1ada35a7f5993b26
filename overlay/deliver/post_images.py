"""`overlay/patched/`: the post-images of the pinned releases, which the overlay loads, and the manifest over them.

`overlay.manifest` reads it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from email.parser import HeaderParser
from pathlib import Path

from overlay import manifest
from overlay.deliver.wheel import Wheel
from overlay.errors import OverlayError
from overlay.queue import images, series
from overlay.queue.lock import Lock, Package, Release


@dataclass(frozen=True)
class Overlaid:
    """What the overlay has of a pinned release: its series, the images of it, and upstream's licences by their file
    names.

    `untouched` are the blob ids of files that its series leaves as they are, and that of another release changes.
    """

    project: str
    release: Release
    queue: series.Series
    images: Sequence[images.Image]
    untouched: Mapping[str, str]
    licences: Mapping[str, bytes]


def overlaid(
    project: str, package: Package, release: Release, queue: series.Series, wheel: Wheel, made: Sequence[images.Image]
) -> Overlaid:
    """What the overlay takes of the images that were made of a release. Compares nothing with the lock.

    Args:
        queue: the series.
        wheel: upstream's.
        made: the images; those of files that only the patched wheel takes are left out.
    """
    paths = _paths(queue, package)
    taken = [image for image in made if image.path in paths]
    untouched = {
        path: manifest.blob_id(wheel.member(path).content())
        for path in {file.path for other in package.releases for file in other.files} - paths
        if wheel.has(path)
    }
    return Overlaid(project, release, queue, taken, untouched, _licences(wheel) if taken else {})


def _paths(queue: series.Series, package: Package) -> set[str]:
    return {path.removeprefix(package.prefix) for path in queue.paths("overlay")}


def make(patches: Path, project: str, package: Package, release: Release) -> Overlaid:
    """Makes the images of a release that no wheel is built of, and compares them with the lock.

    Raises:
        OverlayError: the artefact is not to be had, the series does not fit, or the lock names something else.
    """
    assert release.series is not None
    wheel = Wheel.pinned(project, release.wheel)
    queue = series.read(patches / release.series)
    made = images.make(queue, package.prefix, lambda path: wheel.member(path).content(), "overlay")
    named = [file for file in release.files if file.path in _paths(queue, package)]
    images.check(made, named, f"{project} {release.version}")
    return overlaid(project, package, release, queue, wheel, made)


def _licences(wheel: Wheel) -> dict[str, bytes]:
    """The files that METADATA names as `License-File`, where PEP 639 or setuptools before it put them."""
    header = HeaderParser().parsestr(wheel.member(f"{wheel.dist_info}/METADATA").content().decode("utf-8"))
    names = {member.name for member in wheel.members}
    found = {}
    for name in header.get_all("License-File", failobj=[]):
        place, older = f"{wheel.dist_info}/licenses/{name}", f"{wheel.dist_info}/{name}"
        found[name] = wheel.member(older if older in names else place).content()
    return found


def write(listed: Sequence[Overlaid], pins: Lock, folder: Path) -> None:
    """Writes the post-images at `<project>/<version>/<path in the wheel>`, the licences, and `manifest.json`.

    A post-image that several releases have is stored once, in the folder of the first; so is a licence, at
    `<project>/<name>`.

    Raises:
        OverlayError: two series make different things of the same file.
    """
    places: dict[tuple[str, str], str] = {}
    known: dict[tuple[str, str], tuple[str, str]] = {}
    releases = []
    for one in listed:
        label = f"{one.project} {one.release.version}"
        files = []
        for image in one.images:
            ids = image.exchanged
            after, other = known.setdefault((ids.path, ids.before), (ids.after, label))
            if after != ids.after:
                raise OverlayError(
                    f"{ids.path}: expected one post-image of the blob {ids.before}, found {after} in {other} and "
                    f"{ids.after} in {label}: let both series change it alike"
                )
            place = places.setdefault((ids.path, ids.after), f"{one.project}/{one.release.version}/{ids.path}")
            _write(folder / place, image.after)
            files.append(asdict(manifest.File(ids.path, ids.before, ids.after, place)))
        for name, content in one.licences.items():
            shared = folder / one.project / name
            same = not shared.exists() or shared.read_bytes() == content
            _write(shared if same else folder / one.project / one.release.version / name, content)
        releases.append(
            {
                "project": one.project,
                "version": one.release.version,
                "series": one.release.series,
                "faults": [asdict(fault) for fault in one.queue.faults("overlay")],
                "files": files,
            }
        )
    found = {(one.project, one.release.version) for one in listed}
    complete = found == {(project, release.version) for project, _, release in pins.patched()}
    whole = {"format": manifest.FORMAT, "complete": complete, "releases": releases, "right": _right(listed, pins)}
    (folder / "manifest.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def _write(file: Path, content: bytes) -> None:
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def _right(listed: Sequence[Overlaid], pins: Lock) -> dict[str, dict[str, str]]:
    """The blob ids of covered files that need no patch, by path, each with the first release that has it: upstream has
    mended them, or the series of the release has nothing to do there."""
    covered = {image.path for one in listed for image in one.images}
    right: dict[str, dict[str, str]] = {}
    for package in pins.packages.values():
        for fixed in package.fixed:
            for file in fixed.files:
                right.setdefault(file.path, {})[file.blob] = fixed.version
    changed = {(image.exchanged.path, image.exchanged.before): one for one in listed for image in one.images}
    for one in listed:
        for path in sorted(covered & one.untouched.keys()):
            other = changed.get((path, one.untouched[path]))
            if other is not None:
                raise OverlayError(
                    f"{path}: expected the series of {one.project} {one.release.version} to change it as that of "
                    f"{other.release.version} does, which has the same content, found that it does not: take it into "
                    "both"
                )
            right.setdefault(path, {}).setdefault(one.untouched[path], one.release.version)
    return right
