"""The HTTP client for index pages and files: unearth's, which knows pip's settings, with limits on what an answer may
do.

Answers come from whoever stands behind the index: they may be endless, slow or small until they are unpacked, and lead
to another host.
"""

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import httpx2
from unearth.auth import MultiDomainBasicAuth
from unearth.fetchers import PyPIClient

FAILURES = (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OverflowError)
"""What a request may raise: ValueError and OverflowError come of addresses that are none."""

MAXIMUM_PAGE = 32 << 20
"""Bytes that a page may have, unpacked: the largest ones of a public index have a third of that."""

PATIENCE = 60.0
"""Seconds in which an answer may be as slow as it likes, between each two bytes of which pip's timeout runs."""

SLOWEST = 1024
"""Bytes in a second that an answer must have on average afterwards."""


class Client(PyPIClient):
    """Follows redirects, but never from https to something else, nor to a file of this machine.

    Args:
        index_urls: the indexes, which may have credentials in them.
        settings: what httpx2.Client takes.
    """

    def __init__(self, *, index_urls: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(**settings, follow_redirects=True, event_hooks={"response": [_check]})
        self.auth = _Auth(prompting=False, index_urls=index_urls)

    def get(self, url: httpx2.URL | str, **options: Any) -> httpx2.Response:
        """The whole answer, which has at most MAXIMUM_PAGE bytes. Raises httpx2.HTTPError where it has more."""
        content = bytearray()
        with self.stream("GET", url, **options) as response:
            for piece in response.iter_bytes():
                content += piece
                if len(content) > MAXIMUM_PAGE:
                    raise httpx2.ReadError(f"expected a page of at most {MAXIMUM_PAGE} bytes, found more")
        headers = [pair for pair in response.headers.multi_items() if pair[0].lower() not in _OF_THE_TRANSFER]
        return httpx2.Response(response.status_code, headers=headers, content=bytes(content), request=response.request)


_OF_THE_TRANSFER = ("content-encoding", "content-length", "transfer-encoding")


class _Auth(MultiDomainBasicAuth):
    """Credentials of an origin for that origin alone.

    unearth's own answers a 401 that another origin gave after a redirect with the credentials of the first one, and
    keeps them for the other.
    """

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        flow = super().auth_flow(request)
        response = yield next(flow)
        if response.url.origin == request.url.origin:
            with contextlib.suppress(StopIteration):
                while True:
                    response = yield flow.send(response)


def _check(response: httpx2.Response) -> None:
    """Raises httpx2.HTTPError where an answer leads away from where it may; the others get a watch."""
    assert isinstance(response.stream, httpx2.SyncByteStream)
    if not response.has_redirect_location:
        response.stream = _Watched(response.stream)
        return
    with contextlib.suppress(httpx2.InvalidURL):  # httpx2 says so itself
        target = response.url.join(response.headers["Location"])
        allowed = ("https",) if response.url.scheme == "https" else ("http", "https")
        if target.scheme not in allowed:
            raise httpx2.UnsupportedProtocol(
                f"expected a redirect to {' or '.join(allowed)}, found one from {response.url.scheme}://"
                f"{response.url.host} to {target.scheme}://{target.host}"
            )
    response.stream = _Unread(response.stream)
    response.headers.pop("Content-Encoding", None)


class _Watched(httpx2.SyncByteStream):
    """A stream that fails where it is slower than SLOWEST after PATIENCE."""

    def __init__(self, stream: httpx2.SyncByteStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[bytes]:
        started, size = time.monotonic(), 0
        for piece in self.stream:
            size += len(piece)
            lasted = time.monotonic() - started
            if lasted > PATIENCE and size < lasted * SLOWEST:
                raise httpx2.ReadTimeout(f"expected {SLOWEST} bytes a second, found {size} in {lasted:.0f} seconds")
            yield piece

    def close(self) -> None:
        self.stream.close()


class _Unread(_Watched):
    """The body of a redirect, which httpx2 would read to its end."""

    def __iter__(self) -> Iterator[bytes]:
        return iter(())
