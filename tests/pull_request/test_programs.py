"""The programs in the text of a pull request show the fault on stock, and nothing of it with the change."""

import re
from pathlib import Path

from overlay.pull_request.evidence import PROGRAMS
from tests.variants import LATEST, PATCHED, PATCHED_LATEST, STOCK, Variant, run

WORKER = Path(__file__).with_name("program_worker.py")


def printed(program: str, variant: Variant) -> list[str]:
    lines: list[str] = run(WORKER, PROGRAMS / program, variant=variant)
    return lines


def test_gradients_under_fsdp2() -> None:
    (stock,) = printed("fsdp2_gradients.py", STOCK[0])
    found = re.fullmatch(r"relative error of the gradients: (\d\.\d{3})", stock)
    assert found is not None
    assert float(found[1]) > 0.1
    assert printed("fsdp2_gradients.py", PATCHED[0]) == ["relative error of the gradients: 0.000"]


def test_a_forward_that_was_replaced() -> None:
    assert printed("forward_replaced.py", LATEST) == [
        "as it is: 2",
        "layer.forward = f: 1",
        "a checkpoint function that reads func.func.__self__: 'function' object has no attribute '__self__'",
        "Layer.forward = f: 1",
    ]
    assert printed("forward_replaced.py", PATCHED_LATEST) == [
        "as it is: 2",
        "layer.forward = f: 2",
        "a checkpoint function that reads func.func.__self__: 2",
        "Layer.forward = f: 2",
    ]


def test_flags_under_no_grad() -> None:
    stock, patched = (Variant(kind, "2.13.0", "transformer_engine") for kind in ("stock", "patched"))
    leaf, other = printed("requires_grad.py", stock)
    assert leaf == "a leaf requires gradients: False"
    assert other.startswith("a tensor that is no leaf: you can only change requires_grad flags of leaf variables")
    assert printed("requires_grad.py", patched) == [
        "a leaf requires gradients: True",
        "a tensor that is no leaf requires gradients: True",
    ]
