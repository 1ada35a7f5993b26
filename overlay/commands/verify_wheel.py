"""`overlay verify-wheel`."""

import argparse
from importlib import import_module
from pathlib import Path

from overlay.commands.arguments import Verbs, checkout, root, verb


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "verify-wheel",
        "say whether a wheel is what the lock gives, byte for byte, by making it again",
        checkout(),
        more="Exits 0 where it is the same, or 1 and says what differs. Nothing of the file is run.",
        page="docs/provenance.md",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a patched wheel or the overlay wheel, by any name")
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    top = root(options)
    lock = import_module("overlay.queue.lock").read(top / "upstream.lock")
    return int(import_module("overlay.deliver.verify_wheel").main(lock, top, options.file))
