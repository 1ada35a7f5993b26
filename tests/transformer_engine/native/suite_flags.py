"""Pipelines of TransformerEngine's operations leave the caller's tensors alone, and train as on stock."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import pytest

from tests.transformer_engine.native import stack

WORKER = Path(__file__).with_name("flags_worker.py")

PASSED_THROUGH = (
    "Identity",
    "MakeExtraOutput",
    "Output",
    "Dropout.eval",
    "Quantize",
    "AllReduce",
    "nn.Identity",
)
"""What hands its input on: `Dropout` in eval mode, `Quantize` without FP8, `AllReduce` within one process too."""
EXTRA_OUTPUT = ("MakeExtraOutput", "Output")
MODULES = "nn."
"""How the name of a module begins that is no operation: the fuser has no part in it."""

RAISED = "you can only change requires_grad flags of leaf variables"
NOT_SAVED = "Inference tensors cannot be saved for backward"
IN_PLACE = {"values", "version", "grad_fn"}
"""What an operation that writes into its extra input changes of it, and of the tensors that it is a view of."""


@dataclass(frozen=True)
class Call:
    """One call of a pipeline, by what was given and how."""

    pipeline: str
    kind: str
    extra: str
    trained: str
    mode: str

    @property
    def gradients(self) -> bool:
        return self.mode.startswith("grad")

    def with_gradients(self) -> "Call":
        return Call(self.pipeline, self.kind, self.extra, self.trained, "grad")


@dataclass(frozen=True)
class Results:
    """What a build did in all the calls."""

    found: dict[str, Any]

    @cached_property
    def calls(self) -> dict[Call, dict[str, Any]]:
        return {Call(*name.split(" | ")): found for name, found in self.found["calls"].items()}

    def with_gradients(self) -> dict[Call, dict[str, Any]]:
        return {call: found for call, found in self.calls.items() if call.gradients}

    def without_gradients(self) -> dict[Call, dict[str, Any]]:
        return {call: found for call, found in self.calls.items() if not call.gradients}

    def handed_on(self, reaction: str) -> set[Call]:
        """The calls without gradients in which the fuser hands on the caller's tensor, if it is of a kind to which
        PyTorch reacts so when its flag is turned off."""
        return {
            call
            for call in self.without_gradients()
            if self.found["kinds"][call.kind] == reaction and self.outputs(call).fused
        }

    def outputs(self, call: Call) -> "Outputs":
        return Outputs.of(self.found["pipelines"][call.pipeline])


@dataclass(frozen=True)
class Outputs:
    """What becomes of the input of a pipeline that is called without gradients."""

    same: list[bool]
    """For each output, the extra ones last: whether it is the very input."""
    fused: bool
    """Whether the very input is an output of the fuser, at the end of the pipeline or before."""

    @classmethod
    def of(cls, groups: list[list[str]]) -> "Outputs":
        own, fused, extra = True, False, []
        for group in groups:
            for name in operations(group):
                own = own and name.startswith(PASSED_THROUGH)
                if name.startswith(EXTRA_OUTPUT):
                    extra.append(own)
                    fused = fused or own
            fused = fused or (own and not group[0].startswith(MODULES))
        return cls([own, *extra], fused)


def operations(group: list[str]) -> Iterator[str]:
    return (name for name in group if name not in ("alone", "nested", "again"))


def aspects(changed: Iterable[str]) -> set[str]:
    return {name.rpartition(": ")[2] for name in changed}


@pytest.fixture(scope="module")
def results(release: str) -> dict[str, Results]:
    builds = {"stock": stack.stock(release), "patched": stack.patched(release)}
    for build in builds.values():
        stack.installed(build)
    with ThreadPoolExecutor() as pool:
        runs = {name: pool.submit(stack.observed, WORKER, build) for name, build in builds.items()}
    return {name: Results(run.result()) for name, run in runs.items()}


@pytest.fixture(scope="module")
def stock(results: dict[str, Results]) -> Results:
    return results["stock"]


@pytest.fixture(scope="module")
def patched(results: dict[str, Results]) -> Results:
    return results["patched"]


def test_every_call_was_made_on_both(stock: Results, patched: Results) -> None:
    assert list(stock.calls) == list(patched.calls)
    assert stock.found["pipelines"] == patched.found["pipelines"]
    assert len(stock.calls) > 30_000
    for found in (stock.found, patched.found):
        assert (found["fused"]["calls"] > 0) == found["fused"]["possible"]


def test_without_gradients_nothing_raises(patched: Results) -> None:
    assert {call: found["error"] for call, found in patched.without_gradients().items() if "error" in found} == {}


def test_without_gradients_no_flag_of_the_callers_tensors_is_changed(patched: Results) -> None:
    changed = {call: aspects(found["changed"]) - IN_PLACE for call, found in patched.without_gradients().items()}
    assert {call: names for call, names in changed.items() if names} == {}


def test_without_gradients_only_what_writes_in_place_changes_a_tensor(patched: Results, stock: Results) -> None:
    for call, found in patched.without_gradients().items():
        assert found["changed"] == stock.calls[call.with_gradients()]["changed"], call
        assert "AddExtraInput(in_place)" in call.pipeline or not found["changed"], call


def test_without_gradients_the_values_are_those_with_gradients(patched: Results, stock: Results) -> None:
    for call, found in patched.without_gradients().items():
        expected = stock.calls[call.with_gradients()]
        if "error" in expected:
            assert (call.kind, expected["error"][: len(NOT_SAVED)]) == ("inference tensor", NOT_SAVED), call
        else:
            assert found.get("values") == expected["values"], call


def test_without_gradients_the_outputs_are_those_of_stock(patched: Results, stock: Results) -> None:
    for call, found in patched.without_gradients().items():
        assert [bool(names) for names in found.get("same", ())] == patched.outputs(call).same, call
        theirs = stock.calls[call]
        if "error" not in theirs:
            assert (found["outputs"], found["same"]) == (theirs["outputs"], theirs["same"]), call
            if "requires_grad" not in aspects(theirs["changed"]):  # and a view's is that of what it is a view of
                new = [not names for names in found["same"]]
                assert list(compress(found["required"], new)) == list(compress(theirs["required"], new)), call


def test_with_gradients_everything_is_as_on_stock(patched: Results, stock: Results) -> None:
    """Values, flags and graph of the outputs, what is saved for the backward pass and whose it is, all gradients, and
    what is left of the caller's tensors."""
    different = {
        call: [name for name in found | stock.calls[call] if found.get(name) != stock.calls[call].get(name)]
        for call, found in patched.with_gradients().items()
        if found != stock.calls[call]
    }
    assert different == {}


def test_with_gradients_there_is_something_to_compare(stock: Results) -> None:
    calls = stock.with_gradients().values()
    for name in ("flags", "nodes", "saved", "gradients"):
        assert len({found[name] for found in calls if name in found}) > 5, name


def test_stock_raises_for_a_non_leaf_that_is_passed_through(stock: Results) -> None:
    errors = {call: found["error"] for call, found in stock.without_gradients().items() if "error" in found}
    assert set(errors) == stock.handed_on("raises")
    assert [error for error in errors.values() if not error.startswith(RAISED)] == []


def test_stock_stops_a_leaf_that_is_passed_through_from_training(stock: Results) -> None:
    calls = stock.without_gradients().items()
    lost = {call for call, found in calls if "requires_grad" in aspects(found["changed"])}
    assert lost == stock.handed_on("changes")
