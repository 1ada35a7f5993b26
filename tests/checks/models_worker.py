"""What the rules about gradients and checkpoints find in real models, and whether it is true.

`python models_worker.py RESULT.json GROUP...` writes, for each scenario of the groups: what was found, whether the
model was changed by that, and where it is cheap, what a step shows of what the finding says. One gloo rank.
"""

import functools
import json
import logging
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where the overlay wheel is not installed
import overlay

REENTRANT, NON_REENTRANT = {"use_reentrant": True}, {"use_reentrant": False}
CODES = {
    "captured-outputs",
    "forward-replaced",
    "fsdp2-inside-layer",
    "fsdp2-mixed-precision",
    "fsdp2-reentrant",
    "inputs-without-gradients",
    "keyword-tensors",
    "not-training",
    "training-generation",
}
"""Without those that other workers are for."""
INFOS = {"training-generation"}
"""What is told of a model as an info; other rules have theirs for an environment."""
FAILED = "this could not be looked at"

VOCABULARY = 99
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TEXT = SIZES | {"vocab_size": VOCABULARY}
GROUPED = TEXT | {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "eager"}
IMAGES = {"image_size": 16, "patch_size": 4}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
GEMMA = GROUPED | {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "sliding_window": 8,
}
MLLAMA = {
    "text_config": GROUPED
    | {
        "num_hidden_layers": 4,
        "cross_attention_layers": [1, 3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "vision_config": SIZES
    | IMAGES
    | {
        "num_global_layers": 1,
        "attention_heads": 4,
        "max_num_tiles": 1,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    },
}
LLAMA4_VISION = (
    SIZES
    | IMAGES
    | {"intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
)
WAV2VEC2 = SIZES | {
    "conv_dim": [8, 8],
    "conv_kernel": [8, 8],
    "conv_stride": [4, 4],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
LLAVA = {
    "text_config": GROUPED | {"model_type": "llama"},
    "vision_config": SIZES | IMAGES | {"model_type": "clip_vision_model"},
    "image_token_id": 98,
}

TOKENS = torch.arange(20).view(2, 10)

Scenario = Callable[[], tuple[nn.Module, dict[str, Any]]]
"""Makes a model, and measures what there is to measure once it has been checked."""


def build(name: str, checkpointing: dict[str, Any] | None = None, **config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config)).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    return model


def llama(checkpointing: dict[str, Any] | None = REENTRANT, **config: Any) -> PreTrainedModel:
    return build("LlamaModel", checkpointing, **GROUPED | config)


def freeze(*modules: nn.Module) -> None:
    for module in modules:
        module.requires_grad_(False)


def is_right(model: nn.Module, reference: nn.Module) -> bool:
    """Whether two models have the same gradients, within rounding."""
    difference = total = 0.0
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        if expected.grad is not None:
            total += float(expected.grad.pow(2).sum())
            difference += float((whole(found) - expected.grad).pow(2).sum())
    return difference < 1e-10 * total


def whole(parameter: Tensor) -> Tensor | float:
    """The gradient of a parameter, which may be sharded."""
    gradient = parameter.grad
    if gradient is None:
        return 0.0
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


# ---- ordinary models

ORDINARY: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Mixtral": ("MixtralForCausalLM", EXPERTS),
    "Qwen3 MoE": ("Qwen3MoeForCausalLM", GROUPED | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}),
    "T5": ("T5ForConditionalGeneration", T5),
    "BART": ("BartForConditionalGeneration", BART),
    "Whisper": ("WhisperForConditionalGeneration", BART),
    "BERT": ("BertForMaskedLM", TEXT),
    "GPT-2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}),
    "ViT": ("ViTForImageClassification", SIZES | IMAGES),
    "CLIP": ("CLIPModel", {"text_config": TEXT, "vision_config": SIZES | IMAGES}),
    "Wav2Vec2": ("Wav2Vec2ForCTC", WAV2VEC2),
    "LLaVA": ("LlavaForConditionalGeneration", LLAVA),
    "Gemma 3n, without shared keys": ("Gemma3nForCausalLM", GEMMA | {"num_kv_shared_layers": 0}),
}


def ordinary(family: str, checkpointing: dict[str, Any]) -> PreTrainedModel:
    name, config = ORDINARY[family]
    return build(name, checkpointing, **config)


# ---- fully_shard


def sharded(model: nn.Module, *modules: nn.Module, **options: Any) -> nn.Module:
    for module in modules:
        fully_shard(module, **options)
    return fully_shard(model)


def sharded_layers(checkpointing: dict[str, Any] = REENTRANT, **options: Any) -> nn.Module:
    model = llama(checkpointing)
    return sharded(model, *model.layers, **options)


def sharded_in_part() -> nn.Module:
    model = llama()
    freeze(model.layers[0])
    return sharded(model, *model.layers)


def sharded_root() -> nn.Module:
    return fully_shard(llama())


def own_function(*, inside: bool = False) -> nn.Module:
    def function(call: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(call, *args, use_reentrant=True)

    model = llama()
    for layer in model.layers:
        layer._gradient_checkpointing_func = function
    return sharded(model, *(layer.mlp if inside else layer for layer in model.layers))


def wrapped_then_sharded() -> nn.Module:
    model = llama(None)
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer, CheckpointImpl.REENTRANT)
    return sharded(model, *model.layers)


def sharded_then_wrapped(implementation: CheckpointImpl) -> tuple[nn.Module, dict[str, Any]]:
    model, reference = llama(None), llama(None)
    model.layers[1] = checkpoint_wrapper(fully_shard(model.layers[1]), implementation)
    fully_shard(model)

    def two_forwards() -> bool:
        for one in (model, reference):
            sum(one(input_ids=tokens).last_hidden_state.pow(2).mean() for tokens in (TOKENS, TOKENS + 9)).backward()
        return is_right(model, reference)

    return model, {"right gradients": two_forwards}


def sharded_inside(checkpointing: dict[str, Any], frozen: bool = False) -> nn.Module:
    model = llama(checkpointing)
    for layer in model.layers if frozen else ():
        freeze(layer.mlp)
    return sharded(model, *(layer.mlp for layer in model.layers), *model.layers[1:])


def another_call() -> nn.Module:
    """A layer whose call is not `nn.Module`'s own."""

    class Called(LlamaDecoderLayer):
        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            return super()._call_impl(*args, **kwargs)

    model = llama(None)
    model.layers[1] = Called(model.config, 1)
    model.gradient_checkpointing_enable(REENTRANT)
    return sharded(model, model.layers[1])


def compiled() -> nn.Module:
    return torch.compile(sharded_layers())


def in_bf16(root: bool, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, **options)
    model = llama(NON_REENTRANT)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    model = fully_shard(model, **({"mp_policy": policy} if root else {}))

    def step() -> Any:
        model(input_ids=TOKENS).last_hidden_state.sum().backward()
        return "trains"

    return model, {"step": step}


# ---- outputs captured inside of a layer


def router_logits(checkpointing: dict[str, Any], **config: Any) -> tuple[nn.Module, dict[str, Any]]:
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.01} | config
    model = build("MixtralForCausalLM", checkpointing, **EXPERTS | options)

    def has_gradient() -> bool:
        return bool(model(input_ids=TOKENS, labels=TOKENS).aux_loss.requires_grad)

    return model, {"the loss on them has a gradient": has_gradient} if options["output_router_logits"] else {}


def captured(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model = build("MixtralModel", REENTRANT, **EXPERTS | {f"output_{name}": True})

    def has_gradient() -> bool:
        return all(output.requires_grad for output in model(input_ids=TOKENS)[name])

    return model, {"a loss on them has a gradient": has_gradient}


# ---- layers that are not checkpointed


@contextmanager
def recomputed(layer: nn.Module) -> Iterator[Callable[[], bool]]:
    """Whether what is inside of a layer ran again in a backward."""
    calls = []
    handle = layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))  # a recompute may end before its output
    try:
        yield lambda: len(calls) == 2
    finally:
        handle.remove()


def is_recomputed(model: nn.Module, layer: nn.Module) -> dict[str, Callable[[], bool]]:
    def step() -> bool:
        with recomputed(layer) as again:
            model(input_ids=TOKENS).last_hidden_state.sum().backward()
            return again()

    return {"recomputed": step}


def replacement(self: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return hidden_states + self.mlp(hidden_states)


class Subclassed(LlamaDecoderLayer):
    forward = replacement


class Replaced(LlamaDecoderLayer):
    """Its forward is replaced below, after the class was made."""


Replaced.forward = replacement


def with_layer(kind: type[nn.Module]) -> tuple[nn.Module, dict[str, Any]]:
    model = llama(None)
    model.layers[0] = kind(model.config, 0)
    model.gradient_checkpointing_enable(NON_REENTRANT)
    return model, is_recomputed(model, model.layers[0])


def replaced_before_sharding() -> tuple[nn.Module, dict[str, Any]]:
    model, measures = with_layer(Replaced)
    return sharded(model, *model.layers), measures


def on_instance(replace: Callable[[nn.Module], None]) -> tuple[nn.Module, dict[str, Any]]:
    model = llama(NON_REENTRANT)
    replace(model.layers[0])
    return model, is_recomputed(model, model.layers[0])


def put_in(layer: nn.Module) -> None:
    layer.forward = types.MethodType(replacement, layer)


def closing_over(layer: nn.Module) -> None:
    old = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs)

    layer.forward = functools.wraps(old)(forward)


def kept_on_the_layer(layer: nn.Module) -> None:
    """As accelerate's `add_hook_to_module` does."""
    layer._old_forward = layer.forward
    layer.forward = functools.partial(lambda module, *args, **kwargs: module._old_forward(*args, **kwargs), layer)


def mocked(layer: nn.Module) -> None:
    layer.forward = mock.MagicMock(wraps=layer.forward)


def in_eval_mode(trained: bool) -> tuple[nn.Module, dict[str, Any]]:
    model = llama(NON_REENTRANT)
    model.layers[0].eval()
    if not trained:
        freeze(model.layers[0])
    return model, is_recomputed(model, model.layers[0])


# ---- layers whose inputs require no gradients


def without_gradients(model: nn.Module, **inputs: Tensor) -> dict[str, Callable[[], int]]:
    """How many parameters of the layers that are to be trained get none."""

    def step() -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = model(**inputs)
        loss = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
        loss.sum().backward()
        return sum(
            parameter.grad is None
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and "layer" in name
        )

    return {"parameters without gradient": step}


def adapted(name: str, checkpointing: dict[str, Any], inputs: bool, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    from peft import LoraConfig, get_peft_model

    language = name == "LlamaForCausalLM"
    model = build(name, checkpointing, **(GROUPED if language else SIZES | IMAGES))
    if inputs:
        model.enable_input_require_grads()
    elif language:
        model.disable_input_require_grads()
    targets = [part for part, _ in model.named_modules() if part.endswith(("q_proj", "query"))]
    with mock.patch("peft.peft_model.PeftModel._prepare_model_for_gradient_checkpointing", lambda self, model: model):
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, **options)).train()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return model, without_gradients(model, **({"input_ids": TOKENS} if language else {"pixel_values": images}))


def frozen_embeddings(checkpointing: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    model = llama(checkpointing)
    model.disable_input_require_grads()
    freeze(model.embed_tokens)
    return model, without_gradients(model, input_ids=TOKENS)


def frozen_first_layer() -> nn.Module:
    """Where the embeddings train, the second layer's inputs require gradients."""
    model = llama()
    model.disable_input_require_grads()
    freeze(model.layers[0])
    return model


# ---- tensors by keyword


def whisper_with_frozen_inputs() -> tuple[nn.Module, dict[str, Any]]:
    """The encoder's are its convolutions and positions; the decoder trains."""
    model = ordinary("Whisper", REENTRANT)
    encoder = model.model.encoder
    freeze(encoder.conv1, encoder.conv2, encoder.embed_positions)
    length = 2 * model.config.max_source_positions
    sounds = torch.randn(1, model.config.num_mel_bins, length, generator=torch.Generator().manual_seed(0))
    return model, without_gradients(model, input_features=sounds, decoder_input_ids=TOKENS[:1])


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.images = llama(), ordinary("ViT", REENTRANT)
        freeze(self.images.vit.embeddings)


class Prompted(nn.Module):
    """Visual prompt tuning: what trains is put between the embeddings and the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = ordinary("ViT", REENTRANT)
        freeze(self.backbone.vit.embeddings)
        self.prompt = nn.Parameter(torch.zeros(4, 32))


def reentrant_wrapper() -> tuple[nn.Module, dict[str, Any]]:
    model = llama(None)
    freeze(model.embed_tokens, model.layers[0])
    model.layers[1] = checkpoint_wrapper(model.layers[1], CheckpointImpl.REENTRANT)
    return model, without_gradients(model, input_ids=TOKENS)


def traced() -> nn.Module:
    model = llama()
    model.traced = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    return model


class Raising(nn.Module):
    """Of which nothing can be asked."""

    def __getattr__(self, name: str) -> Any:
        if name in ("_modules", "_parameters", "_buffers"):
            return super().__getattr__(name)
        raise KeyError(name)


def raising() -> nn.Module:
    model = llama()
    model.raising = Raising()
    return model


def vision() -> tuple[nn.Module, dict[str, Any]]:
    model = build("Llama4VisionModel", REENTRANT, **LLAMA4_VISION)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return model, without_gradients(model, pixel_values=images)


def shared_keys(checkpointing: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    model = build("Gemma3nForCausalLM", checkpointing, **GEMMA)
    reference = build("Gemma3nForCausalLM", None, **GEMMA)

    def step() -> bool:
        for one in (model, reference):
            one(input_ids=TOKENS + 1, labels=TOKENS + 1, use_cache=False).loss.backward()
        return is_right(model, reference)

    return model, {"right gradients": step}


def cross_attention(checkpointing: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    model = build("MllamaForConditionalGeneration", checkpointing, **MLLAMA, image_token_index=98)
    images = torch.randn(2, 1, 1, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def step() -> str:
        model(
            input_ids=TOKENS + 1,
            pixel_values=images,
            aspect_ratio_ids=torch.ones(2, 1, dtype=torch.long),
            aspect_ratio_mask=torch.ones(2, 1, 1, dtype=torch.long),
            cross_attention_mask=torch.ones(2, 10, 1, 1, dtype=torch.long),
        ).logits.sum().backward()
        return "trains"

    return model, {"step": step}


# ---- odd models


class Odd(nn.Module):
    """Attributes of the expected names, with other contents."""

    config = gradient_checkpointing = _gradient_checkpointing_func = 1
    _can_record_outputs = None

    def get_input_embeddings(self) -> None:
        raise NotImplementedError


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return build("LlamaForCausalLM", REENTRANT, **GROUPED | {"num_hidden_layers": 32})


def parallel() -> nn.Module:
    return nn.parallel.DistributedDataParallel(llama())


def model_only(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Scenario:
    return lambda: (make(*args, **kwargs), {})


SCENARIOS: dict[str, dict[str, Scenario]] = {
    "ordinary": {
        f"{family}, {word}": model_only(ordinary, family, mode)
        for family in ORDINARY
        for word, mode in (("reentrant", REENTRANT), ("non-reentrant", NON_REENTRANT))
    },
    "fsdp2": {
        "layers sharded, reentrant": model_only(sharded_layers),
        "layers sharded, use_reentrant not given": model_only(sharded_layers, {}),
        "layers sharded, non-reentrant": model_only(sharded_layers, NON_REENTRANT),
        "layers sharded, one of them frozen": model_only(sharded_in_part),
        "layers sharded, not checkpointed": model_only(lambda: (lambda one: sharded(one, *one.layers))(llama(None))),
        "layers sharded, compiled": model_only(compiled),
        "root sharded": model_only(sharded_root),
        "own checkpoint function": model_only(own_function),
        "sharded inside, own checkpoint function": model_only(own_function, inside=True),
        "checkpoint_wrapper, then sharded": model_only(wrapped_then_sharded),
        "sharded, then checkpoint_wrapper": lambda: sharded_then_wrapped(CheckpointImpl.REENTRANT),
        "sharded, then non-reentrant checkpoint_wrapper": lambda: sharded_then_wrapped(CheckpointImpl.NO_REENTRANT),
        "sharded inside, reentrant": model_only(sharded_inside, REENTRANT),
        "sharded inside, non-reentrant": model_only(sharded_inside, NON_REENTRANT),
        "sharded inside, frozen": model_only(sharded_inside, REENTRANT, frozen=True),
        "another call": model_only(another_call),
    },
    "bf16": {
        "layers in bf16": lambda: in_bf16(root=False),
        "layers in bf16, inputs not cast": lambda: (in_bf16(root=False, cast_forward_inputs=False)[0], {}),
        "layers and root in bf16": lambda: in_bf16(root=True),
    },
    "captured": {
        "router logits": lambda: router_logits(REENTRANT),
        "router logits, non-reentrant": lambda: router_logits(NON_REENTRANT),
        "router logits, no coefficient": lambda: router_logits(REENTRANT, router_aux_loss_coef=0.0),
        "router logits, not asked for": lambda: router_logits(REENTRANT, output_router_logits=False),
        "attentions": lambda: captured("attentions"),
        "hidden states": lambda: captured("hidden_states"),
    },
    "not checkpointed": {
        "forward of a subclass": lambda: with_layer(Subclassed),
        "forward of the class": lambda: with_layer(Replaced),
        "forward of the class, then sharded": replaced_before_sharding,
        "forward of a layer": lambda: on_instance(put_in),
        "forward of a layer, around the old one": lambda: on_instance(closing_over),
        "forward of a layer, which keeps the old one": lambda: on_instance(kept_on_the_layer),
        "forward of a layer, mocked": lambda: on_instance(mocked),
        "eval mode": lambda: in_eval_mode(trained=True),
        "eval mode, frozen": lambda: in_eval_mode(trained=False),
    },
    "inputs": {
        "frozen embeddings": lambda: frozen_embeddings(REENTRANT),
        "frozen embeddings, non-reentrant": lambda: frozen_embeddings(NON_REENTRANT),
        "frozen first layer": model_only(frozen_first_layer),
        "frozen inputs of the encoder of Whisper": whisper_with_frozen_inputs,
        "a tower with frozen embeddings": model_only(Towers),
        "a prompt before the layers": model_only(Prompted),
        "frozen embeddings, checkpoint_wrapper": reentrant_wrapper,
    },
    "peft": {
        "LoRA on Llama": lambda: adapted("LlamaForCausalLM", REENTRANT, inputs=True),
        "LoRA on Llama, without the hook": lambda: adapted("LlamaForCausalLM", REENTRANT, inputs=False),
        "LoRA on Llama, embeddings trained": lambda: adapted(
            "LlamaForCausalLM", REENTRANT, inputs=False, modules_to_save=["embed_tokens"]
        ),
        "LoRA on ViT": lambda: adapted(
            "ViTForImageClassification", REENTRANT, inputs=False, modules_to_save=["classifier"]
        ),
        "LoRA on ViT, with the hook": lambda: adapted("ViTForImageClassification", REENTRANT, inputs=True),
        "LoRA on ViT, non-reentrant": lambda: adapted("ViTForImageClassification", NON_REENTRANT, inputs=False),
    },
    "keywords": {
        "Llama 4 vision": vision,
        "Gemma 3n": lambda: shared_keys(REENTRANT),
        "Gemma 3n, non-reentrant": lambda: shared_keys(NON_REENTRANT),
        "Mllama": lambda: cross_attention(REENTRANT),
        "Mllama, non-reentrant": lambda: cross_attention(NON_REENTRANT),
    },
    "odd": {
        "on meta": model_only(on_meta),
        "DistributedDataParallel": model_only(parallel),
        "no transformers model": model_only(lambda: nn.Sequential(nn.Linear(2, 2), Odd())),
        "a traced submodule": model_only(traced),
        "a submodule that raises": model_only(raising),
    },
}


def snapshot(model: nn.Module) -> list[Any]:
    """What a check could change."""
    return [
        (name, id(module), type(module), module.training, sorted(vars(module)), len(module._forward_hooks))
        for name, module in model.named_modules()
    ] + [(name, id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()]


def observe(scenario: Scenario) -> dict[str, Any]:
    model, measures = scenario()
    before = snapshot(model)
    started = time.process_time()
    findings = overlay.check(model)
    row = {
        "seconds": time.process_time() - started,
        "changed": snapshot(model) != before,
        "findings": {
            one.code: [one.severity, one.where]
            for one in findings
            if one.code in CODES and (one.severity != "info" or one.code in INFOS or one.what == FAILED)
        },
    }
    for name, measure in measures.items():
        try:
            row[name] = measure()
        except RuntimeError as error:
            row[name] = str(error).partition("\n")[0]
    return row


def main(result: Path, groups: list[str]) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = {name: observe(scenario) for group in groups for name, scenario in SCENARIOS[group].items()}
    dist.destroy_process_group()
    written = {"transformers": transformers.__version__, "rows": rows}
    result.write_text(json.dumps(written))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
