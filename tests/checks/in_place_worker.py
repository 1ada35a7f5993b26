"""In-place operations in checkpointed blocks: what the rule finds, and what the recompute then really does.

`python in_place_worker.py RESULT.json` writes, for each scenario, the findings, and for each kind of checkpointing what
came of a step: `right`, `wrong gradients`, `other state` (a buffer differs from that of a step without checkpointing),
or the name of the error. Each scenario is a Llama whose first layer has another `forward` or other submodules.
"""

import copy
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where the overlay wheel is not installed
import overlay

CODE = "in-place-operation"
IDS = torch.arange(32).reshape(2, 16)
SCENARIOS: dict[str, Callable[[LlamaDecoderLayer], None]] = {}

Forward = Callable[..., Tensor]


def scenario(name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def register(change: Callable[[Any], None]) -> Callable[[Any], None]:
        assert name not in SCENARIOS
        SCENARIOS[name] = change
        return change

    return register


def forward(name: str) -> Callable[[Forward], Forward]:
    """A scenario in which the layer has another `forward`."""

    def register(function: Forward) -> Forward:
        scenario(name)(lambda layer: setattr(layer, "forward", function.__get__(layer)))
        return function

    return register


def module(name: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """A scenario in which the MLP, here with the block's own input, is another module."""

    def register(made: type[nn.Module]) -> type[nn.Module]:
        def change(layer: LlamaDecoderLayer) -> None:
            layer.mlp = made()
            layer.forward = only_mlp.__get__(layer)

        scenario(name)(change)
        return made

    return register


def only_mlp(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return self.mlp(hidden_states)


def rest(self: Any, hidden_states: Tensor) -> Tensor:
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


# What breaks


@forward("wrong: input += x")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    hidden_states += 0.5
    return rest(self, hidden_states)


@forward("wrong: input.mul_(x)")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    hidden_states = hidden_states.mul_(1.5)
    return rest(self, hidden_states)


@forward("wrong: input[:, 0] = x")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    hidden_states[:, 0] = hidden_states[:, 0] * 2
    return rest(self, hidden_states)


@forward("wrong: a slice of the input")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    first = hidden_states[:, 0]
    first.mul_(3)
    return rest(self, hidden_states)


@forward("wrong: a view of a view of the input")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    heads = hidden_states.view(2, 16, 4, 8).transpose(1, 2)
    heads[..., :2] *= 2
    return rest(self, hidden_states)


@forward("wrong: input.detach()")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    hidden_states.detach().mul_(1.5)
    return rest(self, hidden_states)


@forward("wrong: input.data")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    hidden_states.data.mul_(1.5)
    return rest(self, hidden_states)


@forward("wrong: F.leaky_relu(input, inplace=True)")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    hidden_states = F.leaky_relu(hidden_states, 0.3, inplace=True)
    return rest(self, hidden_states)


@forward("wrong: torch.relu_(input)")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return rest(self, torch.relu_(hidden_states))


@forward("wrong: out= the input")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        torch.mul(hidden_states.detach(), 1.5, out=hidden_states.detach())
    return rest(self, hidden_states)


@forward("wrong: in one branch")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    residual = hidden_states
    if hidden_states.shape[1] == 1:
        residual = hidden_states.clone()
    residual += 0.5
    return rest(self, residual)


@forward("wrong: a keyword of the block")
def _(self: Any, hidden_states: Tensor, position_ids: Tensor, **kwargs: Any) -> Tensor:
    position_ids += 1
    return rest(self, hidden_states * position_ids[..., None])


@forward("wrong: an element of a tuple")
def _(self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
    cos, sin = position_embeddings
    cos *= 2
    return rest(self, hidden_states * cos.mean(-1, keepdim=True) + sin.sum())


def helper(hidden: Tensor, factor: float) -> Tensor:
    hidden *= factor
    return hidden


@forward("wrong: in a function")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return rest(self, helper(hidden_states, factor=1.5))


@module("wrong: through modules and functions that hand on what they are given")
class _(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.passing = nn.Sequential(nn.Identity(), nn.Dropout(0.0), nn.Dropout(0.5).eval())
        self.projection = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        passed = F.dropout(self.passing(x), p=0.0, training=self.training)
        passed += 0.5
        return self.projection(passed)


@scenario("wrong: an accelerate-like replacement of forward")
def _(layer: Any) -> None:
    def old(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden_states -= 0.5
        return rest(layer, hidden_states)

    @functools.wraps(old)
    def new(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        return old(*args, **kwargs)

    layer.forward = functools.update_wrapper(functools.partial(new, layer), old)


@scenario("wrong: a replacement that hands everything on")
def _(layer: Any) -> None:
    def old(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        hidden_states -= 0.5
        return rest(layer, hidden_states)

    layer.forward = lambda_free(old)


def lambda_free(old: Forward) -> Forward:
    def new(*args: Any, **kwargs: Any) -> Tensor:
        return old(*args, **kwargs)

    return new


@module("wrong: ReLU(inplace=True) on the block's input")
def _() -> nn.Module:
    return nn.Sequential(nn.LeakyReLU(0.3, inplace=True), nn.Linear(32, 32))


@module("wrong: Dropout(inplace=True) on the block's input")
def _() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(32, 32))


@module("wrong: a submodule that changes its input")
class _(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.shifted(x))

    def shifted(self, x: Tensor) -> Tensor:
        x[..., 0] += 1
        return x


@module("wrong: a subclass that calls super")
class _(nn.Linear):
    def __init__(self) -> None:
        super().__init__(32, 32)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.sub_(0.5))


@module("wrong: experts in a list")
class _(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.ELU(inplace=True), nn.Linear(32, 32)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            total += expert(x if index == 1 else x.clone())
        return total


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@forward("wrong: in an autograd function")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return rest(self, Doubled.apply(hidden_states))


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(32, 32)
        self.register_buffer("count", torch.zeros(()))


@module("wrong: a buffer that is read")
class _(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.projection(x) * torch.sin(self.projection(x) * self.count)


class Counting(nn.Module):
    """With a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(32, 32)
        self.count = torch.zeros(())
        self.last = torch.zeros(())


@module("wrong: a tensor in an attribute += x")
class _(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.projection(x) * torch.sin(self.projection(x) * self.count)


@module("wrong: a tensor in an attribute .add_(x)")
class _(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.projection(x) * torch.sin(self.projection(x) * self.count)


@module("right: a tensor in an attribute that is set")
class _(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach() * 2
        self.last.mul_(2)
        return self.projection(x)


@module("same: a parameter .data.clamp_(x)")
class _(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        self.projection.weight.data.clamp_(-0.01, 0.01)
        return self.projection(torch.sin(self.projection(x)))


@module("state: a buffer that counts")
class _(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.projection(x)


@module("state: a buffer that is made anew")
class _(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.projection(x)


@module("state: a moving average")
class _(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count.copy_(self.count * 0.9 + x.square().sum() * 0.1)
        return self.projection(x)


@module("state: BatchNorm")
class _(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@module("wrong: a parameter")
class _(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        self.projection.weight.data.mul_(1.1)
        return self.projection(torch.sin(self.projection(x)))


# What does not


@forward("right: Llama's own")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return LlamaDecoderLayer.forward(self, hidden_states, **kwargs)


@forward("right: a sum is new")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    hidden_states = hidden_states + 0.5
    hidden_states *= 2
    hidden_states[:, 0] = 0
    return rest(self, hidden_states)


@forward("right: the residual is added in place to something new")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    residual = hidden_states
    hidden_states = self.mlp(self.post_attention_layernorm(hidden_states))
    hidden_states += residual
    return hidden_states.mul_(0.5)


@forward("right: clones and copies")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    copied = hidden_states.clone()
    copied += 1
    chosen = hidden_states[:, torch.arange(16)]
    chosen.mul_(2)
    double = hidden_states.double().to(torch.float32)
    masked = hidden_states[hidden_states > 0]
    masked.zero_()
    turned = hidden_states.transpose(0, 1).contiguous()
    turned += 1
    return rest(self, copied + chosen + double + masked.sum() + turned.transpose(0, 1))


@forward("right: numbers, lists, dicts and shapes")
def _(self: Any, hidden_states: Tensor, scale: int = 2, **kwargs: Any) -> Tensor:
    scale += 1
    batch, length = hidden_states.shape[:2]
    length *= batch
    kept = []
    kept += [hidden_states]
    kwargs["extra"] = hidden_states
    total = 0
    total += hidden_states.size(0)
    outputs = (hidden_states,)
    outputs += (kept[0],)
    return rest(self, outputs[0] * scale * length / total)


@forward("right: the last of a tuple is new")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    residual, new = both(hidden_states)
    new += residual
    return rest(self, new)


def both(hidden: Tensor) -> tuple[Tensor, Tensor]:
    return hidden, hidden * 2


@forward("right: a branch that is not taken")
def _(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    if not self.training:
        hidden_states += 1
    if getattr(self, "never", None) is not None:
        hidden_states += 1
    if self.mlp.config.hidden_size == 31:
        hidden_states += 1
    return rest(self, hidden_states)


@module("right: ReLU(inplace=True) after a linear module")
def _() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 32), nn.Dropout(0.3, inplace=True))


@module("right: Dropout(inplace=True) that drops nothing, then a linear module")
def _() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.0, inplace=True), nn.Dropout(0.5, inplace=True).eval(), nn.Linear(32, 32))


@module("right: BatchNorm in eval mode")
def _() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Unflatten(1, (16, 1)), nn.Flatten(1, 2), nn.BatchNorm1d(16).eval())


@module("right: a buffer that is read alone")
class _(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        count = self.count + 1
        count += 1
        self.kept = x.detach()
        return self.projection(x) * count


# The truth


def build(change: Callable[[Any], None]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.train()
    change(model.model.layers[0])
    return model


def step(model: LlamaForCausalLM) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    positions = torch.arange(16).repeat(2, 1)
    model(input_ids=IDS, position_ids=positions, labels=IDS).loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return gradients, dict(model.named_buffers())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        (one[name] - other[name]).double().norm() <= 1e-4 * one[name].double().norm() for name in one
    )


def outcome(change: Callable[[Any], None], *, reentrant: bool) -> str:
    gradients, buffers = step(build(change))
    model = build(change)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    try:
        found, state = step(model)
    except Exception as error:
        return type(error).__name__
    if not same(found, gradients):
        return "wrong gradients"
    return "right" if same(state, buffers) else "other state"


def findings(change: Callable[[Any], None]) -> list[dict[str, str]]:
    model = build(change)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    before = copy.deepcopy(model.state_dict())
    found = [vars(finding) for finding in overlay.check(model) if finding.code == CODE]
    assert same(before, model.state_dict())
    return found


def main() -> None:
    torch.set_num_threads(1)  # others wait for a processor, and spin
    observed = {}
    for name, change in SCENARIOS.items():
        observed[name] = {
            "non-reentrant": outcome(change, reentrant=False),
            "reentrant": outcome(change, reentrant=True),
            "findings": findings(change),
        }
    Path(sys.argv[1]).write_text(json.dumps(observed), "utf-8")


if __name__ == "__main__":
    main()
