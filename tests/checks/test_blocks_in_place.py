"""The rule about operations in place, held against what a step of the very model does."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from tests.variants import Variant, run

WORKER = Path(__file__).with_name("in_place_worker.py")
SOURCE = WORKER.read_text("utf-8")

NAMES: list[str] = re.findall(r'^@(?:forward|module|scenario)\("(.+)"\)$', SOURCE, re.MULTILINE)
WRONG, STATE, SAME, RIGHT = (
    [name for name in NAMES if name.startswith(kind)] for kind in ("wrong: ", "state: ", "same: ", "right: ")
)

UNCERTAIN = {"wrong: in one branch", "wrong: experts in a list"}
"""Where what is changed is not always the argument of the block."""
BUFFERS = {
    "wrong: a buffer that is read",
    "wrong: a tensor in an attribute += x",
    "wrong: a tensor in an attribute .add_(x)",
}

MODES = ("non-reentrant", "reentrant")


@functools.cache
def observed() -> dict[str, Any]:
    measured: dict[str, Any] = run(WORKER, variant=Variant("stock", "5.14.1"))
    return measured


def test_every_scenario_is_measured() -> None:
    assert list(observed()) == NAMES
    assert len(WRONG + STATE + SAME + RIGHT) == len(NAMES)


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_is_found(name: str) -> None:
    row = observed()[name]
    assert {row[mode] for mode in MODES} <= {"RuntimeError", "wrong gradients"}
    assert [one["severity"] for one in row["findings"]] == ["warning" if name in UNCERTAIN | BUFFERS else "error"]


@pytest.mark.parametrize("name", STATE)
def test_what_moves_twice_is_found(name: str) -> None:
    row = observed()[name]
    assert {row[mode] for mode in MODES} == {"other state"}
    assert [one["severity"] for one in row["findings"]] == ["warning"]


@pytest.mark.parametrize("name", SAME)
def test_what_may_be_done_twice_is_a_warning(name: str) -> None:
    row = observed()[name]
    assert [row[mode] for mode in MODES] == ["right", "right"]
    assert [one["severity"] for one in row["findings"]] == ["warning"]


@pytest.mark.parametrize("name", RIGHT)
def test_what_does_not_break_is_left(name: str) -> None:
    row = observed()[name]
    assert [row[mode] for mode in MODES] == ["right", "right"]
    assert row["findings"] == []


@pytest.mark.parametrize(
    ("name", "where", "what", "code"),
    [
        ("wrong: input += x", "model.layers.0", "the argument `hidden_states`", "hidden_states += 0.5"),
        ("wrong: in a function", "model.layers.0", "the argument `hidden_states`", "hidden *= factor"),
        ("wrong: a keyword of the block", "model.layers.0", "the argument `position_ids`", "position_ids += 1"),
        ("wrong: a submodule that changes its input", "model.layers.0.mlp", "`hidden_states`", "x[..., 0] += 1"),
        ("wrong: a buffer that is read", "model.layers.0.mlp", "the buffer `mlp.count`", "self.count += 1"),
        ("wrong: a parameter", "model.layers.0.mlp", "parameter `mlp.projection.weight`", "weight.data.mul_(1.1)"),
    ],
)
def test_module_and_line_are_named(name: str, where: str, what: str, code: str) -> None:
    [finding] = observed()[name]["findings"]
    assert finding["where"] == where
    assert what in finding["what"]
    assert code in finding["what"]
    place = re.search(r"in place \((.+):(\d+)\)$", finding["what"])
    assert place is not None
    assert Path(place[1]) == WORKER
    assert code in SOURCE.splitlines()[int(place[2]) - 1]


def test_modules_with_inplace_are_named() -> None:
    [finding] = observed()["wrong: ReLU(inplace=True) on the block's input"]["findings"]
    assert finding["where"] == "model.layers.0.mlp.0"
    assert finding["what"].startswith("`LeakyReLU(inplace=True)` changes the argument `hidden_states` in place")


def test_batch_normalisation_is_named() -> None:
    [finding] = observed()["state: BatchNorm"]["findings"]
    assert finding["where"] == "model.layers.0.mlp.norm"
