"""`overlay drift`."""

import argparse
from importlib import import_module

from overlay.commands.arguments import Verbs, checkout, root


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verbs.add_parser("drift", parents=[checkout()], help="say for each release on the index which series fits")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a pinned project (default: all)")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", dest="form", action="store_const", const="json", help="everything, for a program")
    forms.add_argument(
        "--markdown", dest="form", action="store_const", const="markdown", help="the tables as README.md has them"
    )
    parser.set_defaults(command=run, parser=parser, form="text")


def run(options: argparse.Namespace) -> None:
    top = root(options)
    lock = import_module("overlay.queue.lock").read(top / "upstream.lock")
    print(import_module("overlay.queue.drift").report(lock, top, options.name, options.form))  # noqa: T201
