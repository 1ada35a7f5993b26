"""The rule about PEFT under ZeRO-3, on real engines. DeepSpeed 0.19.2 has no wheel, and is here in name alone."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.variants import Variant, run

WORKER = Path(__file__).with_name("zero3_worker.py")

LAYERS = "module.base_model.model.model.layers"
ERROR = ["error", f"{LAYERS}.0, {LAYERS}.1"]
INFO = ["info", "deepspeed 0.19.2"]

EXPECTED: dict[str, list[list[str]]] = {
    "no model": [INFO],
    "LoRA, non-reentrant": [ERROR, INFO],
    "LoRA, non-reentrant, parameters kept whole": [ERROR, INFO],
    "LoRA, reentrant": [INFO],
    "LoRA, non-reentrant, ZeRO-2": [INFO],
    "all parameters trained, non-reentrant": [INFO],
}
"""What is found where DeepSpeed says that it is 0.19.2."""


@functools.cache
def rows() -> dict[str, Any]:
    measured: dict[str, Any] = run(
        WORKER, variant=Variant("stock", "5.14.1"), environment="integrations", beside=["peft==0.21.2"]
    )
    assert measured["deepspeed"] == "0.19.3"
    found: dict[str, Any] = measured["rows"]
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_a_deepspeed_with_the_fault(name: str) -> None:
    assert rows()[name]["0.19.2"] == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("where", ["as installed", "0.19.2, guarded"])
def test_silent_where_it_is_mended_or_guarded(name: str, where: str) -> None:
    assert rows()[name][where] == []


def test_the_mended_deepspeed_trains_all_of_them() -> None:
    assert {row["step"] for name, row in rows().items() if name != "no model"} == {"trains"}


def test_no_scenario_is_left_out() -> None:
    assert rows().keys() == EXPECTED.keys()
