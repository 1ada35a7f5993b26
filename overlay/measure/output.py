"""The files of a run card: each is replaced at once, the JSON last."""

import os
from collections.abc import Iterator
from pathlib import Path

from overlay.errors import OverlayError
from overlay.measure import card, markdown, picture


def check(place: Path) -> None:
    """Whether the files of a card can be written. Raises OverlayError before anything is measured; makes nothing."""
    folder = place.parent.resolve()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OverlayError(f"expected a folder that can be written, found {folder}: name another with --out")


def write(made: card.Card, place: Path, *, drawn: bool = True) -> Iterator[Path]:
    """Writes `place.png`, `.md` and `.json`; yields each.

    Args:
        place: a path without suffix.
        drawn: False leaves the picture out, which needs matplotlib.
    """
    yield from draw(made, place, drawn=drawn)
    yield _replace(place.with_name(f"{place.name}.json"), card.write(made).encode())


def draw(made: card.Card, place: Path, *, drawn: bool = True) -> Iterator[Path]:
    """As `write`, of what is made of the JSON alone."""
    place.parent.mkdir(parents=True, exist_ok=True)
    image = place.with_name(f"{place.name}.png")
    contents = {image: picture.png(made)} if drawn else {}
    contents[place.with_name(f"{place.name}.md")] = markdown.document(made, image.name if drawn else None).encode()
    for file, content in contents.items():
        yield _replace(file, content)


def _replace(file: Path, content: bytes) -> Path:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return file
