"""Puts the finder on `sys.meta_path`: on request, or because the wheel is installed."""

import os
import sys
import warnings
from typing import Any

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
    place = next((one for one in sys.meta_path if _finder(one) is not None or _is_watch(one)), None)
    finder = _finder(place) or Finder(strict=False)
    _check_imported(finder, strict or os.environ.get(VARIABLE) == "strict")
    if place is None:
        sys.meta_path.insert(0, finder)
        return
    if _is_watch(place):
        vars(place)["finder"] = finder
    sys.meta_path.remove(place)
    sys.meta_path.insert(0, place)


def take_over(watch: object) -> None:
    """Gives what the `.pth` file put on `sys.meta_path` its finder. Nobody asked for it, so it stops nothing."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "1", "strict"):
        message = f"{VARIABLE}: expected 0, 1 or strict, found {value!r}: taken for 1"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    vars(watch).setdefault("finder", Finder(value == "strict"))  # at once: `importlib.util.find_spec` takes no lock


def _is_watch(one: object) -> bool:
    """Whether this is what the `.pth` file put on `sys.meta_path` (overlay/startup.py)."""
    return (type(one).__module__, type(one).__name__) == ("_modeling_overlay", "Watch")


def _finder(one: Any) -> Finder | None:
    found = one.finder if _is_watch(one) else one
    return found if isinstance(found, Finder) else None


def _check_imported(finder: Finder, strict: bool) -> None:
    """Looks at what is imported already, and makes the finder strict, if it is to be and all is well."""
    for name, inside in manifest.read().modules().items():
        stock = loaded(name)
        if stock is None:
            continue
        try:
            image = image_for(name, inside, stock)
        except OverlayError as error:
            if strict:
                raise
            finder.warn(name, error)
            continue
        if image is not None:
            main = getattr(sys.modules.get("__main__"), "__file__", None) or "this program"
            raise OverlayError(
                f"expected overlay.activate() before {name} is imported, found it imported already, without its fix, "
                f"from {stock.origin}: call overlay.activate() in {main} above everything that imports "
                f"{name.partition('.')[0]}, and start it again"
            )
    finder.strict = finder.strict or strict
