"""The rules about gradients and checkpoints, on real models: each where it is to fire, and where it is to be silent."""

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.variants import LATEST, PATCHED, PATCHED_LATEST, STOCK, Variant, installed, run

WORKER = Path(__file__).with_name("models_worker.py")

STOCK_5_14 = STOCK[0]
COLUMNS = [STOCK_5_14, PATCHED[1], LATEST, PATCHED_LATEST]
GROUPS = ("ordinary", "fsdp2", "bf16", "captured", "not checkpointed", "inputs", "peft", "keywords", "odd")

OLD_TORCH = [STOCK_5_14, PATCHED[0]]
"""On torch 2.11, where FSDP2 leaves the cast of inputs out in a recompute."""

SECONDS = 0.5
"""Of the CPU, for a model of 32 layers."""

Findings = Mapping[str, list[str]]
"""By code: severity and where."""


@dataclass
class Expected:
    """What is found everywhere, what on some builds alone besides, and what is measured."""

    everywhere: Findings = field(default_factory=dict)
    stock: Findings = field(default_factory=dict)
    patched: Findings = field(default_factory=dict)
    latest: Findings = field(default_factory=dict)
    generates: str | None = None
    """The model that can generate."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    on_latest: Mapping[str, Any] = field(default_factory=dict)
    """What is measured there otherwise."""

    def findings(self, variant: Variant) -> Findings:
        if variant == STOCK_5_14:
            generation = {"training-generation": ["info", self.generates]} if self.generates else {}
            return {**self.everywhere, **self.stock, **generation}
        return {**self.everywhere, **(self.latest if variant == LATEST else self.patched)}


BOTH = "layers.0, layers.1"
SHARDED = {"fsdp2-reentrant": ["error", BOTH]}
SHARDED_SECOND = {"fsdp2-reentrant": ["error", "layers.1"]}
SECOND_GRAPH = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)
NO_GRADIENT = "element 0 of tensors does not require grad and does not have a grad_fn"


def ordinary(family: str, model: str | None = None) -> dict[str, Expected]:
    return {f"{family}, {mode}": Expected(generates=model) for mode in ("reentrant", "non-reentrant")}


def replaced(findings: Findings | None = None) -> Expected:
    """A layer whose forward was replaced: checkpointed on all builds, or on all but upstream with its own fix."""
    return Expected(latest=findings or {}, measured={"recomputed": True}, on_latest={"recomputed": not findings})


REPLACED = {"forward-replaced": ["warning", "layers.0"]}
GPT2 = {"training-generation": ["info", "GPT2LMHeadModel"]}
ROUTERS = "model.layers.0.mlp.gate, model.layers.1.mlp.gate"
LORA = "base_model.model.model.layers.0, base_model.model.model.layers.1"
VIT = "base_model.model.vit.layers.0, base_model.model.vit.layers.1"
MIXTRAL = "MixtralForCausalLM"
GEMMA = "Gemma3nForCausalLM"
MLLAMA = "MllamaForConditionalGeneration"
CROSS = "model.language_model.layers.1, model.language_model.layers.3"

EXPECTED: dict[str, Expected] = {
    **ordinary("Llama", "LlamaForCausalLM"),
    **ordinary("Mixtral", MIXTRAL),
    **ordinary("Qwen3 MoE", "Qwen3MoeForCausalLM"),
    **ordinary("T5", "T5ForConditionalGeneration"),
    **ordinary("BART", "BartForConditionalGeneration"),
    **ordinary("Whisper", "WhisperForConditionalGeneration"),
    **ordinary("BERT"),
    "GPT-2, reentrant": Expected(GPT2),
    "GPT-2, non-reentrant": Expected(GPT2),
    **ordinary("ViT"),
    **ordinary("CLIP"),
    **ordinary("Wav2Vec2"),
    **ordinary("LLaVA", "LlavaForConditionalGeneration"),
    **ordinary("Gemma 3n, without shared keys", GEMMA),
    # fully_shard
    "layers sharded, reentrant": Expected(stock=SHARDED),
    "layers sharded, use_reentrant not given": Expected(stock=SHARDED),
    "layers sharded, non-reentrant": Expected(),
    "layers sharded, one of them frozen": Expected(stock=SHARDED_SECOND),
    "layers sharded, not checkpointed": Expected(),
    "layers sharded, compiled": Expected(
        stock={"fsdp2-reentrant": ["error", "_orig_mod.layers.0, _orig_mod.layers.1"]}
    ),
    "root sharded": Expected(),
    "own checkpoint function": Expected(stock={"fsdp2-reentrant": ["warning", BOTH]}),
    "sharded inside, own checkpoint function": Expected(
        {"fsdp2-inside-layer": ["warning", "layers.0.mlp, layers.1.mlp"]}
    ),
    "checkpoint_wrapper, then sharded": Expected(),
    "sharded, then checkpoint_wrapper": Expected(
        {"fsdp2-inside-layer": ["error", "layers.1._checkpoint_wrapped_module"]}, measured={"right gradients": False}
    ),
    "sharded, then non-reentrant checkpoint_wrapper": Expected(measured={"right gradients": True}),
    "sharded inside, reentrant": Expected(
        {"fsdp2-inside-layer": ["error", "layers.0.mlp, layers.1.mlp"]}, stock=SHARDED_SECOND
    ),
    "sharded inside, non-reentrant": Expected(),
    "sharded inside, frozen": Expected(stock=SHARDED_SECOND),
    "another call": Expected(stock=SHARDED_SECOND, patched=SHARDED_SECOND),
    # mixed precision, on a torch that casts in the recompute, too
    "layers in bf16": Expected(measured={"step": "trains"}),
    "layers in bf16, inputs not cast": Expected(),
    "layers and root in bf16": Expected(measured={"step": "trains"}),
    # outputs that are captured inside of a layer
    "router logits": Expected(
        {"captured-outputs": ["error", ROUTERS]},
        generates=MIXTRAL,
        measured={"the loss on them has a gradient": False},
    ),
    "router logits, non-reentrant": Expected(generates=MIXTRAL, measured={"the loss on them has a gradient": True}),
    "router logits, no coefficient": Expected(
        {"captured-outputs": ["warning", ROUTERS]},
        generates=MIXTRAL,
        measured={"the loss on them has a gradient": False},
    ),
    "router logits, not asked for": Expected(generates=MIXTRAL),
    "attentions": Expected(
        {"captured-outputs": ["warning", "layers.0.self_attn, layers.1.self_attn"]},
        measured={"a loss on them has a gradient": False},
    ),
    "hidden states": Expected(measured={"a loss on them has a gradient": True}),
    # layers that are not checkpointed
    "forward of a subclass": replaced(),
    "forward of the class": replaced(REPLACED),
    "forward of the class, then sharded": replaced(),
    "forward of a layer": replaced(REPLACED),
    "forward of a layer, around the old one": replaced(),
    "forward of a layer, which keeps the old one": replaced(),
    "forward of a layer, mocked": replaced(),
    "eval mode": Expected({"not-training": ["warning", "layers.0"]}, measured={"recomputed": False}),
    "eval mode, frozen": Expected(measured={"recomputed": False}),
    # layers whose inputs require no gradients
    "frozen embeddings": Expected(
        {"inputs-without-gradients": ["error", BOTH]}, measured={"parameters without gradient": 18}
    ),
    "frozen embeddings, non-reentrant": Expected(measured={"parameters without gradient": 0}),
    "frozen first layer": Expected(),
    "frozen inputs of the encoder of Whisper": Expected(
        {"inputs-without-gradients": ["error", "model.encoder.layers.0, model.encoder.layers.1"]},
        generates="WhisperForConditionalGeneration",
        measured={"parameters without gradient": 30},
    ),
    "a tower with frozen embeddings": Expected(
        {"inputs-without-gradients": ["warning", "images.vit.layers.0, images.vit.layers.1"]}
    ),
    "a prompt before the layers": Expected(
        {"inputs-without-gradients": ["warning", "backbone.vit.layers.0, backbone.vit.layers.1"]}
    ),
    "frozen embeddings, checkpoint_wrapper": Expected(
        {"inputs-without-gradients": ["error", "layers.1"]}, measured={"parameters without gradient": 9}
    ),
    "LoRA on Llama": Expected(generates="base_model.model", measured={"parameters without gradient": 0}),
    "LoRA on Llama, without the hook": Expected(
        {"inputs-without-gradients": ["error", LORA]},
        generates="base_model.model",
        measured={"parameters without gradient": NO_GRADIENT},
    ),
    "LoRA on Llama, embeddings trained": Expected(
        generates="base_model.model", measured={"parameters without gradient": 0}
    ),
    "LoRA on ViT": Expected({"inputs-without-gradients": ["error", VIT]}, measured={"parameters without gradient": 4}),
    "LoRA on ViT, with the hook": Expected(measured={"parameters without gradient": 0}),
    "LoRA on ViT, non-reentrant": Expected(measured={"parameters without gradient": 0}),
    # tensors by keyword
    "Llama 4 vision": Expected(
        {"keyword-tensors": ["error", "model.layers.0, model.layers.1"]}, measured={"parameters without gradient": 34}
    ),
    "Gemma 3n": Expected(
        {"keyword-tensors": ["error", "model.layers.2, model.layers.3"]},
        generates=GEMMA,
        measured={"right gradients": False},
    ),
    "Gemma 3n, non-reentrant": Expected(generates=GEMMA, measured={"right gradients": True}),
    "Mllama": Expected({"keyword-tensors": ["warning", CROSS]}, generates=MLLAMA, measured={"step": SECOND_GRAPH}),
    "Mllama, non-reentrant": Expected(generates=MLLAMA, measured={"step": "trains"}),
    # odd models
    "on meta": Expected(generates="LlamaForCausalLM"),
    "DistributedDataParallel": Expected(),
    "no transformers model": Expected(),
    "a traced submodule": Expected(),
    "a submodule that raises": Expected(),
}

DTYPES = (
    "Expected query, key, and value to have the same dtype, but got query.dtype: float key.dtype: float and "
    "value.dtype: c10::BFloat16 instead."
)
ON_OLD_TORCH: dict[str, Expected] = {
    "layers in bf16": Expected(stock={"fsdp2-mixed-precision": ["error", BOTH]}),
    "layers in bf16, inputs not cast": Expected(),
    "layers and root in bf16": Expected(measured={"step": "trains"}),
}

Rows = Mapping[str, Mapping[str, Any]]


@functools.cache
def measured() -> dict[Variant, Rows]:
    for variant in COLUMNS:
        installed(variant)  # which must not happen twice at once
    with ThreadPoolExecutor(2) as pool:
        found = {variant: pool.submit(_run, variant) for variant in COLUMNS}
        return {variant: rows.result() for variant, rows in found.items()}


def _run(variant: Variant) -> Rows:
    return _rows(variant, run(WORKER, *GROUPS, variant=variant, environment="third-party", beside=["peft==0.21.2"]))


@functools.cache
def on_old_torch(variant: Variant) -> Rows:
    return _rows(variant, run(WORKER, "bf16", variant=variant, torch="2.11"))


def _rows(variant: Variant, found: dict[str, Any]) -> Rows:
    assert found["transformers"].startswith(variant.release + variant.label)
    rows: Rows = found["rows"]
    return rows


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("variant", COLUMNS, ids=str)
def test_findings(variant: Variant, name: str) -> None:
    assert measured()[variant][name]["findings"] == EXPECTED[name].findings(variant)


@pytest.mark.parametrize("name", [name for name, expected in EXPECTED.items() if expected.measured])
@pytest.mark.parametrize("variant", COLUMNS, ids=str)
def test_findings_are_true(variant: Variant, name: str) -> None:
    row, expected = measured()[variant][name], dict(EXPECTED[name].measured)
    if variant == LATEST:
        expected |= EXPECTED[name].on_latest
    assert {key: row[key] for key in expected} == expected


@pytest.mark.parametrize("name", ON_OLD_TORCH)
@pytest.mark.parametrize("variant", OLD_TORCH, ids=str)
def test_findings_on_torch_2_11(variant: Variant, name: str) -> None:
    assert on_old_torch(variant)[name]["findings"] == ON_OLD_TORCH[name].findings(variant)


def test_torch_2_11_raises_on_stock_alone() -> None:
    steps = [on_old_torch(variant)["layers in bf16"]["step"] for variant in OLD_TORCH]
    assert steps == [DTYPES, "trains"]


@pytest.mark.parametrize("variant", COLUMNS, ids=str)
def test_no_model_is_changed(variant: Variant) -> None:
    assert [name for name, row in measured()[variant].items() if row["changed"]] == []


@pytest.mark.parametrize("variant", COLUMNS, ids=str)
def test_a_model_of_32_layers_takes_no_time(variant: Variant) -> None:
    assert measured()[variant]["on meta"]["seconds"] < SECONDS


@pytest.mark.parametrize("variant", COLUMNS, ids=str)
def test_no_scenario_is_left_out(variant: Variant) -> None:
    assert measured()[variant].keys() == EXPECTED.keys()
