"""The report of `overlay verify`: for a person on any terminal, and for a program."""

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import pytest

from overlay.measure.experiments import fsdp2, text, zero3
from overlay.measure.experiments.table import Cell, Column, Line, Table, figure
from overlay.measure.verify import Report
from tests.variants import ROOT

jsonschema = import_module("jsonschema")  # it has no types
SCHEMA = json.loads((ROOT / "overlay" / "measure" / "verify.schema.json").read_text("utf-8"))

RIGHT = Cell("0.000", True)
WRONG = Cell("0.549", False)
FAILED = Cell("CheckpointError", False, "CheckpointError: the values have other metadata than in the forward", "all")
REFUSED = Cell("refused", True, "refused: with an error that says what to do")
HEADS = {
    kind: Column(kind, [release, "DeepSpeed", "0.19.2"])
    for kind, release in (("stock", "5.14.1"), ("patched", "5.14.1"), ("latest", "5.24.0"), ("here", "5.22.2"))
}

LONG = "`mock.patch.object(layer,'forward',wraps=layer.forward)`"


def table(lines: Sequence[Line], *kinds: str, failed: Mapping[str, str] | None = None, name: str = "zero3") -> Table:
    heads = [HEADS[kind] for kind in kinds or ("stock", "patched", "latest")]
    return Table(name, "relative error of the gradients", "torch 2.13.0", heads, lines, dict(failed or {}))


def line(case: str, *cells: Cell | None, group: str = "reentrant") -> Line:
    found = zip(("stock", "patched", "latest"), cells, strict=False)
    return Line(group, case, {kind: cell for kind, cell in found if cell is not None})


def report(*tables: Table, judged: str | None = "patched") -> Report:
    return Report(judged, list(tables))


def shown(monkeypatch: pytest.MonkeyPatch, one: Report, columns: int = 80) -> list[str]:
    monkeypatch.setattr(text, "width", lambda: columns)
    return text.of(one).splitlines()


MANY = [
    line("1 forward", RIGHT, RIGHT, RIGHT),
    line("2 forwards, fully_shard(checkpoint_wrapper(layer))", FAILED, RIGHT, RIGHT),
    line(LONG, FAILED, REFUSED, WRONG),
    line("1 forward", WRONG, RIGHT, None, group="in a reentrant checkpoint, given a non-leaf tensor: gradients"),
]


def test_several_experiments_end_with_one_table_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    first = table([line("1 forward", RIGHT, RIGHT, RIGHT), line("2 forwards", WRONG, RIGHT, WRONG)], name="fsdp2")
    second = table([line("default", None, RIGHT, RIGHT)], failed={"stock": "it ended"})
    lines = shown(monkeypatch, report(first, second))
    summary = lines.index("all  the cases that are not as they should be")
    assert [line.split() for line in lines[summary + 1 : summary + 4]] == [
        ["stock", "patched", "latest"],
        ["fsdp2,", "2", "cases", "!", "1", "wrong", "right", "!", "1", "wrong"],
        ["zero3,", "1", "case", "!", "not", "measured", "right", "right"],
    ]
    assert "all  " not in "\n".join(shown(monkeypatch, report(first)))
    none = table([], "stock", "patched", failed={"stock": "it ended", "patched": "it ended"})
    lines = shown(monkeypatch, report(first, none))
    assert [line.split() for line in lines if line.startswith("  zero3")] == [
        ["zero3", "!", "not", "measured", "!", "not", "measured", "-"]
    ]


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, report(table(MANY[:2]))) == [
        "zero3  relative error of the gradients",
        "       torch 2.13.0",
        "                                                   stock     patched      latest",
        "                                                  5.14.1      5.14.1      5.24.0",
        "                                               DeepSpeed   DeepSpeed   DeepSpeed",
        "                                                  0.19.2      0.19.2      0.19.2",
        "reentrant",
        "  1 forward                                        0.000       0.000       0.000",
        "  2 forwards,",
        "    fully_shard(checkpoint_wrapper(layer))",
        "                                       ! CheckpointError       0.000       0.000",
        "  * stock: CheckpointError: the values have other metadata than in the forward",
        "",
        "pass: the patched build is right in 2 of 2 cases; stock is wrong in 1",
    ]


def test_where_a_case_has_no_room_beside_its_cells_they_are_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, report(table([MANY[2]])), 40) == [
        "zero3  relative error of the gradients",
        "       torch 2.13.0",
        "stock: 5.14.1 DeepSpeed 0.19.2",
        "patched: 5.14.1 DeepSpeed 0.19.2",
        "latest: 5.24.0 DeepSpeed 0.19.2",
        "reentrant",
        "  `mock.patch.object(layer,'forward',wra",
        "    ps=layer.forward)`",
        "    stock   ! CheckpointError",
        "    patched refused",
        "    latest  ! 0.549",
        "  * stock: CheckpointError: the values",
        "    have other metadata than in the",
        "    forward",
        "  * patched: refused: with an error that",
        "    says what to do",
        "",
        "pass: the patched build is right in 1 of",
        "1 cases; stock is wrong in 1; latest is",
        "wrong in 1",
    ]


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
@pytest.mark.parametrize("kinds", [("stock", "patched", "latest"), ("stock", "patched"), ("patched",)], ids=len)
def test_no_line_is_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, kinds: tuple[str, ...]
) -> None:
    failed = {"latest": "it ended with exit status 1 before it was done: No module named 'torch'"}
    one = report(table(MANY, *kinds, failed=failed if "latest" in kinds else {}), table(MANY, *kinds))
    lines = shown(monkeypatch, one, columns)
    assert [line for line in lines if len(line) > columns or line != line.rstrip()] == []
    (summary,) = [i for i, line in enumerate(lines) if line.startswith("all  ")]
    assert sum(line.count("! ") for line in lines[:summary]) == sum(
        not cell.right for one in MANY for kind, cell in one.cells.items() if kind in kinds
    ) + sum(not cell.right for one in MANY for kind, cell in one.cells.items() if kind in kinds and kind != "latest")


def test_the_real_tables_have_their_cases_beside_their_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"case": case, "reentrant": True, "error": 0.549} for case in ("1 forward", *fsdp2.REFUSED)]
    lines = fsdp2.lines(dict.fromkeys(("stock", "patched", "latest"), rows))
    heads = [Column(kind, ["5.14.1"]) for kind in ("stock", "patched", "latest")]
    found = shown(monkeypatch, report(Table("fsdp2", "", "", heads, lines)), 60)
    assert "  1 forward" + " " * 22 + "! 0.549   ! 0.549   ! 0.549" in found


def test_a_cell_that_is_missing_is_shown_and_is_off_where_it_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    one = report(table([line("1 forward", RIGHT, None, RIGHT)]))
    assert one.off == ["zero3 on patched: reentrant, 1 forward: not measured"]
    assert any(line.split() == ["1", "forward", "0.000", "-", "0.000"] for line in shown(monkeypatch, one))
    assert report(table([line("1 forward", None, RIGHT)])).off == []


def test_no_case_at_all_is_no_pass() -> None:
    assert report(table([])).off == ["zero3 on patched: not measured: there was no case"]


def test_a_column_that_was_not_measured_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one = report(table([line("1 forward", WRONG, RIGHT)], failed={"latest": "it took more than 300 s"}))
    lines = shown(monkeypatch, one)
    assert "  * latest: not measured: it took more than 300 s" in lines
    assert lines[-2:] == ["off:", "- zero3 on latest: not measured: it took more than 300 s"]
    assert not any("5.24.0" in line for line in lines)


def test_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, report(table([], failed=dict.fromkeys(("stock", "patched", "latest"), "it is gone"))))
    assert lines[:3] == [
        "zero3  relative error of the gradients",
        "       torch 2.13.0",
        "  * stock: not measured: it is gone",
    ]
    assert len([line for line in lines if line.startswith("- ")]) == 3


def test_a_note_is_there_once_with_all_of_whom_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, report(table([line("a", FAILED, RIGHT, FAILED), line("b", FAILED, REFUSED)])))
    assert [line for line in lines if line.startswith("  * ")] == [
        "  * stock, latest: CheckpointError: the values have other metadata than in the",
        "  * patched: refused: with an error that says what to do",
    ]


@pytest.mark.parametrize(
    ("judged", "cells", "last"),
    [
        ("patched", (RIGHT, RIGHT), ["pass: the patched build is right in 1 of 1 cases"]),
        ("patched", (RIGHT, WRONG), ["off:", "- zero3 on patched: reentrant, a: 0.549"]),
        (None, (WRONG,), ["nothing is judged, for the column `patched` was left out"]),
    ],
    ids=["pass", "off", "not judged"],
)
def test_the_verdict(monkeypatch: pytest.MonkeyPatch, judged: str | None, cells: Any, last: list[str]) -> None:
    kinds = ("stock", "patched")[: len(cells)]
    one = report(table([line("a", *cells)], *kinds), judged=judged)
    assert shown(monkeypatch, one)[-len(last) :] == last
    assert bool(one.off) is (len(last) > 1)


def test_what_is_installed_and_off_is_told_how_it_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(cell: Cell) -> str:
        return shown(monkeypatch, report(table([Line("g", "a", {"here": cell})], "here"), judged="here"))[-1]

    assert last(WRONG) == "`python -m overlay doctor` says what is installed here, and what mends it"
    assert last(RIGHT) == "pass: what is installed here is right in 1 of 1 cases"
    failed = report(table([], "here", failed={"here": "it is gone"}), judged="here")
    assert shown(monkeypatch, failed)[-1] == "- zero3 on here: not measured: it is gone"


def test_what_others_say_does_not_reach_the_terminal_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors, versions and names come from packages."""
    said = "\x1b[2J\x1b]0;t\x07\u202egood\r"
    cell = Cell(f"Error{said}", False, f"Error: {said}\nmore", said)
    one = report(Table("te", "t", said, [Column("patched", [said])], [Line(said, said, {"patched": cell})]))
    one.tables.append(table(MANY, failed={"latest": said}))
    one.left_out["fsdp2"] = said
    for columns in (40, 100):
        assert all(line.isprintable() for line in shown(monkeypatch, one, columns))


def test_a_cell_is_no_longer_than_a_column_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, report(table([line("a", Cell("Name" * 20, False, "the whole"), RIGHT, RIGHT)])))
    assert any(f"! {('Name' * 20)[:23]}…" in line for line in lines)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (0.0, "0.000"),
        (9e-7, "0.000"),
        (2e-6, "2e-06"),
        (0.0007, "0.001"),
        (0.549, "0.549"),
        (1.0, "1.000"),
        (2.5e9, "2e+09"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_a_figure_is_never_shown_as_none_where_it_is_off(error: float, expected: str) -> None:
    assert figure(error, 1e-6) == expected
    found = {"case": "1 forward", "reentrant": True, "error": error, "checkpointed": True}
    (row,) = fsdp2.lines({"patched": [found]})
    assert row.cells["patched"].text == expected
    assert row.cells["patched"].right is (expected == "0.000")


NAN = float("nan")


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.0]}, 0.0),
        ({"a": [1.0, 1.5]}, {"a": [1.0, 2.0]}, 0.5),
        ({}, {"a": [2.0, 1.0]}, 1.0),
        ({"a": [0.5, 0.0]}, {"a": [0.0, 0.0]}, 0.5),
        ({"a": [NAN, NAN]}, {"a": [1.0, 1.0]}, NAN),
        ({"a": [1.0, 1.0], "b": [1.0, NAN]}, {"a": [1.0, 1.0], "b": [1.0, 1.0]}, NAN),
        ({"a": [1.0, 1.0]}, {"a": [NAN, NAN]}, NAN),
        ({}, {}, float("inf")),
    ],
    ids=["the same", "another sum", "missing", "one too many", "NaN", "NaN in one", "NaN expected", "no gradients"],
)
def test_a_gradient_that_is_no_number_is_an_error(found: Any, expected: Any, error: float) -> None:
    assert zero3.relative_error(found, expected) == pytest.approx(error, nan_ok=True)
    row = {"case": "by default", "gradients": found, "kind": "reentrant"}
    reference = {"case": zero3.REFERENCES["by default"], "gradients": expected}
    (one,) = zero3.lines({"patched": [reference, row]})
    assert one.cells["patched"].right is (error == 0)


@pytest.mark.parametrize("judged", ["patched", "here", None])
def test_the_json_is_as_its_schema_says(judged: str | None) -> None:
    one = report(table(MANY, failed={"latest": "\x1b["}), table(MANY, "here"), judged=judged)
    one.left_out["te"] = "transformer_engine not installed"
    strict = json.dumps(text.as_json(one), allow_nan=False)
    jsonschema.validate(json.loads(strict), SCHEMA, jsonschema.Draft202012Validator)


def test_what_is_not_judged_has_not_passed() -> None:
    assert text.as_json(report(table(MANY)))["passed"] is True
    assert text.as_json(report(table(MANY), judged=None))["passed"] is None
    assert text.as_json(report(table(MANY, failed={"latest": "it is gone"}), judged=None))["passed"] is False


def test_what_the_json_has() -> None:
    found = text.as_json(report(table([line("a", FAILED, RIGHT)], failed={"latest": "it is gone"})))
    assert (found["format"], found["passed"], found["judged"]) == (1, False, "patched")
    assert found["off"] == ["zero3 on latest: not measured: it is gone"]
    (experiment,) = found["experiments"]
    assert experiment["not_measured"] == {"latest": "it is gone"}
    assert experiment["columns"]["stock"] == ["5.14.1", "DeepSpeed", "0.19.2"]
    (row,) = experiment["rows"]
    assert row["cells"]["stock"] == {
        "found": "CheckpointError",
        "right": False,
        "note": FAILED.note,
        "said": "all",
    }


@pytest.mark.parametrize(
    "change",
    [{"format": 2}, {"more": 1}, {"off": [1]}, {"judged": "stock"}],
    ids=["another format", "an unknown key", "a wrong type", "another column"],
)
def test_the_schema_takes_nothing_else(change: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(text.as_json(report()) | change, SCHEMA, jsonschema.Draft202012Validator)
