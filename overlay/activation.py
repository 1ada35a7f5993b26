"""Puts the finder on `sys.meta_path`: on request, or because the wheel is installed."""

import os
import sys
import warnings
from typing import cast

from overlay import manifest
from overlay.errors import OverlayError
from overlay.finder import Finder, image_for, loaded

VARIABLE = "MODELING_OVERLAY"
"""`0`: the overlay is off; `strict`: unknown content is an error in every process; `1` or nothing: a warning."""


def activate(strict: bool = True) -> None:
    """Has covered modules of transformers and TransformerEngine loaded with their fix from now on, in this process.

    Call it before anything imports these packages. Where the wheel is installed in site-packages, every process
    has done so at its start (`strict=False`); a second call only tightens. Nothing is done where the environment
    variable `MODELING_OVERLAY` is 0; a warning says so.

    Args:
        strict: whether a covered module with unknown content is an error when it is imported, and not a warning.

    Raises:
        OverlayError: a covered module is imported already, as stock; or there are no patched files.
        OverlayMismatchError: strict, and one that is imported already has unknown content.
    """
    if os.environ.get(VARIABLE) == "0":
        warnings.warn(f"{VARIABLE} is 0: overlay.activate() does nothing", RuntimeWarning, stacklevel=2)
        return
    strict = strict or os.environ.get(VARIABLE) == "strict"
    _check_imported(strict)
    finder = active()
    if finder is None:
        sys.meta_path.insert(0, Finder(strict))
    else:
        finder.strict = finder.strict or strict


def take_over(watch: object) -> None:
    """Puts the finder in the place of what the `.pth` file put on `sys.meta_path`, before a package is imported.
    Nobody asked, so it stops nothing.

    In its place, not first: what others put before it since may wrap what it finds, as wrapt's post-import hooks do.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "1", "strict"):
        message = f"{VARIABLE}: expected 0, 1 or strict, found {value!r}: taken for 1"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    place = sys.meta_path.index(cast(Finder, watch))
    if active() is None:
        sys.meta_path[place] = Finder(value == "strict")
    else:
        del sys.meta_path[place]


def active() -> Finder | None:
    """The finder, if it is on `sys.meta_path`."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)


def _check_imported(strict: bool) -> None:
    for name, inside in manifest.read().modules().items():
        stock = loaded(name)
        if stock is None:
            continue
        try:
            image = image_for(name, inside, stock)
        except OverlayError:
            if strict:
                raise
            continue
        if image is not None:
            main = getattr(sys.modules.get("__main__"), "__file__", None) or "this program"
            raise OverlayError(
                f"expected overlay.activate() before {name} is imported, found it imported already, without its fix, "
                f"from {stock.origin}: call overlay.activate() in {main} above everything that imports "
                f"{name.partition('.')[0]}, and start it again"
            )
