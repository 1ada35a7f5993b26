"""`overlay bench` and `overlay bench compare`."""

import argparse
import re
import shlex
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overlay.commands.arguments import Verbs, checkout, root, some_of, verb
from overlay.errors import OverlayError
from overlay.measure.builds import KINDS
from overlay.measure.settings import MODES, SEGMENTATION, SMALL, Settings, name_of
from overlay.terminal import width, wrapped

_SIZES = {
    "layers": "blocks (default: 4)",
    "hidden": "of a token between blocks (default: 128)",
    "heads": "of attention",
    "intermediate": "of a token within an MLP",
    "vocab": "tokens that there are (default: 1024)",
    "experts": "of each layer, in a mixture of them",
}
"""Options that set a size of the model, and of what it is."""

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add(verbs: Verbs) -> None:
    """Adds the verb."""
    parser = verb(
        verbs,
        "bench",
        "measure what checkpointing saves and costs: memory, time, parity and granularity, as a run card",
        checkout(),
        more="A model without checkpointing and with each kind of it, on the stock, the patched and "
        "the latest build of transformers, in turn. Exits 1 where the patched build (or what is here) is not as teams "
        "accept it: memory down by at least 30 %, at most 40 % slower, parity within 1e-4, whole blocks. `overlay "
        "bench compare A.json B.json` compares two cards, and exits 1 where something got worse; `overlay bench draw "
        "A.json` makes the Markdown and the PNG of a card again.",
        page="docs/bench.md",
    )
    parser.set_defaults(extra="bench")
    parser.add_argument(
        "what",
        nargs="*",
        metavar="MODEL",
        help=f"a model_type of transformers, CONFIG.json, FILE.py:FUNCTION, {SEGMENTATION}, "
        "or: compare A.json B.json, or: draw A.json",
    )
    sizes = parser.add_argument_group(
        "the model and its batch",
        "The defaults hold for a model_type; a CONFIG.json and a --preset have sizes of their own.",
    )
    for name, what in _SIZES.items():
        sizes.add_argument(f"--{name}", type=_positive, metavar="N", help=what)
    sizes.add_argument("--seq", type=_positive, metavar="N", help="tokens a sample (default: 256)")
    sizes.add_argument("--image", type=_positive, metavar="N", help="pixels of a side, of images (default: 224)")
    sizes.add_argument(
        "--batch", type=_batch, metavar="N", help="samples (default: 4), or auto: what fills --budget or the GPU"
    )
    sizes.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the parameters (default: float32)"
    )
    sizes.add_argument("--optimizer", choices=("adamw", "adafactor", "sgd"), help="default: adamw")
    sizes.add_argument("--seed", type=int, metavar="N", help="of weights and batches (default: 0)")
    ways = parser.add_argument_group("how it is trained")
    ways.add_argument("--device", choices=("cpu", "cuda"), help="default: cpu")
    ways.add_argument(
        "--modes", type=_modes, default=MODES, metavar="M,M", help=f"compared, of {','.join(MODES)} (default: all)"
    )
    ways.add_argument("--compile", action="store_true", default=None, help="with torch.compile; takes minutes")
    spread = ways.add_mutually_exclusive_group()
    spread.add_argument("--fsdp", type=_several, metavar="N", help="fully_shard (FSDP2) over N ranks on this machine")
    spread.add_argument("--ddp", type=_several, metavar="N", help="DDP over N ranks on this machine")
    ways.add_argument(
        "--autocast",
        nargs="?",
        const="bfloat16",
        choices=("bfloat16", "float16"),
        help="under torch.autocast, in bfloat16 where no dtype is named",
    )
    ways.add_argument("--accumulate", type=_positive, metavar="K", help="micro-batches a step (default: 1)")
    ways.add_argument(
        "--segments", type=_numbers, metavar="K,K", help="blocks to group into a checkpoint (default: 2,3,4; 0: none)"
    )
    ways.add_argument("--budget", type=_bytes, metavar="SIZE", help="12GiB: say which way is the fastest within it")
    run = parser.add_argument_group("the run")
    run.add_argument("--preset", choices=("cpu", "gpu"), help="sizes for five models; without MODEL: all five")
    run.add_argument(
        "--here",
        action="store_true",
        help="measure what this Python has, in one column, and say whether that is stock, patched or overlaid",
    )
    run.add_argument(
        "--builds",
        type=some_of(KINDS),
        default=None,
        metavar="B,B",
        help="the columns, of stock,patched,latest (default: all)",
    )
    run.add_argument(
        "--release",
        metavar="VERSION",
        help="of transformers, which is stock and patched (default: the last but one that is delivered)",
    )
    run.add_argument(
        "--torch", choices=("2.11", "2.13", "2.14"), help="of the environments (default: 2.13; on a GPU 2.14)"
    )
    run.add_argument("--threads", type=_positive, metavar="N", help="of a process on the CPU (default: 1)")
    run.add_argument("--rounds", type=_positive, default=7, metavar="N", help="of timing (default: 7)")
    run.add_argument("--out", type=Path, metavar="DIR", help="where the card goes (default: the current folder)")
    run.add_argument("--name", metavar="NAME", help="of the card's files (default: that of the model)")
    run.add_argument("--no-picture", dest="picture", action="store_false", help="no PNG, which needs matplotlib")
    run.add_argument("--dry-run", action="store_true", help="print the plan, and measure nothing")
    parser.set_defaults(command=_run, parser=parser)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, found {text!r}")
    return int(text)


def _several(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"expected a number from 2 on, found {text!r}")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "0" else tuple(sorted({_several(part) for part in text.split(",")}))


def _batch(text: str) -> int:
    return 0 if text == "auto" else _positive(text)


def _modes(text: str) -> tuple[str, ...]:
    chosen = some_of(MODES)(text)
    if MODES[0] not in chosen:
        raise argparse.ArgumentTypeError(f"expected {MODES[0]}, which the others are compared with, found {text!r}")
    return chosen


def _bytes(text: str) -> int:
    matched = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:iB|B)?", text)
    if matched is None or not float(matched[1]):
        raise argparse.ArgumentTypeError(f"expected a size as 12GiB or 500MiB, found {text!r}")
    return int(float(matched[1]) * _UNITS[matched[2]])


def _run(options: argparse.Namespace) -> int:
    if options.what[:1] == ["compare"]:
        return _compare(options)
    if options.what[:1] == ["draw"]:
        return _draw(options)
    if len(options.what) > 1 or not (options.what or options.preset):
        options.parser.error("expected one MODEL, or --preset alone, or compare A.json B.json, or draw A.json")
    if options.here and (options.builds or options.release or options.torch):
        options.parser.error("--here is what this Python has: it goes without --builds, --release and --torch")
    if options.name and (options.name != Path(options.name).name or not options.what):
        options.parser.error("--name is a file name without a folder (--out), for the card of one MODEL")
    if options.segments and (options.compile or options.fsdp or options.ddp):
        options.parser.error("--segments goes without --compile, --fsdp and --ddp: blocks are not grouped with them")
    planned = [_settings(options, model) for model in options.what or import_module("overlay.measure.presets").MODELS]
    if any(one.batch == 0 for one in planned) and not options.budget and any(one.device == "cpu" for one in planned):
        options.parser.error("--batch auto needs --budget, or a GPU to fill")
    if options.dry_run:
        for settings in planned:
            _print(_plan_text(options, settings).splitlines())
        return 0
    for library in ("pydantic", *(["matplotlib"] if options.picture else [])):
        if find_spec(library) is None and options.here:  # an environment of its own would have another torch, or none
            do = f"pip install {library}{', or --no-picture' if library == 'matplotlib' else ''}"
            raise OverlayError(f"expected the library {library}, found none: --here needs it in this Python: {do}")
        if find_spec(library) is None:  # before minutes of measuring, not after
            raise ModuleNotFoundError(f"No module named {library!r}", name=library)
    from overlay.measure import output

    for settings in planned:
        output.check(_place(options, settings), drawn=options.picture)
    return max(_measure(options, settings) for settings in planned)


def _settings(options: argparse.Namespace, model: str) -> Settings:
    given: dict[str, Any] = {"model": model, "threads": 1}
    if options.preset:
        given |= import_module("overlay.measure.presets").sizes(options.preset, model)
    elif not model.endswith(".json"):
        given |= SMALL
    names = ("layers", "hidden", "heads", "intermediate", "vocab", "experts", "seq", "image", "batch", "dtype")
    for name in (*names, "optimizer", "seed", "device", "compile", "autocast", "accumulate", "threads"):
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    for name in ("fsdp", "ddp"):
        if getattr(options, name):
            given |= {"parallel": name, "ranks": getattr(options, name)}
    if given.get("device") == "cuda" and options.threads is None:
        given["threads"] = 0
    return Settings(**given)


def _choices(options: argparse.Namespace, settings: Settings) -> tuple[list[str], str]:
    """Other ways to checkpoint, or why none are measured."""
    if options.segments == ():
        return [], "--segments 0"
    if settings.parallel:
        return [], "blocks that are grouped cannot be distributed"
    if settings.compile:
        return [], "each would be compiled by itself"
    sizes = options.segments or (2, 3, 4)
    return [*(f"group:{k}" for k in sizes), *(f"every:{k}" for k in sizes[:2]), "offload"], ""


def _kinds_of(options: argparse.Namespace) -> tuple[str, ...]:
    return ("here",) if options.here else options.builds or KINDS


def _torch(options: argparse.Namespace, settings: Settings) -> str:
    if options.here:
        return "here"
    return options.torch or ("2.14" if settings.device == "cuda" else "2.13")


def _plan_text(options: argparse.Namespace, settings: Settings) -> str:
    choices, why = _choices(options, settings)
    given = settings.difference(Settings(settings.model)).items()
    sizes = [f"{name} {'auto' if (name, pair[0]) == ('batch', 0) else pair[0]}" for name, pair in given]
    return "\n".join(
        [
            f"{settings.model}: {', '.join(sizes)}",
            f"  builds: {', '.join(_kinds_of(options))}; torch: {_torch(options, settings)}",
            f"  modes: {', '.join(options.modes)}",
            f"  other ways: {', '.join(map(name_of, choices)) or why}",
            f"  {options.rounds} rounds of timing; card: {_place(options, settings)}.json, .md and .png",
        ]
    )


def _place(options: argparse.Namespace, settings: Settings) -> Path:
    folder = options.out or Path()
    if options.name:
        return Path(folder, options.name)
    name = re.sub(r"\W+", "-", Path(settings.model.partition(".py:")[0]).name.removesuffix(".json"))
    beside = (
        settings.model.endswith(".json") and Path(folder, f"{name}.json").resolve() == Path(settings.model).resolve()
    )
    return Path(folder, f"{name}-card" if beside else name)  # a CONFIG.json stays what it is


def _measure(options: argparse.Namespace, settings: Settings) -> int:
    from dataclasses import replace

    from overlay.measure import builds, markdown, output, run

    if options.here:
        columns = builds.here()
    else:
        top = root(options)
        lock = import_module("overlay.queue.lock").read(top / "upstream.lock")
        columns = builds.made(lock, top, options.release, _kinds_of(options), _torch(options, settings))
    choices, why = _choices(options, settings)
    plan = run.Plan(
        settings=settings,
        builds=columns,
        modes=options.modes,
        choices=choices,
        choices_left_out=why,
        rounds=options.rounds,
        budget=options.budget,
        command=_command(options, settings),
    )
    if settings.batch == 0:
        plan = replace(plan, settings=run.fill(plan))
    card = run.measure(plan)
    for file in output.write(card, _place(options, settings), drawn=options.picture):
        print(f"wrote {file}")  # noqa: T201
    lines = [markdown.verdict(card), *(f"- {line}" for line in (*card.off, *card.advice))]
    if card.budget is not None:
        best = card.budget.best
        found = "none fits" if best is None else f"{name_of(best)} is the fastest that fits"
        lines.append(f"within {markdown.size(card.budget.bytes)}: {found}")
    _print(lines)
    return 0 if card.passed else 1


def _command(options: argparse.Namespace, settings: Settings) -> str:
    """As somebody would type it again: the preset's sizes by its name."""
    words = [word for word in sys.argv[1:] if word not in ("--debug",)]
    if not options.what:
        words.insert(words.index("bench") + 1 if "bench" in words else 0, settings.model)
    return shlex.join(["overlay", *words])


def _compare(options: argparse.Namespace) -> int:
    if len(options.what) != 3:
        options.parser.error("expected two cards: compare A.json B.json")
    _alone(options)
    from overlay.measure import card, compare

    before, after = (card.read(Path(name)) for name in options.what[1:])
    kinds = [one.subject.sizes.get("class", "") for one in (before, after)]
    if kinds[0] != kinds[1]:
        raise OverlayError(f"expected two cards of one model, found {kinds[0]} and {kinds[1]}: compare those of one")
    found = compare.compare(before, after)
    if not found.changes:
        have = [", ".join(build.kind for build in of.builds) for of in (before, after)]
        raise OverlayError(
            f"expected a build that both cards have, found {have[0]} and {have[1]}: measure both with the same "
            "--builds, or both with --here"
        )
    _print(found.text().splitlines())
    return 1 if found.worse else 0


def _draw(options: argparse.Namespace) -> int:
    if len(options.what) < 2:
        options.parser.error("expected a card: draw A.json")
    _alone(options, "out", "picture")
    from overlay.measure import card, output

    for name in map(Path, options.what[1:]):
        place = name.with_suffix("")
        made, target = card.read(name), (options.out or place.parent) / place.name
        output.check(target, drawn=options.picture)
        for file in output.draw(made, target, drawn=options.picture):
            print(f"wrote {file}")  # noqa: T201
    return 0


def _print(lines: Iterable[str]) -> None:
    """On a terminal at most as wide as it is; elsewhere a line stays one."""
    for line in lines:
        label = next((one for one in ("- ", "  ", "worse  ", "better ", "other  ") if line.startswith(one)), "")
        shown = wrapped(line.removeprefix(label), label, width()) if sys.stdout.isatty() else [line]
        print("\n".join(shown))  # noqa: T201


def _alone(options: argparse.Namespace, *taken: str) -> None:
    """Refuses options of a run, which a card that is there does not take."""
    parser = options.parser
    common = ("what", "command", "parser", "extra", "debug", "root", *taken)
    if given := [
        name for name, value in vars(options).items() if name not in common and value != parser.get_default(name)
    ]:
        named = {"picture": "no-picture"}.get(given[0], given[0].replace("_", "-"))
        parser.error(f"--{named} goes with a run, not with {options.what[0]}")
