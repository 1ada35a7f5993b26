"""The program for a GPU, as far as it goes without one: what it says, what it finds wrong, and a dry run on the CPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.speed import gpu
from tests.variants import ROOT

SHARDED = gpu.Gradients("gradients", ("sharded gradients", "reentrant", 2), rounding=1e-6)
STEP = gpu.Time("step", ("step", "none", False, 1), rounds=3)
PEAK = gpu.Memory("peak memory", ("peak memory", "none", False))
RIGHT, LOST, TWICE = ({"error": error, "graphs": graphs} for error, graphs in ((0.0, 1), (0.5, 1), (0.0, 2)))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "tests", "gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def test_without_a_gpu_it_says_so_in_a_line() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("overlay: torch 2.13.0")
    assert "sees no CUDA device: this needs an NVIDIA GPU with 12 GB of free memory" in line


def test_without_builds_it_says_how_to_get_them(tmp_path: Path) -> None:
    done = run("--here", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"overlay: expected stock.zip, patched.zip, latest.zip in {tmp_path}: scripts/test.sh gpu --pack {tmp_path}\n"
    )


def test_dry_run() -> None:
    done = run("--device", "cpu", "-k", "entrant, 2 forwards")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[-3:] for line in lines[-3:-1]] == [["0.562", "0.000", "0.000"], ["0.000", "0.000", "0.000"]]
    assert lines[-1] == "the patched build is right in all of them"


def test_builds_are_carried_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {kind: tmp_path / "made" / kind for kind in gpu.KINDS}
    for kind, folder in made.items():
        (folder / "transformers").mkdir(parents=True)
        (folder / "transformers" / "__init__.py").write_text(kind, encoding="utf-8")
    monkeypatch.setattr(gpu, "made", lambda release: made)
    assert gpu.pack(tmp_path / "packed", "5.14.1") == 0
    unpacked = gpu.unpack(tmp_path / "packed", tmp_path / "unpacked")
    assert {
        kind: (folder / "transformers" / "__init__.py").read_text("utf-8") for kind, folder in unpacked.items()
    } == {kind: kind for kind in gpu.KINDS}


@pytest.mark.parametrize(
    ("row", "stock", "patched", "why"),
    [
        (SHARDED, [LOST], [RIGHT], ""),
        (SHARDED, [RIGHT], [LOST], "the error is 5.0e-01"),
        (SHARDED, [LOST], [{"error": float("nan"), "graphs": 1}], "the error is nan"),
        (SHARDED, [RIGHT], [TWICE], "2 graphs"),
        (SHARDED, [TWICE], [TWICE], ""),
        (SHARDED, [RIGHT], gpu.Failure("RuntimeError: no"), "RuntimeError: no"),
        (SHARDED, gpu.Failure("RuntimeError: so"), gpu.Failure("RuntimeError: no"), ""),
        (SHARDED, gpu.Failure("ValueError: so"), gpu.Failure("RuntimeError: no"), "RuntimeError: no"),
        (SHARDED, gpu.Failure("RuntimeError: so"), [LOST], "the error is 5.0e-01"),
        (PEAK, [100.0], [101.0], ""),
        (PEAK, [100.0], [102.0], "1.020 of stock"),
        (STEP, [10.0, 20.0, 10.0], [10.0, 20.0, 30.0], ""),
        (STEP, [10.0, 20.0, 10.0], [11.0, 22.0, 10.0], "1.10 of stock"),
        (STEP, gpu.Failure("RuntimeError: so"), [11.0, 22.0, 10.0], ""),
    ],
)
def test_what_is_off(row: gpu.Row, stock: Any, patched: Any, why: str) -> None:
    assert gpu.off(row, {"stock": stock, "patched": patched, "latest": stock}) == why
