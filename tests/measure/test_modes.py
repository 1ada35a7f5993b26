"""Each mode on small models of several kinds: the same numbers, what is saved, and nothing left behind."""

import functools
from pathlib import Path
from typing import Any

import pytest

from overlay import environments
from overlay.measure.settings import SEGMENTATION
from tests.variants import PATCHED, ROOT, Variant, installed, run_worker

WORKER = Path(__file__).with_name("modes_worker.py")
MODELS = ("gpt2", "mixtral", SEGMENTATION, "t5", "vit", "llama")
SHARES_A_BIAS = ("t5",)
"""One tensor of the first block is used in all, so that gradients are added in another order."""

ROUNDS = ("llama",)
"""With autocast: a reentrant checkpoint casts weights again."""


@functools.cache
def observed() -> dict[str, Any]:
    folder = installed(Variant(PATCHED[1].kind, PATCHED[1].release, by="wheel"))
    python = environments.python("train-2.13")
    found: dict[str, Any] = run_worker(WORKER, on="modes", interpreter=python, laid_over=[folder, ROOT])
    return found


@pytest.mark.parametrize("model", MODELS)
def test_parity(model: str) -> None:
    for mode, found in observed()["models"][model]["modes"].items():
        if mode == "reentrant" and model in (*SHARES_A_BIAS, *ROUNDS):
            assert found["gradient"] < (1e-5 if model in SHARES_A_BIAS else 1e-2)
        else:
            assert found["exact"], mode


@pytest.mark.parametrize("model", MODELS)
def test_what_is_checkpointed(model: str) -> None:
    found = observed()["models"][model]
    blocks, modes = found["blocks"], found["modes"]
    assert len(blocks) == (8 if model in ("t5", SEGMENTATION) else 4)
    assert modes["off"]["checkpointed"] == []
    assert modes["reentrant"]["checkpointed"] == modes["non-reentrant"]["checkpointed"] == blocks
    assert modes["every:2"]["checkpointed"] == blocks[::2]
    for mode in ("reentrant", "non-reentrant"):
        assert sum(modes[mode]["saved"]) < sum(modes["off"]["saved"]) / 2


@pytest.mark.parametrize("model", MODELS)
def test_a_segment_saves_its_first_input_alone(model: str) -> None:
    found = observed()["models"][model]["modes"]
    for mode, size in (("group:2", 2), ("group:3", 3)):
        for start in range(0, len(found[mode]["saved"]), 4):
            saved = found[mode]["saved"][start : start + 4]
            ends = [i for i in range(4) if i == 3 or (i + 1) % size == 0]
            assert [i for i in range(4) if saved[i]] == ends
        assert sum(found[mode]["saved"]) < sum(found["off"]["saved"]) / 2


@pytest.mark.parametrize("model", MODELS)
def test_off_is_off_again(model: str) -> None:
    modes = observed()["models"][model]["modes"]
    assert modes["off again"]["saved"] == modes["off"]["saved"]
    assert modes["off again"]["checkpointed"] == []
    assert modes["off again"]["hooks"] == modes["off"]["hooks"], "transformers adds some for gradients of inputs"


def test_patches_are_tokens() -> None:
    assert observed()["models"]["vit"]["tokens"] == 4
    assert observed()["models"][SEGMENTATION]["tokens"] == 16


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("around", ["all of it", "each block"])
def test_a_checkpoint_of_a_model_of_ones_own_is_seen(around: str, mode: str) -> None:
    found = observed()["own"][around]
    assert list(found[mode]["checkpointed"].values()) == [1] * 4
    assert found[mode]["parts"] == {}
    assert found[mode]["blocks"] == [4 * 8 * 4] * 4, "its input alone: 4 tokens of 8 numbers"
    assert found[mode]["outside"] == found["off"]["outside"]


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_blocks_of_ones_own_without_a_checkpoint_are_none(mode: str) -> None:
    found = observed()["own"]["every other block"]
    assert list(found[mode]["checkpointed"]) == ["layers.0", "layers.2"]
    assert found[mode]["blocks"][1::2] == found["off"]["blocks"][1::2]
    assert found["off"]["checkpointed"] == {}


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_a_checkpoint_around_single_modules_is_none_of_the_block(mode: str) -> None:
    found = observed()["own"]["parts"][mode]
    assert found["checkpointed"] == {}
    assert found["parts"] == {f"layers.{i}": ["down", "up"] for i in range(4)}


def test_what_cannot_be_done_is_said() -> None:
    found = observed()
    assert found["errors"]["offload"] == "there is no accelerator to offload from"
    assert "found 'mixtrol': did you mean mixtral" in found["errors"]["model"]
    assert found["grouped"] == "a tensor of shape (1, 4) is computed between the blocks, not within them"


def test_an_in_place_module_is_named_where_it_writes_into_an_argument() -> None:
    assert observed()["written"] == [["block.relu", "argument", "self.relu(x)"]]


def test_an_operator_that_writes_into_a_list_or_into_out_is_named() -> None:
    assert observed()["written elsewhere"] == [
        ["block", "argument", "torch.mul(x, 2, out=x)"],
        ["block", "argument", "torch._foreach_add_([torch.ones(1, 4), x], 1.0)"],
    ]


def test_a_block_that_is_left_out_later_is_no_segment() -> None:
    left_out, other, none = observed()["dropped"]
    assert left_out == other == "the model leaves a block out in some forwards, at random"
    assert none == ""


def test_what_a_model_does_in_its_first_forward_alone_is_no_difference_between_modes() -> None:
    assert observed()["first forward"]


def test_sizes_of_a_model_of_text_and_images_are_those_of_its_parts() -> None:
    found = observed()["of parts"]
    assert found["parameters"] < 10**6
    assert found["blocks"] == 4
    assert found["called"] == found["checkpointed"] == found["saved"] == 2, "its images' blocks do not run on text"


def test_a_size_without_an_effect_is_refused() -> None:
    found = observed()["refused"]
    assert list(found) == ["llama experts", "vit vocab", "vit seq", "llama image"]
    assert found["llama experts"] == (
        "expected a size that the configuration of llama has, found --experts: leave it out"
    )
    assert found["vit seq"] == "expected no --seq for vit, which takes none, found it: leave it out"


def test_a_token_goes_to_no_more_experts_than_there_are() -> None:
    assert observed()["few experts"] == [True, True]


def test_operators_are_deterministic_while_parity_is_looked_for_and_memory_suffices() -> None:
    assert observed()["repeatable"] == [True, True, False, False, False]


def test_micro_batches_are_averaged() -> None:
    assert observed()["micro-batches"] < 1e-6


def test_what_a_model_draws_is_drawn_again() -> None:
    assert observed()["drawn"]


def test_a_step_that_failed_leaves_no_gradients_to_the_next_mode() -> None:
    assert observed()["left"] == 0


def test_what_is_saved_twice_is_counted_once_and_weights_not_at_all() -> None:
    held = observed()["held"]
    assert held["counted"] == held["expected"]


def test_gradients_in_one_storage_are_counted_once() -> None:
    found, expected = observed()["one storage"]
    assert found == expected
