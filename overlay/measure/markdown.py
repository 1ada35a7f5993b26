"""A run card, to be read: Markdown."""

from collections.abc import Iterator, Sequence

from overlay.measure import judge
from overlay.measure.card import Build, Card, Mode
from overlay.measure.settings import name_of as name

MADE_BY = "Made by "
"""What stands before the command in a card's page, and tells it from a page of somebody else's."""


def size(count: float) -> str:
    """Bytes, in the unit that suits: `12.3 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def title(card: Card) -> str:
    """The model, its sizes and the machine, in a line."""
    sizes = card.subject.sizes
    settings = card.settings
    shape = f"{settings.batch} x {settings.accumulate}" if settings.accumulate > 1 else str(settings.batch)
    count = card.subject.parameters
    parts = [
        f"{count / 1e6:.1f} M parameters" if count >= 1e5 else f"{count} parameters",
        f"{sum(card.subject.blocks.values())} blocks",
        f"{card.subject.tokens} tokens" + (f" ({settings.image} px)" if "image" in sizes else ""),
        f"batch {shape}",
        settings.dtype + (f", autocast {settings.autocast}" if settings.autocast else ""),
        f"{settings.parallel} on {settings.ranks} ranks" if settings.parallel else "",
        "compiled" if settings.compile else "",
        card.machine.device,
    ]
    return f"{card.subject.name}: {', '.join(filter(None, parts))}"


def verdict(card: Card) -> str:
    """`pass`, or in how many points the judged build is not as it is accepted; what there was nothing to judge by."""
    build, base = card.ours.name, card.ours.mode("off")
    if card.passed and len(card.ours.modes) == 1:
        return f"nothing to judge: {build}, off alone"
    if card.passed and (base is None or base.outcome != "ok"):
        return f"pass, but memory, time and parity have nothing to be compared with: off did not run: {build}"
    if card.passed:
        return f"pass: {build}"
    return f"off in {len(card.off)} point{'s' * (len(card.off) > 1)}: {build}"


def document(card: Card, picture: str | None) -> str:
    """The page.

    Args:
        picture: the file name of the PNG beside it.
    """
    lines = [f"# {title(card)}", "", f"**{verdict(card)}**", ""]
    if picture:
        lines += [f"![memory over the step, and time and memory, per mode]({picture})", ""]
    lines += [f"{MADE_BY}`{card.command}`", f"on {card.made[:10]}: torch {card.machine.torch}, {_machine(card)}.", ""]
    lines += [line for build in card.builds if build.kind == "here" for line in (f"What is here: {here(build)}.", "")]
    lines += ["## Where memory goes", "", *_where(card), "## Modes", "", *_modes(card)]
    lines += ["## Parity", "", *_parity(card), "## Granularity", "", *_granularity(card), *_choices(card)]
    return "\n".join(lines).rstrip() + "\n"


def here(build: Build) -> str:
    """Which build it is that was found, not made."""
    if not build.state:
        return f"transformers {build.version}; whether stock, patched or overlaid is not known"
    return f"transformers {build.found}" + (f": the patches of {build.series}" if build.series else "")


def _machine(card: Card) -> str:
    machine = card.machine
    rounds = next((len(mode.time.rounds) for build in card.builds for mode in build.modes if mode.time), 0)
    medians = "times are of one round" if rounds == 1 else f"times are medians of {rounds} rounds"
    return (
        f"{machine.threads} of {machine.cores} cores, load {machine.load:.1f}; {medians} "
        f"({machine.clock}), all builds and modes in turn"
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(head), "|---" + "|---:" * (len(head) - 1) + "|", *map(_row, rows), ""]


def _where(card: Card) -> Iterator[str]:
    off = card.ours.mode("off")
    if off is None or off.memory is None:
        yield "Not measured: `off` did not run."
        yield ""
        return
    memory = off.memory
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients_at_peak,
        "optimizer state": memory.optimizer,
        "activations and temporaries": memory.activations,
        "buffers and inputs": memory.buffers + memory.inputs,
    }
    whole = size(memory.gradients)
    yield f"Without checkpointing, at the peak of {card.ours.name}; all gradients together are {whole}:"
    yield ""
    yield from _table(
        ["", "bytes", "share"], [[what, size(part), f"{part / memory.peak:.0%}"] for what, part in parts.items()]
    )
    for line in card.advice:
        yield f"- {line}"
    yield ""


def _modes(card: Card) -> Iterator[str]:
    head = ["", "peak", "memory", "slowdown", "samples/s", "tokens/s", "verdict"]
    rows = [
        [f"{build.name}, {name(mode.mode)}", *_cells(mode, build.mode("off")), _word(mode)]
        for build in card.builds
        for mode in build.modes
    ]
    yield from _table(head, rows)
    lines = [
        f"- {build.name}, {name(mode.mode)}: {what}"
        for build in card.builds
        for mode in build.modes
        for what in mode.off
    ]
    yield from [*lines, ""] if lines else []


def _cells(mode: Mode, base: Mode | None) -> list[str]:
    lower = judge.less(mode, base) if mode.mode != "off" else None
    slowdown = "-"
    if mode.time is not None and mode.time.slowdown is not None and mode.mode != "off":
        spread = (
            "" if mode.time.low is None or mode.time.high is None else f" ({mode.time.low:.2f} to {mode.time.high:.2f})"
        )
        slowdown = f"x {mode.time.slowdown:.2f}{spread}"
    return [
        "-" if mode.memory is None else size(mode.memory.peak),
        "-" if lower is None else "0%" if round(100 * lower) == 0 else f"{-lower:+.0%}",
        slowdown,
        "-" if mode.time is None else f"{mode.time.samples_per_second:.2f}",
        "-" if mode.time is None else f"{mode.time.tokens_per_second:.0f}",
    ]


def _word(mode: Mode) -> str:
    if mode.outcome != "ok":
        return mode.outcome
    if mode.mode == "off":
        return ""
    return "off" if mode.off else "pass"


def _parity(card: Card) -> Iterator[str]:
    yield "Against `off` of the same build, from the same weights: relative differences, 0 where bit for bit the same."
    yield ""
    rows = [
        [f"{build.name}, {name(mode.mode)}", *_differences(mode)]
        for build in card.builds
        for mode in build.modes
        if mode.mode != "off" and mode.parity is not None
    ]
    yield from _table(["", "losses", "gradients", "validation", "lost gradients"], rows)
    off = card.ours.mode("off")
    if off is not None and off.parity is not None:
        metrics = ", ".join(f"{what} {value:.4f}" for what, value in off.parity.metrics.items())
        yield f"`off` after {len(off.parity.losses)} micro-batches: {metrics}."
        yield ""


def _differences(mode: Mode) -> list[str]:
    parity = mode.parity
    assert parity is not None
    values = (parity.loss, parity.gradient, parity.metric)
    return [*("0" if value == 0 else f"{value:.1e}" for value in values), str(parity.lost)]


def _granularity(card: Card) -> Iterator[str]:
    classes = ", ".join(f"{count} {kind}" for kind, count in card.subject.blocks.items())
    granularities = [mode.granularity for build in card.builds for mode in build.modes if mode.granularity]
    run = max((one.found for one in granularities), default=0)
    part = f" ({run} of them run with these batches)" if 0 < run < sum(card.subject.blocks.values()) else ""
    yield f"Blocks of the model: {classes or 'none'}{part}. Saved for the backward, after a forward:"
    yield ""
    rows = []
    for build in card.builds:
        for mode in build.modes:
            if mode.saved is None:
                continue
            blocks = list(mode.saved.blocks.values())
            bounds = dict.fromkeys((size(min(blocks)), size(max(blocks)))) if blocks else ["-"]
            found = mode.granularity
            checkpointed = "-" if found is None else f"{found.checkpointed} of {found.found}"
            rows.append(
                [f"{build.name}, {name(mode.mode)}", checkpointed, " to ".join(bounds), size(mode.saved.outside)]
            )
    yield from _table(["", "blocks checkpointed", "in each block", "outside of blocks"], rows)
    lines = [f"- {finding} ({', '.join(where)})" for finding, where in _findings(card.builds).items()]
    yield from [*lines, ""] if lines else []


def _findings(builds: Sequence[Build]) -> dict[str, list[str]]:
    told: dict[str, list[str]] = {}
    for build in builds:
        for mode in build.modes:
            for one in mode.granularity.findings if mode.granularity else ():
                text = f"**{one.severity}** {one.code}: {one.where}: {one.what}: {one.why}: {one.fix}"
                told.setdefault(text, []).append(f"{build.name}, {name(mode.mode)}")
    return told


def _choices(card: Card) -> Iterator[str]:
    yield "## Other ways to checkpoint"
    yield ""
    if card.choices_left_out:
        yield f"Not measured: {card.choices_left_out}."
        yield ""
        return
    yield f"On {card.ours.name}; slowdown against `off`."
    yield ""
    base = card.ours.mode("off")
    every = [*card.ours.modes, *card.choices]
    ran = [mode for mode in every if mode.outcome == "ok"]
    head = ["", "peak", "memory", "slowdown", "saved after the forward"]
    rows = []
    for mode in ran:
        saved = "-" if mode.saved is None else size(mode.saved.total)
        rows.append([name(mode.mode), *_cells(mode, base)[:3], saved])
        if card.budget is not None:
            fits = mode.memory is not None and mode.memory.peak <= card.budget.bytes
            rows[-1].append("yes" if fits else "no")
    yield from _table([*head, *(["fits"] if card.budget is not None else [])], rows)
    lines = [
        f"- {': '.join(filter(None, (name(mode.mode), mode.outcome, mode.message)))}"
        for mode in every
        if mode not in ran
    ]
    lines += [f"- {name(mode.mode)}: {what}" for mode in card.choices for what in judge.parity(mode, base)]
    yield from [*lines, ""] if lines else []
    if card.budget is not None:
        best = "none of them fits" if card.budget.best is None else f"{name(card.budget.best)} is the fastest that fits"
        yield f"For {size(card.budget.bytes)}: {best}."
        yield ""
