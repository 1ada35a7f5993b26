"""`overlay doctor`."""

import argparse
from importlib import import_module

from overlay.commands.arguments import Verbs, debug, verb


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "doctor",
        "say which fault is live in the packages of this Python, and what mends it",
        debug(),
        more="Exits 1 where one is. For another Python: PYTHON -m overlay doctor, in a checkout or where the overlay "
        "wheel is installed.",
        page='README.md, "Am I affected?"',
    )
    parser.add_argument(
        "--json", dest="form", action="store_const", const="json", default="text", help="everything, for a program"
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    return int(import_module("overlay.doctor").main(options.form))
