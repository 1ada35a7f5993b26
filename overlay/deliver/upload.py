"""What `overlay apply` built goes to an index that takes uploads, by twine
(https://twine.readthedocs.io): what it has already is compared by hash, and only what it has not is sent.

Credentials are found as twine finds them (`TWINE_*` variables, the section of ~/.pypirc with this address, keyring, the
terminal), and never stand in a command line or in a message.
"""

import argparse
import hashlib
import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from urllib.parse import unquote, urljoin, urlsplit

import requests
from packaging.utils import canonicalize_name
from twine import utils
from twine.commands.upload import upload
from twine.exceptions import TwineException
from twine.settings import Settings

from overlay.deliver import index
from overlay.deliver.publish import Wheels, changed, page_of
from overlay.errors import OverlayError
from overlay.progress import say
from overlay.queue.source import reason

PAGES = ("simple/", "+simple/")
"""Where servers have their pages, as seen from the address for uploads: most, and devpi."""


def to_repository(published: Wheels, url: str, index_url: str | None = None) -> tuple[str, list[str]]:
    """Uploads the wheels that the index does not have.

    Args:
        url: where uploads go.
        index_url: where its pages are (PEP 503); found below `url` if it is not given.

    Returns:
        The address of the pages, and the files that were uploaded.

    Raises:
        OverlayError: the index has one of the names with other bytes, cannot be asked, or refuses; nothing is uploaded
            in the first two cases.
    """
    _check(url, "--repository-url")
    if index_url:
        _check(index_url, "--index-url")
    with _answering(url):
        settings = _settings(url)
        session = settings.create_repository().session
        try:
            pages = _pages(session, url, index_url)
            missing = [product for product in published.products if not _there(session, pages, published, product)]
            if missing:
                say(f"uploading {', '.join(product.file for product in missing)} to {url}")
                with redirect_stdout(io.StringIO()):
                    upload(settings, [str(published.file(product)) for product in missing])
            for product in missing:
                if not _there(session, pages, published, product):
                    say(f"{pages} does not list {product.file} so far: see whether it comes, or run this again")
        finally:
            session.close()
    return pages, [product.file for product in missing]


def _check(url: str, option: str) -> None:
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise OverlayError(
            f"expected an address without a password, found one with {option}, where every process of this machine can "
            "read it: put it in TWINE_USERNAME and TWINE_PASSWORD, ~/.pypirc or a keyring"
        )
    host = None
    with suppress(ValueError):
        parts = urlsplit(url)
        host = parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    if not host:
        raise OverlayError(
            f"expected an address that begins with http:// or https:// and names a host, found another with {option}: "
            "correct it"
        )
    for known in (utils.DEFAULT_REPOSITORY, utils.TEST_REPOSITORY):
        domain = ".".join((urlsplit(known).hostname or "").split(".")[-2:])
        if f".{host.rstrip('.')}".endswith(f".{domain}"):
            raise OverlayError(
                f"{host} is the public index, which takes no version with a local label (PEP 440): expected "
                "an index of your own"
            )


def _settings(url: str) -> Settings:
    """As `twine upload --repository-url` has them, with the credentials of ~/.pypirc for the same address."""
    parser = argparse.ArgumentParser()
    Settings.register_argparse_arguments(parser)
    options = parser.parse_args([])
    options.repository_url, options.skip_existing, options.sign, options.attestations = url, False, False, False
    options.disable_progress_bar = options.disable_progress_bar or not sys.stderr.isatty()
    options.non_interactive = options.non_interactive or not sys.stdin.isatty()
    if os.path.isfile(os.path.expanduser(options.config_file)):  # noqa: PTH111, PTH113
        for section in utils.get_config(options.config_file).values():
            if (section.get("repository") or "").rstrip("/") == url.rstrip("/"):
                options.username = options.username or section.get("username")
                options.password = options.password or section.get("password")
    return Settings.from_argparse(options)


def _pages(session: requests.Session, url: str, index_url: str | None) -> str:
    """The address of the list of projects."""
    base = url.rstrip("/") + "/"
    tried = [index_url.rstrip("/") + "/"] if index_url else [base + place for place in PAGES]
    answers = []
    for address in tried:
        with session.get(address, headers=_HTML, stream=True, timeout=TIMEOUT) as response:
            if response.ok and _is_html(response):
                return address
            what = f" ({response.headers.get('Content-Type')})" if response.ok else ""
            answers.append(f"{address}: {response.status_code} {response.reason}{what}")
    raise OverlayError(
        f"expected the pages of the index, to see what it has, found {', '.join(answers)}: name their address with "
        "--index-url, and see that the credentials are right"
    )


_HTML = {"Accept": "text/html"}

TIMEOUT = 60
"""Seconds that the index may be silent for when its pages are asked for."""


def _is_html(response: requests.Response) -> bool:
    kind = str(response.headers.get("Content-Type", "")).partition(";")[0].strip().lower()
    return kind in ("text/html", "application/vnd.pypi.simple.v1+html")


def _there(session: requests.Session, pages: str, published: Wheels, product: index.Product) -> bool:
    """Whether the index has the wheel. Raises OverlayError where it has another file of this name."""
    name = canonicalize_name(product.project)
    response = session.get(f"{pages}{name}/", headers=_HTML, timeout=TIMEOUT)
    if response.status_code == requests.codes.not_found:
        return False
    response.raise_for_status()
    place = urlsplit(response.url).path.removesuffix("index.html").rstrip("/").rpartition("/")[2]
    if not _is_html(response) or canonicalize_name(unquote(place)) != name:  # a page to log in with lists nothing
        raise OverlayError(
            f"{pages}{name}/: expected the page of that project, found {response.url} "
            f"({response.headers.get('Content-Type')}): see that the credentials are right, and name the address of "
            "the pages with --index-url"
        )
    with page_of(response.url):
        links = [link for link in index.links(response.text) if link.name == product.file]
    for link in links:
        found, other = link.said, published.is_other(product, link)
        if other is None:
            found = _sha256(session, urljoin(response.url, link.href), pages)
            other = found != product.sha256
        if other:
            raise OverlayError(f"{response.url}: {changed(product, found)}")
    return bool(links)


def _sha256(session: requests.Session, address: str, pages: str) -> str:
    """That of a file. Whoever writes a page may link to any host, which has no business with the credentials."""
    asked = session
    if urlsplit(address)[:2] != urlsplit(pages)[:2]:
        asked = requests.Session()
        asked.verify = session.verify
    response = asked.get(address, timeout=TIMEOUT)
    response.raise_for_status()
    return hashlib.sha256(response.content).hexdigest()


@contextmanager
def _answering(url: str) -> Iterator[None]:
    """What twine and the connection say, as one line."""
    logger = logging.getLogger("twine")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it advises options of its own
    try:
        yield
    except requests.HTTPError as error:
        raise OverlayError(
            f"{_answer(error.response)}: expected the index to take it: see that the credentials are right, that this "
            "user may upload, and that it takes local versions (PEP 440)"
        ) from None
    except (requests.RequestException, ValueError) as error:  # a ValueError: where a server sends to no address
        raise OverlayError(f"{url}: {reason(error)}: check the network and the address") from None
    except TwineException as error:
        raise OverlayError(
            f"{url}: {reason(error)}: set TWINE_USERNAME and TWINE_PASSWORD, or have them in ~/.pypirc or a keyring, "
            "and see that the address is right"
        ) from None
    finally:
        logger.setLevel(level)


def _answer(response: requests.Response | None) -> str:
    assert response is not None
    said = " ".join(re.sub(r"<[^>]*>", " ", response.text).split())[:300]
    return f"{utils.sanitize_url(response.url)}: {response.status_code} {response.reason}" + (
        f" ({said})" if said else ""
    )
