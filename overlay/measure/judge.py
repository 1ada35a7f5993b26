"""Whether checkpointing does what teams accept it for, and where memory goes.

The acceptance: memory down by at least 30 %, a step at most 40 % slower (20 to 40 is usual), losses, gradients and
metrics within 1e-4, and every block checkpointed, whole and once.
"""

from collections.abc import Iterator, Sequence
from math import isfinite

from overlay.measure.card import Memory, Mode

MEMORY = 0.30
SLOWDOWN = 0.40
PARITY = 1e-4


def off(found: Mode, base: Mode | None) -> list[str]:
    """What is not as the acceptance asks for.

    Args:
        base: `off` of the same build; None where it was not measured.
    """
    if found.mode == "off" and found.outcome == "ok":
        return list(_finite(found))
    if found.outcome != "ok":
        return [": ".join(filter(None, (found.outcome, found.message))), *_findings(found)]
    return [*_memory(found, base), *_time(found), *parity(found, base), *_granularity(found)]


def less(found: Mode, base: Mode | None) -> float | None:
    """By what part the peak is lower; None where one of the two is not known."""
    if base is None or base.memory is None or found.memory is None:
        return None
    return 1 - found.memory.peak / base.memory.peak


def _beside(value: float, limit: float) -> str:
    """In per cent, with as many digits as tell it from the limit."""
    texts = [f"{value:.{digits}%}" for digits in range(6)]
    return next((text for digits, text in enumerate(texts) if text != f"{limit:.{digits}%}"), texts[-1])


def _memory(found: Mode, base: Mode | None) -> Iterator[str]:
    saved = less(found, base)
    if saved is not None and saved < -0.005:
        yield f"memory is up by {-saved:.0%}, expected down by at least {MEMORY:.0%}"
    elif saved is not None and saved < MEMORY:
        yield f"memory is down by {_beside(saved, MEMORY)}, expected at least {MEMORY:.0%}"


def _time(found: Mode) -> Iterator[str]:
    if found.time is not None and found.time.slowdown is not None and found.time.slowdown > 1 + SLOWDOWN:
        yield f"a step is {_beside(found.time.slowdown - 1, SLOWDOWN)} slower, expected at most {SLOWDOWN:.0%}"


def _finite(found: Mode) -> Iterator[str]:
    values = [] if found.parity is None else [*found.parity.losses, *found.parity.metrics.values()]
    wrong = [value for value in values if not isfinite(value)]
    if wrong:
        yield (
            f"a loss is {wrong[0]}, so that parity cannot be judged: take another --dtype (float32 with --autocast), "
            "--optimizer or --seed"
        )


def parity(found: Mode, base: Mode | None) -> Iterator[str]:
    """In what a mode trains otherwise than `base`, which is `off` of the same build."""
    difference = found.parity
    if difference is None or (base is not None and any(_finite(base))):
        return
    values = {"losses": difference.loss, "gradients": difference.gradient, "metrics": difference.metric}
    for name, value in values.items():
        if not value <= PARITY:
            worst = f" ({difference.worst})" if name == "gradients" and difference.worst else ""
            yield f"{name} differ from {difference.against} by {value:.1e}{worst}, expected at most {PARITY:.0e}"
    if difference.lost:
        yield f"{difference.lost} parameters have lost their gradient"


def _granularity(found: Mode) -> Iterator[str]:
    granularity = found.granularity
    if granularity is None:
        return
    if granularity.checkpointed < granularity.found:
        yield f"{granularity.checkpointed} of {granularity.found} blocks are checkpointed"
    if granularity.twice:
        yield f"{granularity.twice} blocks are checkpointed more than once, whole or in part"
    yield from _findings(found)


def _findings(found: Mode) -> Iterator[str]:
    for one in found.granularity.findings if found.granularity is not None else ():
        if one.severity != "info":
            yield f"{one.code}: {one.where}: {one.what}: {one.why}"


def advice(memory: Memory, best: float | None, *, sharded: bool = False) -> list[str]:
    """Where memory goes without checkpointing, and what would lower it.

    Args:
        best: by what part the best mode lowers the peak, where one was measured.
        sharded: the model is sharded already.
    """
    peak = memory.peak
    state = memory.parameters + memory.gradients_at_peak + memory.optimizer
    shares = {
        "parameters": memory.parameters,
        "gradients": memory.gradients_at_peak,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
    }
    largest = max(shares, key=lambda name: shares[name])
    told = [
        f"at the peak {', '.join(f'{name} {part / peak:.0%}' for name, part in shares.items())}: {largest} first",
    ]
    part = memory.activations / peak
    measured = "" if best is None else f"; it took {max(best, 0):.0%} off the peak here"
    if part < MEMORY:
        told.append(f"checkpointing cannot take {MEMORY:.0%} off: activations are {part:.0%}{measured}")
    elif best is None or best >= MEMORY:
        told.append(f"checkpointing can help: it works on the activations{measured}")
    else:
        told.append(
            f"checkpointing is of little help{measured}: what a block, the loss or the optimizer needs at once stays"
        )
    if state >= 0.4 * peak and not sharded:
        told.append(
            f"sharding over N ranks (fully_shard) divides the {state / peak:.0%} of parameters, gradients and "
            "optimizer state by N"
        )
    if memory.optimizer >= 0.25 * peak:
        told.append(
            f"another optimizer would help: its state is {memory.optimizer / peak:.0%} (8-bit AdamW keeps a quarter of "
            "it, Adafactor next to nothing)"
        )
    return told


def best_within(modes: Sequence[Mode], budget: int) -> Mode | None:
    """The fastest whose peak fits in so many bytes; None where none does."""
    fitting = [one for one in modes if one.outcome == "ok" and one.memory is not None and one.memory.peak <= budget]
    base = next((one for one in modes if one.mode == "off"), None)
    timed = [one for one in fitting if one.time is not None and not any(parity(one, base))]
    return min(timed, key=lambda one: one.time.seconds if one.time else 0.0, default=None)
