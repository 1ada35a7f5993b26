"""`overlay doctor`."""

import argparse
from importlib import import_module

from overlay.commands.arguments import Verbs, debug


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "doctor",
        parents=[debug()],
        help="say of the packages of this Python which fault is live, and what mends it; exits 1 where one is",
    )
    parser.add_argument(
        "--json", dest="form", action="store_const", const="json", default="text", help="everything, for a program"
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    return int(import_module("overlay.doctor").main(options.form))
