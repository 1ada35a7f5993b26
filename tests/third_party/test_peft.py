"""PEFT on checkpointed layers: LoRA, and aLoRA, whose offsets its hooks on the layers carry into the recompute."""

from pathlib import Path

import pytest

from tests.third_party.columns import (
    NON_REENTRANT,
    ONCE,
    SETUPS,
    TWICE,
    Columns,
    Scenario,
    fails,
    measure,
    rows,
    scenario,
)
from tests.variants import VARIANTS, Variant

WORKER = Path(__file__).with_name("peft_worker.py")
ORDERS = ("enabled before", "enabled after")

MISMATCH = fails(
    "CheckpointError: torch.utils.checkpoint: Recomputed values for the following tensors have different metadata "
    "than during the forward pass.",
    NON_REENTRANT,
)
"""PEFT takes its hooks away before the recompute, on every build."""


def alora(hooks: dict[str, list[int]]) -> Scenario:
    """Six adapters have the offsets in the forward and again in the recompute, which may end before the last one's."""
    offsets = dict(zip(SETUPS, (12, 10, 12, 10), strict=True))
    same = scenario(hooks, **{"hooks left": 0})
    return {setup: {**observed, "offsets": offsets[setup]} for setup, observed in same.items()}


def expected(hooks: dict[str, list[int]]) -> dict[str, Scenario]:
    return {
        **{f"LoRA, checkpointing {order} PEFT": scenario(hooks) for order in ORDERS},
        **{f"aLoRA, checkpointing {order} PEFT": alora(hooks) for order in ORDERS},
        "aLoRA, inputs that require no gradients": MISMATCH,
    }


EXPECTED = expected(ONCE)
ON_STOCK = expected(TWICE)


@pytest.fixture(scope="module")
def columns() -> Columns:
    return measure(WORKER)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradients_checkpoints_and_hooks(columns: Columns, variant: Variant, name: str) -> None:
    assert rows(columns, variant)[name] == (ON_STOCK if variant.kind == "stock" else EXPECTED)[name]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_no_scenario_is_left_out(columns: Columns, variant: Variant) -> None:
    assert rows(columns, variant).keys() == EXPECTED.keys()
