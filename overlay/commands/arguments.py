"""What several verbs have in common."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from overlay.errors import OverlayError

Verbs = Any
"""What `ArgumentParser.add_subparsers` returns: argparse has no public name for it."""


def verb(
    verbs: Verbs, name: str, summary: str, *parents: argparse.ArgumentParser, page: str, more: str = ""
) -> argparse.ArgumentParser:
    """Adds a verb.

    Args:
        verbs: what it is added to.
        name: of the verb.
        summary: a line for the list of verbs, which begins the verb's own help as well.
        parents: its options that other verbs have, too.
        page: where more of it is written.
        more: sentences for the verb's own help.
    """
    text = f"{summary[0].upper()}{summary[1:]}. {more} More: {page}."
    added: argparse.ArgumentParser = verbs.add_parser(
        name, parents=parents, help=summary, description=" ".join(text.split())
    )
    return added


def debug() -> argparse.ArgumentParser:
    """For a parser's `parents`: `--debug`. The wheel is enough for a verb that has no other."""
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("--debug", action="store_true", help="print the traceback of an error")
    parent.set_defaults(extra=None)
    return parent


def some_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that takes some of `known`, separated by commas: they come in the order of `known`."""

    def read(text: str) -> tuple[str, ...]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, found {unknown[0]!r}")
        return tuple(name for name in known if name in chosen)

    return read


def checkout() -> argparse.ArgumentParser:
    """For a parser's `parents`: `--root` and `--debug`, for a verb that works on a checkout of this project. Its
    libraries are those of the extra `queue` in pyproject.toml."""
    parent = argparse.ArgumentParser(add_help=False, parents=[debug()])
    parent.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="the checkout with upstream.lock and patches/ (default: the one that this program lies in)",
    )
    parent.set_defaults(extra="queue")
    return parent


def root(options: argparse.Namespace) -> Path:
    """The checkout that the options name, or this program's own, or the one around the current folder.

    Raises:
        OverlayError: there is none.
    """
    own = Path(__file__).resolve().parents[2]
    if options.root is None and (own / "upstream.lock").is_file():
        return own  # also where the current folder has been removed
    here = Path.cwd()
    for folder in [options.root.resolve()] if options.root else [here, *here.parents]:
        if (folder / "upstream.lock").is_file():
            return Path(folder)
    raise OverlayError(
        f"expected upstream.lock in {options.root or here}, found none: run this from a checkout of modeling-overlay, "
        "or name it with --root"
    )


def relative(path: Path) -> Path:
    """`path` as seen from the current folder, where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
