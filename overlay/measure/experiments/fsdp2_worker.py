"""Gradients of a fully sharded model (FSDP2) with activation checkpointing, against the same model with neither.

A worker (`overlay.measure.rows`), which is told numbers of ranks, a backend and a name for its group. It runs every
case in both kinds of checkpointing with whatever transformers is on the path, and finds for each the relative error of
the gradients, "refused", or the name of another error, and whether layers were checkpointed at all: without, gradients
are right for nothing. Each rank has batches of its own. Weights are float64 (RMSNorm computes in float32 all the same),
so that what is left of an error below 1e-6 is rounding and nothing else.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from overlay.measure import group, rows
from overlay.measure.experiments import loaded

VOCABULARY = 97
REFUSED = "is sharded by itself (`fully_shard`)"
"""What the error says in which a recompute is refused that would lose gradients."""


@dataclass
class Training:
    """One side of the comparison: the loss of batch `i`, an evaluation on it, and FSDP2's switch for synchronising."""

    loss: Callable[[int], Tensor]
    evaluate: Callable[[int], None]
    synchronise: Callable[[bool], None]


def forwards(count: int) -> Callable[[Training], None]:
    def train(training: Training) -> None:
        torch.stack([training.loss(i) for i in range(count)]).sum().backward()

    return train


def evaluate_between(training: Training) -> None:
    first = training.loss(0)
    training.evaluate(1)
    (first + training.loss(2)).backward()


def accumulate(training: Training) -> None:
    training.synchronise(False)
    training.loss(0).backward()
    training.synchronise(True)
    (training.loss(1) + training.loss(2)).backward()


def one_by_one(training: Training) -> None:
    first, second = training.loss(0), training.loss(1)
    first.backward()
    second.backward()


def enable(model: LlamaForCausalLM, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def shard(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    for layer in dict.fromkeys(model.model.layers):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def enable_and_shard(model: LlamaForCausalLM, reentrant: bool, mesh: DeviceMesh) -> None:
    enable(model, reentrant)
    shard(model, mesh)


def shard_and_enable(model: LlamaForCausalLM, reentrant: bool, mesh: DeviceMesh) -> None:
    shard(model, mesh)
    enable(model, reentrant)


def wrap_and_shard(model: LlamaForCausalLM, reentrant: bool, mesh: DeviceMesh) -> None:
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer, checkpoint_impl=kind)
    shard(model, mesh)


def shard_in_layers(
    model: LlamaForCausalLM, reentrant: bool, mesh: DeviceMesh, *, submodules: tuple[str, ...], layers: bool
) -> None:
    enable(model, reentrant)
    for layer in model.model.layers:
        for name in submodules:
            fully_shard(layer.get_submodule(name), mesh=mesh)
        if layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


MLP_AND_LAYER = functools.partial(shard_in_layers, submodules=("mlp",), layers=True)
MLP_AND_ATTENTION = functools.partial(shard_in_layers, submodules=("mlp", "self_attn"), layers=False)
EXPERTS_AND_LAYER = functools.partial(shard_in_layers, submodules=("mlp.experts",), layers=True)


def share_a_layer(model: LlamaForCausalLM) -> None:
    model.model.layers[2] = model.model.layers[0]


@dataclass
class Case:
    train: Callable[[Training], None]
    prepare: Callable[[LlamaForCausalLM, bool, DeviceMesh], None] = enable_and_shard
    alter: Callable[[LlamaForCausalLM], None] = lambda model: None
    """What is done to both models before anything else."""
    make: Callable[..., PreTrainedModel] = lambda **sizes: LlamaForCausalLM(LlamaConfig(**sizes))


def mixture(**sizes: int) -> MixtralForCausalLM:
    # Its grouped matrix product takes no float64, so one expert after the other
    config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager")
    return MixtralForCausalLM(config)


CASES = {
    "1 forward": Case(forwards(1)),
    "2 forwards": Case(forwards(2)),
    "3 forwards": Case(forwards(3)),
    "1 forward, a layer shared within it": Case(forwards(1), alter=share_a_layer),
    "2 forwards, one in eval mode between": Case(evaluate_between),
    "2 forwards, sharded before enabling": Case(forwards(2), prepare=shard_and_enable),
    "1 without sync, then 2 forwards": Case(accumulate),
    "2 forwards, fully_shard(checkpoint_wrapper(layer))": Case(forwards(2), prepare=wrap_and_shard),
    "1 forward, layer and layer.mlp sharded": Case(forwards(1), prepare=MLP_AND_LAYER),
    "1 forward, layer.mlp and layer.self_attn sharded": Case(forwards(1), prepare=MLP_AND_ATTENTION),
    "2 forwards, each with its backward, layer.mlp sharded": Case(one_by_one, prepare=MLP_AND_LAYER),
    "2 forwards, layer and layer.mlp sharded": Case(forwards(2), prepare=MLP_AND_LAYER),
    "2 forwards, layer.mlp and layer.self_attn sharded": Case(forwards(2), prepare=MLP_AND_ATTENTION),
    "2 forwards, layer and its experts sharded": Case(forwards(2), prepare=EXPERTS_AND_LAYER, make=mixture),
}


def build(case: Case, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    model = case.make(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )
    case.alter(model)
    return model.to(device, torch.float64).train()


def batch(rank: int, i: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(10 * rank + i))


def training_of(model: LlamaForCausalLM, ranks: range, synchronise: Callable[[bool], None]) -> Training:
    """`model` trained on the mean loss over the batches of `ranks`."""

    def loss(i: int) -> Tensor:
        batches = [batch(rank, i).to(model.device) for rank in ranks]
        return torch.stack([model(input_ids=ids, labels=ids, use_cache=False).loss for ids in batches]).mean()

    def evaluate(i: int) -> None:
        model.eval()
        with torch.no_grad():
            loss(i)
        model.train()

    return Training(loss, evaluate, synchronise)


def relative_error(parameters: Sequence[nn.Parameter], reference: nn.Module) -> float:
    difference = norm = 0.0
    for ours, theirs in zip(parameters, reference.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        assert theirs.grad is not None
        difference += float((theirs.grad - gradient if gradient is not None else theirs.grad).norm() ** 2)
        norm += float(theirs.grad.norm() ** 2)
    return math.sqrt(difference / norm)


def attended(model: nn.Module) -> list[None]:
    """Gets an item for each call in training mode of a layer's attention, from now on."""
    calls: list[None] = []
    for name, module in model.named_modules():
        if name.endswith(".self_attn"):
            module.register_forward_pre_hook(lambda module, args: calls.append(None) if module.training else None)
    return calls


def measure(
    case: Case, reentrant: bool, rank: int, world: int, mesh: DeviceMesh, device: torch.device
) -> dict[str, Any]:
    reference, model = build(case, device), build(case, device)
    expected, found = attended(reference), attended(model)
    case.train(training_of(reference, range(world), lambda on: None))
    case.prepare(model, reentrant, mesh)
    parameters = list(
        model.parameters()
    )  # what an optimizer holds: where FSDP2 loses gradients, a model has others later
    case.train(training_of(model, range(rank, rank + 1), model.set_requires_gradient_sync))
    # Once in the forward and once in the recompute; the reference has the batches of all ranks
    return {"error": relative_error(parameters, reference), "checkpointed": len(found) * world == 2 * len(expected)}


def owed(world: int) -> list[dict[str, Any]]:
    """What the rows of a group are of."""
    return [{"case": case, "reentrant": reentrant, "ranks": world} for reentrant in (True, False) for case in CASES]


def work(rank: int, world: int, put: Callable[[Any], None], backend: str) -> None:
    device = group.device(backend)
    mesh = init_device_mesh(device.type, (world,))
    for row in owed(world):
        case, reentrant = CASES[row["case"]], row["reentrant"]
        try:
            row |= measure(case, reentrant, rank, world, mesh, device)
        except Exception as error:
            row |= {"error": "refused" if REFUSED in str(error) else type(error).__name__, "said": str(error)}
            sys.stderr.write(f"{row['case']}: {error}\n")
            group.agreed(error)
        put(row)


def main() -> None:
    told = rows.told()
    transformers.logging.set_verbosity_error()
    worlds = told["ranks"]
    rows.put(
        {
            "transformers": transformers.__version__,
            "state": loaded.state("transformers"),
            "torch": torch.__version__,
            "owed": [row for world in worlds for row in owed(world)],
        }
    )
    task = functools.partial(work, backend=told["backend"])
    group.train(worlds, task, rows.put, told["backend"], told["name"], told["meeting"])
    rows.done()


if __name__ == "__main__":
    main()
