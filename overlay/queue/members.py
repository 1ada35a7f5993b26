"""Single members of wheels that no lock names: to look at, never to deliver.

They are read by HTTP range requests (RFC 9110, section 14) where the server allows them, and else from the whole wheel,
which is thrown away again. The cache keeps the members by the sha256 of their wheel, away from the artefacts. That hash
is checked where a whole wheel comes; a range is checked against nothing but the checksum in the wheel's own directory.
"""

import hashlib
import io
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlay import cache
from overlay.errors import OverlayError
from overlay.progress import say
from overlay.queue import git
from overlay.queue.source import Offer, reason, shown

if TYPE_CHECKING:
    from unearth.fetchers import PyPIClient
    from zipwire import SyncRemoteZip

MAXIMUM_MEMBER = 1 << 20
"""Bytes that a member may have, unpacked or not: the largest file that a series touches has a fifth of that."""

MAXIMUM_WHEEL = 256 << 20
"""Bytes that a wheel, or its directory, may have: one with all the Python code of these projects has a twentieth."""

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
    draft = cache.make(place.parent) / f"{place.name}.{os.getpid()}"
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)


def _fetch(client: "PyPIClient", offer: Offer, paths: Sequence[str]) -> Members:
    import httpx2
    from zipwire import SyncRemoteZip, ZipwireError
    from zipwire.backends import FileReader

    try:
        reader = FileReader.from_uri(offer.url) if offer.url.startswith("file:") else _ranges(client, offer.url)
        with SyncRemoteZip(reader) as archive:
            return _members(archive, paths)
    except (ZipwireError, httpx2.HTTPStatusError, httpx2.DecodingError, zlib.error, ValueError):
        pass  # no ranges here, or not those that were asked for: the whole wheel has a hash that tells
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise _cut(offer, "an answer", "none", error) from None
    say(f"{offer.file}: no single files can be had of it, so all of it is fetched")
    with tempfile.TemporaryDirectory(prefix="overlay-") as folder:
        file = Path(folder) / "wheel"
        _download(client, offer, file)
        try:
            with SyncRemoteZip(FileReader(file)) as archive:
                return _members(archive, paths)
        except (ZipwireError, zlib.error, ValueError) as error:
            raise OverlayError(
                f"{shown(offer.url)}: expected a wheel, found that its files cannot be read ({reason(error)}): the "
                "index offers a damaged file"
            ) from None


def _members(archive: "SyncRemoteZip", paths: Sequence[str]) -> Members:
    """Raises ZipwireError, ValueError or zlib.error where the archive is not sound."""
    there = set(archive.namelist())
    return {path: _member(archive, path) if path in there else None for path in paths}


def _member(archive: "SyncRemoteZip", path: str) -> bytes:
    entry = archive.getinfo(path)
    if entry.compress_size > MAXIMUM_MEMBER or entry.compress_type not in (0, 8) or entry.flag_bits & 0x41:
        raise ValueError(f"{path} is larger than {MAXIMUM_MEMBER} bytes, or neither stored nor deflated")
    content = io.BytesIO()
    archive.read_into(entry, content, max_file_size=MAXIMUM_MEMBER)
    return content.getvalue()


def _ranges(client: "PyPIClient", url: str) -> Any:
    """zipwire's reader of a URL, which here takes no more bytes than were asked for."""
    from zipwire import BadZipFile
    from zipwire.backends import Httpx2SyncReader

    class Ranges(Httpx2SyncReader):
        def read_range(self, offset: int, length: int) -> tuple[bytes, Any]:
            return b"".join(self.stream_range(offset, length)), {}

        def stream_range(self, offset: int, length: int) -> Iterator[bytes]:
            left = min(length, MAXIMUM_WHEEL)
            for chunk in super().stream_range(offset, length):
                left -= len(chunk)
                if left < 0:
                    raise BadZipFile(f"more than the {length} bytes that were asked for, or than {MAXIMUM_WHEEL}")
                yield chunk

    return Ranges(url, client=client)


def _download(client: "PyPIClient", offer: Offer, file: Path) -> None:
    import httpx2

    digest = hashlib.sha256()
    size = 0
    try:
        with client.get_stream(offer.url) as response, file.open("xb") as target:
            response.raise_for_status()
            for chunk in response.iter_bytes():
                size += len(chunk)
                if size > MAXIMUM_WHEEL:
                    raise OverlayError(
                        f"{shown(offer.url)}: expected a wheel of at most {MAXIMUM_WHEEL} bytes, found more: this is "
                        "no wheel of a release"
                    )
                digest.update(chunk)
                target.write(chunk)
    except httpx2.HTTPError as error:
        raise _cut(offer, "a wheel", f"{size} bytes", error) from None
    if offer.sha256 not in (None, digest.hexdigest()):
        raise OverlayError(
            f"{shown(offer.url)}: expected sha256 {offer.sha256}, found {size} bytes with {digest.hexdigest()}: the "
            "download was cut or is another file, nothing was kept, run this again"
        )


def _cut(offer: Offer, expected: str, found: str, error: Exception) -> OverlayError:
    return OverlayError(
        f"{shown(offer.url)}: expected {expected}, found {found} and then: {reason(error)}: check the network and "
        "run this again"
    )
