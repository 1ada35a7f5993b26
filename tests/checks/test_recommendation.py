"""`recommended_checkpoint_kwargs` for real models, applied."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.variants import Variant, run

WORKER = Path(__file__).with_name("recommendation_worker.py")

NON_REENTRANT, REENTRANT = {"use_reentrant": False}, {"use_reentrant": True}
WITHOUT_STATE = {"use_reentrant": False, "preserve_rng_state": False}

EXPECTED: dict[str, tuple[dict[str, bool], str]] = {
    "Llama": (WITHOUT_STATE, "no block draws random numbers"),
    "Llama with dropout": (NON_REENTRANT, "gradients reach all inputs"),
    "BERT, which has dropout": (NON_REENTRANT, "gradients reach all inputs"),
    "a module of the user's that draws": (NON_REENTRANT, "gradients reach all inputs"),
    "a hook of the user's that draws": (NON_REENTRANT, "gradients reach all inputs"),
    "a loss on router logits": (NON_REENTRANT, "captured-outputs: "),
    "a layer that train() changes": (NON_REENTRANT, "gradients reach all inputs"),
    "a traced submodule in the blocks": (NON_REENTRANT, "gradients reach all inputs"),
    "LoRA": (WITHOUT_STATE, "inputs-without-gradients: "),
    "LoRA with dropout": (NON_REENTRANT, "inputs-without-gradients: "),
    "fully_shard": (WITHOUT_STATE, "fsdp2-reentrant: "),
    "LoRA under ZeRO-3": (NON_REENTRANT, "inputs-without-gradients: "),
    "LoRA under ZeRO-3, as if of 0.19.2": (REENTRANT, 'pip install "deepspeed>=0.19.3"'),
    "LoRA under ZeRO-3, as if of 0.19.2 and guarded": (REENTRANT, "this project's guard would turn"),
}
"""What is recommended, and a part of why."""

NONE = {
    "fully_shard in bf16 on the layers only, as if on torch 2.11": "or torch 2.13, or mend transformers",
    "an operation in place": "change a copy",
}
"""Where neither kind trains right: a part of what to do."""


@functools.cache
def observed() -> dict[str, Any]:
    measured: dict[str, Any] = run(
        WORKER, variant=Variant("stock", "5.14.1"), environment="integrations", beside=["peft==0.21.2"]
    )
    return measured


def test_every_scenario_is_expected() -> None:
    assert observed().keys() == {*EXPECTED, *NONE, "in TrainingArguments", "no modules"}


@pytest.mark.parametrize("name", EXPECTED)
def test_recommended(name: str) -> None:
    arguments, why = EXPECTED[name]
    assert observed()[name]["recommended"] == arguments
    assert why in observed()[name]["why"]
    assert "\n" not in observed()[name]["why"]
    assert observed()[name]["modes kept"]


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_recommended_is_right_and_nothing_is_found(name: str) -> None:
    assert observed()[name]["gradients"]
    # Said of every model that can generate, whatever the kind of checkpointing
    assert [one for one in observed()[name]["findings"] if one[1] != "training-generation"] == []


def test_reentrant_says_what_it_needs() -> None:
    why = observed()["LoRA under ZeRO-3, as if of 0.19.2"]["why"]
    assert "call model.enable_input_require_grads(), and backward after each forward" in why


@pytest.mark.parametrize("name", ["fully_shard", "Llama"])
def test_what_non_reentrant_holds_under_fsdp2_is_said(name: str) -> None:
    held = "two or more forwards before a backward then hold a whole model's gradients, unsharded, on every rank"
    assert (held in observed()[name]["why"]) == (name == "fully_shard")


@pytest.mark.parametrize("name", NONE)
def test_neither_kind_is_right(name: str) -> None:
    message = observed()[name]["error"]
    assert message.startswith("expected a kind of checkpointing that trains this model right, found none: ")
    assert NONE[name] in message


def test_the_random_state_is_kept_where_it_matters() -> None:
    needed = {name for name, row in observed().items() if row.get("without random state") is False}
    assert needed == {
        "Llama with dropout",
        "BERT, which has dropout",
        "LoRA with dropout",
        "a module of the user's that draws",
        "a hook of the user's that draws",
    }
    assert all("preserve_rng_state" not in observed()[name]["recommended"] for name in needed)


def test_what_is_no_module() -> None:
    found = {"int": "int", "list": "list", "class": "the class Linear", "None": "NoneType"}
    assert observed()["no modules"] == {
        kind: f"expected a torch.nn.Module, found {what}: hand over the model that is trained"
        for kind, what in found.items()
    }


def test_training_arguments_take_it() -> None:
    assert observed()["in TrainingArguments"] == WITHOUT_STATE
