"""What `overlay apply` built goes to a folder that a server or a bucket has: added to what is there, and an index that
can be installed from at every moment.

The folder may be a mount point, and may hold what is not this project's, so it is not replaced as a whole
(`overlay.deliver.output`): files come first, then the pages that name them, each by a rename. A page is HTML (PEP 503),
because JSON (PEP 691) asks for a server that looks at the `Accept` of a request.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from packaging.utils import canonicalize_name, parse_wheel_filename

from overlay import cache
from overlay.deliver import index
from overlay.deliver.apply import OVERLAY
from overlay.deliver.wheel import Wheel, metadata_of
from overlay.errors import OverlayError, naming
from overlay.progress import say
from overlay.queue.lock import Lock

DRAFT = ".overlay-part"
"""How the name of a file ends that is being written; it begins with a dot."""


@dataclass(frozen=True)
class Wheels:
    """What is published: the wheels of a folder, and that folder."""

    folder: Path
    products: Sequence[index.Product]

    def file(self, product: index.Product) -> Path:
        """The wheel of `product`."""
        return self.folder / product.file

    def is_other(self, product: index.Product, link: index.Link) -> bool | None:
        """Whether a page links to another file than `product` under its name, or to other metadata; None where it gives
        no hash."""
        if any(said != f"sha256={product.metadata_sha256}" for said in link.metadata):
            return True
        if link.hash is None:
            return None
        with self.file(product).open("rb") as stream:
            return hashlib.file_digest(stream, link.hash[0]).hexdigest() != link.hash[1]

    def commands(self, address: str) -> list[str]:
        """How pip and uv install the first of them from the index at `address`."""
        rest = f"-c {shlex.quote(str(self.folder / 'constraints.txt'))} {self.products[0].project}"
        place = shlex.quote(address)
        return [f"pip install --extra-index-url {place} {rest}", f"uv pip install --index {place} {rest}"]


def wheels(lock: Lock, folder: Path) -> Wheels:
    """The wheels in `folder`, in the order of `lock`, each with the sha256 that it names, or, for the overlay wheel,
    constraints.txt.

    Raises:
        OverlayError: there is none, or one is not what `overlay apply` writes.
    """
    files = sorted(folder.glob("*.whl"))
    if not files:
        raise OverlayError(
            f"expected wheels in {folder}, found none: run scripts/apply.sh first, or name another folder with --from"
        )
    built = {
        release.built.file: (project, release.local_version, release.built.sha256)
        for project, _, release in lock.deliveries()
        if release.built is not None
    }
    products = []
    for file in files:
        project, version, expected = built.get(file.name) or _overlay_wheel(file)
        content = file.read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if found != expected:
            raise OverlayError(f"{file}: expected sha256 {expected}, found {found}: run scripts/apply.sh again")
        metadata = metadata_of(Wheel.read(content, file.name).members)
        products.append(index.Product(project, version, file.name, found, metadata))
    order = [*built, *(product.file for product in products if product.project == OVERLAY)]
    return Wheels(folder, sorted(products, key=lambda product: order.index(product.file)))


def _overlay_wheel(file: Path) -> tuple[str, str, str]:
    """The project, the version and the expected sha256 of the overlay wheel."""
    try:
        version = str(parse_wheel_filename(file.name)[1])
    except ValueError:
        version = ""
    if not version or not re.fullmatch(rf"{OVERLAY.replace('-', '_')}-[^-/]+-py3-none-any\.whl", file.name):
        raise OverlayError(
            f"{file}: expected a wheel that upstream.lock names, or the overlay wheel, found neither: run "
            "scripts/apply.sh again, or move it away"
        )
    constraints = file.with_name("constraints.txt")
    text = constraints.read_text("utf-8", "replace") if constraints.is_file() else ""
    pinned = re.search(rf"^{OVERLAY}=={re.escape(version)}  # --hash=sha256:([0-9a-f]{{64}})$", text, re.MULTILINE)
    if pinned is None:
        raise OverlayError(
            f"{file}: expected {OVERLAY}=={version} and its sha256 in {constraints}, found none: run scripts/apply.sh "
            "again"
        )
    return OVERLAY, version, pinned[1]


def changed(product: index.Product, found: str) -> str:
    """What is wrong where a place has another file under the name of `product`."""
    return (
        f"expected {product.file} with sha256 {product.sha256} and its metadata, found {found}: another file was "
        "published under this name, and a published file never changes: find out why, or publish to another place"
    )


def to_folder(published: Wheels, folder: Path) -> list[str]:
    """Adds the wheels to the index in `folder`, which need not exist.

    Returns:
        The files that were added; none where all of them were there.

    Raises:
        OverlayError: `folder` has one of the names with other bytes, or cannot be written; nothing is changed then.
    """
    _check(published.folder, folder)
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            _remove_drafts(folder)
            missing = [product for product in published.products if not _there(folder, product)]
            pages = _pages(folder, published)
            for product in missing:
                _put_wheel(published.file(product), folder / product.file, product.sha256)
            for product in published.products:
                _put(folder / f"{product.file}.metadata", product.metadata)
            for path, page in pages.items():
                _put(folder / path, page.encode("utf-8"))
    return [product.file for product in missing]


def _check(source: Path, folder: Path) -> None:
    if folder.resolve() == source.resolve():
        raise OverlayError(f"{folder} is what is published: expected another folder: name one with --to")
    _check_writable(folder)


def _check_writable(folder: Path) -> None:
    parent = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not parent.is_dir():
        what = "a file" if parent.exists() else "a link to nothing"
        raise OverlayError(f"{parent}: expected a folder, found {what}: name another folder with --to")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OverlayError(
            f"{parent}: expected a folder that can be written, found that it cannot: name another with --to"
        )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps every other run off `folder`: of this user by the cache, and of all by a lock of the folder itself, which
    some network file systems do not have."""
    with cache.locked("publish", folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process publishes to {folder}; waiting for it")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                say(
                    f"{folder} cannot be locked ({error.strerror}): let no other machine publish there at the same time"
                )
            yield
        finally:
            os.close(descriptor)


def _remove_drafts(folder: Path) -> None:
    """Removes what killed runs left."""
    for place in ("", "simple/", "simple/*/"):
        for left in folder.glob(f"{place}.*{DRAFT}"):
            left.unlink(missing_ok=True)


def _there(folder: Path, product: index.Product) -> bool:
    """Whether `folder` has the wheel. Raises OverlayError where it has other files of the names."""
    for name, expected in ((f"{product.file}.metadata", product.metadata_sha256), (product.file, product.sha256)):
        file = folder / name
        if not os.path.lexists(file):
            continue
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != expected:
            raise OverlayError(f"{file}: {changed(product, f'sha256 {found}')}")
    return os.path.lexists(folder / product.file)


def _pages(folder: Path, published: Wheels) -> dict[str, str]:
    """The pages as they will be. Raises OverlayError where a page says that one of the files is another."""
    found = {}
    named = {product.file: product for product in published.products}
    for path, new in index.pages(published.products).items():
        file = folder / path
        _check_writable(file.parent)
        with page_of(file):
            old = _read(file)
            for link in index.links(old or ""):
                if link.name in named:
                    _check_link(folder, file.parent, published, named[link.name], link)
            if path == index.ROOT:
                found[path] = index.merged(old or _unlisted(folder), new, canonicalize_name)
            else:
                if old is None and file.parent.is_dir() and any(file.parent.iterdir()):
                    raise OverlayError(
                        "expected a page, found none, and a folder with files that a web server may list by itself: "
                        "publish to another folder"
                    )
                found[path] = index.merged(old or "", new)
    return found


def _read(file: Path) -> str | None:
    """A page; None where there is none."""
    try:
        return file.read_text("utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise OverlayError(
            f"expected a page in UTF-8, found byte {file.read_bytes()[error.start]:#x} at {error.start}: write it in "
            "UTF-8, or publish to another folder"
        ) from None


def _check_link(folder: Path, page: Path, published: Wheels, product: index.Product, link: index.Link) -> None:
    """Raises OverlayError where a link of a page, which lies in the folder `page`, is or may be to another file."""
    other = published.is_other(product, link)
    if other is None:
        parts = urlsplit(link.href)
        absolute = parts.netloc or parts.path.startswith("/")  # where that is, is known to the server alone
        file = folder / product.file if absolute else page / unquote(parts.path)
        other = not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != product.sha256
    if other:
        raise OverlayError(changed(product, link.said or "no hash, and another file there or none"))


@contextmanager
def page_of(place: object) -> Iterator[None]:
    """Puts the name of a page, a path or an address, before what is wrong with it."""
    try:
        yield
    except OverlayError as error:
        raise OverlayError(f"{place}: {error}") from None


def _unlisted(folder: Path) -> str:
    """In the place of a list of projects: the projects that have a page."""
    return "".join(
        index.Link({"href": f"{quote(page.parent.name)}/"}, page.parent.name).html()
        for page in sorted(folder.glob("simple/*/index.html"))
    )


def _put_wheel(source: Path, file: Path, sha256: str) -> None:
    with _draft(file) as draft:
        with (
            source.open("rb") as stream,
            draft.open("wb") as copy,
        ):  # `copyfile` blames the source where the disk is full
            shutil.copyfileobj(stream, copy)
        with draft.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
            os.fsync(stream.fileno())
        if found != sha256:
            raise OverlayError(
                f"{source}: expected sha256 {sha256}, found {found}: it changed while it was read, run this again"
            )


def _put(file: Path, content: bytes) -> None:
    with suppress(FileNotFoundError):
        if file.read_bytes() == content:
            return
    file.parent.mkdir(parents=True, exist_ok=True)
    with _draft(file) as draft, draft.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def _draft(file: Path) -> Iterator[Path]:
    """A file beside `file`, which takes its place at the end."""
    draft = file.with_name(f".{file.name}{DRAFT}")
    try:
        with naming(draft):
            yield draft
            draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
