"""What a worker observed with each build of transformers, beside other libraries, and how a test writes down what it
expects."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.variants import VARIANTS, Variant, installed, run

Observed = Mapping[str, Any]
Scenario = Mapping[str, Observed]
"""What is observed in each set-up (kind of checkpointing, with hooks on the layers or without)."""

Columns = Mapping[Variant, Mapping[str, Any]]

LAID_OVER = ("peft==0.21.2", "trl==1.16.0")
"""Not in the environment, because they require transformers, and would bring another."""

SETUPS = ("reentrant", "non-reentrant", "reentrant, hooks", "non-reentrant, hooks")
REENTRANT = SETUPS[::2]
NON_REENTRANT = SETUPS[1::2]

ONCE = {"reentrant, hooks": [2, 2, 2], "non-reentrant, hooks": [2, 2, 2]}
"""How many forward pre-hooks, forward hooks and backward hooks run in a forward and a backward of two layers."""

TWICE = {"reentrant, hooks": [4, 4, 2], "non-reentrant, hooks": [4, 2, 2]}
"""On stock they are part of the recompute, which ends before the forward hooks where it is non-reentrant."""


def measure(worker: Path) -> Columns:
    """What a worker observed with each variant, two at a time."""
    for variant in VARIANTS:
        installed(variant)  # builds and installs, which must not happen twice at once
    with ThreadPoolExecutor(2) as pool:
        results = {
            variant: pool.submit(run, worker, variant=variant, environment="third-party", beside=LAID_OVER)
            for variant in VARIANTS
        }
        return {variant: result.result() for variant, result in results.items()}


def scenario(
    hooks: Mapping[str, Sequence[int]], setups: Sequence[str] = SETUPS, /, calls: int = 4, **more: Any
) -> Scenario:
    """The same in all set-ups, and right, but for how often the layers' hooks run."""
    observed = {"calls": calls, "gradients": True, **more}
    return {setup: observed | ({"hooks": hooks[setup]} if setup in hooks else {}) for setup in setups}


def fails(error: str, setups: Sequence[str] = SETUPS) -> Scenario:
    return {setup: {"error": error} for setup in setups}


def rows(columns: Columns, variant: Variant) -> Mapping[str, Scenario]:
    """The scenarios of a variant, which is the one that was meant."""
    label = variant.label
    assert columns[variant]["transformers"].startswith(variant.release + label)
    found: Mapping[str, Scenario] = columns[variant]["rows"]
    return found
