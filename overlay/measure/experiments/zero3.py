"""PEFT with DeepSpeed's ZeRO-3 and activation checkpointing: LoRA trains, with the gradients of no checkpointing.

DeepSpeed before 0.19.3 partitions frozen parameters again while a non-reentrant recompute reads them. The latest
upstream is the newest transformers with the DeepSpeed that is mended.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from overlay.measure.experiments.experiment import Experiment, Row
from overlay.measure.experiments.table import NO_CHECKPOINT, Cell, Line, figure, first_line

FAULTY, FIXED = "0.19.2", "0.19.3"
"""Versions of DeepSpeed."""

ROUNDING = 1e-5
"""Relative, of gradients in single precision."""

PLAIN = "{}, not checkpointed"
CASES = {
    "by default": "Llama, checkpointing by default",
    "asked for": "Llama, use_reentrant=False",
    "asked for, after deepspeed.initialize": "Llama, enabled after deepspeed.initialize",
    "ViT": "ViT, with modules_to_save",
    "two forwards": "Llama, 2 forwards before a backward",
}
"""What the worker calls a case, and what the table calls it."""

REFERENCES = {
    "by default": PLAIN.format("Llama"),
    "asked for": PLAIN.format("Llama"),
    "asked for, after deepspeed.initialize": PLAIN.format("Llama"),
    "ViT": PLAIN.format("ViT"),
    "two forwards": PLAIN.format("two forwards"),
}
REFUSED = "call backward after each forward"
"""What is said where DeepSpeed cannot train at all: a layer that is recomputed twice in one backward."""


def pins(deepspeed: str) -> list[str]:
    """DeepSpeed, if any, and PEFT and TRL: those that require transformers, and would bring another."""
    needed = [f"deepspeed=={deepspeed}", "einops==0.8.2", "hjson==3.1.0", "msgpack==1.2.4", "py-cpuinfo==9.0.0"]
    return ["peft==0.21.2", "trl==1.16.0", *(needed if deepspeed else [])]


def version(kind: str) -> str:
    """The DeepSpeed of a column."""
    return FIXED if kind == "latest" else FAULTY


def lines(rows: Mapping[str, Sequence[Row]]) -> list[Line]:
    """What was found, by the kind of build, as lines."""
    cells: dict[str, dict[str, Cell]] = {case: {} for case in CASES}
    for kind, found in rows.items():
        observed = {row["case"]: row for row in found}
        for case in CASES:
            if case in observed:
                cells[case][kind] = _cell(case, observed[case], observed[REFERENCES[case]])
    return [Line("LoRA, ZeRO-3", CASES[case], by_kind) for case, by_kind in cells.items() if by_kind]


def _cell(case: str, row: Row, reference: Row) -> Cell:
    if "error" in row:
        if REFUSED in row["error"]:
            note = "refused: with an error that says what to do, for this DeepSpeed can train it in neither way"
            return Cell("refused", case == "two forwards", note, row["error"])
        return Cell(row["error"].partition(":")[0], False, first_line(row["error"]), row["error"])
    if "error" in reference:
        said = reference["error"]
        return Cell("no reference", False, f"no reference: without checkpointing, {first_line(said)}", said)
    error = relative_error(row["gradients"], reference["gradients"])
    if error <= ROUNDING and "not checkpointed" in row["kind"]:
        return Cell("no checkpoint", False, NO_CHECKPOINT)
    return Cell(figure(error, ROUNDING), error <= ROUNDING)


def relative_error(found: Mapping[str, Sequence[float]], expected: Mapping[str, Sequence[float]]) -> float:
    """The largest difference of a gradient's norm or sum, relative to its norm; one that is missing differs by all.
    NaN where one of them is.

    Args:
        found: by the name of a parameter, the norm and the sum of its gradient.
        expected: the same without checkpointing.
    """
    errors = []
    for name, (norm, total) in expected.items():
        ours, sum_of_ours = found.get(name, (0.0, 0.0))
        errors += [abs(ours - norm) / norm, abs(sum_of_ours - total) / norm] if norm else [abs(ours)]
    if any(map(math.isnan, errors)):  # which no comparison is true of, so that `max` may pass over it
        return math.nan
    return max(errors, default=math.inf)


EXPERIMENT = Experiment(
    name="zero3",
    title="relative error of the gradients, PEFT under ZeRO-3, against no checkpointing",
    worker=Path(__file__).with_name("zero3_worker.py"),
    project="transformers",
    needs=("torch", "transformers", "peft", "deepspeed"),
    ranks=True,
    lines=lines,
    environment="third-party",
    beside=lambda kind: pins(version(kind)),
    heads=lambda about: ("DeepSpeed", str(about["deepspeed"]).partition("+")[0]) if "deepspeed" in about else (),
    told={"cases": [*dict.fromkeys(REFERENCES.values()), *CASES]},
)
