"""The rows of docs/compatibility.md: what a build does, in a few words.

A worker (`overlay.measure.rows`), which finds for each row of each table those words, and which ones are right.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from overlay.measure import rows
from overlay.measure.experiments import loaded
from overlay.measure.experiments.tiny import SIZES

TABLES: dict[str, dict[str, Callable[[], str]]] = {}
RIGHT: dict[str, str] = {}
"""What a build has to do in a row, where there is one answer."""

X = torch.linspace(-1, 1, 8).reshape(2, 4)
IDS = torch.arange(32).reshape(2, 16)


def row(table: str, name: str, right: str | None = None) -> Callable[[Callable[[], str]], Callable[[], str]]:
    def register(run: Callable[[], str]) -> Callable[[], str]:
        cases = TABLES.setdefault(table, {})
        assert name not in cases
        cases[name] = run
        if right is not None:
            RIGHT[name] = right
        return run

    return register


ON_PURPOSE = functools.partial(row, "on-purpose-table")
UPSTREAM = functools.partial(row, "upstream-table")
NOT_MENDED = functools.partial(row, "not-mended-table")


def make() -> type[nn.Module]:
    class Layer(GradientCheckpointingLayer):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * self.scale).tanh()

    return Layer


def ready(layer: nn.Module, *, reentrant: bool = False, hook: bool = True) -> nn.Module:
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=reentrant)
    if hook:
        layer.register_forward_pre_hook(nothing)
    return layer


def nothing(module: nn.Module, *_: Any) -> None:
    pass


def gradient(call: Callable[[Tensor], Tensor]) -> Tensor:
    given = X.clone().requires_grad_()
    call(given).sum().backward()
    return given.grad


def calls(layer: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> int:
    """Of the linear module, in a forward and a backward."""
    seen: list[int] = []
    handle = layer.linear.register_forward_pre_hook(lambda *_: seen.append(1))
    gradient(call or layer)
    handle.remove()
    return len(seen)


def checkpointed(layer: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> str:
    return {2: "checkpointed", 1: "not checkpointed, silently"}[calls(layer, call)]


def or_error(run: Callable[[], str]) -> str:
    try:
        return run()
    except Exception as error:
        return type(error).__name__


def against(gradients: list[Tensor | None], expected: list[Tensor | None]) -> str:
    if all(one is None for one in gradients):
        return "no gradient"
    right = all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True) if other is not None)
    return "right gradients" if right else "wrong gradients, silently"


# ---- on purpose ------------------------------------------------------------------------------------------------------


@ON_PURPOSE("a hook on the layer, in the recompute", "does not run")
def hook_in_recompute() -> str:
    layer = ready(make()())
    runs: list[int] = []
    layer.register_forward_pre_hook(lambda *_: runs.append(1))
    gradient(layer)
    return {2: "runs again", 1: "does not run"}[len(runs)]


@ON_PURPOSE("a hook sets what `forward` reads, and another hook takes it back")
def state_of_hooks() -> str:
    def of(*, enabled: bool) -> Tensor:
        torch.manual_seed(0)
        layer = ready(make()())
        layer.gradient_checkpointing = enabled
        layer.register_forward_pre_hook(lambda module, args: setattr(module, "scale", 3.0))
        layer.register_forward_hook(lambda module, args, output: setattr(module, "scale", 1.0))
        return gradient(layer)

    return or_error(lambda: against([of(enabled=True)], [of(enabled=False)]))


@ON_PURPOSE("a hook replaces the layer's `forward`")
def replaced_by_hook() -> str:
    layer = ready(make()())

    def replace(module: nn.Module, args: Any) -> None:
        module.forward = lambda x: module.linear(x) * 3

    layer.register_forward_pre_hook(replace)
    with torch.no_grad():
        expected = layer.linear(X) * 3
    return or_error(lambda: "from this call on" if torch.equal(layer(X), expected) else "from the next call on")


@ON_PURPOSE("a backward hook on the layer, whose output is then changed in place, reentrant")
def in_place_after_backward_hook() -> str:
    layer = ready(make()(), reentrant=True)
    layer.register_full_backward_hook(nothing)
    return or_error(lambda: "works" if gradient(lambda x: layer(x).add_(1)) is not None else "no gradient")


@ON_PURPOSE("a layer in training mode, called with a cache and without gradients", "keeps it")
def cache_without_gradients() -> str:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = model.model.layers[0]
    name = "past_key_values" if "past_key_values" in inspect.signature(type(layer).forward).parameters else "cache"
    cache = DynamicCache()
    with torch.no_grad():
        hidden = torch.zeros(1, 4, 32)
        layer(hidden, **{name: cache}, position_embeddings=model.model.rotary_emb(hidden, torch.arange(4)[None]))
    return "keeps it" if cache.get_seq_length() else "drops it"


def tokens(name: str, **settings: Any) -> str:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**settings))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)

    def generated() -> list[list[int]]:
        ids = model.generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False, eos_token_id=None
        )
        return ids[:, -6:].tolist()

    expected = generated()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return "as in eval mode" if generated() == expected else "other tokens, silently"


@ON_PURPOSE("`generate` in training mode", "as in eval mode")
def generation() -> str:
    return tokens("LlamaForCausalLM", **SIZES, pad_token_id=0)


@ON_PURPOSE("`generate` in training mode, MiniMax, which looks at `use_cache` itself", "as in eval mode")
def generation_of_minimax() -> str:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "block_size": 4}
    kinds = ["linear_attention", "full_attention"]
    return tokens("MiniMaxForCausalLM", **SIZES, **experts, layer_types=kinds, pad_token_id=0)


@ON_PURPOSE("a layer within a layer, reentrant: where the inner one is checkpointed")
def nested() -> str:
    class Outer(make()):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(super().forward(x))

    layer = ready(Outer(), reentrant=True)
    entered: list[int] = []

    def function(call: Any, *args: Any) -> Any:
        entered.append(1)
        return checkpoint(call, *args, use_reentrant=True)

    ready(layer.inner)._gradient_checkpointing_func = function
    gradient(layer)
    return {2: "forward and recompute", 1: "recompute"}[len(entered)]


@ON_PURPOSE("`type(func)` of what a checkpoint function is given, where `fully_shard` is used")
def type_of_function() -> str:
    layer = ready(make()())
    seen: set[bool] = set()

    def function(call: Any, *args: Any) -> Any:
        assert isinstance(call, functools.partial)
        seen.add(type(call) is functools.partial)
        return checkpoint(call, *args, use_reentrant=False)

    layer._gradient_checkpointing_func = function
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    gradient(layer)
    torch.distributed.destroy_process_group()
    return "`functools.partial`" if seen == {True} else "a subclass of `functools.partial`"


# ---- what upstream's own fix does ------------------------------------------------------------------------------------


def own(self: nn.Module, x: Tensor) -> Tensor:
    return self.linear(x) * 2


@UPSTREAM("`SomeDecoderLayer.forward = f`", "checkpointed")
def class_replaced() -> str:
    layer = ready(make()())
    type(layer).forward = own
    return checkpointed(layer)


@UPSTREAM("`layer.forward = f`, which does not call the old one", "checkpointed")
def layer_replaced() -> str:
    layer = ready(make()())
    layer.forward = functools.partial(own, layer)
    return checkpointed(layer)


@UPSTREAM("`mock.patch.object(layer, 'forward', wraps=layer.forward)`: calls of the mock", "forward and recompute")
def layer_mocked() -> str:
    layer = ready(make()())
    with mock.patch.object(layer, "forward", wraps=layer.forward) as forward:
        gradient(layer)
    return {2: "forward and recompute", 1: "forward"}[forward.call_count]


@UPSTREAM("a checkpoint function that reads the layer from `func.func.__self__`", "checkpointed")
def self_of_function() -> str:
    layer = ready(make()())

    def function(call: Any, *args: Any) -> Any:
        assert call.func.__self__ is layer
        return checkpoint(call, *args, use_reentrant=False)

    layer._gradient_checkpointing_func = function
    return or_error(lambda: checkpointed(layer))


@UPSTREAM("`layer.forward(...)`, called directly", "not checkpointed")
def direct() -> str:
    layer = ready(make()())
    return {2: "checkpointed", 1: "not checkpointed"}[calls(layer, layer.forward)]


@UPSTREAM("a `forward` that calls itself", "one checkpoint")
def recursion() -> str:
    class Layer(make()):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            x = super().forward(x)
            return self.forward(x, again=False) if again else x

    layer = ready(Layer())
    entered: list[int] = []

    def function(call: Any, *args: Any) -> Any:
        entered.append(1)
        return checkpoint(call, *args, use_reentrant=False)

    layer._gradient_checkpointing_func = function
    gradient(layer)
    return "one checkpoint" if len(entered) == 1 else "a checkpoint within the checkpoint"


# ---- not mended ------------------------------------------------------------------------------------------------------


def global_hook(*, hook: bool) -> str:
    layer = ready(make()(), hook=hook)
    runs: list[int] = []
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: runs.append(1) if module is layer else None
    )
    gradient(layer)
    handle.remove()
    return {2: "runs again", 1: "does not run"}[len(runs)]


@NOT_MENDED("a global module hook in the recompute of a layer without hooks")
def global_without() -> str:
    return global_hook(hook=False)


@NOT_MENDED("a global module hook in the recompute of a layer with hooks")
def global_with() -> str:
    return global_hook(hook=True)


def router_loss(*, reentrant: bool) -> str:
    def of(*, enabled: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        model = MixtralForCausalLM(config).train()
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        output = model(input_ids=IDS, output_router_logits=True, use_cache=False)
        if not any(logits.requires_grad for logits in output.router_logits):
            return [None]
        sum(logits.square().sum() for logits in output.router_logits).backward()
        return [parameter.grad for parameter in model.model.layers[0].mlp.gate.parameters()]

    return or_error(lambda: against(of(enabled=True), of(enabled=False)))


@NOT_MENDED("a loss on router logits, which are captured inside the layer, reentrant")
def router_reentrant() -> str:
    return router_loss(reentrant=True)


@NOT_MENDED("a loss on router logits, non-reentrant")
def router_non_reentrant() -> str:
    return router_loss(reentrant=False)


@NOT_MENDED("`generate` in training mode, GPT-2")
def generation_of_gpt2() -> str:
    return tokens("GPT2LMHeadModel", vocab_size=97, n_embd=32, n_layer=2, n_head=4, pad_token_id=0)


@NOT_MENDED("hooks of a layer, with a `__call__` of a class after the layer's in the MRO, in the recompute")
def hooks_of_another_call() -> str:
    class Calling(nn.Module):
        def __call__(self, *args: Any) -> Tensor:
            return super().__call__(*args)

    class Layer(make(), Calling):
        pass

    runs: list[int] = []
    layer = ready(Layer(), hook=False)
    layer.register_forward_pre_hook(lambda *_: runs.append(1))
    gradient(layer)
    return {2: "run again", 1: "do not run"}[len(runs)]


def main() -> None:
    rows.told()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows.put(
        {
            "transformers": transformers.__version__,
            "state": loaded.state("transformers"),
            "torch": torch.__version__,
            "owed": [{"table": table, "case": case} for table, cases in TABLES.items() for case in cases],
        }
    )
    for table, cases in TABLES.items():
        for case, run in cases.items():
            rows.put({"table": table, "case": case, "found": run(), "right": RIGHT.get(case)})
    rows.done()


if __name__ == "__main__":
    main()
