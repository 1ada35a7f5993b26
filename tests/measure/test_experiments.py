"""What is right in each experiment, of rows as their workers put them."""

from typing import Any

import pytest

from overlay.measure.experiments import contracts, fsdp2, te, zero3
from overlay.measure.experiments.table import Cell, Line


def cell(lines: list[Line]) -> Cell:
    (line,) = lines
    return line.cells["patched"]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("case", [*sorted(fsdp2.REFUSED), "2 forwards"])
def test_a_refusal_is_right_where_every_release_would_lose_gradients(case: str, reentrant: bool) -> None:
    row = {"case": case, "reentrant": reentrant, "error": "refused", "said": "no"}
    found = cell(fsdp2.lines({"patched": [row]}))
    assert (found.text, found.said) == ("refused", "no")
    assert found.right is (reentrant and case in fsdp2.REFUSED)


def test_another_error_is_named_with_its_first_line() -> None:
    row = {"case": "1 forward", "reentrant": True, "error": "ValueError", "said": "\n  no such dim\nmore"}
    found = cell(fsdp2.lines({"patched": [row]}))
    assert (found.text, found.right, found.note) == ("ValueError", False, "ValueError: no such dim")


@pytest.mark.parametrize(
    ("error", "checkpointed", "text"),
    [(0.0, True, "0.000"), (0.0, False, "no checkpoint"), (0.5, False, "0.500"), (float("nan"), True, "nan")],
    ids=["right", "right for nothing", "wrong", "NaN"],
)
def test_gradients_are_right_where_they_are_those_of_a_checkpoint(error: float, checkpointed: bool, text: str) -> None:
    row = {"case": "1 forward", "reentrant": True, "error": error, "checkpointed": checkpointed}
    found = cell(fsdp2.lines({"patched": [row]}))
    assert (found.text, found.right) == (text, text == "0.000")
    kind = "reentrant" if checkpointed else "reentrant, not checkpointed"
    gradients = {"a": [1.0, 1.0 + error]}
    found = zero3_row("by default", gradients=gradients, kind=kind)
    assert (found.text, found.right) == (text, text == "0.000")


def zero3_row(case: str, **found: Any) -> Cell:
    reference = {"case": zero3.REFERENCES[case], "gradients": {"a": [1.0, 1.0]}}
    return cell(zero3.lines({"patched": [reference, {"case": case, **found}]}))


@pytest.mark.parametrize("case", zero3.CASES)
def test_a_refusal_is_right_where_that_deepspeed_can_train_in_neither_way(case: str) -> None:
    found = zero3_row(case, error=f"RuntimeError: {zero3.REFUSED}")
    assert (found.text, found.right) == ("refused", case == "two forwards")


def test_without_a_reference_nothing_is_right() -> None:
    rows: list[dict[str, Any]] = [
        {"case": "Llama, not checkpointed", "error": "ValueError: no"},
        {"case": "by default", "gradients": {}},
    ]
    found = cell(zero3.lines({"patched": rows}))
    assert (found.text, found.right) == ("no reference", False)
    failed = zero3_row("by default", error="CheckpointError: other metadata\nmore")
    assert (failed.text, failed.right, failed.note) == (
        "CheckpointError",
        False,
        "CheckpointError: other metadata",
    )


BEFORE, AFTER = [[True, True, []]], [[False, True, []]]


def te_rows(*after: Any) -> list[dict[str, Any]]:
    names = ("leaf", "parameter", "detached leaf")
    return [
        {"pipeline": "Identity", "input": name, "way": te.NO_GRAD, "before": BEFORE, "after": one}
        for name, one in zip(names, after, strict=True)
    ]


@pytest.mark.parametrize("wrong", range(3))
def test_of_the_tensors_of_a_sort_the_worst_is_shown(wrong: int) -> None:
    rows = te_rows(*(AFTER if i == wrong else BEFORE for i in range(3)))
    assert cell(te.lines({"patched": rows})).text == "lost"
    assert cell(te.lines({"patched": te_rows(BEFORE, BEFORE, BEFORE)})).right


def test_what_is_not_trained_and_what_has_gradients_enabled_is_not_judged() -> None:
    (row, *_) = te_rows(AFTER, BEFORE, BEFORE)
    assert te.lines({"patched": [row | {"input": "plain leaf"}, row | {"way": te.GRADIENTS}]}) == []


@pytest.mark.parametrize(
    ("found", "text", "right"),
    [
        ({"same": True}, "right", True),
        ({"same": False}, "wrong", False),
        ({"error": "no. More"}, "RuntimeError", False),
    ],
    ids=["right", "wrong", "an error"],
)
def test_a_recompute(found: dict[str, Any], text: str, right: bool) -> None:
    row = {"pipeline": "Identity", "input": "leaf", "way": te.CHECKPOINT, **found}
    assert (cell(te.lines({"patched": [row]})).text, cell(te.lines({"patched": [row]})).right) == (text, right)


@pytest.mark.parametrize(("found", "right"), [("kept", True), ("lost", False)])
def test_what_is_relied_on(found: str, right: bool) -> None:
    row = {"table": "upstream-table", "case": "a", "found": found, "right": "kept"}
    judged = cell(contracts.lines({"patched": [row, row | {"case": "b", "right": None}]}))
    assert judged.right is right
    assert judged.note == ("" if right else "a: lost")
