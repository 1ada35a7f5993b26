"""Generation in training mode, with checkpointing on and gradients off, gives the tokens of eval mode.

Stock drops the cache of each layer, but not the positions and masks that the model has made from it, so that its tokens
are others from the second one on.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.columns import Columns, measure
from tests.variants import LATEST, PATCHED, PATCHED_LATEST, STOCK, VARIANTS, Variant

WORKER = Path(__file__).with_name("generation_worker.py")


def tokens(first_difference: int | None, *warns: str, checkpoints: bool = False) -> dict[str, Any]:
    return {
        "without checkpointing": None,
        "without hooks": first_difference,
        "hooks": first_difference,
        "checkpoints": checkpoints,
        "warns": list(warns),
    }


AS_IN_EVAL_MODE = tokens(None)
EXPECTED: dict[str, dict[str, Any]] = {
    "llama": AS_IN_EVAL_MODE,
    "gemma2": AS_IN_EVAL_MODE,
    "bart": AS_IN_EVAL_MODE,
    "t5": AS_IN_EVAL_MODE,
    "mixtral": AS_IN_EVAL_MODE,
    "mamba": AS_IN_EVAL_MODE,
    "bamba": AS_IN_EVAL_MODE,
    "llava": AS_IN_EVAL_MODE,
    "minimax": AS_IN_EVAL_MODE,
    "recurrent_gemma": AS_IN_EVAL_MODE,
    "gpt2": tokens(1),
}
"""The model of GPT-2 hands no cache to its layers, on every release."""

BY_THE_MODEL: dict[tuple[Variant, str], dict[str, Any]] = {(PATCHED[0], "t5"): tokens(None, "the model")}
"""T5 of 5.14.1 looks at `use_cache` in code of its own, and warns in vain."""

BOTH = ("a layer", "the model")
ON_STOCK = {
    "llama": tokens(1, *BOTH, checkpoints=True),
    "gemma2": tokens(1, *BOTH, checkpoints=True),
    "bart": tokens(3, *BOTH, checkpoints=True),
    "t5": tokens(1, *BOTH, checkpoints=True),
    "mixtral": tokens(1, *BOTH, checkpoints=True),
    "mamba": tokens(None, checkpoints=True),
    "bamba": tokens(1, *BOTH, checkpoints=True),
    "llava": tokens(1, *BOTH, checkpoints=True),
    "minimax": tokens(1, "the model", checkpoints=True),
    "recurrent_gemma": tokens(1, "the model", checkpoints=True),
    "gpt2": tokens(1, "the model", checkpoints=True),
}


@pytest.fixture(scope="module")
def columns() -> Columns:
    return measure(WORKER, VARIANTS)


def observed(columns: Columns, variant: Variant, family: str) -> dict[str, Any]:
    return {key: value for key, value in columns[variant][family].items() if key != "told apart"}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_no_family_is_left_out_and_none_gives_the_same_token_always(columns: Columns, variant: Variant) -> None:
    assert set(columns[variant]) == set(EXPECTED) == set(ON_STOCK)
    assert all(family["told apart"] > 1 for family in columns[variant].values())


@pytest.mark.parametrize("family", EXPECTED)
@pytest.mark.parametrize("variant", [*PATCHED, LATEST, PATCHED_LATEST], ids=str)
def test_patched_and_latest(columns: Columns, variant: Variant, family: str) -> None:
    assert observed(columns, variant, family) == BY_THE_MODEL.get((variant, family), EXPECTED[family])


@pytest.mark.parametrize("family", EXPECTED)
@pytest.mark.parametrize("variant", STOCK, ids=str)
def test_stock(columns: Columns, variant: Variant, family: str) -> None:
    assert observed(columns, variant, family) == ON_STOCK[family]
