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
from overlay.versions import key


class _Data(Protocol):
    """A loader that reads files (PEP 302)."""

    def get_data(self, path: str) -> bytes: ...


class Finder:
    """Stands on `sys.meta_path`, or behind what the `.pth` file put there, before those that find files.

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
            OverlayError: strict, and the patched files of this installation are not whole.
        """
        if fullname.partition(".")[0] not in manifest.PROJECTS:
            return None
        try:
            inside = manifest.read().modules().get(fullname)
            stock = None if inside is None else self._stock(fullname, path, target)
            if inside is None or stock is None or stock.origin is None:
                return None
            if manifest.folder() in Path(stock.origin).parents:
                return stock  # found by way of another finder that asks all of them, and has wrapped the loader
            image = image_for(fullname, inside, stock)
        except OverlayError as error:
            if self.strict:
                raise
            self.warn(fullname, error)
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
            if self not in (finder, getattr(finder, "finder", None)) and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None

    def warn(self, fullname: str, error: OverlayError) -> None:
        """Says, once for a package, that a module of it is used as it is installed."""
        project = fullname.partition(".")[0]
        if project in self._warned:
            return
        import logging
        import warnings

        message = f"{error}; until then it is used as it is installed"
        logging.getLogger("overlay").warning(message)
        ours = 1
        while sys._getframe(ours).f_globals.get("__name__") in ("overlay.finder", "overlay.activation", _STARTUP):
            ours += 1
        warnings.warn(message, RuntimeWarning, stacklevel=ours + 1)
        self._warned.add(project)  # last: where warnings are errors, each import is one


_STARTUP = "_modeling_overlay"


def image_for(fullname: str, inside: str, stock: ModuleSpec) -> str | None:
    """The path of the post-image for an installed module; None where that is right as it is.

    Args:
        fullname: the module.
        inside: its path in the wheel.
        stock: where it is installed.

    Raises:
        OverlayMismatchError: its content is unknown.
        OverlayError: the post-image is not what the manifest says.
    """
    listing = manifest.read()
    project = fullname.partition(".")[0]
    try:
        content = cast(_Data, stock.loader).get_data(str(stock.origin))
    except (AttributeError, OSError):
        raise OverlayMismatchError(
            f"{stock.origin}: expected the source of {inside}, found none that can be read: install {project} with its "
            "sources, or set MODELING_OVERLAY=0 to train without the fix"
        ) from None
    blob = manifest.blob_id(content)
    file = listing.image(inside, blob)
    if file is not None:
        return manifest.image_path(file)
    if listing.is_right(inside, blob):
        return None
    if manifest.NOTICE in content:
        raise OverlayMismatchError(
            f"{stock.origin}: expected {inside} as this modeling-overlay patches it, found git blob {blob}, patched by "
            f"another revision or changed since: install the patched wheel of this one, or the stock {project}"
        )
    raise OverlayMismatchError(
        f"{stock.origin}: expected {inside} of {_releases(listing, project, inside)}, found git blob {blob}: install "
        "one that this modeling-overlay knows (overlay doctor says which), or set MODELING_OVERLAY=0 to train without "
        "the fix"
    )


def _releases(listing: manifest.Manifest, project: str, path: str) -> str:
    """The releases of which a file is known, in a few words."""
    versions = {one.version for one in listing.releases if any(file.path == path for file in one.files)}
    ordered = sorted(versions | set(listing.right.get(path, {}).values()), key=key)
    if len(ordered) == 1:
        return f"{project} {ordered[0]}"
    return f"one of {len(ordered)} releases of {project} from {ordered[0]} to {ordered[-1]}"


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
