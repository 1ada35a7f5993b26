"""A report of experiments for a person, and for programs. Standard library only."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from overlay.errors import escaped, plain
from overlay.measure.experiments.table import Cell, Column, Line, Table
from overlay.measure.verify import Report
from overlay.terminal import width, wrapped

FORMAT = 1
"""Of the JSON (verify.schema.json); raised where a reader of an older one would misread it."""

_MARK = "! "
"""Before a cell that is not as it should be."""

_LONGEST = 24
"""Characters of a cell; what it says whole is in its note."""

_ROOM = 20
"""Columns that a case needs beside its cells: where there are fewer, these are below it."""


def of(report: Report) -> str:
    """A table of each experiment, what is not self-evident in it, one of all, and the verdict.

    It is plain (`errors.escaped`).
    """
    columns = width()
    parts = [_table(table, columns) for table in report.tables]
    if len(report.tables) > 1:
        parts.append(_table(_summary(report.tables), columns))
    for name, why in report.left_out.items():
        parts.append("\n".join(wrapped(f"left out: {why}", f"{name}  ", columns)))
    parts.append("\n".join(_verdict(report, columns)))
    return escaped("\n\n".join(parts), kept="\n")


def _summary(tables: Sequence[Table]) -> Table:
    """How many cases of each experiment are not as they should be."""
    kinds = dict.fromkeys(column.kind for table in tables for column in table.columns)
    lines = []
    for table in tables:
        cells = {}
        for kind in kinds:
            wrong = len(table.wrong(kind))
            if kind in table.failed:
                cells[kind] = Cell("not measured", False)
            elif any(column.kind == kind for column in table.columns):
                cells[kind] = Cell(f"{wrong} wrong", False) if wrong else Cell("right", True)
        count = f", {len(table.lines)} case{'s' * (len(table.lines) != 1)}" if table.lines else ""
        lines.append(Line("", f"{table.name}{count}", cells))
    columns = [Column(kind, ()) for kind in kinds]
    return Table("all", "the cases that are not as they should be", "", columns, lines)


def _table(table: Table, columns: int) -> str:
    shown = [column for column in table.columns if column.kind not in table.failed]
    lines = wrapped(table.title, f"{table.name}  ", columns)
    if table.about:
        lines += wrapped(table.about, " " * (len(table.name) + 2), columns)
    if table.lines:
        heads = [[plain(text) for text in (column.kind, *column.heads)] for column in shown]
        sizes = [
            3 + max(len(text) for text in (*head, *(_shown(line.cells.get(column.kind)) for line in table.lines)))
            for column, head in zip(shown, heads, strict=True)
        ]
        if columns - sum(sizes) >= _ROOM:
            lines += _side_by_side(table, shown, heads, sizes, columns)
        else:
            lines += _one_below_the_other(table, shown, heads, columns)
    for kind, why in table.failed.items():
        lines += wrapped(f"{kind}: not measured: {why}", "  * ", columns)
    return "\n".join([*lines, *_notes(table, columns)])


def _side_by_side(
    table: Table, shown: Sequence[Column], heads: Sequence[Sequence[str]], sizes: Sequence[int], columns: int
) -> list[str]:
    longest = max(len(line.case) + 2 for line in table.lines)
    room = max(_ROOM, min(longest, columns - sum(sizes)))
    lines = []
    for i in range(max(map(len, heads))):
        lines.append(" " * room + _row([head[i] if i < len(head) else "" for head in heads], sizes))
    for line, group in _grouped(table, columns):
        lines += group
        *first, last = _case(line.case, room, columns)
        cells = _row([_shown(line.cells.get(column.kind)) for column in shown], sizes)
        # A word that is longer than the room stands alone
        lines += [*first, f"{last:{room}}{cells}"] if len(last) <= room else [*first, last, " " * room + cells]
    return lines


def _one_below_the_other(
    table: Table, shown: Sequence[Column], heads: Sequence[Sequence[str]], columns: int
) -> list[str]:
    size = max(len(column.kind) for column in shown) + 1
    lines = [line for kind, *head in heads if head for line in wrapped(" ".join(head), f"{kind}: ", columns)]
    for line, group in _grouped(table, columns):
        lines += [*group, *_case(line.case, columns, columns)]
        lines += [f"    {column.kind:{size}}{_shown(line.cells.get(column.kind))}" for column in shown]
    return lines


def _grouped(table: Table, columns: int) -> Iterator[tuple[Line, list[str]]]:
    """Each line, and the heading before it, if it begins a group."""
    group = ""
    for line in table.lines:
        yield line, wrapped(line.group, "", columns) if line.group != group else []
        group = line.group


def _row(parts: Sequence[str], sizes: Sequence[int]) -> str:
    return "".join(f"{part:>{size}}" for part, size in zip(parts, sizes, strict=True)).rstrip()


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    text = plain(cell.text)
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return text if cell.right else _MARK + text


def _case(text: str, room: int, columns: int) -> list[str]:
    """A name that is longer than the room is not broken, but for one that is longer than the terminal is wide."""
    broken = any(len(word) + 4 > columns for word in text.split())
    return textwrap.wrap(
        text, room, initial_indent="  ", subsequent_indent="    ", break_long_words=broken, break_on_hyphens=False
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
        lines = ["off:", *(part for line in report.off for part in wrapped(line, "- ", columns))]
        if any(table.wrong("here") for table in report.tables):
            lines += wrapped("`python -m overlay doctor` says what is installed here, and what mends it", "", columns)
        return lines
    if report.judged is None:
        return wrapped("nothing is judged, for the column `patched` was left out", "", columns)
    cases = sum(len(table.lines) for table in report.tables)  # each is right, or it would be off
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
        "passed": False if report.off else None if report.judged is None else True,
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
