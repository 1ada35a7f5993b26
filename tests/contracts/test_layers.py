"""What third-party code relies on in the layers of a model holds on the patched builds, and is as on stock."""

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.columns import Columns, Observed, Pair, measure, pair
from tests.variants import LATEST, PATCHED, PATCHED_LATEST, PINNED, VARIANTS, Variant

WORKER = Path(__file__).with_name("layers_worker.py")
LAYERS = 2

SETUPS = ("reentrant", "non-reentrant", "reentrant, hooks", "non-reentrant, hooks")
WITH_HOOKS = SETUPS[2:]
WITHOUT_HOOKS = SETUPS[:2]


def step(calls: int = 2 * LAYERS, /, **more: Any) -> Observed:
    return {"calls": calls, "gradients": True, **more}


CHECKPOINTED = step()
"""A forward and a recompute a layer, and the gradients of no checkpointing, bit for bit."""

GIVEN = [
    {
        "partial": True,
        "bound method": True,
        "layer": layer,
        "in the partial": [
            0,
            ["attention_mask", "cache", "position_embeddings", "position_ids", "use_cache"],
        ],
        "beside it": [["Tensor"], []],
    }
    for layer in range(LAYERS)
]
COPIED = {**CHECKPOINTED, "original's gradients": True}
RECOVERED = {
    f"{kind} {where}": step(raised=True, direct=1, forward=True)
    for kind in ("Planned", "KeyboardInterrupt")
    for where in ("before", "function", "inside", "after", "recompute")
}
ORDERS = ("first in, first out", "first in, last out", "between the other's forward and backward")
IN_TURN = {"calls": 13, "gradients": True, "direct": 1}
"""Five forwards of the two layers, one of them left after the first layer, and the recompute of two forwards."""

THREADS = {**{order: [[2, True], [2, True]] for order in ORDERS}, "forward": True}
"""Two calls in each thread, with the right gradient, and `layer.forward` afterwards what it was before."""

MODEL_WARNING = "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`."
LAYER_WARNING = (
    "Caching is incompatible with gradient checkpointing in LlamaDecoderLayer. Setting `use_cache=False`, `cache=None`."
)
KEPT = {"checkpoints": 0, "cached": 8, "warnings": [], "direct": 1}
DROPPED = {"checkpoints": 2, "cached": 0, "warnings": [LAYER_WARNING], "direct": 1}
"""Two calls of a layer with one cache, four positions each."""

MODULES = [
    "",
    "self_attn",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    "mlp",
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "mlp.act_fn",
    "input_layernorm",
    "post_attention_layernorm",
]

ON_CLASS = (
    "class's forward replaced, calling the old",
    "class's forward replaced, not calling the old",
    "class's forward replaced, not calling the old, with functools.wraps",
)
CLOSURE = "layer's forward replaced, not calling the old, with functools.wraps"
ON_INSTANCE = (
    "layer's forward replaced, calling the old",
    "layer's forward replaced, not calling the old",
    "layer's forward replaced, by a method",
    CLOSURE,
    "layer's forward replaced, through __dict__",
    "layer's forward replaced, by itself",
    "layer's forward replaced, as accelerate does",
)
WHEN = ("before enabling", "after enabling")

EXPECTED: dict[str, Observed] = {
    # which forwards are checkpointed
    "no forward replaced": CHECKPOINTED,
    **{f"{how}, {when}": CHECKPOINTED for how in ON_CLASS for when in (*WHEN, "before the model is built")},
    **{f"{how}, {when}": CHECKPOINTED for how in ON_INSTANCE for when in WHEN},
    "eval mode": {"calls": LAYERS},
    "checkpointing disabled again": step(LAYERS),
    "flags set by hand": CHECKPOINTED,
    "flags set by hand, layer's forward replaced": CHECKPOINTED,
    "mock.patch.object(layer, 'forward', wraps=layer.forward)": step(mocked=2, left=False),
    "layer's replacement removed before the backward": CHECKPOINTED,
    "layer's replacement put in before the backward": CHECKPOINTED,
    "class's replacement removed before the backward": CHECKPOINTED,
    "two forwards, one backward": step(4 * LAYERS),
    "one layer in the model twice": CHECKPOINTED,
    "hooks that change what goes in and comes out": CHECKPOINTED,
    "one hook alone": {
        "forward_pre": ["hook", "call", "call", True],
        "forward": ["call", "hook", "call", True],
        "full_backward_pre": ["call", "hook", "call", True],
        "full_backward": ["call", "call", "hook", True],
    },
    # what the checkpoint function is given
    "checkpoint function of one's own": step(given=GIVEN),
    "checkpoint function of one's own, layer's forward replaced": step(given=GIVEN),
    "checkpoint function of one's own, class's forward replaced": step(given=GIVEN),
    "checkpoint function that makes the input of a trained layer require gradients": CHECKPOINTED,
    # reading back, copies
    "forward read back": {
        **CHECKPOINTED,
        "is what was assigned": True,
        "inside": [True] * 2,
        "after del": [True, True, False],
    },
    "class's forward read back": step(back=[True] * 4),
    "forward read in the layer's hooks": step(seen=[["not replaced", True], ["replaced", True]]),
    "class's forward replaced, forward read in the layer's hooks": step(seen=[True]),
    "forward called by the layer's hook": CHECKPOINTED,
    "forward called by the layer's hook, layer's forward replaced": CHECKPOINTED,
    "as accelerate takes its hooks out": step(kept=[True, True, False]),
    **{
        f"{how}: {what}": COPIED
        for what in ("no forward replaced", *ON_INSTANCE)
        if what != CLOSURE
        for how in ("copy.deepcopy", "pickle")
    },
    "torch.save: no forward replaced": COPIED,
    "torch.save: layer's forward replaced, not calling the old": COPIED,
    "copy.deepcopy in the layer's hook, layer's forward replaced": COPIED,
    "spawn: layer's forward replaced, not calling the old": {**CHECKPOINTED, "its own": True},
    # nothing sticks
    "after an exception": RECOVERED,
    "after an exception, layer's forward replaced": RECOVERED,
    "after an exception, class's forward replaced": RECOVERED,
    "after a recompute with and without early stop": {
        "early stop True": step(direct=1),
        "early stop False": step(direct=1),
    },
    "generators that take turns in the layers, one of them abandoned": IN_TURN,
    "generators that take turns in the layers, one of them abandoned, layer's forward replaced": IN_TURN,
    "tasks of asyncio that go on in another thread in each layer": {"calls": 8, "gradients": True, "direct": 1},
    "forward called directly": {"calls": 1, "cached": 4, "pre": 0},
    "forward called directly, layer's forward replaced": {"calls": 1, "pre": 0},
    "DataParallel replica": {"calls": 2, "given the replica": [True], "then": 2 * LAYERS},
    "DataParallel replica, layer's forward replaced": {"calls": 2, "given the replica": [True], "then": 2 * LAYERS},
    "DataParallel replicas in threads": THREADS,
    "two threads in one layer": THREADS,
    "two threads in one layer, its forward replaced": THREADS,
    "two threads in the hooks of one layer, its forward replaced": THREADS,
    "two threads in one layer, class's forward replaced": THREADS,
    "two threads in the hooks of one layer, class's forward replaced": THREADS,
    "state dict and attributes": {
        "state dict": True,
        "keys": 21,
        "added": ["_gradient_checkpointing_func", "gradient_checkpointing"],
        "buffers": [],
        "modules": MODULES,
        "repr": True,
    },
    # outputs, caches, warnings
    "output_hidden_states and output_attentions": step(hidden_states=[LAYERS + 1, True], attentions=[LAYERS, True]),
    "a model called with use_cache": step(cached=None, warnings=[MODEL_WARNING]),
    "a layer called with a cache": {"calls": 4, "cached": 0, "dropped": [True] * 4, "warnings": [LAYER_WARNING]},
    "what the layer's hooks see of a cache": {"calls": 2, "seen": [[True, False]]},
    "no_grad, a layer called with a cache": KEPT,
    "inference_mode, a layer called with a cache": KEPT,
    "no_grad, a layer called with a cache, its forward replaced": KEPT,
    "enable_grad within no_grad, a layer called with a cache": DROPPED,
    "nothing requires gradients": {"checkpoints": LAYERS},
}
"""What is observed in each set-up, apart from how often the layers' hooks run."""

ONLY = {
    "forward read in the layer's hooks": WITH_HOOKS,
    "class's forward replaced, forward read in the layer's hooks": WITH_HOOKS,
    "forward called by the layer's hook": WITH_HOOKS,
    "forward called by the layer's hook, layer's forward replaced": WITH_HOOKS,
    "copy.deepcopy in the layer's hook, layer's forward replaced": WITH_HOOKS,
    "two threads in one layer, its forward replaced": WITHOUT_HOOKS,
    "two threads in the hooks of one layer, its forward replaced": WITH_HOOKS,
    "two threads in one layer, class's forward replaced": WITHOUT_HOOKS,
    "two threads in the hooks of one layer, class's forward replaced": WITH_HOOKS,
    "what the layer's hooks see of a cache": WITH_HOOKS,
    "one hook alone": WITHOUT_HOOKS,
}
"""Where a scenario makes sense in some set-ups only."""

ON_STOCK: dict[str, dict[str, Observed]] = {
    "one hook alone": {
        "reentrant": {
            "forward_pre": ["hook", "call", "hook", "call", True],
            "forward": ["call", "hook", "call", "hook", True],
            "full_backward_pre": ["call", "call", "hook", True],
            "full_backward": ["call", "call", "hook", True],
        },
        "non-reentrant": {
            "forward_pre": ["hook", "call", "hook", "call", True],
            "forward": ["call", "hook", "call", True],
            "full_backward_pre": ["call", "hook", "call", True],
            "full_backward": ["call", "call", "hook", True],
        },
    },
    **{
        name: dict.fromkeys(SETUPS, DROPPED)
        for name in (
            "no_grad, a layer called with a cache",
            "inference_mode, a layer called with a cache",
            "no_grad, a layer called with a cache, its forward replaced",
        )
    },
}
"""Where stock differs on purpose: its hooks are part of what is recomputed; it drops a cache with nothing to gain."""

HOOKS = {"two forwards, one backward": {"pre": 2 * LAYERS, "post": 2 * LAYERS, "backward": 2 * LAYERS}}
HOOKS_ONCE = {"pre": LAYERS, "post": LAYERS, "backward": LAYERS}
NOT_RECOMPUTED = ("checkpointing disabled again",)

NO_SELF = {"error": "AttributeError: 'function' object has no attribute '__self__'"}
ON_LATEST: dict[str, Observed] = {
    "class's forward replaced, not calling the old, before enabling": step(LAYERS),
    "class's forward replaced, not calling the old, after enabling": step(LAYERS),
    "layer's forward replaced, not calling the old, before enabling": step(LAYERS),
    "layer's forward replaced, not calling the old, after enabling": step(LAYERS),
    "flags set by hand, layer's forward replaced": step(LAYERS),
    "mock.patch.object(layer, 'forward', wraps=layer.forward)": step(mocked=1, left=False),
    "checkpoint function of one's own": NO_SELF,
    "checkpoint function of one's own, layer's forward replaced": step(LAYERS, given=[]),
    "checkpoint function that makes the input of a trained layer require gradients": NO_SELF,
    "forward called directly": {"calls": 2, "cached": 0, "pre": 0},
    "what the layer's hooks see of a cache": {"calls": 2, "seen": [[False, True]]},
}
"""What upstream's own fix breaks: no checkpoint, silently; an error; a checkpoint where there was none."""

HOLD_ON_LATEST = {
    "a layer called with a cache",
    "no_grad, a layer called with a cache, its forward replaced",
    "nothing requires gradients",
    "one hook alone",
    "no forward replaced",
    "layer's forward replaced, calling the old, before enabling",
    "layer's forward replaced, calling the old, after enabling",
    "layer's forward replaced, by itself, before enabling",
    "layer's forward replaced, by itself, after enabling",
    "layer's forward replaced, as accelerate does, before enabling",
    "layer's forward replaced, as accelerate does, after enabling",
    "eval mode",
    "checkpointing disabled again",
    "flags set by hand",
    "layer's replacement put in before the backward",
    "two forwards, one backward",
    "one layer in the model twice",
    "hooks that change what goes in and comes out",
    "forward called by the layer's hook",
    "as accelerate takes its hooks out",
    "copy.deepcopy: no forward replaced",
    "pickle: no forward replaced",
    "copy.deepcopy: layer's forward replaced, calling the old",
    "pickle: layer's forward replaced, calling the old",
    "pickle: layer's forward replaced, by a method",
    "pickle: layer's forward replaced, through __dict__",
    "copy.deepcopy: layer's forward replaced, by itself",
    "pickle: layer's forward replaced, by itself",
    "copy.deepcopy: layer's forward replaced, as accelerate does",
    "pickle: layer's forward replaced, as accelerate does",
    "torch.save: no forward replaced",
    "forward called directly, layer's forward replaced",
    "DataParallel replicas in threads",
    "two threads in one layer",
    "state dict and attributes",
    "output_hidden_states and output_attentions",
    "a model called with use_cache",
}


@pytest.fixture(scope="module")
def columns() -> Columns:
    return measure(WORKER, VARIANTS)


@pytest.fixture(scope="module")
def used() -> Columns:
    """With a class of which a checkpointed layer with a hook was called before each scenario."""
    patched = [*PATCHED, PATCHED_LATEST]
    return measure(WORKER, patched, dict.fromkeys(patched, "used"))


@pytest.fixture(scope="module", params=PINNED)
def both(request: pytest.FixtureRequest, columns: Columns) -> Pair:
    return pair(columns, request.param)


def apart_from_hooks(scenario: Observed) -> dict[str, dict[str, Any]]:
    return {
        setup: {key: value for key, value in observed.items() if key != "hooks"} for setup, observed in scenario.items()
    }


def expected(name: str) -> dict[str, Observed]:
    return dict.fromkeys(ONLY.get(name, SETUPS), EXPECTED[name])


def with_hooks(column: Observed) -> dict[str, dict[str, Any]]:
    """How often hooks ran: scenario -> set-up -> kind of hook -> number."""
    counted = {
        name: {setup: one["hooks"] for setup, one in scenario.items() if "hooks" in one}
        for name, scenario in column.items()
    }
    return {name: setups for name, setups in counted.items() if setups}


def test_no_scenario_is_left_out(columns: Columns) -> None:
    for column in columns.values():
        assert set(column) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("variant", [*PATCHED, PATCHED_LATEST], ids=str)
def test_patched(columns: Columns, variant: Variant, name: str) -> None:
    assert apart_from_hooks(columns[variant][name]) == expected(name)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("variant", [*PATCHED, PATCHED_LATEST], ids=str)
def test_a_call_leaves_the_class_as_it_was(columns: Columns, used: Columns, variant: Variant, name: str) -> None:
    """Whatever was done before, in the same process, to a layer of the class."""
    assert used[variant][name] == columns[variant][name]


@pytest.mark.parametrize("name", EXPECTED)
def test_stock(both: Pair, name: str) -> None:
    stock, _ = both
    assert apart_from_hooks(stock[name]) == ON_STOCK.get(name, expected(name))


@pytest.mark.parametrize("variant", [*PATCHED, PATCHED_LATEST], ids=str)
def test_hooks_run_once(columns: Columns, variant: Variant) -> None:
    counted = with_hooks(columns[variant])
    assert len(counted) > 40
    for name, setups in counted.items():
        assert setups == dict.fromkeys(WITH_HOOKS, HOOKS.get(name, HOOKS_ONCE)), name


def test_on_stock_hooks_run_in_the_recompute_too(both: Pair) -> None:
    stock, _ = both
    counted = with_hooks(stock)
    assert len(counted) > 40
    for name, setups in counted.items():
        recomputes = 1 if name in NOT_RECOMPUTED else 2
        for hooks in setups.values():
            assert hooks["pre"] == recomputes * HOOKS.get(name, HOOKS_ONCE)["pre"], name


@pytest.mark.parametrize("name", ON_LATEST)
def test_upstreams_own_fix_breaks(columns: Columns, name: str) -> None:
    observed = apart_from_hooks(columns[LATEST][name])
    assert observed == dict.fromkeys(ONLY.get(name, SETUPS), ON_LATEST[name])


def test_what_holds_with_upstreams_own_fix(columns: Columns) -> None:
    column = columns[LATEST]
    assert {name for name in EXPECTED if apart_from_hooks(column[name]) == expected(name)} == HOLD_ON_LATEST
