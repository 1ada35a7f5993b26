"""What `overlay drift` prints: the releases as a table for a person, for README.md, or for a program."""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from overlay.progress import say
from overlay.queue.drift import Standing, Survey

START, END = "<!-- releases-table -->", "<!-- /releases-table -->"
"""Between them README.md has the tables."""

ABBREVIATED = 10
"""Digits of a blob id in the tables."""

WIDTH = 100
"""Columns of a table, where the terminal does not say how many it has."""

_SECTION = re.compile(r"(@@ -\S+ \+\S+ @@).*")
"""The lines of a hunk, and behind them the heading of the section that it stands in, which the tables leave out."""

_NO_BREAK = "\N{NO-BREAK SPACE}"

Form = Literal["text", "all", "markdown", "json"]
Row = tuple[str, ...]

_HEADING: Row = ("version", "released", "blob", "fault", "fits", "pinned")
_DISPENSABLE = (2, 1)
"""The columns that a narrow terminal does without, in this order."""


def table(surveys: Sequence[Survey], form: Form) -> str:
    """The releases in one of the forms: `text` has one row for like releases, `all` one for each."""
    if form == "json":
        return json.dumps({survey.project: _plain(survey) for survey in surveys}, indent=2)
    if form == "markdown":
        return "\n\n".join(map(_markdown, surveys))
    width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    return "\n\n".join(text(survey, width, grouped=form == "text") for survey in surveys)


def complain(surveys: Sequence[Survey]) -> bool:
    """Names on stderr the releases with a fault that no series mends, and those that nobody can tell of: a line each
    kind. Whether there are any."""
    unmended = [_named(one, one.unmended) for survey in surveys for one in survey.standings if one.unmended]
    undecided = [_named(one, one.undecided) for survey in surveys for one in survey.standings if one.undecided]
    if unmended:
        say(f"expected a series for every release with a fault, found none for {'; '.join(unmended)}: make one")
    if undecided:
        say(
            f"expected to judge every release, could not judge {'; '.join(undecided)}: --json says why; adapt the judge"
        )
    return bool(unmended or undecided)


def _named(one: Standing, codes: Sequence[str]) -> str:
    return f"{one.project} {one.version} ({', '.join(codes)})"


def _fault(one: Standing, names: dict[str, str]) -> str:
    """Which faults it has, by the names that the table has for them."""
    live, open_ = one.codes("live"), one.codes("not judged")
    if not one.faults:
        return "none known"
    said = [f"yes: {' '.join(names[code] for code in live)}"] if live else []
    if open_:
        said.append(f"not judged: {' '.join(names[code] for code in open_)}")
    return "; ".join(said) or "no"


def _blob(one: Standing) -> str:
    return "none" if one.blob is None else one.blob[:ABBREVIATED]


def _fits(one: Standing) -> str:
    """The series of its range, without the project; since when upstream has mended it; or none."""
    if one.series is not None:
        return one.series.removeprefix(f"{one.project}-")
    return "none" if one.fixed is None else f"fixed {one.fixed}"


def _reason(one: Standing) -> str:
    return _SECTION.sub(r"\1", one.reason)


def _groups(survey: Survey, grouped: bool = True) -> list[list[Standing]]:
    """Consecutive releases with the same file and the same answers."""
    if not grouped:
        return [[one] for one in survey.standings]

    def answers(one: Standing) -> tuple[object, ...]:
        states = tuple(verdict.state for verdict in one.faults.values())
        return one.blob, states, one.series, one.fixed, "" if one.series or one.fixed else one.reason

    return [list(group) for _, group in groupby(survey.standings, key=answers)]


def _versions(group: Sequence[Standing]) -> str:
    return _span(group[0].version, group[-1].version)


def _pins(group: Sequence[Standing]) -> str:
    pins = [one.pinned if len(group) == 1 else f"{one.version} {one.pinned}" for one in group if one.pinned != "no"]
    return ", ".join(pins) or "no"


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def text(survey: Survey, width: int, grouped: bool) -> str:
    """The table of one project, in so many columns of characters, and below it what its numbers mean."""
    names = {code: str(number) for number, code in enumerate(survey.faults, 1)}
    groups = _groups(survey, grouped)
    rows = [
        (_versions(group), group[0].uploaded, _blob(group[0]), _fault(group[0], names), _fits(group[0]), _pins(group))
        for group in groups
    ]
    notes = [f"{names[code]} {code}: {said}{_since(survey, code)}" for code, said in survey.faults.items()]
    notes += [
        f"{_versions(group)}: no series fits: {_reason(group[0])}" for group in groups if _fits(group[0]) == "none"
    ]
    left_out = [
        f"{', '.join(versions)} ({why})"
        for versions, why in ((survey.yanked, "yanked"), (survey.pre_releases, "pre-releases"))
        if versions
    ]
    notes += [f"left out: {'; '.join(left_out)}"] if left_out else []
    return "\n".join(
        [
            survey.project,
            *_columns([_HEADING, *rows], width),
            *(line for note in notes for line in _wrapped(note, width)),
        ]
    )


def _since(survey: Survey, code: str) -> str:
    return f" (fixed upstream in {survey.fixed[code]})" if code in survey.fixed else ""


def _columns(rows: Sequence[Row], width: int) -> list[str]:
    """The rows, in columns that fit: without the dispensable ones, and with the last one in several lines, if need
    be."""
    kept = list(range(len(rows[0])))
    sizes = [max(len(row[column]) for row in rows) for column in kept]

    def before_last() -> int:
        return sum(sizes[column] + 2 for column in kept[:-1])

    for column in _DISPENSABLE:
        if before_last() + min(sizes[-1], 20) > width:
            kept.remove(column)
    room = max(width - before_last(), 10)
    lines = []
    for row in rows:
        whole = ", ".join(pin.replace(" ", _NO_BREAK) for pin in row[-1].split(", "))
        first, *more = (line.replace(_NO_BREAK, " ") for line in textwrap.wrap(whole, room, break_long_words=False))
        start = "".join(row[column].ljust(sizes[column] + 2) for column in kept[:-1])
        lines += [(start + first).rstrip(), *(" " * before_last() + line for line in more)]
    return lines


def _wrapped(note: str, width: int) -> list[str]:
    return textwrap.wrap(note, max(width, 20), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _markdown(survey: Survey) -> str:
    """As README.md has it."""
    file = Path(survey.files[0]).name if survey.files else "file"
    lines = [
        f"| {' | '.join((survey.project, 'released', f'`{file}`', 'fault', 'series', 'pinned'))} |",
        "|---|---|---|---|---|---|",
    ]
    names = {code: f"{code}," for code in survey.faults}
    for group in _groups(survey):
        one = group[0]
        days = [each.uploaded for each in group if each.uploaded]
        outcome = one.series or (f"fixed upstream in {one.fixed}" if one.fixed else f"none: {_reason(one)}")
        cells = (
            _versions(group),
            _span(min(days), max(days)) if days else "",
            f"`{_blob(one)}`",
            _fault(one, names).replace(",;", ";").removesuffix(",").removeprefix("yes: "),
            outcome,
            _pins(group),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _plain(survey: Survey) -> dict[str, Any]:
    return {
        "faults": {
            code: {"text": text, "fixed-upstream": survey.fixed.get(code)} for code, text in survey.faults.items()
        },
        "releases": [
            {
                "version": one.version,
                "uploaded": None if one.offer.uploaded is None else one.offer.uploaded.isoformat(),
                "wheel": {"file": one.offer.file, "sha256": one.offer.sha256},
                "blobs": one.blobs,
                "faults": {code: {"state": found.state, "why": found.why} for code, found in one.faults.items()},
                "series": one.series,
                "unmended": one.unmended,
                "undecided": one.undecided,
                "fits": one.fits,
                "reasons": one.reasons,
                "fixed-upstream": one.fixed,
                "known-fixed": one.known,
                "pinned": None if one.pin is None else {"use": one.pin.use, "revision": one.pin.revision},
            }
            for one in survey.standings
        ],
        "yanked": survey.yanked,
        "pre-releases": survey.pre_releases,
    }
