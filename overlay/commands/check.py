"""`overlay check`."""

import argparse
from importlib import import_module

from overlay.commands.arguments import Verbs, debug, verb


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "check",
        "say what may go wrong with what is installed for this Python",
        debug(),
        more="A model is checked in the program that trains it: overlay.check(model). Exits 0, or 1 where a rule has "
        "an error, as none has for an environment alone: `overlay doctor` exits 1 where a fault is live.",
        page="docs/checks.md",
    )
    parser.add_argument(
        "--json", dest="form", action="store_const", const="json", default="text", help="the findings, for a program"
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    return int(import_module("overlay.checks.report").main(options.form))
