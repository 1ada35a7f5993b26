"""`overlay drift`."""

import argparse
from importlib import import_module
from pathlib import Path

from overlay.commands.arguments import Verbs, checkout, root, verb


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "drift",
        "say of each release on the index whether it has a fault, and which series fits",
        checkout(),
        more="Exits 1 where a release has a fault that no series mends, or where that cannot be told. It runs "
        "upstream's code, in a process apart.",
        page="docs/drift.md",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="transformers or transformer_engine (default: both)")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--all", dest="form", action="store_const", const="all", help="a row for each release")
    forms.add_argument("--json", dest="form", action="store_const", const="json", help="everything, for a program")
    forms.add_argument(
        "--markdown", dest="form", action="store_const", const="markdown", help="the tables as README.md has them"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw them into this file")
    parser.set_defaults(command=run, parser=parser, form="text")


def run(options: argparse.Namespace) -> int:
    top = root(options)
    picture = None
    if options.png is not None:
        options.extra = "picture"
        picture = import_module("overlay.queue.drift_picture")
        options.extra = "queue"
        picture.check(options.png)
    import_module("overlay.queue.pip_listing").begin()  # pip takes a third of the time, and another processor
    lock = import_module("overlay.queue.lock").read(top / "upstream.lock")
    surveys = import_module("overlay.queue.drift").look(lock, top, options.name)
    tables = import_module("overlay.queue.drift_tables")
    print(tables.table(surveys, options.form), flush=True)  # noqa: T201
    if picture is not None:
        picture.write(surveys, options.png)
    return int(tables.complain(surveys))
