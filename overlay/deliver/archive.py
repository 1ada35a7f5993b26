"""Zip archives of wheels, member by member and byte by byte.

`zipfile` can only compress again what it copies, and what zlib makes differs between its versions. So unchanged
members are taken over as they lie in the archive, and new ones are stored: the same members give the same bytes on
every machine. Format: PKWARE's APPNOTE 6.3, sections 4.3.7 (local header), 4.3.12 (central directory) and 4.3.16 (its
end); no zip64, no comments, no extra fields.
"""

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from overlay.errors import OverlayError
from overlay.queue.lock import relative_path

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_LIMIT = 0xFFFF_FFFF
MAXIMUM_MEMBERS = 0xFFFF
MAXIMUM_SIZE = 8 << 30
"""Bytes that all members may have together: a release of these packages has less than a hundredth of that."""


class Member(NamedTuple):
    """A member of a wheel. `raw` is its content as it lies in the archive: deflated (method 8) or stored (method 0)."""

    name: str
    raw: bytes | memoryview
    method: int
    crc: int
    size: int
    date: int
    time: int
    system: int
    attributes: int

    def content(self) -> bytes:
        """The content, inflated. Raises OverlayError where it is not what size and checksum say."""
        try:
            content = bytes(self.raw) if self.method == 0 else _inflate(self.raw, self.size)
        except zlib.error as error:
            raise OverlayError(
                f"member {self.name}: expected deflated data, found {error}: the archive is damaged, fetch it again"
            ) from None
        if len(content) != self.size or zlib.crc32(content) != self.crc:
            raise OverlayError(
                f"member {self.name}: expected {self.size} bytes with checksum {self.crc:08x}, found "
                f"{len(content)} with {zlib.crc32(content):08x}: the archive is damaged, fetch it again"
            )
        return content

    def renamed(self, name: str) -> "Member":
        """The same member under another name."""
        return self if name == self.name else self._replace(name=name)

    def exchanged(self, content: bytes) -> "Member":
        """The same member, name, date and mode, with other content, stored."""
        return self._replace(raw=content, method=0, crc=zlib.crc32(content), size=len(content))


def stored(name: str, content: bytes) -> Member:
    """A new member with the earliest date that zip knows and mode 0644."""
    return Member(name, content, 0, zlib.crc32(content), len(content), (1 << 5) | 1, 0, 3, (stat.S_IFREG | 0o644) << 16)


def _inflate(raw: bytes | memoryview, size: int) -> bytes:
    engine = zlib.decompressobj(-zlib.MAX_WBITS)
    return engine.decompress(raw, size + 1)


def read(archive: bytes, name: str) -> list[Member]:
    """The members of `archive`, in its order, without folders.

    Args:
        archive: the whole file.
        name: its name, for messages.

    Raises:
        OverlayError: it is no zip file, or has a member that is doubled, collides with another but for case, leads
            out of the folder it is unpacked into, is a link or a device, is encrypted, or is compressed in a way that
            wheels are not.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as listing:
            entries = [entry for entry in listing.infolist() if not entry.filename.endswith("/")]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise OverlayError(f"{name}: expected a wheel, found no zip file ({error}): fetch it again") from None
    if len(entries) > MAXIMUM_MEMBERS or sum(entry.file_size for entry in entries) > MAXIMUM_SIZE:
        raise OverlayError(
            f"{name}: expected at most {MAXIMUM_MEMBERS} members of at most {MAXIMUM_SIZE >> 30} GiB together, "
            f"found {len(entries)}: this is no wheel of a release"
        )
    seen: dict[str, str] = {}
    for entry in entries:
        _check(entry, name)
        folded = entry.filename.casefold()
        if folded in seen:
            same = "doubled" if seen[folded] == entry.filename else f"the same as {seen[folded]} but for case"
            raise OverlayError(
                f"{name}: member {entry.filename} is {same}: expected each name once, do not use this file"
            )
        seen[folded] = entry.filename
    view = memoryview(archive)
    return [_member(view, entry, name) for entry in entries]


def _check(entry: zipfile.ZipInfo, name: str) -> None:
    try:
        relative_path(entry.orig_filename)
    except ValueError as error:
        raise OverlayError(f"{name}: member {entry.orig_filename!r}: {error}: do not use this file") from None
    if entry.filename != entry.orig_filename:  # zipfile prefers the name in a Unicode path extra field, if there is one
        raise OverlayError(
            f"{name}: member {entry.orig_filename!r} has another name too, {entry.filename!r}: do not use this file"
        )
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        what = "a symbolic link" if kind == stat.S_IFLNK else f"a special file of type {kind:o}"
        raise OverlayError(
            f"{name}: member {entry.filename}: expected a regular file, found {what}: do not use this file"
        )
    if entry.flag_bits & 0x41 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise OverlayError(
            f"{name}: member {entry.filename}: expected it stored or deflated and not encrypted, found method "
            f"{entry.compress_type} and flags {entry.flag_bits:#x}: this is no wheel of a release"
        )
    if max(entry.file_size, entry.compress_size, entry.header_offset) >= _LIMIT:
        raise OverlayError(
            f"{name}: member {entry.filename}: expected less than 4 GiB, found a zip64 entry: this is no wheel of "
            "a release"
        )


def _member(view: memoryview, entry: zipfile.ZipInfo, name: str) -> Member:
    start = entry.header_offset
    try:
        signature, _, _, method, _, _, _, _, _, name_length, extra_length = _LOCAL.unpack_from(view, start)
    except struct.error:
        raise OverlayError(
            f"{name}: member {entry.filename}: expected a header at {start}, found the end of the file: fetch it again"
        ) from None
    begin = start + _LOCAL.size + name_length + extra_length
    end = begin + entry.compress_size
    stands = bytes(view[start + _LOCAL.size : start + _LOCAL.size + name_length])
    if (
        signature != b"PK\3\4"
        or method != entry.compress_type
        or stands != _encoded(entry.orig_filename, entry.flag_bits)
        or end > len(view)
    ):
        raise OverlayError(
            f"{name}: member {entry.filename}: expected the same name and method in both of its headers, found "
            f"{stands!r}: do not use this file"
        )
    year, month, day, hour, minute, second = entry.date_time
    return Member(
        name=entry.filename,
        raw=view[begin:end],
        method=method,
        crc=entry.CRC,
        size=entry.file_size,
        date=(year - 1980) << 9 | month << 5 | day,
        time=hour << 11 | minute << 5 | second // 2,
        system=entry.create_system,
        attributes=entry.external_attr,
    )


def _encoded(name: str, flags: int) -> bytes:
    return name.encode("utf-8" if flags & 0x800 else "cp437")


def write(members: Iterable[Member]) -> Iterator[bytes | memoryview]:
    """The bytes of an archive with these members, in pieces."""
    central: list[bytes] = []
    offset = 0
    for member in members:
        name = member.name.encode("utf-8")
        flags = 0 if name.isascii() else 0x800
        common = (
            20,
            flags,
            member.method,
            member.time,
            member.date,
            member.crc,
            len(member.raw),
            member.size,
            len(name),
            0,
        )
        header = _LOCAL.pack(b"PK\3\4", *common) + name
        central.append(
            _CENTRAL.pack(b"PK\1\2", member.system << 8 | 20, *common, 0, 0, 0, member.attributes, offset) + name
        )
        yield header
        yield member.raw
        offset += len(header) + len(member.raw)
    size = sum(map(len, central))
    if len(central) > MAXIMUM_MEMBERS or offset + size >= _LIMIT:
        raise OverlayError(
            f"expected an archive of less than 4 GiB and {MAXIMUM_MEMBERS} members, found {offset + size} bytes "
            f"and {len(central)}: this needs zip64, which wheels here do not use"
        )
    yield b"".join(central)
    yield _END.pack(b"PK\5\6", 0, 0, len(central), len(central), size, offset, 0)
