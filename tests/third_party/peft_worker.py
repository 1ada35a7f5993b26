"""PEFT's LoRA, and its aLoRA (activated LoRA), whose offsets travel through hooks of the checkpointed layers.

`python peft_worker.py RESULT.json` writes what was observed. aLoRA adapts the tokens from an invocation on. PEFT hands
its layers the offset of the invocation in forward pre-hooks; so that the recompute gets it, too, a pre-hook of each
checkpointed layer puts them in, and a backward hook of the same layer takes them out.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))
from shared_worker import COUNTS, REFERENCE, Observed, Setup, build, count, counted, gradients, main, same, step

INVOKED = {"alora_invocation_tokens": [9, 10]}
"""Token ids that are in the first sequence alone; the second one has no adapter."""


def adapted(setup: Setup, order: str = "enabled before", **options: Any) -> PeftModel:
    model = build()
    if order == "enabled before":
        setup.enable(model)
    torch.manual_seed(1)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **options
    )
    peft = get_peft_model(model, config)
    if order == "enabled after":
        setup.enable(model)
    return peft.train()


def lora(order: str) -> Callable[[Setup], Observed]:
    def run(setup: Setup) -> Observed:
        reference, model = adapted(REFERENCE, lora_dropout=0.1), adapted(setup, order, lora_dropout=0.1)
        step(reference)
        count(model, setup)
        step(model)
        return counted(setup) | {"gradients": same(gradients(model), gradients(reference))}

    return run


def count_offsets(model: nn.Module) -> None:
    def run(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        COUNTS["offsets"] += kwargs.get("alora_offsets") is not None

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.register_forward_hook(run, with_kwargs=True)


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._backward_hooks) for module in model.modules())


def alora(order: str) -> Callable[[Setup], Observed]:
    def run(setup: Setup) -> Observed:
        plain, reference = adapted(REFERENCE), adapted(REFERENCE, **INVOKED)
        step(plain)
        step(reference)
        assert not same(gradients(plain), gradients(reference))
        model = adapted(setup, order, **INVOKED)
        count(model, setup)
        count_offsets(model)
        before = hooks_of(model)
        step(model)
        observed = {"offsets": COUNTS["offsets"], **counted(setup), "hooks left": hooks_of(model) - before}
        first = same(gradients(model), gradients(reference))
        model.zero_grad()
        step(model)
        return observed | {"gradients": first and same(gradients(model), gradients(reference))}

    return run


def without_gradients_of_inputs(setup: Setup) -> Observed | None:
    """PyTorch runs a module's backward hook early where nothing that goes in requires a gradient."""
    if setup.reentrant:  # which trains nothing then
        return None
    model = adapted(setup, "enabled after", **INVOKED)
    model.get_input_embeddings()._forward_hooks.clear()
    count(model, setup)
    step(model)
    return counted(setup)


SCENARIOS = {
    f"{what}, checkpointing {order} PEFT": make(order)
    for what, make in {"LoRA": lora, "aLoRA": alora}.items()
    for order in ("enabled before", "enabled after")
} | {"aLoRA, inputs that require no gradients": without_gradients_of_inputs}

if __name__ == "__main__":
    main(SCENARIOS)
