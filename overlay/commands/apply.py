"""`overlay apply`."""

import argparse
from importlib import import_module
from pathlib import Path

from overlay.commands.arguments import Verbs, checkout, relative, root, verb


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "apply",
        "patch what is pinned; build wheels, index and constraints",
        checkout(),
        more="What --out held of this project before is replaced.",
        page="README.md",
    )
    parser.add_argument(
        "releases", nargs="*", metavar="NAME==VERSION", help="pinned releases (default: every one that is delivered)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the products go (default: dist in the checkout)")
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument(
        "--from-git",
        type=Path,
        metavar="PATH",
        help="patch what is committed in a git checkout of upstream; writes a wheel to --out, and nothing else",
    )
    sources.add_argument(
        "--from-tree",
        type=Path,
        metavar="PATH",
        help="patch an unpacked package tree whose files are those of a pin; writes a copy of it to --out, and nothing "
        "else",
    )
    parser.add_argument(
        "--any-commit", action="store_true", help="with --from-git: also where HEAD is not the commit that is pinned"
    )
    parser.add_argument(
        "--metadata-from",
        metavar="WHEEL",
        help="with --from-git: the wheel, or the pinned NAME==VERSION, that the metadata comes from",
    )
    parser.add_argument(
        "--run-upstream-build",
        action="store_true",
        help="with --from-git: build by upstream's own build, which runs its code, in isolation",
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> None:
    only = [name for name in ("any_commit", "metadata_from", "run_upstream_build") if getattr(options, name)]
    if options.from_git is None and only:
        options.parser.error(f"--{only[0].replace('_', '-')} goes with --from-git")
    for name in ("from_git", "from_tree"):
        if getattr(options, name) is not None and options.releases:
            options.parser.error(f"--{name.replace('_', '-')} takes a PATH in place of NAME==VERSION")
    if options.from_tree is not None and options.out is None:
        options.parser.error("--from-tree needs --out")
    if options.metadata_from and options.run_upstream_build:
        options.parser.error("--metadata-from and --run-upstream-build exclude each other")
    top = root(options)
    out = options.out or relative(top / "dist")
    lock = import_module("overlay.queue.lock").read(top / "upstream.lock")
    if options.from_tree is not None:
        import_module("overlay.deliver.package_tree").from_tree(lock, top, options.from_tree, out)
    elif options.from_git is None:
        import_module("overlay.deliver.apply").run(lock, top, options.releases, out)
    else:
        import_module("overlay.deliver.tree").from_git(
            lock,
            top,
            options.from_git,
            out,
            any_commit=options.any_commit,
            metadata_from=options.metadata_from,
            run_upstream_build=options.run_upstream_build,
        )
