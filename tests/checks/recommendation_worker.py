"""`overlay.recommended_checkpoint_kwargs` for real models, and what comes of doing what it says. One gloo rank.

`python recommendation_worker.py RESULT.json` writes, for each scenario: what is recommended and why, or the error; what
`overlay.check` has against the model once the recommendation is applied; and whether its gradients then are those of
the model without checkpointing.
"""

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    TrainingArguments,
)

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where the overlay wheel is not installed
import overlay
from overlay.checks.environment import Environment

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
IDS = torch.arange(32).reshape(2, 16)

Model = Callable[[], nn.Module]
SCENARIOS: dict[str, tuple[Model, Callable[[], Any]]] = {}


def scenario(name: str, within: Callable[[], Any] = nullcontext) -> Callable[[Model], Model]:
    def register(make: Model) -> Model:
        assert name not in SCENARIOS
        SCENARIOS[name] = make, within
        return make

    return register


@contextmanager
def old_deepspeed() -> Iterator[None]:
    with mock.patch.object(deepspeed, "__version__", "0.19.2"):
        yield


@contextmanager
def guarded() -> Iterator[None]:
    with old_deepspeed(), mock.patch.object(Environment, "patched", frozenset({"transformers.modeling_utils"})):
        yield


@contextmanager
def old_torch() -> Iterator[None]:
    with mock.patch.object(torch, "__version__", "2.11.0"):
        yield


@scenario("Llama")
def llama(**options: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options))


@scenario("Llama with dropout")
def _() -> nn.Module:
    return llama(attention_dropout=0.2)


@scenario("BERT, which has dropout")
def _() -> nn.Module:
    sizes = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "use_cache")}
    return BertForMaskedLM(BertConfig(**sizes))


class Noisy(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + torch.randn_like(x))


@scenario("a module of the user's that draws")
def _() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = Noisy(layer.mlp)
    return model


def noisy(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * torch.randn_like(output)


@scenario("a hook of the user's that draws")
def _() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(noisy)
    return model


@scenario("a loss on router logits")
def _() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2, output_router_logits=True))


def lora(**options: Any) -> nn.Module:
    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **options))


@scenario("LoRA")
def _() -> nn.Module:
    return lora()


@scenario("LoRA with dropout")
def _() -> nn.Module:
    return lora(lora_dropout=0.2)


@scenario("fully_shard")
def _() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@scenario("fully_shard in bf16 on the layers only, as if on torch 2.11", old_torch)
def _() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return fully_shard(model)


class Merging(nn.Linear):
    """As loralib's layers, of which `train` changes the weight."""

    def train(self, mode: bool = True) -> "Merging":
        if mode != self.training:
            self.weight.data += -1 if mode else 1
        return super().train(mode)


@scenario("a layer that train() changes")
def _() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.up_proj = Merging(32, 64, bias=False)
    return model


@scenario("a traced submodule in the blocks")
def _() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.jit.trace(nn.Sigmoid(), torch.zeros(2))
    return model


def no_module(model: Any) -> str:
    messages = []
    for function in (overlay.check, overlay.recommended_checkpoint_kwargs):
        try:
            function(model)
        except overlay.OverlayError as error:
            messages.append(str(error))
    [message, other] = messages
    assert message == other
    return message


def changing(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    hidden_states += 1
    return self.mlp(hidden_states)


@scenario("an operation in place")
def _() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.forward = changing.__get__(layer)
    return model


def zero3() -> nn.Module:
    made = lora()
    return deepspeed.initialize(
        model=made,
        optimizer=torch.optim.SGD([one for one in made.parameters() if one.requires_grad], lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        },
    )[0]


scenario("LoRA under ZeRO-3")(zero3)
scenario("LoRA under ZeRO-3, as if of 0.19.2", old_deepspeed)(zero3)
scenario("LoRA under ZeRO-3, as if of 0.19.2 and guarded", guarded)(zero3)


def build(make: Model) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    model.train()
    return model


def step(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    loss = model(input_ids=IDS, labels=IDS).loss
    if isinstance(model, deepspeed.DeepSpeedEngine):
        model.backward(loss)
        found = {name: deepspeed.utils.safe_get_full_grad(one) for name, one in model.named_parameters()}
    else:
        loss.backward()
        found = {name: one.grad for name, one in model.named_parameters()}
    return {name: getattr(one, "_local_tensor", one) for name, one in found.items() if one is not None}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        (one[name] - other[name]).norm() <= 1e-4 * one[name].norm() for name in one
    )


def apply(model: nn.Module, arguments: dict[str, bool], *, inputs: bool) -> None:
    inner = getattr(model, "module", model)
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    if inputs:
        inner.enable_input_require_grads()


def observe(make: Model, within: Callable[[], Any]) -> dict[str, Any]:
    model = build(make)
    model.eval()
    modes = [module.training for module in model.modules()]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with within():
        try:
            arguments = overlay.recommended_checkpoint_kwargs(model)
        except overlay.OverlayError as error:
            return {"error": str(error)}
        kept = modes == [module.training for module in model.modules()] and all(
            map(torch.equal, weights, model.parameters())
        )
        model.train()
        apply(model, arguments, inputs="enable_input_require_grads" in arguments.why)
        findings = [[one.severity, one.code] for one in overlay.check(model) if one.severity != "info"]
    return {
        "recommended": arguments,
        "why": arguments.why,
        "modes kept": kept,
        "findings": findings,
        "gradients": same(step(build(make)), step(model)),
    }


def without_random_state(make: Model) -> bool:
    """Whether gradients are right if the state of the generators is not kept, whatever is recommended."""
    model = build(make)
    apply(model, {"use_reentrant": False, "preserve_rng_state": False}, inputs=False)
    return same(step(build(make)), step(model))


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute or more
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    observed: dict[str, Any] = {name: observe(*made) for name, made in SCENARIOS.items()}
    for name in observed:
        if "ZeRO-3" not in name and "fully_shard" not in name and "in place" not in name:
            observed[name]["without random state"] = without_random_state(SCENARIOS[name][0])
    arguments = overlay.recommended_checkpoint_kwargs(build(llama))
    told = TrainingArguments("unused", use_cpu=True, report_to=[], gradient_checkpointing_kwargs=arguments)
    observed["in TrainingArguments"] = json.loads(told.to_json_string())["gradient_checkpointing_kwargs"]
    observed["no modules"] = {
        str(kind): no_module(one) for kind, one in (("int", 3), ("list", []), ("class", nn.Linear))
    }
    try:
        overlay.recommended_checkpoint_kwargs(None)
    except overlay.OverlayError as error:
        observed["no modules"]["None"] = str(error)
    dist.destroy_process_group()
    Path(sys.argv[1]).write_text(json.dumps(observed), "utf-8")


if __name__ == "__main__":
    main()
