"""The import hook: loads a post-image in the place of an installed file with the content of its pre-image.

See PEP 302 and PEP 451. Files are told apart by content alone: a release that was built from source, or that has
another version label, is covered as well.
"""

import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from overlay import manifest
from overlay.errors import OverlayError, OverlayMismatchError


class _Data(Protocol):
    """A loader that reads files (PEP 302)."""

    def get_data(self, path: str) -> bytes: ...


class Finder:
    """Stands before those that find files on `sys.meta_path`.

    Attributes:
        strict: whether unknown content is an error; else it is a warning, and the stock module is loaded.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._warned: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The post-image's spec where there is one for what is installed; None leaves it to the other finders.

        Raises:
            OverlayMismatchError: strict, and the content of the installed file is unknown.
        """
        if fullname.partition(".")[0] not in manifest.PROJECTS:
            return None
        try:
            inside = manifest.read().modules().get(fullname)
        except OverlayError as error:
            if self.strict:
                raise
            self._warn(fullname, str(error))
            return None
        if inside is None:
            return None
        stock = self._stock(fullname, path, target)
        if stock is None or stock.origin is None:
            return None
        if manifest.folder() in Path(stock.origin).parents:
            return stock  # found by way of another finder that asks all of them, and has wrapped the loader
        try:
            image = image_for(fullname, inside, stock)
        except OverlayMismatchError as error:
            if self.strict:
                raise
            self._warn(fullname, f"{error}; until then it is used as it is installed, with its faults")
            return None
        if image is None:
            return None
        return spec_from_file_location(
            fullname,
            image,
            loader=_loader(fullname, image),
            submodule_search_locations=stock.submodule_search_locations,
        )

    def _stock(self, fullname: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        """What the other finders find: the one of the paths, an editable install's, or another."""
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None

    def _warn(self, fullname: str, message: str) -> None:
        """Once for a package."""
        project = fullname.partition(".")[0]
        if project in self._warned:
            return
        self._warned.add(project)
        import logging
        import warnings

        logging.getLogger("overlay").warning(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def image_for(fullname: str, inside: str, stock: ModuleSpec) -> str | None:
    """The path of the post-image for an installed module; None where that is right as it is.

    Args:
        fullname: the module.
        inside: its path in the wheel.
        stock: where it is installed.

    Raises:
        OverlayMismatchError: its content is unknown.
    """
    listing = manifest.read()
    try:
        content = cast(_Data, stock.loader).get_data(str(stock.origin))
    except (AttributeError, OSError):
        content = b""  # no file, or no source: its content is not known either
    blob = manifest.blob_id(content)
    file = listing.image(inside, blob)
    if file is not None:
        return str(manifest.folder() / file.image)
    if listing.is_right(inside, content, blob):
        return None
    known = sorted(
        {release.version for release in listing.releases for file in release.files if file.path == inside}, key=_numbers
    )
    raise OverlayMismatchError(
        f"{stock.origin}: expected the {inside} of {fullname.partition('.')[0]} {', '.join(known)}, found git blob "
        f"{blob}: install one of these releases, or a modeling-overlay that knows this one, or set MODELING_OVERLAY=0 "
        "to train without the fix"
    )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def _loader(fullname: str, image: str) -> SourceFileLoader:
    own = globals()["__spec__"].loader
    return SourceFileLoader(fullname, image) if isinstance(own, SourceFileLoader) else _ArchiveLoader(fullname, image)


class _ArchiveLoader(SourceFileLoader):
    """Loads from the zip archive that this module is in; nothing is cached beside it."""

    def get_data(self, path: str) -> bytes:
        return bytes(globals()["__spec__"].loader.get_data(path))

    def path_stats(self, path: str) -> Any:
        raise OSError(f"{path} is in an archive")

    def set_data(self, path: str, data: Any, *, _mode: int = 0) -> None:
        """Nothing can be written."""


def loaded(fullname: str) -> ModuleSpec | None:
    """Where a covered module that is imported came from, if it is not a post-image."""
    module = sys.modules.get(fullname)
    spec = getattr(module, "__spec__", None)
    if module is None or spec is None or spec.origin is None:
        return None
    return None if manifest.folder() in Path(spec.origin).parents else spec
