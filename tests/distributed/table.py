"""The table of the FSDP2 proof: one row a case, one column a build of transformers."""

from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

import pytest

START, END = "<!-- fsdp2-table -->", "<!-- /fsdp2-table -->"
"""Between them README.md has the table."""


class Row(TypedDict):
    """A row as the worker writes it; `error` is the relative error of the gradients, "refused" or an exception's name;
    `said` is what an exception said."""

    case: str
    reentrant: bool
    ranks: int
    error: float | str
    said: NotRequired[str]


class Measured(TypedDict):
    transformers: str
    torch: str
    rows: list[Row]


@dataclass
class Table:
    """What was measured, by the name of the build (`stock-5.14.1`), in the order of the columns."""

    columns: dict[str, Measured] = field(default_factory=dict)

    def text(self) -> str:
        """At most 100 columns wide."""
        heads = [name.split("-") for name in self.columns]
        torch = next(iter(self.columns.values()))["torch"].partition("+")[0]
        lines = [
            f"Relative error of the gradients, fully sharded and checkpointed against neither; torch {torch}, gloo",
            *(" " * 52 + "".join(f"{head[i]:>9}" for head in heads) for i in (0, 1)),
        ]
        group = None
        for (mode, case, ranks), errors in self._rows():
            if group != (group := (mode, ranks)):
                lines.append(f"{mode}, {ranks} rank{'s' if ranks > 1 else ''}")
            lines.append(f"  {case:50}" + "".join(f"{error:>9}" for error in errors))
        return "\n".join(lines)

    def markdown(self) -> str:
        """As README.md has it: each cell says the error on one rank and on two."""
        cells: dict[tuple[str, str], list[list[str]]] = {}
        for (mode, case, _), errors in self._rows():
            cells.setdefault((mode, case), []).append(errors)
        lines = [
            " | ".join(
                ["| checkpointing | forwards before a backward", *(name.replace("-", " ") for name in self.columns)]
            )
            + " |",
            "|---|---" + "|---:" * len(self.columns) + "|",
        ]
        for (mode, case), by_ranks in cells.items():
            lines.append(" | ".join([f"| {mode}", case, *map(" / ".join, zip(*by_ranks, strict=True))]) + " |")
        return "\n".join(lines)

    def _rows(self) -> list[tuple[tuple[str, str, int], list[str]]]:
        rows: dict[tuple[str, str, int], list[str]] = {}
        for measured in self.columns.values():
            for row in measured["rows"]:
                key = ("reentrant" if row["reentrant"] else "non-reentrant", row["case"], row["ranks"])
                error = row["error"]
                rows.setdefault(key, []).append(error if isinstance(error, str) else f"{error:.3f}")
        return list(rows.items())


MEASURED = pytest.StashKey[Table]()
