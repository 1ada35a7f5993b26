"""Right gradients under activation checkpointing: a small queue of patches over pinned releases of transformers and
TransformerEngine.

`import overlay` imports nothing else; each name here is found in its module when it is first used.
"""

TYPE_CHECKING = False  # `typing` takes longer to import than all that is imported here
if TYPE_CHECKING:
    from overlay import integrations as integrations
    from overlay.activation import activate as activate
    from overlay.checks import check as check
    from overlay.checks.finding import CheckError as CheckError
    from overlay.checks.finding import Finding as Finding
    from overlay.errors import OverlayError as OverlayError
    from overlay.errors import OverlayMismatchError as OverlayMismatchError
    from overlay.packages import status as status
    from overlay.recommendation import recommended_checkpoint_kwargs as recommended_checkpoint_kwargs

__version__ = "0.2.0"

_PLACES = {
    "activate": "overlay.activation",
    "check": "overlay.checks",
    "CheckError": "overlay.checks.finding",
    "Finding": "overlay.checks.finding",
    "OverlayError": "overlay.errors",
    "OverlayMismatchError": "overlay.errors",
    "recommended_checkpoint_kwargs": "overlay.recommendation",
    "status": "overlay.packages",
}


def __getattr__(name: str) -> object:
    """PEP 562."""
    from importlib import import_module

    if name == "integrations":  # which imports transformers
        return import_module("overlay.integrations")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> "list[str]":  # quoted, so that an older Python gets as far as `__main__`, which refuses it
    return sorted([*globals(), *_PLACES, "integrations"])
