"""What the fuser does on a GPU: TransformerEngine's own normalisations, FP8 and CUDA graphs under checkpointing.

`scripts/test.sh te --gpu` prints a table of stock and patched. It is meant to take five minutes once the stack is made.
Exit status 1 where the patched build is off, or where there is no CUDA device.
"""

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import OverlayError
from overlay.measure.turns import Turn, TurnError, turn
from tests.transformer_engine.native import stack

WORKER = Path(__file__).with_name("gpu_worker.py")
NORMS = ("fusible", "RMSNorm", "LayerNorm", "RMSNorm, Linear", "RMSNorm, Linear, FP8")
CONTROL = "none"
FUNCTIONS = (
    CONTROL,
    "torch, reentrant",
    "torch, non-reentrant",
    "own",
    "TransformerEngine, reentrant",
    "TransformerEngine, non-reentrant",
    "Megatron",
    "Megatron, discarded",
)
GRAPHS = ("graphed by torch", "graphed by TransformerEngine", "captured step", "captured generation")
RIGHT, WRONG, NO_FP8 = "right", "wrong", "no FP8 here"
OFF, NEEDS_GPU, NEEDS_FP8, NOT_REPEATABLE = "off", "needs a GPU", "needs FP8", "not repeatable"
NAME = 64
"""How wide the names of the rows are."""


@dataclass(frozen=True)
class Row:
    """What both builds are asked.

    Attributes:
        question: for gpu_worker.py.
        needs_cuda: a dry run on the CPU has to leave it out.
        control: whether it asks if the device computes the same twice; the rows up to the next one depend on it.
    """

    name: str
    question: tuple[str, ...]
    needs_cuda: bool
    control: bool = False


def rows() -> Iterator[Row]:
    """All of them; CUDA graphs last, because a capture that fails can leave the device in a bad state."""
    for norm, dtype, function in itertools.product(NORMS, ("float32", "bfloat16"), FUNCTIONS):
        name = "no checkpoint, twice" if function == CONTROL else function
        scope = "norm" if function == "Megatron, discarded" else "block"
        question = ("recomputed", norm, dtype, function, scope, "two forwards")
        yield Row(f"{norm}, {dtype}: {name}", question, norm != NORMS[0], function == CONTROL)
    for name in GRAPHS:
        yield Row(name, (name,), True)


def off(answer: str, repeatable: bool) -> bool:
    """Whether a patched build's answer is a fault of it. Wrong values are none where the device gives others each
    time."""
    return answer not in (RIGHT, NO_FP8) and not (answer == WRONG and not repeatable)


def verdict(found: Mapping[str, int]) -> tuple[int, str]:
    """The exit status and the last line, from how many rows came out each way. Where none is right, nothing is shown
    to be."""
    right, wrong = found.get(RIGHT, 0), found.get(OFF, 0)
    if wrong:
        said = f"off in {wrong} of {right + wrong} rows"
    else:
        said = {0: "right in no row", 1: "right in the one row"}.get(right, f"right in all {right} rows")
    left_out = [
        f"{found[kind]} {'row' if found[kind] == 1 else 'rows'} {why[found[kind] != 1]}"
        for kind, why in {
            NEEDS_GPU: ("needs a GPU", "need a GPU"),
            NEEDS_FP8: ("needs FP8", "need FP8"),
            NOT_REPEATABLE: ["not compared, because the device is not repeatable"] * 2,
        }.items()
        if found.get(kind)
    ]
    return (0 if right and not wrong else 1), "; ".join([f"the patched build is {said}", *left_out])


def ask(row: Row, worker: Turn) -> str:
    try:
        return str(worker.ask(*row.question))
    except TurnError as error:
        return str(error)


def measure(workers: Mapping[str, Turn], device: str, asked: Sequence[Row]) -> Counter[str]:
    """Print the table, row by row; gives how many rows came out each way, as `verdict` takes it."""
    about = {kind: worker.ask("about") for kind, worker in workers.items()}
    _say("torch {torch} on {device}. right: outputs and gradients as without, bit for bit.".format_map(about["stock"]))
    _say(_line("", list(workers)))
    _say(_line("", [one["transformer_engine"] for one in about.values()]))
    found: Counter[str] = Counter()
    repeatable = True
    for row in asked:
        if row.needs_cuda and device != "cuda":
            found[NEEDS_GPU] += 1
            _say(_line(row.name, ["CUDA only"] * len(workers)))
            continue
        answers = {kind: ask(row, worker) for kind, worker in workers.items()}
        if row.control:
            repeatable = set(answers.values()) <= {RIGHT, NO_FP8}
        failed = {kind: answer for kind, answer in answers.items() if answer not in (RIGHT, WRONG, NO_FP8)}
        _say(_line(row.name, ["fails" if kind in failed else answer for kind, answer in answers.items()]))
        for kind, answer in failed.items():
            _say(f"    {kind}: {answer[:80]}")
        answer = answers["patched"]
        if off(answer, repeatable):
            found[OFF] += 1
        else:
            found[{RIGHT: RIGHT, NO_FP8: NEEDS_FP8}.get(answer, NOT_REPEATABLE)] += 1
    return found


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:{NAME}}" + "".join(f"{cell:>18}" for cell in cells)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 where the patched build is off, or nothing can be measured; 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="scripts/test.sh te --gpu", description="the fuser on a GPU, in five minutes")
    parser.add_argument(
        "--release", default=stack.RELEASE, choices=stack.releases(), help="of TransformerEngine (%(default)s)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run without a GPU")
    parser.add_argument("-k", metavar="TEXT", dest="only", default="", help="only rows with TEXT in their names")
    options = parser.parse_args(arguments)
    asked = [row for row in rows() if options.only in row.name]
    if not asked:
        sys.stderr.write(
            f"overlay: expected a row with {options.only!r} in its name, found none: leave -k out to see all\n"
        )
        return 2
    builds = {"stock": stack.stock(options.release), "patched": stack.patched(options.release)}
    try:
        if options.device == "cpu" and all(row.needs_cuda for row in asked):
            raise OverlayError(
                f"expected a row that needs no GPU, found none among {len(asked)}: leave --device cpu out"
            )
        interpreter = stack.interpreter(options.release)
        if options.device == "cuda":
            _check(interpreter)
        variables = {kind: _seeing(options.device, stack.processes(build)[1]) for kind, build in builds.items()}
    except OverlayError as error:
        sys.stderr.write(f"overlay: {error}\n")
        return 1
    with contextlib.ExitStack() as started:
        command = [str(interpreter), "-P", str(WORKER), options.device]
        workers = {kind: started.enter_context(turn(command, variables[kind])) for kind in builds}
        status, said = verdict(measure(workers, options.device, asked))
    _say(said)
    return status


def _check(interpreter: Path) -> None:
    """Before anything is built."""
    look = "import torch; print(torch.__version__, torch.cuda.is_available())"
    done = subprocess.run([interpreter, "-P", "-c", look], capture_output=True, text=True, check=True)
    version, cuda = done.stdout.split()
    if cuda != "True":
        raise OverlayError(
            f"torch {version} sees no CUDA device: this needs an NVIDIA GPU of compute capability 8.0 or later and a "
            "driver for CUDA 13 (--device cpu is a dry run without a GPU)"
        )


def _seeing(device: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of the stack, which hide all devices, with the caller's devices."""
    name = "CUDA_VISIBLE_DEVICES"
    hidden = {key: value for key, value in variables.items() if key != name or device != "cuda"}
    return hidden | ({name: os.environ[name]} if device == "cuda" and name in os.environ else {})
