"""What is done to a layer class or to a layer is as on stock before and after a layer of the class was called.

A fix fails here that leaves something on the class of a layer that was called, or that knows a class from when it was
made.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.columns import Columns, measure
from tests.variants import LATEST, PATCHED, PATCHED_LATEST, STOCK, VARIANTS, Variant

WORKER = Path(__file__).with_name("later_worker.py")
ORDERS = ("new", "used")

FUNCTION = {
    "function": True,
    "name": ["forward", "Made.forward", "__main__"],
    "docstring": "What the layer computes.",
    "signature": "(self, x: torch.Tensor) -> torch.Tensor",
    "source": "def forward(self, x: Tensor) -> Tensor:",
    "code": "forward",
    "bound": [True, True, True],
    "pickled": True,
    "members": True,
    "super": "_forward_unimplemented",
    "hasattr": True,
}
NO_FORWARD = 'Module [GradientCheckpointingLayer] is missing the required "forward" function'


def once(factor: float = 1.0) -> dict[str, Any]:
    """One checkpoint, and a forward and a recompute of the `forward` that multiplies by `factor`."""
    return {"checkpoints": 1, "calls": 2, "factor": factor}


OWN_COPY, SHARED_COPY = [once(2), True, False, True], [once(2), False, True, True]

EXPECTED: dict[str, dict[str, Any]] = {
    "class's forward replaced, and put back": {
        "read": True,
        "replaced": once(2),
        "read after": True,
        "put back": once(),
        "read at last": True,
    },
    "class's forward replaced twice, and put back in turn": {
        "first": once(2),
        "second": once(6),
        "one back": once(2),
        "both back": once(),
    },
    "class's forward replaced, as pytest's monkeypatch does and undoes it": {"replaced": once(2), "undone": once()},
    "class's forward replaced with functools.wraps of the old one, which it calls": {**once(2), "unwrapped": True},
    "class's forward deleted": {"its own": once(2), "deleted": once()},
    "mock.patch.object(Class, 'forward', wraps=layer.forward)": {**once(), "mocked": 2, "after": once()},
    "mock.patch.object(Class, 'forward', autospec=True)": {"a tensor": True, "mocked": 1, "after": once()},
    "class's forward wrapped as wrapt does it": once(2),
    "a property put in the place of the class's forward, with a setter": {
        "got": once(2),
        "set": once(3),
        "kept": True,
        "in __dict__": False,
    },
    "reads of the class": FUNCTION,
    "vars(Class)['forward'], called": {"equal": True},
    "inspect.getattr_static": {"class": True, "layer": True},
    "a class made of vars(Class)": {"clone": once(), "replaced": once(2), "read": True},
    "layer's forward replaced, read, deleted": {
        "read": True,
        "replaced": once(2),
        "the other": once(),
        "without hooks": once(),
        "directly": 2.0,
        "deleted": [once(), False],
        "deleted again": "AttributeError",
    },
    "layer's forward replaced, through object.__setattr__ and __dict__": {
        "object.__setattr__": once(2),
        "__dict__": once(3),
        "popped": once(),
    },
    "mock.patch.object(layer, 'forward', wraps=layer.forward)": {
        **once(),
        "mocked": 2,
        "left": False,
        "after": once(),
    },
    "mock.patch.object(layer, 'forward', autospec=True)": {**once(2), "mocked": 2, "left": False, "after": once()},
    "copies of a layer whose forward was replaced": {
        "copy.deepcopy": OWN_COPY,
        "pickle": OWN_COPY,
        "copy.copy": SHARED_COPY,
        "replica": SHARED_COPY,
    },
    "copies of a layer whose forward was read and set, as accelerate leaves it": {
        "copy.deepcopy": [once(), True],
        "pickle": [once(), True],
    },
    "subclasses, with a forward and without": {
        "Without": [[once(), once(), once(3)]] * 2,
        "With": [[once(2), once(2), once(3)]] * 2,
        "Below": [[once(2), once(2), once(3)]] * 2,
    },
    "class's forward replaced below a subclass": {
        "before": once(),
        "parent's replaced": once(2),
        "its own put in": once(3),
        "its own taken out": once(2),
        "read": True,
    },
    "layer's forward replaced by a method of a subclass that calls super().forward": once(2),
    "layer's forward replaced by a method of a subclass that calls super().forward, no hooks": once(2),
    "layer's forward replaced by one that calls super(Class, layer).forward": {"super": once(2), "class": 5.0},
    "an instance of GradientCheckpointingLayer itself": {
        "base": once(2),
        "class": once(),
        "no forward": NO_FORWARD,
    },
    "layer.compile(), where torch.compile is switched off": once(),
    "the class of a layer exchanged for a subclass, and back": {
        "before": once(),
        "sub": once(),
        "replaced": once(2),
        "back": once(2),
    },
}

HOLD_ON_LATEST = {
    "class's forward deleted",
    "class's forward wrapped as wrapt does it",
    "vars(Class)['forward'], called",
    "inspect.getattr_static",
    "copies of a layer whose forward was read and set, as accelerate leaves it",
    "mock.patch.object(Class, 'forward', autospec=True)",
    "layer.compile(), where torch.compile is switched off",
}


@pytest.fixture(scope="module")
def columns() -> Columns:
    return measure(WORKER, VARIANTS)


def test_no_scenario_is_left_out(columns: Columns) -> None:
    for column in columns.values():
        assert set(column) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", [*STOCK, *PATCHED, PATCHED_LATEST], ids=str)
def test_all_of_it_is_as_on_stock(columns: Columns, variant: Variant, order: str, name: str) -> None:
    assert columns[variant][name][order] == EXPECTED[name]


def test_what_holds_with_upstreams_own_fix(columns: Columns) -> None:
    column = columns[LATEST]
    assert {name for name in EXPECTED if column[name] == dict.fromkeys(ORDERS, EXPECTED[name])} == HOLD_ON_LATEST
