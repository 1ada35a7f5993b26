"""`overlay add-release`."""

import argparse
from importlib import import_module

from overlay.commands.arguments import Verbs, checkout, root, verb


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "add-release",
        "pin another release, if a series fits, or say which hunks do not",
        checkout(),
        more="Also for one that is pinned for the tests, with --use deliver. scripts/apply.sh builds it then.",
        page='docs/keeping.md, "Pin a release"',
    )
    parser.add_argument("release", metavar="NAME==VERSION", help="a release on the package index")
    parser.add_argument(
        "--use", choices=("test", "deliver"), help="only for the tests (default), or patched and delivered"
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> None:
    import_module("overlay.deliver.add_release").run(root(options) / "upstream.lock", options.release, options.use)
