"""Where somebody has replaced the call of `nn.Module` itself, a layer is called and checkpointed as on stock, and a
warning says so.

A recompute is refused all the same whose gradients FSDP2 would lose for a submodule that is sharded by itself.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.columns import Columns, Observed, measure
from tests.variants import PATCHED, PATCHED_LATEST, STOCK, Variant

WORKER = Path(__file__).with_name("foreign_call_worker.py")
ROUNDING = 1e-12
LOSS = 0.03

ORDERS = ("before", "after")
"""Replaced before `transformers.modeling_layers` is imported, or after that."""
NOTHING, TOGETHER = "nothing", "__call__ and _wrapped_call_impl"
REPLACED = ("__call__", "_call_impl")

HOOKS_INSIDE = {
    "reentrant": [0, 0],
    "reentrant, hooks": [4, 4],
    "non-reentrant": [0, 0],
    "non-reentrant, hooks": [4, 2],
}
"""How often the pre-hooks and hooks of two layers run in a step; a non-reentrant recompute stops before the latter."""
HOOKS_OUTSIDE = {setup: [2, 2] if "hooks" in setup else [0, 0] for setup in HOOKS_INSIDE}

LOST = {"reentrant, mlp sharded", "reentrant, layer sharded", "reentrant, mlp and layer sharded"}
SHARDED = {*LOST, *(setup.replace("reentrant", "non-reentrant") for setup in LOST)}

ON_PATCHED = [*PATCHED, PATCHED_LATEST]
VARIANTS = [STOCK[0], *ON_PATCHED]


@pytest.fixture(scope="module")
def columns() -> Columns:
    return measure(WORKER, VARIANTS)


def called(hooks: list[int], replacement: int, warnings: list[str]) -> dict[str, Any]:
    """Two layers, each checkpointed and computed again once, with the gradients of no checkpointing."""
    return {
        "right": True,
        "checkpoints": [True, True],
        "computed": [2, 2],
        "replacement": [replacement, replacement],
        "hooks": hooks,
        "warnings": warnings,
    }


def warning(layer: str) -> str:
    return (
        f"The hooks of {layer} run inside of its checkpoint, because its call is not the known one of `nn.Module`. "
        "With FSDP2 and `use_reentrant=True` this loses gradients: use non-reentrant checkpointing."
    )


AS_ON_STOCK = {setup: called(hooks, 2, []) for setup, hooks in HOOKS_INSIDE.items()}
AND_SAID = {
    setup: seen | {"warnings": [warning("Layer")] if "hooks" in setup else []} for setup, seen in AS_ON_STOCK.items()
}


def of_called(observed: Observed) -> Observed:
    return {setup: observed[setup] for setup in HOOKS_INSIDE}


def word(error: float | str) -> str:
    if isinstance(error, str):
        return error
    return "right" if error <= ROUNDING else "lost" if error > LOSS else str(error)


def of_sharded(observed: Observed) -> dict[str, tuple[str, list[str]]]:
    return {setup: (word(observed[setup]["error"]), observed[setup]["warnings"]) for setup in SHARDED}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_nothing_is_left_out(columns: Columns, variant: Variant) -> None:
    names = (NOTHING, *REPLACED, TOGETHER)
    assert set(columns[variant]) == {f"{name}, {order}" for name in names for order in ORDERS}
    assert all(set(observed) == {*HOOKS_INSIDE, *SHARDED} for observed in columns[variant].values())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_where_nothing_is_replaced_there_is_no_warning(columns: Columns, variant: Variant) -> None:
    hooks = HOOKS_OUTSIDE if variant.kind == "patched" else HOOKS_INSIDE
    for order in ORDERS:
        observed = columns[variant][f"{NOTHING}, {order}"]
        assert of_called(observed) == {setup: called(hooks[setup], 0, []) for setup in hooks}


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", ON_PATCHED, ids=str)
def test_layers_with_hooks_are_called_as_on_stock_and_it_is_said_once(
    columns: Columns, variant: Variant, order: str, name: str
) -> None:
    assert of_called(columns[variant][f"{name}, {order}"]) == AND_SAID


@pytest.mark.xfail(
    strict=True, reason="`__call__` is taken for that of `nn.Module` where `_wrapped_call_impl` is the same"
)
def test_a_replacement_that_has_both_names_is_called_for_layers_with_hooks(columns: Columns) -> None:
    for variant in ON_PATCHED:
        for order in ORDERS:
            assert of_called(columns[variant][f"{TOGETHER}, {order}"]) == AND_SAID


@pytest.mark.parametrize("name", [*REPLACED, TOGETHER])
@pytest.mark.parametrize("order", ORDERS)
def test_stock(columns: Columns, order: str, name: str) -> None:
    observed = columns[STOCK[0]][f"{name}, {order}"]
    assert of_called(observed) == AS_ON_STOCK
    assert of_sharded(observed) == {setup: ("lost" if setup in LOST else "right", []) for setup in SHARDED}


@pytest.mark.parametrize("name", [NOTHING, *REPLACED])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", ON_PATCHED, ids=str)
def test_what_is_sharded_within_a_layer_is_refused_and_lost_gradients_of_a_layer_are_warned_of(
    columns: Columns, variant: Variant, order: str, name: str
) -> None:
    errors = dict.fromkeys(SHARDED, "right") | {setup: "refused" for setup in LOST if "mlp" in setup}
    warned = set()
    if name != NOTHING:
        errors["reentrant, layer sharded"] = "lost"
        warned = {setup for setup in SHARDED if "layer" in setup}
    assert of_sharded(columns[variant][f"{name}, {order}"]) == {
        setup: (errors[setup], [warning("FSDPLayer")] if setup in warned else []) for setup in SHARDED
    }
