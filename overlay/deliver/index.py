"""A static package index over built wheels: pages of the simple repository API as HTML (PEP 503, hashes; PEP 714,
core metadata)."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from urllib.parse import quote

from packaging.utils import canonicalize_name
from simple_repository.model import File, Meta, ProjectDetail, ProjectList, ProjectListElement
from simple_repository.serializer import SerializerHtmlV1

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
    """Writes `simple/` into `folder`, where the wheels and their `.metadata` files lie.

    Links are relative, so that any web server, bucket or `file:` address serves it; `+` is escaped, because some
    object stores take it for a space.
    """
    pages: dict[str, list[Product]] = {}
    for product in products:
        pages.setdefault(canonicalize_name(product.project), []).append(product)
    html = SerializerHtmlV1()
    meta = Meta(API_VERSION)
    projects = ProjectList(meta, frozenset(ProjectListElement(name) for name in pages))
    _write(folder / "simple" / "index.html", _sorted(html.serialize_project_list(projects)))
    for name, listed in pages.items():
        files = tuple(
            File(
                filename=product.file,
                url=f"../../{quote(product.file)}",
                hashes={"sha256": product.sha256},
                requires_python=HeaderParser().parsestr(product.metadata.decode("utf-8")).get("Requires-Python"),
                dist_info_metadata={"sha256": product.metadata_sha256},
            )
            for product in listed
        )
        _write(folder / "simple" / name / "index.html", html.serialize_project_page(ProjectDetail(meta, name, files)))


def _sorted(page: str) -> str:
    """The page with its links in order: the serialiser takes a set, whose order differs from run to run."""
    links = sorted(re.findall(r"^<a .*\n", page, re.MULTILINE))
    return re.sub(r"^<a .*\n", lambda _: links.pop(0), page, flags=re.MULTILINE)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


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
