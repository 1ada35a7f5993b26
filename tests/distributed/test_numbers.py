"""Training with activation checkpointing gives the gradients of training without it, however it is distributed.

`scripts/test.sh tests/distributed/test_numbers.py --torch 2.11` runs it on another torch.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.distributed.measured import Expected, Measured, columns, words
from tests.variants import LATEST, PATCHED, STOCK, Variant

WORKER = Path(__file__).with_name("numbers_worker.py")

EXACT = ("exact", "exact")
REDUCED = ("rounding", "exact")
"""In reentrant mode FSDP2 reduces the gradients of each forward, otherwise those of both forwards at once."""

SHORT = {"1 forward": EXACT, "2 forwards": EXACT}
PIPELINE = {**SHORT, "1F1B": EXACT}
NOT_SYNCHRONISED = {**SHORT, "accumulation": EXACT, "accumulation without sync": EXACT}
ALL = {**PIPELINE, **NOT_SYNCHRONISED, "1 forward, next step": EXACT}
TWICE = {"2 forwards": REDUCED}

BF16 = 2e-2
BF16_ROUNDING = 2e-3

EXPECTED: Mapping[tuple[int, str], Expected] = {
    (1, "one process"): Expected(PIPELINE),
    (1, "autocast"): Expected(SHORT, whole=BF16),
    (2, "reshard_after_forward=True"): Expected({**ALL, **TWICE}),
    (2, "reshard_after_forward=False"): Expected({**PIPELINE, **TWICE}),
    (2, "outer fully_shard alone"): Expected(SHORT),
    (2, "frozen layers"): Expected({**SHORT, **TWICE}),
    (2, "layers that own parameters"): Expected({**SHORT, **TWICE}),
    (2, "CPU offload"): Expected({**NOT_SYNCHRONISED, **TWICE}),
    (2, "bf16"): Expected({**SHORT, **TWICE}, whole=BF16, rounding=BF16_ROUNDING),
    (2, "bf16, inputs not cast"): Expected({**SHORT, **TWICE}, whole=BF16, rounding=BF16_ROUNDING),
    (2, "bf16 in the layers alone"): Expected({**SHORT, **TWICE}, whole=BF16, rounding=BF16_ROUNDING),
    (2, "autocast"): Expected({**SHORT, **TWICE}, whole=BF16),
    # "Expected to mark a variable ready only once": DDP does not support it
    (2, "DDP"): Expected({**NOT_SYNCHRONISED, "2 forwards": ("RuntimeError", "exact")}),
    (4, "reshard_after_forward=True"): Expected({**SHORT, **TWICE}),
    (4, "reshard_after_forward=2"): Expected({**PIPELINE, **TWICE}),
    (1, "every_n_layers=2"): Expected(SHORT, recomputed=2),
    (2, "every_n_layers=2"): Expected({**SHORT, **TWICE}, recomputed=2),
    (1, "offload"): Expected(SHORT),
    (2, "offload"): Expected({**SHORT, **TWICE}),
}
"""By the number of ranks. FSDP2, where nothing else is said; the weights are float32, but for bf16 and autocast."""

NOT_IN_5_14 = {(ranks, name) for ranks in (1, 2) for name in ("every_n_layers=2", "offload")}

LOST = dict.fromkeys(("2 forwards", "1 forward, next step"), ("lost", "exact"))
LOST_ON_STOCK = {
    (2, "reshard_after_forward=True"),
    (2, "reshard_after_forward=False"),
    (2, "frozen layers"),
    (2, "layers that own parameters"),
    (2, "CPU offload"),
    (2, "bf16"),
    (2, "bf16, inputs not cast"),
    (2, "bf16 in the layers alone"),
    (2, "autocast"),
    (2, "every_n_layers=2"),
    (2, "offload"),
    (4, "reshard_after_forward=True"),
    (4, "reshard_after_forward=2"),
}
"""Where each layer is sharded, stock loses gradients when two forwards have one backward.

They turn up in the next step of that model, and make its gradients wrong, too.
"""

NOT_CAST_ON_STOCK = {
    (2, "bf16 in the layers alone"): {
        "1 forward": ("exact", "RuntimeError"),
        "2 forwards": ("RuntimeError", "RuntimeError"),
    }
}
"""On torch 2.11, where FSDP2 does not cast the inputs of a recompute."""


def expected_on_stock(key: tuple[int, str], torch: str) -> Mapping[str, tuple[str, str]]:
    if torch == "2.11" and key in NOT_CAST_ON_STOCK:
        return NOT_CAST_ON_STOCK[key]
    schedules = EXPECTED[key].schedules
    if key not in LOST_ON_STOCK:
        return schedules
    return {schedule: LOST.get(schedule, both) for schedule, both in schedules.items()}


@pytest.fixture(scope="module")
def measured(pytestconfig: pytest.Config) -> dict[Variant, Measured]:
    return columns(WORKER, [*STOCK, *PATCHED, LATEST], torch=pytestconfig.getoption("--torch"))


@pytest.mark.parametrize("variant", [*STOCK, *PATCHED, LATEST], ids=str)
def test_no_set_up_is_left_out(measured: dict[Variant, Measured], variant: Variant) -> None:
    label = variant.label
    assert measured[variant]["transformers"].startswith(variant.release + label)
    found = {(row["ranks"], row["set-up"]) for row in measured[variant]["rows"]}
    assert found == set(EXPECTED) - (NOT_IN_5_14 if variant.release == "5.14.1" else set())


def in_release(variants: list[Variant]) -> list[object]:
    """Test parameters: each set-up that a variant's release has."""
    return [
        pytest.param(variant, key, id=f"{variant}-{key[0]} ranks, {key[1]}")
        for variant in variants
        for key in EXPECTED
        if variant.release != "5.14.1" or key not in NOT_IN_5_14
    ]


@pytest.mark.parametrize(("variant", "key"), in_release([*PATCHED, LATEST]))
def test_gradients(measured: dict[Variant, Measured], variant: Variant, key: tuple[int, str]) -> None:
    assert words(measured[variant], *key, EXPECTED[key]) == EXPECTED[key].schedules


@pytest.mark.parametrize(("variant", "key"), in_release(STOCK))
def test_gradients_on_stock(
    measured: dict[Variant, Measured], pytestconfig: pytest.Config, variant: Variant, key: tuple[int, str]
) -> None:
    assert words(measured[variant], *key, EXPECTED[key]) == expected_on_stock(key, pytestconfig.getoption("--torch"))
