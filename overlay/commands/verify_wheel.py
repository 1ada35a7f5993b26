"""`overlay verify-wheel`."""

import argparse
from importlib import import_module
from pathlib import Path

from overlay.commands.arguments import Verbs, checkout, root


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "verify-wheel",
        parents=[checkout()],
        help="make a wheel again from the lock and upstream's artefact; exits 0 where it is the same, or 1 and says "
        "what differs (docs/provenance.md)",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a patched wheel or the overlay wheel, by any name")
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    top = root(options)
    lock = import_module("overlay.queue.lock").read(top / "upstream.lock")
    return int(import_module("overlay.deliver.verify_wheel").main(lock, top, options.file))
