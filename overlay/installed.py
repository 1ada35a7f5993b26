"""Where an import package is, and of which version, without importing it.

What has been imported counts as it was; else what the finders on `sys.meta_path` would find (those of the paths and of
editable installs among them), this project's own left out. Metadata is that of importlib.metadata; editable installs
say where their files are in `direct_url.json` (PEP 610).
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname


@dataclass(frozen=True)
class Package:
    """A package on the path.

    Attributes:
        name: what it is imported by.
        version: that of the metadata which belongs to these files; None where there is none.
        location: its folder, or its path in an archive.
        search: where its submodules are looked for.
        notes: what is unusual about it: another copy on the path, metadata of several versions.
    """

    name: str
    version: str | None
    location: str
    search: Sequence[str]
    notes: tuple[str, ...]

    def spec(self, module: str) -> tuple[ModuleSpec | None, bool]:
        """Where one of its modules is, and whether this project's finder is asked for that before any other.

        Args:
            module: the full name.
        """
        search: Sequence[str] | None = self.search
        parents = module.split(".")[1:-1]
        for depth in range(len(parents)):
            found, _ = _found(".".join([self.name, *parents[: depth + 1]]), search)
            if found is None or found.submodule_search_locations is None:
                return None, False
            search = found.submodule_search_locations
        return _found(module, search)


def find(name: str) -> Package | None:
    """The package that `import name` gives in this process; None where it gives none.

    A folder without `__init__.py` is none: it is what is left of one, or something else of that name.
    """
    module = sys.modules.get(name)
    search = getattr(module, "__path__", None)
    if search is None:
        spec, _ = _found(name, None)
        search = None if spec is None or spec.origin is None else spec.submodule_search_locations
    if not search:
        return None
    location = Path(next(iter(search))).absolute()
    listed = list(distributions(name=name))
    own = [one for one in listed if _belongs(one, location)]
    versions = list(dict.fromkeys(_version(one) for one in own))
    notes = [f"a second copy{_labelled(listed, other)} in {other} is not used" for other in _others(name, location)]
    if len(versions) > 1:
        notes.append(f"there is metadata of several versions: {', '.join(versions)}")
    notes += [
        f"metadata of {_version(one)} in {_home(one)} is that of other files"
        for one in listed
        if one not in own and not (_home(one) / name).is_dir()
    ]
    return Package(name, versions[0] if versions else None, str(location), tuple(search), tuple(notes))


def remains(name: str) -> list[str]:
    """What there is of a package that cannot be imported: metadata, or a folder without `__init__.py`."""
    spec, _ = _found(name, None)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return [
        *(f"there is metadata of {_version(one)} in {_home(one)}, but no package" for one in distributions(name=name)),
        *(f"{folder} has no __init__.py and is not taken for the package" for folder in folders),
    ]


def is_ours(finder: object) -> bool:
    """Whether a finder on `sys.meta_path` is this project's: the one that loads post-images, or the one that waits for
    a covered package and asks that."""
    return type(finder).__module__ in ("overlay.finder", "_modeling_overlay")


def _found(name: str, path: Iterable[str] | None) -> tuple[ModuleSpec | None, bool]:
    """What the finders find, and whether one of ours comes before the one that does."""
    first = False
    for finder in list(sys.meta_path):
        if is_ours(finder):
            first = True
            continue
        spec = _asked(finder, name, path)
        if spec is not None:
            return spec, first
    return None, first


def _asked(finder: Any, name: str, path: Iterable[str] | None) -> ModuleSpec | None:
    try:
        found = finder.find_spec(name, path)
    except Exception:  # somebody's own finder: what it refuses cannot be imported by it
        return None
    return found if isinstance(found, ModuleSpec) else None


def _others(name: str, location: Path) -> list[Path]:
    """Further copies on the path."""
    specs = [
        *(_asked(PathFinder, name, [entry]) for entry in sys.path),
        *(_asked(finder, name, None) for finder in sys.meta_path if not is_ours(finder)),
    ]
    folders = [
        Path(folder).absolute()
        for spec in specs
        if spec is not None and spec.origin is not None
        for folder in list(spec.submodule_search_locations or ())[:1]
    ]
    different = {folder.resolve(): folder for folder in folders}
    different.pop(location.resolve(), None)
    return list(different.values())


def _labelled(listed: Sequence[Distribution], location: Path) -> str:
    version = next((_version(one) for one in listed if _belongs(one, location)), None)
    return "" if version is None else f" ({version})"


def _belongs(one: Distribution, location: Path) -> bool:
    """Whether this is the metadata of a package that is at `location`: beside it, or that of an editable install."""
    if _home(one).resolve() == location.parent.resolve():
        return True
    source = _source(one)
    return source is not None and location.resolve().is_relative_to(source.resolve())


def _source(one: Distribution) -> Path | None:
    """The folder that an editable install was made from."""
    try:
        origin = json.loads(one.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            return Path(url2pathname(urlsplit(origin["url"]).path))
    except (ValueError, KeyError, AttributeError, OSError):
        pass  # none, or none that follows PEP 610
    return None


def _home(one: Distribution) -> Path:
    """The folder, or the archive, that has the metadata."""
    return Path(str(one.locate_file("")))


def _version(one: Distribution) -> str:
    return one.version or "an unknown version"
