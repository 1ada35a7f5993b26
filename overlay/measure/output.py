"""The files of a run card: each is replaced at once, the JSON last. Nothing but a card is replaced."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from overlay.errors import OverlayError
from overlay.measure import card, markdown, picture


def check(place: Path, *, drawn: bool = True) -> None:
    """Whether the files of a card can be written, and replace nothing but those of a card. Makes nothing.

    Args:
        drawn: as of `write`.

    Raises:
        OverlayError: they cannot, or would; to be said before anything is measured.
    """
    folder = place.parent.resolve()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OverlayError(f"expected a folder that can be written, found {folder}: name another with --out")
    kinds = [(".json", _is_card), (".md", _is_page), *([(".png", _is_picture)] if drawn else [])]
    for suffix, is_ours in kinds:
        file = place.with_name(f"{place.name}{suffix}")
        if file.exists() and not is_ours(file):
            raise OverlayError(
                f"expected nothing or a run card at {file}, which would be replaced, found something else: name the "
                "card with --name, or its folder with --out"
            )


def _is_card(file: Path) -> bool:
    """Of whatever format: a card of an earlier one may be replaced as well."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"format", "machine", "subject"} <= found.keys()


def _is_page(file: Path) -> bool:
    try:
        return f"\n{markdown.MADE_BY}`overlay " in file.read_text("utf-8")
    except (OSError, ValueError):
        return False


def _is_picture(file: Path) -> bool:
    """By its page, or the card, beside it."""
    return _is_page(file.with_suffix(".md")) or _is_card(file.with_suffix(".json"))


def write(made: card.Card, place: Path, *, drawn: bool = True) -> Iterator[Path]:
    """Writes `place.md`, `.png` and `.json`; yields each.

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
    page = place.with_name(f"{place.name}.md")
    contents = {page: markdown.document(made, image.name if drawn else None).encode()}  # first: it says whose it is
    if drawn:
        contents[image] = picture.png(made)
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
