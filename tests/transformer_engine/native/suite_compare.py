"""`scripts/test.sh te --checkout PATH` says what a patched wheel loses and mends, on a tree in the shape of upstream's;
and torch.cuda answers what upstream's tests ask of a device."""

import subprocess
from pathlib import Path

import pytest

from tests.transformer_engine.native import compare, stack
from tests.variants import ROOT

TESTS = """
import pytest
import torch
import transformer_engine
import transformer_engine.pytorch.ops as ops
from utils import SIZE

PATCHED = "+overlay." in transformer_engine.__version__


def passed_through(leaf):
    with torch.no_grad():
        ops.Sequential(ops.Identity(), ops.MakeExtraOutput())(leaf)
    return leaf


def test_the_leaf_keeps_its_flag():
    assert passed_through(torch.ones(SIZE, requires_grad=True)).requires_grad


def test_the_non_leaf_is_passed_through():
    passed_through(torch.ones(SIZE, requires_grad=True) * 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bias(device):
    bias = ops.Bias(SIZE, device=device)
    bias(torch.ones(SIZE, device=device)).sum().backward()
    assert bias.bias.grad.tolist() == [1.0] * SIZE


def test_passes_on_stock():
    assert not PATCHED


def test_fails():
    raise ValueError("on both")


def test_fails_on_patched_for_another_reason():
    if PATCHED:
        raise ValueError("not for want of a GPU")
    torch.ones(SIZE, device="cuda")


def test_bfloat16():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs sm_80")
    assert not transformer_engine.pytorch.is_fp8_available()


def test_random_states():
    torch.manual_seed(1)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    before = torch.rand(SIZE)
    torch.set_rng_state(states[0])
    torch.cuda.set_rng_state(states[1])
    assert torch.equal(torch.rand(SIZE), before)


def test_no_gpu_is_made_up():
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
"""
OTHER = """
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker
import torch


def test_the_tracker_forks_the_random_state():
    tracker = CudaRNGStatesTracker()
    tracker.add("dropout", 1)
    before = torch.get_rng_state()
    with tracker.fork("dropout"):
        first = torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork("dropout"):
        assert not torch.equal(torch.rand(2), first)


def test_left_out():
    raise ValueError("it is not run")
"""
FILE = "tests/pytorch/test_fusible_ops.py"
TRACKER = "tests/pytorch/test_tracker.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    for name, text in {
        FILE: TESTS,
        "tests/pytorch/test_tracker.py": OTHER,
        "tests/pytorch/utils.py": "SIZE = 2",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


def test_the_difference_is_printed(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all that is named, apart from what pytest is told to leave out."""
    named = TRACKER, FILE, "-k", "not left_out"
    assert compare.main(["--checkout", str(tree), "--release", stack.RELEASE, *named]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"stock-{stack.RELEASE}: 6 passed, 5 failed in ")
    assert lines[1].startswith(f"patched-{stack.RELEASE}: 7 passed, 4 failed in ")
    assert [line for line in lines[2:] if "|" not in line] == [
        "1 fail on both for want of a GPU:",
        "  1 Found no NVIDIA driver",
        "2 fail on both:",
        f"  {FILE}::test_fails",
        f"  {FILE}::test_fails_on_patched_for_another_reason",
        "0 differ otherwise",
        "2 pass on patched alone:",
        f"  {FILE}::test_the_leaf_keeps_its_flag  (failed, now passed)",
        f"  {FILE}::test_the_non_leaf_is_passed_through  (failed, now passed)",
        "1 pass on stock alone:",
        f"  {FILE}::test_passes_on_stock  (passed, now failed)",
    ]


def test_the_command_of_the_readme(tree: Path, tmp_path: Path) -> None:
    """It finds the release by the fuser of the tree."""
    command = "scripts/test.sh te --checkout ../TransformerEngine"
    assert f"\n{command}\n" in (ROOT / "README.md").read_text("utf-8")
    fuser = tree / compare.FUSER
    fuser.parent.mkdir(parents=True)
    fuser.write_bytes((stack.installed(stack.stock()) / compare.FUSER).read_bytes())
    tree.rename(tmp_path / "TransformerEngine")
    checkout = tmp_path / "modeling-overlay"
    checkout.mkdir()
    (checkout / "scripts").symlink_to(ROOT / "scripts")
    only = "-k", "flag or cpu"
    done = subprocess.run([*command.split(), *only], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-4:] == [
        "0 differ otherwise",
        "1 pass on patched alone:",
        f"  {FILE}::test_the_leaf_keeps_its_flag  (failed, now passed)",
        "0 pass on stock alone",
    ]


def test_a_tree_of_no_pinned_release_needs_the_release(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--checkout", str(tree)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"overlay: {tree / compare.FUSER}: expected that of a pinned release (2.13.0, ")
    assert said.endswith("), found no such file: name the release to test with --release\n")


def test_a_folder_that_is_no_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--checkout", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"overlay: {tmp_path}: expected tests/pytorch, found none: name the folder of a tree of TransformerEngine\n"
    )


def test_an_argument_that_pytest_does_not_know(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--checkout", str(tree), "--release", stack.RELEASE, "--relese"]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert said.splitlines()[-1] == (
        "overlay: pytest did not understand an argument: unrecognized arguments: --relese (te --checkout PATH --help)"
    )


def test_no_test_that_is_asked_for(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--checkout", str(tree), "--release", stack.RELEASE, "-k", "zzz"]) == 1
    out, said = capsys.readouterr()
    assert out == ""
    assert said.splitlines()[-1].startswith(f"overlay: no test matches: -k zzz {FILE} (pytest: 10 deselected in ")
