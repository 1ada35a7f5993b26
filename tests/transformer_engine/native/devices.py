"""torch.cuda's answers to what is asked of a device without using it, on a machine that has none.

`answer()` answers the queries of the current device, of its properties and of its random state, which is the CPU's.
Work on the device still fails: "Found no NVIDIA driver". As a plugin of pytest it answers before anything is imported.
It imports nothing but torch, so that it works beside other people's packages.
"""

import functools
import importlib
from types import SimpleNamespace
from typing import Any

MAJOR, MINOR = 8, 0
"""The compute capability that comes with bfloat16, which the CPU has, and without FP8."""


def pytest_configure() -> None:
    answer()


@functools.cache
def answer() -> None:
    """From now on, in this process; to be called before what asks is imported."""
    torch: Any = importlib.import_module("torch")
    # What lies below the public functions, because other modules, torch.cuda.random too, have imported these by name
    torch._C._cuda_getDevice = lambda: 0
    torch.cuda._initialized = True
    torch.cuda.default_generators = (torch.default_generator,)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="none", major=MAJOR, minor=MINOR, multi_processor_count=1, total_memory=0
    )
    # By this TransformerEngine and Megatron-LM know random states that a graph captures, which the CPU's are not
    del torch._C._CUDAGraph.register_generator_state
