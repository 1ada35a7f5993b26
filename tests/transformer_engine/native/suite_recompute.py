"""Blocks of fusible operations train under full recompute as without it, whatever the checkpoint function."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.transformer_engine.native import stack

WORKER = Path(__file__).with_name("recompute_worker.py")
WITHOUT_GRADIENTS = {
    "torch, reentrant",
    "own",
    "TransformerEngine, reentrant",
    "Megatron",
    "Megatron, distributed",
    "Megatron, discarded",
}
"""The checkpoint functions whose forward runs under `no_grad`."""

WITH_GRADIENTS = {"torch, non-reentrant", "torch, non-reentrant, no early stop", "TransformerEngine, non-reentrant"}
CONTROL = "torch, without the state of the random numbers"
FLAGS = "you can only change requires_grad flags of leaf variables"

Case = dict[str, Any]


@pytest.fixture(scope="module")
def found(release: str) -> dict[str, list[Case]]:
    builds = {"stock": stack.stock(release), "patched": stack.patched(release)}
    with ThreadPoolExecutor() as pool:
        runs = {name: pool.submit(stack.observed, WORKER, build) for name, build in builds.items()}
        return {name: run.result() for name, run in runs.items()}


@pytest.fixture(scope="module")
def patched(found: dict[str, list[Case]]) -> list[Case]:
    return found["patched"]


@pytest.fixture(scope="module")
def stock(found: dict[str, list[Case]]) -> list[Case]:
    return found["stock"]


def predicted(case: Case) -> str:
    """How the outcome on stock begins.

    Stock sets the flags of what a pipeline passes through under `no_grad`. The first block is given the case's input;
    the others are given what a checkpoint returned, which is no leaf and requires gradients.
    """
    reentrant = case["function"] in WITHOUT_GRADIENTS
    branch = case["steps"] == "a branch without gradients"
    if case["input"] != "plain" and (reentrant or branch or case["steps"] == "generation before"):
        return "changed input 0" if case["input"] == "leaf" else FLAGS
    if case["blocks"] > 1 and (reentrant or branch):
        return FLAGS
    return "wrong" if case["function"] == CONTROL else "right"


def of(found: list[Case], *functions: str) -> list[Case]:
    return [case for case in found if case["function"] in functions]


def test_every_checkpoint_function_is_tried(patched: list[Case]) -> None:
    assert {case["function"] for case in patched} == {*WITHOUT_GRADIENTS, *WITH_GRADIENTS, CONTROL}


def test_gradients_are_those_without_recompute(patched: list[Case]) -> None:
    assert [case for case in of(patched, *WITHOUT_GRADIENTS, *WITH_GRADIENTS) if case["outcome"] != "right"] == []


def test_wrong_gradients_are_seen(patched: list[Case]) -> None:
    assert {case["outcome"] for case in of(patched, CONTROL)} == {"wrong"}


def test_stock_fails_where_it_sets_flags(stock: list[Case]) -> None:
    assert [case for case in stock if not case["outcome"].startswith(predicted(case))] == []


def test_a_leaf_stops_training_on_stock_without_an_error(stock: list[Case]) -> None:
    quiet = {(case["function"], case["steps"]) for case in stock if case["outcome"] == "changed input 0; wrong"}
    assert {function for function, steps in quiet if steps == "one forward"} >= {"torch, reentrant", "own", "Megatron"}
    assert {function for function, steps in quiet if steps == "generation before"} >= WITH_GRADIENTS
