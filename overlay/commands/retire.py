"""`overlay retire`."""

import argparse
from importlib import import_module

from overlay.commands.arguments import Verbs, checkout, root, verb


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "retire",
        "say which series, pins and patches nothing needs any more",
        checkout(),
        more="It changes nothing.",
        page="docs/keeping.md",
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> None:
    print("\n".join(import_module("overlay.queue.retire").report(root(options) / "upstream.lock")))  # noqa: T201
