"""Every layer is checkpointed once, however it comes to its `forward`, and its `forward` looks as on stock."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.columns import Columns, Observed, Pair, measure, pair
from tests.variants import LATEST, PATCHED, PATCHED_LATEST, PINNED, STOCK, VARIANTS, Variant

WORKER = Path(__file__).with_name("classes_worker.py")

FORWARD = "(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor"
SETUPS = ("reentrant", "non-reentrant", "reentrant, hooks", "non-reentrant, hooks")
SETUPS_WITH_HOOKS = SETUPS[2:]

LAMBDA = "(self, x, scale=1.0)"
NONE = "none: TypeError"


def once(signature: str = FORWARD, calls: int = 2) -> Observed:
    return {
        "checkpoints": 1,
        "calls": calls,
        "gradients": True,
        "outputs": True,
        "its own": True,
        "signature": signature,
    }


MADE: dict[str, Observed] = {
    "a forward of its own": once(),
    "a subclass without a forward": once(),
    "super().forward in a chain": once(),
    "a mixin before the layer, with super().forward": once(),
    "a mixin before the layer, with no super().forward": once(),
    "a mixin after the layer": once(),
    "an abstract base, the forward later in the order of resolution": once(),
    "an abstract method, and the forward in a subclass": once(),
    "a diamond": once(),
    "functools.wraps of the parent's forward, which is not called": once(),
    "functools.wraps of the parent's forward, which is called": once(),
    "the parent's forward under its own name": once(),
    "type() at run time": once(LAMBDA),
    "types.new_class at run time, without a forward": once(),
    "a keyword for __init_subclass__": once(),
    "a generic class": once(),
    "a static forward": once("(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor"),
    "a property as forward": once(NONE),
    "a class method as forward": once("(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor"),
    "a functools.partialmethod as forward": once(
        "(self, x: torch.Tensor, scale: float = 1.0, *, shift: float = 1.0) -> torch.Tensor"
    ),
    "an object as forward": once("(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor"),
    "the subclass's forward put there later": once(LAMBDA),
    "the parent's forward replaced later": once(LAMBDA),
    "the parent's forward replaced later, under super().forward": once(),
    "a __call__ of its own": once(),
    "a __call__ after the layer's in the order of resolution": once(),
    "a _call_impl of its own": once(),
    "a __call__ after the layer's that calls forward and no hooks": once(),
    "a __call__ after the layer's that reads forward first": once(),
    "a parametrized layer": once(),
    "the class of the layer exchanged": once(),
    "the flag on the class": once(),
    "a forward that calls itself": once(
        "(self, x: torch.Tensor, scale: float = 1.0, again: bool = True) -> torch.Tensor", calls=4
    ),
    "a forward that calls another layer's forward": once(calls=4),
    "a layer inside, called twice": once(),
    "no forward at all": {"refused": 'Module [Layer] is missing the required "forward" function'},
}
"""What is observed in each set-up. Two calls: one in the forward, one in the recompute."""

NESTED = "a layer inside, called twice"
NESTED_EXPECTED = {
    "reentrant": {**once(calls=8), "checkpoints": 3},
    "non-reentrant": {**once(calls=7), "checkpoints": 5},
}
"""The inner layer is called twice. Reentrant checkpointing runs the first forward of the outer one without gradients:
the inner one is checkpointed only where the outer one is recomputed. A non-reentrant recompute stops early."""

NESTED_ON_STOCK = NESTED_EXPECTED | {"reentrant": {**once(calls=8), "checkpoints": 5}}
"""There the inner layer is checkpointed where there is nothing to recompute, too."""

HOOKS = {"pre": 1, "post": 1}
HOOKS_NESTED = {"reentrant, hooks": {"pre": 5, "post": 5}, "non-reentrant, hooks": {"pre": 5, "post": 4}}
"""The inner layer's hooks are part of what the outer layer computes."""

WITHOUT_HOOKS = "a __call__ after the layer's that calls forward and no hooks"
HOOKS_NEVER = {"pre": 0, "post": 0}
CALL_OF_ANOTHER = {
    "a _call_impl of its own",
    "a __call__ after the layer's in the order of resolution",
    "a __call__ after the layer's that reads forward first",
}
HOOKS_AS_ON_STOCK = {"reentrant, hooks": {"pre": 2, "post": 2}, "non-reentrant, hooks": {"pre": 2, "post": 1}}
"""The hooks are run by the `__call__` of somebody else, which is checkpointed as a whole."""

HOOKS_OTHERWISE = {
    NESTED: HOOKS_NESTED,
    WITHOUT_HOOKS: dict.fromkeys(SETUPS_WITH_HOOKS, HOOKS_NEVER),
    **dict.fromkeys(CALL_OF_ANOTHER, HOOKS_AS_ON_STOCK),
}

CANNOT_BE_IMPORTED = {
    "transformers.models.higgs_audio_v2_tokenizer.modeling_higgs_audio_v2_tokenizer": (
        "ModuleNotFoundError: No module named 'torchaudio'"
    )
}
CLASSES = {"5.14.1": 496, "5.22.2": 548, "5.24.0": 569}
"""The layer classes of the package, without those of the modules that cannot be imported."""

BROKEN_ON_LATEST = {
    "an abstract base, the forward later in the order of resolution",
    "a static forward",
    "an object as forward",
    "the subclass's forward put there later",
    "the parent's forward replaced later",
    "a forward that calls itself",
    "a forward that calls another layer's forward",
    "a property as forward",
    "a class method as forward",
    "no forward at all",
}
"""No checkpoint, an error, or more than one checkpoint, with upstream's own fix."""


@pytest.fixture(scope="module")
def columns() -> Columns:
    return measure(WORKER, VARIANTS)


@pytest.fixture(scope="module", params=PINNED)
def both(request: pytest.FixtureRequest, columns: Columns) -> Pair:
    return pair(columns, request.param)


def expected(way: str, setup: str, nested: Mapping[str, Observed] = NESTED_EXPECTED) -> Observed:
    return nested[setup.removesuffix(", hooks")] if way == NESTED else MADE[way]


def without(observed: Observed, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in observed.items() if key not in keys}


def test_no_way_is_left_out(columns: Columns) -> None:
    for observed in columns.values():
        assert set(observed["made"]) == set(MADE)
        assert all(tuple(setups) == SETUPS for setups in observed["made"].values())


@pytest.mark.parametrize("way", MADE)
@pytest.mark.parametrize("variant", [*PATCHED, PATCHED_LATEST], ids=str)
def test_a_layer_is_checkpointed_once(columns: Columns, variant: Variant, way: str) -> None:
    observed = {setup: without(one, "hooks", "value") for setup, one in columns[variant]["made"][way].items()}
    assert observed == {setup: expected(way, setup) for setup in SETUPS}


@pytest.mark.parametrize("way", MADE)
@pytest.mark.parametrize("variant", STOCK, ids=str)
def test_stock(columns: Columns, variant: Variant, way: str) -> None:
    observed = {setup: without(one, "hooks", "value") for setup, one in columns[variant]["made"][way].items()}
    assert observed == {setup: expected(way, setup, NESTED_ON_STOCK) for setup in SETUPS}


@pytest.mark.parametrize("way", MADE)
def test_a_layer_computes_what_it_computes_on_stock(both: Pair, way: str) -> None:
    stock, patched = ({setup: one.get("value") for setup, one in column["made"][way].items()} for column in both)
    assert patched == stock


@pytest.mark.parametrize("way", [way for way in MADE if "refused" not in MADE[way]])
def test_hooks_run_once(both: Pair, way: str) -> None:
    stock, patched = both
    for setup in SETUPS_WITH_HOOKS:
        hooks = patched["made"][way][setup]["hooks"]
        assert hooks == HOOKS_OTHERWISE.get(way, dict.fromkeys(SETUPS_WITH_HOOKS, HOOKS))[setup]
        if way not in {WITHOUT_HOOKS, *CALL_OF_ANOTHER}:
            assert stock["made"][way][setup]["hooks"]["pre"] > hooks["pre"]


def test_upstreams_own_fix_does_not_checkpoint_each_of_them(columns: Columns) -> None:
    made = columns[LATEST]["made"]
    unlike = ("hooks", "value", "its own")  # it hands over no bound method, which test_layers.py shows
    broken = {
        way
        for way in MADE
        if any(without(made[way][setup], *unlike) != without(expected(way, setup), *unlike) for setup in SETUPS)
    }
    assert broken == BROKEN_ON_LATEST


# ---- every class of the package --------------------------------------------------------------------------------------


def test_the_same_modules_cannot_be_imported(both: Pair) -> None:
    stock, patched = both
    assert patched["refused"] == stock["refused"] == CANNOT_BE_IMPORTED


@pytest.mark.parametrize("variant", [*STOCK, *PATCHED, PATCHED_LATEST], ids=str)
def test_every_class_is_looked_at(columns: Columns, variant: Variant) -> None:
    assert len(columns[variant]["classes"]) == CLASSES[variant.release]


def test_every_class_looks_as_on_stock(both: Pair) -> None:
    """Signature, annotations, name, docstring, source, code and wrappers of `forward`; the docstring of the class."""
    stock, patched = ({name: without(one, "entered") for name, one in column["classes"].items()} for column in both)
    assert list(patched) == list(stock)
    different = {name: (stock[name], patched[name]) for name in stock if stock[name] != patched[name]}
    assert not different


@pytest.mark.parametrize("variant", [*STOCK, *PATCHED, PATCHED_LATEST], ids=str)
def test_every_class_looks_after_its_calls_as_before(columns: Columns, variant: Variant) -> None:
    """The very same function is what `Class.forward` gives, with hooks among the calls, too."""
    assert columns[variant]["not as before"] == []


def test_every_class_of_the_latest_release_has_less_of_a_wrapper(columns: Columns) -> None:
    """What upstream's own fix wraps around each `forward` is gone; what there is otherwise is as it was."""
    latest, patched = columns[LATEST]["classes"], columns[PATCHED_LATEST]["classes"]
    assert list(patched) == list(latest)
    assert {name for name in latest if patched[name]["wrappers"] >= latest[name]["wrappers"]} == set()
    unlike = ("entered", "wrappers", "code", "own")
    different = {name for name in latest if without(patched[name], *unlike) != without(latest[name], *unlike)}
    assert different == set()


@pytest.mark.parametrize("variant", [*STOCK, *PATCHED, PATCHED_LATEST], ids=str)
def test_every_class_enters_one_checkpoint_and_computes_once(columns: Columns, variant: Variant) -> None:
    """Without hooks on the layer, and with one."""
    entered = {name: one["entered"] for name, one in columns[variant]["classes"].items()}
    assert {name: one for name, one in entered.items() if one != [[1, 1], [1, 1]]} == {}
