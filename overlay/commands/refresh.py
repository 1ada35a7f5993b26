"""`overlay refresh`."""

import argparse
from importlib import import_module
from pathlib import Path

from overlay.commands.arguments import Verbs, checkout, relative, root, verb


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "refresh",
        "export a tree of `edit` back to patches, and update the lock",
        checkout(),
        page="docs/keeping.md",
    )
    parser.add_argument(
        "--tree",
        type=Path,
        metavar="DIR",
        help="the work tree (default: the one around the current folder, or the only one in edit/)",
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> None:
    top = root(options)
    here = Path.cwd()
    tree = import_module("overlay.deliver.edit").found(top, options.tree, (here, *here.parents))
    import_module("overlay.deliver.refresh").run(top / "upstream.lock", relative(tree))
