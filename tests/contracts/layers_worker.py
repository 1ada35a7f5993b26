"""What third-party code relies on in the layers of a model.

`python layers_worker.py RESULT.json [used]` writes, for each scenario and each set-up (kind of checkpointing, with
hooks on the layers or without), what was observed; `used`: each time after a call of a checkpointed layer of the class
with a hook, else with the class as it was imported. Calls are those of the layers' MLPs, outside of hooks: two a layer
and step where the layer is checkpointed, one where it is not. Gradients are true where they are, bit for bit, those of
the same model without checkpointing.
"""

import asyncio
import contextlib
import copy
import functools
import gc
import inspect
import io
import json
import logging
import pickle
import sys
import threading
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

LAYERS = 2
IDS = torch.arange(32).reshape(2, 16)
FORWARD = LlamaDecoderLayer.forward
BODY = inspect.unwrap(FORWARD)
"""The layer's own computation, below whatever a build wraps it in."""
CACHE = "past_key_values" if "past_key_values" in inspect.signature(FORWARD).parameters else "cache"
"""What a layer calls its cache: it changed with 5.24."""

Observed = dict[str, Any]
Undo = Callable[[], None]


@dataclass(frozen=True)
class Setup:
    reentrant: bool
    hooks: bool

    def __str__(self) -> str:
        return ("reentrant" if self.reentrant else "non-reentrant") + (", hooks" if self.hooks else "")

    def function(self) -> Callable[..., Any]:
        return functools.partial(checkpoint, use_reentrant=self.reentrant)


SETUPS = [Setup(reentrant, hooks) for hooks in (False, True) for reentrant in (True, False)]
SCENARIOS: dict[str, tuple[Callable[[Setup], Observed], Callable[[Setup], bool]]] = {}


def scenario(
    name: str, applies: Callable[[Setup], bool] = lambda setup: True
) -> Callable[[Callable[[Setup], Observed]], Callable[[Setup], Observed]]:
    def register(run: Callable[[Setup], Observed]) -> Callable[[Setup], Observed]:
        assert name not in SCENARIOS
        SCENARIOS[name] = run, applies
        return run

    return register


def with_hooks(setup: Setup) -> bool:
    return setup.hooks


# ---- models, counted -------------------------------------------------------------------------------------------------

COUNTS: Counter[str] = Counter()
UNCOUNTED = threading.local()
COUNTING = threading.Lock()


def count_call(module: nn.Module, args: Any) -> None:
    if not getattr(UNCOUNTED, "now", False):
        with COUNTING:
            COUNTS["calls"] += 1
            COUNTS[f"calls in {threading.get_ident()}"] += 1


def count_pre(module: nn.Module, args: Any) -> None:
    COUNTS["pre"] += 1


def count_post(module: nn.Module, args: Any, output: Any) -> None:
    COUNTS["post"] += 1


def count_backward(module: nn.Module, given: Any, outgoing: Any) -> None:
    COUNTS["backward"] += 1


def build(layers: int = LAYERS) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=97,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config).train()


def counted(setup: Setup, layers: int = LAYERS, enable: bool = True) -> LlamaForCausalLM:
    """A model with hooks as the set-up has them, and checkpointing enabled."""
    model = build(layers)
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(count_call)
        if setup.hooks:
            layer.register_forward_pre_hook(count_pre)
            layer.register_forward_hook(count_post)
            layer.register_full_backward_hook(count_backward)
    if enable:
        model.gradient_checkpointing_enable({"use_reentrant": setup.reentrant})
    COUNTS.clear()
    return model


def forward(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(7)
    return model(input_ids=IDS, labels=IDS, **({"use_cache": False} | options))


def step(model: nn.Module, **options: Any) -> Any:
    model.zero_grad()
    output = forward(model, **options)
    output.loss.backward()
    return output


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def same(one: Any, other: Any) -> bool:
    return len(one) == len(other) > 0 and all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


@functools.cache
def reference(layers: int = LAYERS, scale: float = 1.0) -> list[Tensor | None]:
    """The gradients of a step of the model without checkpointing."""
    model = build(layers)
    scale_weights(model, scale)
    step(model)
    return gradients(model)


def scale_weights(model: nn.Module, scale: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)


def report(setup: Setup, model: nn.Module, layers: int = LAYERS, **more: Any) -> Observed:
    observed = {"calls": COUNTS["calls"], "gradients": same(gradients(model), reference(layers)), **more}
    if setup.hooks:
        observed["hooks"] = {kind: COUNTS[kind] for kind in ("pre", "post", "backward")}
    return observed


def calls_of(run: Callable[[], Any]) -> int:
    before = COUNTS["calls"]
    run()
    return COUNTS["calls"] - before


def layer_input(model: LlamaForCausalLM) -> tuple[Tensor, dict[str, Any]]:
    torch.manual_seed(3)
    hidden = torch.randn(1, 4, 32, requires_grad=True)
    return hidden, {"position_embeddings": model.model.rotary_emb(hidden, torch.arange(4)[None])}


def direct_calls(model: LlamaForCausalLM) -> int:
    """Calls where the first layer's `forward` is called directly, which never checkpoints."""
    hidden, options = layer_input(model)
    return calls_of(lambda: model.model.layers[0].forward(hidden, **options).sum().backward())


# ---- forwards replaced -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_class(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    old = LlamaDecoderLayer.forward
    LlamaDecoderLayer.forward = make(old)
    try:
        yield
    finally:
        LlamaDecoderLayer.forward = old


def class_calling_old(old: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: old(self, *args, **kwargs)


def class_own(old: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: BODY(self, *args, **kwargs)


def class_wraps(old: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(old)(class_own(old))


def own_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return BODY(layer, *args, **kwargs)


def call_old(old: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return old(*args, **kwargs)


def instance_calling_old(layer: nn.Module) -> None:
    layer.forward = functools.partial(call_old, layer.forward)


def instance_own(layer: nn.Module) -> None:
    layer.forward = functools.partial(own_forward, layer)


def instance_method(layer: nn.Module) -> None:
    layer.forward = types.MethodType(BODY, layer)


def instance_wraps(layer: nn.Module) -> None:
    old = layer.forward

    @functools.wraps(old)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return BODY(layer, *args, **kwargs)

    layer.forward = replacement


def instance_dict(layer: nn.Module) -> None:
    layer.__dict__["forward"] = types.MethodType(BODY, layer)


def instance_read_back(layer: nn.Module) -> None:
    layer.forward = layer.forward


def call_kept(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer._old_forward(*args, **kwargs)


def instance_keeping(layer: nn.Module) -> None:
    """As accelerate puts its hooks in."""
    layer._old_forward = old = layer.forward
    layer.forward = functools.update_wrapper(functools.partial(call_kept, layer), old)


def instance_restored(layer: nn.Module) -> None:
    """As accelerate takes its hooks out."""
    layer.forward = layer._old_forward
    delattr(layer, "_old_forward")


ON_CLASS = {
    "class's forward replaced, calling the old": class_calling_old,
    "class's forward replaced, not calling the old": class_own,
    "class's forward replaced, not calling the old, with functools.wraps": class_wraps,
}
ON_INSTANCE = {
    "layer's forward replaced, calling the old": instance_calling_old,
    "layer's forward replaced, not calling the old": instance_own,
    "layer's forward replaced, by a method": instance_method,
    "layer's forward replaced, not calling the old, with functools.wraps": instance_wraps,
    "layer's forward replaced, through __dict__": instance_dict,
    "layer's forward replaced, by itself": instance_read_back,
    "layer's forward replaced, as accelerate does": instance_keeping,
}


def replaced(replace: Callable[[nn.Module], None], setup: Setup, **options: Any) -> LlamaForCausalLM:
    model = counted(setup, **options)
    for layer in model.model.layers:
        replace(layer)
    return model


def add_replacements() -> None:
    for name, make in ON_CLASS.items():

        def class_before(setup: Setup, make: Any = make) -> Observed:
            model = counted(setup, enable=False)
            with on_class(make):
                model.gradient_checkpointing_enable({"use_reentrant": setup.reentrant})
                step(model)
            return report(setup, model)

        def class_after(setup: Setup, make: Any = make) -> Observed:
            model = counted(setup)
            with on_class(make):
                step(model)
            return report(setup, model)

        def class_built(setup: Setup, make: Any = make) -> Observed:
            with on_class(make):
                model = counted(setup)
                step(model)
            return report(setup, model)

        scenario(f"{name}, before enabling")(class_before)
        scenario(f"{name}, after enabling")(class_after)
        scenario(f"{name}, before the model is built")(class_built)
    for name, replace in ON_INSTANCE.items():

        def before(setup: Setup, replace: Any = replace) -> Observed:
            model = replaced(replace, setup, enable=False)
            model.gradient_checkpointing_enable({"use_reentrant": setup.reentrant})
            step(model)
            return report(setup, model)

        def after(setup: Setup, replace: Any = replace) -> Observed:
            model = replaced(replace, setup)
            step(model)
            return report(setup, model)

        scenario(f"{name}, before enabling")(before)
        scenario(f"{name}, after enabling")(after)


add_replacements()


@scenario("no forward replaced")
def plain(setup: Setup) -> Observed:
    model = counted(setup)
    step(model)
    return report(setup, model)


@scenario("eval mode")
def in_eval_mode(setup: Setup) -> Observed:
    model = counted(setup).eval()
    step(model)
    return {"calls": COUNTS["calls"]}


@scenario("checkpointing disabled again")
def disabled(setup: Setup) -> Observed:
    model = replaced(instance_own, setup)
    step(model)
    COUNTS.clear()
    model.gradient_checkpointing_disable()
    step(model)
    return report(setup, model)


@scenario("flags set by hand")
def flags_by_hand(setup: Setup) -> Observed:
    model = counted(setup, enable=False)
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = setup.function()
    step(model)
    return report(setup, model)


@scenario("flags set by hand, layer's forward replaced")
def flags_by_hand_replaced(setup: Setup) -> Observed:
    model = replaced(instance_own, setup, enable=False)
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = setup.function()
    step(model)
    return report(setup, model)


@scenario("mock.patch.object(layer, 'forward', wraps=layer.forward)")
def mocked(setup: Setup) -> Observed:
    model = counted(setup)
    layer = model.model.layers[0]
    with mock.patch.object(layer, "forward", wraps=layer.forward) as forward:
        step(model)
    return report(setup, model, mocked=forward.call_count, left="forward" in vars(layer))


@scenario("layer's replacement removed before the backward")
def removed_before_backward(setup: Setup) -> Observed:
    model = replaced(instance_own, setup)
    loss = forward(model).loss
    for layer in model.model.layers:
        del layer.forward
    loss.backward()
    return report(setup, model)


@scenario("layer's replacement put in before the backward")
def put_in_before_backward(setup: Setup) -> Observed:
    model = counted(setup)
    loss = forward(model).loss
    for layer in model.model.layers:
        instance_own(layer)
    loss.backward()
    return report(setup, model)


@scenario("class's replacement removed before the backward")
def class_removed_before_backward(setup: Setup) -> Observed:
    model = counted(setup)
    with on_class(class_own):
        loss = forward(model).loss
    loss.backward()
    return report(setup, model)


@scenario("two forwards, one backward")
def two_forwards(setup: Setup) -> Observed:
    model = counted(setup)
    (forward(model).loss + forward(model).loss).backward()
    twice = build()
    (forward(twice).loss + forward(twice).loss).backward()
    return report(setup, model) | {"gradients": same(gradients(model), gradients(twice))}


@scenario("one layer in the model twice")
def layer_twice(setup: Setup) -> Observed:
    def tie(model: LlamaForCausalLM) -> LlamaForCausalLM:
        model.model.layers[1] = model.model.layers[0]
        return model

    model, other = tie(counted(setup)), tie(build())
    step(model)
    step(other)
    return report(setup, model) | {"gradients": same(gradients(model), gradients(other))}


@scenario("hooks that change what goes in and comes out")
def changing_hooks(setup: Setup) -> Observed:
    def change(model: LlamaForCausalLM) -> LlamaForCausalLM:
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))
            layer.register_forward_hook(lambda module, args, output: output * 0.5)
        return model

    model, other = change(counted(setup)), change(build())
    step(model)
    step(other)
    return report(setup, model) | {"gradients": same(gradients(model), gradients(other))}


@scenario("one hook alone", lambda setup: not setup.hooks)
def one_hook(setup: Setup) -> Observed:
    """For each kind of hook, whether a layer's computation comes before or after it."""
    observed: Observed = {}
    for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        model = counted(setup, layers=1)
        layer = model.model.layers[0]
        events: list[str] = []
        layer.mlp.register_forward_pre_hook(lambda *_, events=events: events.append("call"))
        getattr(layer, f"register_{kind}_hook")(lambda *_, events=events: events.append("hook"))
        step(model)
        observed[kind] = [*events, same(gradients(model), reference(1))]
    return observed


# ---- what the checkpoint function is given ---------------------------------------------------------------------------


def given(setup: Setup, replace: Callable[[nn.Module], None] | None = None) -> Observed:
    model = counted(setup)
    seen: list[Observed] = []

    def function(call: Any, *args: Any, **kwargs: Any) -> Any:
        layer = call.func.__self__
        seen.append(
            {
                "partial": type(call) is functools.partial,
                "bound method": isinstance(call.func, types.MethodType),
                "layer": next(index for index, one in enumerate(model.model.layers) if one is layer),
                "in the partial": [len(call.args), sorted("cache" if key == CACHE else key for key in call.keywords)],
                "beside it": [[type(argument).__name__ for argument in args], sorted(kwargs)],
            }
        )
        return checkpoint(call, *args, use_reentrant=setup.reentrant)

    for layer in model.model.layers if replace else ():
        replace(layer)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    step(model)
    return report(setup, model, given=seen)


@scenario("checkpoint function of one's own")
def own_function(setup: Setup) -> Observed:
    return given(setup)


@scenario("checkpoint function of one's own, layer's forward replaced")
def own_function_replaced(setup: Setup) -> Observed:
    return given(setup, instance_own)


@scenario("checkpoint function of one's own, class's forward replaced")
def own_function_class_replaced(setup: Setup) -> Observed:
    with on_class(class_own):
        return given(setup)


@scenario("checkpoint function that makes the input of a trained layer require gradients")
def input_requires_gradients(setup: Setup) -> Observed:
    def function(call: Any, *args: Any) -> Any:
        layer = call.func.__self__ if isinstance(call, functools.partial) else call.__self__
        if any(parameter.requires_grad for parameter in layer.parameters()):
            for argument in args:
                if isinstance(argument, Tensor) and argument.is_floating_point():
                    argument.requires_grad_(True)
        return checkpoint(call, *args, use_reentrant=setup.reentrant)

    model, other = counted(setup), build()
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    for one in (model, other):
        one.model.embed_tokens.requires_grad_(False)
        step(one)
    return {"calls": COUNTS["calls"], "gradients": same(gradients(model), gradients(other))}


# ---- reading back, copies --------------------------------------------------------------------------------------------


@scenario("forward read back")
def read_back(setup: Setup) -> Observed:
    model = counted(setup)
    layer = model.model.layers[0]
    inside: list[bool] = []

    def replacement(*args: Any, **kwargs: Any) -> Any:
        inside.append(layer.forward is replacement)
        return BODY(layer, *args, **kwargs)

    layer.forward = replacement
    step(model)
    observed = {
        "is what was assigned": layer.forward is replacement and vars(layer)["forward"] is replacement,
        "inside": inside,
    }
    del layer.forward
    COUNTS.clear()
    step(model)
    method = layer.forward
    observed["after del"] = [inspect.ismethod(method), method.__self__ is layer, "forward" in vars(layer)]
    return report(setup, model, **observed)


@scenario("class's forward read back")
def class_read_back(setup: Setup) -> Observed:
    model = counted(setup)
    made: list[Any] = []

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        made.append(class_own(old))
        return made[0]

    with on_class(make):
        step(model)
        back = [LlamaDecoderLayer.forward is made[0], model.model.layers[0].forward.__func__ is made[0]]
    return report(
        setup, model, back=[*back, LlamaDecoderLayer.forward is FORWARD, "forward" in vars(LlamaDecoderLayer)]
    )


@scenario("forward read in the layer's hooks", with_hooks)
def read_in_hooks(setup: Setup) -> Observed:
    model = counted(setup)
    plain, replaced = model.model.layers
    instance_own(replaced)
    assigned = vars(replaced)["forward"]
    seen: set[tuple[str, bool]] = set()

    def look(module: nn.Module, *_: Any) -> None:
        if module is plain:
            seen.add(("not replaced", "forward" not in vars(plain) and plain.forward.__self__ is plain))
        else:
            seen.add(("replaced", replaced.forward is assigned))

    for layer in model.model.layers:
        layer.register_forward_pre_hook(look)
        layer.register_forward_hook(look)
    step(model)
    return report(setup, model, seen=sorted(seen))


@scenario("class's forward replaced, forward read in the layer's hooks", with_hooks)
def class_read_in_hooks(setup: Setup) -> Observed:
    model = counted(setup)
    seen: set[bool] = set()

    def look(module: nn.Module, *_: Any) -> None:
        seen.add("forward" not in vars(module))

    for layer in model.model.layers:
        layer.register_forward_pre_hook(look)
        layer.register_forward_hook(look)
    with on_class(class_own):
        step(model)
    return report(setup, model, seen=sorted(seen))


@scenario("forward called by the layer's hook", with_hooks)
def called_by_hook(setup: Setup) -> Observed:
    model = counted(setup)

    def call(module: nn.Module, args: Any, kwargs: Any) -> None:
        UNCOUNTED.now = True
        with torch.no_grad(), torch.random.fork_rng():
            module.forward(*args, **kwargs)
        UNCOUNTED.now = False

    for layer in model.model.layers:
        layer.register_forward_pre_hook(call, with_kwargs=True)
    step(model)
    return report(setup, model)


@scenario("forward called by the layer's hook, layer's forward replaced", with_hooks)
def replaced_called_by_hook(setup: Setup) -> Observed:
    model = replaced(instance_own, setup)

    def call(module: nn.Module, args: Any, kwargs: Any) -> None:
        UNCOUNTED.now = True
        with torch.no_grad(), torch.random.fork_rng():
            module.forward(*args, **kwargs)
        UNCOUNTED.now = False

    for layer in model.model.layers:
        layer.register_forward_pre_hook(call, with_kwargs=True)
    step(model)
    return report(setup, model)


@scenario("as accelerate takes its hooks out")
def accelerate_removed(setup: Setup) -> Observed:
    model = replaced(instance_keeping, setup)
    step(model)
    for layer in model.model.layers:
        instance_restored(layer)
    COUNTS.clear()
    step(model)
    layer = model.model.layers[0]
    bound = vars(layer)["forward"]
    return report(setup, model, kept=[inspect.ismethod(bound), bound.__self__ is layer, hasattr(layer, "_old_forward")])


def of_copy(setup: Setup, model: LlamaForCausalLM, duplicate: LlamaForCausalLM) -> Observed:
    """Whether a copy computes with its own weights, checkpointed, and leaves the original's alone."""
    before = gradients(model)
    scale_weights(duplicate, 0.5)
    COUNTS.clear()
    step(duplicate)
    return {
        "calls": COUNTS["calls"],
        "gradients": same(gradients(duplicate), reference(scale=0.5)),
        "original's gradients": same(gradients(model), before),
    }


def picklable(setup: Setup, replace: Callable[[nn.Module], None] | None) -> LlamaForCausalLM:
    """A model that can be pickled: what enables checkpointing for users also puts a closure among its hooks."""
    model = replaced(replace, setup, enable=False) if replace else counted(setup, enable=False)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=setup.function())
    return model


def add_copies() -> None:
    for name, replace in {"no forward replaced": None, **ON_INSTANCE}.items():
        if replace is instance_wraps:
            continue  # a closure over the layer: copies share it on every build

        def deepcopied(setup: Setup, replace: Any = replace) -> Observed:
            model = replaced(replace, setup) if replace else counted(setup)
            step(model)
            return of_copy(setup, model, copy.deepcopy(model))

        def pickled(setup: Setup, replace: Any = replace) -> Observed:
            model = picklable(setup, replace)
            step(model)
            return of_copy(setup, model, pickle.loads(pickle.dumps(model)))  # noqa: S301

        def saved(setup: Setup, replace: Any = replace) -> Observed:
            model = picklable(setup, replace)
            step(model)
            stream = io.BytesIO()
            torch.save(model, stream)
            stream.seek(0)
            return of_copy(setup, model, torch.load(stream, weights_only=False))

        scenario(f"copy.deepcopy: {name}")(deepcopied)
        scenario(f"pickle: {name}")(pickled)
        if replace in (None, instance_own):
            scenario(f"torch.save: {name}")(saved)


add_copies()


@scenario("copy.deepcopy in the layer's hook, layer's forward replaced", with_hooks)
def copied_in_hook(setup: Setup) -> Observed:
    model = replaced(instance_own, setup)
    duplicate = copy.deepcopy(model)
    step(model)
    for index, layer in enumerate(model.model.layers):

        def duplicate_layer(module: nn.Module, args: Any, index: int = index) -> None:
            duplicate.model.layers[index] = copy.deepcopy(module)

        layer.register_forward_pre_hook(duplicate_layer)
    forward(model)
    for layer in duplicate.model.layers:
        layer._forward_pre_hooks.popitem()
    duplicate.zero_grad()
    return of_copy(setup, model, duplicate)


def in_spawned(models: list[tuple[str, nn.Module]], sender: Any) -> None:
    """Runs in a process of its own, that unpickled the models."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    observed = {}
    for setup, model in models:
        COUNTS.clear()
        step(model)
        layer = model.model.layers[0]
        observed[setup] = {
            "calls": COUNTS["calls"],
            "gradients": same(gradients(model), reference()),
            "its own": layer.forward.args[0] is layer,
        }
    sender.send(observed)


@contextlib.contextmanager
def spawned() -> Iterator[Callable[[], dict[str, Observed]]]:
    """Layers with replaced forwards, run in a spawned process beside this one."""
    context = torch.multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    models = [(str(setup), picklable(setup, instance_own)) for setup in SETUPS]
    process = context.Process(target=in_spawned, args=(models, sender), daemon=True)
    process.start()
    sender.close()
    try:
        yield receiver.recv
    finally:
        process.join()


# ---- the flag never sticks -------------------------------------------------------------------------------------------


class Planned(Exception):
    pass


def after_exceptions(setup: Setup, replace: Callable[[nn.Module], None] | None) -> Observed:
    observed: Observed = {}
    for kind in (Planned, KeyboardInterrupt):
        for where in ("before", "function", "inside", "after", "recompute"):
            model = replaced(replace, setup) if replace else counted(setup)
            layer = model.model.layers[0]
            assigned = vars(layer).get("forward")
            left = [2 if where == "recompute" else 1]

            def fail(*_: Any, left: list[int] = left, kind: type[BaseException] = kind) -> None:
                left[0] -= 1
                if left[0] == 0:
                    raise kind

            function = layer._gradient_checkpointing_func
            with contextlib.ExitStack() as undo:
                if where == "before":
                    undo.callback(layer.register_forward_pre_hook(fail).remove)
                elif where == "after":
                    undo.callback(layer.register_forward_hook(fail).remove)
                elif where == "function":
                    layer._gradient_checkpointing_func = fail
                    undo.callback(setattr, layer, "_gradient_checkpointing_func", function)
                else:
                    undo.callback(layer.mlp.register_forward_pre_hook(fail).remove)
                raised = False
                try:
                    step(model)
                except kind:
                    raised = True
            direct = direct_calls(model)
            COUNTS.clear()
            step(model)
            observed[f"{kind.__name__} {where}"] = {
                "raised": raised,
                "calls": COUNTS["calls"],
                "direct": direct,
                "gradients": same(gradients(model), reference()),
                "forward": vars(layer).get("forward") is assigned,
            }
    return observed


@scenario("after an exception")
def exceptions(setup: Setup) -> Observed:
    return after_exceptions(setup, None)


@scenario("after an exception, layer's forward replaced")
def exceptions_replaced(setup: Setup) -> Observed:
    return after_exceptions(setup, instance_own)


@scenario("after an exception, class's forward replaced")
def exceptions_class_replaced(setup: Setup) -> Observed:
    with on_class(class_own):
        return after_exceptions(setup, None)


@scenario("after a recompute with and without early stop")
def early_stop(setup: Setup) -> Observed:
    observed = {}
    for stop in (True, False):
        model = counted(setup)
        with set_checkpoint_early_stop(stop):
            step(model)
            direct = direct_calls(model)
            COUNTS.clear()
            step(model)
        observed[f"early stop {stop}"] = {
            "calls": COUNTS["calls"],
            "direct": direct,
            "gradients": same(gradients(model), reference()),
        }
    return observed


def in_steps(model: LlamaForCausalLM, hidden: Tensor) -> Iterator[Tensor]:
    """Layer after layer, given up between them."""
    options = {"position_embeddings": model.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])}
    for layer in model.model.layers:
        hidden = layer(hidden, **options)
        yield hidden


def in_turn(setup: Setup, replace: Callable[[nn.Module], None] | None) -> Observed:
    model = replaced(replace, setup) if replace else counted(setup)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    hidden, _ = layer_input(model)

    def gradient(*, enabled: bool) -> Tensor:
        for layer in model.model.layers:
            layer.gradient_checkpointing = enabled
        given = [hidden.detach().clone().requires_grad_() for _ in range(2)]
        abandoned = in_steps(model, given[0])
        next(abandoned)
        for _ in zip(*(running := [in_steps(model, one) for one in given]), strict=True):
            pass
        assert all(one.gi_frame is None for one in running)
        ends = [list(in_steps(model, one))[-1] for one in given]
        sum(end.sum() for end in ends).backward()
        abandoned.close()
        return torch.stack([one.grad for one in given])

    expected = gradient(enabled=False)
    COUNTS.clear()
    observed = gradient(enabled=True)
    calls = COUNTS["calls"]
    return {"calls": calls, "gradients": torch.equal(observed, expected), "direct": direct_calls(model)}


@scenario("generators that take turns in the layers, one of them abandoned")
def generators(setup: Setup) -> Observed:
    return in_turn(setup, None)


@scenario("generators that take turns in the layers, one of them abandoned, layer's forward replaced")
def generators_replaced(setup: Setup) -> Observed:
    return in_turn(setup, instance_own)


@scenario("tasks of asyncio that go on in another thread in each layer")
def tasks(setup: Setup) -> Observed:
    model = counted(setup)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    hidden, options = layer_input(model)

    async def run(given: Tensor) -> Tensor:
        for layer in model.model.layers:
            given = await asyncio.to_thread(layer, given, **options)
        return given

    async def both(*given: Tensor) -> list[Tensor]:
        return await asyncio.gather(*map(run, given))

    def gradient(*, enabled: bool) -> Tensor:
        for layer in model.model.layers:
            layer.gradient_checkpointing = enabled
        given = [hidden.detach().clone().requires_grad_() for _ in range(2)]
        for end in asyncio.run(both(*given)):
            end.sum().backward()
        return torch.stack([one.grad for one in given])

    model.requires_grad_(False)
    expected = gradient(enabled=False)
    COUNTS.clear()
    observed = gradient(enabled=True)
    calls = COUNTS["calls"]
    return {"calls": calls, "gradients": torch.equal(observed, expected), "direct": direct_calls(model)}


@scenario("forward called directly")
def direct(setup: Setup) -> Observed:
    model = counted(setup)
    hidden, options = layer_input(model)
    cache = DynamicCache()
    layer = model.model.layers[0]
    calls = calls_of(lambda: layer.forward(hidden, **{CACHE: cache}, use_cache=True, **options).sum().backward())
    return {"calls": calls, "cached": cache.get_seq_length(), "pre": COUNTS["pre"]}


@scenario("forward called directly, layer's forward replaced")
def direct_replaced(setup: Setup) -> Observed:
    model = replaced(instance_own, setup)
    calls = direct_calls(model)
    return {"calls": calls, "pre": COUNTS["pre"]}


def replicate(layer: nn.Module) -> nn.Module:
    """A layer as `DataParallel` replicates it, with the weights of the original."""
    replica = layer._replicate_for_data_parallel()
    replica._parameters = dict(layer._parameters)
    replica._modules = dict(layer._modules)
    return replica


def of_replica(setup: Setup, replace: Callable[[nn.Module], None] | None) -> Observed:
    model = replaced(replace, setup) if replace else counted(setup)
    replica = replicate(model.model.layers[0])
    seen: list[bool] = []

    def function(call: Any, *args: Any) -> Any:
        seen.append(call.func.__self__ is replica)
        return checkpoint(call, *args, use_reentrant=setup.reentrant)

    replica._gradient_checkpointing_func = function
    hidden, options = layer_input(model)
    calls = calls_of(lambda: replica(hidden, **options).sum().backward())
    return {"calls": calls, "given the replica": seen, "then": calls_of(lambda: step(model))}


@scenario("DataParallel replica")
def replica(setup: Setup) -> Observed:
    return of_replica(setup, None)


@scenario("DataParallel replica, layer's forward replaced")
def replica_replaced(setup: Setup) -> Observed:
    return of_replica(setup, instance_own)


Layers = tuple[nn.Module, nn.Module]
ORDERS = {
    "first in, first out": ("enter 0", "enter 1", "leave 0", "leave 1"),
    "first in, last out": ("enter 0", "enter 1", "leave 1", "leave 0"),
    "between the other's forward and backward": ("enter 0", "forward 0", "enter 1", "leave 0", "leave 1"),
}
"""What two threads do in turn: run up to the gate, on to the end of the forward, on to the end of the backward."""


class Gate:
    """Holds each thread that is told so, until it is let through."""

    def __init__(self) -> None:
        self.done = threading.Semaphore(0)
        self.go = {0: threading.Semaphore(0), 1: threading.Semaphore(0)}
        self.index = threading.local()

    def hook(self, *_: Any) -> None:
        if getattr(self.index, "held", None) is not None:
            index, self.index.held = self.index.held, None
            self.stop(index)

    def stop(self, index: int) -> None:
        self.done.release()
        self.go[index].acquire(timeout=300)


def in_threads(layers: Layers, gated: Callable[[nn.Module], nn.Module], order: tuple[str, ...]) -> list[Any]:
    """For each thread its calls and the gradient of its input, or what it raised."""
    gate = Gate()
    results: list[Any] = [None, None]
    hidden, options = layer_input(build())
    inputs = [hidden.detach().clone().requires_grad_() for _ in range(2)]

    def work(index: int) -> None:
        gate.index.held = index
        me = f"calls in {threading.get_ident()}"
        COUNTS[me] = 0
        try:
            output = layers[index](inputs[index], **options)
            if f"forward {index}" in order:
                gate.stop(index)
            output.sum().backward()
            results[index] = [COUNTS[me], inputs[index].grad.sum().item()]
        except Exception as error:
            results[index] = f"{type(error).__name__}: {error}"[:100]
        finally:
            gate.done.release()

    handles = [gated(layer).register_forward_pre_hook(gate.hook) for layer in dict.fromkeys(layers)]
    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(2)]
    for turn in order:
        what, index = turn.split()
        if what == "enter":
            threads[int(index)].start()
        else:
            gate.go[int(index)].release()
        gate.done.acquire(timeout=300)
    for thread in threads:
        thread.join(300)
    for handle in handles:
        handle.remove()
    return results


def threads(setup: Setup, replace: Callable[[nn.Module], None] | None, *, replicas: bool = False) -> Observed:
    model = replaced(replace, setup) if replace else counted(setup)
    model.requires_grad_(False)  # threads would add up gradients in an order of their own
    layer = model.model.layers[0]
    layer.self_attn.attention_dropout = 0.0
    assigned = vars(layer).get("forward")
    hidden, options = layer_input(model)
    BODY(layer, hidden, **options).sum().backward()
    expected = hidden.grad.sum().item()
    layers = (replicate(layer), replicate(layer)) if replicas else (layer, layer)
    observed: Observed = {}
    for name, order in ORDERS.items():
        results = in_threads(layers, (lambda one: one) if setup.hooks else (lambda one: one.mlp), order)
        observed[name] = [one if isinstance(one, str) else [one[0], one[1] == expected] for one in results]
    return {**observed, "forward": vars(layer).get("forward") is assigned}


@scenario("two threads in one layer")
def two_threads(setup: Setup) -> Observed:
    return threads(setup, None)


@scenario("two threads in one layer, its forward replaced", lambda setup: not setup.hooks)
def two_threads_replaced(setup: Setup) -> Observed:
    return threads(setup, instance_own)


@scenario("two threads in the hooks of one layer, its forward replaced", with_hooks)
def two_threads_replaced_hooks(setup: Setup) -> Observed:
    return threads(setup, instance_own)


@scenario("two threads in one layer, class's forward replaced", lambda setup: not setup.hooks)
def two_threads_class_replaced(setup: Setup) -> Observed:
    with on_class(class_own):
        return threads(setup, None)


@scenario("two threads in the hooks of one layer, class's forward replaced", with_hooks)
def two_threads_class_replaced_hooks(setup: Setup) -> Observed:
    with on_class(class_own):
        return threads(setup, None)


@scenario("DataParallel replicas in threads")
def replicas_in_threads(setup: Setup) -> Observed:
    return threads(setup, None, replicas=True)


@scenario("state dict and attributes")
def state(setup: Setup) -> Observed:
    model, plain = counted(setup), build()
    step(model)
    layer = model.model.layers[0]
    added = sorted(set(vars(layer)) - set(vars(plain.model.layers[0])))
    return {
        "state dict": sorted(model.state_dict()) == sorted(plain.state_dict()),
        "keys": len(model.state_dict()),
        "added": added,
        "buffers": [name for name, _ in layer.named_buffers()],
        "modules": [name for name, _ in layer.named_modules()],
        "repr": repr(layer) == repr(plain.model.layers[0]),
    }


# ---- outputs, caches, warnings ---------------------------------------------------------------------------------------


@scenario("output_hidden_states and output_attentions")
def captured(setup: Setup) -> Observed:
    model, other = counted(setup), build()
    for one in (model, other):
        one.set_attn_implementation("eager")
    options = {"output_hidden_states": True, "output_attentions": True}
    output, expected = step(model, **options), step(other, **options)
    return report(
        setup,
        model,
        hidden_states=[len(output.hidden_states), same(output.hidden_states, expected.hidden_states)],
        attentions=[len(output.attentions), same(output.attentions, expected.attentions)],
        gradients=same(gradients(model), gradients(other)),
    )


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    handler = Messages()
    transformers.utils.logging.warning_once.cache_clear()
    transformers.logging.set_verbosity_warning()
    transformers.logging.disable_default_handler()
    transformers.logging.add_handler(handler)
    try:
        yield handler.texts
    finally:
        transformers.logging.remove_handler(handler)
        transformers.logging.enable_default_handler()
        transformers.logging.set_verbosity_error()


@scenario("a model called with use_cache")
def model_with_cache(setup: Setup) -> Observed:
    model = counted(setup)
    with messages() as texts:
        step(model, use_cache=True)
        COUNTS.clear()
        output = step(model, use_cache=True)
    cache = output.past_key_values
    return report(setup, model, cached=None if cache is None else cache.get_seq_length(), warnings=texts)


@scenario("a layer called with a cache")
def layer_with_cache(setup: Setup) -> Observed:
    model = counted(setup, layers=1)
    seen: list[bool] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get(CACHE) is None), with_kwargs=True
    )
    hidden, options = layer_input(model)
    cache = DynamicCache()
    with messages() as texts:
        for _ in range(2):
            output = model.model.layers[0](hidden, **{CACHE: cache}, use_cache=True, **options)
            output.sum().backward()
    warnings = [text.replace(f"`{CACHE}=", "`cache=") for text in texts]
    return {"calls": COUNTS["calls"], "cached": cache.get_seq_length(), "dropped": seen, "warnings": warnings}


def without_gradients(setup: Setup, mode: Callable[[], Any], replace: Callable[[nn.Module], None] | None) -> Observed:
    """Two calls of a layer in training mode, with one cache."""
    model = replaced(replace, setup, layers=1) if replace else counted(setup, layers=1)
    layer = model.model.layers[0]
    checkpoints: list[Any] = []

    def function(call: Any, *args: Any) -> Any:
        checkpoints.append(call)
        return checkpoint(call, *args, use_reentrant=setup.reentrant)

    layer._gradient_checkpointing_func = function
    hidden, options = layer_input(model)
    cache = DynamicCache()
    with messages() as texts, mode():
        for _ in range(2):
            layer(hidden, **{CACHE: cache}, use_cache=True, **options)
    direct = direct_calls(model)
    return {
        "checkpoints": len(checkpoints),
        "cached": cache.get_seq_length(),
        "warnings": [text.replace(f"`{CACHE}=", "`cache=") for text in texts],
        "direct": direct,
    }


@scenario("no_grad, a layer called with a cache")
def in_no_grad(setup: Setup) -> Observed:
    return without_gradients(setup, torch.no_grad, None)


@scenario("inference_mode, a layer called with a cache")
def in_inference_mode(setup: Setup) -> Observed:
    return without_gradients(setup, torch.inference_mode, None)


@scenario("no_grad, a layer called with a cache, its forward replaced")
def in_no_grad_replaced(setup: Setup) -> Observed:
    return without_gradients(setup, torch.no_grad, instance_own)


@scenario("enable_grad within no_grad, a layer called with a cache")
def in_enable_grad(setup: Setup) -> Observed:
    @contextlib.contextmanager
    def within() -> Iterator[None]:
        with torch.no_grad(), torch.enable_grad():
            yield

    return without_gradients(setup, within, None)


@scenario("nothing requires gradients")
def nothing_requires_gradients(setup: Setup) -> Observed:
    """It is the mode that counts, not what the tensors say."""
    model = counted(setup)
    model.requires_grad_(False)
    checkpoints: list[Any] = []

    def function(call: Any, *args: Any) -> Any:
        checkpoints.append(call)
        return checkpoint(call, *args, use_reentrant=setup.reentrant)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    forward(model)
    return {"checkpoints": len(checkpoints)}


@scenario("what the layer's hooks see of a cache", with_hooks)
def hooks_with_cache(setup: Setup) -> Observed:
    model = counted(setup, layers=1)
    seen: set[tuple[bool, bool]] = set()
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.add((kwargs[CACHE] is None, kwargs["use_cache"])),
        with_kwargs=True,
    )
    hidden, options = layer_input(model)
    model.model.layers[0](hidden, **{CACHE: DynamicCache()}, use_cache=True, **options).sum().backward()
    return {"calls": COUNTS["calls"], "seen": sorted(seen)}


def attempt(run: Callable[[Setup], Observed], setup: Setup) -> Observed:
    try:
        return run(setup)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    finally:
        UNCOUNTED.now = False


def use() -> None:
    """Call a layer of the class, checkpointed and with a hook: nothing is put on the class for that."""
    layer = counted(Setup(reentrant=False, hooks=True), layers=1).model.layers[0]
    hidden, options = layer_input(build(1))
    layer(hidden, **options)
    assert vars(LlamaDecoderLayer)["forward"] is FORWARD


def main(result: Path, used: bool) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    gc.disable()
    observed: dict[str, dict[str, Observed]] = {}
    with spawned() as elsewhere:
        for name, (run, applies) in SCENARIOS.items():
            observed[name] = {}
            for setup in filter(applies, SETUPS):
                LlamaDecoderLayer.forward = FORWARD
                if used:
                    use()
                observed[name][str(setup)] = attempt(run, setup)
        observed["spawn: layer's forward replaced, not calling the old"] = elsewhere()
    result.write_text(json.dumps(observed), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), used=sys.argv[2:] == ["used"])
