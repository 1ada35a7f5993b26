"""Which series fits each release that upstream has made since: `overlay drift`.

Only the files that the series touch are looked at, in wheels that no lock names; nothing of them is delivered. Releases
that are yanked (PEP 592) and pre-releases (PEP 440) are left out.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from packaging.utils import canonicalize_name
from packaging.version import Version

from overlay.errors import OverlayError
from overlay.progress import Progress, say
from overlay.queue import git, images, lock, members, series
from overlay.queue.lock import Lock, Package
from overlay.queue.series import Series
from overlay.queue.source import Offer, PipSettings, offers

FIRST = {"transformers": "5.0", "transformer_engine": "2.10"}
"""The first release that is looked at, where not all of them are."""

START, END = "<!-- releases-table -->", "<!-- /releases-table -->"
"""Between them README.md has the tables."""

ABBREVIATED = 10
"""Digits of a blob id in the tables."""

_SECTION = re.compile(r"(@@ -\S+ \+\S+ @@).*")
"""The lines of a hunk, and behind them the heading of the section that it stands in, which the tables leave out."""

Form = Literal["text", "markdown", "json"]


@dataclass(frozen=True)
class Standing:
    """How one release of `project` stands to the queue.

    `blobs` are git's ids of the files that the series touch, by path in the wheel, None where it has no such file.
    `fits` are the series that apply, those of its range first; `reasons` says why each other one does not. `fixed` is
    the release in which upstream took the change in, if that is not later than this one; `known` says whether the lock
    names this content as fixed.
    """

    project: str
    offer: Offer
    blobs: Mapping[str, str | None]
    fits: tuple[str, ...]
    reasons: Mapping[str, str]
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
    def blob(self) -> str:
        """The blob id of the first file, abbreviated."""
        found = next(iter(self.blobs.values()), None)
        return "none" if found is None else found[:ABBREVIATED]

    @property
    def outcome(self) -> str:
        """The series of its range, if it fits; or since when upstream has the change; or none, with a series that
        applies though the release is not in its range, or with the reason why the nearest does not apply."""
        if self.fits and lock.in_range(self.project, self.fits[0], self.version):
            return self.fits[0]
        if self.fixed is not None:
            return f"fixed upstream in {self.fixed}"
        if self.fits:
            return f"none ({self.fits[0]} applies)"
        if not self.reasons:
            return "none"
        names = sorted(self.reasons, key=_first)
        nearest = [names[0], *(name for name in names if _first(name) <= self.offer.version)][-1]
        return "none: " + _SECTION.sub(r"\1", self.reasons[nearest])

    @property
    def pinned(self) -> str:
        """What the lock says: `deliver r1`, `test`, `fixed`, or `no`."""
        if self.pin is None:
            return "fixed" if self.known else "no"
        use = self.pin.use if self.pin.revision is None else f"{self.pin.use} r{self.pin.revision}"
        return f"{use} and fixed" if self.known else use


@dataclass(frozen=True)
class Survey:
    """The releases of one project, oldest first, with the files that are looked at; and which were left out."""

    project: str
    files: tuple[str, ...]
    standings: tuple[Standing, ...]
    yanked: tuple[str, ...]
    pre_releases: tuple[str, ...]

    @property
    def heading(self) -> tuple[str, ...]:
        """What stands above the columns of its table."""
        return (self.project, "released", Path(self.files[0]).name if self.files else "file", "series", "pinned")


def report(pins: Lock, root: Path, name: str | None, form: Form) -> str:
    """The table of one project, or of all that are pinned.

    Args:
        pins: the lock.
        root: where `patches/` lies.
        name: the project, as the index or the lock spells it.
        form: for a person, for README.md, or for a program.

    Raises:
        OverlayError: there is no such project, a series is not sound, or a release cannot be looked at.
    """
    projects = [known for known in pins.packages if name is None or canonicalize_name(known) == canonicalize_name(name)]
    if not projects:
        raise OverlayError(
            f"expected one of {', '.join(pins.packages)}, found {name!r}: name one of these, or pin it in upstream.lock"
        )
    queues = {project: series.of(root / "patches", project) for project in projects}
    settings = PipSettings.read()
    with settings.client() as client:
        surveys = [
            survey(
                project,
                pins.packages[project],
                queues[project],
                offers(client, settings, project),
                lambda offer, paths: members.read(client, offer, paths),
            )
            for project in projects
        ]
    return {"text": text, "markdown": markdown, "json": as_json}[form](surveys)


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
        read: the members of a wheel.

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
    pinned = {pin.version: pin for pin in package.releases}
    judged: dict[tuple[str | None, ...], tuple[Sequence[str], Mapping[str, str]]] = {}
    standings = []
    say(f"{project}: looking at files that no lock names; nothing of them is delivered")
    with Progress(project, len(chosen), "releases") as progress:
        for offer in chosen:
            found = read(offer, files)
            blobs = {path: None if content is None else git.blob_id(content) for path, content in found.items()}
            same = tuple(blobs.values())
            if same not in judged:
                judged[same] = _judge(queues, package.prefix, found)
            version = str(offer.version)
            fits = sorted(judged[same][0], key=lambda name: not lock.in_range(project, name, version))
            standings.append(
                Standing(
                    project,
                    offer,
                    blobs,
                    tuple(fits),
                    judged[same][1],
                    _fixed(queues, offer.version),
                    _known(package, version, blobs),
                    pinned.get(version),
                )
            )
            progress.advance(1)
    return Survey(project, files, tuple(standings), yanked, pre_releases)


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


def _judge(queues: Sequence[Series], prefix: str, found: members.Members) -> tuple[Sequence[str], Mapping[str, str]]:
    """Which series fit these files, and why each other does not."""

    def content(path: str) -> bytes:
        there = found.get(path)
        if there is None:
            raise OverlayError(f"there is no {path}: expected it in the wheel")
        return there

    fits, reasons = images.fits(queues, prefix, content)
    return [queue.name for queue, _ in fits], reasons


def _fixed(queues: Sequence[Series], version: Version) -> str | None:
    """The release in which upstream took in the change of a patch, if it is not later than `version`."""
    applied = {patch.trailers["Applied-Upstream"] for queue in queues for patch in queue.patches} - {"no"}
    return next((release for release in sorted(applied, key=Version) if Version(release) <= version), None)


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


def _first(name: str) -> Version:
    """The first release in the range of a series."""
    return Version(name.split("-")[1])


def text(surveys: Sequence[Survey]) -> str:
    """One row a release, for a person."""
    blocks = []
    for survey in surveys:
        rows = [survey.heading]
        rows += [(one.version, one.uploaded, one.blob, one.outcome, one.pinned) for one in survey.standings]
        order = (0, 1, 2, 4, 3)  # the longest comes last
        widths = [max(len(row[column]) for row in rows) for column in range(len(survey.heading))]
        lines = ["  ".join(row[column].ljust(widths[column]) for column in order).rstrip() for row in rows]
        left_out = [
            f"{', '.join(versions)} ({why})"
            for versions, why in ((survey.yanked, "yanked"), (survey.pre_releases, "pre-releases"))
            if versions
        ]
        blocks.append("\n".join([*lines, *([f"left out: {'; '.join(left_out)}"] if left_out else [])]))
    return "\n\n".join(blocks)


def markdown(surveys: Sequence[Survey]) -> str:
    """As README.md has it: one row for consecutive releases with the same file and outcome."""
    blocks = []
    for survey in surveys:
        name, released, file, *rest = survey.heading
        lines = [f"| {' | '.join((name, released, f'`{file}`', *rest))} |", "|---|---|---|---|---|"]
        for (blob, outcome), grouped in groupby(survey.standings, key=lambda one: (one.blob, one.outcome)):
            group = list(grouped)
            days = [one.uploaded for one in group if one.uploaded]
            pins = [
                one.pinned if len(group) == 1 else f"{one.version} {one.pinned}" for one in group if one.pinned != "no"
            ]
            versions = _span(group[0].version, group[-1].version)
            cells = (
                versions,
                _span(min(days), max(days)) if days else "",
                f"`{blob}`",
                outcome,
                ", ".join(pins) or "no",
            )
            lines.append(f"| {' | '.join(cells)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def as_json(surveys: Sequence[Survey]) -> str:
    """Everything, for a program."""
    return json.dumps({survey.project: _plain(survey) for survey in surveys}, indent=2)


def _plain(survey: Survey) -> dict[str, Any]:
    return {
        "releases": [
            {
                "version": one.version,
                "uploaded": None if one.offer.uploaded is None else one.offer.uploaded.isoformat(),
                "wheel": {"file": one.offer.file, "sha256": one.offer.sha256},
                "blobs": one.blobs,
                "fits": one.fits,
                "reasons": one.reasons,
                "fixed-upstream": one.fixed,
                "known-fixed": one.known,
                "pinned": None if one.pin is None else {"use": one.pin.use, "revision": one.pin.revision},
            }
            for one in survey.standings
        ],
        "yanked": survey.yanked,
        "pre-releases": survey.pre_releases,
    }
