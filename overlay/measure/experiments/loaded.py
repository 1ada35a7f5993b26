"""What a worker has loaded, for its first row. Standard library only."""

from overlay import packages
from overlay.errors import OverlayError


def state(project: str) -> str:
    """The `packages.State` of a project in this process, which has imported it; empty where nothing tells, as in a
    checkout without patched files."""
    try:
        return next(one.state for one in packages.status() if one.project == project)
    except OverlayError:
        return ""
