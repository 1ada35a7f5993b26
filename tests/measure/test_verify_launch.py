"""The processes of `overlay verify`: launched by `torchrun`, on two hosts too, stopped, killed; none is left behind.

Most of these run `verify_program.py`, whose experiments are done in a second.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from overlay import environments
from overlay.measure import builds, rows
from overlay.measure.experiments import fsdp2, zero3
from overlay.measure.experiments.experiment import Experiment
from tests import signals
from tests.ports import reserved
from tests.variants import PATCHED, ROOT, installed

PROGRAM = Path(__file__).with_name("verify_program.py")
SOON = 120.0
"""Seconds in which everything has to be gone; nothing here waits as long as that by itself, or for longer."""

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc, PR_SET_PDEATHSIG and network namespaces")
pytestmark = needs_linux


@functools.cache
def interpreter() -> Path:
    return environments.python("train-2.13")


def torchrun(*options: object) -> list[str]:
    return [str(interpreter().with_name("torchrun")), *map(str, options), "--no-python"]


class Run:
    """One run of `overlay verify` that is under way, whose temporary folder all that it starts can be told by."""

    def __init__(self, folder: Path, launcher: list[str], *words: str, **variables: Any) -> None:
        self.folder = folder / "temporary"
        self.folder.mkdir()
        stub = json.dumps({name: value for name, value in variables.items() if name.islower()})
        others = {name: str(value) for name, value in variables.items() if not name.islower()}
        inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self.said = folder / "stderr"
        with self.said.open("w") as stderr:
            self.process = subprocess.Popen(
                [*launcher, str(interpreter()), "-P", str(PROGRAM), "verify", *words, "--here"],
                env=inherited | {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder), "STUB": stub} | others,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                preexec_fn=signals.heard,
            )

    def processes(self, word: str = "") -> list[int]:
        """Those that it has started, and that have `word` in their command line; zombies are none."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = str(self.folder).encode() in (folder / "environ").read_bytes()
                if ours and word.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return sorted(found)

    def wait(self) -> list[int]:
        """The processes of both ranks, when they are at work."""
        until(lambda: len(list(self.folder.glob("overlay-worker-*/begun-?-*"))) == 2, self.said)
        begun = sorted(self.folder.glob("overlay-worker-*/begun-?-*"), key=lambda path: path.name)
        return [int(path.name.rpartition("-")[2]) for path in begun]

    def end(self) -> tuple[int, str, str]:
        """Its exit code, and what it said."""
        said, _ = self.process.communicate(timeout=600)
        return self.process.returncode, said, self.said.read_text()

    def kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def assert_gone(self, *, folders: bool = True) -> None:
        until(lambda: not self.processes(), self.said)
        if folders:
            until(lambda: not list(self.folder.glob("overlay-*")), self.said)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def until(found: Callable[[], Any], said: Path) -> Any:
    deadline = time.monotonic() + 600
    while not (value := found()):
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.05)
    return value


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def run(*words: str, launcher: list[str] | None = None, folder: Path = tmp_path, **variables: Any) -> Run:
        started.append(Run(folder, launcher or [], *words, **variables))
        return started[-1]

    yield run
    for one in started:
        one.kill()


Start = Callable[..., Run]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Of the ranks: none goes on after its first case before this file is there."""
    return tmp_path / "gate"


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGHUP, 130), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"],
)
def test_stopped(start: Start, number: int, code: int) -> None:
    run = start("fsdp2", cases=10**6)
    run.wait()
    run.process.send_signal(number)
    stopped = time.monotonic()
    assert run.end()[0] == code
    run.assert_gone(folders=number != signal.SIGKILL)
    assert time.monotonic() - stopped < SOON
    if number != signal.SIGKILL:
        said = [line for line in run.said.read_text().splitlines() if "measurements" not in line]
        assert said == ["overlay: interrupted: what was to be replaced is as before or as after, run this again"]


def test_a_terminal_that_goes_does_not_stop_what_nohup_has_started(start: Start, gate: Path) -> None:
    run = start("fsdp2", gate=str(gate), launcher=["nohup"])
    run.wait()
    run.process.send_signal(signal.SIGHUP)
    gate.touch()
    assert run.end()[0] == 0


def test_a_rank_is_killed(start: Start) -> None:
    run = start("fsdp2", cases=10**6, collective=600, PATIENCE="600")
    _, rank = run.wait()
    os.kill(rank, signal.SIGKILL)
    killed = time.monotonic()
    code, said, _ = run.end()
    assert time.monotonic() - killed < SOON
    assert code == 1
    assert "rank 1 was killed (SIGKILL, as when memory runs out)" in " ".join(said.split())
    run.assert_gone()


@pytest.mark.parametrize("late", [0, 0.3], ids=["first", "after the others"])
def test_a_rank_fails(start: Start, late: float) -> None:
    """It is what is said, and not what others say who have lost it."""
    run = start("fsdp2", case=1, rank=1, signal=0, late=late, moment=600)
    code, said, _ = run.end()
    assert code == 1
    assert "it ended with exit status 1 before it was done: ValueError: of this rank alone" in " ".join(said.split())
    run.assert_gone()


def test_the_worker_is_killed_and_the_next_experiment_is_run(start: Start, gate: Path) -> None:
    run = start("all", gate=str(gate))
    rank, _ = run.wait()
    os.kill(parent(rank), signal.SIGKILL)
    gate.touch()
    code, said, _ = run.end()
    assert code == 1
    words = " ".join(said.split())
    assert "fsdp2 on here: not measured: it was killed (SIGKILL, as when memory runs out) before it was done" in words
    assert "zero3 on here: not measured" not in words
    assert said.count("1.0\n") == 3
    run.assert_gone()


@pytest.mark.parametrize(
    ("collective", "patience", "reason"),
    [
        (600, 5, "it took more than 5 s for one answer"),
        (5, 600, "it ended with exit status 1 before it was done: another rank has ended, or hangs: "),
    ],
    ids=["by the reader", "by another rank"],
)
def test_a_rank_hangs(start: Start, collective: float, patience: float, reason: str) -> None:
    run = start("fsdp2", case=1, rank=1, signal=signal.SIGSTOP, collective=collective, PATIENCE=patience)
    code, said, _ = run.end()
    assert code == 1
    assert f"here: not measured: {reason}" in " ".join(said.split())
    assert "RuntimeError\n" not in said
    assert ".cc:" not in said  # no lines of gloo's sources
    run.assert_gone()


def test_what_the_worker_leaves_in_temporary_folders_goes(start: Start) -> None:
    run = start("fsdp2")
    assert run.end()[0] == 0
    assert list(run.folder.iterdir()) == []


def test_spawned_ranks(start: Start) -> None:
    """As with CUDA."""
    run = start("fsdp2", spawn=True)
    code, said, _ = run.end()
    assert (code, said.count(" 1.0\n")) == (0, 3)
    run.assert_gone()


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (("--nproc-per-node", 2, "--master-addr", "127.0.0.1", "--master-port", "PORT"), {}),
        (("--standalone", "--nproc-per-node", 2), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    ],
    ids=["static", "no shared store"],
)
def test_torchrun(start: Start, options: tuple[object, ...], variables: dict[str, str]) -> None:
    with reserved() as port:
        launcher = torchrun(*(port if option == "PORT" else option for option in options))
        run = start("all", launcher=launcher, **variables)
        code, said, errors = run.end()
    assert code == 0, errors
    assert said.count(" 1.0\n") == 2 * 3
    assert said.count("pass: ") == 1
    assert errors.count("overlay: ") == 2  # of rank 0 alone: its progress
    run.assert_gone()


def test_no_launcher_but_its_variables(start: Start, tmp_path: Path) -> None:
    """And one host that is late: it has environments to make."""
    (tmp_path / "second").mkdir()
    with reserved() as port:
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        first = start("all", RANK="0", PATIENCE="6", heartbeat=0.5, **variables)
        until(lambda: "overlay: waiting for the other ranks" in first.said.read_text(), first.said)
        time.sleep(7)
        second = start("all", RANK="1", folder=tmp_path / "second", **variables)
        code, said, errors = first.end()
        assert second.end()[:2] == (0, "")
    assert (code, said.count(" 1.0\n")) == (0, 2 * 3)
    assert "overlay: waiting for the other ranks (at most 60 min; Ctrl-C ends it)\n" in errors


def test_a_launched_rank_that_cannot_take_part_is_waited_for_no_longer_than_needed(start: Start) -> None:
    """The first experiment is not measured, on any rank, and the one after it is."""
    run = start("all", launcher=torchrun("--standalone", "--nproc-per-node", 2), early=0, rank=1)
    code, said, errors = run.end()
    assert code == 1
    assert said.count(" 1.0\n") == 3
    assert "it ended with exit status 1 before it was done: rank 1 could not take part" in " ".join(said.split())
    assert "it was killed (SIGKILL, as when memory runs out) before it was done" in errors
    run.assert_gone()


def test_a_launched_rank_that_is_killed_takes_its_experiment_with_it(start: Start) -> None:
    launcher = torchrun("--standalone", "--nproc-per-node", 2)
    run = start("all", launcher=launcher, case=1, rank=1, signal=signal.SIGKILL, collective=1200, PATIENCE="1200")
    code, said, errors = run.end()
    assert code == 1
    assert said.count("another rank has ended, or hangs") >= 2, errors  # in each
    assert "RuntimeError\n" not in said
    run.assert_gone()


@pytest.mark.parametrize("which", [fsdp2.EXPERIMENT, zero3.EXPERIMENT], ids=["fsdp2", "zero3"])
def test_a_case_does_not_fail_for_a_rank_that_has_gone(which: Experiment) -> None:
    """Of the real workers: it is no row of theirs, but their end."""
    folders = [installed(PATCHED[0]), *([environments.variant(*which.beside("patched"))] if which.beside("") else [])]
    build = builds.Build("patched", "", str(environments.python(f"{which.environment}-2.13")), folders)
    told = {"ranks": [2], "backend": "gloo", "name": "", "meeting": 60, **which.told}
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved())
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        first, second = (
            rows.read(
                [build.interpreter, "-P", str(which.worker)],
                {**build.variables(1), **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                told,
                600,
            )
            for rank in range(2)
        )
        stack.callback(first.close)
        stack.callback(second.close)
        for read in (second, first, first):
            next(read)
        second.close()  # which kills it
        with pytest.raises(rows.WorkerError, match="another rank has ended, or hangs"):
            list(first)


def test_launched_again_after_a_failure(start: Start, gate: Path) -> None:
    """`torchrun` keeps the store of the first time."""
    launcher = torchrun("--standalone", "--nproc-per-node", 2, "--max-restarts", 1)
    run = start("fsdp2", launcher=launcher, gate=str(gate))
    rank, _ = run.wait()
    os.kill(parent(rank), signal.SIGKILL)
    gate.touch()
    code, said, errors = run.end()
    assert code == 0, errors
    assert said.count(" 1.0\n") == 3
    run.assert_gone(folders=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_torchrun_is_stopped(start: Start, number: int) -> None:
    run = start("fsdp2", launcher=torchrun("--standalone", "--nproc-per-node", 2), cases=10**6)
    run.wait()
    run.process.send_signal(number)
    stopped = time.monotonic()
    run.end()
    run.assert_gone(folders=number == signal.SIGTERM)
    assert time.monotonic() - stopped < SOON


def test_no_gpus(start: Start) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists() or Path("/dev/kfd").exists():
        pytest.skip("there may be GPUs here")
    code, said, errors = start("all", "--backend", "nccl").end()
    assert (code, said) == (1, "")
    assert "expected 2 GPUs here, one for each rank, found none" in errors
    assert len(errors.splitlines()) == 1  # nothing was begun


def test_a_torch_without_nccl(start: Start, tmp_path: Path) -> None:
    """Where the kernel shows GPUs: the first worker says it, and nothing else is begun."""
    for i in range(2):
        (tmp_path / f"nvidia{i}").touch()
    run = start("all", "--backend", "nccl", DEVICES=str(tmp_path))
    code, said, errors = run.end()
    if "found none with torch" in errors:
        pytest.skip("torch has NCCL here")
    assert (code, said) == (1, "")
    progress, line = errors.splitlines()
    assert "fsdp2" in progress
    assert line.startswith("overlay: --backend nccl: expected a torch with NCCL, found 2.13.0")
    run.assert_gone()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Two hosts that a cable joins, as prefixes of commands. Each has its own name for the loopback interface, as on
    Debian; to the second one, the first is also known as `first`."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two hosts are made by ip(8) as root")
    names = [f"overlay-{uuid4().hex[:8]}" for _ in range(2)]
    configuration = Path("/etc/netns")
    was_there = configuration.is_dir()

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces can be made here: {error.stderr.strip()}")
        try:
            ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no pair of network interfaces can be made here: {error.stderr.strip()}")
        for i, name in enumerate(names):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"10.231.7.{i + 1}/24", "dev", f"cable{i}")
            ip("-n", name, "link", "set", f"cable{i}", "up")
            first = "127.0.1.1" if i == 0 else "10.231.7.1"
            (configuration / name).mkdir(parents=True)
            (configuration / name / "hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n{first} first\n"
            )
        yield ["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(configuration / name, ignore_errors=True)
        if not was_there:
            with contextlib.suppress(OSError):
                configuration.rmdir()


def test_a_cable_that_is_cut(hosts: tuple[list[str], list[str]], tmp_path: Path) -> None:
    """What runs fails, what comes next waits for the other host, and nothing after that."""
    runs = []
    for i, prefix in enumerate(hosts):
        (tmp_path / str(i)).mkdir()
        rendezvous = ("--nnodes", 2, "--node-rank", i, "--master-addr", "first", "--master-port", 29500)
        launcher = [*prefix, *torchrun(*rendezvous, "--nproc-per-node", 1)]
        variables = {"cases": 10**6, "collective": 10, "heartbeat": 1, "AGAIN": "8", "EXPERIMENTS": "4"}
        runs.append(Run(tmp_path / str(i), launcher, "all", **variables))
    first, second = runs
    try:
        until(lambda: len(list(tmp_path.glob("?/temporary/overlay-worker-*/begun-?-*"))) == 2, first.said)
        subprocess.run(["ip", "-n", hosts[1][-1], "link", "set", "cable1", "down"], check=True)
        cut = time.monotonic()
        code, said, errors = first.end()
        assert time.monotonic() - cut < 300, errors
        assert code == 1
        words = " ".join(said.split())
        gone = "rank 1 did not come within 8 s: ended, or cannot be reached"
        assert (
            "- fsdp2 on here: not measured: it ended with exit status 1 before it was done: another rank has" in words
        )
        assert f"- zero3 on here: not measured: {gone}" in words
        for name in ("third", "fourth"):
            assert f"- {name} on here: not measured: not begun: at zero3 on here, {gone}" in words
        assert "overlay: waiting for rank 1 (at most 8 s; Ctrl-C ends it)\n" in errors
        assert second.end()[0] == 1
        assert "overlay: zero3 on here: rank 0, at first, did not come within 8 s: ended" in second.said.read_text()
        for run in runs:
            run.assert_gone(folders=False)
    finally:
        for run in runs:
            run.kill()


def test_two_hosts(hosts: tuple[list[str], list[str]], tmp_path: Path) -> None:
    """The real thing: nothing is set but what torchrun needs, and the gradients go over the cable."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "overlay", "verify", "fsdp2", "--against", "patched", "--json"]
    running = []
    for i, prefix in enumerate(hosts):
        rendezvous = ("--nnodes", 2, "--node-rank", i, "--master-addr", "first", "--master-port", 29500)
        launcher = [*prefix, *torchrun(*rendezvous, "--nproc-per-node", 1)]
        running.append(
            subprocess.Popen([*launcher, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    try:
        (first, errors), (second, more) = (process.communicate(timeout=600) for process in running)
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], (errors + more).decode()
    assert second == b""
    report = json.loads(first)
    assert report["passed"]
    assert "2 ranks, gloo" in report["experiments"][0]["about"]
    counter = "/sys/class/net/cable0/statistics/tx_bytes"
    over_the_cable = int(subprocess.run([*hosts[0], "cat", counter], check=True, capture_output=True).stdout)
    assert over_the_cable > 10_000_000
