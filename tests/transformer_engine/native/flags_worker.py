"""What pipelines of TransformerEngine's operations do to the caller's tensors, with its native library.

`python flags_worker.py RESULT.json [CALL...]` makes all the calls of `calls`, each of a pipeline with a kind of tensor
in a mode, and tells what they did in digests; or those calls that are named, and tells it in full.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

os.environ["NVTE_TORCH_COMPILE"] = "0"  # L2Normalization without a compiler; read at import
import transformer_engine.pytorch as te
from transformer_engine.pytorch.ops.op import FusedOperation

SHAPE = (4, 8)
EMPTY = (0, 8)


class Scale(te.ops.ConstantScale):
    """An operation that the fusion below looks for."""


class Output(te.ops.MakeExtraOutput):
    """An operation with an extra output that the fusion below looks for."""


class OutputScale(FusedOperation):
    """`Output` and `Scale` as one operation, in both directions."""

    calls = 0

    def fuser_forward(self, contexts: Any, tensor: Tensor, **_: Any) -> Any:
        OutputScale.calls += 1
        return tensor * self.basic_ops[1].scale, [(tensor,), ()]

    def fuser_backward(self, contexts: Any, gradient: Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        scaled = gradient * self.basic_ops[1].scale
        return basic_op_grad_extra_outputs[0][0] + scaled, [(), ()], [(), ()]


def fuse(operations: list[Any], **_: Any) -> list[Any]:
    fused: list[Any] = []
    for operation in operations:
        if fused and isinstance(fused[-1], Output) and isinstance(operation, Scale):
            fused[-1] = OutputScale([fused[-1], operation])
        else:
            fused.append(operation)
    return fused


def register_fusion() -> bool:
    """Whether there is such a thing: 2.12 has a list of its own fusions."""
    registers = [getattr(te.ops, f"register_{direction}_fusion", None) for direction in ("forward", "backward")]
    for register in registers:
        if register is not None:
            register(fuse)
    return all(registers)


OPERATIONS: dict[str, Callable[[], nn.Module]] = {
    "Identity": te.ops.Identity,
    "MakeExtraOutput": te.ops.MakeExtraOutput,
    "MakeExtraOutput(in_place)": lambda: te.ops.MakeExtraOutput(in_place=True),
    "AddExtraInput": te.ops.AddExtraInput,
    "AddExtraInput(in_place)": lambda: te.ops.AddExtraInput(in_place=True),
    "Reshape": lambda: te.ops.Reshape((-1, 2, 8)),
    "Bias": lambda: bias(te.ops.Bias(8, device="cpu")),
    "ConstantScale": lambda: te.ops.ConstantScale(0.5),
    "L2Normalization": te.ops.L2Normalization,
    "Dropout": lambda: te.ops.Dropout(0.5),
    "Dropout.eval": lambda: te.ops.Dropout(0.5).eval(),
    "Quantize": te.ops.Quantize,
    "AllReduce": te.ops.AllReduce,
    "AllGather": te.ops.AllGather,
    "Output": Output,
    "Scale": lambda: Scale(0.5),
}
"""Those that run on the CPU. `Dropout` and `L2Normalization` save tensors for the backward pass, the latter its
input."""

MODULES: dict[str, Callable[[], nn.Module]] = {
    "nn.Identity": nn.Identity,
    "nn.Linear": lambda: filled(nn.Linear(8, 8)),
    "nn.ReLU": lambda: nn.ReLU(inplace=False),
}

NAMED = ("Identity", "MakeExtraOutput", "AddExtraInput", "Reshape", "Bias", "ConstantScale")
IN_PLACE = ("MakeExtraOutput(in_place)", "AddExtraInput(in_place)")
BASIC = tuple(name for name in OPERATIONS if name not in ("Output", "Scale"))

Pipeline = tuple[tuple[str, ...], ...]
"""Groups: each of operations, which are fused, or of a single module. A group that begins with `nested` is a
`Sequential` of its own; one that begins with `again` has one object for all its operations of a name; `alone` is an
operation that is called without a `Sequential`."""

LONG: list[Pipeline] = [
    (("Identity", "Identity", "MakeExtraOutput", "Identity", "MakeExtraOutput", "Bias", "MakeExtraOutput"),),
    (("MakeExtraOutput", "Bias", "ConstantScale", "AddExtraInput", "MakeExtraOutput", "Reshape"),),
    (("Bias", "MakeExtraOutput", "Identity", "Reshape", "MakeExtraOutput", "AddExtraInput", "Bias"),),
    (("MakeExtraOutput", "AddExtraInput", "MakeExtraOutput", "AddExtraInput", "MakeExtraOutput"),),
    (("Quantize", "Dropout.eval", "AllReduce", "MakeExtraOutput", "Reshape", "Reshape", "Bias", "Bias"),),
    (("MakeExtraOutput", "L2Normalization", "Bias", "AddExtraInput", "MakeExtraOutput", "L2Normalization"),),
    (("Dropout", "MakeExtraOutput", "Dropout", "L2Normalization", "Identity"),),
    (("MakeExtraOutput(in_place)", "Bias", "AddExtraInput(in_place)", "MakeExtraOutput(in_place)", "ConstantScale"),),
    (("Output", "Scale"),),
    (("Output", "Scale", "Bias"),),
    (("Bias", "Output", "Scale", "MakeExtraOutput"),),
    (("Identity", "Output", "Scale", "Output", "Scale", "AddExtraInput"),),
    (("MakeExtraOutput",), ("nn.Linear",), ("MakeExtraOutput", "Bias")),
    (("Identity",), ("nn.Identity",), ("MakeExtraOutput",)),
    (("nn.Identity",), ("Identity",)),
    (("nn.Identity",), ("MakeExtraOutput", "Bias"), ("nn.ReLU",), ("AddExtraInput",)),
    (("nn.Linear",), ("MakeExtraOutput", "ConstantScale")),
    (("Bias", "MakeExtraOutput"), ("nn.Identity",), ("MakeExtraOutput", "Bias")),
    (("nn.Identity",), ("AddExtraInput", "MakeExtraOutput")),
    (("nested", "Identity", "Reshape"), ("Bias", "MakeExtraOutput")),
    (("nested", "Identity"), ("nested", "Identity"), ("MakeExtraOutput", "Bias")),
    (("Identity",), ("nested", "Identity", "MakeExtraOutput")),
    (("Bias",), ("nested", "MakeExtraOutput", "Bias")),
    (("again", "Identity", "Identity", "MakeExtraOutput", "MakeExtraOutput"),),
    (("again", "Bias", "MakeExtraOutput", "Bias", "MakeExtraOutput"),),
    (("again", "MakeExtraOutput", "Bias", "AddExtraInput", "Bias", "AddExtraInput"),),
]


SINGLE: list[Pipeline] = [*((("alone", name),) for name in BASIC), *(((name,),) for name in BASIC)]
PAIRS = [(pair,) for pair in product((*NAMED, *IN_PLACE, "L2Normalization"), repeat=2)]
TRIPLES = [(triple,) for triple in product(NAMED, repeat=3)]
PIPELINES = [*SINGLE, *PAIRS, *TRIPLES, *LONG]


def bias(operation: nn.Module) -> nn.Module:
    """A bias that is not zero."""
    with torch.no_grad():
        operation.bias.copy_(torch.arange(8.0) - 3)
    return operation


def filled(linear: nn.Linear) -> nn.Module:
    with torch.no_grad():
        linear.weight.copy_(torch.arange(64.0).reshape(8, 8) / 64)
        linear.bias.copy_(torch.arange(8.0))
    return linear


@dataclass
class Model:
    module: nn.Module
    shapes: list[tuple[int, ...]]
    """Of the extra inputs."""


def build(pipeline: Pipeline, shape: tuple[int, ...]) -> Model:
    shapes: list[tuple[int, ...]] = []
    modules: list[nn.Module] = []
    for group in pipeline:
        made: dict[str, nn.Module] = {}
        members: list[nn.Module] = []
        for name in group:
            if name in ("nested", "again", "alone"):
                continue
            member = (OPERATIONS | MODULES)[name]() if group[0] != "again" or name not in made else made[name]
            made[name] = member
            members.append(member)
            if name == "Reshape":
                shape = (shape[0] // 2, 2, 8) if len(shape) == 2 else shape
            if name.startswith("AddExtraInput"):
                shapes.append(shape)
        modules.extend([te.ops.Sequential(*members)] if group[0] == "nested" else members)
    return Model(modules[0] if pipeline[0][0] == "alone" else te.ops.Sequential(*modules), shapes)


class Parameter(nn.Parameter):
    """As frameworks have their own, with attributes."""


class Tagged(Tensor):
    """A tensor of a subclass."""


def ignore(*_: Any) -> None:
    return None


def hooked(tensor: Tensor) -> Tensor:
    tensor.register_hook(ignore)
    if tensor.is_leaf:
        tensor.register_post_accumulate_grad_hook(ignore)
    else:
        tensor.retain_grad()
    return tensor


def with_attributes(tensor: Tensor) -> Tensor:
    tensor.main_grad = torch.zeros(())  # type: ignore[attr-defined]
    return tensor


def with_gradient(tensor: Tensor) -> Tensor:
    tensor.grad = torch.ones_like(tensor)
    return tensor


def behind(make: Callable[[Tensor], Tensor], root: Callable[[Tensor], Tensor]) -> Callable[[Tensor], list[Tensor]]:
    """A tensor that is made of another one of the caller's."""

    def tensors(values: Tensor) -> list[Tensor]:
        first = root(values)
        return [make(first), first]

    return tensors


def alone(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], list[Tensor]]:
    return lambda values: [make(values)]


def leaf(values: Tensor) -> Tensor:
    return values.requires_grad_()


def plain(values: Tensor) -> Tensor:
    return values


def non_leaf(tensor: Tensor) -> Tensor:
    return tensor * 1


def view(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def expanded(tensor: Tensor, like: Tensor) -> list[Tensor]:
    return [tensor.expand(like.shape), tensor]


def larger(values: Tensor) -> Tensor:
    return values.repeat(3, *[1] * (values.dim() - 1)).requires_grad_()


@torch.no_grad()
def view_without_gradients(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


@torch.inference_mode()
def view_in_inference(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


@torch.inference_mode()
def in_inference(tensor: Tensor) -> Tensor:
    return tensor.clone()


KINDS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "leaf": alone(leaf),
    "parameter": alone(nn.Parameter),
    "frozen parameter": alone(lambda values: nn.Parameter(values, requires_grad=False)),
    "parameter of a subclass": alone(lambda values: with_attributes(Parameter(values))),
    "plain leaf": alone(plain),
    "non-leaf": behind(non_leaf, leaf),
    "view of a leaf": behind(view, leaf),
    "view of a parameter": behind(view, nn.Parameter),
    "view of a plain leaf": behind(view, plain),
    "view of a non-leaf": behind(view, lambda values: non_leaf(leaf(values))),
    "view without gradients": behind(view_without_gradients, leaf),
    "view in inference_mode": behind(view_in_inference, leaf),
    "detached": behind(Tensor.detach, leaf),
    "detached leaf": behind(lambda tensor: tensor.detach().requires_grad_(), leaf),
    "leaf with hooks": alone(lambda values: hooked(leaf(values))),
    "non-leaf with hooks": behind(lambda tensor: hooked(non_leaf(tensor)), lambda values: hooked(leaf(values))),
    "leaf with a gradient": alone(lambda values: with_gradient(leaf(values))),
    "expanded leaf": lambda values: expanded(leaf(values[:1].clone()), values),
    "expanded plain leaf": lambda values: expanded(values[:1].clone(), values),
    "slice of a leaf": behind(lambda tensor: tensor[1 : 1 + tensor.shape[0] // 3], larger),
    "chunk of a leaf": behind(lambda tensor: tensor.chunk(3)[1], larger),
    "leaf that is not contiguous": alone(lambda values: leaf(transposed(values))),
    "non-leaf that is not contiguous": behind(transposed, leaf),
    "inference tensor": alone(in_inference),
    "leaf of a subclass": alone(lambda values: leaf(values.as_subclass(Tagged))),
    "non-leaf of a subclass": behind(non_leaf, lambda values: leaf(values.as_subclass(Tagged))),
    "float64 leaf": alone(lambda values: leaf(values.double())),
    "float64 non-leaf": behind(non_leaf, lambda values: leaf(values.double())),
    "bfloat16 leaf": alone(lambda values: leaf(values.bfloat16())),
    "bfloat16 non-leaf": behind(non_leaf, lambda values: leaf(values.bfloat16())),
    "integers": alone(lambda values: (values * 8).to(torch.int32)),
    "empty leaf": alone(leaf),
    "empty non-leaf": behind(non_leaf, leaf),
}
"""The tensor that is given, and what is behind it."""

SOME = ("leaf", "plain leaf", "non-leaf", "view of a parameter")
"""One of each kind that the fuser tells apart."""

EXTRA = ("alike", "plain leaf", "parameter", "non-leaf", "the input")
"""What the extra inputs are: of the kind of the input, of a kind of their own, or the very input."""

NO_PLACE = (
    "inference tensor",
    "view without gradients",
    "view in inference_mode",
    "expanded leaf",
    "expanded plain leaf",
    "chunk of a leaf",
    "integers",
)
"""What PyTorch writes nothing into."""

Call = Callable[[], Any]


def nested_modes(call: Call) -> Any:
    with torch.inference_mode(), torch.inference_mode(False), torch.enable_grad(), torch.no_grad():
        return call()


def hooks_around(call: Call) -> Any:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), torch.no_grad():
        return call()


MODES: dict[str, Callable[[Call], Any]] = {
    "grad": lambda call: call(),
    "grad in saved_tensors_hooks": lambda call: call(),
    "grad, main output": lambda call: call(),
    "grad after no_grad": lambda call: call(),
    "no_grad": lambda call: torch.no_grad()(call)(),
    "inference_mode": lambda call: torch.inference_mode()(call)(),
    "no_grad after grad": lambda call: torch.no_grad()(call)(),
    "set_grad_enabled(False)": lambda call: torch.set_grad_enabled(False)(call)(),
    "no_grad in enable_grad in inference_mode": nested_modes,
    "no_grad in saved_tensors_hooks": hooks_around,
}
MAIN_MODES = ("grad", "grad in saved_tensors_hooks", "no_grad", "inference_mode")


@dataclass(frozen=True)
class Scenario:
    pipeline: Pipeline
    kind: str
    extra: str
    frozen: bool
    mode: str

    @property
    def name(self) -> str:
        parameters = "frozen" if self.frozen else "trained"
        return " | ".join((told(self.pipeline), self.kind, self.extra, parameters, self.mode))


def told(pipeline: Pipeline) -> str:
    return " / ".join(", ".join(group) for group in pipeline)


def calls() -> Iterator[Scenario]:
    """A single operation with everything; the longer, the less, but for the tensors in `SOME`."""
    for pipeline in PIPELINES:
        members = [name for group in pipeline for name in group]
        extras = tuple(EXTRA) if any(name.startswith("AddExtraInput") for name in members) else ("alike",)
        trained = (False, True) if {"Bias", "nn.Linear"} & set(members) else (False,)
        for kind, extra, frozen, mode in product(KINDS, extras, trained, MODES):
            if pipeline in TRIPLES and (kind not in SOME or extra != "alike" or mode not in ("grad", "no_grad")):
                continue
            if pipeline not in SINGLE and kind not in SOME and (extra != "alike" or frozen or mode not in MAIN_MODES):
                continue
            if not (written_to(members, kind, extra) or reshaped(members, extra) or other_dtype(members, kind)):
                yield Scenario(pipeline, kind, extra, frozen, mode)


def written_to(members: list[str], kind: str, extra: str) -> bool:
    """Whether PyTorch would refuse to write into the extra input."""
    return "AddExtraInput(in_place)" in members and kind in NO_PLACE and extra in ("alike", "the input")


def reshaped(members: list[str], extra: str) -> bool:
    """Whether the input no longer has the shape of an extra input."""
    return extra == "the input" and "Reshape" in members


def other_dtype(members: list[str], kind: str) -> bool:
    """Whether an operation does not take the input: in some dtypes it has a kernel for GPUs alone, or none at all."""
    others = {"nn.Linear": ("float64", "bfloat16", "integers"), "Dropout": ("bfloat16", "integers")}
    return any(kind.startswith(dtypes) for name, dtypes in others.items() if name in members)


def raw(tensor: Tensor) -> str:
    """The values, to the bit."""
    data = tensor.detach().as_subclass(Tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype}{tuple(tensor.shape)}" + hashlib.sha256(data).hexdigest()[:16]


def version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@dataclass
class State:
    """Everything about one of the caller's tensors that a call must not change."""

    aspects: dict[str, Any]
    held: tuple[Any, ...]
    """What the identities stand for, which must not be used for anything else meanwhile."""

    @classmethod
    def of(cls, tensor: Tensor) -> "State":
        with torch.no_grad():
            storage = tensor.untyped_storage()
            held = (tensor.grad_fn, tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
            gradient = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
            aspects = {
                "requires_grad": tensor.requires_grad,
                "is_leaf": tensor.is_leaf,
                "grad_fn": id(held[0]),
                "retains_grad": tensor.retains_grad,
                "grad": None if gradient is None else (id(gradient), raw(gradient)),
                "hooks": [(id(hooks), len(hooks or ())) for hooks in held[1:]],
                "attributes": sorted(set(vars(tensor)) - {"_do_not_clear"}),
                "storage": (storage.data_ptr(), storage.nbytes(), tensor.storage_offset(), tensor.stride()),
                "version": version(tensor),
                "values": raw(tensor),
            }
        return cls(aspects, (*held, gradient))

    def changed(self, tensor: Tensor) -> dict[str, list[Any]]:
        now = State.of(tensor).aspects
        return {name: [was, now[name]] for name, was in self.aspects.items() if was != now[name]}


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Given:
    """What is given to a call, and all tensors of the caller's by name."""

    arguments: list[Tensor]
    tensors: dict[str, Tensor]


def give(scenario: Scenario, model: Model) -> Given:
    kind = KINDS[scenario.kind]
    shape = EMPTY if scenario.kind.startswith("empty") else SHAPE
    made = kind(values(shape, 0))
    tensors = {"input": made[0]} | {f"behind the input {i}": tensor for i, tensor in enumerate(made[1:])}
    arguments = [made[0]]
    for index, extra_shape in enumerate(model.shapes):
        if scenario.extra == "the input":
            arguments.append(made[0])
            continue
        own = scenario.kind if scenario.extra == "alike" else scenario.extra
        made_extra = KINDS[own](values(extra_shape, 1 + index))
        arguments.append(made_extra[0])
        tensors |= {f"extra {index}": made_extra[0]}
        tensors |= {f"behind extra {index} {i}": tensor for i, tensor in enumerate(made_extra[1:])}
    for name, tensor in (*model.module.named_parameters(), *model.module.named_buffers()):
        tensors[f"module {name}"] = tensor
    return Given(arguments, tensors)


def tuple_of(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def nodes(outputs: tuple[Tensor, ...]) -> list[str]:
    """The autograd graph: its nodes, breadth first, with the edges of each."""
    queue = [output.grad_fn for output in outputs if output.grad_fn is not None]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(queue))}
    found, queue = [], list(numbers)
    for node in queue:
        edges = []
        for following, slot in node.next_functions:
            if following is not None and following not in numbers:
                numbers[following] = len(numbers)
                queue.append(following)
            edges.append(f"{'' if following is None else numbers[following]}.{slot}")
        found.append(f"{node.name()}({','.join(edges)})")
    return found


def whose(tensor: Tensor, given: Given) -> list[str]:
    """Those of the caller's tensors that a tensor shares its storage with."""
    where = tensor.untyped_storage().data_ptr()
    return [name for name, own in given.tensors.items() if where and own.untyped_storage().data_ptr() == where]


def describe(output: Tensor, given: Given) -> list[Any]:
    """All of an output but its values and what autograd keeps of it."""
    return [whose(output, given), type(output).__name__, output.is_inference(), sorted(vars(output)), output.stride()]


def flags(output: Tensor) -> list[Any]:
    function = output.grad_fn
    return [output.requires_grad, output.is_leaf, None if function is None else function.name(), output.output_nr]


def backward(outputs: tuple[Tensor, ...], given: Given) -> dict[str, Any]:
    """The gradients of the caller's tensors, and what the backward pass left of their values."""
    differentiable = [output for output in outputs if output.requires_grad]
    for tensor in given.tensors.values():
        if tensor.requires_grad:
            tensor.retain_grad()
    if differentiable:
        seeds = [values(tuple(output.shape), 9 + i).to(output.dtype) for i, output in enumerate(differentiable)]
        torch.autograd.backward(differentiable, seeds)
    found = {}
    for name, tensor in given.tensors.items():
        gradient = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
        found[name] = [raw(tensor), None if gradient is None else raw(gradient)]
    return found


def called(scenario: Scenario) -> dict[str, Any]:
    shape = EMPTY if scenario.kind.startswith("empty") else SHAPE
    model = build(scenario.pipeline, shape)
    model.module.requires_grad_(not scenario.frozen)
    if " after " in scenario.mode:  # a fuser keeps what it found out of one call for the next
        first = [values(shape, 0), *(values(extra, 1) for extra in model.shapes)]
        with torch.set_grad_enabled(scenario.mode.endswith("after grad")):
            model.module(*(tensor.requires_grad_() for tensor in first))
    given = give(scenario, model)
    before = {name: State.of(tensor) for name, tensor in given.tensors.items()}
    gradients = scenario.mode.startswith("grad")
    saved: list[Any] = []
    torch.default_generator.manual_seed(0)

    def pack(tensor: Tensor) -> Tensor:
        saved.append([tuple(tensor.shape), str(tensor.dtype), whose(tensor, given)])
        return tensor

    found: dict[str, Any] = {}
    hooks = scenario.mode == "grad in saved_tensors_hooks"  # with hooks, autograd keeps other tensors than without
    watched = saved_tensors_hooks(pack, lambda tensor: tensor) if hooks else contextlib.nullcontext()
    try:
        with watched:
            outputs = tuple_of(MODES[scenario.mode](lambda: model.module(*given.arguments)))
        found["values"] = [raw(output) for output in outputs]
        found["outputs"] = [describe(output, given) for output in outputs]
        found["required"] = [output.requires_grad for output in outputs]
        found["same"] = [[name for name, tensor in given.tensors.items() if tensor is output] for output in outputs]
    except RuntimeError as error:
        found["error"] = str(error)
    found["changed"] = {
        name: changed for name, tensor in given.tensors.items() if (changed := before[name].changed(tensor))
    }
    if gradients and "error" not in found:
        found |= {"flags": [flags(output) for output in outputs], "saved": saved, "nodes": nodes(outputs)}
        found["gradients"] = backward(outputs[:1] if "main" in scenario.mode else outputs, given)
    return found


def digest(found: Any) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]


def brief(found: dict[str, Any]) -> dict[str, Any]:
    """What a call did, in few bytes: the error, which outputs are the caller's own tensors and what changed of these;
    the rest in digests."""
    plain = {name: found[name] for name in ("error", "required", "same") if name in found}
    changed = sorted(f"{tensor}: {aspect}" for tensor, aspects in found["changed"].items() for aspect in aspects)
    return {name: digest(what) for name, what in found.items()} | plain | {"changed": changed}


def without_the_fuser(tensor: Tensor) -> str:
    """What PyTorch does where the flag of a tensor is turned off."""
    before = tensor.requires_grad
    try:
        tensor.requires_grad_(False)
    except RuntimeError:
        return "raises"
    return "changes" if tensor.requires_grad != before else "nothing"


def main(result: Path, *names: str) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    te.utils._empty_tensor = torch.Tensor  # what a backward pass leaves of what it no longer needs; else on the GPU
    fuses = register_fusion()
    found = {
        scenario.name: called(scenario) if names else brief(called(scenario))
        for scenario in calls()
        if not names or scenario.name in names
    }
    told_pipelines = {told(pipeline): pipeline for pipeline in PIPELINES}
    torch.distributed.destroy_process_group()
    kinds = {name: without_the_fuser(make(values(SHAPE, 0))[0]) for name, make in KINDS.items()}
    fused = {"possible": fuses, "calls": OutputScale.calls}
    result.write_text(
        json.dumps({"kinds": kinds, "pipelines": told_pipelines, "fused": fused, "calls": found}), "utf-8"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
