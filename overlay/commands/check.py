"""`overlay check`."""

import argparse
from importlib import import_module

from overlay.commands.arguments import Verbs, debug


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "check",
        parents=[debug()],
        help="say what may go wrong with what is installed for this Python (docs/checks.md); exits 0, or 1 where a "
        "rule has an error, as none has for an environment alone: `overlay doctor` exits 1 where a fault is live",
    )
    parser.add_argument(
        "--json", dest="form", action="store_const", const="json", default="text", help="the findings, for a program"
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    return int(import_module("overlay.checks.report").main(options.form))
