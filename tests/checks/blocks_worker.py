"""What the rules about blocks find in real models, and what a step of these models then does.

`python blocks_worker.py RESULT.json` writes, for each scenario: the findings of these rules, and what was measured in a
step: `calls` (how often the module that is computed most often is), `bytes` (kept for the backward), `gradients`
(`right` or `wrong gradients`), `cached` (tokens in the cache afterwards).
"""

import copy
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where the overlay wheel is not installed
import overlay

CODES = {"checkpointed-twice", "use-cache", "granularity", "hooks-in-recompute"}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
IDS = torch.arange(32).reshape(2, 16)
LINEAR = [f"self_attn.{one}_proj" for one in "qkvo"] + [f"mlp.{one}_proj" for one in ("gate", "up", "down")]

Change = Callable[[Any], None]
SCENARIOS: dict[str, Change] = {}


def scenario(name: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        assert name not in SCENARIOS
        SCENARIOS[name] = change
        return change

    return register


def own(model: Any, *, reentrant: bool = False) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()


def wrap_layers(model: Any, *, reentrant: bool = False) -> None:
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer, checkpoint_impl=kind)


def wrap_parts(model: Any, *names: str) -> None:
    for layer in model.model.layers:
        for name in names:
            above, _, attribute = name.rpartition(".")
            setattr(layer.get_submodule(above), attribute, checkpoint_wrapper(layer.get_submodule(name)))


# Checkpointed twice


@scenario("not checkpointed")
def _(model: Any) -> None:
    pass


@scenario("own")
def _(model: Any) -> None:
    own(model)


@scenario("own, reentrant")
def _(model: Any) -> None:
    own(model, reentrant=True)


@scenario("wrapper")
def _(model: Any) -> None:
    wrap_layers(model)


@scenario("twice: wrapper around own")
def _(model: Any) -> None:
    wrap_layers(model)
    own(model)


@scenario("twice: wrapper around own, reentrant")
def _(model: Any) -> None:
    wrap_layers(model, reentrant=True)
    own(model, reentrant=True)


@scenario("twice: wrapper inside of own")
def _(model: Any) -> None:
    wrap_parts(model, "mlp")
    own(model)


@scenario("twice: wrapper around the whole model")
def _(model: Any) -> None:
    own(model)
    model.model = checkpoint_wrapper(model.model)


def checkpointing(self: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(type(self).forward, self), *args, use_reentrant=False, **kwargs)


@scenario("twice: a replaced forward that calls checkpoint")
def _(model: Any) -> None:
    own(model)
    for layer in model.model.layers:
        layer.forward = checkpointing.__get__(layer)


@scenario("twice: a submodule whose forward calls checkpoint")
def _(model: Any) -> None:
    own(model)
    for layer in model.model.layers:
        layer.mlp.forward = partial(torch.utils.checkpoint.checkpoint, layer.mlp.forward, use_reentrant=False)


class Holder(GradientCheckpointingLayer):
    """A layer of the user's own around a layer of transformers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return self.layer(hidden_states, **kwargs)


@scenario("twice: a layer within a layer")
def _(model: Any) -> None:
    model.model.layers = nn.ModuleList(Holder(layer) for layer in model.model.layers)
    own(model)


def wrap_attentions(model: Any, *, reentrant: bool) -> None:
    wrap_parts(model, "self_attn")
    own(model, reentrant=reentrant)


@scenario("twice: wrapper around the attentions, inside of own")
def _(model: Any) -> None:
    wrap_attentions(model, reentrant=False)


@scenario("twice: wrapper around the attentions, inside of own, reentrant")
def _(model: Any) -> None:
    wrap_attentions(model, reentrant=True)


@scenario("twice: a layer within a layer, reentrant")
def _(model: Any) -> None:
    model.model.layers = nn.ModuleList(Holder(layer) for layer in model.model.layers)
    own(model, reentrant=True)


def checkpointing_reentrant(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    def run(hidden_states: Tensor) -> Any:
        return type(self).forward(self, hidden_states, **kwargs)

    return checkpoint(run, hidden_states, use_reentrant=True)


@scenario("twice: a replaced forward that calls checkpoint, reentrant")
def _(model: Any) -> None:
    own(model)
    for layer in model.model.layers:
        layer.forward = checkpointing_reentrant.__get__(layer)


# The cache


def cached(model: Any) -> None:
    model.config.use_cache = True


@scenario("cache: own")
def _(model: Any) -> None:
    cached(model)
    own(model)


@scenario("cache: wrapper")
def _(model: Any) -> None:
    cached(model)
    wrap_layers(model)


@scenario("cache: wrapper, reentrant")
def _(model: Any) -> None:
    cached(model)
    wrap_layers(model, reentrant=True)
    model.enable_input_require_grads()


@scenario("cache: wrapper around the MLPs")
def _(model: Any) -> None:
    cached(model)
    wrap_parts(model, "mlp")


@scenario("cache: no checkpointing")
def _(model: Any) -> None:
    cached(model)


# Granularity


@scenario("finer: attention and MLP")
def _(model: Any) -> None:
    wrap_parts(model, "self_attn", "mlp")


@scenario("finer: linear modules")
def _(model: Any) -> None:
    wrap_parts(model, *LINEAR)


@scenario("finer: every other layer")
def _(model: Any) -> None:
    own(model)
    for layer in model.model.layers[::2]:
        layer.gradient_checkpointing = False


@scenario("every other layer, the rest frozen")
def _(model: Any) -> None:
    model.requires_grad_(False)
    own(model)
    for index, layer in enumerate(model.model.layers):
        layer.gradient_checkpointing = bool(index % 2)
        layer.requires_grad_(bool(index % 2))


# Hooks


@scenario("hook: counts")
def _(model: Any) -> None:
    own(model)
    for layer in model.model.layers:
        layer.register_forward_hook(counting)


def counting(module: nn.Module, args: Any, output: Any) -> None:
    module.count = getattr(module, "count", 0) + 1


class Scaled(LlamaDecoderLayer):
    """A subclass, because 5.24 does not checkpoint a layer whose `forward` was replaced."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states + self.mlp(self.scale * hidden_states)


def set_scale(module: nn.Module, args: Any) -> None:
    module.scale = 3.0


def take_scale_back(module: nn.Module, args: Any, output: Any) -> None:
    module.scale = 1.0


@scenario("hook: sets an attribute, and another takes it back")
def _(model: Any) -> None:
    own(model)
    for layer in model.model.layers:
        layer.scale = 1.0
        layer.__class__ = Scaled
        layer.register_forward_pre_hook(set_scale)
        layer.register_forward_hook(take_scale_back)


STATE = {"scale": 1.0}


class ScaledByState(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states + self.mlp(STATE["scale"] * hidden_states)


def set_state(module: nn.Module, args: Any) -> None:
    STATE["scale"] = 3.0


def take_state_back(module: nn.Module, args: Any, output: Any) -> None:
    STATE["scale"] = 1.0


@scenario("hook: sets an entry of a dict, and another takes it back")
def _(model: Any) -> None:
    own(model)
    for layer in model.model.layers:
        layer.__class__ = ScaledByState
        layer.register_forward_pre_hook(set_state)
        layer.register_forward_hook(take_state_back)


@scenario("hook: on a module inside of the layer, and of frameworks")
def _(model: Any) -> None:
    own(model, reentrant=True)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(counting)
        layer.register_full_backward_hook(lambda module, before, after: None)
    model.model.embed_tokens.register_forward_hook(counting)


class ByWeight(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states + self.mlp(torch.tanh(hidden_states @ self.weight))


def normed(model: Any, norm: Callable[..., Any]) -> None:
    own(model)
    for layer in model.model.layers:
        layer.weight = nn.Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))
        layer.__class__ = ByWeight
        norm(layer, "weight")


@scenario("hook: spectral_norm on a weight of the layer, two forwards")
def _(model: Any) -> None:
    normed(model, nn.utils.spectral_norm)


@scenario("hook: weight_norm on a weight of the layer, two forwards")
def _(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed(model, nn.utils.weight_norm)


@scenario("hook: without checkpointing")
def _(model: Any) -> None:
    for layer in model.model.layers:
        layer.register_forward_hook(counting)


def build(change: Change) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    change(model)
    return model


def unchecked(change: Change) -> LlamaForCausalLM:
    """The same model, where nothing is checkpointed."""
    model = build(change)
    for module in model.modules():
        if vars(module).get("gradient_checkpointing"):
            module.gradient_checkpointing = False
        if vars(module).get("forward") is not None and "checkpoint" in repr(module.forward):
            del module.forward
    for above in list(model.modules()):
        for name, module in above.named_children():
            if type(module).__name__ == "CheckpointWrapper":
                above._modules[name] = module._checkpoint_wrapped_module
    return model


def step(model: LlamaForCausalLM, forwards: int = 1) -> dict[str, Any]:
    calls: Counter[nn.Module] = Counter()
    kept: dict[int, tuple[int, Tensor]] = {}
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no address is used again
        return tensor

    for module in list(model.model.modules()):
        if not any(module.children()):
            module.register_forward_pre_hook(lambda module, args: calls.update([module]))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=IDS, labels=IDS)
    loss = output.loss
    for _ in range(forwards - 1):
        loss = loss + model(input_ids=IDS + 1, labels=IDS).loss
    loss.backward()
    cache = output.get("past_key_values")
    names = {name.replace("_checkpoint_wrapped_module.", ""): one for name, one in model.named_parameters()}
    return {
        "gradients": {name: one.grad for name, one in names.items() if one.grad is not None},
        "calls": max(calls.values()),
        "bytes": sum(size for size, _ in kept.values()),
        "cached": 0 if cache is None else int(cache.get_seq_length()),
    }


def close(one: Tensor, other: Tensor) -> bool:
    """By the norm: some gradients are as small as 1e-6."""
    return bool((one - other).norm() <= 1e-4 * one.norm())


def measured(name: str) -> dict[str, Any]:
    change, forwards = SCENARIOS[name], 2 if "two forwards" in name else 1
    expected = step(unchecked(change), forwards)["gradients"]
    found = step(build(change), forwards)
    right = expected.keys() == found["gradients"].keys() and all(
        close(one, found["gradients"][name]) for name, one in expected.items()
    )
    return found | {"gradients": "right" if right else "wrong gradients"}


def findings(model: nn.Module) -> list[dict[str, str]]:
    return [vars(finding) for finding in overlay.check(model) if finding.code in CODES]


def described(model: nn.Module) -> str:
    """What a check may not change: modules, their attributes and hooks, and the state."""
    lines = []
    for name, module in model.named_modules():
        attributes = {
            key: repr(value) for key, value in vars(module).items() if not isinstance(value, (dict, nn.Module))
        }
        hooks = [list(vars(module)[key]) for key in vars(module) if key.endswith("_hooks")]
        lines.append(f"{name} {type(module)} {attributes} {hooks}")
    lines += [f"{name} {one._version} {one.requires_grad}" for name, one in model.named_parameters()]
    return "\n".join(lines)


UPSTREAM = {
    "SwinModel": {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [1, 2],
        "num_heads": [2, 2],
        "window_size": 2,
    },
    "BertForMaskedLM": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32},
    "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4},
    "MixtralForCausalLM": SIZES | {"num_local_experts": 2},
    "Wav2Vec2ForCTC": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "MambaForCausalLM": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "RwkvForCausalLM": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
    "GPTJForCausalLM": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "WhisperForConditionalGeneration": {"d_model": 48, "encoder_layers": 2, "decoder_layers": 2},
}
"""Models that are right as they are, on the meta device."""


def upstream(name: str, sizes: dict[str, Any]) -> list[dict[str, str]]:
    made = getattr(transformers, name)
    with torch.device("meta"):
        model = made(made.config_class(**sizes)).train()
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    return [vars(finding) for finding in overlay.check(model) if finding.code in CODES | {"in-place-operation"}]


def in_place(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    hidden_states += 1
    return self.mlp(hidden_states)


def replaced() -> list[dict[str, str]]:
    """An operation in place in a `forward` that was put on the class, and what 5.23 and later wrap that in."""

    class Replaced(LlamaDecoderLayer):
        forward = in_place

    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    own(model)
    for layer in model.model.layers:
        layer.__class__ = Replaced
    return [vars(finding) for finding in overlay.check(model) if finding.code == "in-place-operation"]


def odd() -> dict[str, str]:
    """Modules that a rule may not fail on."""
    plain = nn.Linear(2, 2)
    plain.forward = print
    by_lambda = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    own(by_lambda)
    by_lambda.model.layers[0].forward = lambda hidden_states, **kwargs: hidden_states
    by_lambda.model.layers[1].forward = nn.Linear(32, 32)
    by_lambda.model.layers[2].forward = len
    by_lambda.model.layers[3].register_forward_hook(print)
    by_lambda.model.layers[3].register_forward_pre_hook(partial(print, "called"))
    namespace: dict[str, Any] = {}
    # Made without a file, as what is generated at run time
    exec(  # noqa: S102
        "def forward(self, hidden_states, **kwargs):\n    hidden_states += 1\n    return hidden_states", namespace
    )
    without_source = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    own(without_source)
    without_source.model.layers[0].forward = namespace["forward"].__get__(without_source.model.layers[0])
    compiled = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    own(compiled)
    compiled.model.layers[0].compile()
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    models = {
        "C function": plain,
        "lambda": by_lambda,
        "no source": without_source,
        "compiled": torch.compile(compiled),
        "scripted": nn.ModuleList([scripted]),
        "DataParallel": nn.DataParallel(without_source),
        "empty": nn.Module(),
    }
    seen = {}
    for name, model in models.items():
        seen[name] = json.dumps([finding.code for finding in overlay.check(model)])
    return seen


def main() -> None:
    torch.set_num_threads(1)  # others wait for a processor, and spin
    observed: dict[str, Any] = {"scenarios": {}, "unchanged": {}}
    for name, change in SCENARIOS.items():
        model = build(change)
        before, state = described(model), copy.deepcopy(model.state_dict())
        found = findings(model)
        same = before == described(model) and all(
            torch.equal(one, state[key]) for key, one in model.state_dict().items()
        )
        observed["unchanged"][name] = same
        observed["scenarios"][name] = {"findings": found, **measured(name)}
    observed["upstream"] = {name: upstream(name, sizes) for name, sizes in UPSTREAM.items()}
    observed["replaced"] = replaced()
    observed["odd"] = odd()
    with torch.device("meta"):
        large = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32)).train()
    large.config.use_cache = False
    own(large)
    start = time.process_time()
    overlay.check(large)
    observed["seconds"] = time.process_time() - start
    Path(sys.argv[1]).write_text(json.dumps(observed), "utf-8")


if __name__ == "__main__":
    main()
