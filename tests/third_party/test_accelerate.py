"""accelerate's hooks, which are a `forward` on the layer, are recomputed with it, as on stock."""

from pathlib import Path

import pytest

from tests.third_party.columns import ONCE, SETUPS, TWICE, Columns, Scenario, fails, measure, rows, scenario
from tests.variants import LATEST, VARIANTS, Variant

WORKER = Path(__file__).with_name("accelerate_worker.py")
ORDERS = ("enabled before", "enabled after")


def hooked(hooks: dict[str, list[int]], before: int = 8, after: tuple[int, ...] = (8, 4, 8, 4)) -> Scenario:
    """Two of accelerate's hooks on each of two layers; a non-reentrant recompute ends before `post_forward`."""
    counts = dict(zip(SETUPS, after, strict=True))
    return {setup: {**observed, "accelerate's": [before, counts[setup]]} for setup, observed in scenario(hooks).items()}


def expected(hooks: dict[str, list[int]]) -> dict[str, Scenario]:
    return {
        "cpu_offload": scenario(hooks),
        "cpu_offload, a layer at a time": scenario(hooks),
        "dispatch_model, a layer on disk": scenario(hooks),
        "dispatch_model, a layer on disk, as a whole": scenario(hooks),
        **{f"add_hook_to_module, checkpointing {order}": hooked(hooks) for order in ORDERS},
        "remove_hook_from_submodules": hooked(hooks, 0, (0, 0, 0, 0)),
    }


EXPECTED = expected(ONCE)
ON_STOCK = expected(TWICE)

NOT_IN_PLACE = fails("RuntimeError: Tensor on device cpu is not on the expected device meta!")
ON_LATEST = {
    **EXPECTED,
    "cpu_offload, a layer at a time": NOT_IN_PLACE,
    "dispatch_model, a layer on disk, as a whole": NOT_IN_PLACE,
    **{f"add_hook_to_module, checkpointing {order}": hooked(ONCE, 4, (4, 4, 4, 4)) for order in ORDERS},
}
"""Upstream's own fix recomputes the layer without accelerate's hook, which puts the weights in their place."""


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
