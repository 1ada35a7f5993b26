"""TransformerEngine's fuser leaves the caller's tensors alone under no_grad. Needs no native library.

`docs/compatibility.md` has a table of it, and what is measured is printed where that differs.
"""

from typing import Any

import pytest

from overlay.measure.experiments import te
from overlay.measure.experiments.experiment import Row
from overlay.measure.experiments.te import changed
from tests.contracts.columns import published
from tests.transformer_engine.releases import DELIVERED, MENDED
from tests.variants import Variant, experiment

PASSED_THROUGH = ("Identity", "MakeExtraOutput")
"""The operations whose output is their input: a pipeline that begins with one hands the caller's tensor on."""

LEAVES = {"leaf", "parameter", "detached leaf"}
NON_LEAVES = {"non-leaf", "view of a leaf"}

Results = list[Row]


def results(kind: Any, release: str) -> Results:
    _, found = experiment(te.EXPERIMENT, Variant(kind, release, "transformer_engine"))
    return found


def recomputes(results: Results) -> Results:
    return [result for result in results if result["way"] == te.CHECKPOINT]


@pytest.fixture(scope="module", params=DELIVERED)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def patched(release: str) -> Results:
    return results("patched", release)


@pytest.fixture(scope="module")
def stock(release: str) -> Results:
    return results("stock", release)


@pytest.fixture(scope="module")
def mended() -> Results:
    return results("stock", MENDED)


def name(result: Row) -> tuple[str, str]:
    return result["pipeline"], result["input"]


def without_gradients(results: Results) -> Results:
    return [result for result in results if result["way"] == te.NO_GRAD]


def with_gradients(results: Results) -> Results:
    return [result for result in results if result["way"] == te.GRADIENTS]


def test_nothing_raises_under_no_grad(patched: Results) -> None:
    assert {name(result): result["error"] for result in without_gradients(patched) if "error" in result} == {}


def test_no_tensor_of_the_caller_is_changed_under_no_grad(patched: Results) -> None:
    assert [name(result) for result in without_gradients(patched) if changed(result)] == []


def test_outputs_under_no_grad_are_those_with_gradients(patched: Results) -> None:
    expected = {name(result): result["outputs"] for result in with_gradients(patched)}
    assert {name(result): result["outputs"] for result in without_gradients(patched)} == expected


def test_under_no_grad_everything_is_as_with_upstreams_own_fix(patched: Results, mended: Results) -> None:
    assert without_gradients(patched) == without_gradients(mended)


def test_with_gradients_enabled_everything_is_as_on_stock(patched: Results, stock: Results) -> None:
    assert with_gradients(patched) == with_gradients(stock)


def test_a_reentrant_checkpoint_has_the_gradients_of_none(patched: Results, mended: Results) -> None:
    assert {name(result): result["same"] for result in recomputes(patched)} == {
        (pipeline, given): True for pipeline in {name(result)[0] for result in patched} for given in te.INPUTS
    }
    assert recomputes(patched) == recomputes(mended)


def test_on_stock_a_reentrant_checkpoint_fails_or_loses_gradients(stock: Results) -> None:
    wrong = {name(result) for result in recomputes(stock) if "error" in result or not result["same"]}
    assert {pipeline for pipeline, _ in wrong} == {
        pipeline for pipeline, _ in map(name, stock) if pipeline.startswith(PASSED_THROUGH)
    }
    assert ("MakeExtraOutput, AddExtraInput", "parameter") in {
        name(result) for result in recomputes(stock) if result.get("same") is False
    }, "gradients are missing, and nothing says so"


def test_stock_raises_for_a_non_leaf_that_is_passed_through(stock: Results) -> None:
    failed = {name(result) for result in without_gradients(stock) if "requires_grad" in result.get("error", "")}
    assert failed == {
        name(result)
        for result in stock
        if result["pipeline"].startswith(PASSED_THROUGH) and result["input"] in NON_LEAVES
    }


def test_stock_stops_a_leaf_that_is_passed_through_from_training(stock: Results) -> None:
    lost = {name(result) for result in without_gradients(stock) if changed(result)}
    assert lost == {
        name(result) for result in stock if result["pipeline"].startswith(PASSED_THROUGH) and result["input"] in LEAVES
    }


def test_the_page_has_this_table() -> None:
    columns = {
        f"stock {DELIVERED[0]}": results("stock", DELIVERED[0]),
        "with this project": results("patched", DELIVERED[0]),
        MENDED: results("stock", MENDED),
    }
    shown = [
        [result for result in without_gradients(found) if result["pipeline"] in PASSED_THROUGH and is_trained(result)]
        for found in columns.values()
    ]
    lines = [f"| operation | the caller's tensor | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for row in zip(*shown, strict=True):
        lines.append(" | ".join([f"| `{row[0]['pipeline']}`", row[0]["input"], *map(outcome, row)]) + " |")
    expected = "\n".join(lines)
    assert published("requires-grad-table") == expected, f"put between its markers:\n{expected}"


def is_trained(result: Row) -> bool:
    return all(requires_grad for requires_grad, *_ in result["before"])


def outcome(result: Row) -> str:
    """What became of the caller's tensor, in words."""
    if "error" in result:
        return "RuntimeError"
    return "keeps its flag" if not changed(result) else "stops training, silently"
