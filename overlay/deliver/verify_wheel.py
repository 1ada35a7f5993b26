"""`overlay verify-wheel`: makes a wheel again from the lock and upstream's artefact, and says what differs.

The file may be anybody's: nothing of it is run or unpacked, and `archive.read` refuses what no wheel may have.
"""

import hashlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from overlay.deliver import archive, overlay_wheel, post_images
from overlay.deliver.apply import OVERLAY, checked, derive, write_patched
from overlay.deliver.archive import Member
from overlay.errors import OverlayError, escaped
from overlay.progress import say
from overlay.queue.lock import Lock, Package, Release

_TEXT = 16 << 20
"""Bytes of a member that lines are compared of; of a longer one, its size and bytes alone."""

_LINES = 40
"""Differences that are printed: of a wheel of something else, nearly every member is one."""

_IMAGES = "overlay/patched/"

_ADVICE = "do not use it before you know why"


def main(lock: Lock, root: Path, file: Path) -> int:
    """Prints what `verify` finds of a file.

    Args:
        lock: the pins.
        root: the checkout that holds `patches/` and `overlay/`.
        file: a wheel, by any name.

    Returns:
        The exit code: 0 where it is the same, byte for byte, else 1.

    Raises:
        OverlayError: it is none of this project's, or no sound archive, or it cannot be made again here.
    """
    if not file.is_file():
        seen = "a folder" if file.is_dir() else "no such file"
        raise OverlayError(f"{file}: expected a wheel, found {seen}: name one that is there")
    content = file.read_bytes()
    members = archive.read(content, file.name)
    project, version = _named(members, file.name)
    made = _overlay(lock, root, version) if project == OVERLAY else _pinned(lock, root, project, version, file.name)
    if made.content == content:
        called = "" if file.name == made.name else f"; it is to be called {made.name}"
        print(f"{file}: identical to what the lock and upstream's artefact give: {made.name}{called}")  # noqa: T201
        return 0
    print(f"{file}: not {made.name} as it is made here, {_ADVICE}:")  # noqa: T201
    found = list(differences(made.members, members))
    if not found and not made.notes:
        found = ["the members are the same: the archive has other bytes beside them, as an extra field or a comment"]
    if len(found) > _LINES:
        found = [*found[:_LINES], f"and {len(found) - _LINES} differences more"]
    if project == OVERLAY and _images(members) == _images(made.members):
        found.append("the patched files in it are those that the lock names")
    for line in (*made.notes, *found):
        print(f"  {escaped(line)}")  # noqa: T201
    return 1


@dataclass(frozen=True)
class _Made:
    """A wheel as it is made here, with what is to be said of it before what differs."""

    content: bytes
    members: Sequence[Member]
    name: str
    notes: Sequence[str] = ()


def _images(members: Sequence[Member]) -> list[tuple[str, bytes]]:
    """The post-images and the manifest in an overlay wheel, which stores its members."""
    return sorted((member.name, bytes(member.raw)) for member in members if member.name.startswith(_IMAGES))


def _named(members: Sequence[Member], name: str) -> tuple[str, str]:
    """The canonical project name and the version that the only METADATA of a wheel says."""
    found = [member for member in members if re.fullmatch(r"[^/]+\.dist-info/METADATA", member.name)]
    if len(found) != 1 or found[0].size > _TEXT:
        raise OverlayError(
            f"{name}: expected one METADATA in a .dist-info folder, found {len(found)}: this is no wheel"
        )
    header = HeaderParser().parsestr(found[0].content().decode("utf-8", "replace"))
    try:
        return canonicalize_name(str(header["Name"])), str(Version(str(header["Version"])))
    except ValueError:  # InvalidVersion is one; so is what Python says of numbers of thousands of digits
        raise OverlayError(
            f"{name}: expected a version (PEP 440) in METADATA, found {header['Version']!r}: this is no wheel of this "
            "project"
        ) from None


def _pinned(lock: Lock, root: Path, project: str, version: str, name: str) -> _Made:
    """The patched wheel of a release."""
    known = lock.spelled(project)
    if known is None:
        listed = ", ".join((*lock.packages, OVERLAY))
        raise OverlayError(f"{name}: expected a wheel of {listed}, found one of {project}: this project has none of it")
    public, _, label = version.partition("+")
    revision = re.fullmatch(r"overlay\.([1-9][0-9]*)", label)
    if revision is None:
        what = "upstream's own version" if not label else "the label of a wheel that no lock names"
        if re.fullmatch(r"(.*\.)?overlay\.g[0-9a-f]+", label):
            what = "a wheel of apply --from-git, which no lock names"
        raise OverlayError(
            f"{name}: expected a version such as {public}+overlay.1, found {version}, {what}: only wheels that the "
            "lock names can be made again"
        )
    pin = lock.find(f"{known}=={public}", use="deliver")
    made = checked(derive(root / "patches", *pin))
    release = pin[2]
    assert release.built is not None
    content = b"".join(archive.write(made.members))
    if release.built.sha256 != hashlib.sha256(content).hexdigest():
        raise OverlayError(
            f"{release.built_file}: expected sha256 {release.built.sha256}, found another one here: the lock is not of "
            "these patches, run overlay lock update, or check the commit out again"
        )
    if int(revision[1]) == release.revision:
        return _Made(content, made.members, release.built_file)
    return _other_revision(root, pin, int(revision[1]))


def _other_revision(root: Path, pin: tuple[str, Package, Release], revision: int) -> _Made:
    """The wheel with another revision's label and the patches of today: what differs then is what changed."""
    project, package, release = pin
    assert release.revision is not None
    older = revision < release.revision
    other = release.model_copy(update={"revision": revision})
    note = (
        f"this is revision {revision}, and the lock is at {release.revision}: "
        + ("an older one" if older else "one that this checkout does not know")
        + ": to make it again, use the commit whose upstream.lock has it"
        + (f" (git log -S '{other.built_file}' upstream.lock)" if older else "")
    )
    compared = f"beside its label, against revision {release.revision}:"
    made = derive(root / "patches", project, package, other)
    return _Made(b"", made.members, other.built_file, (note, compared))


def _overlay(lock: Lock, root: Path, version: str) -> _Made:
    """The overlay wheel of this checkout."""
    overlay_wheel.check(root)
    say("making the overlay wheel of this checkout, for which every pinned artefact is needed")
    with tempfile.TemporaryDirectory(prefix="overlay-") as temporary:
        patched, out = Path(temporary, "patched"), Path(temporary, "out")
        patched.mkdir()
        out.mkdir()
        patches = root / "patches"
        overlaid = [checked(derive(patches, *pin)).overlaid for pin in lock.deliveries()]
        overlaid += [post_images.make(patches, *pin) for pin in lock.patched() if pin[2].use == "test"]
        write_patched(overlaid, lock, patched)
        file = overlay_wheel.build(root, patched, out)
        content = file.read_bytes()
    made = archive.read(content, file.name)
    own = file.name.split("-")[1]
    if version == own:
        return _Made(content, made, file.name)
    note = (
        f"it is of another state of this project: its version is {version}, and that of this checkout {own}. To make "
        "it again, use the commit that it is of; below, what is not as here"
    )
    renamed = [member.renamed(member.name.replace(f"-{own}.dist-info/", f"-{version}.dist-info/")) for member in made]
    return _Made(b"", renamed, file.name, (note,))


def differences(made: Sequence[Member], found: Sequence[Member]) -> Iterator[str]:
    """What differs, a line each: members that are missing, extra or changed, then how the archives hold what is equal.

    Args:
        made: as it is to be.
        found: as it is.
    """
    expected = {member.name: member for member in made}
    there = {member.name: member for member in found}
    for name in expected:
        if name not in there:
            yield f"missing: {name}"
    for name in there:
        if name not in expected:
            yield f"extra: {name} ({there[name].size} bytes)"
    packed, headers = [], []
    same = [name for name in expected if name in there]
    for name in same:
        one, other = expected[name], there[name]
        said = _difference(one, other)
        if said is not None:
            yield f"changed: {name}: {said}"
        elif (one.method, len(one.raw)) != (other.method, len(other.raw)) or one.raw != other.raw:
            packed.append(name)
        elif one != other:
            headers.append(name)
    for names, what in (
        (packed, "compressed in another way"),
        (headers, "other dates, modes or systems in the headers"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield f"same content, {what}: {', '.join(names[:3])}{more}"
    if same != [name for name in there if name in expected]:
        yield "the members stand in another order"


def _difference(one: Member, other: Member) -> str | None:
    """How the content of `other` differs from that of `one`; None where it does not."""
    try:
        if (one.size, one.crc) == (other.size, other.crc) and one.content() == other.content():
            return None
        if other.size > _TEXT:
            return f"expected {one.size} bytes, found {other.size}"
        before, after = one.content(), other.content()
    except OverlayError as error:
        return str(error)
    try:
        lines = before.decode("utf-8").splitlines(), after.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        at = next((at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(before))
        return f"binary content: expected {len(before)} bytes, found {len(after)}, the first other one at {at}"
    for number, (old, new) in enumerate(zip(*lines, strict=False), 1):
        if old != new:
            return f"line {number}: expected {_short(old, new)}, found {_short(new, old)}"
    shorter = min(map(len, lines))
    longer = max(lines, key=len)
    if len(longer) == shorter:
        return "the ends of its lines differ"
    what = "is missing" if longer is lines[0] else "is too much"
    return f"line {shorter + 1} {what}: {_short(longer[shorter], '')}"


def _short(text: str, other: str) -> str:
    """A line for a message, from a little before the place where it differs from another."""
    same = next((at for at, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), 0)
    begin = max(0, same - 30) if len(text) > 90 else 0
    cut = text[begin : begin + 90]
    return f"{'…' if begin else ''}{cut!r}{'…' if begin + 90 < len(text) else ''}"
