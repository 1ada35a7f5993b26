"""What a worker's error means."""

import pytest

from overlay.measure.run import in_part, outcome


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out of memory"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out of memory"),
        ("RankError: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out of memory"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "out of memory"),
        ("the worker was killed: ('parity',)\nsome warning", "out of memory"),
        ("the worker took more than 900 s: ('parity',)\n", "failed"),
        ("the worker ended: ('parity',)\nTraceback\na rank has ended", "failed"),
        ("ValueError: no", "failed"),
        ("ModeError: there is no accelerator to offload from", "not available"),
        ("NoSegmentError: the model leaves a block out in some forwards, at random", "not available"),
    ],
)
def test_outcome(error: str, expected: str) -> None:
    assert outcome(error)[0] == expected


def test_messages() -> None:
    assert outcome("ModeError: no such option")[1] == "no such option"
    assert outcome("RankError: ValueError: no")[1] == "ValueError: no"
    assert outcome("the worker ended: ('parity',)\nTraceback\na rank has ended")[1] == "a rank has ended"
    assert outcome("the worker took more than 900 s: ('parity',)\nnoise")[1].startswith("the worker took more")


def test_parts_of_blocks_are_told_once_for_blocks_that_are_alike() -> None:
    linear, both = ["down", "up"], ["attention", "mlp"]
    found = list(in_part({"layers.0": linear, "layers.1": both, "layers.2": linear}))
    assert [(one.code, one.severity, one.where) for one in found] == [
        ("granularity", "warning", "layers.0, layers.2"),
        ("granularity", "warning", "layers.1"),
    ]
    assert found[0].what == "the backward computes down, up of it again, not the block"
