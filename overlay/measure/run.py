"""One run: every build and mode is asked in turn, and a card is made of the answers."""

import contextlib
import datetime
import os
import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from overlay.checks.subject import places
from overlay.errors import OverlayError
from overlay.measure import card, judge
from overlay.measure.builds import Build
from overlay.measure.markdown import here, size
from overlay.measure.settings import Settings, name_of
from overlay.measure.turns import Turn, TurnError, rounds, turn
from overlay.progress import say

WORKER = Path(__file__).with_name("bench_worker.py")
TURN = 0.25
"""Seconds that a turn is to take at least: a shorter step is done several times in it."""

CONTEXT = 2**29
"""Bytes of a GPU that a process takes for itself."""

MOST = 2**20
"""Samples in a batch."""

_MEMORY = re.compile(
    r"out ?of ?memory|can't allocate memory|not enough memory|MemoryError|bad_alloc|ALLOC_FAILED", re.IGNORECASE
)
_BROKEN = re.compile("CUDA error|device-side assert|illegal memory access")
"""After these a process can do nothing more with its GPU."""

_IN_PLACE = "modified by an inplace operation"

_NAMED = 3
"""Places that a message names before it, at most."""

_LINE = 300
"""Characters of a message that a card keeps."""


class Worker:
    """A build's process, which is started again after it has ended, so that one mode cannot take the others with it."""

    def __init__(self, build: Build, settings: Settings, patience: float) -> None:
        self.build = build
        self.settings = settings
        self.patience = patience
        self._stack = ExitStack()
        self._turn: Turn | None = None
        self.starts = 0

    def start(self) -> None:
        """Starts the process, if it does not run."""
        if self._turn is not None:
            return
        self.starts += 1
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="overlay-bench-"))
        told = Path(folder, "settings.json")
        told.write_text(self.settings.json(), encoding="utf-8")
        command = [self.build.interpreter, "-P", str(WORKER), str(told)]
        variables = self.build.variables(self.settings.threads)
        self._turn = self._stack.enter_context(turn(command, variables, self.patience))

    def stop(self) -> None:
        """Ends the process, and all that it has started."""
        self._turn = None
        self._stack.close()

    def ask(self, *question: object) -> Any:
        """The answer.

        Raises:
            TurnError: there is none. The process is gone where it ended or took too long.
        """
        self.start()
        assert self._turn is not None
        try:
            return self._turn.ask(*question)
        except TurnError as error:
            if str(error).startswith("the worker ") or _BROKEN.search(str(error)):
                self.stop()
            raise

    def release(self) -> None:
        """Has a running process give back the memory of the GPU that it does not need between steps."""
        if self.settings.device == "cuda" and self._turn is not None:
            with contextlib.suppress(TurnError):  # it has ended, which the next question will tell
                self.ask("release")


@dataclass
class Column:
    """One mode on one build, as it is measured."""

    worker: Worker
    mode: str
    outcome: card.Outcome = "ok"
    message: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, str]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    against: str = ""
    trained: int = 0
    """Which process of the worker has trained this mode last, to compare others with."""

    def __str__(self) -> str:
        return f"{self.worker.build}, {name_of(self.mode)}"

    def ask(self, *question: object) -> Any:
        """The answer, or None where there is none: then the mode has failed, and is not asked again."""
        if self.outcome != "ok":
            return None
        try:
            return self.worker.ask(*question)
        except TurnError as error:
            self.outcome, self.message = outcome(str(error))
            if _IN_PLACE in str(error):
                self._name_places()
            say(f"{self}: {self.outcome}: {self.message}")
            return None

    def _name_places(self) -> None:
        """Finds what the message is about."""
        with contextlib.suppress(TurnError):
            found = self.worker.ask("overwritten")
            self.findings += found
            if self.mode == "off":  # the others tell their findings
                named = [f"{one['where'] or 'the model'}: {one['what']}" for one in found[:_NAMED]]
                self.message = ": ".join([*named, self.message])


def outcome(error: str) -> tuple[card.Outcome, str]:
    """What an error of a worker means, and its message in a line."""
    lines = [line for line in error.splitlines() if line.strip()]
    if error.startswith("the worker was killed"):
        return "out of memory", "it was killed, as the kernel does for want of memory"
    ended = error.startswith("the worker ended")
    message = lines[-1].strip() if ended and len(lines) > 1 else lines[0].strip()
    message = message.removeprefix("RankError: ")
    if _MEMORY.search(error):
        return "out of memory", message[:_LINE]
    name, _, said = message.partition(": ")
    if name in ("ModeError", "NoSegmentError"):
        return "not available", said[:_LINE]
    return "failed", message[:_LINE]


@dataclass(frozen=True)
class Plan:
    """What is asked.

    Attributes:
        modes: on every build; `off` first, where it is among them.
        choices: on the judged build alone; and why there are none, where there are none.
        rounds: of timing.
        patience: seconds that an answer may take.
    """

    settings: Settings
    builds: Sequence[Build]
    modes: Sequence[str]
    choices: Sequence[str]
    choices_left_out: str
    rounds: int
    budget: int | None
    command: str
    patience: float = 900

    @property
    def judged(self) -> Build:
        """The patched build, or the only one."""
        return next((one for one in self.builds if one.kind == "patched"), self.builds[0])


def measure(plan: Plan) -> card.Card:
    """Runs the plan.

    Raises:
        OverlayError: a build cannot make the model, or it does not run at all.
    """
    with _workers(plan) as workers:
        about = {kind: _about(worker) for kind, worker in workers.items()}
        if "here" in about:
            say(f"what is here: {here(_build(workers['here'], about['here'], []))}")
        judged = plan.judged.kind
        columns = [Column(worker, mode) for worker in workers.values() for mode in plan.modes]
        longest = int(about[judged]["longest"])
        others = [Column(workers[judged], mode) for mode in plan.choices if _size(mode) <= longest]
        for mode in (mode for mode in plan.choices if _size(mode) > longest):
            say(f"{plan.judged}, {name_of(mode)}: left out: at most {longest} blocks follow one another")
        bases = {id(worker): _base(worker, columns) for worker in workers.values()}
        # A build's modes follow one another: on a GPU the builds hand its memory to each other
        every = [one for worker in workers.values() for one in (*columns, *others) if one.worker is worker]
        for column in _in_turn(every):
            _look(column, bases[id(column.worker)])
        if all(column.outcome in ("failed", "not available") for column in columns):
            raise OverlayError(f"expected a mode that runs, found none: {columns[0]}: {columns[0].message}")
        _time(every, plan.rounds)
        return _card(plan, about, workers, columns, others)


@contextmanager
def _workers(plan: Plan) -> Iterator[dict[str, Worker]]:
    workers = {build.kind: Worker(build, plan.settings, plan.patience) for build in plan.builds}
    with ExitStack() as stack:
        for worker in workers.values():
            stack.callback(worker.stop)
        for worker in workers.values():
            worker.start()  # they import at the same time
        yield dict(workers)


def _about(worker: Worker) -> Mapping[str, Any]:
    say(f"{worker.build}: making the model")
    try:
        answer: Mapping[str, Any] = worker.ask("about")
    except TurnError as error:
        raise _no_model(worker, error) from error
    return answer


def _no_model(worker: Worker, error: TurnError) -> OverlayError:
    _, message = outcome(str(error))
    if "No module named" in message:
        return OverlayError(
            f"expected torch and transformers for {worker.build.interpreter}, found {message}: with --here, run this "
            "by the Python that trains"
        )
    return OverlayError(message.removeprefix("SizeError: "))


def _in_turn(columns: Sequence[Column]) -> Iterator[Column]:
    """Each column, once its build has the device."""
    last: Column | None = None
    for column in columns:
        if last is not None and last.worker is not column.worker:
            last.worker.release()
        yield column
        last = column
    if last is not None:
        last.worker.release()


def _size(mode: str) -> int:
    """How many blocks in a row a mode is about; 1 where it is about each."""
    _, _, number = mode.partition(":")
    return int(number or 1)


def _base(worker: Worker, columns: Sequence[Column]) -> Column:
    """What the other modes of a build are compared with."""
    own = [column for column in columns if column.worker is worker]
    return next((column for column in own if column.mode == "off"), own[0])


def _look(column: Column, base: Column) -> None:
    """All but time."""
    say(f"{column}: parity, memory and granularity")
    column.against = base.mode
    if column.mode != "off":
        # First: it names what makes the others fail
        column.findings = [*(column.ask("findings", column.mode) or []), *base.findings]
    if column is not base and base.outcome != "ok":
        say(f"{column}: no parity, as there is none of {base.mode} ({base.outcome})")
    else:
        column.worker.start()
        if column is not base and base.trained != column.worker.starts:
            base.ask("parity", base.mode, True)  # a new process knows nothing of it
        base.trained = column.worker.starts
        column.found["parity"] = column.ask("parity", column.mode, column is base)
    for what in ("memory", "saved"):
        column.found[what] = column.ask(what, column.mode)


def _time(columns: Sequence[Column], count: int) -> None:
    running = [column for column in columns if column.outcome == "ok"]
    steps = 1
    for column in running[:1]:
        once = column.ask("seconds", column.mode, 1)
        if once is not None:
            steps = max(1, min(50, round(TURN / max(once, 1e-6))))
    for i, order in enumerate(rounds(count, running)):
        say(f"time: round {i + 1} of {count}")
        for column in _in_turn(order):
            seconds = column.ask("seconds", column.mode, steps)
            if seconds is not None:
                column.seconds.append(seconds)


def _card(
    plan: Plan,
    about: Mapping[str, Mapping[str, Any]],
    workers: Mapping[str, Worker],
    columns: Sequence[Column],
    others: Sequence[Column],
) -> card.Card:
    settings, judged = plan.settings, plan.judged.kind
    bases = {kind: _base(worker, columns) for kind, worker in workers.items()}
    made = {
        kind: [_mode(column, bases[kind], settings, about[kind]) for column in columns if column.worker is worker]
        for kind, worker in workers.items()
    }
    choices = [_mode(column, bases[judged], settings, about[judged]) for column in others]
    builds = [
        _build(worker, about[kind], [_judged(mode, made[kind]) for mode in made[kind]])
        for kind, worker in workers.items()
    ]
    ours = next(one for one in builds if one.kind == judged)
    wrong = [f"{mode.mode}: {what}" for mode in ours.modes for what in mode.off]
    every = [*ours.modes, *choices]
    best = None if plan.budget is None else judge.best_within(every, plan.budget)
    told = about[judged]
    blocks = list(told["blocks"].values())
    return card.Card(
        format=1,
        command=plan.command,
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=card.Machine(
            device=told["device"],
            device_memory=told["device memory"],
            torch=told["torch"],
            cores=os.cpu_count() or 1,
            threads=told["threads"],
            clock=told["clock"],
            load=round(os.getloadavg()[0], 2),
        ),
        subject=card.Subject(
            name=Path(settings.model).name,
            sizes=told["sizes"],
            parameters=told["parameters"],
            tokens=told["tokens"],
            blocks={name: blocks.count(name) for name in dict.fromkeys(blocks)},
        ),
        settings=settings,
        judged=judged,
        builds=builds,
        choices=choices,
        choices_left_out=plan.choices_left_out,
        advice=_advice(ours, sharded=settings.parallel == "fsdp"),
        budget=None
        if plan.budget is None
        else card.Budget(bytes=plan.budget, best=None if best is None else best.mode),
        passed=not wrong,
        off=wrong,
    )


def _build(worker: Worker, about: Mapping[str, Any], modes: list[card.Mode]) -> card.Build:
    found = {name: about[name] for name in ("state", "series")}
    return card.Build(
        kind=worker.build.kind, release=worker.build.release, version=about["transformers"], modes=modes, **found
    )


def _advice(ours: card.Build, *, sharded: bool) -> list[str]:
    off = ours.mode("off")
    if off is None or off.memory is None:
        return []
    lowered = [part for mode in ours.modes if mode is not off and (part := judge.less(mode, off)) is not None]
    return judge.advice(off.memory, max(lowered, default=None), sharded=sharded)


def _judged(mode: card.Mode, modes: Sequence[card.Mode]) -> card.Mode:
    base = next((one for one in modes if one.mode == "off"), None)
    # That `off` does not fit is no fault where something else does
    wrong = [] if mode.mode == "off" and mode.outcome == "out of memory" else judge.off(mode, base)
    return mode.model_copy(update={"off": wrong})


def _mode(column: Column, base: Column, settings: Settings, about: Mapping[str, Any]) -> card.Mode:
    found = column.found
    made: dict[str, Any] = {}
    if (memory := found.get("memory")) is not None:
        made["memory"] = _memory(memory)
    if (saved := found.get("saved")) is not None:
        made["saved"] = card.Saved(blocks=saved["blocks"], outside=saved["outside"])
    if column.mode != "off" and (saved is not None or column.findings):
        checkpointed = {} if saved is None else saved["checkpointed"]
        made["granularity"] = card.Granularity(
            found=len(about["blocks"]) if saved is None else saved["called"],
            checkpointed=len(checkpointed),
            twice=sum(count > 1 for count in checkpointed.values()),
            findings=[
                *(card.Found.model_validate(finding) for finding in _unique(column.findings)),
                *in_part({} if saved is None else saved["parts"]),
            ],
        )
    if (parity := found.get("parity")) is not None and column is not base:
        made["parity"] = card.Parity(against=column.against, **parity)
    elif parity is not None:
        made["parity"] = card.Parity(against=column.mode, **parity)
    if column.outcome == "ok" and column.seconds:
        made["time"] = _times(column, base, settings, int(about["tokens"]))
    return card.Mode(mode=column.mode, outcome=column.outcome, message=column.message, **made)


def in_part(parts: Mapping[str, Sequence[str]]) -> Iterator[card.Found]:
    """Blocks in which something else than the block is checkpointed (docs/checks.md#granularity)."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for block, names in parts.items():
        alike.setdefault(tuple(names), []).append(block)
    for names, found in alike.items():
        yield card.Found(
            code="granularity",
            severity="warning",
            where=places(found),
            what=f"the backward computes {places(names)} of it again, not the block",
            why="what goes in and out of each part is kept: time is lost for little memory",
            fix="put one checkpoint around the whole block",
        )


def _unique(findings: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    return list({tuple(one.items()): one for one in findings}.values())


def _memory(found: Mapping[str, Any]) -> card.Memory:
    resident, curve = found["resident"], found["curve"]
    at_peak = curve["gradients_at_peak"]
    kept = {name: curve[name] for name in ("times", "bytes", "phases")}
    return card.Memory(
        peak=found["peak"],
        gradients=found["gradients"],
        gradients_at_peak=at_peak,
        activations=found["peak"] - sum(resident.values()) - at_peak,
        curve=card.Curve(**kept),
        **resident,
    )


def _times(column: Column, base: Column, settings: Settings, tokens: int) -> card.Time:
    seconds = statistics.median(column.seconds)
    samples = settings.batch * settings.accumulate * settings.ranks
    slowdown = low = high = None
    if base.mode == "off" and len(base.seconds) == len(column.seconds):
        ratios = [one / other for one, other in zip(column.seconds, base.seconds, strict=True)]
        slowdown = statistics.median(ratios)
        with contextlib.suppress(statistics.StatisticsError):  # one round alone
            low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return card.Time(
        seconds=seconds,
        rounds=[round(one, 6) for one in column.seconds],
        samples_per_second=samples / seconds,
        tokens_per_second=samples * tokens / seconds,
        slowdown=slowdown,
        low=low,
        high=high,
    )


def fill(plan: Plan) -> Settings:
    """The settings with the batch that fills the budget, or the GPU, without checkpointing.

    Memory is measured while the batch doubles: a small one may be hidden behind what the optimizer needs. The last part
    follows from the last two. On a GPU each build keeps its parameters and the optimizer's state there, and a tenth is
    left free.

    Raises:
        OverlayError: not even one sample fits.
    """
    worker = Worker(plan.judged, replace(plan.settings, batch=1), plan.patience)
    try:
        about = _about(worker)
        say(f"{plan.judged}: memory of larger and larger batches")
        first = worker.ask("memory", "off")
        room, peak = _room(plan, about, first), int(first["peak"])
        if peak > room:
            raise OverlayError(
                f"expected one sample within {size(room)}, found {size(peak)}: take a smaller model or --seq"
            )
        batch = _fill(worker, peak, room)
    except TurnError as error:
        raise _no_model(worker, error) from error
    finally:
        worker.stop()
    say(f"a batch of {batch} fills {size(room)}")
    return replace(plan.settings, batch=batch)


def _room(plan: Plan, about: Mapping[str, Any], one: Mapping[str, Any]) -> int:
    if plan.budget is not None:
        return plan.budget
    others = (sum(one["resident"].values()) + CONTEXT) * (len(plan.builds) - 1)
    return int(0.9 * about["free"] - others)


def _fill(worker: Worker, peak: int, room: int) -> int:
    batch = each = 1
    while batch < MOST:
        try:
            worker.ask("enlarge", 2)
            larger = int(worker.ask("memory", "off")["peak"])
        except TurnError as error:
            if outcome(str(error))[0] != "out of memory":
                raise
            return batch
        each = max(1, (larger - peak) // batch)
        if larger > room:
            return batch + (room - peak) // each
        batch, peak = 2 * batch, larger
        if peak + batch * each > room and each > 1:  # twice as many would not fit
            return batch + (room - peak) // each
    return batch
