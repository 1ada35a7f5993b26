"""Software bills of materials: what was patched in a wheel, with what, and why, in the folder that PEP 770 names.

A document is kept in the user's cache by all that it was made from: the library that makes it takes longer to import
than a wheel takes to build.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from overlay.deliver.post_images import Overlaid
from overlay.explain import FILE
from overlay.queue import git, kept, series
from overlay.queue.lock import Package, Release

__all__ = ["FILE", "LABELLED", "LISTING", "MEMBER", "PATCHED", "Changed", "Upstream", "of_overlay", "of_wheel"]

MEMBER = f"sboms/{FILE}"
"""Where it lies in the metadata folder of a wheel."""

PATCHED = "patched"
LABELLED = "the version label"
LISTING = "the hashes of what is changed, and of this document, whose hash is therefore not here"

_MAKER = "overlay.deliver.cyclonedx_document"
_LIBRARIES = ("cyclonedx-python-lib", "py-serializable", "packageurl-python")
"""What writes a document, pinned exactly in pyproject.toml."""


@dataclass(frozen=True)
class Upstream:
    """What was patched: a wheel that the lock names by its sha256, or a commit, which no lock names."""

    project: str
    version: str
    repository: str
    file: str | None = None
    sha256: str | None = None
    commit: str | None = None

    @classmethod
    def pinned(cls, project: str, package: Package, release: Release) -> "Upstream":
        """A release in the lock."""
        return cls(project, release.version, package.repository, release.wheel.file, release.wheel.sha256)


@dataclass(frozen=True)
class Changed:
    """A file that is not as upstream has it, by its path in the wheel, and why. RECORD has no content here: it names
    the hash of the document that this goes into."""

    path: str
    why: str
    before: bytes | None = None
    after: bytes | None = None


def of_wheel(
    upstream: Upstream,
    version: str,
    queue: series.Series,
    changed: Sequence[Changed],
    notes: str | None = None,
) -> bytes:
    """The document of a patched wheel.

    Args:
        upstream: what it was made of.
        version: with the local version label.
        queue: the series, of which it has the patches for wheels.
        changed: every file of it that differs.
        notes: what else is to be known of how it was made.
    """
    files = [(one.path, one.why, *map(_digest, (one.before, one.after))) for one in changed]
    return _document(
        "of_wheel", [asdict(upstream), version, _told(queue), files, notes], upstream, version, queue, changed, notes
    )


def of_overlay(listed: Iterable[tuple[Package, Overlaid]]) -> bytes:
    """The document of the overlay wheel: a component for each release, with the files that are laid over it.

    The wheel's own version has a digest of its content, which this is part of: `hatch_build.py` puts it in.
    """
    releases = list(listed)
    parts = [
        [
            asdict(Upstream.pinned(one.project, package, one.release)),
            _told(one.queue),
            [image.exchanged.model_dump() for image in one.images],
        ]
        for package, one in releases
    ]
    return _document("of_overlay", parts, releases)


def _told(queue: series.Series) -> list[str]:
    return [queue.name, kept.content_of(patch.file for patch in queue.patches)]


def _digest(content: bytes | None) -> str | None:
    return None if content is None else f"{git.blob_id(content)} {hashlib.sha256(content).hexdigest()}"


def _document(kind: str, parts: Sequence[Any], *arguments: Any) -> bytes:
    """What the function `kind` makes of `arguments`, or made of them before: `parts` are all that is in them."""
    folder = Path(__file__).parent
    code = [folder / "cyclonedx_document.py", Path(__file__), Path(git.__file__), Path(series.__file__)]
    key = kept.key(kind, kept.content_of(code), [version_of(name) for name in _LIBRARIES], parts)
    text = kept.find("sboms", key)
    if not isinstance(text, str):
        made: bytes = getattr(import_module(_MAKER), kind)(*arguments)
        text = made.decode("utf-8")
        kept.keep("sboms", key, text)
    return text.encode("utf-8")
