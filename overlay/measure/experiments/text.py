"""A report of experiments for a person, and for programs. Standard library only."""

import textwrap
from collections.abc import Sequence
from typing import Any

from overlay.measure.experiments.table import Cell, Table
from overlay.measure.verify import Report
from overlay.terminal import width, wrapped

FORMAT = 1
"""Of the JSON; raised where a reader of an older one would misread it."""

_MARK = "! "
"""Before a cell that is not as it should be."""


def of(report: Report) -> str:
    """One table an experiment, what is not self-evident in it, and the verdict."""
    columns = width()
    parts = [_table(table, columns) for table in report.tables]
    for name, why in report.left_out.items():
        parts.append("\n".join(wrapped(f"left out: {why}", f"{name}  ", columns)))
    parts.append("\n".join(_verdict(report, columns)))
    return "\n\n".join(parts)


def _table(table: Table, columns: int) -> str:
    shown = [column for column in table.columns if column.kind not in table.failed]
    heads = [[column.kind, *column.heads] for column in shown]
    sizes = [
        3 + max(len(text) for text in (*head, *(_shown(line.cells.get(column.kind)) for line in table.lines)))
        for column, head in zip(shown, heads, strict=True)
    ]
    longest = max((len(line.case) + 2 for line in table.lines), default=0)
    room = max(20, min(longest, columns - sum(sizes)))
    lines = wrapped(table.title, f"{table.name}  ", columns)
    if table.about:
        lines += wrapped(table.about, " " * (len(table.name) + 2), columns)
    for i in range(max(map(len, heads), default=0)):
        parts = [head[i] if i < len(head) else "" for head in heads]
        lines.append(" " * room + _row(parts, sizes))
    group = ""
    for line in table.lines:
        if line.group != group:
            group = line.group
            lines.append(group)
        *first, last = _case(line.case, room)
        lines += [*first, f"{last:{room}}" + _row([_shown(line.cells.get(column.kind)) for column in shown], sizes)]
    for kind, why in table.failed.items():
        lines += wrapped(why, f"{kind}: not measured: ", columns)
    return "\n".join([*lines, *_notes(table, columns)])


def _row(parts: Sequence[str], sizes: Sequence[int]) -> str:
    return "".join(f"{part:>{size}}" for part, size in zip(parts, sizes, strict=True))


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return cell.text if cell.right else _MARK + cell.text


def _case(text: str, room: int) -> list[str]:
    return textwrap.wrap(
        text, room, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _notes(table: Table, columns: int) -> list[str]:
    """What a cell's text stands for, once for each, with the builds of which it is said."""
    notes: dict[str, list[str]] = {}
    for line in table.lines:
        for kind, cell in line.cells.items():
            if cell.note and kind not in notes.setdefault(cell.note, []):
                notes[cell.note].append(kind)
    return [part for note, kinds in notes.items() for part in wrapped(f"{', '.join(kinds)}: {note}", "  * ", columns)]


def _verdict(report: Report, columns: int) -> list[str]:
    if report.off:
        return ["off:", *(part for line in report.off for part in wrapped(line, "- ", columns))]
    if report.judged is None:
        return wrapped("nothing is judged, for the column `patched` was left out", "", columns)
    cases = sum(len(table.lines) for table in report.tables)
    what = "the patched build is" if report.judged == "patched" else "what is installed here is"
    others = [
        f"{kind} is wrong in {wrong}"
        for kind in ("stock", "latest")
        if (wrong := sum(len(table.wrong(kind)) for table in report.tables))
    ]
    return wrapped("; ".join([f"pass: {what} right in {cases} of {cases} cases", *others]), "", columns)


def as_json(report: Report) -> dict[str, Any]:
    """For programs: `passed`, what is `off`, and each experiment's cells."""
    return {
        "format": FORMAT,
        "passed": not report.off,
        "judged": report.judged,
        "off": report.off,
        "left_out": report.left_out,
        "experiments": [
            {
                "name": table.name,
                "title": table.title,
                "about": table.about,
                "columns": {column.kind: list(column.heads) for column in table.columns},
                "not_measured": table.failed,
                "rows": [
                    {
                        "group": line.group,
                        "case": line.case,
                        "cells": {
                            kind: {"found": cell.text, "right": cell.right, "note": cell.note, "said": cell.said}
                            for kind, cell in line.cells.items()
                        },
                    }
                    for line in table.lines
                ],
            }
            for table in report.tables
        ],
    }
