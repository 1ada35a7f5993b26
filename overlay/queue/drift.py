"""Which releases on an index have a fault, and which series fits them: `overlay drift`.

Only the files that the series touch are looked at, in wheels that no lock names; nothing of them is delivered. Whether
a fault is there is shown by running a few lines of these files in a process apart (`overlay.queue.judges`). Releases
that are yanked (PEP 592) and pre-releases (PEP 440) are left out.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from packaging.version import Version

from overlay.errors import OverlayError
from overlay.progress import Progress, say
from overlay.queue import git, images, kept, lock, members, series, verdicts
from overlay.queue.judges import Verdict
from overlay.queue.lock import Lock, Package
from overlay.queue.series import Series
from overlay.queue.source import Offer, PipSettings, offers

FIRST = {"transformers": "5.0", "transformer_engine": "2.10"}
"""The first release that is looked at, where not all of them are."""

CONNECTIONS = 8
"""Wheels that are read at the same time."""

_KIND = "fits"

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Standing:
    """How one release of `project` stands to the queue.

    `blobs` are git's ids of the files that the series touch, by path in the wheel, None where it has no such file.
    `faults` are the verdicts, by the code of the fault. `fits` are the series that apply, those of its range first;
    `reasons` says why each other one does not; `mended` are the faults that the series of its range mends. `fixed` is
    the release since which upstream has none of the faults any more, if that is not later than this one; `known` says
    whether the lock names this content as fixed.
    """

    project: str
    offer: Offer
    blobs: Mapping[str, str | None]
    faults: Mapping[str, Verdict]
    fits: tuple[str, ...]
    reasons: Mapping[str, str]
    mended: frozenset[str]
    fixed: str | None
    known: bool
    pin: lock.Release | None

    @property
    def version(self) -> str:
        """The release, as the lock writes it."""
        return str(self.offer.version)

    @property
    def uploaded(self) -> str:
        """The day of the upload (UTC, ISO 8601), or nothing where the index does not say it."""
        return "" if self.offer.uploaded is None else self.offer.uploaded.date().isoformat()

    @property
    def blob(self) -> str | None:
        """The blob id of the first file."""
        return next(iter(self.blobs.values()), None)

    def codes(self, state: str) -> tuple[str, ...]:
        """The faults of which the judges say this."""
        return tuple(code for code, verdict in self.faults.items() if verdict.state == state)

    @property
    def series(self) -> str | None:
        """The series of its range, if it fits."""
        found = self.fits[0] if self.fits else None
        return found if found is not None and lock.in_range(self.project, found, self.version) else None

    @property
    def unmended(self) -> tuple[str, ...]:
        """The faults that it has and that no series of its range mends."""
        return tuple(code for code in self.codes("live") if code not in self.mended)

    @property
    def undecided(self) -> tuple[str, ...]:
        """The faults that nobody can tell of: not judged, not mended by a series, and no file that the lock knows."""
        return () if self.known else tuple(code for code in self.codes("not judged") if code not in self.mended)

    @property
    def reason(self) -> str:
        """Why no series fits: that one applies outside of its range, or why the nearest does not apply."""
        if self.fits:
            return f"{self.fits[0]} applies, but is not for this release"
        if not self.reasons:
            return "there is none"
        nearest = lock.nearest(self.reasons, self.offer.version)
        return self.reasons[nearest]

    @property
    def pinned(self) -> str:
        """What the lock says: `deliver r1`, `test`, `fixed`, or `no`."""
        if self.pin is None:
            return "fixed" if self.known else "no"
        use = self.pin.use if self.pin.revision is None else f"{self.pin.use} r{self.pin.revision}"
        return f"{use} and fixed" if self.known else use


@dataclass(frozen=True)
class Survey:
    """The releases of one project, oldest first, with the files that are looked at; which were left out; and the
    faults by code, each with what its user sees and the release since which upstream has it no more."""

    project: str
    files: tuple[str, ...]
    standings: tuple[Standing, ...]
    faults: Mapping[str, str]
    fixed: Mapping[str, str]
    yanked: tuple[str, ...]
    pre_releases: tuple[str, ...]


def look(pins: Lock, root: Path, name: str | None) -> list[Survey]:
    """The releases of one project, or of all that are pinned.

    Args:
        pins: the lock.
        root: where `patches/` lies.
        name: the project, as the index or the lock spells it.

    Raises:
        OverlayError: there is no such project, a series is not sound, or a release cannot be looked at.
    """
    projects = list(pins.packages) if name is None else [known for known in [pins.spelled(name)] if known is not None]
    if not projects:
        raise OverlayError(
            f"expected one of {', '.join(pins.packages)}, found {name!r}: name one of these, without a version"
        )
    queues = {project: series.of(root / "patches", project) for project in projects}
    settings = PipSettings.read()
    with settings.client() as client:
        return [
            survey(
                project,
                pins.packages[project],
                queues[project],
                offers(client, settings, project),
                lambda offer, paths: members.read(client, offer, paths),
            )
            for project in projects
        ]


def survey(
    project: str,
    package: Package,
    queues: Sequence[Series],
    offered: Iterable[Offer],
    read: Callable[[Offer, Sequence[str]], members.Members],
) -> Survey:
    """How each release of `project` stands.

    Args:
        project: its name in the lock.
        package: its pins.
        queues: its series.
        offered: the wheels on the index.
        read: the members of a wheel; called in several threads.

    Raises:
        OverlayError: a wheel cannot be read.
    """
    first = FIRST.get(project, "0")
    chosen, yanked, pre_releases = _releases(offered, Version(first))
    if not chosen:
        raise OverlayError(
            f"expected releases of {project} from {first} on, found none on the package index: check the index in your "
            "pip configuration"
        )
    touched = [path for queue in queues for path in queue.paths("wheel") if path.startswith(package.prefix)]
    files = tuple(path.removeprefix(package.prefix) for path in dict.fromkeys(touched))
    say(f"{project}: looking at files that no lock names; nothing of them is delivered")
    found: dict[int, members.Members] = {}
    with Progress(project, len(chosen), "releases") as progress:
        for position, content in at_once(lambda offer: read(offer, files), chosen):
            found[position] = content
            progress.advance(1)
    contents = [found[position] for position in range(len(chosen))]
    codes = {fault.code: fault.text for queue in reversed(queues) for fault in queue.faults("wheel")}
    codes = {fault.code: codes[fault.code] for queue in queues for fault in queue.faults("wheel")}
    judged = verdicts.judge(project, tuple(codes), contents)
    fitted = _fitted(queues, package.prefix, contents)
    since = {code: fixed for code in codes if (fixed := _since(chosen, [one[code] for one in judged])) is not None}
    pinned = {pin.version: pin for pin in package.releases}
    standings = []
    for offer, content, faults, (fits, reasons) in zip(chosen, contents, judged, fitted, strict=True):
        version = str(offer.version)
        blobs = {path: None if one is None else git.blob_id(one) for path, one in content.items()}
        in_order = sorted(fits, key=lambda name: not lock.in_range(project, name, version))
        own = {queue.name: queue for queue in queues if lock.in_range(project, queue.name, version)}
        mended = {fault.code for name in fits if name in own for fault in own[name].faults("wheel")}
        standings.append(
            Standing(
                project,
                offer,
                blobs,
                faults,
                tuple(in_order),
                reasons,
                frozenset(mended),
                _fixed(queues, offer.version, faults, since),
                _known(package, version, blobs),
                pinned.get(version),
            )
        )
    return Survey(project, files, tuple(standings), codes, since, yanked, pre_releases)


def at_once(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result]]:
    """Each result with the position of its item, as they come. The first error is raised, and nothing more is begun.

    The threads are daemons: whoever interrupts this does not wait for the answers of an index.
    """
    waiting: SimpleQueue[tuple[int, Item]] = SimpleQueue()
    done: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
    for numbered in enumerate(items):
        waiting.put(numbered)

    def work() -> None:
        while True:
            try:
                position, item = waiting.get_nowait()
            except Empty:
                return
            try:
                done.put((position, function(item), None))
            except BaseException as error:
                done.put((position, None, error))

    for _ in range(min(CONNECTIONS, len(items))):
        Thread(target=work, daemon=True).start()
    try:
        for _ in items:
            position, result, error = done.get()
            if error is not None:
                raise error
            yield position, result
    finally:
        while not waiting.empty():
            try:
                waiting.get_nowait()
            except Empty:
                break


def _releases(offered: Iterable[Offer], first: Version) -> tuple[list[Offer], tuple[str, ...], tuple[str, ...]]:
    """One wheel a release, oldest first, and the versions that were left out as yanked and as pre-releases.

    Of several wheels it is the one for every platform, and of two indexes the one that has a hash.
    """
    by_version: dict[Version, list[Offer]] = {}
    for offer in offered:
        if offer.version >= first and offer.version.local is None:  # a local version is a patched one, perhaps ours
            by_version.setdefault(offer.version, []).append(offer)
    chosen, yanked, pre_releases = [], [], []
    for version, wheels in sorted(by_version.items()):
        usable = [wheel for wheel in wheels if not wheel.yanked]
        if version.is_prerelease:
            pre_releases.append(str(version))
        elif not usable:
            yanked.append(str(version))
        else:
            chosen.append(
                min(usable, key=lambda wheel: (not wheel.file.endswith("-none-any.whl"), wheel.sha256 is None))
            )
    return chosen, tuple(yanked), tuple(pre_releases)


def _fitted(
    queues: Sequence[Series], prefix: str, contents: Sequence[members.Members]
) -> list[tuple[Sequence[str], Mapping[str, str]]]:
    """For each release, which series fit it, and why each other does not. Equal files are tried once, ever: the cache
    keeps the answers by the content of the files, of the series and of the code that tries."""
    code = [Path(str(module.__file__)) for module in (images, series, git)]
    tried = [file for queue in queues for file in (queue.folder / "series", *(patch.file for patch in queue.patches))]
    made_from = [kept.content_of(code), [queue.name for queue in queues], kept.content_of(tried), prefix]
    answers: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {}
    found = []
    for content in contents:
        blobs = {path: None if one is None else git.blob_id(one) for path, one in content.items()}
        key = kept.key(*made_from, blobs)
        if key not in answers:
            known = kept.find(_KIND, key)
            if known is None:
                known = _try(queues, prefix, content)
                kept.keep(_KIND, key, known)
            answers[key] = (known[0], known[1])
        found.append(answers[key])
    return found


def _try(queues: Sequence[Series], prefix: str, found: members.Members) -> tuple[Sequence[str], Mapping[str, str]]:
    """Which series fit these files, and why each other does not."""

    def content(path: str) -> bytes:
        there = found.get(path)
        if there is None:
            raise OverlayError(f"there is no {path}: expected it in the wheel")
        return there

    fits, reasons = images.fits(queues, prefix, content)
    return [queue.name for queue, _ in fits], reasons


def _since(chosen: Sequence[Offer], judged: Sequence[Verdict]) -> str | None:
    """The release since which a fault is gone: the first that is seen without it after the last that is seen with
    it."""
    since: str | None = None
    for offer, verdict in zip(reversed(chosen), reversed(judged), strict=True):
        if verdict.state == "live":
            return since
        if verdict.state == "not live":
            since = str(offer.version)
    return None


def _fixed(
    queues: Sequence[Series], version: Version, faults: Mapping[str, Verdict], since: Mapping[str, str]
) -> str | None:
    """The release since which upstream has none of the faults, if it is not later than `version`.

    What the judges have seen decides. Where they could judge nothing, it is what the trailers say (Applied-Upstream).
    """
    states = {verdict.state for verdict in faults.values()}
    if states <= {"not judged"}:
        return series.applied_upstream(queues, version)
    gone = [since[code] for code in faults if code in since and Version(since[code]) <= version]
    return max(gone, key=Version) if gone and states == {"not live"} else None


def _known(package: Package, version: str, blobs: Mapping[str, str | None]) -> bool:
    """Whether the lock names these contents as fixed. Raises OverlayError where it says others of this release."""
    for fixed in package.fixed:
        for file in fixed.files:
            if fixed.version == version and blobs[file.path] != file.blob:
                raise OverlayError(
                    f"upstream.lock: expected the blob {file.blob} at {file.path} in the fixed {version}, found "
                    f"{blobs[file.path]}: correct it in the lock"
                )
    return any(all(blobs[file.path] == file.blob for file in fixed.files) for fixed in package.fixed)
