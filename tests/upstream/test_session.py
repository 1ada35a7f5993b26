"""Ranks that a test spawns have what `tests/measure/test_gloo.py` wants of this project's own."""

import dataclasses
from pathlib import Path

from tests.upstream import session

TEST = """
import os, time
import torch.distributed as dist
import torch.multiprocessing as mp

def count(number, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=ranks)
    for _ in range(4):
        dist.barrier()
        time.sleep(0.1)
    tasks = os.listdir("/proc/self/task")
    assert [open(f"/proc/self/task/{task}/comm").read() for task in tasks].count("pt_gloo_runloop\\n") == 1
    open(f"{folder}/{number}", "x").close()

def test_spawned(tmp_path):
    mp.spawn(count, (1, tmp_path), nprocs=1)
    assert (tmp_path / "0").exists()
"""


def test_spawned_ranks_have_one_thread_for_the_collectives_of_a_group(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "test_spawned.py").write_text(TEST, "utf-8")
    setup = dataclasses.replace(session.transformers(), package="torch")
    code, outcomes = session.run(folder, ["-q", "--timeout=200", "test_spawned.py"], setup, timeout=220)
    assert (code, list(outcomes.tests.values())) == (0, ["passed"]), (tmp_path / "output.txt").read_text("utf-8")
