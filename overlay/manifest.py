"""What `overlay apply` made for the overlay: the post-images in `overlay/patched/`, and the manifest over them.

Standard library only, and little of it: this is imported in training processes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any

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
    it: upstream has mended them, or there is nothing to mend. `complete`: it is of every pinned release, as in the
    overlay wheel, and not in a checkout of those alone that the last `scripts/apply.sh` was asked for."""

    releases: tuple[Release, ...]
    right: Mapping[str, Mapping[str, str]]
    complete: bool

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

    def is_right(self, path: str, blob: str) -> bool:
        """Whether a file needs no patch: it has ours, or is one of an upstream release that is right."""
        ours = any((file.path, file.after) == (path, blob) for release in self.releases for file in release.files)
        return ours or blob in self.right.get(path, {})


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
    place = folder() / "manifest.json"
    try:
        raw = json.loads(_content("manifest.json"))
        if raw["format"] != FORMAT:
            raise OverlayError(f"{place}: expected format {FORMAT}, found {raw['format']}: {_AGAIN}")
        return Manifest(tuple(_release(one) for one in raw["releases"]), raw["right"], raw["complete"])
    except FileNotFoundError:
        raise OverlayError(
            f"expected the patched files in {folder()}, found none: this is a checkout in which scripts/apply.sh did "
            "not run, run it, or install the wheel that it writes"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        said = f"{type(error).__name__}: {error}"
        raise OverlayError(f"{place}: expected the list of the patched files, found {said}: {_AGAIN}") from error


def _release(one: dict[str, Any]) -> Release:
    faults = tuple(Fault(**fault) for fault in one["faults"])
    return Release(one["project"], one["version"], faults, tuple(File(**file) for file in one["files"]))


_AGAIN = "install the overlay wheel again, or, in a checkout, run scripts/apply.sh"


def image_path(file: File) -> str:
    """Where the post-image of a file is.

    Raises:
        OverlayError: it is not there, or not what the manifest says.
    """
    path = folder() / file.image
    try:
        blob = blob_id(_content(file.image))
    except OSError as error:
        raise OverlayError(
            f"{path}: expected a patched file, found that it cannot be read ({error}): {_AGAIN}"
        ) from error
    if blob != file.after:
        raise OverlayError(f"{path}: expected git blob {file.after}, found {blob}: {_AGAIN}")
    return str(path)


def _content(name: str) -> bytes:
    loader = globals()["__spec__"].loader
    return bytes(loader.get_data(str(folder() / name)))  # a zip archive on the path, too


def blob_id(content: bytes) -> str:
    """The git blob id of a file's content (`git hash-object`)."""
    return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
