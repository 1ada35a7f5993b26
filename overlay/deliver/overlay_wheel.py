"""The overlay wheel: this project's own import package with the post-images of every pinned release.

It is built as any front end builds it (PEP 517): by hatchling, from `pyproject.toml` and `hatch_build.py`, but in this
process, from a copy of the checkout in which the new post-images are in their place already.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from overlay.errors import OverlayError, naming

SOURCES = ("LICENSE", "NOTICE", "README.md", "hatch_build.py", "pyproject.toml")
"""What a build reads beside the import package."""

LIBRARY = "hatchling.builders.wheel"
"""What a build imports."""

_SETTINGS = ("HATCH_", "SOURCE_DATE_EPOCH")
"""Environment variables that hatchling reads: one leaves build hooks out."""


def check(root: Path) -> None:
    """Raises OverlayError where `root` is no whole checkout."""
    for name in (*SOURCES, "overlay/__init__.py"):
        if not (root / name).is_file():
            raise OverlayError(
                f"expected {name} in {root}, found no such file: the overlay wheel is built from a whole checkout, use "
                "one, or name releases to have only their wheels built"
            )


def build(root: Path, patched: Path, folder: Path) -> Path:
    """Writes the wheel.

    Args:
        root: the checkout.
        patched: what takes the place of its `overlay/patched/`; it must be complete.
        folder: where the wheel goes.

    Returns:
        The wheel.
    """
    from hatchling.builders.wheel import WheelBuilder

    with tempfile.TemporaryDirectory(prefix="overlay-") as temporary, naming(Path(temporary)):
        copy = Path(temporary)
        for name in SOURCES:
            shutil.copyfile(root / name, copy / name)
        shutil.copytree(
            root / "overlay",
            copy / "overlay",
            ignore=lambda _, names: [name for name in names if name in ("patched", "__pycache__") or name[0] == "."],
            copy_function=shutil.copyfile,
        )
        (copy / "overlay" / "patched").symlink_to(patched.resolve())
        with _without_settings():
            (file,) = WheelBuilder(str(copy)).build(
                directory=str(folder), versions=["standard"], hooks_only=False, clean=False, clean_hooks_after=False
            )
    return Path(file)


@contextmanager
def _without_settings() -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_SETTINGS)}
    try:
        yield
    finally:
        os.environ.update(kept)
