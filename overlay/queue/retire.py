"""What the queue can do without: series, pins and patches that nothing needs any more."""

from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from overlay.queue import lock, series
from overlay.queue.lock import Lock, Package, Release
from overlay.queue.series import Series


def report(path: Path) -> list[str]:
    """A line for each thing that could go, with what takes it away; one that says so where there is none.

    Args:
        path: the lock; `patches/` lies beside it.

    Raises:
        OverlayError: the lock or a series is not sound.
    """
    pins = lock.read(path)
    patches = path.parent / "patches"
    rows = list(_series(pins, patches))
    needed = not rows
    for name, package in pins.packages.items():
        rows += _pins(name, package)
        for queue in series.of(patches, name):
            served = [release for release in package.releases if release.series == queue.name]
            if served:
                rows += _patches(queue, served)
    return ["every series is needed", *rows] if needed else rows


def _series(pins: Lock, patches: Path) -> Iterator[str]:
    """The series that no pin names."""
    used = {release.series for _, _, release in pins.patched()}
    used |= {package.commit.series for package in pins.packages.values() if package.commit}
    for folder in sorted(patches.iterdir()):
        if folder.is_dir() and folder.name not in used and not folder.name.startswith("."):
            yield f"{folder.name}: no pinned release needs it: git rm -r patches/{folder.name}"


def _pins(name: str, package: Package) -> Iterator[str]:
    """The pins for the tests whose files are those of another pin, with the same series."""
    known: dict[tuple[str | None, frozenset[tuple[str, str]]], Release] = {}
    for release in sorted(package.releases, key=lambda one: (one.use != "deliver", Version(one.version))):
        files = frozenset((file.path, file.before) for file in release.files if file.path != package.version_file)
        other = known.setdefault((release.series, files), release)
        if files and other is not release and release.use == "test":
            yield (
                f"{name} {release.version}: it is pinned for the tests alone, and the files that {release.series} "
                f"changes are those of {other.version}: take its entry out of upstream.lock"
            )


def _patches(queue: Series, served: list[Release]) -> Iterator[str]:
    """The patches of a series that its releases do not need, and those that nobody takes."""
    first = min(served, key=lambda release: Version(release.version)).version
    delivered = any(release.use == "deliver" for release in served)
    for patch in queue.patches:
        applied = patch.trailers["Applied-Upstream"]
        place = f"{queue.name}/{patch.file.name}"
        if applied != "no" and Version(applied) <= Version(first):
            yield (
                f"{place}: upstream has it since {applied}, and so has every release that the series serves "
                f"({first} and later): drop its commit (overlay edit, overlay refresh)"
            )
        elif patch.delivery == {"wheel"} and not delivered:
            yield f"{place}: it is for wheels alone, and no release of the series is delivered: drop its commit"
