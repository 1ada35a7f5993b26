"""The rules about what is checkpointed, held against what a step of the very model does."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.variants import LATEST, Variant, run

WORKER = Path(__file__).with_name("blocks_worker.py")
STOCK, PATCHED = Variant("stock", "5.14.1"), Variant("patched", "5.14.1")

Found = list[tuple[str, str]]
"""Severities and codes."""

TWICE: Found = [("warning", "checkpointed-twice")]
FREE: Found = [("info", "checkpointed-twice")]
FINER: Found = [("warning", "granularity")]

EVERYWHERE: Mapping[str, Found] = {
    "not checkpointed": [],
    "own": [],
    "own, reentrant": [],
    "wrapper": [],
    "twice: wrapper around own": FREE,
    "twice: wrapper around own, reentrant": TWICE,
    "twice: wrapper inside of own": TWICE,
    "twice: wrapper around the whole model": TWICE,
    "twice: a replaced forward that calls checkpoint": TWICE,
    "twice: a replaced forward that calls checkpoint, reentrant": TWICE,
    "twice: a submodule whose forward calls checkpoint": TWICE,
    "twice: a layer within a layer": FREE,
    "twice: a layer within a layer, reentrant": TWICE,
    "twice: wrapper around the attentions, inside of own": TWICE,
    "twice: wrapper around the attentions, inside of own, reentrant": TWICE,
    "cache: own": [("info", "use-cache")],
    "cache: wrapper": [("warning", "use-cache")],
    "cache: wrapper, reentrant": [("error", "use-cache")],
    "cache: wrapper around the MLPs": FINER,
    "cache: no checkpointing": [],
    "finer: attention and MLP": FINER,
    "finer: linear modules": FINER,
    "finer: every other layer": [("info", "granularity")],
    "every other layer, the rest frozen": [],
}
HOOKS: Mapping[str, Found] = {
    "hook: counts": [("info", "hooks-in-recompute")],
    "hook: sets an attribute, and another takes it back": [("warning", "hooks-in-recompute")],
    "hook: sets an entry of a dict, and another takes it back": [("warning", "hooks-in-recompute")],
    "hook: spectral_norm on a weight of the layer, two forwards": [("warning", "hooks-in-recompute")],
    "hook: weight_norm on a weight of the layer, two forwards": [],
    "hook: on a module inside of the layer, and of frameworks": [],
    "hook: without checkpointing": [],
}
"""Where hooks run outside of the checkpoint."""


@functools.cache
def observed(variant: Variant) -> dict[str, Any]:
    measured: dict[str, Any] = run(WORKER, variant=variant)
    return measured


def row(variant: Variant, name: str) -> dict[str, Any]:
    found: dict[str, Any] = observed(variant)["scenarios"][name]
    return found


def codes(variant: Variant, name: str) -> Found:
    return [(one["severity"], one["code"]) for one in row(variant, name)["findings"]]


every_variant = pytest.mark.parametrize("variant", [STOCK, PATCHED, LATEST], ids=str)


@every_variant
def test_every_scenario_is_expected(variant: Variant) -> None:
    assert observed(variant)["scenarios"].keys() == {**EVERYWHERE, **HOOKS}.keys()


@every_variant
@pytest.mark.parametrize("name", EVERYWHERE)
def test_findings(variant: Variant, name: str) -> None:
    # 5.24 does not checkpoint a layer whose forward was replaced, and another rule says so
    assert codes(variant, name) == EVERYWHERE[name]


@pytest.mark.parametrize("variant", [PATCHED, LATEST], ids=str)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_outside_of_the_checkpoint(variant: Variant, name: str) -> None:
    assert codes(variant, name) == HOOKS[name]


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_inside_of_the_checkpoint_are_not_found(name: str) -> None:
    assert codes(STOCK, name) == []


@every_variant
def test_no_model_is_changed(variant: Variant) -> None:
    assert {name for name, same in observed(variant)["unchanged"].items() if not same} == set()


def test_twice_is_three_times() -> None:
    calls = {name: row(STOCK, name)["calls"] for name in EVERYWHERE if name.startswith("twice: ")}
    assert {name for name, count in calls.items() if count == 3} == {
        "twice: wrapper around own, reentrant",
        "twice: wrapper around the whole model",
        "twice: a replaced forward that calls checkpoint, reentrant",
        "twice: a layer within a layer, reentrant",
        "twice: wrapper around the attentions, inside of own",
        "twice: wrapper around the attentions, inside of own, reentrant",
    }
    assert set(calls.values()) == {2, 3}
    assert all(calls[name] == 2 for name, found in EVERYWHERE.items() if found == FREE)
    assert row(STOCK, "own")["calls"] == row(STOCK, "own, reentrant")["calls"] == row(STOCK, "wrapper")["calls"] == 2


@every_variant
def test_the_cache_of_a_wrapper_is_written_twice(variant: Variant) -> None:
    assert row(variant, "cache: wrapper, reentrant")["gradients"] == "wrong gradients"
    assert row(variant, "cache: wrapper, reentrant")["cached"] == row(variant, "cache: wrapper")["cached"] == 32
    assert row(variant, "cache: wrapper")["gradients"] == "right"
    assert (row(variant, "cache: own")["gradients"], row(variant, "cache: own")["cached"]) == ("right", 0)


def test_finer_keeps_more() -> None:
    kept = {name: found["bytes"] for name, found in observed(STOCK)["scenarios"].items()}
    assert kept["own"] == kept["wrapper"] == kept["twice: wrapper around own"]
    assert kept["finer: attention and MLP"] > 2 * kept["own"]
    assert kept["finer: linear modules"] == kept["not checkpointed"]
    assert kept["own"] < kept["finer: every other layer"] < kept["not checkpointed"]


def test_what_hooks_do_to_gradients() -> None:
    wrong = {
        variant: {name for name in HOOKS if row(variant, name)["gradients"] != "right"}
        for variant in (STOCK, PATCHED, LATEST)
    }
    spectral = "hook: spectral_norm on a weight of the layer, two forwards"
    taken_back = {name for name in HOOKS if "takes it back" in name}
    assert wrong == {STOCK: {spectral}, PATCHED: {spectral, *taken_back}, LATEST: wrong[PATCHED]}


@every_variant
def test_models_of_upstream_are_right(variant: Variant) -> None:
    assert {name: found for name, found in observed(variant)["upstream"].items() if found} == {}


@every_variant
def test_an_operation_in_place_in_a_replaced_forward(variant: Variant) -> None:
    [finding] = observed(variant)["replaced"]
    assert finding["severity"] == "error"
    assert "`hidden_states += 1` changes the argument `hidden_states`" in finding["what"]


@every_variant
def test_odd_modules_are_no_error(variant: Variant) -> None:
    assert observed(variant)["odd"].keys() == {
        "C function", "lambda", "no source", "compiled", "scripted", "DataParallel", "empty"
    }  # fmt: skip


def test_a_check_of_32_layers_takes_half_a_second_at_most() -> None:
    assert observed(STOCK)["seconds"] < 0.5
