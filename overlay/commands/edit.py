"""`overlay edit`."""

import argparse
from importlib import import_module
from pathlib import Path

from overlay.commands.arguments import Verbs, checkout, relative, root, verb


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "edit",
        "open a git work tree of a release, with its patches as commits",
        checkout(),
        more="`overlay refresh` takes it back.",
        page="docs/keeping.md",
    )
    parser.add_argument("release", metavar="NAME==VERSION", help="a pinned release with a series")
    parser.add_argument(
        "--tree", type=Path, metavar="DIR", help="the new folder (default: edit/NAME-VERSION in the checkout)"
    )
    parser.add_argument(
        "--all", action="store_true", help="the whole package, not only the files that the series touches"
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> None:
    top = root(options)
    lock = top / "upstream.lock"
    name, _, release = import_module("overlay.queue.lock").read(lock).find(options.release)
    tree = options.tree or relative(top / "edit" / f"{name}-{release.version}")
    import_module("overlay.deliver.edit").start(lock, options.release, tree, options.all)
