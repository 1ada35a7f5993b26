"""PEFT under DeepSpeed's ZeRO-3: before DeepSpeed 0.19.3 a non-reentrant recompute of frozen parameters fails. With
this project it is a reentrant one, and everything else stays as it is."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from overlay import environments
from overlay.measure.experiments import zero3
from overlay.measure.experiments.zero3 import FAULTY, FIXED
from tests.variants import LATEST, PATCHED, PATCHED_LATEST, STOCK, Variant, experiment, installed, run

HERE = Path(__file__).parent
ENGINE = zero3.EXPERIMENT.worker.name
ENVIRONMENT = "third-party"
ROUNDING = 1e-6
"""Relative, of losses and gradients in single precision."""

REASON = "DeepSpeed 0.19.2 cannot recompute layers with frozen parameters under ZeRO-3 in non-reentrant checkpointing"

TRAINED = {
    "by default, before DeepSpeed is imported": "reentrant",
    "by default": "reentrant",
    "asked for": "reentrant",
    "asked for, after deepspeed.initialize": "reentrant",
    "set directly": "reentrant",
    "disabled and enabled again": "reentrant",
    "copied and pickled": "reentrant",
    "frozen later": "non-reentrant, reentrant",
    "dropout": "reentrant",
    "small parameters kept whole": "reentrant",
    "ViT": "reentrant",
    "ViT, LoRA in the last layer": "reentrant",
    "a model that calls the function by itself": "reentrant",
    "two forwards, two backwards": "reentrant",
    "forwards between": "reentrant",
    "gradient accumulation": "reentrant",
    "hidden states": "reentrant",
    "a compiled model": "reentrant",
    "compiled layers": "reentrant",
    "offload": "reentrant",
}
"""Fail on stock, and train with this project as they do with a DeepSpeed that is mended; the kinds of checkpoint."""

REFUSED = {
    "two forwards": ("LlamaDecoderLayer is recomputed twice in one backward", "call backward after each forward"),
    "router logits": ("MixtralDecoderLayer hands on by other ways than its return value", "do not ask for it"),
    "hooks that keep outputs": ("a forward hook on LlamaMLP inside of LlamaDecoderLayer sees", "remove the hook"),
    "attributes that keep outputs": ("LlamaDecoderLayer hands on by other ways than its return value", "attributes"),
    "trainable parameters that layers share": ("or shares trainable parameters with another layer", "share none"),
    "context_fn": ("reentrant checkpointing has no `context_fn`", "leave `context_fn` out"),
    "debug": ("reentrant checkpointing has no `debug`", "leave `debug` out"),
}
"""Fail on stock, too; what is said."""

UNTOUCHED = {
    "determinism_check": "non-reentrant",
    "a function of one's own": "reentrant",
    "reentrant": "reentrant",
    "ZeRO-2": "non-reentrant",
    "nothing frozen": "non-reentrant",
    "no DeepSpeed": "non-reentrant",
}
"""Train on stock; the kinds of checkpoint, everywhere."""

WARNED = {
    "asked for",
    "asked for, after deepspeed.initialize",
    "set directly",
    "small parameters kept whole",
    "offload",
}
"""Where somebody chose `use_reentrant=False`."""

FIRST = [name for name in (*TRAINED, *REFUSED, *UNTOUCHED) if name not in ("offload", "debug")]
"""Of 5.14.1, which has no `offload`. PyTorch's `debug` starts a process of its own, which is not tried."""

LATER = ["asked for", "ViT", "by default", "two forwards", "router logits", "offload"]
"""Of the other releases."""

Column = tuple[Variant, str]
"""A build of transformers, and a version of DeepSpeed."""

Row = Mapping[str, Any]
Measured = Mapping[tuple[str, Column], Mapping[str, Any]]
"""By the worker, what it observed in each column."""

REFERENCES: Mapping[Variant, Variant] = {PATCHED[0]: STOCK[0], PATCHED[1]: STOCK[1], PATCHED_LATEST: LATEST}
COLUMNS: Mapping[Column, Sequence[str]] = {
    (STOCK[0], FAULTY): FIRST,
    (STOCK[0], FIXED): FIRST,
    (PATCHED[0], FAULTY): [*FIRST, "debug"],
    (PATCHED[0], FIXED): FIRST,
    (STOCK[1], FAULTY): LATER[:2],
    (STOCK[1], FIXED): LATER,
    (PATCHED[1], FAULTY): LATER,
    (LATEST, FIXED): LATER,
    (PATCHED_LATEST, FAULTY): LATER,
}
ON_FAULTY = [
    (variant, name) for (variant, deepspeed), names in COLUMNS.items() if deepspeed == FAULTY for name in names
]
TRAINERS = ("SFTTrainer", "ORPOTrainer", "ORPOTrainer, asked for")
TRAINED_BY = [(STOCK[0], FAULTY), (STOCK[0], FIXED), (PATCHED[0], FAULTY)]


@pytest.fixture(scope="module")
def measured() -> Measured:
    """What each worker observed in each column, two at a time."""
    others: list[tuple[str, Column, Sequence[str]]] = [
        *(("trainers_worker.py", column, TRAINERS) for column in TRAINED_BY),
        *(("function_worker.py", (PATCHED[0], deepspeed), ()) for deepspeed in ("", FAULTY)),
    ]
    for variant, deepspeed in [*COLUMNS, *(column for _, column, _ in others)]:
        installed(variant)  # builds and installs, which must not happen twice at once
        environments.variant(*zero3.pins(deepspeed))
    with ThreadPoolExecutor(2) as pool:
        trained = {
            (variant, deepspeed): pool.submit(
                experiment, zero3.EXPERIMENT, variant, ranks=[2], beside=zero3.pins(deepspeed), cases=[*names]
            )
            for (variant, deepspeed), names in COLUMNS.items()
        }
        waiting = [
            pool.submit(
                run, HERE / worker, *names, variant=variant, environment=ENVIRONMENT, beside=zero3.pins(deepspeed)
            )
            for worker, (variant, deepspeed), names in others
        ]
        found: dict[tuple[str, Column], Mapping[str, Any]] = {}
        for column, result in trained.items():
            about, rows = result.result()
            found[ENGINE, column] = {**about, "rows": {row["case"]: without_name(row) for row in rows}}
        for (worker, column, _), job in zip(others, waiting, strict=True):
            found[worker, column] = job.result()
    for (_, (variant, _)), observed in found.items():
        assert observed["transformers"].startswith(variant.release + variant.label)
    for column, names in COLUMNS.items():
        assert list(found[ENGINE, column]["rows"]) == list(names)
    return found


def without_name(row: Row) -> Row:
    return {key: value for key, value in row.items() if key != "case"}


def row(measured: Measured, variant: Variant, deepspeed: str, name: str, worker: str = ENGINE) -> Row:
    found: Row = measured[worker, (variant, deepspeed)]["rows"][name]
    return found


def same(one: Row, other: Row) -> bool:
    """Whether two trained alike: losses and gradients."""
    losses = all(
        math.isclose(ours, theirs, rel_tol=ROUNDING)
        for ours, theirs in zip(one["losses"], other["losses"], strict=True)
    )
    gradients = one["gradients"].keys() == other["gradients"].keys() and all(
        math.isclose(ours, theirs, abs_tol=10 * ROUNDING * other["gradients"][name][0])
        for name, values in one["gradients"].items()
        for ours, theirs in zip(values, other["gradients"][name], strict=True)
    )
    return losses and gradients and all(norm > 0 for norm, *_ in other["gradients"].values())


@pytest.mark.parametrize(("variant", "name"), ON_FAULTY, ids=str)
def test_faulty_deepspeed(measured: Measured, variant: Variant, name: str) -> None:
    found = row(measured, variant, FAULTY, name)
    if name in UNTOUCHED:
        assert found["kind"] == UNTOUCHED[name]
        assert found.get("plain", True) is (variant.kind == "stock" or name != "determinism_check")
        assert same(found, row(measured, REFERENCES.get(variant, variant), FIXED, name))
    elif variant.kind == "stock" and name == "frozen later":
        assert found["kind"] == "non-reentrant"  # it is not every frozen parameter that fails
    elif variant.kind == "stock":
        assert found["error"].startswith("CheckpointError: ")
    elif name in REFUSED:
        what, advice = REFUSED[name]
        assert found["error"].startswith("RuntimeError: ")
        assert all(said in found["error"] for said in (REASON, what, advice, "DeepSpeed 0.19.3 or later"))
        assert "\n" not in found["error"]
    else:
        assert found["kind"] == TRAINED[name]
        assert same(found, row(measured, REFERENCES[variant], FIXED, name))


@pytest.mark.parametrize(("variant", "name"), ON_FAULTY, ids=str)
def test_who_chose_it_is_warned_once(measured: Measured, variant: Variant, name: str) -> None:
    said = row(measured, variant, FAULTY, name)["said"]
    expected = variant.kind == "patched" and name in WARNED
    assert len(said) == expected
    assert all(text.startswith(REASON) and "DeepSpeed 0.19.3" in text and "\n" not in text for text in said)


@pytest.mark.parametrize("name", FIRST)
def test_mended_deepspeed_is_left_alone(measured: Measured, name: str) -> None:
    found = row(measured, PATCHED[0], FIXED, name)
    assert found == row(measured, STOCK[0], FIXED, name)
    assert found["kind"] == UNTOUCHED.get(name, "non-reentrant")
    assert found.get("plain", True)
    assert not found["said"]


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers(measured: Measured, name: str) -> None:
    stock, fixed, ours = (row(measured, *column, name, "trainers_worker.py") for column in TRAINED_BY)
    if name == "SFTTrainer":  # has a guard of its own
        assert ours == stock
    else:
        assert stock["error"].startswith("CheckpointError: ")
        assert fixed["kind"] == "non-reentrant"
    assert ours["kind"] == "reentrant"
    assert same(ours, fixed)
    assert len(ours["said"]) == (name == "ORPOTrainer, asked for")


@pytest.mark.parametrize("deepspeed", ["", FAULTY], ids=["no DeepSpeed", FAULTY])
def test_function(measured: Measured, deepspeed: str) -> None:
    found = measured["function_worker.py", (PATCHED[0], deepspeed)]
    guarded = "_CheckpointUnderZero3"
    assert found["type"] == (guarded if deepspeed else "partial")
    assert found["is a partial of PyTorch's"]
    assert found["keywords"] == {"use_reentrant": False}
    assert found["right"]
    assert found["compiled"] == {"right": True, "graphs": 1}
    assert not found["imports DeepSpeed"]
    assert found["hooks"] == 1  # `enable_input_require_grads`
    assert set(found["others"]) == {"partial"}
    assert found["versions"] == {
        "0.14.0": guarded,
        "0.19.2": guarded,
        "0.19.2+a1b2c3d": guarded,
        "0.19.3.dev0": guarded,
        "0.19.3": "partial",
        "0.19.3+a1b2c3d": "partial",
        "0.20.0rc1": "partial",
        "unknown": "partial",
    }
