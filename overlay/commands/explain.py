"""`overlay explain`."""

import argparse
from importlib import import_module

from overlay.commands.arguments import Verbs, debug, verb


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "explain",
        "say what is changed in a wheel or an installed release, and why",
        debug(),
        more="What it says is read in the SBOM of the wheel: `overlay verify-wheel` says whether that is true.",
        page="docs/provenance.md",
    )
    parser.add_argument(
        "target",
        metavar="FILE|RELEASE",
        help="a wheel, a folder with metadata, or NAME[==VERSION]: as it is installed, in dist/, or in the overlay",
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--diff", action="store_true", help="with the diff of each patch")
    forms.add_argument(
        "--json", dest="form", action="store_const", const="json", default="text", help="everything, for a program"
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    return int(import_module("overlay.explain").main(options.target, options.form, options.diff))
