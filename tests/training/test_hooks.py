"""A layer's hooks run around the checkpoint, once, as if there were none."""

from pathlib import Path
from typing import Any

import pytest

from tests.variants import PATCHED, STOCK, run

WORKER = Path(__file__).with_name("hooks_worker.py")
HOOKS = {"forward pre", "forward", "plain forward pre", "plain forward", "backward pre", "backward"}
LAYERS = 2

Calls = list[list[Any]]


@pytest.fixture(scope="module", params=PATCHED, ids=str)
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    results: dict[str, Any] = run(WORKER, variant=request.param)
    return results


@pytest.fixture(scope="module")
def patched(results: dict[str, Any]) -> dict[str, Calls]:
    return {kind: result["calls"] for kind, result in results.items()}


@pytest.fixture(scope="module", params=STOCK, ids=str)
def stock(request: pytest.FixtureRequest) -> dict[str, Calls]:
    return {kind: result["calls"] for kind, result in run(WORKER, variant=request.param).items()}


def forward_pre(calls: Calls) -> Calls:
    return [call for call in calls if call[0] == "forward pre"]


def test_every_hook_runs_once_a_layer_without_checkpointing(patched: dict[str, Calls]) -> None:
    calls = [call for call in patched["without"] if call != ["between"]]
    assert sorted(tuple(call[:2]) for call in calls) == sorted(
        (hook, layer) for hook in HOOKS for layer in range(LAYERS)
    )


def test_a_layer_with_hooks_is_checkpointed(results: dict[str, Any]) -> None:
    computed = {kind: result["computed"] for kind, result in results.items()}
    assert computed == {"without": LAYERS, "reentrant": 2 * LAYERS, "non-reentrant": 2 * LAYERS}


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_hooks_see_what_they_see_without_checkpointing(patched: dict[str, Calls], kind: str) -> None:
    assert patched[kind] == patched["without"]


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_gradients_are_enabled_while_a_layers_forward_hooks_run(patched: dict[str, Calls], kind: str) -> None:
    assert [call[2] for call in patched[kind] if "forward" in call[0]] == [True] * 4 * LAYERS


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_on_stock_they_run_in_the_recompute_too(stock: dict[str, Calls], kind: str) -> None:
    assert len(forward_pre(stock["without"])) == LAYERS
    assert len(forward_pre(stock[kind])) == 2 * LAYERS


def test_on_stock_gradients_are_off_in_a_reentrant_forward(stock: dict[str, Calls]) -> None:
    assert [call[2] for call in forward_pre(stock["reentrant"])] == [False] * LAYERS + [True] * LAYERS
