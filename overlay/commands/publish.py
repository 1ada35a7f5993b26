"""`overlay publish`."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from overlay.commands.arguments import Verbs, checkout, relative, root, verb
from overlay.progress import say


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "publish",
        "add what apply built to an index: a folder to serve, or a server",
        checkout(),
        more="Nothing that was published before is changed or removed.",
        page="docs/publishing.md",
    )
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="DIR", help="what apply wrote (default: dist in the checkout)"
    )
    places = parser.add_mutually_exclusive_group(required=True)
    places.add_argument("--to", type=Path, metavar="DIR", help="the folder of a static index")
    places.add_argument("--repository-url", metavar="URL", help="where a server takes uploads; by twine")
    parser.add_argument(
        "--index-url",
        metavar="URL",
        help="with --repository-url: the pages of that server (default: simple/ or +simple/ below it)",
    )
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> None:
    if options.index_url and options.to:
        options.parser.error("--index-url goes with --repository-url")
    top = root(options)
    lock = import_module("overlay.queue.lock").read(top / "upstream.lock")
    publish = import_module("overlay.deliver.publish")
    wheels = publish.wheels(lock, options.source or relative(top / "dist"))
    if options.to:
        place, added = str(options.to), publish.to_folder(wheels, options.to)
        folder = options.to.resolve().as_uri()
        address = f"{folder}/simple/"
    else:
        options.extra = "publish"
        upload = import_module("overlay.deliver.upload")
        place = options.repository_url
        address, added = upload.to_repository(wheels, place, options.index_url)
    for file in added:
        say(f"published {file}")
    if not added:
        say(f"{place} has all of them already, the same files: nothing to publish")
    if options.to:
        say(f"to install, with the address of a server that has that folder in the place of {folder}:")
    for command in wheels.commands(address):
        sys.stdout.write(f"{command}\n")
