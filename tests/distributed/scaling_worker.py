"""What a step under FSDP2 communicates and holds, on 1, 2, 4 and 8 gloo ranks, counted by the profiler.

`python scaling_worker.py RESULT.json PAGE.md RANKS...` trains a small Llama, none of whose dimensions is a multiple of
8, with whatever transformers is on the path. Of PAGE.md it runs the first program, which calls backward forward by
forward. Nothing here is a timing.
"""

import functools
import json
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

sys.path.append(str(Path(__file__).resolve().parents[2]))
from overlay.measure import group

SIZES = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 29,
}
WIDE = SIZES | {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
"""So wide that its gradients are told from everything else by their shapes."""
MODES = {"none": None, "reentrant": {"use_reentrant": True}, "non-reentrant": {"use_reentrant": False}}
FORWARDS = (1, 2, 3, 4)
FEW = (1, 2, 3)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "reshard_after_forward=True": {"reshard_after_forward": True},
    "reshard_after_forward=False": {"reshard_after_forward": False},
    "bf16, reduced in fp32": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "all but the norms frozen": {"frozen": ("proj", "embed", "head")},
}
MIXED = ("default", "bf16, reduced in fp32")
OF_OPTIONS = 2
"""The number of ranks on which everything is measured; on others, the default alone."""
IS_PATCHED = hasattr(GradientCheckpointingLayer, "_gc_checkpoint_forward")
PROGRAM = ""
"""The page's, which calls backward forward by forward."""
IDS = torch.arange(8).reshape(1, 8)
BYTES = {"float": 4, "c10::BFloat16": 2}
COLLECTIVES = {"c10d::_allgather_base_": ("all-gather", 0), "c10d::_reduce_scatter_base_": ("reduce-scatter", 1)}
"""The name of an operator -> what it does, and which of its arguments is the whole tensor."""


def build(mode: str, sizes: dict[str, int] = SIZES, frozen: tuple[str, ...] = (), **sharding: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).train()
    if (options := MODES[mode]) is not None:
        model.gradient_checkpointing_enable(options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    if frozen:
        model.enable_input_require_grads()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **sharding)
    return fully_shard(model, mesh=mesh, **sharding)


def loss(model: nn.Module, forwards: int) -> Tensor:
    return torch.stack([model(input_ids=IDS, labels=IDS, use_cache=False).loss for _ in range(forwards)]).sum()


def counted(step: Callable[[], Any]) -> dict[str, int] | None:
    """The collectives of a step and the bytes of the whole tensors, on rank 0; the others only take part."""
    if dist.get_rank():
        step()
        return None
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        step()
    found = Counter({"all-gather": 0, "reduce-scatter": 0, "all-gather bytes": 0, "reduce-scatter bytes": 0})
    for event in profiled.profiler.kineto_results.events():
        if event.name().startswith("c10d::"):
            name, whole = COLLECTIVES[event.name()]
            found[name] += 1
            found[f"{name} bytes"] += event.shapes()[whole][0] * BYTES[event.dtypes()[whole]]
    return found


def cases(world: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for mode in MODES:
        yield "default", mode, FORWARDS
        if world == OF_OPTIONS:
            yield from ((option, mode, (2,)) for option in OPTIONS if option != "default")


def steps(model: nn.Module, forwards: tuple[int, ...]) -> list[tuple[int, dict[str, int] | None]]:
    """Of one model, after a first step, which initialises; so does the first lossy one, of two forwards."""
    loss(model, 1).backward()
    found = []
    for count in forwards:
        if count == 2:
            loss(model, count).backward()
        found.append((count, counted(lambda count=count: loss(model, count).backward())))
    return found


def unit(module: nn.Module, without: tuple[nn.Module, ...] = ()) -> dict[str, list[list[int]]]:
    """The shapes of the parameters of a module, those of other modules apart."""
    others = {parameter for other in without for parameter in other.parameters()}
    shapes: dict[str, list[list[int]]] = {"trained": [], "frozen": []}
    for parameter in module.parameters():
        if parameter not in others:
            shapes["trained" if parameter.requires_grad else "frozen"].append(list(parameter.shape))
    return shapes


def units(model: LlamaForCausalLM) -> dict[str, Any]:
    layers = tuple(model.model.layers)
    return {"layers": [unit(layer) for layer in layers], "root": unit(model, layers)}


class Gradients(TorchDispatchMode):
    """Counts the bytes of the storages that are made as tensors of given shapes, from the first tensor to the last."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes
        self.known: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is Tensor and (key := tensor.untyped_storage()._cdata) not in self.known:
                storage = tensor.untyped_storage()
                # A tensor in one dimension is FSDP2's buffer, whose views have the shapes of parameters
                self.known[key] = storage.nbytes() if tuple(tensor.shape) in self.shapes else 0
                self.now += self.known[key]
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.freed, key)
        return result

    def freed(self, key: int) -> None:
        self.now -= self.known.pop(key)


def held(model: nn.Module, step: Callable[[nn.Module], None]) -> int:
    """The most bytes of unsharded gradients of the weights of a wide model at once in a step."""
    shapes = {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() > 1}
    with Gradients(shapes | {shape[::-1] for shape in shapes}) as gradients:
        step(model)
    return gradients.most


def held_after(mode: str, forwards: int, **sharding: Any) -> int:
    return held(build(mode, WIDE, **sharding), lambda model: loss(model, forwards).backward())


def hook_calls(mode: str, forwards: int) -> list[int]:
    """How often each parameter's hook for an optimizer in the backward runs."""
    model = build(mode)
    called: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.update([name]))
    loss(model, forwards).backward()
    return sorted({called[name] for name, _ in model.model.layers.named_parameters(prefix="model.layers")})


def one_by_one(mode: str, forwards: int) -> dict[str, Any]:
    """What the page's program communicates and holds, and its gradients against those of one backward."""
    ids = [(IDS + i + 5 * dist.get_rank()) % SIZES["vocab_size"] for i in range(forwards)]
    batches = [{"input_ids": one, "use_cache": False} for one in ids]

    def preference(*logits: Tensor) -> Tensor:
        return nn.functional.softplus(-sum(one.square().mean() * (-1) ** i for i, one in enumerate(logits)))

    def run(model: nn.Module) -> None:
        exec(PROGRAM, {"model": model, "batches": batches, "loss": preference})  # noqa: S102

    plain, model = build("none"), build(mode)
    preference(*(plain(**batch).logits for batch in batches)).backward()
    run(model)
    found = error(model, plain)
    return {"error": found, "collectives": counted(lambda: run(model)), "held": held(build(mode, WIDE), run)}


class ReducingOnce:
    """Has FSDP2 reduce the gradients of a layer once a backward in reentrant mode, too: the experiment of the page.

    As long as another forward of the layer is to come in a backward, FSDP2 is told not to reduce, which has it keep the
    gradients. How that is known: `counting` the forwards, or `asking` autograd which of them are in this backward.
    """

    def __init__(self, layer: nn.Module, design: str) -> None:
        self.design = design
        self.ran: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self.count = 0
        self.waits = False
        layer.register_forward_pre_hook(self.forward, with_kwargs=True)  # FSDP2's own was put in front

    def forward(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Finds the node in front of the layer in which FSDP2 reduces, once this forward's gradients are there."""
        for tensor in tree_leaves((args, kwargs)):
            node = getattr(tensor, "grad_fn", None)
            if hasattr(node, "param_group"):
                self.ran[node] = None
                self.count += 1
                node.register_prehook(functools.partial(self.before, weakref.ref(node), node.param_group))
                node.register_hook(functools.partial(self.after, node.param_group))
                return

    def before(self, node: Any, group: Any, gradients: Any) -> None:
        backward = torch._C._current_graph_task_id()
        self.ran[node()] = backward
        self.count -= 1
        asked = (torch._C._will_engine_execute_node(other) for other, ran in self.ran.items() if ran != backward)
        self.waits = group.reduce_grads and bool(self.count if self.design == "counting" else any(asked))
        if self.waits:
            group.reduce_grads = False

    def after(self, group: Any, inputs: Any, outputs: Any) -> None:
        if self.waits:
            group.reduce_grads = True


def reducing_once(design: str) -> dict[str, Any]:
    def make(mode: str, *arguments: Any, **options: Any) -> LlamaForCausalLM:
        model = build(mode, *arguments, **options)
        for layer in model.model.layers if mode == "reentrant" else ():
            ReducingOnce(layer, design)
        return model

    def step(model: nn.Module, forwards: int, unused: int) -> None:
        kept = [loss(model, 1) for _ in range(unused)]
        loss(model, forwards).backward()
        del kept

    errors = {}
    for name, (forwards, unused) in {"2 forwards": (2, 0), "3 forwards": (3, 0), "2 of 3 forwards": (2, 1)}.items():
        plain, model = make("none"), make("reentrant")
        for one in (plain, model):
            step(one, forwards, unused)
        errors[name] = error(model, plain)
    model = make("reentrant")
    step(model, 2, 0)
    found = counted(lambda: step(model, 2, 0))
    of_two = {
        option: held(make("reentrant", WIDE, **OPTIONS[option]), lambda model: step(model, 2, 0)) for option in MIXED
    }
    return {"errors": errors, "collectives": found, "held": of_two}


def error(model: nn.Module, other: nn.Module) -> float:
    """Of the gradients of the one, relative to the other's."""
    ours, theirs = (
        torch.cat(
            [
                (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).to_local().flatten()
                for parameter in one.parameters()
            ]
        )
        for one in (model, other)
    )
    return float((ours - theirs).norm() / theirs.norm())


def next_step(mode: str) -> dict[str, float]:
    """The loss after a step of two forwards and an optimizer's step, in the first forward and in the second."""
    model = build(mode)
    loss(model, 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    with torch.no_grad():
        return {which: float(loss(model, 1)) for which in ("first", "second")}


def work(rank: int, world: int, put: Callable[[Any], None]) -> None:
    rows = []
    for option, mode, forwards in cases(world):
        model = build(mode, **OPTIONS[option])
        for count, found in steps(model, forwards):
            rows.append({"options": option, "checkpointing": mode, "forwards": count, "collectives": found})
    result: dict[str, Any] = {"ranks": world, "rows": rows}
    if world == OF_OPTIONS:
        result["units"] = {option: units(build("none", **OPTIONS[option])) for option in OPTIONS}
        result["wide"] = units(build("none", WIDE))
        result["next step"] = {mode: next_step(mode) for mode in MODES}
        result["one by one"] = {mode: one_by_one(mode, 2) for mode in MODES}
    if world == OF_OPTIONS and IS_PATCHED:
        result["held"] = {mode: {count: held_after(mode, count) for count in FEW} for mode in MODES}
        result["held in bf16"] = {mode: held_after(mode, 2, **OPTIONS[MIXED[1]]) for mode in MODES}
        result["hook calls"] = {mode: {count: hook_calls(mode, count) for count in FEW} for mode in MODES}
        result["reducing once"] = {design: reducing_once(design) for design in ("asking", "counting")}
    put(result)


if __name__ == "__main__":
    PROGRAM, _ = re.findall(r"^```py\n(.*?)^```", Path(sys.argv[2]).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    transformers.logging.set_verbosity_error()
    found = group.train([int(world) for world in sys.argv[3:]], work)
    Path(sys.argv[1]).write_text(json.dumps(found), "utf-8")
