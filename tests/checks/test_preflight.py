"""`PreflightCallback` in real trainers."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.variants import LATEST, Variant, run

WORKER = Path(__file__).with_name("preflight_worker.py")
STOCK = Variant("stock", "5.14.1")

TRAINED = {"error": None, "steps": 2}

every_variant = pytest.mark.parametrize("variant", [STOCK, LATEST], ids=str)


@functools.cache
def observed(variant: Variant) -> dict[str, Any]:
    measured: dict[str, Any] = run(WORKER, variant=variant, environment="third-party")
    return measured


def outcome(row: dict[str, Any]) -> dict[str, Any]:
    return {"error": row["error"], "steps": row["steps"]}


def warnings(row: dict[str, Any]) -> list[str]:
    """Codes, without what another rule says of every model that can generate on 5.14."""
    told = [message.split()[1].rstrip(":") for level, message in row["logged"] if level == "WARNING"]
    return [code for code in told if code != "training-generation"]


@every_variant
@pytest.mark.parametrize("name", ["right", "loaded", "no_checkpointing"])
def test_a_right_setup_trains(variant: Variant, name: str) -> None:
    assert outcome(observed(variant)[name]) == TRAINED
    assert warnings(observed(variant)[name]) == []


@every_variant
@pytest.mark.parametrize("name", ["wrong", "wrong_and_in_eval_mode"])
def test_a_wrong_setup_stops_before_the_first_step(variant: Variant, name: str) -> None:
    row = observed(variant)[name]
    assert (row["errors"], row["steps"], row["calls"]) == (["captured-outputs"], 0, 0)
    assert row["error"].startswith("error captured-outputs: ")
    assert row["modes kept"]


@every_variant
@pytest.mark.parametrize("name", ["ignored", "ignored_by_a_string"])
def test_a_rule_that_is_ignored(variant: Variant, name: str) -> None:
    assert outcome(observed(variant)[name]) == TRAINED


@every_variant
def test_a_warning_is_logged_once(variant: Variant) -> None:
    assert outcome(observed(variant)["finer"]) == TRAINED
    assert warnings(observed(variant)["finer"]) == ["granularity"]


@every_variant
def test_a_rule_that_there_is_none_of(variant: Variant) -> None:
    message = observed(variant)["no_such_rule"]["error"]
    assert message.startswith("ignore: expected codes of rules (captured-outputs, ")
    assert message.endswith("found no-such-rule: take them out")


@every_variant
def test_all_ranks_raise_for_one(variant: Variant) -> None:
    rows = observed(variant)["distributed"]["wrong_on_one_rank"]
    assert [(row["errors"], row["steps"], row["calls"]) for row in rows] == [(["captured-outputs"], 0, 0)] * 2


@every_variant
def test_no_rank_waits_for_one_on_which_the_check_raises(variant: Variant) -> None:
    rows = observed(variant)["distributed"]["raises_on_one_rank"]
    assert [(row["error"], row["steps"]) for row in rows] == [
        ("expected a check on each rank, found OverlayError: of this rank on another one: see its error", 0),
        ("of this rank", 0),
    ]


@every_variant
def test_the_first_rank_logs(variant: Variant) -> None:
    rows = observed(variant)["distributed"]["finer"]
    assert [outcome(row) for row in rows] == [TRAINED] * 2
    assert [warnings(row) for row in rows] == [["granularity"], []]


@every_variant
def test_a_sharded_model(variant: Variant) -> None:
    sharded = observed(variant)["sharded"]
    assert outcome(sharded["non-reentrant"]) == TRAINED
    if variant == LATEST:
        assert outcome(sharded["reentrant"]) == TRAINED
    else:
        assert (sharded["reentrant"]["errors"], sharded["reentrant"]["calls"]) == (["fsdp2-reentrant"], 0)


@every_variant
@pytest.mark.parametrize("prepared", ["False", "True"])
def test_activation_checkpointing_of_accelerate(variant: Variant, prepared: str) -> None:
    found = [one for one in observed(variant)["activation_checkpointing"][prepared] if "checkpointed-twice" in one]
    within = "and `activation_checkpointing` of accelerate's FSDP plugin, which is going to wrap it"
    what = (
        "its own checkpointing inside of a checkpoint wrapper"
        if prepared == "True"
        else (f"its own checkpointing, {within}")
    )
    assert found == [f"info checkpointed-twice: {what}"]
