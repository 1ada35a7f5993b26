"""Only that recompute is refused whose gradients FSDP2 would lose, in compiled layers, too.

And what comes after: FSDP2 is then as after any error in a backward.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.contracts.columns import Columns, measure
from tests.variants import PATCHED, PATCHED_LATEST, STOCK, Variant

WORKER = Path(__file__).with_name("refusal_worker.py")
ROUNDING = 1e-12
LOSS = 0.03

BOTH, ALONE = "mlp and layer", "mlp alone"
"""What is sharded by itself in each layer."""


class Expected(NamedTuple):
    """`right`: the gradients of a whole model without checkpointing. `lost`: a part of them is missing, or too much."""

    patched: str
    stock: str = "right"
    """Where the layers are sharded, too."""
    stock_alone: str = "right"
    plain: str = "right"
    """Sharded and not checkpointed, with either build."""


RIGHT = Expected("right")
RIGHT_WHERE_STOCK_LOSES = Expected("right", "lost")
"""Stock loses gradients of the layers, whose hooks run in the recompute; and of no `mlp`."""

REFUSED = Expected("refused", "lost", "lost")

COMPILED = ("layer.compile()", "torch.compile(layer.mlp), then sharded", "torch.compile(model)")
EAGERLY = "layer.compile()"
"""Where the layer has hooks, a patched build compiles nothing: no checkpoint with a sharded `mlp` in it is traced."""

EXPECTED: dict[str, Expected] = {
    "mlp in both of 2 forwards": REFUSED,
    "mlp in the first of 2 forwards": RIGHT_WHERE_STOCK_LOSES,
    "mlp in the second of 2 forwards": RIGHT_WHERE_STOCK_LOSES,
    "mlp in the middle one of 3 forwards": RIGHT_WHERE_STOCK_LOSES,
    "mlp in the first and the last of 3 forwards": REFUSED,
    "mlp twice in 1 forward": RIGHT,
    "a layer twice in 1 forward": REFUSED,
    "2 forwards, mlp frozen": RIGHT_WHERE_STOCK_LOSES,
    "2 forwards, mlp frozen in part": REFUSED,
    # FSDP2 reduces its gradients when the whole backward has ended
    "2 forwards, mlp called with what requires no gradients": RIGHT_WHERE_STOCK_LOSES,
    # What a backward leaves behind that is not the last one, or does not synchronise, is added in the next
    "not the last backward: 1 forward, then 1": RIGHT,
    "not the last backward: 2 forwards, then 1": RIGHT,
    "not the last backward: 2 forwards, then 1 without mlp": RIGHT,
    "not the last backward: 1 forward, then 2": REFUSED,
    "no sync: 1 forward, then 1": RIGHT,
    "no sync: 2 forwards, then 1": RIGHT,
    "no sync: 2 forwards, then 1 without mlp": RIGHT,
    "no sync: 1 forward, then 2": REFUSED,
    "no sync, not the last backward: 2 forwards, then 1": RIGHT,
    "2 forwards, non-reentrant": RIGHT,
    "2 forwards, without gradients first, non-reentrant": RIGHT,
    "after 2 forwards: zero_grad": Expected("lost", "lost", "lost"),
    "after 2 forwards: zero_grad, reset_iter_state, zero_grad": RIGHT,
    "after another error: zero_grad": Expected("lost", "lost", "lost", plain="lost"),
    "after another error: zero_grad, reset_iter_state, zero_grad": RIGHT,
    **{f"2 forwards, {how}, reentrant": REFUSED for how in COMPILED},
    **{f"2 forwards, {how}, non-reentrant": RIGHT for how in COMPILED},
}
GOES_ON = {case for case in EXPECTED if case.startswith("after 2 forwards")}
"""The cases in which the refusal is caught."""

ON_PATCHED = [*PATCHED, PATCHED_LATEST]
VARIANTS = [STOCK[0], *ON_PATCHED]


@pytest.fixture(scope="module")
def measured() -> Columns:
    return measure(WORKER, VARIANTS)


def rows(measured: Columns, variant: Variant, case: str) -> dict[str, dict[str, Any]]:
    """Those of a case, by what is sharded."""
    return {row["sharded"]: row for row in measured[variant]["rows"] if row["case"] == case}


def word(error: float | str) -> str:
    if isinstance(error, str):
        return error
    return "right" if error <= ROUNDING else "lost" if error > LOSS else f"{error} from the whole model"


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_no_case_is_left_out(measured: Columns, variant: Variant) -> None:
    label = variant.label
    assert measured[variant]["transformers"].startswith(variant.release + label)
    found = {(row["case"], row["sharded"]) for row in measured[variant]["rows"]}
    assert found == {(case, sharded) for case in EXPECTED for sharded in (BOTH, ALONE)}


@pytest.mark.parametrize("case", EXPECTED)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradients(measured: Columns, variant: Variant, case: str) -> None:
    expected = EXPECTED[case]
    patched = {BOTH: expected.patched, ALONE: expected.patched}
    stock = {BOTH: expected.stock, ALONE: expected.stock_alone}
    found = {sharded: word(row["error"]) for sharded, row in rows(measured, variant, case).items()}
    assert found == (patched if variant.kind == "patched" else stock)
    plain = {sharded: word(row["plain"]) for sharded, row in rows(measured, variant, case).items()}
    assert plain == dict.fromkeys((BOTH, ALONE), expected.plain)


@pytest.mark.parametrize("case", EXPECTED)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_refusal_names_the_submodule_and_the_cure(measured: Columns, variant: Variant, case: str) -> None:
    refused = variant.kind == "patched" and (EXPECTED[case].patched == "refused" or case in GOES_ON)
    for sharded, row in rows(measured, variant, case).items():
        assert len(row["refused"]) == refused
        for said in row["refused"]:
            layer = "FSDPLayer" if sharded == BOTH else "Layer"
            assert said.startswith(f"`mlp` of {layer} is sharded by itself (`fully_shard`)")
            assert '{"use_reentrant": False}' in said


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_layers_are_recomputed_once(measured: Columns, variant: Variant) -> None:
    computed = {row["case"]: row["computed"] for row in measured[variant]["rows"] if "computed" in row}
    assert computed == {case: 3 if "without gradients first" in case else 2 for case in computed}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_what_is_to_be_compiled_is_compiled(measured: Columns, variant: Variant) -> None:
    found = {(row["case"], row["sharded"]) for row in measured[variant]["rows"] if row["graphs"]}
    expected = {
        (f"2 forwards, {how}, {mode}", sharded)
        for how in COMPILED
        for mode in ("reentrant", "non-reentrant")
        for sharded in (BOTH, ALONE)
        if (variant.kind, how, sharded) != ("patched", EAGERLY, BOTH)
    }
    assert found == expected
