"""Hooks of accelerate, which put a `forward` of their own on the layer, around checkpointed layers.

`python accelerate_worker.py RESULT.json` writes what was observed. An offloaded weight is on the meta device, and in
place for as long as the `forward` that accelerate put there runs: a recompute has to run it, too.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from torch import Tensor, nn
from transformers import LlamaForCausalLM

sys.path.append(str(Path(__file__).parent))
from shared_worker import (
    COUNTS,
    IDS,
    Observed,
    Setup,
    build,
    count,
    counted,
    gradients,
    layers,
    main,
    same,
    step,
)

WHOLE = {"preload_module_classes": ["LlamaDecoderLayer"]}
"""The layer's own hook places all weights of the layer, and not a hook of each linear module its own."""

SCRATCH = tempfile.TemporaryDirectory()

Attach = Callable[[LlamaForCausalLM], None]


def train(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """The gradients, with that of the embeddings that go in: most weights have none where they are offloaded."""
    table = nn.Embedding(97, 32, _weight=torch.linspace(-1, 1, 97 * 32).reshape(97, 32))
    embeddings = table(IDS).detach().requires_grad_()
    step(model, input_ids=None, inputs_embeds=embeddings)
    assert embeddings.grad is not None
    return {"embeddings": embeddings.grad, **gradients(model)}


def placed(attach: Attach) -> Callable[[Setup], Observed]:
    """A model whose weights `attach` moves; the reference has them where they are."""

    def run(setup: Setup) -> Observed:
        expected, offloaded, model = train(build()), build(), build()
        attach(offloaded)
        attach(model)
        setup.enable(model)
        count(model, setup)
        unchecked, found = train(offloaded), train(model)
        assert unchecked.keys() < expected.keys()
        kept = {name: expected[name] for name in unchecked}
        return counted(setup) | {"gradients": same(found, unchecked) and same(found, kept)}

    return run


def offload(**options: list[str]) -> Attach:
    def attach(model: LlamaForCausalLM) -> None:
        cpu_offload(model, execution_device=torch.device("cpu"), **options)

    return attach


def dispatch(**options: list[str]) -> Attach:
    def attach(model: LlamaForCausalLM) -> None:
        places = {"model.layers.0": "disk", "model.layers.1": "cpu"}
        others = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
        dispatch_model(
            model,
            dict.fromkeys(others, "cpu") | places,
            main_device="cpu",
            offload_dir=tempfile.mkdtemp(dir=SCRATCH.name),
            **options,
        )

    return attach


class Counting(ModelHook):
    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[object, object]:
        COUNTS["before"] += 1
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> object:
        COUNTS["after"] += 1
        return output


def hooked(order: str, remove: bool = False) -> Callable[[Setup], Observed]:
    def run(setup: Setup) -> Observed:
        expected, model = train(build()), build()
        if order == "enabled before":
            setup.enable(model)
        for layer in layers(model):
            add_hook_to_module(layer, Counting())
            add_hook_to_module(layer, Counting(), append=True)
        if order == "enabled after":
            setup.enable(model)
        count(model, setup)
        if remove:
            remove_hook_from_submodules(model)
        found = train(model)
        return {
            "accelerate's": [COUNTS["before"], COUNTS["after"]],
            **counted(setup),
            "gradients": same(found, expected),
        }

    return run


SCENARIOS = {
    "cpu_offload": placed(offload()),
    "cpu_offload, a layer at a time": placed(offload(**WHOLE)),
    "dispatch_model, a layer on disk": placed(dispatch()),
    "dispatch_model, a layer on disk, as a whole": placed(dispatch(**WHOLE)),
    "add_hook_to_module, checkpointing enabled before": hooked("enabled before"),
    "add_hook_to_module, checkpointing enabled after": hooked("enabled after"),
    "remove_hook_from_submodules": hooked("enabled after", remove=True),
}

if __name__ == "__main__":
    main(SCENARIOS)
