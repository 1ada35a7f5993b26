"""What `overlay apply` made for the overlay: the post-images in `overlay/patched/`, and the manifest over them.

Standard library only, and little of it: this is imported in training processes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from pathlib import Path

from overlay.errors import OverlayError

FORMAT = 2

PROJECTS = ("transformers", "transformer_engine")
"""The import packages that are covered: the manifest is read for none but these."""

NOTICE = b"# Modified by modeling-overlay: "
"""In every file that a patch changes (Apache licence, section 4(b))."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a stock release: a short name, and what its user sees."""

    code: str
    text: str


@dataclass(frozen=True)
class File:
    """A file that a release's series changes.

    `path` is that in the wheel (`transformers/modeling_layers.py`), `before` and `after` are git blob ids, `image` is
    the path of the post-image in `overlay/patched/`.
    """

    path: str
    before: str
    after: str
    image: str


@dataclass(frozen=True)
class Release:
    """A release with post-images, and the faults that these mend."""

    project: str
    version: str
    faults: tuple[Fault, ...]
    files: tuple[File, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything that is covered. `right` has the blob ids that need no patch, by path, each with a release that has
    it: upstream has mended them, or there is nothing to mend."""

    releases: tuple[Release, ...]
    right: Mapping[str, Mapping[str, str]]

    def modules(self) -> dict[str, str]:
        """Each covered module's name, with its path in the wheel."""
        paths = {file.path for release in self.releases for file in release.files} | set(self.right)
        return {_module(path): path for path in paths}

    def image(self, path: str, blob: str) -> File | None:
        """The file to load in the place of one at `path` with this content."""
        return next(
            (file for release in self.releases for file in release.files if (file.path, file.before) == (path, blob)),
            None,
        )

    def is_right(self, path: str, content: bytes, blob: str) -> bool:
        """Whether a file is fixed: one of ours (of any revision), or one of an upstream release that has a fix."""
        return blob in self.right.get(path, {}) or NOTICE in content


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def folder() -> Path:
    """Where the post-images are."""
    return Path(__file__).with_name("patched")


@cache
def read() -> Manifest:
    """The manifest of this installation.

    Raises:
        OverlayError: there is none, or it is of another version of this project.
    """
    try:
        raw = json.loads(_content())
    except FileNotFoundError:
        raise OverlayError(
            f"expected the patched files in {folder()}, found none: this is a checkout in which scripts/apply.sh did "
            "not run, run it, or install the wheel that it writes"
        ) from None
    if raw["format"] != FORMAT:
        raise OverlayError(
            f"{folder() / 'manifest.json'}: expected format {FORMAT}, found {raw['format']}: run scripts/apply.sh again"
        )
    releases = tuple(
        Release(
            one["project"],
            one["version"],
            tuple(Fault(**fault) for fault in one["faults"]),
            tuple(File(**file) for file in one["files"]),
        )
        for one in raw["releases"]
    )
    return Manifest(releases, raw["right"])


def _content() -> bytes:
    loader = globals()["__spec__"].loader
    return bytes(loader.get_data(str(folder() / "manifest.json")))  # a zip archive on the path, too


def blob_id(content: bytes) -> str:
    """The git blob id of a file's content (`git hash-object`)."""
    return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
