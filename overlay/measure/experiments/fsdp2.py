"""FSDP2 with activation checkpointing: gradients are those of the model that is neither sharded nor checkpointed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from overlay.measure.experiments.experiment import Experiment, Row
from overlay.measure.experiments.table import NO_CHECKPOINT, Cell, Line, figure, first_line

ROUNDING = 1e-6
"""Relative, of gradients in double precision; RMSNorm computes in single precision all the same."""

REFUSED = frozenset(
    {
        "2 forwards, layer and layer.mlp sharded",
        "2 forwards, layer.mlp and layer.self_attn sharded",
        "2 forwards, layer and its experts sharded",
    }
)
"""Cases in which FSDP2 loses gradients in reentrant mode with every release: a patched one refuses the recompute."""


def lines(rows: Mapping[str, Sequence[Row]]) -> list[Line]:
    """What was found, by the kind of build, as lines."""
    cells: dict[tuple[str, str], dict[str, Cell]] = {}
    for kind, found in rows.items():
        for row in found:
            mode = "reentrant" if row["reentrant"] else "non-reentrant"
            cells.setdefault((mode, row["case"]), {})[kind] = _cell(row)
    return [Line(mode, case, by_kind) for (mode, case), by_kind in cells.items()]


def _cell(row: Row) -> Cell:
    error, said = row["error"], row.get("said", "")
    if error == "refused":
        note = "refused: with an error that names the submodule, for FSDP2 would lose gradients with every release"
        return Cell(error, row["reentrant"] and row["case"] in REFUSED, note, said)
    if isinstance(error, str):
        return Cell(error, False, f"{error}: {first_line(said)}", said)
    if error <= ROUNDING and not row["checkpointed"]:
        return Cell("no checkpoint", False, NO_CHECKPOINT)
    return Cell(figure(error, ROUNDING), error <= ROUNDING)


EXPERIMENT = Experiment(
    name="fsdp2",
    title="relative error of the gradients, sharded and checkpointed against neither",
    worker=Path(__file__).with_name("fsdp2_worker.py"),
    project="transformers",
    needs=("torch", "transformers"),
    ranks=True,
    lines=lines,
)
