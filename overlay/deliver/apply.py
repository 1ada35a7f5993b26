"""The whole path from the lock to `dist/` and `overlay/patched/`: source, series, post-images, wheels, index."""

import hashlib
import importlib
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from packaging.utils import canonicalize_name

from overlay.deliver import archive, output, overlay_wheel, post_images, sbom
from overlay.deliver.wheel import (
    Wheel,
    audit,
    metadata_of,
    patched,
    patched_dist_info,
    relabelled,
    relabelled_metadata,
    save,
)
from overlay.errors import OverlayError
from overlay.progress import say
from overlay.queue import history, images, series, source
from overlay.queue.lock import Lock, Package, Release

if TYPE_CHECKING:
    from overlay.deliver import index

OVERLAY = "modeling-overlay"
"""This project's own name, which the overlay wheel has on an index."""

CONSTRAINTS_HEAD = "# The wheels beside this file"


@dataclass(frozen=True)
class Patched:
    """A release after its series: the members of its new wheel, every image in it, and what the overlay has of it."""

    project: str
    release: Release
    members: Sequence[archive.Member]
    exchanged: Sequence[images.Image]
    overlaid: post_images.Overlaid


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
    overlaid = post_images.overlaid(project, package, release, queue, upstream, exchanged)
    labelled = None if package.version_file is None else _labelled(exchanged, upstream, package.version_file, release)
    document = sbom.of_wheel(
        sbom.Upstream.pinned(project, package, release),
        release.local_version,
        queue,
        changes(exchanged, labelled, upstream, release.version, release.local_version),
    )
    exchanged = [*exchanged, *([labelled] if labelled else [])]
    files = {image.path: image.after for image in exchanged}
    members = patched(upstream, files, release.version, release.local_version, {sbom.MEMBER: document})
    return Patched(project, release, members, exchanged, overlaid)


def changes(
    exchanged: Sequence[images.Image], labelled: images.Image | None, upstream: Wheel, version: str, local_version: str
) -> list[sbom.Changed]:
    """What is not as in upstream's wheel, for the SBOM.

    Args:
        exchanged: the images of the series.
        labelled: the file with the version label, if there is one.
        upstream: the wheel before.
        version, local_version: the versions before and after.
    """
    folder = patched_dist_info(upstream, version, local_version)
    metadata = upstream.member(f"{upstream.dist_info}/METADATA").content()
    label = [labelled] if labelled else []
    label.append(images.Image(f"{folder}/METADATA", metadata, relabelled_metadata(upstream, version, local_version)))
    found = {image.path: sbom.Changed(image.path, sbom.PATCHED, image.before, image.after) for image in exchanged}
    for image in label:
        same = found.get(image.path)
        found[image.path] = (
            sbom.Changed(image.path, sbom.LABELLED, image.before, image.after)
            if same is None
            else replace(same, why=f"{same.why}, {sbom.LABELLED}", after=image.after)
        )
    return [*found.values(), sbom.Changed(f"{folder}/RECORD", sbom.LISTING)]


def _labelled(exchanged: Sequence[images.Image], upstream: Wheel, path: str, release: Release) -> images.Image:
    """The image of the file `path` with the version label, which only the wheel gets."""
    if any(image.path == path for image in exchanged):
        raise OverlayError(
            f"{path} is changed by the series and by the version label: expected one of the two: take it out of "
            "the series"
        )
    before = upstream.member(path).content()
    return images.Image(path, before, relabelled(path, before, release.version, release.local_version))


def run(lock: Lock, root: Path, requirements: Sequence[str], out: Path) -> list[Path]:
    """Patches the named releases, or all that are pinned; fills `overlay/patched/` and `out`. Each of the two is
    replaced at once.

    Without names the overlay wheel is built too; it and `overlay/patched/` have those that are pinned for the tests as
    well.

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
    tested = [] if requirements else [pin for pin in lock.patched() if pin[2].use == "test"]
    generated, patches = root / "overlay" / "patched", root / "patches"
    check_target(out, root)
    output.check(generated, _GENERATED)
    history.check_head(root / "upstream.lock", lock)
    if not requirements:
        overlay_wheel.check(root)
    for project, _, release in (*chosen, *tested):
        source.ensure(project, release.wheel)  # not in a thread, which an interrupt would have to wait for
    with ThreadPoolExecutor(2) as workers:
        # The libraries take as long to import as an artefact takes to hash, and hashing leaves the interpreter free.
        libraries = ["overlay.deliver.index", *([] if requirements else [overlay_wheel.LIBRARY])]
        importing = [workers.submit(importlib.import_module, library) for library in libraries]
        deriving = workers.map(lambda pin: derive(patches, *pin), chosen)
        made = workers.map(lambda pin: post_images.make(patches, *pin), tested)
        derived = [checked(patched) for patched in deriving]
        overlaid = [*(patched.overlaid for patched in derived), *made]
        for library in importing:
            library.result()
    if requirements:
        say("no overlay wheel is built: it has all pinned releases, so it is built where none is named")
    inside = Path.cwd() if out.resolve() in (Path.cwd(), *Path.cwd().parents) else None
    with output.replaced(generated, lambda _: True, _GENERATED) as overlay:
        write_patched(overlaid, lock, overlay)
        with output.replaced(out, products(lock, out)) as staging:
            built = [_write_wheel(patched, staging) for patched in derived]
            if not requirements:
                built.append(_write_overlay_wheel(root, overlay, staging))
            _write_index(built, staging)
    wheels = [out / product.file for product in built]
    for file in wheels:
        say(f"wrote {file}")
    say(f"to install: pip install --find-links {out} --constraint {out / 'constraints.txt'} {chosen[0][0]}")
    if inside:
        say(f"{out} was replaced, and a shell in it still sees the old one: cd {inside}")
    return wheels


def write_patched(overlaid: Sequence[post_images.Overlaid], lock: Lock, folder: Path) -> None:
    """Fills `folder` with what the overlay wheel has of the pinned releases: the post-images, the manifest over them,
    and the SBOM."""
    post_images.write(overlaid, lock, folder)
    (folder / sbom.FILE).write_bytes(sbom.of_overlay([(lock.packages[one.project], one) for one in overlaid]))


_GENERATED = "it is written beside the sources, so use a copy of this project that can be written"


def check_target(out: Path, root: Path) -> None:
    """Whether `out` is a folder for products. Raises OverlayError where it holds the checkout, or cannot be replaced
    (`output.check`)."""
    place, here = out.resolve(), root.resolve()
    own = [here / name for name in ("overlay", "patches", "scripts", "tests", ".git")]
    if place == here or place in here.parents or any(folder in (place, *place.parents) for folder in own):
        raise OverlayError(
            f"{out} holds this project itself: expected a folder for products alone: name another one with --out"
        )
    output.check(out)


def checked(one: Patched) -> Patched:
    """`one`, if its images are those that the lock names. Raises OverlayError where they are not, or no wheel is
    named."""
    release = one.release
    where = f"{one.project} {release.version}"
    if release.built is None:
        raise OverlayError(
            f"{where}: expected the sha256 of the patched wheel in the lock, found none: run overlay lock update"
        )
    images.check(one.exchanged, release.files, where)
    return one


def products(lock: Lock, folder: Path) -> Callable[[str], bool]:
    """Which files in `folder`, by their path in it, are this project's: wheels by their names, pages and constraints by
    what is in them too, so that nobody's own `constraints.txt` is taken for ours."""
    projects = "|".join(re.escape(name) for name in lock.packages)
    pages = "|".join(re.escape(canonicalize_name(name)) for name in (*lock.packages, OVERLAY))
    patched_wheel = rf"(?:{projects})-[^/]+[+.]overlay\.(?:[0-9]+|g[0-9a-f]+)-[^/]+\.whl"
    wheel = rf"(?:{patched_wheel}|{OVERLAY.replace('-', '_')}-[^/]+\.whl)"
    names = re.compile(rf"(?P<wheel>{wheel}(?:\.metadata)?)|constraints\.txt|simple/(?:(?:{pages})/)?index\.html")
    links = re.compile(rf"(?:{pages})/|\.\./\.\./{wheel}")

    def ours(path: str) -> bool:
        named = names.fullmatch(path)
        if named is None or named["wheel"]:
            return named is not None
        try:
            text = (folder / path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return not os.path.lexists(folder / path)
        if path == "constraints.txt":
            return text.startswith(CONSTRAINTS_HEAD)
        found = [unquote(link.partition("#")[0]) for link in re.findall(r'href="([^"]*)"', text)]
        return bool(found) and all(links.fullmatch(link) for link in found)

    return ours


def _write_wheel(one: Patched, folder: Path) -> "index.Product":
    from overlay.deliver import index

    release = one.release
    say(f"building {release.built_file}")
    sha256 = save(one.members, folder / release.built_file)
    assert release.built is not None
    if sha256 != release.built.sha256:
        raise OverlayError(
            f"{release.built_file}: expected sha256 {release.built.sha256}, found {sha256}: the lock is not of this "
            "series, run overlay lock update"
        )
    return index.Product(one.project, release.local_version, release.built_file, sha256, metadata_of(one.members))


def _write_overlay_wheel(root: Path, patched_files: Path, folder: Path) -> "index.Product":
    from overlay.deliver import index

    say("building the overlay wheel")
    file = overlay_wheel.build(root, patched_files, folder)
    content = file.read_bytes()
    wheel = Wheel.read(content, file.name)
    sha256 = hashlib.sha256(content).hexdigest()
    return index.Product(OVERLAY, wheel.version, file.name, sha256, metadata_of(wheel.members))


def _write_index(built: Sequence["index.Product"], folder: Path) -> None:
    from overlay.deliver import index

    for product in built:
        (folder / f"{product.file}.metadata").write_bytes(product.metadata)
    index.write(folder, built)
    (folder / "constraints.txt").write_text(index.constraints(built, CONSTRAINTS_HEAD), encoding="utf-8")
