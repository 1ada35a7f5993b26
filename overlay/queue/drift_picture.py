"""The picture of `overlay drift --png`: the releases over time, a row for each project. Needs matplotlib."""

import io
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib import dates as typeless
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from overlay import atomic
from overlay.errors import OverlayError
from overlay.queue.drift import Standing, Survey

DOTS = 100
"""Dots an inch: the picture has 14 inches, 1400 pixels, however many releases there are."""

DAY = 24 * 60 * 60
"""Seconds; matplotlib counts days from the same moment as POSIX does."""

_dates: Any = typeless

# Colours of Okabe and Ito (2008), which people with any colour vision tell apart; the markers differ as well
_STATES = {
    "has a fault, no series mends it": ("X", "#D55E00"),
    "cannot be judged": ("$?$", "#000000"),
    "has a fault, delivered patched": ("s", "#0072B2"),
    "has a fault, a series fits, for the tests": ("^", "#56B4E9"),
    "has a fault, a series fits, not pinned": ("o", "#E69F00"),
    "fixed upstream": ("D", "#009E73"),
    "has no known fault": ("v", "#999999"),
}
"""The states of a release, the one that counts most first, each with its marker and colour."""

_BANDS = ("#DDDDDD", "#EEEEEE")


def check(file: Path) -> None:
    """Whether a picture can be written there, before the work is done. Raises OverlayError where it cannot."""
    if not file.parent.is_dir() or file.is_dir():
        found = f"that {file} is one" if file.is_dir() else f"no folder {file.parent}"
        raise OverlayError(f"expected a file in a folder that is there, found {found}: name another with --png")


def write(surveys: Sequence[Survey], file: Path) -> None:
    """Draws into `file`, as PNG: the whole file or none."""
    content = io.BytesIO()
    figure(surveys).savefig(content, format="png")
    with atomic.replacing(file) as draft:
        draft.write_bytes(content.getvalue())


def figure(surveys: Sequence[Survey]) -> Figure:
    """The picture: a row for each project, its releases by the day of their upload (by their order, where the index
    does not know the days), and a band for each series."""
    drawn = Figure(figsize=(14, 1.6 + 1.9 * len(surveys)), dpi=DOTS, layout="constrained")
    drawn.suptitle("Which releases have a fault, and which series of patches mends it", fontsize=15)
    known = all(one.offer.uploaded is not None for survey in surveys for one in survey.standings)
    rows = drawn.subplots(len(surveys), 1, sharex=known, squeeze=False)[:, 0]
    placed = [
        [
            one.offer.uploaded.timestamp() / DAY if known and one.offer.uploaded else float(number)
            for number, one in enumerate(survey.standings)
        ]
        for survey in surveys
    ]
    seen = {state(one) for survey in surveys for one in survey.standings}
    first, last = min(map(min, placed)), max(map(max, placed))
    margin = (last - first) * 0.011 or 1.0
    for axes, survey, places in zip(rows, surveys, placed, strict=True):
        axes.set_xlim(first - 2 * margin, last + 4 * margin)
        _draw(axes, survey, places, margin)
        if known:
            axes.xaxis.set_major_locator(_dates.MonthLocator())
            axes.xaxis.set_major_formatter(_dates.DateFormatter("%Y-%m"))
        else:
            axes.set_xticks([])
    rows[-1].set_xlabel("day of the upload" if known else "releases in their order")
    handles = [
        Line2D([], [], marker=marker, color=colour, linestyle="", markersize=9, label=name)
        for name, (marker, colour) in _STATES.items()
        if name in seen
    ]
    drawn.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=11)
    return drawn


def state(one: Standing) -> str:
    """The state of a release, a key of the legend."""
    names = list(_STATES)
    if one.unmended:
        return names[0]
    if one.undecided:
        return names[1]
    if one.series is not None:
        return names[4 if one.pin is None else 3 if one.pin.use == "test" else 2]
    return names[5 if one.fixed is not None or one.known else 6]


def _draw(axes: Any, survey: Survey, places: Sequence[float], margin: float) -> None:
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_title(survey.project, loc="left", fontsize=13, fontweight="bold")
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    _draw_bands(axes, survey, places, margin)
    for name, (marker, colour) in reversed(_STATES.items()):  # what counts most lies on top
        here = [place for place, one in zip(places, survey.standings, strict=True) if state(one) == name]
        open_ = name in list(_STATES)[:2]
        axes.plot(
            here,
            [0.42] * len(here),
            marker=marker,
            linestyle="",
            color=colour,
            markersize=14 if open_ else 10,
            markeredgecolor=colour if marker.startswith("$") else "white",
            zorder=3,
        )
    _label(axes, survey, places, margin)


def _draw_bands(axes: Any, survey: Survey, places: Sequence[float], margin: float) -> None:
    """A band under the releases of each series that fits, or that upstream has fixed."""
    bands = []
    numbered = zip(places, survey.standings, strict=True)
    for text, group in groupby(numbered, key=lambda one: _band(one[1])):
        members = [place for place, _ in group]
        bands.append((text, members[0], members[-1]))
    for number, (text, first, last) in enumerate(bands):
        start = (bands[number - 1][2] + first) / 2 if number else first - 1.5 * margin
        end = (last + bands[number + 1][1]) / 2 if number + 1 < len(bands) else last + 2.5 * margin
        axes.axvspan(start, end, ymin=0.18, ymax=0.66, color=_BANDS[number % 2], zorder=0, linewidth=0)
        label = text if end - start < 12 * margin else f"series {text}" if text[0].isdigit() else text
        axes.text(
            (start + end) / 2, 0.03, label, ha="center", va="bottom", fontsize=10 if end - start > 4 * margin else 8
        )


def _band(one: Standing) -> str:
    if one.series is not None:
        return one.series.removeprefix(f"{one.project}-").replace("-", " to ")
    return "fixed upstream" if one.fixed is not None or one.known else "no series"


def _label(axes: Any, survey: Survey, places: Sequence[float], margin: float) -> None:
    """Versions above the markers: of what needs somebody, of what is delivered, and of the first of each minor
    release, as far as there is room, in this order."""

    def rank(one: Standing) -> int:
        return 0 if one.unmended or one.undecided else 1 if one.pin is not None and one.pin.use == "deliver" else 2

    taken: list[float] = []
    order = sorted(range(len(places)), key=lambda number: (rank(survey.standings[number]), -number))
    for number in order:
        one, place = survey.standings[number], places[number]
        first = number == 0 or survey.standings[number - 1].offer.version.release[:2] != one.offer.version.release[:2]
        if (rank(one) == 2 and not first) or any(abs(place - other) < 1.3 * margin for other in taken):
            continue
        taken.append(place)
        weight = "bold" if rank(one) < 2 else "normal"
        axes.text(
            place, 0.68, one.version, rotation=60, ha="left", va="bottom", rotation_mode="anchor", fontweight=weight
        )
