"""Run cards that nobody measured, for the tests of what is made of them."""

from typing import Any

from overlay.measure import card, judge
from overlay.measure.settings import Settings

MIB = 2**20
BLOCKS = {"layers.0": 3 * MIB, "layers.1": 3 * MIB}


def mode(name: str, peak: int = 100, slowdown: float = 1.0, **other: Any) -> card.Mode:
    """One that is as it should be.

    Args:
        peak: MiB; 30 of them are parameters, gradients and optimizer state.
        other: values in the place of what is made here.
    """
    seconds = 0.1 * slowdown
    made: dict[str, Any] = {
        "memory": card.Memory(
            peak=peak * MIB,
            parameters=10 * MIB,
            gradients=10 * MIB,
            gradients_at_peak=0,
            optimizer=20 * MIB,
            buffers=0,
            inputs=0,
            activations=(peak - 30) * MIB,
            curve=card.Curve(times=[0.0, 0.5, 1.0], bytes=[0, (peak - 30) * MIB, 0], phases={"backward": 0.5}),
        ),
        "saved": card.Saved(blocks=BLOCKS, outside=MIB),
        "time": card.Time(
            seconds=seconds,
            rounds=[seconds] * 7,
            samples_per_second=4 / seconds,
            tokens_per_second=400 / seconds,
            slowdown=slowdown,
            low=slowdown,
            high=slowdown,
        ),
        "parity": parity(),
    }
    if name != "off":
        made["granularity"] = card.Granularity(found=2, checkpointed=2, twice=0, findings=[])
    return card.Mode(mode=name, outcome="ok", **made | other)


def parity(loss: float = 0.0, gradient: float = 0.0, metric: float = 0.0, lost: int = 0) -> card.Parity:
    return card.Parity(
        against="off",
        exact=not (loss or gradient or metric or lost),
        loss=loss,
        gradient=gradient,
        worst="layers.0.weight" if gradient else "",
        metric=metric,
        lost=lost,
        losses=[1.0, 0.9],
        metrics={"validation loss": 1.0},
    )


def finding(severity: str = "error") -> card.Found:
    return card.Found.model_validate(
        {
            "code": "in-place-operation",
            "severity": severity,
            "where": "layers.0",
            "what": "`x += 1` changes the argument `x` in place (model.py:7)",
            "why": "gradients are wrong",
            "fix": "write it out of place",
        }
    )


def made(*modes: card.Mode, **other: Any) -> card.Card:
    """A card of one build, with the judgement on it."""
    base = next((one for one in modes if one.mode == "off"), None)
    judged = [one if one.mode == "off" else one.model_copy(update={"off": judge.off(one, base)}) for one in modes]
    wrong = [f"{one.mode}: {what}" for one in judged for what in one.off]
    values: dict[str, Any] = {
        "format": 1,
        "command": "overlay bench llama",
        "made": "2026-11-30T12:00:00+00:00",
        "machine": card.Machine(
            device="CPU", device_memory=None, torch="2.13.0", cores=2, threads=1, clock="CPU time", load=0.5
        ),
        "subject": card.Subject(
            name="llama", sizes={"class": "Llama"}, parameters=10**6, tokens=100, blocks={"Layer": 2}
        ),
        "settings": Settings("llama"),
        "judged": "patched",
        "builds": [card.Build(kind="patched", release="5.22.2", version="5.22.2+overlay.2", modes=judged)],
        "choices": [],
        "choices_left_out": "--segments 0",
        "advice": [] if base is None or base.memory is None else judge.advice(base.memory, None),
        "budget": None,
        "passed": not wrong,
        "off": wrong,
    }
    return card.Card(**values | other)
