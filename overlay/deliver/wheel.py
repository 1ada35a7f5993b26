"""Patched wheels: upstream's wheel with some files exchanged and a local version label (PEP 427, PEP 440, the RECORD
of PEP 376)."""

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from packaging.utils import canonicalize_name

from overlay import cache
from overlay.deliver import archive, record
from overlay.errors import OverlayError
from overlay.queue import source
from overlay.queue.lock import Artefact

_SIGNATURES = ("RECORD.jws", "RECORD.p7s")
_HASHES = ("sha256=", "sha384=", "sha512=")
_AUDIT = 1
"""Raise it when `audit` checks more than it did, so that what it has passed is looked at again."""


@dataclass(frozen=True)
class Wheel:
    """A wheel's members, and the name of the folder that holds its metadata."""

    name: str
    members: Sequence[archive.Member]
    dist_info: str

    @classmethod
    def read(cls, content: bytes, name: str) -> "Wheel":
        """The wheel in `content`.

        Args:
            content: the whole file.
            name: its file name, for messages.

        Raises:
            OverlayError: it is no archive that a wheel may be (see `archive.read`), or has not exactly one
                `.dist-info` folder with METADATA, WHEEL and a RECORD that names every member, or signatures, which
                would not survive an exchange; or is of another project than its file name says.
        """
        members = archive.read(content, name)
        folders = {
            member.name.partition("/")[0] for member in members if member.name.partition("/")[0].endswith(".dist-info")
        }
        if len(folders) != 1:
            raise OverlayError(
                f"{name}: expected one .dist-info folder, found {', '.join(sorted(folders)) or 'none'}: this is no "
                "wheel"
            )
        wheel = cls(name, members, folders.pop())
        names = {member.name for member in members}
        for needed in ("METADATA", "WHEEL", "RECORD"):
            if f"{wheel.dist_info}/{needed}" not in names:
                raise OverlayError(
                    f"{name}: expected {wheel.dist_info}/{needed}, found no such member: this wheel is not "
                    "complete, do not use it"
                )
        for signature in _SIGNATURES:
            if f"{wheel.dist_info}/{signature}" in names:
                raise OverlayError(
                    f"{name}: found the signature {signature}: expected none, it would not hold for the patched wheel"
                )
        recorded: set[str] = set()
        for listed, hashed, _ in wheel.record():
            if listed != f"{wheel.dist_info}/RECORD" and not hashed.startswith(_HASHES):
                raise OverlayError(
                    f"{name}: RECORD: expected a hash of {listed} by sha256 or better, found {hashed!r}: do not use "
                    "this file"
                )
            if listed in recorded or listed not in names:
                what = "doubled" if listed in recorded else "not there"
                raise OverlayError(
                    f"{name}: RECORD names {listed}, which is {what}: expected each member once, do not use this file"
                )
            recorded.add(listed)
        missing = names.difference(recorded)
        if missing:
            raise OverlayError(
                f"{name}: member {min(missing)} is not in RECORD: expected every member there, do not use this file"
            )
        wheel.check_project(name.partition("-")[0])
        return wheel

    @classmethod
    def pinned(cls, project: str, artefact: Artefact) -> "Wheel":
        """Upstream's wheel, as the lock names it. Raises OverlayError as `source.read` and `read` do."""
        return cls.read(source.read(project, artefact), artefact.file)

    def check_project(self, project: str) -> None:
        """Raises OverlayError where the metadata is that of another project than `project`."""
        header = self.member(f"{self.dist_info}/METADATA").content().partition(b"\n\n")[0].decode("utf-8", "replace")
        said = [self.dist_info.partition("-")[0], *re.findall(r"^Name: *(.*?)\s*$", header, re.MULTILINE)]
        if len(said) != 2 or {canonicalize_name(name) for name in said} != {canonicalize_name(project)}:
            raise OverlayError(
                f"{self.name}: expected Name: {project} in {self.dist_info}/METADATA, found "
                f"{', '.join(said[1:]) or 'none'}: this wheel is of another project"
            )

    @property
    def version(self) -> str:
        """The version in the name of the metadata folder."""
        return self.dist_info.removesuffix(".dist-info").partition("-")[2]

    @property
    def tag(self) -> str:
        """The compatibility tag in the file name: `py3-none-any`."""
        return "-".join(self.name.removesuffix(".whl").split("-")[-3:])

    def has(self, path: str) -> bool:
        """Whether there is a member at `path`."""
        return any(member.name == path for member in self.members)

    def member(self, path: str) -> archive.Member:
        """The member at `path`. Raises OverlayError where there is none."""
        for member in self.members:
            if member.name == path:
                return member
        raise OverlayError(
            f"{self.name}: expected {path}, found no such member: the lock or the series is for another release"
        )

    def record(self) -> list[list[str]]:
        """The rows of RECORD: path, hash, size."""
        return record.parse(self.member(f"{self.dist_info}/RECORD").content(), self.name)


def audit(wheel: Wheel, content: bytes, sha256: str) -> None:
    """Checks every member against RECORD, once for each sha256: what has passed is noted in the user's cache folder.

    Raises:
        OverlayError: a member is not what RECORD says.
    """
    note = cache.folder() / "audited" / f"{sha256}-{_AUDIT}"
    if note.is_file():
        return
    import zipfile
    import zlib

    from installer.sources import WheelFile

    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        opened.filename = wheel.name
        try:
            WheelFile(opened).validate_record(validate_contents=True)
        except (ValueError, zipfile.BadZipFile, OSError, EOFError, zlib.error) as error:
            first = next(iter(getattr(error, "issues", ())), str(error))
            raise OverlayError(
                f"{wheel.name}: expected RECORD to tell the truth, found: {first}: do not use this file"
            ) from None
    cache.make(note.parent)
    note.touch()


def relabelled(path: str, content: bytes, version: str, local_version: str) -> bytes:
    """A source file whose line `__version__ = "…"` says the local version, with the notice that section 4(b) of the
    Apache licence asks for.

    Raises:
        OverlayError: there is not exactly one such line with this version.
    """
    pattern = re.compile(rb'^__version__ = "' + re.escape(version.encode()) + rb'"$', re.MULTILINE)
    found = len(pattern.findall(content))
    if found != 1:
        raise OverlayError(
            f'{path}: expected one line __version__ = "{version}", found {found}: the lock names another file or '
            "release"
        )
    return pattern.sub(
        f'__version__ = "{local_version}"  # changed by modeling-overlay: the version label'.encode(), content
    )


def patched(
    wheel: Wheel,
    files: Mapping[str, bytes],
    version: str,
    local_version: str,
    added: Mapping[str, bytes] = MappingProxyType({}),
) -> list[archive.Member]:
    """The members of the patched wheel: `files` exchanged, the version label in METADATA, the folder name and RECORD,
    and what is `added` to the metadata; all else as it was.

    Args:
        wheel: upstream's.
        files: new contents by path in the wheel.
        version: upstream's version.
        local_version: the one with the local version label.
        added: new files by path in the metadata folder. One that is there already, in a wheel that was patched before,
            is exchanged.

    Raises:
        OverlayError: a file is not in the wheel, or METADATA does not say `version`.
    """
    old, new = f"{wheel.dist_info}/", f"{patched_dist_info(wheel, version, local_version)}/"
    listing = f"{old}RECORD"
    contents = dict(files)
    contents[f"{old}METADATA"] = relabelled_metadata(wheel, version, local_version)
    for path in contents:
        wheel.member(path)
    contents |= {f"{old}{path}": content for path, content in added.items()}

    def moved(path: str) -> str:
        return f"{new}{path.removeprefix(old)}" if path.startswith(old) else path

    rows = [
        record.row(moved(row[0]), contents[row[0]]) if row[0] in contents else [moved(row[0]), *row[1:]]
        for row in wheel.record()
    ]
    extra = [path for path in contents if not wheel.has(path)]
    rows += [record.row(moved(path), contents[path]) for path in extra]
    contents[listing] = record.write(rows)
    members = [
        (member.exchanged(contents[member.name]) if member.name in contents else member).renamed(moved(member.name))
        for member in wheel.members
    ]
    return [*members, *(archive.stored(moved(path), contents[path]) for path in extra)]


def patched_dist_info(wheel: Wheel, version: str, local_version: str) -> str:
    """The name of the metadata folder with the local version."""
    return f"{wheel.dist_info.removesuffix(f'-{version}.dist-info')}-{local_version}.dist-info"


def with_tree(wheel: Wheel, files: Mapping[str, bytes]) -> Wheel:
    """A wheel of other files with the metadata of `wheel`: what has the same content there is taken over, what is new
    is stored."""
    known = {member.name: member for member in wheel.members}
    members = []
    for path, content in files.items():
        member = known.get(path)
        same = member is not None and member.size == len(content) and member.content() == content
        members.append(member if member is not None and same else archive.stored(path, content))
    members += [member for member in wheel.members if member.name.startswith(f"{wheel.dist_info}/")]
    listing = f"{wheel.dist_info}/RECORD"
    rows = [
        [member.name, "", ""] if member.name == listing else record.row(member.name, member.content())
        for member in members
    ]
    content = record.write(rows)
    return replace(
        wheel, members=[member.exchanged(content) if member.name == listing else member for member in members]
    )


def relabelled_metadata(wheel: Wheel, version: str, local_version: str) -> bytes:
    """METADATA with the local version.

    Raises:
        OverlayError: it does not say `version`, or the folder that it lies in does not.
    """
    content = wheel.member(f"{wheel.dist_info}/METADATA").content()
    header, separator, body = content.partition(b"\n\n")
    pattern = re.compile(rb"^Version: (.*)$", re.MULTILINE)
    found = [value.decode("utf-8", "replace").strip() for value in pattern.findall(header)]
    if found != [version] or not wheel.dist_info.endswith(f"-{version}.dist-info"):
        raise OverlayError(
            f"{wheel.name}: expected Version: {version} in {wheel.dist_info}/METADATA, found "
            f"{', '.join(found) or 'none'}: this wheel is of another release"
        )
    return pattern.sub(f"Version: {local_version}".encode(), header) + separator + body


def metadata_of(members: Sequence[archive.Member]) -> bytes:
    """The content of METADATA among the members of a wheel."""
    return next(member for member in members if re.fullmatch(r"[^/]+\.dist-info/METADATA", member.name)).content()


def save(members: Sequence[archive.Member], file: Path) -> str:
    """Writes a new wheel and returns its sha256."""
    digest = hashlib.sha256()
    with file.open("xb") as target:
        for piece in archive.write(members):
            digest.update(piece)
            target.write(piece)
    return digest.hexdigest()
