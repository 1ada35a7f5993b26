"""PEFT under DeepSpeed's ZeRO-3 with activation checkpointing.

A worker (`overlay.measure.rows`), which is told the ranks, the backend, the name of its group, and cases. It trains
tiny models in each, in one group of ranks, and finds what rank 0 observed: losses, gradients, warnings, which kind of
checkpoint was used, and errors.
"""

import contextlib
import copy
import functools
import gc
import logging
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    modeling_utils,
)

from overlay.measure import group, rows
from overlay.measure.experiments import loaded
from overlay.measure.experiments.tiny import SIZES

RELEASE = tuple(map(int, transformers.__version__.partition("+")[0].split(".")))
STEPS = 2
NON_REENTRANT = {"use_reentrant": False}
KINDS = {(True,): "not checkpointed", (False, True): "reentrant", (True, True): "non-reentrant"}
"""By whether gradients were enabled in each forward of a layer: a reentrant checkpoint's first one is without."""

Observed = dict[str, Any]
SAID: list[str] = []
"""Warnings of transformers since the scenario began."""


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        SAID.append(record.getMessage())


def enable(model: Any, *options: dict[str, Any], **more: Any) -> None:
    model = getattr(model, "module", model)
    getattr(model, "activation_checkpointing_enable" if RELEASE >= (5, 23) else "gradient_checkpointing_enable")(
        *options, **more
    )


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options))


EARLY = llama()
enable(EARLY)
assert "deepspeed" not in sys.modules
os.environ.update(DS_ACCELERATOR="cuda" if rows.asked()["backend"] == "nccl" else "cpu", DS_BUILD_OPS="0")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.utils import safe_get_full_grad  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, which takes a minute


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True))


def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name not in ("vocab_size", "num_key_value_heads")}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8))


class OwnConfig(PreTrainedConfig):
    model_type = "own"


class OwnLayer(nn.Module):
    """Takes tensors by keyword and in a dict, and returns them in one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q_proj, self.v_proj = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, *, hidden: Tensor, memory: dict[str, list[Tensor]], scale: float) -> dict[str, Any]:
        mixed = self.q_proj(self.norm(hidden)).tanh() * memory["states"][0] + scale * hidden
        return {"hidden": self.v_proj(mixed), "states": [mixed], "scale": scale}


class OwnModel(PreTrainedModel):
    """Calls the checkpoint function by itself, as models on the hub do; has no embeddings."""

    config_class = OwnConfig
    supports_gradient_checkpointing = True
    main_input_name = "pixels"

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.memory = nn.Linear(32, 32)
        self.layers = nn.ModuleList(OwnLayer() for _ in range(2))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(self, pixels: Tensor) -> Tensor:
        hidden, memory = pixels, {"states": [self.memory(pixels)]}
        for layer in self.layers:
            call = functools.partial(layer.__call__, hidden=hidden, memory=memory, scale=0.5)
            checkpointed = self.gradient_checkpointing and self.training
            found = self._gradient_checkpointing_func(call) if checkpointed else call()
            hidden, memory = found["hidden"], found
        return (hidden * memory["states"][0]).pow(2).mean()


def lora(model: PreTrainedModel, **options: Any) -> Any:
    torch.manual_seed(1)
    config = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(r=4, **config))


def engine(model: nn.Module, stage: int = 3, persistent: int = 0, accumulated: int = 1) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulated,
        "gradient_clipping": 1.0,  # the default of 0.19.3, and not of 0.19.2
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": persistent},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    return deepspeed.initialize(model=model.train(), optimizer=optimizer, config=config)[0]


def generator(i: int) -> torch.Generator:
    return torch.Generator().manual_seed(10 * i + int(os.environ["LOCAL_RANK"]))


def text(i: int) -> Observed:
    ids = torch.randint(0, SIZES["vocab_size"], (2, 16), generator=generator(i))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def images(i: int) -> Observed:
    pixels = torch.randn(2, 3, 16, 16, generator=generator(i))
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (2,), generator=generator(i))}


def pixels(i: int) -> Observed:
    return {"pixels": torch.randn(2, 8, 32, generator=generator(i))}


def loss_of(model: Any, inputs: Observed) -> Tensor:
    device = get_accelerator().current_device_name()
    found = model(**{name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()})
    return found if isinstance(found, Tensor) else found.loss


def watch(model: nn.Module) -> list[bool]:
    """Whether gradients are enabled, of each forward of the last layer from now on."""
    enabled: list[bool] = []
    *_, module = (m for name, m in model.named_modules() if name.rpartition(".")[2] in ("q_proj", "query"))
    module.register_forward_pre_hook(lambda module, args: enabled.append(torch.is_grad_enabled()))
    return enabled


def gradients(model: nn.Module) -> dict[str, list[float]]:
    """A norm and a sum of each trainable parameter's."""
    found = {name: safe_get_full_grad(p) for name, p in model.named_parameters() if p.requires_grad}
    return {name: [grad.norm().item(), grad.sum().item()] for name, grad in found.items() if grad is not None}


def train(trained: Any, inputs: Callable[[int], Observed] = text, steps: int = STEPS) -> Observed:
    """The losses of some steps, the gradients of the first, and the kinds of checkpoints."""
    enabled = watch(trained)
    losses, kinds, first = [], [], {}
    for i in range(steps):
        loss = loss_of(trained, inputs(i))
        trained.backward(loss)
        losses.append(loss.item())
        kinds.append(kind(enabled))
        enabled.clear()
        first = first or gradients(trained.module)
        trained.step()
    return {"kind": ", ".join(dict.fromkeys(kinds)), "losses": losses, "gradients": first}


def kind(enabled: list[bool]) -> str:
    return KINDS.get(tuple(enabled), f"gradients enabled: {enabled}")


def function_of(model: nn.Module) -> Any:
    return next(m for m in model.modules() if hasattr(m, "_gradient_checkpointing_func"))._gradient_checkpointing_func


def is_plain(function: Any) -> bool:
    return type(function) is functools.partial and function.func is checkpoint and not vars(function)


def enabled_early() -> Observed:
    return {"plain": is_plain(function_of(EARLY))} | train(engine(lora(EARLY)))


def enabled_with(*options: dict[str, Any], **more: Any) -> Observed:
    model = lora(llama())
    enable(model, *options, **more)
    function = function_of(model)
    return {"plain": is_plain(function), "keywords": sorted(function.keywords)} | train(engine(model))


def offloaded() -> Observed:
    def unpinned(**options: Any) -> Any:  # without an accelerator there is nothing to pin for
        return save_on_cpu()

    with mock.patch.object(modeling_utils, "save_on_cpu", unpinned):
        return enabled_with(NON_REENTRANT, offload=True)


def enabled_late() -> Observed:
    trained = engine(lora(llama()))
    enable(trained, NON_REENTRANT)
    return train(trained)


def set_directly() -> Observed:
    model = lora(llama())
    model.base_model.model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=False))
    model.enable_input_require_grads()
    return train(engine(model))


def enabled_again() -> Observed:
    model = llama()
    enable(model)
    model.gradient_checkpointing_disable()
    trained = engine(lora(model))
    enable(trained)
    return train(trained)


def copied() -> Observed:
    model = llama()
    enable(model)
    model = copy.deepcopy(model)
    function = pickle.loads(pickle.dumps(function_of(model)))  # noqa: S301
    model._set_gradient_checkpointing(True, function)
    return train(engine(lora(model)))


def frozen_later() -> Observed:
    model = llama()
    enable(model)
    trained = engine(model)
    first = train(trained, steps=1)
    for layer in model.model.layers:
        layer.input_layernorm.requires_grad_(False)
    second = train(trained, steps=1)
    kinds = dict.fromkeys((first["kind"], second["kind"]))
    return {"kind": ", ".join(kinds), "losses": first["losses"] + second["losses"], "gradients": second["gradients"]}


def dropout() -> Observed:
    model = lora(llama(attention_dropout=0.1), lora_dropout=0.1)
    enable(model)
    torch.manual_seed(5)
    return train(engine(model))


def vision(checkpointed: bool = True, **options: Any) -> Observed:
    model = vit()
    if checkpointed:
        enable(model)
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = [name for name in ("q_proj", "v_proj", "query", "value") if name in names]
    with apart():
        return train(engine(lora(model, target_modules=targets, modules_to_save=["classifier"], **options)), images)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """DeepSpeed before 0.19.3 takes what it put on a module of `modules_to_save` for what it put on PEFT's wrapper, and
    fails in the forward, checkpointed or not."""
    theirs = ModulesToSaveWrapper.__getattr__

    def own(self: nn.Module, name: str) -> Any:
        if name in ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt", "ds_grads_remaining"):
            raise AttributeError(name)
        return theirs(self, name)

    with mock.patch.object(ModulesToSaveWrapper, "__getattr__", own):
        yield


def own_model() -> Observed:
    torch.manual_seed(0)
    model = OwnModel(OwnConfig())
    enable(model)
    return train(engine(lora(model)), pixels)


def two_forwards(backwards: int, checkpointed: bool = True) -> Observed:
    model = lora(llama())
    if checkpointed:
        enable(model)
    trained = engine(model)
    enabled = watch(trained)
    losses = [loss_of(trained, text(i)) for i in range(2)]
    for loss in losses if backwards == 2 else [sum(losses)]:
        trained.backward(loss)
    values = [loss.item() for loss in losses]
    return {"kind": kind(enabled[::3]), "losses": values, "gradients": gradients(trained.module)}


def forwards_between() -> Observed:
    """One without gradients and one in eval mode between a forward and its backward, and one that has no backward."""
    model = lora(llama())
    enable(model)
    trained, losses = engine(model), []
    enabled = watch(trained)
    for i in range(STEPS):
        loss_of(trained, text(9))
        loss = loss_of(trained, text(i))
        with torch.no_grad():
            loss_of(trained, text(7))
            trained.eval()
            loss_of(trained, text(8))
        trained.train()
        trained.backward(loss)
        found = gradients(trained.module)
        trained.step()
        losses.append(loss.item())
    return {"kind": kind([enabled[0], enabled[-1]]), "losses": losses, "gradients": found}


def accumulated() -> Observed:
    model = lora(llama())
    enable(model)
    return train(engine(model, accumulated=2), steps=4)


def captured(model: PreTrainedModel, **inputs: bool) -> Observed:
    enable(model)
    return train(engine(lora(model)), lambda i: text(i) | inputs, steps=1)


def kept(hooks: bool) -> Observed:
    """A loss on what some submodules of the layers returned, kept by forward hooks, or by the submodules themselves."""
    model = lora(llama())
    enable(model)
    modules, seen = [m for name, m in model.named_modules() if name.endswith(".mlp")], {}
    for i, module in enumerate(modules):
        if hooks:
            module.register_forward_hook(lambda module, args, output, i=i: seen.update({i: output}))
        else:

            def forward(hidden: Tensor, module: nn.Module = module, own: Any = module.forward) -> Tensor:
                module.seen = own(hidden)
                return module.seen

            module.forward = forward
    trained = engine(model)
    enabled = watch(trained)
    loss = loss_of(trained, text(0))
    loss = loss + sum(output.pow(2).mean() for output in (seen.values() if hooks else [m.seen for m in modules]))
    trained.backward(loss)
    return {"kind": kind(enabled), "losses": [loss.item()], "gradients": gradients(trained.module)}


def shared() -> Observed:
    model = lora(llama())
    enable(model)
    first, second = (layer.self_attn.q_proj for layer in model.base_model.model.model.layers)
    second.lora_A, second.lora_B = first.lora_A, first.lora_B
    return train(engine(model))


def compiled(layers: bool) -> Observed:
    torch._dynamo.reset()
    model = lora(llama())
    enable(model)
    if layers:
        for layer in model.base_model.model.model.layers:
            layer.compile(backend="eager")
    trained = engine(model)
    if not layers:
        trained.module.compile(backend="eager")
    return train(trained, steps=1)


def own_function() -> Observed:
    model, calls = lora(llama()), []

    def function(*args: Any) -> Any:
        calls.append(args)
        return checkpoint(*args, use_reentrant=True)

    model.base_model.model._set_gradient_checkpointing(True, function)
    model.enable_input_require_grads()
    found = train(engine(model))
    return found | {"calls": len(calls), "kept": function_of(model) is function}


def context_fn() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def control(model: PreTrainedModel, **options: Any) -> Observed:
    enable(model, NON_REENTRANT)
    return train(engine(model, **options))


def no_deepspeed() -> Observed:
    model = lora(llama()).train()
    enable(model, NON_REENTRANT)
    enabled = watch(model)
    loss = loss_of(model, text(0))
    loss.backward()
    norms = {name: [p.grad.norm().item()] for name, p in model.named_parameters() if p.requires_grad}
    return {"kind": kind(enabled), "losses": [loss.item()], "gradients": norms}


SCENARIOS: dict[str, Callable[[], Observed]] = {
    "by default, before DeepSpeed is imported": enabled_early,
    "by default": enabled_with,
    "asked for": lambda: enabled_with(NON_REENTRANT),
    "asked for, after deepspeed.initialize": enabled_late,
    "set directly": set_directly,
    "disabled and enabled again": enabled_again,
    "copied and pickled": copied,
    "frozen later": frozen_later,
    "dropout": dropout,
    "small parameters kept whole": lambda: control(lora(llama()), persistent=10**6),
    "ViT": vision,
    "ViT, LoRA in the last layer": lambda: vision(layers_to_transform=[1]),
    "a model that calls the function by itself": own_model,
    "two forwards": lambda: two_forwards(1),
    "two forwards, two backwards": lambda: two_forwards(2),
    "forwards between": forwards_between,
    "gradient accumulation": accumulated,
    "hidden states": lambda: captured(llama(), output_hidden_states=True),
    "router logits": lambda: captured(mixtral()),
    "context_fn": lambda: enabled_with(NON_REENTRANT | {"context_fn": context_fn}),
    "hooks that keep outputs": lambda: kept(hooks=True),
    "attributes that keep outputs": lambda: kept(hooks=False),
    "trainable parameters that layers share": shared,
    "a compiled model": lambda: compiled(layers=False),
    "compiled layers": lambda: compiled(layers=True),
    "offload": offloaded,
    "debug": lambda: enabled_with(NON_REENTRANT | {"debug": True}),
    "determinism_check": lambda: enabled_with(NON_REENTRANT | {"determinism_check": "none"}),
    "a function of one's own": own_function,
    "reentrant": lambda: enabled_with({"use_reentrant": True}),
    "ZeRO-2": lambda: control(lora(llama()), stage=2),
    "nothing frozen": lambda: control(llama()),
    "no DeepSpeed": no_deepspeed,
    "Llama, not checkpointed": lambda: train(engine(lora(llama()))),
    "ViT, not checkpointed": lambda: vision(checkpointed=False),
    "two forwards, not checkpointed": lambda: two_forwards(1, checkpointed=False),
}


def work(rank: int, world: int, put: Callable[[Any], None], cases: Sequence[str]) -> None:
    os.environ["LOCAL_RANK"] = str(group.local_rank(rank))  # DeepSpeed asks for it
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    transformers.logging.set_verbosity_warning()
    logging.getLogger("transformers").handlers[:] = [Handler()]
    for name in cases:
        SAID.clear()
        transformers.utils.logging.warning_once.cache_clear()
        try:
            observed = SCENARIOS[name]()
        except Exception as error:
            sys.stderr.write(f"---- {name}, rank {rank}\n")
            traceback.print_exc()
            group.agreed(error)
            observed = {"error": f"{type(error).__name__}: {error}"}
        put({"case": name, "ranks": world} | observed | {"said": [text for text in SAID if "DeepSpeed" in text]})


def main() -> None:
    told = rows.told()
    warnings.simplefilter("ignore")
    gc.freeze()  # DeepSpeed collects garbage ever so often, and need not look at what was imported
    rows.put(
        {
            "transformers": transformers.__version__,
            "state": loaded.state("transformers"),
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "owed": [{"case": case, "ranks": ranks} for ranks in told["ranks"] for case in told["cases"]],
        }
    )
    task = functools.partial(work, cases=told["cases"])
    group.train(told["ranks"], task, rows.put, told["backend"], told["name"], told["meeting"])
    rows.done()


if __name__ == "__main__":
    main()
