"""Zip archives of wheels, member by member and byte by byte.

`zipfile` can only compress again what it copies, and what zlib makes differs between its versions. So unchanged
members are taken over as they lie in the archive, and new ones are stored: the same members give the same bytes on
every machine. Format: PKWARE's APPNOTE 6.3, sections 4.3.7 (local header), 4.3.9 (data descriptor), 4.3.12 (central
directory) and 4.3.16 (its end); no zip64, no comments, no extra fields.

An archive is read only if it has one meaning: its members lie one behind the other from its first byte to its
directory, and its directory ends it. What is hidden before, between or behind them, members that share their bytes (a
bomb), and a second directory are what one program takes for the content and another does not.
"""

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from overlay.errors import OverlayError
from overlay.queue.lock import check_apart, relative_path

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_DESCRIBED = 8
"""The flag of a member whose size and checksum stand behind it (a data descriptor)."""
_LIMIT = 0xFFFF_FFFF
MAXIMUM_MEMBERS = 0xFFFF
MAXIMUM_SIZE = 8 << 30
"""Bytes that all members may have together: a release of these packages has less than a hundredth of that."""
MAXIMUM_RATIO = 100
"""How many times larger the members may be than the archive: a release has about 4, deflated zeros have 1000."""
MAXIMUM_DIRECTORY = 16 << 20
"""Bytes that the directory of members may have: a release has less than a twentieth of that."""


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
        OverlayError: it is no zip file, or holds anything but its members and their directory; has a member that is
            doubled, collides with another but for case or for the form of its letters (Unicode normalization), lies
            in another as in a folder, leads out of the folder it is unpacked into, is a link or a device, is encrypted,
            or is compressed in a way that wheels are not; or would be too large unpacked.
    """
    view = memoryview(archive)
    start, count = _directory(view, name)
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as listing:
            entries = listing.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise OverlayError(f"{name}: expected a wheel, found no zip file ({error}): fetch it again") from None
    if len(entries) != count:
        raise OverlayError(
            f"{name}: expected the {count} members that its end names, found {len(entries)}: do not use this file"
        )
    size = sum(entry.file_size for entry in entries)
    if len(entries) > MAXIMUM_MEMBERS or size > MAXIMUM_SIZE:
        raise OverlayError(
            f"{name}: expected at most {MAXIMUM_MEMBERS} members of at most {MAXIMUM_SIZE >> 30} GiB together, "
            f"found {len(entries)}: this is no wheel of a release"
        )
    if size > MAXIMUM_RATIO * len(archive):
        raise OverlayError(
            f"{name}: expected members of at most {MAXIMUM_RATIO} times the size of the archive, found {size} bytes "
            f"in {len(archive)}: this is no wheel of a release"
        )
    for entry in entries:
        _check(entry, name)
    try:
        check_apart(entry.filename for entry in entries)
    except ValueError as error:
        raise OverlayError(f"{name}: member {error}: expected each name once, do not use this file") from None
    found = [_member(view, entry, name) for entry in entries]
    _check_order(view, entries, found, start, name)
    return [member for member in found if not member.name.endswith("/")]


def _directory(view: memoryview, name: str) -> tuple[int, int]:
    """Where the directory of members begins, whose end is that of the archive, and how many there are."""
    at = len(view) - _END.size
    if at < 0 or bytes(view[at : at + 4]) != b"PK\5\6":
        behind = bytes(view).rfind(b"PK\5\6")
        found = f"{at - behind} bytes behind it" if behind >= 0 else "none"
        raise OverlayError(
            f"{name}: expected a wheel, found no zip file (expected the end of its directory in the last {_END.size} "
            f"bytes, found {found}): fetch it again"
        )
    _, _, _, here, members, size, start, comment = _END.unpack_from(view, at)
    if start == _LIMIT or size == _LIMIT or here == MAXIMUM_MEMBERS:
        raise OverlayError(f"{name}: expected less than 4 GiB, found a zip64 archive: this is no wheel of a release")
    if size > MAXIMUM_DIRECTORY:
        raise OverlayError(
            f"{name}: expected a directory of at most {MAXIMUM_DIRECTORY} bytes, found {size}: this is no wheel of a "
            "release"
        )
    if start + size != at or here != members or comment:
        raise OverlayError(
            f"{name}: expected a wheel, found no zip file (its directory of {size} bytes at {start} does not end at "
            f"{at}): fetch it again, and do not use this file if it is as it was sent"
        )
    return start, members


def _check_order(
    view: memoryview, entries: Iterable[zipfile.ZipInfo], members: Iterable[Member], start: int, name: str
) -> None:
    """Raises OverlayError where the members do not fill the archive up to its directory, which begins at `start`."""
    at = 0
    for entry, member in sorted(zip(entries, members, strict=True), key=lambda pair: pair[0].header_offset):
        if entry.header_offset != at:
            raise OverlayError(
                f"{name}: member {entry.filename}: expected it at {at}, behind the one before, found it at "
                f"{entry.header_offset}: do not use this file"
            )
        name_length, extra_length = struct.unpack_from("<2H", view, at + _LOCAL.size - 4)
        at += _LOCAL.size + name_length + extra_length + len(member.raw)
        if entry.flag_bits & _DESCRIBED:
            at += _descriptor(view, at, entry, name)
    if at != start:
        raise OverlayError(
            f"{name}: expected its directory at {at}, behind the last member, found it at {start}: do not use this file"
        )


def _descriptor(view: memoryview, at: int, entry: zipfile.ZipInfo, name: str) -> int:
    """How long the data descriptor at `at` is, which must say what the directory says."""
    said = struct.pack("<3L", entry.CRC, entry.compress_size, entry.file_size)
    for descriptor in (b"PK\7\10" + said, said):
        if view[at : at + len(descriptor)] == descriptor:
            return len(descriptor)
    raise OverlayError(
        f"{name}: member {entry.filename}: expected its size and checksum behind it, found others: do not use this file"
    )


def _check(entry: zipfile.ZipInfo, name: str) -> None:
    try:
        relative_path(entry.orig_filename.removesuffix("/"))
    except ValueError as error:
        raise OverlayError(f"{name}: member {entry.orig_filename!r}: {error}: do not use this file") from None
    if entry.filename != entry.orig_filename:  # zipfile prefers the name in a Unicode path extra field, if there is one
        raise OverlayError(
            f"{name}: member {entry.orig_filename!r} has another name too, {entry.filename!r}: do not use this file"
        )
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFDIR if entry.is_dir() else stat.S_IFREG):
        what = "a symbolic link" if kind == stat.S_IFLNK else f"a special file of type {kind:o}"
        raise OverlayError(
            f"{name}: member {entry.filename}: expected a regular file, found {what}: do not use this file"
        )
    if entry.is_dir() and entry.file_size:
        raise OverlayError(
            f"{name}: member {entry.filename}: expected a folder, found {entry.file_size} bytes: do not use this file"
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
        signature, _, flags, method, _, _, *said, name_length, extra_length = _LOCAL.unpack_from(view, start)
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
        or flags != entry.flag_bits
        or not _agree(said, entry)
        or end > len(view)
    ):
        raise OverlayError(
            f"{name}: member {entry.filename}: expected the same name, method, sizes and checksum in both of its "
            f"headers, found {stands[:200]!r} with others: do not use this file"
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


def _agree(said: list[int], entry: zipfile.ZipInfo) -> bool:
    """Whether a local header says the same of checksum and sizes as the directory, or leaves them to a descriptor."""
    found = [entry.CRC, entry.compress_size, entry.file_size]
    return said == found or (bool(entry.flag_bits & _DESCRIBED) and said == [0, 0, 0])


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
