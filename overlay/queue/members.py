"""Single members of wheels that no lock names: to look at, never to deliver.

They are read by HTTP range requests (RFC 9110, section 14) where the server allows them, and else from the whole wheel,
which is thrown away again. The cache keeps the members by the sha256 of their wheel, away from the artefacts. That hash
is checked where a whole wheel comes; a range is checked against nothing but the checksum in the wheel's own directory.
"""

import io
import json
import struct
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from overlay import cache
from overlay.errors import OverlayError
from overlay.progress import say
from overlay.queue import git
from overlay.queue.source import Offer, fetch_offer, reason, shown

if TYPE_CHECKING:
    from unearth.fetchers import PyPIClient
    from zipwire import SyncRemoteZip
    from zipwire._types import Headers

MAXIMUM_MEMBER = 1 << 20
"""Bytes that a member may have, unpacked or not: the largest file that a series touches has a fifth of that."""

MAXIMUM_PART = 4 << 20
"""Bytes that are read of it at once, such as its directory: that of these projects has a tenth of that."""

_PIECE = 1 << 12
"""Bytes that are unpacked at once, which come to a thousand times as many in a bomb."""

_UNSOUND = (zlib.error, struct.error, ValueError, OverflowError)
"""What zipwire raises beside its own errors, where an archive is none."""

Members = Mapping[str, bytes | None]
"""Content by path in the wheel; None where the wheel has no such member."""


def read(client: "PyPIClient", offer: Offer, paths: Sequence[str]) -> Members:
    """The members of a wheel at `paths`, from the cache or else from the index.

    Raises:
        OverlayError: the wheel cannot be fetched, is not what the index says, or is no wheel.
    """
    kept = {} if offer.sha256 is None else _kept(_place(offer.sha256))
    missing = [path for path in dict.fromkeys(paths) if path not in kept]
    if missing:
        kept |= _fetch(client, offer, missing)
        if offer.sha256 is not None:
            _keep(_place(offer.sha256), kept)
    return {path: kept[path] for path in paths}


def _place(sha256: str) -> Path:
    return cache.folder() / "members" / f"{sha256}.json"


def _kept(place: Path) -> dict[str, bytes | None]:
    """What the cache has of a wheel; a member that is not as it was written is left out, so that it is fetched anew."""
    found: dict[str, bytes | None] = {}
    try:
        for path, member in json.loads(place.read_bytes()).items():
            content = None if member is None else member["content"].encode("latin-1")
            if content is None or git.blob_id(content) == member["blob"]:
                found[path] = content
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    return found


def _keep(place: Path, members: Members) -> None:
    """Writes the whole file or none. Latin-1 has a character for each byte."""
    text = json.dumps(
        {
            path: None if content is None else {"blob": git.blob_id(content), "content": content.decode("latin-1")}
            for path, content in members.items()
        }
    )
    cache.write(place, text)


def _fetch(client: "PyPIClient", offer: Offer, paths: Sequence[str]) -> Members:
    import httpx2
    from zipwire import SyncRemoteZip, ZipwireError
    from zipwire.backends import FileReader, Httpx2SyncReader

    try:
        local = offer.url.startswith("file:")
        reader = FileReader.from_uri(offer.url) if local else Httpx2SyncReader(offer.url, client=client)
        with SyncRemoteZip(_Bounded(reader)) as archive:
            return _members(archive, paths)
    except (ZipwireError, httpx2.HTTPStatusError, httpx2.DecodingError, *_UNSOUND):
        pass  # no ranges here, or not those that were asked for: the whole wheel has a hash that tells
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise OverlayError(
            f"{shown(offer.url)}: expected an answer, found none and then: {reason(error)}: check the network and run "
            "this again"
        ) from None
    say(f"{offer.file}: no single files can be had of it, so all of it is fetched")
    with tempfile.TemporaryDirectory(prefix="overlay-") as folder:
        file = Path(folder) / "wheel"
        fetch_offer(client, offer, file)
        return of_file(file, shown(offer.url), paths)


def of_file(file: Path, name: str, paths: Sequence[str]) -> Members:
    """The members of the wheel in `file`, whose `name` is for messages. Raises OverlayError where it is not sound."""
    from zipwire import SyncRemoteZip, ZipwireError
    from zipwire.backends import FileReader

    try:
        with SyncRemoteZip(_Bounded(FileReader(file))) as archive:
            return _members(archive, paths)
    except (ZipwireError, *_UNSOUND) as error:
        raise OverlayError(
            f"{name}: expected a wheel, found that its files cannot be read ({reason(error)}): the index offers a "
            "damaged file"
        ) from None


def _members(archive: "SyncRemoteZip", paths: Sequence[str]) -> Members:
    """Raises ZipwireError or one of _UNSOUND where the archive is not sound."""
    there = Counter(archive.namelist())
    doubled = next((path for path in paths if there[path] > 1), None)
    if doubled is not None:
        raise ValueError(f"{doubled!r} is doubled")
    return {path: _member(archive, path) if path in there else None for path in paths}


def _member(archive: "SyncRemoteZip", path: str) -> bytes:
    entry = archive.getinfo(path)
    if entry.compress_size > MAXIMUM_MEMBER or entry.compress_type not in (0, 8) or entry.flag_bits & 0x41:
        raise ValueError(f"{path} is larger than {MAXIMUM_MEMBER} bytes, or neither stored nor deflated")
    content = io.BytesIO()
    archive.read_into(entry, content, max_file_size=MAXIMUM_MEMBER)
    return content.getvalue()


@dataclass(frozen=True)
class _Bounded:
    """A reader of zipwire's that takes no more bytes than were asked for, and gives them in small pieces.

    zipwire compares a member's size with its limit after it has unpacked a piece.
    """

    reader: Any

    @property
    def url(self) -> str:
        return str(self.reader.url)

    def head(self) -> "Headers":
        found: Headers = self.reader.head()
        return found

    def read_range(self, offset: int, length: int) -> "tuple[bytes, Headers]":
        return b"".join(self.stream_range(offset, length)), cast("Headers", {})

    def stream_range(self, offset: int, length: int) -> Iterator[bytes]:
        if length > MAXIMUM_PART:
            raise ValueError(f"expected parts of at most {MAXIMUM_PART} bytes, found one of {length}")
        left = length
        for chunk in self.reader.stream_range(offset, length):
            left -= len(chunk)
            if left < 0:
                raise ValueError(f"more than the {length} bytes that were asked for")
            for at in range(0, len(chunk), _PIECE):
                yield chunk[at : at + _PIECE]

    def close(self) -> None:
        self.reader.close()
