"""`torch.compile`, `torch.export` and ONNX of models with checkpointing.

`python compile_worker.py RESULT.json` writes what was observed in each case, most of them on small layers whose
computation ends in an operator that counts its calls: `computed` is how often it ran in a step, two times a layer where
the layer is checkpointed once, one time where it is not. `graphs` is how many graphs were compiled, after each step,
and `right` whether the step's gradients, or the outputs, are those of the same model neither compiled nor checkpointed.
"""

import functools
import gc
import itertools
import json
import math
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
import torch._dynamo.testing
import transformers
from accelerate.utils import compile_regions, compile_regions_fsdp2
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).parents[1] / "distributed" / "parallel"))
from counted import COMPUTED, counted

from overlay.measure import group

SIZE = 8
LAYERS = 2
IDS = torch.arange(32).reshape(2, 16)

Observed = dict[str, Any]
Backend = torch._dynamo.testing.CompileCounterWithBackend
How = Callable[[nn.Module, Backend, bool], nn.Module]
Action = Callable[[nn.Module], None]


# ---- layers whose computation is counted, in a compiled graph too ----------------------------------------------------


def layer_classes(breaks: bool = False) -> tuple[type[nn.Module], type[nn.Module]]:
    """A layer, and one that has another inside; new classes each time, on which no earlier case has left anything."""

    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(SIZE, SIZE)

        def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
            value = counted(self.linear(hidden))
            if breaks:
                torch._dynamo.graph_break()
            return hidden + torch.sin(value) * scale

    class Outer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(SIZE, SIZE)
            self.inner = Layer()

        def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
            value = counted(self.linear(hidden))
            if breaks:
                torch._dynamo.graph_break()
            return self.inner(hidden + torch.sin(value), scale=scale)

    return Layer, Outer


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module], layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(SIZE, SIZE)
        self.layers = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.embed(hidden)
        for layer in self.layers:
            hidden = layer(hidden, scale=0.5)
        return hidden


def build(layers: int = LAYERS, breaks: bool = False, nested: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(layer_classes(breaks)[nested], layers).train()


def checkpointing_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def batch(seed: int = 0) -> Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(seed))


def step(called: nn.Module) -> int:
    """How often the layers' computation ran."""
    called.zero_grad()
    COMPUTED.clear()
    called(batch()).square().sum().backward()
    return len(COMPUTED)


def agree(model: nn.Module, reference: nn.Module) -> bool:
    return all(
        ours.grad is not None and torch.allclose(ours.grad, theirs.grad, atol=1e-6)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True)
    )


# ---- what is done to a model between steps ---------------------------------------------------------------------------


def no_change(module: nn.Module, args: Any) -> None:
    return None


def no_change_after(module: nn.Module, args: Any, output: Any) -> None:
    return None


def put_hooks(model: nn.Module) -> None:
    model.handles = []
    for layer in checkpointing_layers(model):
        model.handles.append(layer.register_forward_pre_hook(no_change))
        model.handles.append(layer.register_forward_hook(no_change_after))


def remove_hooks(model: nn.Module) -> None:
    for handle in model.handles:
        handle.remove()


def own_forward(layer: nn.Module, hidden: Tensor, scale: float = 1.0) -> Tensor:
    return hidden + torch.cos(counted(layer.linear(hidden)))


def call_old(old: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return old(*args, **kwargs) * 2


def replace_with_own(model: nn.Module) -> None:
    for layer in checkpointing_layers(model):
        layer.forward = types.MethodType(own_forward, layer)


def replace_calling_old(model: nn.Module) -> None:
    for layer in checkpointing_layers(model):
        layer.forward = functools.partial(call_old, layer.forward)


def remove_replacement(model: nn.Module) -> None:
    for layer in checkpointing_layers(model):
        del layer.forward


def replace_on_class(model: nn.Module) -> None:
    type(checkpointing_layers(model)[0]).forward = own_forward


def evaluate(model: nn.Module) -> None:
    model.eval()


def train(model: nn.Module) -> None:
    model.train()


STEP, OUTPUTS = "step", "outputs without gradients"

# ---- ways to compile -------------------------------------------------------------------------------------------------


def whole_model(model: nn.Module, backend: Backend, fullgraph: bool) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=fullgraph)


def each_layer(model: nn.Module, backend: Backend, fullgraph: bool) -> nn.Module:
    compile_regions_fsdp2(model.layers, backend=backend, fullgraph=fullgraph)
    return model


def wrapped_layers(model: nn.Module, backend: Backend, fullgraph: bool) -> nn.Module:
    return compile_regions(model, backend=backend, fullgraph=fullgraph)


WAYS: dict[str, How] = {"model": whole_model, "layer.compile()": each_layer, "torch.compile(layer)": wrapped_layers}


def looking_at_the_layer(call: Any, *args: Any) -> Any:
    if not any(parameter.requires_grad for parameter in call.func.__self__.parameters()):
        return call(*args)
    return checkpoint(call, *args, use_reentrant=False)


@torch._dynamo.disable
def not_traced(call: Any, *args: Any) -> Any:
    return looking_at_the_layer(call, *args)


def enable(model: nn.Module, reentrant: bool, function: Callable[..., Any] | None = None) -> None:
    for layer in checkpointing_layers(model):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = function or functools.partial(checkpoint, use_reentrant=reentrant)


def compiled(
    how: How,
    *,
    reentrant: bool = False,
    hooks: bool = False,
    actions: Sequence[str | Action] = (STEP, STEP, STEP),
    prepare: Action = lambda model: None,
    function: Callable[..., Any] | None = None,
    fullgraph: bool = True,
    backend: str = "aot_eager",
    **options: Any,
) -> Observed:
    torch._dynamo.reset()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    model, reference = build(**options), build(**options)
    enable(model, reentrant, function)
    for one in (model, reference):
        prepare(one)
        if hooks:
            put_hooks(one)
    counting = Backend(backend)
    called = how(model, counting, fullgraph)
    graphs, computed, right = [], [], []
    for action in actions:
        if action == STEP:
            computed.append(step(called))
            step(reference)
            right.append(agree(model, reference))
            graphs.append(counting.frame_count)
        elif action == OUTPUTS:
            with torch.no_grad():
                right.append(torch.allclose(called(batch()), reference(batch()), atol=1e-6))
            graphs.append(counting.frame_count)
        else:
            action(model)
            action(reference)
    return {"graphs": graphs, "computed": computed, "right": right}


def after_an_error(how: How) -> Observed:
    """A step after one that was not compiled for an error, and one that raised in the compiled graph."""
    observed: Observed = {"computed": [], "right": [], "errors": []}
    reference = build()
    step(reference)
    for breaks, seen in ((True, batch()), (False, batch()[:, :-1])):
        torch._dynamo.reset()
        model = build(breaks=breaks)
        enable(model, reentrant=False)
        put_hooks(model)
        try:
            how(model, Backend("aot_eager"), True)(seen)
        except Exception as error:
            observed["errors"].append(type(error).__name__)
        for layer in model.layers:
            layer._compiled_call_impl = None
        observed["computed"].append(step(model))
        observed["right"].append(agree(model, reference))
    return observed


def in_two_threads(how: How) -> Observed:
    """A step in this thread, and two in another."""
    torch._dynamo.reset()
    model, reference = build(), build()
    step(reference)
    enable(model, reentrant=False)
    put_hooks(model)
    backend = Backend("aot_eager")
    called = how(model, backend, True)
    observed: Observed = {"graphs": [], "computed": [], "right": []}

    def one_step() -> None:
        observed["computed"].append(step(called))
        observed["graphs"].append(backend.frame_count)
        observed["right"].append(agree(model, reference))

    one_step()
    for _ in range(2):
        thread = threading.Thread(target=one_step)
        thread.start()
        thread.join()
    return observed


# ---- a model of transformers -----------------------------------------------------------------------------------------


def llama(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=97,
    )
    return LlamaForCausalLM(config).train()


def llama_step(model: nn.Module) -> None:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()


def compiled_llama() -> Observed:
    torch._dynamo.reset()
    model, reference = llama(), llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    put_hooks(model)
    llama_step(reference)
    backend = Backend("aot_eager")
    called = whole_model(model, backend, True)
    observed: Observed = {"graphs": [], "right": []}
    for _ in range(2):
        llama_step(called)
        observed["graphs"].append(backend.frame_count)
        observed["right"].append(agree(model, reference))
    return observed


def trained_llama() -> LlamaForCausalLM:
    model = llama()
    model.gradient_checkpointing_enable()
    put_hooks(model)
    llama_step(model)
    return model.eval()


def exported(strict: bool) -> Observed:
    torch._dynamo.reset()
    model = trained_llama()
    program = torch.export.export(model, (), {"input_ids": IDS, "use_cache": False}, strict=strict)
    with torch.no_grad():
        one = program.module()(input_ids=IDS, use_cache=False).logits
        other = model(input_ids=IDS, use_cache=False).logits
    operators = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return {
        "operators": len(operators),
        "checkpoints": sum("checkpoint" in one for one in operators),
        "right": [torch.allclose(one, other, atol=1e-6)],
    }


def exported_to_onnx(dynamo: bool) -> Observed:
    """A model of layers that ONNX has the operators of."""
    torch._dynamo.reset()
    model = build()
    replace_on_class_without_counting(model)
    enable(model, reentrant=False)
    put_hooks(model)
    step(model)
    file = Path("model.onnx")
    torch.onnx.export(model.eval(), (batch(),), file, dynamo=dynamo, verbose=False, external_data=False)
    graph = onnx.load(file).graph
    file.unlink()
    given = graph.input[0].name
    with torch.no_grad():
        expected = model(batch()).numpy()
    found = onnx.reference.ReferenceEvaluator(onnx.helper.make_model(graph)).run(None, {given: batch().numpy()})[0]
    return {
        "operators": sorted({node.op_type for node in graph.node} - {"Constant"}),
        "right": [bool(abs(found - expected).max() < 1e-5)],
    }


def replace_on_class_without_counting(model: Model) -> None:
    def forward(layer: nn.Module, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return hidden + torch.sin(layer.linear(hidden)) * scale

    type(model.layers[0]).forward = forward


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def relative_error(model: nn.Module, reference: nn.Module) -> float:
    difference = norm = 0.0
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else torch.zeros_like(theirs.grad)
        difference += float((gradient - theirs.grad).norm() ** 2)
        norm += float(theirs.grad.norm() ** 2)
    return math.sqrt(difference / norm)


def sharded(how: How, reentrant: bool, compile_first: bool, rank: int, world: int, mesh: DeviceMesh) -> Observed:
    """Two steps of two forwards and a backward."""
    torch._dynamo.reset()
    model, reference = build().double(), build().double()
    enable(model, reentrant)
    if compile_first:
        called = how(model, Backend("aot_eager"), False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not compile_first:
        called = how(model, Backend("aot_eager"), False)
    observed: Observed = {"computed": [], "right": []}

    def loss(model: nn.Module, rank: int) -> Tensor:
        return sum(model(batch(10 * rank + i).double()).square().sum() for i in range(2))

    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        COMPUTED.clear()
        loss(called, rank).backward()
        observed["computed"].append(len(COMPUTED))
        (sum(loss(reference, one) for one in range(world)) / world).backward()
        observed["right"].append(relative_error(model, reference) < 1e-6)
    return observed


SHARDED: dict[str, tuple[How, bool]] = {
    "model": (whole_model, False),
    "layer.compile()": (each_layer, False),
    "layer.compile(), then sharded": (each_layer, True),
}


def work(rank: int, world: int, put: Callable[[Any], None]) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for name, (how, compile_first) in SHARDED.items():
        for reentrant in (True, False):
            case = f"FSDP2, two forwards: {name}, {kind(reentrant)}"
            run = functools.partial(sharded, how, reentrant, compile_first, rank, world, mesh)
            put((case, attempt(run)))


# ---- cases -----------------------------------------------------------------------------------------------------------


def kind(reentrant: bool) -> str:
    return "reentrant" if reentrant else "non-reentrant"


def cases() -> dict[str, Callable[[], Observed]]:
    made: dict[str, Callable[[], Observed]] = {}
    later = {
        "forward replaced later": (STEP, replace_with_own, STEP, STEP, remove_replacement, STEP),
        "forward that calls the old put in later": (STEP, replace_calling_old, STEP, STEP),
        "class's forward replaced later": (STEP, replace_on_class, STEP, STEP),
        "switched": (STEP, evaluate, STEP, OUTPUTS, train, OUTPUTS, STEP, evaluate, OUTPUTS, train, STEP),
    }
    for (name, how), reentrant in itertools.product(WAYS.items(), (True, False)):
        # On stock, a reentrant checkpoint around a compiled layer runs it without gradients first
        run = functools.partial(compiled, how, reentrant=reentrant, fullgraph=how is not each_layer or not reentrant)
        case = f"{name}, {kind(reentrant)}"
        made[case] = functools.partial(run, layers=3)
        made[f"{case}, hooks"] = functools.partial(run, layers=3, hooks=True)
        made[f"{case}, nested, hooks"] = functools.partial(run, hooks=True, nested=True, actions=(STEP, STEP))
        made[f"{case}, nested, hooks, graph breaks"] = functools.partial(
            run, hooks=True, nested=True, breaks=True, fullgraph=False, actions=(STEP, STEP)
        )
        if how is not each_layer and reentrant:
            continue
        made[f"{case}, hooks put in later"] = functools.partial(
            run, actions=(STEP, put_hooks, STEP, STEP, remove_hooks, STEP)
        )
        made[f"{case}, hooks, graph breaks"] = functools.partial(
            run, hooks=True, breaks=True, fullgraph=False, actions=(STEP, STEP)
        )
        for what, actions in later.items():
            if how is wrapped_layers and what == "switched":
                continue
            made[f"{case}, hooks, {what}"] = functools.partial(run, hooks=True, actions=actions)
    for name, how in WAYS.items():
        run = functools.partial(compiled, how, hooks=True, actions=(STEP, STEP))
        made[f"{name}, own checkpoint function, hooks"] = functools.partial(run, function=looking_at_the_layer)
        made[f"{name}, hooks, class's forward replaced"] = functools.partial(run, prepare=replace_on_class)
        if how is not wrapped_layers:
            made[f"{name}, own checkpoint function, not traced, hooks"] = functools.partial(
                run, function=not_traced, fullgraph=False
            )
            made[f"{name}, hooks, layer's forward replaced"] = functools.partial(run, prepare=replace_calling_old)
            made[f"{name}, hooks, two threads"] = functools.partial(in_two_threads, how)
            made[f"{name}, after an error"] = functools.partial(after_an_error, how)
    made["layer.compile(), ten layers, hooks"] = functools.partial(
        compiled, each_layer, hooks=True, layers=10, actions=(STEP, STEP)
    )
    made["Llama, hooks"] = compiled_llama
    made["torch.export, strict"] = functools.partial(exported, True)
    made["torch.export"] = functools.partial(exported, False)
    made["torch.onnx.export"] = functools.partial(exported_to_onnx, True)
    made["torch.onnx.export, through torch.jit.trace"] = functools.partial(exported_to_onnx, False)
    return made


def attempt(case: Callable[[], Observed]) -> Observed:
    """Run a case in a thread of its own, which nothing that an earlier case left behind in a thread can help."""
    observed: Observed = {}

    def run() -> None:
        try:
            observed.update(case())
        except Exception as error:
            traceback.print_exc(limit=-4)
            observed["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return observed


def main(result: Path) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    observed = dict(group.train((2,), work))  # first: it forks, which is not safe once there are threads
    gc.disable()
    observed |= {name: attempt(case) for name, case in cases().items()}
    result.write_text(json.dumps(observed), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
