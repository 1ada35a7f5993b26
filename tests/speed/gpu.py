"""What checkpointing does on a GPU: one table of stock, patched and 5.24.0, in about five minutes.

`scripts/test.sh gpu` makes an environment and the builds. A machine without a package index gets the builds from one
that has it, and runs them with its own torch:

    scripts/test.sh gpu --pack builds               # where there is an index
    python3 -m tests.speed.gpu --here builds        # in this checkout, where there is the GPU

Exit status 1 where the patched build is off, or where there is no CUDA device. With `--here` nothing but the standard
library is imported, because that runs in somebody's own environment.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay.measure.turns import Turn, TurnError, rounds, turn

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("gpu_worker.py")
KINDS = ("stock", "patched", "latest")
RELEASES = ("5.14.1", "5.22.2")
MODES = ("none", "reentrant", "non-reentrant")
ROUNDS, STEPS = 9, 10
MEASUREMENTS = 3
"""One quiet measurement of a step is enough."""

NOISE = 0.05
"""How much longer a patched step may take."""

PAGES = 0.01
"""How much more memory a patched step may take: what the allocator rounds up."""


class Failure(str):
    """What a build said instead of an answer: an exception's name and its message."""

    @property
    def kind(self) -> str:
        """The exception's name."""
        return self.partition(":")[0]


@dataclass(frozen=True)
class Row(ABC):
    """What every build is asked.

    Attributes:
        question: for gpu_worker.py.
        needs_cuda: a dry run on the CPU has to leave it out.
        rounds: how many answers are wanted of each build.
    """

    name: str
    question: tuple[str | int | bool, ...]
    needs_cuda: bool = False
    rounds: int = 1

    @abstractmethod
    def cell(self, answers: Sequence[Any], stock: Sequence[Any]) -> str:
        """One build's answers, as the table has them."""

    @abstractmethod
    def off(self, patched: Sequence[Any], stock: Sequence[Any]) -> str:
        """What is wrong with the patched build's answers, or nothing."""


@dataclass(frozen=True)
class Gradients(Row):
    """A relative error, and the number of graphs of a model that is to be compiled once.

    Attributes:
        rounding: an error below it is none.
    """

    rounding: float = 1e-3  # of float32

    def cell(self, answers: Sequence[Any], stock: Sequence[Any]) -> str:
        """See Row."""
        [answer] = answers
        return f"{answer['error']:.3f}" + (f", {answer['graphs']} graphs" if answer["graphs"] > 1 else "")

    def off(self, patched: Sequence[Any], stock: Sequence[Any]) -> str:
        """See Row."""
        [answer] = patched
        if not answer["error"] <= self.rounding:
            return f"the error is {answer['error']:.1e}"
        return f"{answer['graphs']} graphs" if answer["graphs"] > max([1, *(one["graphs"] for one in stock)]) else ""


@dataclass(frozen=True)
class Memory(Row):
    """MiB."""

    def cell(self, answers: Sequence[Any], stock: Sequence[Any]) -> str:
        """See Row."""
        return f"{answers[0]:.1f} MiB"

    def off(self, patched: Sequence[Any], stock: Sequence[Any]) -> str:
        """See Row."""
        return f"{patched[0] / stock[0]:.3f} of stock" if stock and patched[0] > stock[0] * (1 + PAGES) else ""


@dataclass(frozen=True)
class Time(Row):
    """Milliseconds of a step in each round; a ratio is the median of the rounds' ratios."""

    rounds: int = ROUNDS

    def cell(self, answers: Sequence[Any], stock: Sequence[Any]) -> str:
        """See Row."""
        return f"{statistics.median(answers):.1f} ms" + (f", x {_ratio(answers, stock):.2f}" if stock else "")

    def off(self, patched: Sequence[Any], stock: Sequence[Any]) -> str:
        """See Row."""
        return f"{_ratio(patched, stock):.2f} of stock" if stock and _ratio(patched, stock) > 1 + NOISE else ""


def _ratio(answers: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(answers, base, strict=True))


def rows() -> Iterator[Row]:
    """All of them; CUDA graphs last, because a capture that fails can leave the device in a bad state."""
    for mode in MODES[1:]:
        for forwards in (1, 2):
            name = f"gradients, FSDP2, {mode}, {forwards} forward{'s' * (forwards > 1)}"
            # float64, but norms are computed in float32
            yield Gradients(name, ("sharded gradients", mode, forwards), rounding=1e-6)
    for mode in MODES[1:]:
        yield Gradients(f"gradients, torch.compile, {mode}", ("compiled", mode))
    for kind, question, needs_cuda in ((Memory, "peak memory", True), (Time, "step", False)):
        for sharded in (False, True):
            for mode in MODES:
                name = ", ".join([question, *["FSDP2"] * sharded, "no checkpointing" if mode == "none" else mode])
                steps = (STEPS,) if question == "step" else ()
                yield kind(name, (question, mode, sharded, *steps), needs_cuda)
    for mode in MODES[1:]:
        yield Gradients(f"gradients, captured step, {mode}", ("captured step", mode), True)
    # Of a reentrant checkpoint no graphed callable can be made: that takes torch.autograd.grad
    yield Gradients("gradients, graphed layer, non-reentrant", ("graphed layer", "non-reentrant"), True)


Answers = Mapping[str, list[Any] | Failure]
"""By kind of build."""


def ask(row: Row, turns: Mapping[str, Turn]) -> Answers:
    """What the builds answer, in turn; a build that fails is not asked again."""
    answers: dict[str, list[Any] | Failure] = {kind: [] for kind in turns}
    for order in rounds(row.rounds, list(turns)):
        for kind in order:
            found = answers[kind]
            if isinstance(found, list):
                try:
                    found.append(turns[kind].ask(*row.question))
                except TurnError as error:
                    answers[kind] = Failure(error)
    return answers


def off(row: Row, answers: Answers) -> str:
    """What is wrong with the patched build, or nothing. To fail as stock does is no fault of the patch."""
    stock, patched = answers["stock"], answers["patched"]
    if isinstance(patched, Failure):
        return "" if isinstance(stock, Failure) and stock.kind == patched.kind else patched
    return row.off(patched, [] if isinstance(stock, Failure) else stock)


def measure(turns: Mapping[str, Turn], device: str, only: str) -> int:
    """Print the table, row by row; gives how many rows of it are off."""
    about = {kind: one.ask("about") for kind, one in turns.items()}
    _say(
        "One rank; torch {torch} on {device}. Layers have hooks. x: times that of stock.\n"
        "Gradients: relative error against neither shards, checkpoints, compiler nor CUDA graphs.".format_map(
            about["stock"]
        )
    )
    _say(_line("", list(turns)))
    _say(_line("", [about[kind]["transformers"] for kind in turns]))
    wrong = 0
    for row in rows():
        if only not in row.name:
            continue
        if row.needs_cuda and device != "cuda":
            _say(_line(row.name, ["CUDA only"] * len(turns)))
            continue
        timed = isinstance(row, Time)
        for _ in range(MEASUREMENTS if timed else 1):
            answers = ask(row, turns)
            why = "" if timed and device != "cuda" else off(row, answers)
            if not why:
                break
        stock = answers["stock"] if not isinstance(answers["stock"], Failure) else []
        cells = [
            found.kind if isinstance(found, Failure) else row.cell(found, stock if kind != "stock" else [])
            for kind, found in answers.items()
        ]
        _say(_line(row.name, cells))
        for kind, found in answers.items():
            if isinstance(found, Failure):
                _say(f"    {kind}: {found}")
        if why:
            _say(f"    the patched build is off: {why}")
        wrong += bool(why)
    return wrong


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:43}" + "".join(f"{cell:>19}" for cell in cells)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 where the patched build is off, or nothing can be measured."""
    parser = argparse.ArgumentParser(prog="scripts/test.sh gpu", description="checkpointing on a GPU, in five minutes")
    parser.add_argument("--release", choices=RELEASES, default=RELEASES[0], help="which is patched (%(default)s)")
    parser.add_argument("--torch", choices=("2.11", "2.13", "2.14"), default="2.13", help="which torch (%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run with small models")
    parser.add_argument("--pack", metavar="FOLDER", type=Path, help="write the builds to FOLDER, and nothing else")
    parser.add_argument("--here", metavar="FOLDER", type=Path, help="measure those builds with python3's own torch")
    parser.add_argument("-k", metavar="TEXT", dest="only", default="", help="only rows with TEXT in their names")
    options = parser.parse_args(arguments)
    if options.pack is not None:
        return pack(options.pack, options.release)
    if (reason := cannot_run(options.here, options.torch, options.device)) is not None:
        sys.stderr.write(f"overlay: {reason}\n")
        return 1
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overlay-gpu-")))
        builds = unpack(options.here, folder) if options.here is not None else made(options.release)
        interpreter = python(options.here, options.torch)
        turns = {}
        for kind, build in builds.items():
            variables = os.environ | {
                "PYTHONPATH": f"{build}{os.pathsep}{ROOT}",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            }
            turns[kind] = stack.enter_context(turn([interpreter, "-P", str(WORKER), options.device], variables))
        wrong = measure(turns, options.device, options.only)
    _say(f"the patched build is off in {wrong} rows" if wrong else "the patched build is right in all of them")
    return 1 if wrong else 0


def cannot_run(here: Path | None, torch: str, device: str) -> str | None:
    """Why nothing can be measured, and what is needed, in a line; None where it can."""
    if here is not None and (missing := [kind for kind in KINDS if not (here / f"{kind}.zip").is_file()]):
        return f"expected {', '.join(f'{kind}.zip' for kind in missing)} in {here}: scripts/test.sh gpu --pack {here}"
    interpreter = python(here, torch)
    look = "import json, torch; print(json.dumps([torch.__version__, torch.cuda.is_available()]))"
    done = subprocess.run([interpreter, "-P", "-c", look], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return f"{interpreter} cannot import torch ({said}): put a python3 that can first on PATH"
    found, cuda = json.loads(done.stdout.splitlines()[-1])
    if device == "cuda" and not cuda:
        return (
            f"torch {found} sees no CUDA device: this needs an NVIDIA GPU with 12 GB of free memory and a CUDA build "
            "of torch (--torch 2.14 installs one, --here uses your own; --device cpu is a dry run without a GPU)"
        )
    return None


def python(here: Path | None, torch: str) -> str:
    """The interpreter that measures: an environment's, or whatever has torch here."""
    if here is None:
        from overlay import environments

        return str(environments.python(f"train-{torch}"))
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    return os.environ.get("PYTHON") or shutil.which("python3") or sys.executable


def made(release: str) -> dict[str, Path]:
    """The builds to measure, by kind: folders for PYTHONPATH."""
    from tests.variants import LATEST, Variant, installed

    builds = (Variant("stock", release), Variant("patched", release), LATEST)
    return {build.kind: installed(build) for build in builds}


def pack(folder: Path, release: str) -> int:
    """Write the builds for a machine with the same kind of processor and no package index; about 45 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, build in made(release).items():
        shutil.make_archive(str(folder / kind), "zip", build)
        _say(f"wrote {folder / kind}.zip")
    return 0


def unpack(packed: Path, folder: Path) -> dict[str, Path]:
    """The builds of `pack`, as `made` gives them."""
    for kind in KINDS:
        shutil.unpack_archive(packed / f"{kind}.zip", folder / kind)
    return {kind: folder / kind for kind in KINDS}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
