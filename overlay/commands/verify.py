"""`overlay verify`."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from overlay import environments
from overlay.commands.arguments import Verbs, checkout, root, some_of, verb
from overlay.errors import OverlayError
from overlay.measure.builds import KINDS
from overlay.progress import say

if TYPE_CHECKING:
    from overlay.measure.builds import Build
    from overlay.measure.experiments.experiment import Experiment

NAMES = ("fsdp2", "te", "zero3", "contracts")

_LINGER = 10.0
"""Seconds for which a rank that has failed is still there: torchrun ends the others with it, and rank 0, which has most
often seen it fail, prints what was found."""


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "verify",
        "show the faults and that they are mended: each experiment on stock, patched and the latest upstream",
        checkout(),
        more="The environments are made on first use, and kept in the cache. Exits 1 where the patched build (or what "
        "is here) is not as it should be, or where something could not be measured. A run that was stopped goes on "
        "from where it was. Under torchrun the ranks are its own, on several hosts too.",
        page="docs/verify.md",
    )
    parser.set_defaults(extra="queue")
    parser.add_argument(
        "what",
        nargs="?",
        default="all",
        choices=(*NAMES, "all"),
        help="fsdp2: gradients of sharded models; te: TransformerEngine's operations; zero3: PEFT with DeepSpeed; "
        "contracts: what third-party code relies on (default: all)",
    )
    parser.add_argument("--ranks", type=_ranks, metavar="N", help="ranks that train together here (default: 2)")
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), help="of the ranks; nccl takes a GPU for each (default: gloo)"
    )
    parser.add_argument(
        "--against", type=some_of(KINDS), metavar="B,B", help="the columns, of stock,patched,latest (default: all)"
    )
    parser.add_argument(
        "--here",
        action="store_true",
        help="run what this Python has, in one column, and say whether that is stock, patched or overlaid",
    )
    parser.add_argument(
        "--release",
        action="append",
        default=[],
        metavar="VERSION",
        help="of transformers or TransformerEngine, which is stock and patched (default: the first in the lock)",
    )
    parser.add_argument("--torch", choices=("2.11", "2.13", "2.14"), help="of the environments (default: 2.13)")
    parser.add_argument("--json", action="store_true", help="one document, for a program")
    parser.set_defaults(command=_run, parser=parser)


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"expected a number of ranks from 1 to 64, found {text!r}")
    return int(text)


def _run(options: argparse.Namespace) -> int:
    from overlay.measure import gpus, launch, rows, verify
    from overlay.measure.experiments import text

    if options.here and (options.against or options.release or options.torch):
        options.parser.error("--here is what this Python has: it goes without --against, --release and --torch")
    if (options.ranks or options.backend) and options.what in verify.ALONE:
        options.parser.error(f"{options.what} is an experiment of one process: it goes without --ranks and --backend")
    place = launch.found()
    if place is not None:
        if options.ranks not in (None, place.world):
            options.parser.error(f"this was launched with {place.world} ranks: leave --ranks out")
        rows.end_with_launcher()
    if options.backend == "nccl":
        gpus.expect(options.ranks or 2 if place is None else place.local_rank + 1)
    chosen, left_out = _chosen(options)
    plan = verify.Plan(
        experiments=chosen,
        kinds=("here",) if options.here else options.against or KINDS,
        build=_here if options.here else _maker(options, chosen),
        ranks=place.world if place is not None else options.ranks or 2,
        backend=options.backend or "gloo",
        place=place,
        keep=place is None and not options.here,
    )
    report = verify.run(plan)
    report.left_out.update(left_out)
    if place is not None and place.rank:
        if not report.tables:
            names = " and ".join(one.name for one in chosen)
            say(f"nothing was run: {names} is rank 0's alone, and RANK and WORLD_SIZE make this {place}")
        if not any(table.failed for table in report.tables):
            return 0
        time.sleep(_LINGER)
        return 1
    if options.json:
        print(json.dumps(text.as_json(report), indent=2, allow_nan=False))  # noqa: T201
    else:
        print(text.of(report))  # noqa: T201
    return 1 if report.off else 0


def _chosen(options: argparse.Namespace) -> "tuple[list[Experiment], dict[str, str]]":
    """The experiments, and which are left out of `all`, and why."""
    from overlay.measure import verify

    chosen = [verify.EXPERIMENTS[name] for name in (NAMES if options.what == "all" else (options.what,))]
    if options.here:
        left_out = {one.name: f"{', '.join(lacks)} not installed" for one in chosen if (lacks := verify.missing(one))}
    else:
        made = environments.names()
        left_out = {
            one.name: f"there is no environment for it with torch {_torch(options)}"
            for one in chosen
            if f"{one.environment}-{_torch(options)}" not in made
        }
    remaining = [one for one in chosen if one.name not in left_out]
    if not remaining:
        lacking = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        if not options.here:
            options.parser.error(f"{lacking}: name another with --torch, or leave that out")
        raise OverlayError(
            f"expected what the experiments need in {sys.executable}, found none of them complete ({lacking}): "
            "install it, or leave out --here"
        )
    return remaining, left_out


def _torch(options: argparse.Namespace) -> str:
    return str(options.torch or "2.13")


def _here(experiment: "Experiment", kind: str) -> "Build":
    from overlay.measure import builds

    return builds.here()[0]


def _maker(options: argparse.Namespace, run: "Sequence[Experiment]") -> "Callable[[Experiment, str], Build]":
    from overlay.measure import builds

    top = root(options)
    lock = import_module("overlay.queue.lock").read(top / "upstream.lock")
    chosen: dict[str, str] = {}
    for version in options.release:
        owners = [project for project in lock.packages if version in builds.releases(lock, project)]
        if not owners:
            known = ", ".join(
                f"{project}=={one}" for project in lock.packages for one in builds.releases(lock, project)
            )
            raise OverlayError(f"expected one of the releases {known}, found {version}: name one of these")
        if chosen.setdefault(owners[0], version) != version:
            options.parser.error(f"--release {chosen[owners[0]]} and {version} are both of {owners[0]}: name one")
        if all(one.project != owners[0] for one in run):
            options.parser.error(f"--release {version} is of {owners[0]}, which {options.what} does not run")

    def make(experiment: "Experiment", kind: str) -> "Build":
        release = chosen.get(experiment.project) or builds.releases(lock, experiment.project)[0]
        environment = f"{experiment.environment}-{_torch(options)}"
        return builds.made_one(lock, top, experiment.project, release, kind, environment, experiment.beside(kind))

    return make
