"""What a worker has loaded, for the first that it says. Standard library only."""

import contextlib

from overlay import explain, packages
from overlay.errors import OverlayError


def state(project: str) -> str:
    """The `packages.State` of a project in this process, which has imported it; empty where nothing tells, as in a
    checkout without patched files."""
    try:
        return next(one.state for one in packages.status() if one.project == project)
    except OverlayError:
        return ""


def series(project: str) -> str:
    """The series of patches that a project has in this process, by its wheel or by the overlay; empty where it has none
    whole, or no SBOM of it is there."""
    with contextlib.suppress(OverlayError):
        release = explain.installed(project)
        applied = {False: "patched wheel", True: "overlaid"}
        if release is not None and applied[release.laid_over] == state(project):
            return release.series
    return ""
