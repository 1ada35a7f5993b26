"""The whole path from the lock to `dist/` and `overlay/patched/`: source, series, post-images, wheels, index."""

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from overlay.deliver import archive, output
from overlay.deliver.wheel import Wheel, audit, metadata_of, patched, relabelled, save
from overlay.errors import OverlayError
from overlay.progress import say
from overlay.queue import images, series, source
from overlay.queue.lock import Lock, Package, Release

MANIFEST_FORMAT = 1


@dataclass(frozen=True)
class Patched:
    """A release after its series: the members of its new wheel, every image in it, and which of these the overlay
    holds too."""

    project: str
    release: Release
    members: Sequence[archive.Member]
    exchanged: Sequence[images.Image]
    overlaid: frozenset[str]

    @property
    def file(self) -> str:
        """The file name of the patched wheel."""
        return self.release.wheel.file.replace(f"-{self.release.version}-", f"-{self.release.local_version}-", 1)


def derive(patches: Path, project: str, package: Package, release: Release) -> Patched:
    """Makes a release's post-images and the members of its patched wheel. Compares nothing with the lock but the
    artefact's sha256.

    Raises:
        OverlayError: the artefact is not to be had or is not sound, or the series does not fit.
    """
    if release.series is None or release.revision is None:
        raise OverlayError(
            f"{project} {release.version}: expected a series and a revision in the lock, found none: only "
            "delivered releases have a patched wheel"
        )
    content = source.read(project, release.wheel)
    upstream = Wheel.read(content, release.wheel.file)
    audit(upstream, content, release.wheel.sha256)
    queue = series.read(patches / release.series)
    exchanged = images.make(queue, package.prefix, lambda path: upstream.member(path).content())
    overlaid = frozenset(path.removeprefix(package.prefix) for path in queue.paths("overlay"))
    if package.version_file is not None:
        exchanged = _labelled(exchanged, upstream, package.version_file, release)
    files = {image.path: image.after for image in exchanged}
    members = patched(upstream, files, release.version, release.local_version)
    return Patched(project, release, members, exchanged, overlaid)


def _labelled(exchanged: Sequence[images.Image], upstream: Wheel, path: str, release: Release) -> list[images.Image]:
    """The images with the version label in the file `path`, which only the wheel gets."""
    if any(image.path == path for image in exchanged):
        raise OverlayError(
            f"{path} is changed by the series and by the version label: expected one of the two: take it out of "
            "the series"
        )
    before = upstream.member(path).content()
    return [*exchanged, images.Image(path, before, relabelled(path, before, release.version, release.local_version))]


def run(lock: Lock, root: Path, requirements: Sequence[str], out: Path) -> list[Path]:
    """Patches the named releases, or all that are delivered; fills `overlay/patched/` and `out`. Each of the two is
    replaced at once.

    Args:
        lock: the pins.
        root: the checkout that holds `patches/` and `overlay/`.
        requirements: `name==version` each; none means everything in the lock.
        out: where wheels, their metadata, the index and the constraints go. Files there that are not ours stay as
            they are.

    Returns:
        The wheels.

    Raises:
        OverlayError: anything is not as the lock names it; nothing is changed then.
    """
    chosen = (
        list({pin[2].wheel.sha256: pin for pin in (lock.find(text, use="deliver") for text in requirements)}.values())
        if requirements
        else list(lock.deliveries())
    )
    if not chosen:
        raise OverlayError('upstream.lock: expected at least one release with use = "deliver", found none: pin one')
    generated = root / "overlay" / "patched"
    check_target(out, root)
    output.check(generated)
    for project, _, release in chosen:
        source.ensure(project, release.wheel)  # not in a thread, which an interrupt would have to wait for
    with ThreadPoolExecutor(2) as workers:
        # The index library takes as long to import as an artefact takes to hash, and hashing leaves the interpreter
        # free.
        importing = workers.submit(importlib.import_module, "overlay.deliver.index")
        derived = [_checked(patched) for patched in workers.map(lambda pin: derive(root / "patches", *pin), chosen)]
        importing.result()
    with output.replaced(generated, lambda _: True) as overlay:
        _write_overlay(derived, overlay)
        with output.replaced(out, _ours(lock)) as staging:
            _write_wheels(derived, staging)
    wheels = [out / patched.file for patched in derived]
    for file in wheels:
        say(f"wrote {file}")
    return wheels


def check_target(out: Path, root: Path) -> None:
    """Whether `out` is a folder for products. Raises OverlayError where it holds the checkout, or cannot be replaced
    (`output.check`)."""
    place, generated = out.resolve(), (root / "overlay" / "patched").resolve()
    if place == generated or place in generated.parents or generated in place.parents:
        raise OverlayError(
            f"{out} holds this project itself: expected a folder for products alone: name another one with --out"
        )
    output.check(out)


def _checked(one: Patched) -> Patched:
    release = one.release
    where = f"{one.project} {release.version}"
    if release.built is None:
        raise OverlayError(
            f"{where}: expected the sha256 of the patched wheel in the lock, found none: run overlay lock update"
        )
    images.check(one.exchanged, release.files, where)
    return one


def _ours(lock: Lock) -> Callable[[str], bool]:
    """Which files in the products' folder are this project's: those that it may write for any release of the pinned
    packages."""
    projects = "|".join(re.escape(name) for name in lock.packages)
    pages = "|".join(re.escape(canonicalize_name(name)) for name in lock.packages)
    pattern = re.compile(
        rf"(?:{projects})-[^/]+\+overlay\.[0-9]+-[^/]+\.whl(?:\.metadata)?|constraints\.txt|simple/(?:(?:{pages})/)?index\.html"
    )
    return lambda path: pattern.fullmatch(path) is not None


def _write_wheels(derived: Sequence[Patched], folder: Path) -> None:
    from overlay.deliver import index

    products = []
    for one in derived:
        release = one.release
        say(f"building {one.file}")
        sha256 = save(one.members, folder / one.file)
        assert release.built is not None
        if sha256 != release.built.sha256:
            raise OverlayError(
                f"{one.file}: expected sha256 {release.built.sha256}, found {sha256}: the lock is not of this "
                "series, run overlay lock update"
            )
        metadata = metadata_of(one.members)
        (folder / f"{one.file}.metadata").write_bytes(metadata)
        products.append(
            index.Product(
                one.project,
                release.local_version,
                one.file,
                sha256,
                metadata,
                hashlib.sha256(metadata).hexdigest(),
            )
        )
    index.write(folder, products)
    (folder / "constraints.txt").write_text(index.constraints(products), encoding="utf-8")


def _write_overlay(derived: Sequence[Patched], folder: Path) -> None:
    """The post-images that are for the overlay, at `<project>/<version>/<path in the wheel>`, and `manifest.json`
    over them."""
    listed = []
    for one in derived:
        inside = f"{one.project}/{one.release.version}"
        for image in one.exchanged:
            if image.path in one.overlaid:
                file = folder / inside / image.path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(image.after)
        files = [image.exchanged.model_dump() for image in one.exchanged if image.path in one.overlaid]
        listed.append(
            {
                "project": one.project,
                "version": one.release.version,
                "series": one.release.series,
                "files": files,
            }
        )
    manifest = {"format": MANIFEST_FORMAT, "releases": listed}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
