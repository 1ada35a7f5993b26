"""Pins another release: finds its wheel, its hashes and its pre-images, and the series that fits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from overlay.deliver import relock
from overlay.deliver.wheel import Wheel, audit
from overlay.errors import OverlayError
from overlay.progress import say
from overlay.queue import git, history, images, lock, series, source
from overlay.queue.lock import Lock, Package, Release
from overlay.queue.series import Series
from overlay.queue.source import Offer, PipSettings

Use = Literal["deliver", "test"]


def run(path: Path, requirement: str, use: Use | None = None) -> None:
    """Pins a release, or delivers one that is pinned for the tests.

    Args:
        path: the lock; `patches/` lies beside it.
        requirement: `name==version`, of a project in the lock.
        use: whether its wheel is delivered; without it, a new pin is for the tests.

    Raises:
        OverlayError: there is no such project or release, or no series for it. Nothing is written then.
    """
    with relock.alone(path):
        _run(path, requirement, use)


def _run(path: Path, requirement: str, use: Use | None) -> None:
    pins = lock.read(path)
    name, version = _named(pins, requirement)
    package = pins.packages[name]
    for position, release in enumerate(package.releases):
        if Version(release.version) == Version(version):
            _pinned(path, name, package, position, use)
            return
    wheel, version, artefact = _fetched(name, version)
    queue, made = _fitting(path, name, package, wheel, version)
    release = Release.model_validate(
        {
            "version": version,
            "use": use or "test",
            "series": queue.name,
            "wheel": artefact,
            "files": tuple(image.exchanged for image in made),
        }
    )
    text = lock.inserted(lock.read_text(path), name, _complete(path, name, package, release))
    lock.parse(text, str(path))
    with lock.replacement(path, text) as replace:
        replace()
    say(f"{path.name}: pinned {name} {version}, for {_purpose(release)}, with {queue.name}")


def _named(pins: Lock, requirement: str) -> tuple[str, str]:
    """The project, as the lock spells it, and the version in its normal form (PEP 440)."""
    project, separator, version = requirement.partition("==")
    name = pins.spelled(project)
    try:
        parsed = Version(version)
    except InvalidVersion:
        parsed = None
    if name is None or not separator or parsed is None or parsed.local is not None:
        raise OverlayError(
            f"expected NAME==VERSION, a release of {' or '.join(pins.packages)}, found {requirement!r}: name one"
        )
    return name, str(parsed)


def _purpose(release: Release) -> str:
    return "delivery" if release.use == "deliver" else "the tests"


def _complete(path: Path, name: str, package: Package, release: Release) -> Release:
    """The release with what the lock says of its wheel, if that is delivered."""
    if release.use == "test":
        return release
    found = relock.derived(path.parent / "patches", name, package, release, history.committed(path))
    return Release.model_validate({**release.model_dump(by_alias=True), **found})


def _pinned(path: Path, name: str, package: Package, position: int, use: Use | None) -> None:
    """Says how a release is pinned, or delivers it."""
    release = package.releases[position]
    if use in (None, release.use):
        with_series = f"with {release.series}" if release.series else "without a series"
        say(f"{name} {release.version} is pinned already, for {_purpose(release)}, {with_series}")
        return
    if use == "test":
        raise OverlayError(
            f"{name} {release.version}: expected a release that is not delivered yet, found revision "
            f"{release.revision} of it: whoever has that wheel counts on it: change the lock by hand if you mean it"
        )
    wheel = Wheel.pinned(name, release.wheel)
    queue, made = _fitting(path, name, package, wheel, release.version)
    delivered = Release.model_validate(
        {
            **release.model_dump(by_alias=True, exclude_none=True),
            "use": "deliver",
            "series": queue.name,
            "files": tuple(image.exchanged for image in made),
        }
    )
    at: lock.Location = ("packages", name, "releases", position)
    whole = _complete(path, name, package, delivered).model_dump(by_alias=True)
    lock.write(path, {(*at, key): whole[key] for key in ("use", "series", "revision", "files", "built")})
    say(f"{path.name}: {name} {release.version} is for delivery now, with {queue.name}")


def _fetched(name: str, version: str) -> tuple[Wheel, str, dict[str, Any]]:
    """The wheel of a release, the version as it spells it (1.0 is 1.0.0), and its pin."""
    settings = PipSettings.read()
    with settings.client() as client:
        offered = source.offers(client, settings, name, whole=False)
        offer = _chosen(name, version, offered)
        if offer.yanked:
            say(f"{offer.file} was yanked: upstream wants nobody to install it (PEP 592)")
        if offer.version.is_prerelease:
            say(f"{offer.file} is a pre-release")
        if offer.sha256 is None:
            say(f"{offer.file}: the index has no sha256 for it, so the lock gets that of what was fetched")
        artefact = source.pin(client, offer)
    content = source.read(name, artefact)
    wheel = Wheel.read(content, artefact.file)
    audit(wheel, content, artefact.sha256)
    return wheel, str(offer.version), artefact.model_dump()


def _chosen(name: str, version: str, offered: Sequence[Offer]) -> Offer:
    """The wheel of that version for every platform."""
    wheels = [offer for offer in offered if offer.version == Version(version)]
    usable = [offer for offer in wheels if offer.file.endswith("-none-any.whl")]
    if not usable:
        others = ", ".join(offer.file for offer in wheels)
        newest = max(offered, key=lambda offer: offer.version)
        raise OverlayError(
            f"{name}=={version}: expected a wheel for every platform on the package index, found "
            f"{others or f'no such release (the newest is {newest.version})'}: name a release that has one"
        )
    return min(usable, key=lambda offer: offer.sha256 is None)


def _fitting(path: Path, name: str, package: Package, wheel: Wheel, version: str) -> tuple[Series, list[images.Image]]:
    """The series of the release's range, if it fits, and its images.

    Raises:
        OverlayError: none does: upstream has mended the release, another series applies, or hunks fail.
    """
    queues = series.of(path.parent / "patches", name)
    fits, reasons = images.fits(queues, package.prefix, lambda file: wheel.member(file).content())
    for queue, made in fits:
        if lock.in_range(name, queue.name, version):
            return queue, made
    where = f"{name} {version}"
    since = series.applied_upstream(queues, Version(version))
    if since is not None:
        raise OverlayError(
            f"{where}: expected a release with the fault, found that it is fixed upstream since {since}: "
            f"nothing to pin; {_right(package, queues, wheel, version)}"
        )
    if fits:
        other = fits[0][0].name
        nearer = [reason for queue, reason in reasons.items() if lock.in_range(name, queue, version)]
        raise OverlayError(
            f"{where}: expected a series whose range holds it, found that {other} applies, whose range does not"
            f"{f', and that the one of its range does not apply ({nearer[0]})' if nearer else ''}: rename it (git mv "
            f"patches/{other} patches/{_wider(other, version)} && sed -i s/{other}/{_wider(other, version)}/ "
            f"{path.name}) and run this again"
        )
    if not reasons:
        raise OverlayError(f"{where}: expected a series of {name} under {path.parent / 'patches'}, found none: add one")
    nearest = {queue.name: queue for queue in queues}[lock.nearest(reasons, Version(version))]
    paths = [file for file in nearest.paths("wheel") if file.startswith(package.prefix)]
    there = {
        file: wheel.member(file.removeprefix(package.prefix)).content()
        for file in paths
        if wheel.has(file.removeprefix(package.prefix))
    }
    rows = series.failures(nearest.for_delivery("wheel"), there)
    for row in rows:
        say(f"{nearest.name}/{row}")
    raise OverlayError(
        f"{where}: expected a series that fits, found none: of the nearest, {nearest.name}, {len(rows)} hunks do not: "
        "write a series for it (a copy of that folder with its range for a name), and run this again; nothing was "
        "written"
    )


def _right(package: Package, queues: Sequence[Series], wheel: Wheel, version: str) -> str:
    """Whether the overlay knows the files of a release that upstream has mended, and if not, what tells it."""
    changed = [
        path.removeprefix(package.prefix)
        for queue in queues
        for patch in queue.patches
        if patch.trailers["Applied-Upstream"] != "no"
        for path in patch.paths
    ]
    blobs = {path: git.blob_id(wheel.member(path).content()) for path in dict.fromkeys(changed) if wheel.has(path)}
    for fixed in package.fixed:
        if all(blobs.get(file.path) == file.blob for file in fixed.files):
            return f"its files are those of {fixed.version}, which upstream.lock names as fixed"
    files = ", ".join(f'{{path = "{path}", blob = "{blob}"}}' for path, blob in blobs.items())
    return f'for the overlay, name it as fixed in upstream.lock: version = "{version}", files = [{files}]'


def _wider(name: str, version: str) -> str:
    """The name of a series with a range that holds `version` too."""
    project, first, *last = name.split("-")
    release = ".".join(map(str, Version(version).release))
    if Version(version) < Version(first):
        return f"{project}-{release}-{(last or [first])[0]}"
    return f"{project}-{first}-{release}"
