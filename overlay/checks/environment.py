"""What is installed, as the rules ask for it."""

import sys
from functools import cached_property
from importlib.machinery import ModuleSpec

from overlay import manifest, versions

COVERED = (
    "transformers.modeling_layers",
    "transformers.modeling_utils",
    "transformers.utils.generic",
    "transformer_engine.pytorch.ops.fuser",
)
"""The modules with faults that the rules know. `overlay.manifest` has more to say, but a checkout has no manifest until
`apply` ran there, and a check needs no patched files."""


class Environment:
    """Versions and builds of the packages that matter. Nothing is imported for it but what is imported already."""

    def __init__(self) -> None:
        self._versions: dict[str, str | None] = {}
        self._sources: dict[str, bytes | None] = {}

    def version(self, project: str) -> str | None:
        """The version of a distribution: of what is imported, else of what is installed; None where neither is."""
        if project not in self._versions:
            self._versions[project] = _imported(project) or _installed(project)
        return self._versions[project]

    def before(self, project: str, release: str) -> bool:
        """Whether a project is there in a version before a release (PEP 440; a local label is left out)."""
        version = self.version(project)
        return version is not None and versions.key(version) < versions.key(release)

    def source(self, module: str) -> bytes | None:
        """The source of a module as it is imported or, if it is not, would be; None where there is none.

        With the overlay active that is the post-image.
        """
        if module not in self._sources:
            self._sources[module] = _content(_spec(module))
        return self._sources[module]

    @cached_property
    def patched(self) -> frozenset[str]:
        """Those of `COVERED` that run with the fix of this project: from a patched wheel, or overlaid."""
        return frozenset(module for module in COVERED if manifest.NOTICE in (self.source(module) or b""))


def _imported(project: str) -> str | None:
    """A source tree on the path has no metadata, and may hide an installed package that has."""
    version = getattr(sys.modules.get(project.replace("-", "_")), "__version__", None)
    return version if isinstance(version, str) else None


def _installed(project: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(project)
    except PackageNotFoundError:
        return None


def _spec(module: str) -> ModuleSpec | None:
    """As `importlib.util.find_spec`, which would import the packages above a module."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__spec__", None)
    above, _, _ = module.rpartition(".")
    path: list[str] | None = None
    if above:
        search = getattr(sys.modules.get(above), "__path__", None) or getattr(
            _spec(above), "submodule_search_locations", None
        )
        if search is None:
            return None
        path = list(search)
    try:
        for finder in list(sys.meta_path):
            found = finder.find_spec(module, path)
            if found is not None:
                return found
    except Exception:  # a finder is anybody's code; the overlay's own raises for unknown content
        return None
    return None


def _content(spec: ModuleSpec | None) -> bytes | None:
    if spec is None or spec.origin is None:
        return None
    try:
        return bytes(spec.loader.get_data(spec.origin))  # type: ignore[union-attr]
    except (AttributeError, OSError):
        return None
