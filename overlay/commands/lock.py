"""`overlay lock check`, `update` and `complete`."""

import argparse
from importlib import import_module
from pathlib import Path

from overlay.commands.arguments import Verbs, checkout, root, verb


def add(verbs: Verbs) -> None:
    """Adds the verbs."""
    lock = verbs.add_parser("lock", help="check, update and complete upstream.lock").add_subparsers(
        metavar="COMMAND", required=True
    )
    check = verb(
        lock,
        "check",
        "say whether the lock is sound; needs no network",
        checkout(),
        page='docs/keeping.md, "Before a commit"',
    )
    check.set_defaults(command=_lock_check, parser=check)
    update = verb(
        lock,
        "update",
        "write blob ids, revisions and hashes of built wheels",
        checkout(),
        more="For a patch that was changed by hand; `overlay refresh` does it by itself.",
        page="docs/keeping.md",
    )
    update.add_argument("releases", nargs="*", metavar="NAME==VERSION", help="pinned releases (default: all)")
    update.set_defaults(command=_lock_update, parser=update)
    complete = verb(
        lock, "complete", "complete a commit pin from a checkout", checkout(), page='README.md, "Keeping the queue"'
    )
    complete.add_argument(
        "--checkout", type=Path, required=True, metavar="PATH", help="a git checkout that has the commit"
    )
    complete.set_defaults(command=_lock_complete, parser=complete)


def _lock_check(options: argparse.Namespace) -> None:
    path = root(options) / "upstream.lock"
    import_module("overlay.deliver.relock").check(path)
    print(f"{path} is sound")  # noqa: T201


def _lock_update(options: argparse.Namespace) -> None:
    import_module("overlay.deliver.relock").update(root(options) / "upstream.lock", options.releases)


def _lock_complete(options: argparse.Namespace) -> None:
    import_module("overlay.deliver.relock").complete(root(options) / "upstream.lock", options.checkout)
