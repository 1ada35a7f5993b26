"""`overlay verify`: a run of experiments, what a stopped one leaves to the next, and what the exit status says."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from overlay import cache, commands
from overlay.measure import builds, launch, resume, rows, verify
from overlay.measure.builds import Build
from overlay.measure.experiments import zero3
from overlay.measure.experiments.experiment import Experiment, Row
from overlay.measure.experiments.table import Cell, Line
from tests import signals
from tests.variants import ROOT

SCHEMA = json.loads((ROOT / "overlay" / "measure" / "verify.schema.json").read_text("utf-8"))
KINDS = ("stock", "patched", "latest")

# ---- a run, with workers that need no torch --------------------------------------------------------------------------

WORKER = """
import os, sys
from overlay.measure import rows
told = rows.told()
(kind,) = {"stock", "patched", "latest"}.intersection(told["name"].replace("/", " ").split())
with open(told["log"], "a") as log:
    log.write(kind + "\\n")
if kind == told.get("fails"):
    sys.exit("there is \\x1b[31mno device")
owed = [{"case": "a", "reentrant": True}, {"case": "b", "reentrant": True}]
about = {"demo": "1.0+overlay.1", "state": "stock", "torch": "2.13.0+cpu", "of": kind, "meeting": told["meeting"]}
rows.put(about | {"owed": owed})
if told.get("meets"):
    rows.met()
if kind == told.get("loses"):
    rows.lost("rank 1 did not come")
for case in told.get("puts", "ab"):
    rows.put({"case": case, "reentrant": True, "right": case != "a" or kind != told.get("wrong")})
rows.done()
"""


def lines(rows: Mapping[str, Sequence[Row]]) -> list[Line]:
    cells: dict[str, dict[str, Cell]] = {}
    for kind, found in rows.items():
        for row in found:
            cells.setdefault(row["case"], {})[kind] = Cell("yes" if row["right"] else "no", row["right"])
    return [Line("cases", case, by_kind) for case, by_kind in cells.items()]


@dataclass
class Stub:
    """A run of one experiment, and which of its columns workers have measured."""

    plan: verify.Plan
    log: Path
    stop_at: str | None = None

    def told(self, **more: Any) -> "Stub":
        (experiment,) = self.plan.experiments
        return self.having(experiments=[replace(experiment, told={**experiment.told, **more})])

    def having(self, **more: Any) -> "Stub":
        return Stub(replace(self.plan, **more), self.log)

    def run(self) -> verify.Report:
        return verify.run(self.plan)

    def stopped_at(self, kind: str) -> None:
        """Runs until the turn of `kind` comes."""

        def build(experiment: Experiment, turn: str) -> Build:
            if turn == kind:
                raise KeyboardInterrupt
            return self.plan.build(experiment, turn)

        with pytest.raises(KeyboardInterrupt):
            verify.run(replace(self.plan, build=build))
        self.measured()

    def measured(self) -> list[str]:
        """The columns that were measured since this was asked."""
        found = self.log.read_text("utf-8").split() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return found


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    worker = tmp_path / "demo_worker.py"
    worker.write_text(WORKER, "utf-8")
    log = tmp_path / "log"
    experiment = Experiment("demo", "whether", worker, "demo", (), False, lines, told={"log": str(log)})
    return Stub(verify.Plan([experiment], KINDS, made, ranks=2, backend="gloo"), log)


def made(experiment: Experiment, kind: str, release: str = "1.0") -> Build:
    return Build(kind, release, sys.executable, ())


def test_all_columns_are_measured_in_turn(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    report = stub.run()
    assert stub.measured() == list(KINDS)
    assert (report.off, report.judged) == ([], "patched")
    (table,) = report.tables
    assert [(column.kind, column.heads) for column in table.columns] == [(kind, ["1.0"]) for kind in KINDS]
    assert table.about == "torch 2.13.0"
    assert [line.case for line in table.lines] == ["a", "b"]
    assert capsys.readouterr() == ("", "".join(f"overlay: demo on {kind} 1.0: 2 measurements\n" for kind in KINDS))


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_patched_column_has_to_be_right(stub: Stub, kind: str) -> None:
    off = stub.told(wrong=kind).run().off
    assert off == (["demo on patched: cases, a: no"] if kind == "patched" else [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_that_fails_is_off_and_the_others_are_measured(
    stub: Stub, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = stub.told(fails=kind).run()
    assert stub.measured() == list(KINDS)
    why = "it ended with exit status 1 before it was done: there is \x1b[31mno device"
    assert report.off == [f"demo on {kind}: not measured: {why}"]
    said = capsys.readouterr().err
    assert f"demo on {kind} 1.0: it ended with exit status 1 before it was done: there is \\x1b[31mno device\n" in said


def test_a_head_says_what_its_own_worker_had(stub: Stub) -> None:
    """Not what that of the column before had, where a column fails."""
    (experiment,) = stub.told(fails="patched").plan.experiments
    (table,) = (
        stub.having(experiments=[replace(experiment, heads=lambda about: [about["of"]] if about else [])]).run().tables
    )
    assert [column.heads for column in table.columns] == [["1.0", "stock"], ["1.0"], ["1.0", "latest"]]
    assert list(zero3.EXPERIMENT.heads({"deepspeed": "0.19.2+cpu"})) == ["DeepSpeed", "0.19.2"]


@pytest.mark.parametrize(
    ("puts", "why"),
    [
        ("aa", "it gave case a, reentrant true twice"),
        ("aab", "it gave case a, reentrant true twice"),
        ("abc", "it gave case c, reentrant true, which it does not owe"),
        ("a", "it left out case b, reentrant true"),
        ("", "it left out case a, reentrant true and 1 more"),
    ],
    ids=["one for another", "doubled", "unknown", "missing", "all missing"],
)
def test_a_row_that_is_doubled_unknown_or_missing_is_named(stub: Stub, puts: str, why: str) -> None:
    """Also where no other column has it: one is measured."""
    report = stub.having(kinds=("patched",)).told(puts=puts).run()
    assert report.off == [f"demo on patched: not measured: {why}"]
    assert report.tables[0].lines == []


def test_a_worker_that_says_nothing_at_all(stub: Stub) -> None:
    (experiment,) = stub.plan.experiments
    experiment.worker.write_text("from overlay.measure import rows\nrows.told()\nrows.done()", "utf-8")
    assert stub.run().off[0] == "demo on stock: not measured: it gave nothing"


LAUNCHED = launch.Place(rank=0, world=2, local_rank=0)


def test_what_needs_a_rank_that_is_gone_is_not_begun(stub: Stub) -> None:
    """What needs none is, and was first."""
    (alone,) = stub.plan.experiments
    several = replace(alone, name="several", ranks=True, told={**alone.told, "loses": "patched"})
    report = stub.having(place=LAUNCHED, experiments=[several, replace(several, name="more"), alone]).run()
    assert stub.measured() == [*KINDS, "stock", "patched"]
    assert [table.name for table in report.tables] == ["several", "more", "demo"]  # as without a launcher
    later = "not measured: not begun: at several on patched 1.0, rank 1 did not come"
    assert report.off == [
        "several on patched: not measured: rank 1 did not come",
        f"several on latest: {later}",
        *(f"more on {kind}: {later}" for kind in KINDS),
    ]


def test_hosts_wait_long_until_they_have_met_and_make_all_that_they_need_before(stub: Stub) -> None:
    def build(experiment: Experiment, kind: str) -> Build:
        assert stub.measured() == []
        return made(experiment, kind)

    (one,) = stub.plan.experiments
    one = replace(one, ranks=True, heads=lambda about: [str(about["meeting"])])
    experiments = [replace(one, name="first"), replace(one, name="second", told={**one.told, "meets": True})]
    report = verify.run(replace(stub.plan, place=LAUNCHED, experiments=experiments, build=build, keep=False))
    assert stub.measured() == [*KINDS, *KINDS]
    long, short = "3600.0", "300.0"
    assert [column.heads[-1] for column in report.tables[0].columns] == [long, long, long]
    assert [column.heads[-1] for column in report.tables[1].columns] == [long, short, short]


def test_without_patched_nothing_is_judged(stub: Stub) -> None:
    report = stub.having(kinds=("stock", "latest")).told(wrong="stock").run()
    assert (report.judged, report.off) == (None, [])


def test_a_stopped_run_is_gone_on_with(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.stopped_at("latest")
    capsys.readouterr()
    report = stub.run()
    assert stub.measured() == ["latest"]
    assert report.off == []
    (table,) = report.tables
    assert all(list(line.cells) == list(KINDS) for line in table.lines)
    assert capsys.readouterr().err.splitlines() == [
        "overlay: demo on stock 1.0: measured already, by a run that did not come to its end",
        "overlay: demo on patched 1.0: measured already, by a run that did not come to its end",
        "overlay: demo on latest 1.0: 2 measurements",
    ]
    stub.run()  # what it kept is gone with its end
    assert stub.measured() == list(KINDS)
    assert list((cache.folder() / "verify").iterdir()) == []


def test_what_was_wrong_stays_wrong(stub: Stub) -> None:
    wrong = stub.told(wrong="patched")
    wrong.stopped_at("latest")
    assert wrong.run().off == ["demo on patched: cases, a: no"]
    assert stub.measured() == ["latest"]


def test_a_column_that_failed_is_not_kept(stub: Stub) -> None:
    failing = stub.told(fails="stock")
    failing.stopped_at("latest")
    failing.run()
    assert stub.measured() == ["stock", "latest"]


def other_release(experiment: Experiment, kind: str) -> Build:
    return made(experiment, kind, "2.0")


def interpreter(experiment: Experiment, kind: str) -> Build:
    here = Path(sys.executable)
    return replace(made(experiment, kind), interpreter=f"{here.parent}/./{here.name}")


def laid_over(experiment: Experiment, kind: str) -> Build:
    return replace(made(experiment, kind), laid_over=(ROOT,))


OTHERS: dict[str, Callable[[Stub], Stub]] = {
    "ranks": lambda stub: stub.having(ranks=3),
    "backend": lambda stub: stub.having(backend="nccl"),
    "release": lambda stub: stub.having(build=other_release),
    "interpreter": lambda stub: stub.having(build=interpreter),
    "experiment": lambda stub: stub.having(experiments=[replace(stub.plan.experiments[0], name="other")]),
    "what is laid over": lambda stub: stub.having(build=laid_over),
    "what is asked": lambda stub: stub.told(more=1),
    "here": lambda stub: stub.having(keep=False),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_was_measured_of_something_else_is_not_taken(stub: Stub, other: str) -> None:
    stub.stopped_at("patched")
    another = OTHERS[other](stub).having(kinds=("stock",))
    another.run()
    assert stub.measured() == ["stock"]
    stub.having(kinds=("stock",)).run()  # and that run has not taken away what this one kept
    assert stub.measured() == []


def test_what_other_code_measured_is_not_taken(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "code" / "experiments"
    code.mkdir(parents=True)
    monkeypatch.setattr(resume, "__file__", str(code.parent / "verify.py"))
    (code / "one_worker.py").write_text("1", "utf-8")
    stub.stopped_at("patched")
    (code / "one_worker.py").write_text("2", "utf-8")
    stub.having(kinds=("stock",)).run()
    assert stub.measured() == ["stock"]


@pytest.mark.parametrize(("hours", "expected"), [(23, []), (25, ["stock"]), (-1, ["stock"])], ids=str)
def test_what_is_older_than_a_day_is_measured_again(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, hours: int, expected: list[str]
) -> None:
    stub.stopped_at("patched")
    later = time.time() + 3600 * hours
    monkeypatch.setattr(time, "time", lambda: later)
    stub.having(kinds=("stock",)).run()
    assert stub.measured() == expected


def test_two_runs_at_once(stub: Stub) -> None:
    def build(experiment: Experiment, kind: str) -> Build:
        if kind == "patched":
            assert stub.run().off == []  # the other one: it begins here, and ends
        return made(experiment, kind)

    report = verify.run(replace(stub.plan, build=build))
    assert report.off == []
    assert all(list(line.cells) == list(KINDS) for line in report.tables[0].lines)
    assert stub.measured() == ["stock", "patched", "latest", "patched", "latest"]


def test_where_nothing_can_be_kept_the_run_says_so_once_and_goes_on(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("no folder", "utf-8")
    assert stub.run().off == []
    assert stub.measured() == list(KINDS)
    said = [line for line in capsys.readouterr().err.splitlines() if not line.endswith("measurements")]
    assert len(said) == 1
    assert said[0].startswith("overlay: what is found is not kept for the next run, should this one be stopped: ")


def test_what_is_damaged_in_the_cache_is_measured_again(stub: Stub) -> None:
    stub.stopped_at("patched")
    (file,) = (cache.folder() / "verify").iterdir()
    file.write_text(file.read_text("utf-8").replace("true", "false"), "utf-8")
    stub.having(kinds=("stock",)).run()
    assert stub.measured() == ["stock"]


# ---- the command -----------------------------------------------------------------------------------------------------


def command(*words: str) -> int:
    options = commands.parser("verify").parse_args(["verify", *words])
    return int(options.command(options))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--here", "--against", "stock"], "--here is what this Python has"),
        (["--here", "--release", "5.14.1"], "--here is what this Python has"),
        (["--here", "--torch", "2.11"], "--here is what this Python has"),
        (["te", "--ranks", "3"], "te is an experiment of one process: it goes without --ranks and --backend"),
        (["contracts", "--backend", "nccl"], "contracts is an experiment of one process"),
        (["te", "--against", "stock,other"], "expected some of stock,patched,latest, found 'other'"),
        (["te", "--against", ""], "expected some of stock,patched,latest, found ''"),
        (["te", "--ranks", "0"], "expected a number of ranks from 1 to 64, found '0'"),
        (["te", "--ranks", "two"], "expected a number of ranks from 1 to 64, found 'two'"),
        (["other"], "invalid choice: 'other'"),
        (["fsdp2", "--release", "2.13.0"], "--release 2.13.0 is of transformer_engine, which fsdp2 does not run"),
        (["te", "--release", "2.13.0", "--release", "2.14.0"], "2.13.0 and 2.14.0 are both of transformer_engine"),
        (["zero3", "--torch", "2.11"], "zero3: there is no environment for it with torch 2.11"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_said_before_anything_is_run(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(*words)
    out, error = capsys.readouterr()
    assert out == ""
    assert said in error


def test_a_release_that_is_not_delivered() -> None:
    with pytest.raises(Exception, match=r"one of the releases transformers==5\.14\.1, .* found 2\.16\.0"):
        command("te", "--release", "2.16.0")


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stopped run has left in the user's cache is of no use here."""
    monkeypatch.setattr(resume, "KIND", "verify-tests")


@pytest.mark.usefixtures("apart")
def test_a_patched_build_that_is_not_patched_is_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = builds._stock
    monkeypatch.setattr(builds, "_patched", lambda lock, root, project, pin, beside: stock(project, pin, beside))
    assert command("te", "--against", "patched") == 1
    said = capsys.readouterr().out
    assert "- te on patched: under no_grad, given a parameter, or another leaf: its" in said
    assert said.count("- te on patched: ") == 28


@pytest.mark.usefixtures("apart")
def test_a_latest_that_cannot_be_measured_is_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = builds.made_one

    def without(lock: Any, root: Path, project: str, release: str, kind: str, *more: Any) -> Build:
        return replace(make(lock, root, project, release, kind, *more), laid_over=())

    monkeypatch.setattr(builds, "made_one", without)
    assert command("te", "--against", "latest", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["off"] == [f"te on latest: not measured: {found['experiments'][0]['not_measured']['latest']}"]
    assert found["off"][0].endswith("No module named 'transformer_engine'")


@pytest.mark.usefixtures("apart")
def test_without_patched_it_exits_0_and_says_that_nothing_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("te", "--against", "stock") == 0
    assert capsys.readouterr().out.endswith("\n\nnothing is judged, for the column `patched` was left out\n")


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[verify.Plan]:
    """The plans that commands have made; none is run."""
    found: list[verify.Plan] = []

    def run(plan: verify.Plan) -> verify.Report:
        found.append(plan)
        return verify.Report(None)

    monkeypatch.setattr(verify, "run", run)
    return found


def test_all_without_an_environment_for_one(plans: list[verify.Plan], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--torch", "2.14", "--json") == 0
    assert [one.name for one in plans[0].experiments] == ["fsdp2", "te", "contracts"]
    assert json.loads(capsys.readouterr().out)["left_out"] == {
        "zero3": "there is no environment for it with torch 2.14"
    }


def test_a_plan(plans: list[verify.Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    command("--against", "latest,stock")
    assert (plans[0].kinds, plans[0].ranks, plans[0].backend, plans[0].keep) == (("stock", "latest"), 2, "gloo", True)
    assert [one.name for one in plans[0].experiments] == ["fsdp2", "te", "zero3", "contracts"]
    monkeypatch.setattr(verify, "missing", lambda experiment: [])
    command("fsdp2", "--here", "--ranks", "3")  # what is installed may have changed since a run was stopped
    assert (plans[1].kinds, plans[1].ranks, plans[1].keep) == (("here",), 3, False)


def test_a_rank_that_has_nothing_to_run_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a shell of a cluster's pod, whose variables are those of a launcher."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rows, "end_with_launcher", lambda: None)  # it would be this process
    assert command("te") == 0
    said = "nothing was run: te is rank 0's alone, and RANK and WORLD_SIZE make this rank 1 of 2"
    assert capsys.readouterr() == ("", f"overlay: {said}\n")


PROGRAM = """
import os, time
from pathlib import Path
from overlay import cli
from overlay.measure import verify
from overlay.queue import kept

kept._place = lambda kind, key: Path(os.environ["KEPT"], kind, key)
progress = verify.Progress

def waits(what, *more):
    begun = progress(what, *more)
    if os.environ["WAITS_AT"] in what:
        time.sleep(3600)
    return begun

verify.Progress = waits
cli.main()
"""
"""`overlay`, with a place of its own for what it keeps, for that of the user's cache is shared with other runs of these
tests; and it waits where a measurement begins."""


def test_stopped_and_run_again_for_a_program(tmp_path: Path) -> None:
    line = [sys.executable, "-P", "-c", PROGRAM, "verify", "te", "--against", "stock,patched", "--json"]
    line += ["--release", "2.14.0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KEPT": str(tmp_path), "WAITS_AT": "te on patched"}
    with subprocess.Popen(
        line,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=signals.heard,
    ) as first:
        assert first.stderr is not None
        assert first.stdout is not None
        assert any("te on patched 2.14.0: 171 measurements" in said for said in first.stderr)
        first.send_signal(signal.SIGTERM)
        assert first.stdout.read() == ""
        assert first.wait() == 130
    environment["WAITS_AT"] = "nothing"
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert "te on stock 2.14.0: measured already" in done.stderr
    assert (done.returncode, done.stderr.count("measurements")) == (0, 1), done.stderr
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    import_module("jsonschema").validate(found, SCHEMA)
    assert found["passed"]
    (experiment,) = found["experiments"]
    assert experiment["columns"] == {"stock": ["2.14.0"], "patched": ["2.14.0"]}
    assert len(experiment["rows"]) == 36
    assert {
        kind: sum(not row["cells"][kind]["right"] for row in experiment["rows"]) for kind in ("stock", "patched")
    } == {
        "stock": 28,
        "patched": 0,
    }
