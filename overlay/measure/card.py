"""A run card: all that a run of `overlay bench` measured, as JSON (card.schema.json).

`python -m overlay.measure.card > overlay/measure/card.schema.json` writes the schema, which is made of the models here.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from overlay.errors import OverlayError
from overlay.measure.settings import Settings

FORMAT = 1
Bytes = Annotated[int, Field(ge=0)]
Outcome = Literal["ok", "out of memory", "failed", "not available"]
"""`not available`: this release, or this model, has no such mode."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Machine(_Model):
    """Where it ran. `load`: of the last minute, at the end; `threads`: of each process;
    `clock`: what times are of."""

    device: str
    device_memory: Bytes | None
    torch: str
    cores: int
    threads: int
    clock: Literal["CPU time", "wall time"]
    load: float


class Subject(_Model):
    """The model. `tokens`: of a sample; `blocks`: how many there are of each class."""

    name: str
    sizes: dict[str, int | str]
    parameters: int
    tokens: int
    blocks: dict[str, int]


class Curve(_Model):
    """Bytes that a step allocates, over the seconds since its beginning; what is there before it is not in them."""

    times: list[float]
    bytes: list[int]
    phases: dict[str, float]


class Memory(_Model):
    """Bytes. `peak`: all that is there at the most; `activations`: the part of it that is neither parameters, buffers,
    optimizer state, inputs nor gradients."""

    peak: Bytes
    parameters: Bytes
    gradients: Bytes
    gradients_at_peak: Bytes
    optimizer: Bytes
    buffers: Bytes
    inputs: Bytes
    activations: int
    curve: Curve


class Saved(_Model):
    """Bytes that autograd holds after a forward, by block: at a checkpointed one, those at its boundary."""

    blocks: dict[str, Bytes]
    outside: Bytes

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.blocks.values()) + self.outside


class Time(_Model):
    """Medians over the rounds. `slowdown` is against `off` of the same build in the same round; `low` and `high` are
    its quartiles."""

    seconds: float
    rounds: list[float]
    samples_per_second: float
    tokens_per_second: float
    slowdown: float | None
    low: float | None
    high: float | None


class Parity(_Model):
    """Relative differences (overlay/measure/parity.py) from `against`, trained from the same weights."""

    against: str
    exact: bool
    loss: float
    gradient: float
    worst: str
    metric: float
    lost: int
    losses: list[float]
    metrics: dict[str, float]


class Found(_Model):
    """A finding of the checks (docs/checks.md)."""

    code: str
    severity: Literal["error", "warning", "info"]
    where: str
    what: str
    why: str
    fix: str


class Granularity(_Model):
    """Blocks that a forward called, those that are checkpointed as a whole, and those whose checkpoint it called more
    than once."""

    found: int
    checkpointed: int
    twice: int
    findings: list[Found]


class Mode(_Model):
    """One way to checkpoint, on one build. `off`: what is not as the acceptance asks for."""

    mode: str
    outcome: Outcome
    message: str = ""
    memory: Memory | None = None
    saved: Saved | None = None
    time: Time | None = None
    parity: Parity | None = None
    granularity: Granularity | None = None
    off: list[str] = []


class Build(_Model):
    """One build of transformers. `state`: what `overlay doctor` calls it, and `series`: the patches that it has; empty
    where that is not known, as in cards that were made before it was kept."""

    kind: str
    release: str
    version: str
    modes: list[Mode]
    state: str = ""
    series: str = ""

    def mode(self, name: str) -> Mode | None:
        """What was measured of a mode; None where it was not."""
        return next((one for one in self.modes if one.mode == name), None)

    @property
    def name(self) -> str:
        """As a table has it."""
        return f"{self.kind} {self.release or self.found}"

    @property
    def found(self) -> str:
        """The version, and of what is `here` whether it is stock, patched or overlaid."""
        return f"{self.version} ({self.state})" if self.kind == "here" and self.state else self.version


class Budget(_Model):
    """The fastest way within so many bytes; None where none fits."""

    bytes: Bytes
    best: str | None


class Card(_Model):
    """All of it. `judged`: the build that `passed` is about; `choices`: other ways to checkpoint, on that build."""

    format: Literal[1]
    command: str
    made: str
    machine: Machine
    subject: Subject
    settings: Settings
    judged: str
    builds: list[Build]
    choices: list[Mode]
    choices_left_out: str
    advice: list[str]
    budget: Budget | None
    passed: bool
    off: list[str]

    def build(self, kind: str) -> Build:
        """The column of a kind."""
        return next(one for one in self.builds if one.kind == kind)

    @property
    def ours(self) -> Build:
        """The build that is judged."""
        return self.build(self.judged)


def write(card: Card) -> str:
    """The card's JSON."""
    return card.model_dump_json(indent=1) + "\n"


def read(path: Path) -> Card:
    """The card in a file.

    Raises:
        OverlayError: it cannot be read, or is no card.
    """
    try:
        return Card.model_validate_json(path.read_bytes())
    except OSError as error:
        raise OverlayError(f"expected a run card, {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise OverlayError(
            f"{path}: expected a run card of format {FORMAT}, found at {where}: {first['msg']}: "
            "make it again with overlay bench"
        ) from None


def schema() -> str:
    """The JSON schema (2020-12) of cards."""
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Card.model_json_schema()}
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":
    print(schema(), end="")  # noqa: T201
