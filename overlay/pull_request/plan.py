"""What a pull request on a commit of upstream would be: which series, which of its patches, and what upstream has
already."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from overlay.errors import OverlayError
from overlay.pull_request import own
from overlay.queue import git, series
from overlay.queue.checkout import Checkout
from overlay.queue.lock import Package, first_release, in_range
from overlay.queue.series import Patch, Series

_APPLIED = "Applied-Upstream"


@dataclass(frozen=True)
class Held:
    """A change that upstream has already: which one, and since when, in words; and the code of the fault that it mends
    without a patch of the series ("" for the change of a patch)."""

    what: str
    since: str
    code: str = ""

    def __str__(self) -> str:
        return f"{f'a fix of {self.code}, ' if self.code else ''}{self.what} (since {self.since})"

    @property
    def for_upstream(self) -> str:
        """The same without the code, which only this project knows."""
        return f"{'a fix of this: ' if self.code else ''}{self.what} (since {self.since})"


@dataclass(frozen=True)
class Plan:
    """The patches that are left for a pull request, and what is there already.

    `later` is what upstream mends itself in later releases; `version` is the base's own, where it says one.
    """

    series: Series
    patches: tuple[Patch, ...]
    held: tuple[Held, ...]
    later: tuple[Held, ...]
    version: Version | None


@dataclass(frozen=True)
class Place:
    """A branch or tag of the checkout that lacks the change, and that the series fits."""

    name: str
    version: str


def make(patches: Path, project: str, package: Package, base: Checkout) -> Plan:
    """The plan for a commit.

    The one series that fits is taken. On a commit between releases that none fits, it is the nearest by version, and
    `git am` may have to merge.

    Args:
        patches: the folder of all series.
        project: the name in the lock.
        package: its pins.
        base: the commit.

    Raises:
        OverlayError: no series is for this commit.
    """
    queues = sorted(series.of(patches, project), key=lambda queue: first_release(queue.name))
    version = version_of(package, base)
    reasons = {queue.name: _misfit(queue, package, base) for queue in queues}
    fitting = [queue for queue in queues if not reasons[queue.name]]
    if len(fitting) > 1 and version is not None:
        fitting = [queue for queue in fitting if in_range(project, queue.name, str(version))] or fitting
    if len(fitting) > 1:
        fitting = [queue for queue in fitting if _is_pinned(queue, package, base)] or fitting
    if len(fitting) > 1:
        raise OverlayError(
            f"{base.folder} at {base.commit[:12]}: expected one series that fits, found "
            f"{', '.join(queue.name for queue in fitting)}: narrow one of them"
        )
    chosen = fitting[0] if fitting else _nearest(queues, project, package, base, version)
    if chosen is None:
        raise OverlayError(
            f"{base.folder} at {base.commit[:12]}: expected a commit that a series of {project} is for, found none of "
            f"them: {', '.join(f'{name} ({why})' for name, why in reasons.items()) or 'there are none'}: name another "
            "with --base"
        )
    held, left = _gone_after(queues[: queues.index(chosen) + 1]), []
    later = {} if chosen == queues[-1] else {one.what: one for one in _gone_after(queues) if one not in held}
    for patch in chosen.for_delivery("pull-request"):
        since = "" if fitting else _since(patch, package, base, version)
        if since:
            held.append(Held(patch.subject, since))
        else:
            left.append(patch)
    if not any(_is_code(patch, package, project) for patch in left):
        left = []  # tests alone show nothing
    for patch in left:
        named = {one.code for one in later.values()} & {fault.code for fault in patch.faults}
        if patch.trailers[_APPLIED] != "no" and not named:
            later[patch.subject] = Held(patch.subject, patch.trailers[_APPLIED])
    return Plan(chosen, tuple(left), tuple(held), tuple(later.values()), version)


def only(plan: Plan, names: Sequence[str], base: Checkout) -> Plan:
    """The plan for some of its patches alone, in the order of the series, and with what concerns these.

    Args:
        plan: for all of them.
        names: of their files, with or without the number and `.patch`.
        base: the commit.

    Raises:
        OverlayError: a name is that of none of the plan's patches, or one of them needs another that was not named.
    """
    known = {topic(patch.file.name): patch for patch in plan.patches}
    for name in names:
        if topic(name) not in known:
            raise OverlayError(
                f"--patch: expected one of {', '.join(patch.file.name for patch in plan.patches)}, found {name!r}: "
                f"name one of them, {plan.series.name} has no other for a pull request that upstream lacks"
            )
    wanted = {topic(name) for name in names}
    patches = tuple(patch for about, patch in known.items() if about in wanted)
    if _applies(plan.patches, base) and not _applies(patches, base):
        others = ", ".join(patch.file.name for patch in plan.patches if patch not in patches)
        raise OverlayError(
            f"--patch: expected patches that apply without {others}, found that they do not: name what they need, too"
        )
    codes = {fault.code for patch in patches for fault in patch.faults}
    subjects = {patch.subject for patch in patches}
    later = tuple(one for one in plan.later if one.code in codes or one.what in subjects)
    return replace(plan, patches=patches, held=(), later=later)


def topic(name: str) -> str:
    """What a patch is about, by the name of its file, which begins with its number."""
    return re.sub(r"^\d+-", "", name.removesuffix(".patch"))


def _applies(patches: Sequence[Patch], base: Checkout) -> bool:
    try:
        series.apply(patches, _contents(patches, base))
    except OverlayError:
        return False
    return True


def places(queue: Series, project: str, package: Package, folder: Path) -> list[Place]:
    """Where else the series could go: the branches (or, of a release without one, tags) with a version of its range in
    their name, newest first."""
    found: dict[str, Place] = {}
    listed = own.out("for-each-ref", "--format=%(refname)", "refs/heads", "refs/remotes", "refs/tags", folder=folder)
    for ref in listed.splitlines():
        name = re.sub(r"^refs/(heads|remotes|tags)/", "", ref)
        number = re.search(r"(?<![\d.])\d+(?:\.\d+)+(?![\d.])", name)
        if number is None or number[0] in found or not in_range(project, queue.name, number[0]):
            continue
        commit = own.out("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}", folder=folder)
        if commit and not _misfit(queue, package, Checkout(folder, commit)):
            found[number[0]] = Place(name, number[0])
    return sorted(found.values(), key=lambda place: Version(place.version), reverse=True)


def version_of(package: Package, base: Checkout) -> Version | None:
    """The version that the commit says it has: in the package's version file, in `build_tools/VERSION.txt` as
    TransformerEngine has it, or by the last tag before it (`v2.13`)."""
    texts = []
    if package.version_file is not None and base.has(package.prefix + package.version_file):
        content = base.read(package.prefix + package.version_file).decode("utf-8", "replace")
        texts += re.findall(r'^__version__ = "(.*)"$', content, re.MULTILINE)
    if base.has("build_tools/VERSION.txt"):
        texts.append(base.read("build_tools/VERSION.txt").decode("utf-8", "replace").strip())
    texts.append(own.out("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", base.commit, folder=base.folder))
    for text in texts:
        try:
            return Version(text)
        except InvalidVersion:
            continue
    return None


def _is_code(patch: Patch, package: Package, project: str) -> bool:
    """Whether a patch changes the package, and not tests alone."""
    return any(path.startswith(f"{package.prefix}{project}/") for path in patch.paths)


def _contents(patches: Sequence[Patch], base: Checkout) -> dict[str, bytes]:
    """What the commit has of the files that the patches touch."""
    paths = dict.fromkeys(path for patch in patches for path in patch.paths)
    return {path: base.read(path) for path in paths if base.has(path)}


def _misfit(queue: Series, package: Package, base: Checkout) -> str:
    """Why the changes of code of a series do not fit the commit; "" where they do."""
    project = queue.name.split("-")[0]
    patches = [patch for patch in queue.for_delivery("pull-request") if _is_code(patch, package, project)]
    if not patches:
        return "nothing of it is for a pull request"
    try:
        series.apply(patches, _contents(patches, base))
    except OverlayError as error:
        return str(error).removeprefix(f"{queue.folder}/").partition(": expected")[0]
    return ""


def _nearest(
    queues: Sequence[Series], project: str, package: Package, base: Checkout, version: Version | None
) -> Series | None:
    """The series whose range has the version, or else the last one before it; without a version, the last one if
    upstream has mended the files."""
    if version is None:
        mended = [queue for queue in queues if any(_is_fixed(patch, package, base) for patch in queue.patches)]
        return mended[-1] if mended else None
    within = [queue for queue in queues if in_range(project, queue.name, str(version))]
    return next(iter(reversed(within or [queue for queue in queues if first_release(queue.name) <= version])), None)


def _gone_after(queues: Sequence[Series]) -> list[Held]:
    """The faults of earlier series that the last one does not have to mend any more, and the release since when."""
    texts = {fault.code: fault.text for queue in queues for fault in queue.faults("pull-request")}
    held = []
    for code, text in texts.items():
        last = max(index for index, queue in enumerate(queues) if code in _codes(queue))
        if last + 1 < len(queues):
            held.append(Held(text, str(first_release(queues[last + 1].name)), code))
    return held


def _codes(queue: Series) -> set[str]:
    return {fault.code for fault in queue.faults("pull-request")}


def _since(patch: Patch, package: Package, base: Checkout, version: Version | None) -> str:
    """Since when the commit has what a patch changes, in words; "" where it does not."""
    told = patch.trailers[_APPLIED]
    brought = _brought(patch, base)
    release = told if told != "no" else ""
    is_there = (
        brought
        or _is_fixed(patch, package, base)
        or (release and version is not None and version >= Version(release))
        or series.is_applied(patch, _contents([patch], base))
    )
    if not is_there:
        return ""
    return f"{release}{', ' if release and brought else ''}{brought}" or "a release that is not known"


def _is_pinned(queue: Series, package: Package, base: Checkout) -> bool:
    """Whether the code that a series touches for a pull request is that of a release which is pinned with it."""
    contents = _contents(queue.for_delivery("pull-request"), base)
    blobs = {path.removeprefix(package.prefix): git.blob_id(content) for path, content in contents.items()}
    pinned = [release for release in package.releases if release.series == queue.name]
    return any(
        all(file.before == blobs[file.path] for file in release.files if file.path in blobs) for release in pinned
    )


def _is_fixed(patch: Patch, package: Package, base: Checkout) -> bool:
    """Whether the lock names the content of a file of the patch as mended upstream."""
    known = {(package.prefix + file.path, file.blob) for fixed in package.fixed for file in fixed.files}
    return any((path, git.blob_id(content)) in known for path, content in _contents([patch], base).items())


def _brought(patch: Patch, base: Checkout) -> str:
    """The commit that brought upstream's own change, by the number of its pull request (`Origin:`), which GitHub puts
    at the end of the subject; "" where the history that is here does not have it."""
    number = re.fullmatch(r"backport, https://\S+/pull/(\d+)", patch.trailers["Origin"])
    if number is None:
        return ""
    wanted = f"(#{number[1]})"
    listed = own.out(
        *("log", "--format=%h %cs %s", "--fixed-strings", f"--grep={wanted}", base.commit, "--", *patch.paths),
        folder=base.folder,
    )
    commits = [row for row in listed.splitlines() if row.endswith(wanted)]
    if not commits:
        return ""
    commit, day, subject = commits[-1].split(" ", 2)
    tags = own.out("tag", "--contains", commit, "--sort=version:refname", folder=base.folder).splitlines()
    return f"commit {commit} of {day}, {subject!r}{f', first in {tags[0]}' if tags else ''}"
