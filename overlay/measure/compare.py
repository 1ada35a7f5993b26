"""Two run cards: what got better or worse, beyond noise."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from overlay.measure.card import Card, Mode
from overlay.measure.markdown import size
from overlay.measure.settings import name_of as name

MEMORY = 0.01
"""Of a peak: what an allocator rounds up."""

TIME = 0.05
"""Of a ratio: how far apart two runs of the same build may lie, beside their quartiles."""

SPEED = 0.10
"""Of samples per second: two runs have no rounds in common, so that the clock of the machine is in it."""


WORK = (
    *("layers", "hidden", "heads", "intermediate", "vocab", "experts"),
    *("seq", "batch", "image", "dtype", "accumulate", "parallel", "ranks"),
)
"""Settings with which a step has more or less to do."""

OF_WORK = ("peak memory", "saved for the backward", "samples per second", "blocks checkpointed")
"""Figures that are then neither better nor worse, but others."""


@dataclass(frozen=True)
class Change:
    """One figure in both cards."""

    where: str
    what: str
    before: str
    after: str
    word: str

    @property
    def worse(self) -> bool:
        """Whether that is a step back."""
        return self.word == "worse"


@dataclass(frozen=True)
class Comparison:
    """`differences`: of the models and settings, with which figures may not be comparable."""

    differences: list[str]
    changes: list[Change]

    @property
    def worse(self) -> bool:
        """Whether anything got worse."""
        return any(change.worse for change in self.changes)

    def text(self) -> str:
        """A line for each change."""
        lines = [f"not the same: {line}" for line in self.differences]
        told = [change for change in self.changes if change.word != "same"]
        for one in told:
            lines.append(f"{one.word:6} {one.where}: {one.what}: {one.before} -> {one.after}")
        same = len(self.changes) - len(told)
        lines.append(
            f"{len(told)} of {len(self.changes)} figures changed beyond noise"
            if told
            else f"all {same} figures are the same within noise"
        )
        return "\n".join(lines)


def compare(before: Card, after: Card) -> Comparison:
    """What is different in the second card."""
    changes = list(_changes(before, after))
    if any(name in WORK for name in before.settings.difference(after.settings)):
        changes = [replace(one, word="other") if one.what in OF_WORK and one.word != "same" else one for one in changes]
    return Comparison(list(_differences(before, after)), changes)


def _differences(before: Card, after: Card) -> Iterator[str]:
    pairs = before.settings.difference(after.settings)
    for what, (one, other) in pairs.items():
        yield f"{what}: {one} and {other}"
    for what in ("device", "torch", "cores", "threads"):
        one, other = getattr(before.machine, what), getattr(after.machine, what)
        if one != other:
            yield f"{what}: {one} and {other}"
    for build in before.builds:
        for second in after.builds:
            if build.kind != second.kind:
                continue
            known = build.state and second.state  # an older card has none, which is no difference
            if build.version != second.version or (known and build.found != second.found):
                yield f"{build.kind}: transformers {build.found} and {second.found}"


def _changes(before: Card, after: Card) -> Iterator[Change]:
    for build in before.builds:
        second = next((one for one in after.builds if one.kind == build.kind), None)
        if second is None:
            continue
        for mode in build.modes:
            other = second.mode(mode.mode)
            if other is not None:
                yield from _mode(f"{build.kind}, {name(mode.mode)}", mode, other)
    for mode in before.choices:
        other = next((one for one in after.choices if one.mode == mode.mode), None)
        if other is not None:
            yield from _mode(f"{before.judged}, {name(mode.mode)}", mode, other)


def _mode(where: str, before: Mode, after: Mode) -> Iterator[Change]:
    if before.outcome != after.outcome:
        yield Change(where, "it", before.outcome, after.outcome, "better" if after.outcome == "ok" else "worse")
        return
    if before.memory is not None and after.memory is not None:
        one, other = before.memory.peak, after.memory.peak
        yield Change(where, "peak memory", size(one), size(other), _word(one, other, MEMORY * one))
    if before.saved is not None and after.saved is not None:
        one, other = before.saved.total, after.saved.total
        yield Change(where, "saved for the backward", size(one), size(other), _word(one, other, 0))
    yield from _time(where, before, after)
    if before.mode != "off" and before.parity is not None and after.parity is not None:
        worst = [max(one.loss, one.gradient, one.metric) for one in (before.parity, after.parity)]
        word = _word(worst[0], worst[1], max(worst) / 2)
        yield Change(where, "largest difference from off", f"{worst[0]:.1e}", f"{worst[1]:.1e}", word)
    if before.granularity is not None and after.granularity is not None:
        one, other = before.granularity.checkpointed, after.granularity.checkpointed
        yield Change(where, "blocks checkpointed", str(one), str(other), _word(-one, -other, 0))


def _time(where: str, before: Mode, after: Mode) -> Iterator[Change]:
    one, other = before.time, after.time
    if one is None or other is None:
        return
    if before.mode != "off" and one.slowdown is not None and other.slowdown is not None:
        spread = sum((time.high or 0) - (time.low or 0) for time in (one, other)) / 2
        noise = max(TIME * one.slowdown, spread)
        word = _word(one.slowdown, other.slowdown, noise)
        yield Change(where, "slowdown", f"x {one.slowdown:.2f}", f"x {other.slowdown:.2f}", word)
    elif before.mode == "off":
        rates = one.samples_per_second, other.samples_per_second
        spread = sum(_spread(time.rounds) for time in (one, other)) / 2
        word = _word(-rates[0], -rates[1], max(SPEED, spread) * rates[0])
        yield Change(where, "samples per second", f"{rates[0]:.2f}", f"{rates[1]:.2f}", word)


def _spread(rounds: list[float]) -> float:
    """How far apart the middle half of the rounds lies, of their median."""
    ordered = sorted(rounds)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / ordered[len(ordered) // 2]


def _word(before: float, after: float, noise: float) -> str:
    """Less is better."""
    if not abs(after - before) > noise:
        return "same"
    return "better" if after < before else "worse"
