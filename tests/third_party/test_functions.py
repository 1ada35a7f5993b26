"""What trainers put in the place of parts of transformers goes on working: checkpoint functions, `__call__`, `forward`.

The worker does it by the techniques of LLaMA-Factory, axolotl and unsloth.
"""

from pathlib import Path

import pytest

from tests.third_party.columns import (
    NON_REENTRANT,
    ONCE,
    REENTRANT,
    SETUPS,
    TWICE,
    Columns,
    Scenario,
    fails,
    measure,
    rows,
    scenario,
)
from tests.variants import LATEST, VARIANTS, Variant

WORKER = Path(__file__).with_name("functions_worker.py")

FROZEN = "LLaMA-Factory, a layer frozen"
OFFLOADING = "axolotl, offloading checkpoint function"
MARKS = "axolotl, __call__ of the layers replaced"
SELECTIVE = "axolotl, a layer's hook says what is saved"
REPLACED = (
    "unsloth, class's forward replaced before the model is built",
    "unsloth, class's forward replaced after checkpointing is enabled",
)
REPLACED_TOO = "unsloth, class's forward and checkpoint function replaced"


def marks(hooks: dict[str, list[int]], offloaded: int) -> Scenario:
    """`offloaded`: how many of the inputs that a `__call__` saw the checkpoint saves where the layers have hooks."""
    same = scenario(hooks, NON_REENTRANT, marked=2, offloaded=2)
    return {setup: {**row, **({"offloaded": offloaded} if setup in hooks else {})} for setup, row in same.items()}


EXPECTED = {
    FROZEN: scenario({setup: [2, 2, 1] for setup in ONCE}, calls=3),
    OFFLOADING: scenario(ONCE, REENTRANT),
    MARKS: marks(ONCE, offloaded=0),
    SELECTIVE: scenario(ONCE, NON_REENTRANT, saved=1, recomputed=1),
    **{name: scenario(ONCE, fast=4) for name in REPLACED},
    REPLACED_TOO: scenario(ONCE, REENTRANT, fast=4),
}
"""A backward hook gives the layer other tensors for its inputs. It runs before the checkpoint, which saves those."""

ON_STOCK = {
    FROZEN: scenario({"reentrant, hooks": [3, 3, 1], "non-reentrant, hooks": [3, 2, 1]}, calls=3),
    OFFLOADING: scenario(TWICE, REENTRANT),
    MARKS: marks(TWICE, offloaded=2),
    SELECTIVE: scenario(TWICE, NON_REENTRANT, saved=1, recomputed=1),
    **{name: scenario(TWICE, fast=4) for name in REPLACED},
    REPLACED_TOO: scenario(TWICE, REENTRANT, fast=4),
}

NO_SELF = "AttributeError: 'function' object has no attribute '__self__'"
ON_LATEST = {
    **EXPECTED,
    FROZEN: fails(NO_SELF),
    OFFLOADING: fails(NO_SELF, REENTRANT),
    **{name: scenario(ONCE, SETUPS, calls=2, fast=2) for name in REPLACED},
    REPLACED_TOO: scenario(ONCE, REENTRANT, calls=2, fast=2),
}
"""Upstream's own fix: an error, or, silently, no checkpoint."""


@pytest.fixture(scope="module")
def columns() -> Columns:
    return measure(WORKER)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradients_checkpoints_and_hooks(columns: Columns, variant: Variant, name: str) -> None:
    table = ON_STOCK if variant.kind == "stock" else ON_LATEST if variant == LATEST else EXPECTED
    assert rows(columns, variant)[name] == table[name]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_no_scenario_is_left_out(columns: Columns, variant: Variant) -> None:
    assert rows(columns, variant).keys() == EXPECTED.keys()
