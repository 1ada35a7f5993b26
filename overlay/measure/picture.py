"""A run card as a PNG that can be read without the text: memory over the step, and time and memory, per mode."""

from io import BytesIO
from typing import Any

from overlay.measure import judge
from overlay.measure.card import Build, Card, Mode
from overlay.measure.markdown import title, verdict
from overlay.measure.settings import name_of as name

COLOURS = {"off": "#777777", "reentrant": "#d95f02", "non-reentrant": "#1b9e77"}
MARKERS = {"stock": "s", "patched": "o", "latest": "^", "here": "o"}
OTHER = "#7570b3"
MIB = 2**20


def png(card: Card) -> bytes:
    """The picture: about 1300 by 600 pixels."""
    from matplotlib.figure import Figure
    from PIL import Image  # which matplotlib requires

    figure = Figure(figsize=(13, 6), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    unit, scale = _unit(card)
    _curves(left, card, unit, scale)
    _points(right, card, unit, scale)
    figure.suptitle(
        f"{title(card)}\n{_short('; '.join([verdict(card), *card.off]))}",
        fontsize=10,
        color="#126e36" if card.passed else "#b3261e",
    )
    drawn, stream = BytesIO(), BytesIO()
    figure.savefig(drawn, format="png")
    with Image.open(drawn) as image:  # half of the bytes
        image.convert("RGB").quantize(256).save(stream, format="png", optimize=True)
    return stream.getvalue()


def _short(text: str) -> str:
    return text if len(text) <= 170 else f"{text[:167]}…"


def _unit(card: Card) -> tuple[str, float]:
    peak = max((mode.memory.peak for build in card.builds for mode in build.modes if mode.memory), default=0)
    return ("GiB", 2**30) if peak >= 2**30 else ("MiB", MIB)


def _curves(axes: Any, card: Card, unit: str, scale: float) -> None:
    modes = [(mode, mode.memory) for mode in card.ours.modes if mode.memory is not None]
    if not modes:
        axes.text(0.5, 0.5, "no mode ran", ha="center", va="center", transform=axes.transAxes)
        return
    resident = 0.0
    for mode, memory in modes:
        resident = memory.parameters + memory.buffers + memory.optimizer + memory.inputs
        curve = memory.curve
        span = (curve.times[-1] or 1.0) / 100
        times = [time / span for time in curve.times]
        total = [(resident + one) / scale for one in curve.bytes]
        colour = COLOURS.get(mode.mode, OTHER)
        axes.plot(times, total, color=colour, linewidth=1.6, label=f"{name(mode.mode)}: peak {max(total):.1f} {unit}")
        axes.axhline(max(total), color=colour, linewidth=0.7, linestyle=":")
        if "backward" in curve.phases:
            begin = curve.phases["backward"] / span
            axes.axvline(begin, color=colour, linewidth=0.7, linestyle="--")
    axes.axhspan(0, resident / scale, color="#cccccc", alpha=0.5, label="parameters, optimizer state, inputs")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 100)
    axes.set_xlabel("time in the step, % (dashed: the backward begins)")
    axes.set_ylabel(f"memory, {unit}")
    axes.set_title(f"Memory over a step, {card.ours.name}", fontsize=10)
    axes.legend(fontsize=8, loc="lower center")


def _points(axes: Any, card: Card, unit: str, scale: float) -> None:
    base = card.ours.mode("off")
    for build in card.builds:
        for mode in build.modes:
            _point(axes, build, mode, scale)
    for mode in card.choices:
        if mode.memory is not None and mode.time is not None and mode.time.slowdown is not None:
            place = (mode.time.slowdown, mode.memory.peak / scale)
            axes.plot(*place, marker="D", color=OTHER, markersize=5, linestyle="")
            axes.annotate(name(mode.mode), place, fontsize=7, xytext=(5, 4), textcoords="offset points", color=OTHER)
    if base is not None and base.memory is not None:
        limit = base.memory.peak * (1 - judge.MEMORY) / scale
        axes.axhline(limit, color="#126e36", linewidth=0.8, linestyle="--")
        axes.axvline(1 + judge.SLOWDOWN, color="#126e36", linewidth=0.8, linestyle="--")
        axes.text(
            0.99,
            limit,
            f"accepted: below, and left of x {1 + judge.SLOWDOWN:.1f} ",
            fontsize=7,
            color="#126e36",
            ha="right",
            va="top",
            transform=axes.get_yaxis_transform(),
        )
    if card.budget is not None:
        axes.axhline(card.budget.bytes / scale, color="#b3261e", linewidth=0.8, label="budget")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.15)
    axes.set_xlabel("time of a step, x of off on the same build")
    axes.set_ylabel(f"peak memory, {unit}")
    axes.set_title("Time and memory: down and left is better", fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=7, loc="best")


def _point(axes: Any, build: Build, mode: Mode, scale: float) -> None:
    if mode.memory is None or mode.time is None or mode.time.slowdown is None:
        return
    axes.plot(
        mode.time.slowdown,
        mode.memory.peak / scale,
        marker=MARKERS.get(build.kind, "o"),
        color=COLOURS.get(mode.mode, OTHER),
        markersize=9 if build.kind == "patched" else 7,
        markerfacecolor=COLOURS.get(mode.mode, OTHER) if build.kind in ("patched", "here") else "none",
        linestyle="",
        label=f"{build.name}, {name(mode.mode)}",
    )
