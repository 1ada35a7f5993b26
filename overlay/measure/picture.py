"""A run card as a PNG that can be read without the text: memory over the step, and memory and time per mode.

The panels are below each other, and letters are large against the width, so that it can be read on a telephone of 375
pixels, too. Its ground is white in dark surroundings as well.
"""

import textwrap
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from overlay.measure import judge
from overlay.measure.card import Build, Card, Mode
from overlay.measure.markdown import size, title, verdict
from overlay.measure.settings import name_of as name

COLOURS = {"off": "#777777", "reentrant": "#d95f02", "non-reentrant": "#1b9e77"}
OTHER = "#7570b3"
MARKERS = {"stock": "s", "latest": "^"}
GOOD, BAD = "#126e36", "#b3261e"
INCHES, DPI = 4.5, 170
LETTERS, SMALL = 10.0, 9.0
"""Points."""

COLUMNS = 56
"""Characters in a line of the heading."""

TITLE = 44
"""Characters in a line above an axis that is as wide as the picture."""

LABEL = 24
"""Characters of a name in the legend, where two are beside each other."""

ROOM = 1.4
"""The range of an axis, of the largest value on it: beyond it are the legend and figures."""

POINTS = 3
"""Of what is off, as many as are told; the page has all."""


def png(card: Card) -> bytes:
    """The picture: 765 pixels wide, and up to twice as tall."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from PIL import Image  # which matplotlib requires

    rows = [*card.ours.modes, *(mode for mode in card.choices if mode.outcome != "not available")]
    heading = _heading(card)
    heights = [3.1, 1.2 + 0.27 * len(rows)]
    unit, scale = _unit(card)
    above = 0.18 * len(heading) + 0.15
    with mpl.rc_context({"font.size": LETTERS, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL}):
        figure = Figure(figsize=(INCHES, above + sum(heights)), dpi=DPI, layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=[above + heights[0], heights[1]])
        upper, lower = parts
        upper.suptitle(
            "\n".join(heading), fontsize=LETTERS, color=GOOD if card.passed else BAD, x=0.02, horizontalalignment="left"
        )
        _curves(upper.subplots(), card, unit, scale)
        left, right = lower.subplots(1, 2, sharey=True)
        _memory(left, card, rows, unit, scale)
        _time(right, card, rows)
        _legend(lower, card)
        drawn, stream = BytesIO(), BytesIO()
        figure.savefig(drawn, format="png")
    with Image.open(drawn) as image:  # half of the bytes
        image.convert("RGB").quantize(256).save(stream, format="png", optimize=True)
    return stream.getvalue()


def _heading(card: Card) -> list[str]:
    told = [f"- {line}" for line in card.off[:POINTS]]
    more = [f"- and {len(card.off) - POINTS} more"] if len(card.off) > POINTS else []
    lines = []
    for text in (title(card), verdict(card), *told, *more):
        wrapped = textwrap.wrap(text, COLUMNS, max_lines=3, placeholder=" …", break_on_hyphens=False)
        lines += wrapped if not text.startswith("- ") else [wrapped[0], *(f"   {line}" for line in wrapped[1:])]
    return lines


def _unit(card: Card) -> tuple[str, float]:
    peak = max((mode.memory.peak for build in card.builds for mode in build.modes if mode.memory), default=0)
    return ("GiB", 2**30) if peak >= 2**30 else ("MiB", 2**20)


def _number(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _curves(axes: Any, card: Card, unit: str, scale: float) -> None:
    modes = [(mode, mode.memory) for mode in card.ours.modes if mode.memory is not None]
    axes.set_title(textwrap.fill(f"Memory over a step, {card.ours.name}", TITLE), fontsize=LETTERS)
    if not modes:
        axes.text(0.5, 0.5, "no mode ran", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    resident = top = 0.0
    for mode, memory in modes:
        resident = memory.parameters + memory.buffers + memory.optimizer + memory.inputs
        curve = memory.curve
        span = (curve.times[-1] or 1.0) / 100
        times = [time / span for time in curve.times]
        total = [(resident + one) / scale for one in curve.bytes]
        top = max(top, *total)
        colour = COLOURS.get(mode.mode, OTHER)
        axes.plot(times, total, color=colour, linewidth=1.5, label=f"{name(mode.mode)}: {_number(max(total))} {unit}")
        if "backward" in curve.phases:
            begin = curve.phases["backward"] / span
            axes.axvline(begin, ymax=1 / ROOM, color=colour, linewidth=0.8, linestyle="--")
    axes.axhspan(0, resident / scale, color="#cccccc", alpha=0.6, linewidth=0)
    axes.set_ylim(0, ROOM * top)
    axes.set_xlim(0, 100)
    axes.set_xlabel(
        "% of the step's time (dashed: backward begins;\ngrey: parameters, optimizer state, inputs)", fontsize=SMALL
    )
    axes.set_ylabel(unit, fontsize=SMALL)
    axes.legend(fontsize=SMALL, loc="upper left", frameon=False, borderpad=0, labelspacing=0.2)


def _memory(axes: Any, card: Card, rows: Sequence[Mode], unit: str, scale: float) -> None:
    axes.set_yticks(range(len(rows)), [name(mode.mode) for mode in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first one above
    for label, mode in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(COLOURS.get(mode.mode, OTHER))
    peaks = [None if mode.memory is None else mode.memory.peak / scale for mode in rows]
    others = [
        [(build, mode.memory.peak / scale) for build, mode in _others(card, row.mode) if mode.memory is not None]
        for row in rows
    ]
    most = _bars(axes, rows, peaks, others, [None if peak is None else _number(peak) for peak in peaks])
    base = card.ours.mode("off")
    if base is not None and base.memory is not None:
        _limit(axes, base.memory.peak * (1 - judge.MEMORY) / scale, GOOD)
    if card.budget is not None and card.budget.bytes / scale < ROOM * most:
        _limit(axes, card.budget.bytes / scale, BAD)
    axes.set_xlim(0, ROOM * most)
    axes.set_title(f"Peak memory, {unit}", fontsize=LETTERS)


def _time(axes: Any, card: Card, rows: Sequence[Mode]) -> None:
    axes.tick_params(labelleft=False)
    compared = any(mode.time is not None and mode.time.slowdown is not None for mode in rows)
    values = [_seconds(mode, compared=compared) for mode in rows]
    others = [
        [(build, value) for build, mode in _others(card, row.mode) if (value := _seconds(mode, compared=compared))]
        for row in rows
    ]
    most = _bars(
        axes,
        rows,
        values,
        others,
        [None if one is None else f"{one:.2f}" if compared else _number(one) for one in values],
    )
    if compared:
        _limit(axes, 1 + judge.SLOWDOWN, GOOD)
        most = max(most, 1 + judge.SLOWDOWN)
    axes.set_xlim(0, ROOM * most)
    axes.set_title("Time, x of off" if compared else "Time of a step, s", fontsize=LETTERS)


def _seconds(mode: Mode, *, compared: bool) -> float | None:
    if mode.time is None:
        return None
    return mode.time.slowdown if compared else mode.time.seconds


def _bars(
    axes: Any,
    rows: Sequence[Mode],
    values: Sequence[float | None],
    others: Sequence[Sequence[tuple[Build, float]]],
    texts: Sequence[str | None],
) -> float:
    """A bar for each row, with its figure and what other builds have; the largest value of all."""
    most = 0.0
    axes.spines[["top", "right"]].set_visible(False)
    for i, (mode, value, there, text) in enumerate(zip(rows, values, others, texts, strict=True)):
        end = max([value or 0.0, *(one for _, one in there)])
        most = max(most, end)
        if value is not None:
            axes.barh(i, value, height=0.62, color=COLOURS.get(mode.mode, OTHER), alpha=0.85)
        for build, one in there:
            axes.plot(one, i, **_marker(build))
        axes.annotate(
            text or mode.outcome,
            (end, i),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
            color="black" if text else BAD,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    return most or 1.0


def _limit(axes: Any, value: float, colour: str) -> None:
    axes.axvline(value, color=colour, linewidth=1, linestyle="--")


def _others(card: Card, mode: str) -> list[tuple[Build, Mode]]:
    """What the other builds have of a mode."""
    builds = [build for build in card.builds if build.kind != card.judged]
    return [(build, found) for build in builds if (found := build.mode(mode)) is not None]


def _marker(build: Build) -> dict[str, Any]:
    return {
        "marker": MARKERS.get(build.kind, "o"),
        "color": "black",
        "markersize": 5,
        "markerfacecolor": "white",
        "linestyle": "",
        "clip_on": False,
    }


def _legend(figure: Any, card: Card) -> None:
    from matplotlib.lines import Line2D

    line: dict[str, Any] = {"linewidth": 1, "linestyle": "--"}
    handles = [Line2D([], [], color="black", linewidth=5, alpha=0.6, label=f"bars: {card.ours.name}")]
    handles += [
        Line2D([], [], label=build.name, **_marker(build)) for build in card.builds if build.kind != card.judged
    ]
    if (base := card.ours.mode("off")) is not None and base.memory is not None:
        handles.append(Line2D([], [], color=GOOD, label="accepted: left of it", **line))
    if card.budget is not None:
        handles.append(Line2D([], [], color=BAD, label=f"budget: {size(card.budget.bytes)}", **line))
    columns = 2 if all(len(str(handle.get_label())) <= LABEL for handle in handles) else 1
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=SMALL, frameon=False)
