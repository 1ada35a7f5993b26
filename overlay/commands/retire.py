"""`overlay retire`."""

import argparse
from importlib import import_module

from overlay.commands.arguments import Verbs, checkout, root


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "retire", parents=[checkout()], help="say which series, pins and patches nothing needs any more"
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> None:
    print("\n".join(import_module("overlay.queue.retire").report(root(options) / "upstream.lock")))  # noqa: T201
