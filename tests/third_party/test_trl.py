"""TRL's trainers: two steps end with the weights of no checkpointing, with every layer of the policy checkpointed."""

from pathlib import Path

import pytest

from tests.third_party.columns import Columns, Scenario, measure, rows, scenario
from tests.variants import VARIANTS, Variant

WORKER = Path(__file__).with_name("trl_worker.py")

POLICY = {"reentrant, hooks": [4, 4, 4], "non-reentrant, hooks": [4, 4, 4]}
POLICY_ON_STOCK = {"reentrant, hooks": [8, 8, 4], "non-reentrant, hooks": [8, 4, 4]}
BOTH = {"reentrant, hooks": [8, 8, 4], "non-reentrant, hooks": [8, 8, 4]}
BOTH_ON_STOCK = {"reentrant, hooks": [12, 12, 4], "non-reentrant, hooks": [12, 8, 4]}
"""The reference's forward runs through the policy's layers where LoRA is trained, without gradients or checkpoint."""


def expected(policy: dict[str, list[int]], both: dict[str, list[int]]) -> dict[str, Scenario]:
    return {
        "SFTTrainer": scenario(policy, calls=8),
        "SFTTrainer, LoRA": scenario(policy, calls=8),
        "DPOTrainer": scenario(policy, calls=8),
        "DPOTrainer, LoRA": scenario(both, calls=12),
    }


EXPECTED = expected(POLICY, BOTH)
ON_STOCK = expected(POLICY_ON_STOCK, BOTH_ON_STOCK)


@pytest.fixture(scope="module")
def columns() -> Columns:
    return measure(WORKER)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_weights_checkpoints_and_hooks(columns: Columns, variant: Variant, name: str) -> None:
    assert rows(columns, variant)[name] == (ON_STOCK if variant.kind == "stock" else EXPECTED)[name]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_no_scenario_is_left_out(columns: Columns, variant: Variant) -> None:
    assert rows(columns, variant).keys() == EXPECTED.keys()
