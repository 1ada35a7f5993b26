"""A static package index over built wheels: pages of the simple repository API as HTML (PEP 503, hashes; PEP 714,
core metadata)."""

import hashlib
import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.parser import HeaderParser
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from packaging.utils import canonicalize_name
from simple_repository.model import File, Meta, ProjectDetail, ProjectList, ProjectListElement
from simple_repository.serializer import SerializerHtmlV1

from overlay.errors import OverlayError

API_VERSION = "1.0"


@dataclass(frozen=True)
class Product:
    """A built wheel: its project, version, file name, sha256 and METADATA."""

    project: str
    version: str
    file: str
    sha256: str
    metadata: bytes

    @property
    def metadata_sha256(self) -> str:
        """The sha256 of METADATA."""
        return hashlib.sha256(self.metadata).hexdigest()


def write(folder: Path, products: Iterable[Product]) -> None:
    """Writes `simple/` into `folder`, where the wheels and their `.metadata` files lie."""
    for path, page in pages(products).items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page, encoding="utf-8")


ROOT = "simple/index.html"
"""The page that lists the projects."""


def pages(products: Iterable[Product]) -> dict[str, str]:
    """The pages over `products`, by their path in the folder where the wheels lie: those of projects, then the list of
    projects.

    Links are relative, so that any web server, bucket or `file:` address serves it; `+` is escaped, because some
    object stores take it for a space.
    """
    listed: dict[str, list[Product]] = {}
    for product in products:
        listed.setdefault(canonicalize_name(product.project), []).append(product)
    serializer = SerializerHtmlV1()
    meta = Meta(API_VERSION)
    written = {}
    for name, group in listed.items():
        files = tuple(
            File(
                filename=product.file,
                url=f"../../{quote(product.file)}",
                hashes={"sha256": product.sha256},
                requires_python=HeaderParser().parsestr(product.metadata.decode("utf-8")).get("Requires-Python"),
                dist_info_metadata={"sha256": product.metadata_sha256},
            )
            for product in group
        )
        written[f"simple/{name}/index.html"] = serializer.serialize_project_page(ProjectDetail(meta, name, files))
    projects = ProjectList(meta, frozenset(ProjectListElement(name) for name in listed))
    return written | {ROOT: _sorted(serializer.serialize_project_list(projects))}


def _sorted(page: str) -> str:
    """The page with its links in order: the serialiser takes a set, whose order differs from run to run."""
    links = sorted(_LINK.findall(page))
    return _LINK.sub(lambda _: links.pop(0), page)


_LINK = re.compile(r"^<a .*\n", re.MULTILINE)


@dataclass(frozen=True)
class Link:
    """A link of a page, with all its attributes."""

    attributes: Mapping[str, str | None]
    text: str

    @property
    def href(self) -> str:
        """Where it leads, as it stands there."""
        return self.attributes.get("href") or ""

    @property
    def name(self) -> str:
        """The last part of the path that it leads to: a file, or a project."""
        return unquote(urlsplit(self.href).path.rstrip("/").rpartition("/")[2])

    @property
    def hash(self) -> tuple[str, str] | None:
        """The name of a hash function and the digest, from the fragment (PEP 503)."""
        function, equals, digest = urlsplit(self.href).fragment.partition("&")[0].partition("=")
        return (
            (function.lower(), digest.lower()) if equals and function.lower() in hashlib.algorithms_guaranteed else None
        )

    @property
    def metadata(self) -> list[str]:
        """What it says of the sha256 of the metadata (PEP 714), as `sha256=…`, under either name."""
        said = (self.attributes.get(name) or "" for name in ("data-core-metadata", "data-dist-info-metadata"))
        return [one.lower() for one in said if one.lower().startswith("sha256=")]

    @property
    def said(self) -> str:
        """The hashes that it has, for a message."""
        return ", metadata ".join(["=".join(self.hash or ()), *self.metadata]).removeprefix(", ")

    def html(self) -> str:
        """A line of a page."""
        return f"<a {_attributes(self.attributes)}>{html.escape(self.text, quote=False)}</a><br/>\n"


def _attributes(attributes: Mapping[str, str | None]) -> str:
    return " ".join(name if value is None else f'{name}="{html.escape(value)}"' for name, value in attributes.items())


class _Page(HTMLParser):
    """The links of a page, and what its head says to installers (as PEP 708 does), but for the version of the API."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[Link] = []
        self.notes: list[str] = []
        self._open = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "base":
            raise OverlayError(
                "expected a page of an index whose links are relative to it, found <base>: take it out, or use another "
                "folder"
            )
        known = dict(attrs)
        name = known.get("name") or ""
        if tag == "meta" and name.startswith("pypi:") and name != "pypi:repository-version":
            self.notes.append(f"    <meta {_attributes(known)}>\n    ")
        if tag == "a":
            try:
                urlsplit(known.get("href") or "")
            except ValueError as error:
                raise OverlayError(
                    f"expected links to addresses, found {known['href']} ({error}): correct it"
                ) from None
            self.links.append(Link(known, ""))
            self._open = True

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag != "a"

    def handle_data(self, data: str) -> None:
        if self._open:
            self.links[-1] = replace(self.links[-1], text=self.links[-1].text + data)


def links(page: str) -> list[Link]:
    """The links of a page, whoever wrote it. Raises OverlayError where they are not relative to the page."""
    return [link for link in _Page(page).links if link.name]


def merged(old: str, new: str, name: Callable[[str], str] = str) -> str:
    """The page `new` with everything that `old` links to as well, in the order of their names.

    Where both link to the same, it is the link of `new`, with what else the old one said (that it is yanked: PEP 592).

    Args:
        old: a page, whoever wrote it, or nothing.
        new: a page of `pages`.
        name: the form in which names are compared.

    Raises:
        OverlayError: the links of `old` are not relative to it.
    """
    before = _Page(old)
    kept = {name(link.name): link for link in before.links}
    ours = {name(link.name): link for link in links(new)}
    joined = [link for link in before.links if link.name and name(link.name) not in ours]
    for key, link in ours.items():
        said = kept[key].attributes if key in kept else {}
        joined.append(replace(link, attributes={**link.attributes, **said, **link.attributes}))
    lines = sorted({link.html() for link in joined}, key=lambda line: (links(line)[0].name, line))
    bare = _LINK.sub("", new).replace("<title>", "".join(before.notes).lstrip() + "<title>", 1)
    start, _, end = bare.partition("</body>")
    return f"{start}{''.join(lines)}</body>{end}"


def constraints(products: Sequence[Product], head: str) -> str:
    """A constraints file for pip and uv, that begins with `head`: each wheel's exact local version and its hash.

    The hash is a comment, because pip asks for the hash of everything as soon as one line has one (its hash-checking
    mode), and then installs nothing that the wheel depends on. Download links on the index have the hash in any case.
    A constraints file can name one version of a project, so where several were built, the first is active and the
    others are comments.

    Args:
        products: at least one; the first line says how to install the first one's project.
    """
    rows = [
        f"{head}: pip install --find-links . --constraint constraints.txt {products[0].project}",
        "# With a hash, pip wants one for every package. If your requirements file has them all, put the line there,"
        " and take out the '# ' before --hash.",
    ]
    listed: dict[str, list[str]] = {}
    for product in products:
        row = f"{product.project}=={product.version}  # --hash=sha256:{product.sha256}"
        listed.setdefault(product.project, []).append(row)
    for project, (active, *others) in listed.items():
        rows.append(active)
        if others:
            rows.append(
                f"# One version of {project} can be active; for another, move the '# ' from its line to the active one:"
            )
        rows += [f"# {row}" for row in others]
    return "\n".join(rows) + "\n"
