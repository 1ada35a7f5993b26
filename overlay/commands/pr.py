"""`overlay pr`."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from overlay.commands.arguments import Verbs, checkout, root, verb


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "pr",
        "make a branch and a text for upstream from the patches; nothing is pushed",
        checkout(),
        page="docs/upstreaming.md",
    )
    parser.add_argument("project", metavar="PROJECT", help="transformers or transformer_engine")
    parser.add_argument("--checkout", type=Path, required=True, metavar="PATH", help="a git checkout of that project")
    parser.add_argument("--base", metavar="REF", help="the branch, tag or commit to start at (default: HEAD)")
    parser.add_argument(
        "--patch",
        action="append",
        default=[],
        metavar="NAME",
        help="this patch alone, by the name of its file; again for another (default: all of the series)",
    )
    parser.add_argument("--branch", metavar="NAME", help="the new branch (default: named after the first patch)")
    parser.add_argument(
        "--tree", type=Path, metavar="DIR", help="the new work tree (default: PATH-pull-request, beside the checkout)"
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="the Python that runs upstream's formatter and tests (default: this one)",
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> None:
    top = root(options)
    import_module("overlay.pull_request.make").run(
        import_module("overlay.queue.lock").read(top / "upstream.lock"),
        top,
        options.project,
        options.checkout,
        base=options.base,
        only=options.patch,
        branch=options.branch,
        tree=options.tree,
        interpreter=options.python,
    )
