"""How long a call of a two-operation pipeline takes with each of several fusers, in one process.

`python overhead_worker.py NAME=FUSER.py...` answers on stdin and stdout (see turns.py). `pipeline FIRST SECOND MODE
PAIRS` is, for each fuser by name, the nanoseconds of a call and how many times those of the first fuser they are:
medians of many short bursts. All call the same operations on the same input in turn, so that nothing but the file is
different, and what the machine does besides falls on all of them. CPU time, so that other processes count for little.
"""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from itertools import repeat
from types import ModuleType

import torch
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.ops.fuser import OperationFuser

from overlay.measure.turns import no_collection, rounds, serve

SIZE = 32
CALLS = 10
"""Calls in a burst: some tenths of a millisecond, which few bursts share with another process."""

OPERATIONS = {
    "Bias": lambda: ops.Bias(SIZE, device="cpu"),
    "ConstantScale": lambda: ops.ConstantScale(0.5),
    "MakeExtraOutput": ops.MakeExtraOutput,
}


def load(name: str, file: str) -> ModuleType:
    """A fuser from a file, beside the package's own, with the same fusions registered."""
    spec = importlib.util.spec_from_file_location(f"{ops.__name__}.fuser_{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.OperationFuser.forward_fusion_functions = OperationFuser.forward_fusion_functions
    module.OperationFuser.backward_fusion_functions = OperationFuser.backward_fusion_functions
    return module


FUSERS = {name: load(name, file) for name, file in (argument.split("=", 1) for argument in sys.argv[1:])}


def pipelines(first: str, second: str, mode: str) -> dict[str, Callable[[], object]]:
    """What calls the two operations, with each fuser.

    Args:
        mode: `no-grad`, `grad`, or `backward`, which is both the call and its backward.
    """
    operations = [OPERATIONS[first](), OPERATIONS[second]()]
    hidden = torch.ones(SIZE, requires_grad=mode != "no-grad")
    gradient = torch.ones(SIZE)

    def step(fuser: Callable[..., object]) -> None:
        output = fuser(hidden)
        (output[0] if isinstance(output, tuple) else output).backward(gradient)

    call = step if mode == "backward" else lambda fuser: fuser(hidden)
    fusers = {name: module.OperationFuser(operations) for name, module in FUSERS.items()}
    return {name: lambda fuser=fuser: call(fuser) for name, fuser in fusers.items()}


def burst(call: Callable[[], object]) -> float:
    begin = time.thread_time_ns()
    for _ in repeat(None, CALLS):
        call()
    return (time.thread_time_ns() - begin) / CALLS


def measure(first: str, second: str, mode: str, pairs: int) -> dict[str, tuple[float, float]]:
    calls = pipelines(first, second, mode)
    found = {name: [] for name in calls}
    with no_collection(), torch.set_grad_enabled(mode != "no-grad"):
        for call in calls.values():
            burst(call)
        for order in rounds(pairs, list(calls)):
            for name in order:
                found[name].append(burst(calls[name]))
    base = next(iter(found.values()))
    return {
        name: (statistics.median(times), statistics.median(one / other for one, other in zip(times, base, strict=True)))
        for name, times in found.items()
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"pipeline": measure})
