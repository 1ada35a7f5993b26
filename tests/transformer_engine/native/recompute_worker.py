"""Blocks of fusible operations under activation checkpointing: gradients and flags, against no recompute.

`python recompute_worker.py RESULT.json` writes for each case what happened: "right" (outputs and gradients are those
without recompute, bit for bit, and the caller's tensors have the flags and values that they had), or what is not.

A block is what models build of these operations: `MakeExtraOutput` and a normalisation in one pipeline, an MLP of
PyTorch's modules with dropout, and `AddExtraInput`. The normalisation is an operation made of PyTorch calls, which runs
anywhere and does with what it saves as TransformerEngine's own.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformer_engine.pytorch import utils
from transformer_engine.pytorch.ops.op import BasicOperation, OperationContext

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.transformer_engine.native import devices

WIDTH, BATCH = 32, 32
"""Multiples of 32, which FP8 asks for."""


class Normalisation(BasicOperation):
    """RMSNorm (https://arxiv.org/abs/1910.07467) of PyTorch calls."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, dtype=dtype).uniform_(0.5, 1.5))

    def op_forward(self, ctx: OperationContext, input_: Tensor, **_: Any) -> Tensor:
        scale = torch.rsqrt(input_.square().mean(-1, keepdim=True) + 1e-5)
        if ctx.requires_grad:
            ctx.save_for_backward(input_, scale)
        return input_ * scale * self.weight

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        saved, scale = ctx.saved_tensors
        normed, inner = saved * scale, grad_output * self.weight
        grad_input = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        grad_weight = (grad_output * normed).sum(0)
        utils.clear_tensor_data(saved, scale)
        return grad_input, (grad_weight,)


NORMS: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "fusible": lambda dtype: te.ops.Sequential(te.ops.MakeExtraOutput(), Normalisation(dtype)),
    "torch.nn.RMSNorm": lambda dtype: te.ops.Sequential(te.ops.MakeExtraOutput(), nn.RMSNorm(WIDTH, dtype=dtype)),
    "torch.nn.LayerNorm": lambda dtype: te.ops.Sequential(te.ops.MakeExtraOutput(), nn.LayerNorm(WIDTH, dtype=dtype)),
}
"""Pipelines that normalise what they are given, and pass it through as well."""


class Block(nn.Module):
    """A residual block.

    Args:
        norm: of `NORMS`.
        branch: whether the block also uses its norm without gradients.
    """

    def __init__(self, norm: str, dtype: torch.dtype, branch: bool = False) -> None:
        super().__init__()
        self.norm = NORMS[norm](dtype)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Linear(2 * WIDTH, WIDTH, dtype=dtype),
        )
        bias = te.ops.Bias(WIDTH, device=torch.get_default_device(), dtype=dtype)
        self.add = te.ops.Sequential(bias, te.ops.AddExtraInput())
        self.branch = branch

    def forward(self, hidden: Tensor, shift: Tensor) -> Tensor:
        if self.branch:
            with torch.no_grad():
                normed, residual = self.norm(hidden)
            shift = shift + normed * residual
        return self.rest(*self.norm(hidden), shift)

    def rest(self, normed: Tensor, residual: Tensor, shift: Tensor) -> Tensor:
        return self.add(self.mlp(normed) + shift, residual)


@contextlib.contextmanager
def random_states(*states: Tensor) -> Iterator[None]:
    """Random numbers from `states` on, by default the present ones, and afterwards as if there had been none."""
    present = torch.get_rng_state(), torch.cuda.get_rng_state()
    cpu, cuda = states or present
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state(cuda)
    try:
        yield
    finally:
        torch.set_rng_state(present[0])
        torch.cuda.set_rng_state(present[1])


class Recompute(torch.autograd.Function):
    """The checkpoint function that many projects have one of their own: its forward runs under `no_grad`, and its
    recompute with `enable_grad`."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.function, ctx.random = function, (torch.get_rng_state(), torch.cuda.get_rng_state())
        ctx.save_for_backward(*tensors)
        with torch.no_grad():
            return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with random_states(*ctx.random), torch.enable_grad():
            outputs = ctx.function(*tensors)
        torch.autograd.backward(outputs, gradients)
        return None, *(tensor.grad for tensor in tensors)


def none(function: Callable[..., Any], *tensors: Tensor) -> Any:
    return function(*tensors)


def of_torch(function: Callable[..., Any], *tensors: Tensor, early_stop: bool = True, **options: bool) -> Any:
    with set_checkpoint_early_stop(early_stop):
        return checkpoint(function, *tensors, **options)


def of_transformer_engine(function: Callable[..., Any], *tensors: Tensor, use_reentrant: bool) -> Any:
    # Of a module that has none of its layers it would make PyTorch's checkpoint
    return te.checkpoint(lambda *given: function(*given), *tensors, use_reentrant=use_reentrant)


def of_megatron(function: Callable[..., Any], *tensors: Tensor, distribute: bool) -> Any:
    return random.checkpoint(function, distribute, *tensors)


CONTROL = "torch, without the state of the random numbers"
"""It recomputes with another dropout, so that gradients are wrong."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "none": none,
    "torch, reentrant": functools.partial(of_torch, use_reentrant=True),
    "torch, non-reentrant": functools.partial(of_torch, use_reentrant=False),
    "torch, non-reentrant, no early stop": functools.partial(of_torch, use_reentrant=False, early_stop=False),
    CONTROL: functools.partial(of_torch, use_reentrant=False, preserve_rng_state=False),
    "own": Recompute.apply,
    "TransformerEngine, reentrant": functools.partial(of_transformer_engine, use_reentrant=True),
    "TransformerEngine, non-reentrant": functools.partial(of_transformer_engine, use_reentrant=False),
    "Megatron": functools.partial(of_megatron, distribute=False),
    "Megatron, distributed": functools.partial(of_megatron, distribute=True),
    "Megatron, discarded": none,
}


def discarded(block: Block, hidden: Tensor, shift: Tensor) -> Tensor:
    """As a layer of Megatron-LM recomputes its norm alone, without keeping what the norm returns.

    What is passed through is kept: later releases of Megatron-LM see to it (`retain_input_tensors`,
    https://github.com/NVIDIA/Megatron-LM/pull/4497), with 0.16.1 the caller has to.
    """
    kept = random.CheckpointWithoutOutput()
    normed, residual = kept.checkpoint(block.norm, hidden)
    output = block.mlp(normed) + shift
    kept.outputs = (normed,)
    kept.discard_output_and_register_recompute(output)
    assert normed.untyped_storage().nbytes() == 0
    return block.add(output, residual)


def run(case: "Case", block: Block, hidden: Tensor, shift: Tensor) -> Tensor:
    function = FUNCTIONS[case.function]
    if case.function == "Megatron, discarded":
        return discarded(block, hidden, shift)
    if case.scope == "norm":
        return block.rest(*function(block.norm, hidden), shift)
    if case.scope == "nested":
        return function(lambda *given: function(block, *given), hidden, shift)
    return function(block, hidden, shift)


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaf": lambda values: values.requires_grad_(),
    "non-leaf": lambda values: values.requires_grad_() * 1,
    "plain": lambda values: values,
}
FROZEN: dict[str, Callable[[str], bool]] = {
    "nothing": lambda name: False,
    "norms": lambda name: "norm" in name,
    "all but norms": lambda name: "norm" not in name,
}
STEPS = ("one forward", "two forwards", "generation before", "a branch without gradients")
SCOPES = {"Megatron, distributed": ("block",), "Megatron, discarded": ("norm",), CONTROL: ("block",)}
"""What they are for, where that is not all of them."""


@dataclass(frozen=True)
class Case:
    """A model, and what is done with it.

    Attributes:
        scope: what is checkpointed: each "block"; its "norm", so that what is passed through leaves the checkpoint; or
            each block within a checkpoint of its own, "nested".
        steps: "one forward" and a backward; "two forwards" before one; "generation before", a pass under `no_grad` with
            the same input; or "a branch without gradients" in each block.
        blocks: how many there are.
        norm: of `NORMS`.
        input: of `INPUTS`.
        frozen: of `FROZEN`.
    """

    function: str
    scope: str = "block"
    steps: str = "one forward"
    blocks: int = 2
    norm: str = "fusible"
    input: str = "non-leaf"
    frozen: str = "nothing"
    dtype: str = "float32"
    device: str = "cpu"


def cases() -> Iterator[Case]:
    for function in list(FUNCTIONS)[1:]:
        scopes = SCOPES.get(function, ("block", "norm", "nested"))
        product = itertools.product(scopes, STEPS, (1, 3), INPUTS, FROZEN)
        for scope, steps, blocks, given, frozen in product:
            if scope == "norm" and (given == "plain" or steps == STEPS[-1]):
                continue  # no argument requires gradients, and so a reentrant checkpoint has none; a norm has no branch
            if function in SCOPES and given != "non-leaf":
                continue  # what Megatron's layers are given
            yield Case(function, scope, steps, blocks, "fusible", given, frozen)
        for norm, dtype in itertools.product(NORMS, ("float32", "float64", "bfloat16")):
            yield Case(function, scopes[0], norm=norm, dtype=dtype)


@dataclass
class Trained:
    """What training left.

    Attributes:
        tensors: outputs and gradients, None where there is none.
        error: what was raised instead.
        changed: the caller's tensors that have other flags or values than before.
    """

    tensors: list[Tensor | None]
    error: str
    changed: list[str]


def train(case: Case) -> Trained:
    dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)
    branch = case.steps == "a branch without gradients"
    forwards = 2 if case.steps == "two forwards" else 1
    with torch.device(case.device):
        model = nn.ModuleList(Block(case.norm, dtype, branch) for _ in range(case.blocks))
        inputs = [INPUTS[case.input](torch.randn(BATCH, WIDTH, dtype=dtype)) for _ in range(forwards)]
        shift = torch.randn(WIDTH, dtype=dtype).requires_grad_()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[case.frozen](name))
    callers = (
        dict(model.named_parameters()) | {f"input {i}": tensor for i, tensor in enumerate(inputs)} | {"shift": shift}
    )
    before = {name: state(tensor) for name, tensor in callers.items()}
    for tensor in inputs:
        if tensor.requires_grad:
            tensor.retain_grad()
    outputs: list[Tensor] = []
    error = ""
    try:
        if case.steps == "generation before":
            with random_states(), torch.no_grad():
                forward(dataclasses.replace(case, function="none", scope="block"), model, inputs[0], shift)
        outputs = [forward(case, model, tensor, shift) for tensor in inputs]
        torch.stack([(i + 1) * output.square().sum() for i, output in enumerate(outputs)]).sum().backward()
    except (RuntimeError, ValueError) as raised:
        error = str(raised).splitlines()[0]
    changed = [name for name, tensor in callers.items() if state(tensor) != before[name]]
    return Trained([*outputs, *(tensor.grad for tensor in callers.values())], error, changed)


def state(tensor: Tensor) -> tuple[bool, bool, list[Any]]:
    return tensor.requires_grad, tensor.is_leaf, tensor.tolist()


def forward(case: Case, model: nn.ModuleList, hidden: Tensor, shift: Tensor) -> Tensor:
    for block in model:
        hidden = run(case, block, hidden, shift)
    return hidden


@functools.cache
def expected(case: Case) -> Trained:
    return train(case)


def outcome(case: Case) -> str:
    steps = "one forward" if case.steps == "generation before" else case.steps
    reference = expected(dataclasses.replace(case, function="none", scope="block", steps=steps))
    found = train(case)
    if found.changed:
        return f"changed {', '.join(found.changed)}; {found.error or compared(found, reference)}"
    if found.error:
        return found.error
    if reference.error:
        return f"without recompute: {reference.error}"
    return compared(found, reference)


def compared(found: Trained, reference: Trained) -> str:
    if len(found.tensors) != len(reference.tensors):
        return "no outputs"
    pairs = zip(found.tensors, reference.tensors, strict=True)
    return (
        "right"
        if all(one is other if None in (one, other) else torch.equal(one, other) for one, other in pairs)
        else "wrong"
    )


def on_the_cpu() -> None:
    """Answer in the place of a device that there is none of."""
    torch.set_num_threads(1)
    devices.answer()
    cpu, generator = torch.device("cpu"), torch.cuda.default_generators[0]
    torch.cuda.current_device = lambda: cpu  # where Megatron puts the activations that it distributes
    torch.cuda.default_generators = {0: generator, cpu: generator}
    utils._empty_tensor = torch.Tensor


@contextlib.contextmanager
def one_rank(backend: str) -> Iterator[None]:
    """All that Megatron's checkpoint functions ask for."""
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        random.model_parallel_cuda_manual_seed(1)
        yield
        distributed.destroy_process_group()


def main(result: Path) -> None:
    warnings.filterwarnings("ignore")
    on_the_cpu()
    with one_rank("gloo"):
        found = [dataclasses.asdict(case) | {"outcome": outcome(case)} for case in cases()]
    result.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
