"""Pinned artefacts: found on the user's own package index, checked against their sha256, kept in the user's cache
folder.

Nothing that is fetched is ever run. Index pages are read by `unearth`, with the settings of the user's pip (`pip
config list`).
"""

import ast
import contextlib
import hashlib
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from overlay import cache
from overlay.errors import OverlayError, naming
from overlay.progress import Progress, say
from overlay.queue import pip_listing
from overlay.queue.lock import Artefact

if TYPE_CHECKING:
    from httpx2 import BaseTransport
    from unearth import Link
    from unearth.fetchers import PyPIClient


MAXIMUM_WHEEL = 256 << 20
"""Bytes that a wheel may have that no lock names: one with all the Python code of these projects has a twentieth of
that."""


def path(artefact: Artefact) -> Path:
    """Where the cache keeps `artefact`, there or not."""
    return cache.folder() / "artefacts" / artefact.sha256 / artefact.file


def read(project: str, artefact: Artefact) -> bytes:
    """The bytes of `artefact`, from the cache or else from the index; their sha256 is that of the lock, at every call.

    Args:
        project: the name of the project on the index.
        artefact: the pin.

    Raises:
        OverlayError: the index does not have it, cannot be reached, or what it or the cache has is not what the lock
            names. A damaged file in the cache is taken out of it, so that the next run fetches it again.
    """
    ensure(project, artefact)
    return _from_cache(artefact)


def ensure(project: str, artefact: Artefact) -> None:
    """Fetches `artefact` if the cache does not have it, and looks at no byte of what is there. Raises OverlayError as
    `read` does."""
    if not path(artefact).is_file():
        with cache.locked(f"artefact-{artefact.sha256}"):
            if not path(artefact).is_file():
                _download(project, artefact)


def fetch(project: str, artefact: Artefact) -> Path:
    """As `read`, but returns the file in the cache."""
    read(project, artefact)
    return path(artefact)


def _from_cache(artefact: Artefact) -> bytes:
    kept = path(artefact)
    content = kept.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found == artefact.sha256 and len(content) != artefact.size:
        raise OverlayError(
            f"{artefact.file}: expected {artefact.size} bytes, found {len(content)} with the right sha256: correct "
            "its size in upstream.lock"
        )
    if found != artefact.sha256:
        kept.unlink(missing_ok=True)
        raise OverlayError(
            f"{kept}: expected {artefact.size} bytes with sha256 {artefact.sha256}, found {len(content)} with {found}: "
            "it was damaged in the cache and has been removed, run this again to fetch it anew"
        )
    return content


def _download(project: str, artefact: Artefact) -> None:
    settings = PipSettings.read()
    with settings.client() as client, _incoming(artefact) as folder:
        link = _find(client, settings, project, artefact)
        file = folder / artefact.file
        kept = path(artefact)
        with naming(kept):
            _save(client, link, file, artefact)
        kept.parent.mkdir(parents=True, exist_ok=True)
        file.replace(kept)


@contextlib.contextmanager
def _incoming(artefact: Artefact) -> Iterator[Path]:
    """An empty folder in the cache to download into; the caller holds the artefact's lock. Its name is always the
    same, so that a killed run leaves one behind and no more."""
    folder = cache.folder() / "artefacts" / f"{artefact.sha256}.part"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class PipSettings:
    """What the user's pip is told about indexes and connections (pip's configuration files and PIP_* variables)."""

    index_urls: Sequence[str] = ()
    find_links: Sequence[str] = ()
    trusted_hosts: Sequence[str] = ()
    proxy: str | None = None
    certificates: str | None = None
    client_certificate: str | None = None
    timeout: float = 15.0

    @classmethod
    def read(cls) -> "PipSettings":
        """The settings as `pip config list` prints them, for the commands that fetch: environment before [install],
        before [global]."""
        return cls.parse(pip_listing.read())

    @classmethod
    def parse(cls, listing: str) -> "PipSettings":
        """The settings in what `pip config list` printed."""
        values: dict[str, dict[str, str]] = {"global": {}, "install": {}, "download": {}, ":env:": {}}
        for row in listing.splitlines():
            name, _, value = row.partition("=")
            section, _, option = name.partition(".")
            if section in values:
                with contextlib.suppress(ValueError, SyntaxError):
                    values[section][option] = str(ast.literal_eval(value))
        merged = values["global"] | values["install"] | values["download"] | values[":env:"]
        indexes: list[str] = []
        if merged.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
            indexes = [merged.get("index-url") or _default_index(), *merged.get("extra-index-url", "").split()]
        return cls(
            index_urls=indexes,
            find_links=merged.get("find-links", "").split(),
            trusted_hosts=merged.get("trusted-host", "").split(),
            proxy=merged.get("proxy") or None,
            certificates=merged.get("cert") or None,
            client_certificate=merged.get("client-cert") or None,
            timeout=float(merged.get("timeout") or merged.get("default-timeout") or 15),
        )

    def client(self) -> "PyPIClient":
        """An HTTP client with these settings; it answers for netrc, keyring and credentials in index URLs."""
        import ssl

        from overlay.queue.client import Client

        try:
            context = ssl.create_default_context(cafile=self.certificates)
            if self.client_certificate:
                context.load_cert_chain(self.client_certificate)
        except OSError as error:
            raise OverlayError(
                f"expected certificates at {self.certificates or self.client_certificate}, found: {error}: correct "
                "`cert` or `client-cert` in your pip configuration"
            ) from None
        return Client(
            index_urls=self.index_urls,
            trusted_hosts=self.trusted_hosts,
            verify=context,
            timeout=self.timeout,
            proxy=self.proxy,
            mounts=self._proxies_of_trusted_hosts(),
        )

    def _proxies_of_trusted_hosts(self) -> "Mapping[str, BaseTransport]":
        """Connections to trusted hosts through the proxy: unearth makes them without one."""
        from urllib.request import getproxies, proxy_bypass

        import httpx2

        found = getproxies()
        mounts: dict[str, BaseTransport] = {}
        for host in self.trusted_hosts:
            for scheme in ("http", "https"):
                proxy = self.proxy or (None if proxy_bypass(host) else found.get(scheme) or found.get("all"))
                if proxy:
                    mounts[f"{scheme}://{host}"] = httpx2.HTTPTransport(verify=False, proxy=proxy)
        return mounts


def _default_index() -> str:
    from unearth import PackageFinder

    return str(PackageFinder().sources[0]["url"])


@dataclass
class _Search:
    """What a search for one file came upon, for the message when it fails."""

    other: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """Those of `failed` that could not be asked, or gave no answer, which an index that has no such project does."""


def _find(client: "PyPIClient", settings: PipSettings, project: str, artefact: Artefact) -> "Link":
    """The link to the artefact: on the page of an index, with the hash of the lock or with none."""
    say(f"looking for {artefact.file} on the package index")
    search = _Search()
    unhashed = None
    with _noted(search.failed):
        for link in _links(client, settings, project, search):
            if link.filename != artefact.file:
                continue
            digest = _sha256(link)
            if digest == artefact.sha256:
                return link
            if digest is None:
                unhashed = unhashed or link
            else:
                search.other.append(f"sha256 {digest} at {shown(link.url_without_fragment)}")
    if unhashed is not None:
        return unhashed
    if search.other:
        raise OverlayError(
            f"{artefact.file}: expected sha256 {artefact.sha256}, found {search.other[0]}: the index offers "
            "another file, do not use it before you know why"
        )
    raise OverlayError(_nowhere(settings, search, artefact.file, "no such file"))


def _nowhere(settings: PipSettings, search: _Search, wanted: str, found: str) -> str:
    where = ", ".join(shown(url) for url in (*settings.index_urls, *settings.find_links)) or "no index at all"
    why = f" ({'; '.join(dict.fromkeys(map(shown, search.failed)))})" if search.failed else ""
    return (
        f"expected {wanted} on {where}, found {found}{why}: check the network and the index in your pip configuration"
    )


@dataclass(frozen=True)
class Offer:
    """A wheel as an index offers it. No lock names it, so nothing of it may be delivered.

    `sha256`, and the time of the upload (in UTC), are there where the page of the index has them.
    """

    version: Version
    file: str
    url: str
    sha256: str | None
    uploaded: datetime | None
    yanked: bool


_UNANSWERED = re.compile(r".* from (.*: (?:Server Error\(\d+\)|Client Error\((?:401|407|408|429)\)).*)")
"""What unearth notes of an index that may have the project, but not for this user, or not now. 404 is what one says
that has it not, and 403 what a bucket of S3 says then."""


def offers(client: "PyPIClient", settings: PipSettings, project: str, *, whole: bool = True) -> list[Offer]:
    """Every wheel of a project on the user's indexes, in their order.

    Args:
        whole: an index that gives no answer is an error, also where another one has some of the wheels; without it that
            is said.

    Raises:
        OverlayError: there is none, or no index can be reached.
    """
    say(f"looking for the releases of {project} on the package index")
    search = _Search()
    found: list[Offer] = []
    with _noted(search.failed):
        for link in _links(client, settings, project, search):
            with contextlib.suppress(InvalidWheelFilename):  # an sdist, among others
                version = parse_wheel_filename(link.filename)[1]
                digest = _sha256(link)
                if digest is not None and not re.fullmatch("[0-9a-f]{64}", digest):
                    digest = None  # what is no hash must not come to name a file in the cache
                url = link.url_without_fragment
                found.append(Offer(version, link.filename, url, digest, link.upload_time, link.is_yanked))
    if not found:
        raise OverlayError(_nowhere(settings, search, f"wheels of {project}", "none"))
    search.silent += [matched[1] for note in search.failed if (matched := _UNANSWERED.fullmatch(note))]
    if search.silent and whole:
        raise OverlayError(
            f"{project}: expected an answer of every index, found none of {shown(search.silent[0])}: releases would be "
            "missing, check the network, and take an index that is not to be asked out of your pip configuration"
        )
    for one in search.silent:
        say(f"an index gave no answer, releases may be missing: {shown(one)}")
    return found


def pin(client: "PyPIClient", offer: Offer) -> Artefact:
    """What the lock would say of a wheel that an index offers; the wheel is in the cache then.

    Raises:
        OverlayError: it cannot be fetched, or is not what the index says.
    """
    if offer.sha256 is not None:
        kept = cache.folder() / "artefacts" / offer.sha256 / offer.file
        if kept.is_file():
            return Artefact(file=offer.file, size=kept.stat().st_size, sha256=offer.sha256)
    with tempfile.TemporaryDirectory(dir=cache.make(cache.folder() / "artefacts"), prefix="new-") as folder:
        draft = Path(folder) / offer.file
        say(f"fetching {offer.file}")
        size, sha256 = fetch_offer(client, offer, draft)
        artefact = Artefact(file=offer.file, size=size, sha256=sha256)
        kept = path(artefact)
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft.replace(kept)
    return artefact


def fetch_offer(client: "PyPIClient", offer: Offer, file: Path) -> tuple[int, str]:
    """Fetches a wheel that no lock names into the new file `file`.

    Returns:
        Its size and its sha256.

    Raises:
        OverlayError: it cannot be fetched, is empty or too large, or is not what the index says.
    """
    from overlay.queue.client import FAILURES

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
    except FAILURES as error:
        raise OverlayError(
            f"{shown(offer.url)}: expected a wheel, found {size} bytes and then: {reason(error)}: check the network "
            "and run this again"
        ) from None
    if size == 0 or offer.sha256 not in (None, digest.hexdigest()):
        expected = "a wheel" if offer.sha256 is None else f"sha256 {offer.sha256}"
        raise OverlayError(
            f"{shown(offer.url)}: expected {expected}, found {size} bytes with {digest.hexdigest()}: the download was "
            "cut or is another file, nothing was kept, run this again"
        )
    return size, digest.hexdigest()


def _sha256(link: "Link") -> str | None:
    return (link.hashes or {}).get("sha256") or (link.hash if link.hash_name == "sha256" else None)


@contextlib.contextmanager
def _noted(notes: list[str]) -> Iterator[None]:
    """Takes down what unearth warns of, such as an index that it cannot read: it raises nothing then, and logs it."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(" ".join(record.getMessage().split()))

    logger, handler = logging.getLogger("unearth"), Handler(logging.WARNING)
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = propagates
        logger.removeHandler(handler)


def _links(client: "PyPIClient", settings: PipSettings, project: str, search: _Search) -> Iterator["Link"]:
    from unearth import PackageFinder

    sources: list[Mapping[str, list[str]]] = [{"find_links": [url]} for url in settings.find_links]
    sources += [{"index_urls": [url]} for url in settings.index_urls]
    for source in sources:
        url = next(iter(source.values()))[0]
        try:
            finder = PackageFinder(session=client, ignore_compatibility=True, **source)  # type: ignore[arg-type]
            for package in finder.find_all_packages(project, allow_yanked=True):
                if url.startswith(("http:", "https:")) and not package.link.url.startswith(("http:", "https:")):
                    search.failed.append(f"{url}: expected links to http or https, found {package.link.url[:200]}")
                    continue
                yield package.link
        except Exception as error:  # the parsers of pages raise anything where a page is not what it says
            search.silent.append(f"{url}: {reason(error)[:1000]}")
            search.failed.append(search.silent[-1])


def _save(client: "PyPIClient", link: "Link", file: Path, artefact: Artefact) -> None:
    from overlay.queue.client import FAILURES

    digest = hashlib.sha256()
    size = 0
    try:
        with (
            client.get_stream(link.normalized) as response,
            file.open("xb") as target,
            Progress(artefact.file, artefact.size) as progress,
        ):
            response.raise_for_status()
            for chunk in response.iter_bytes():
                size += len(chunk)
                if size > artefact.size:
                    break
                digest.update(chunk)
                target.write(chunk)
                progress.advance(len(chunk))
    except FAILURES as error:
        raise OverlayError(
            f"{shown(link.url_without_fragment)}: expected {artefact.size} bytes, found {size} and then: "
            f"{reason(error)}: check the network and run this again"
        ) from None
    if size != artefact.size or digest.hexdigest() != artefact.sha256:
        found = (
            f"more than {artefact.size} bytes" if size > artefact.size else f"{size} bytes with {digest.hexdigest()}"
        )
        raise OverlayError(
            f"{shown(link.url_without_fragment)}: expected {artefact.size} bytes with sha256 {artefact.sha256}, found "
            f"{found}: the download was cut or is another file, nothing was kept, run this again"
        )


def reason(error: Exception) -> str:
    """What `error` says, in one line and without credentials."""
    return shown(" ".join(str(error).split())) or type(error).__name__


def shown(text: str) -> str:
    """`text` without the credentials that may stand in addresses in it."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)
