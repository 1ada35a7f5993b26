"""`overlay bench` as it is run: on all builds, on two ranks, with models that are wrong, and interrupted."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overlay import environments
from overlay.measure import card
from overlay.measure.presets import MODELS
from tests import signals
from tests.variants import LATEST, PATCHED, ROOT, STOCK, Variant, installed, overlay_wheel

CARDS = tuple(str(ROOT / "docs" / "cards" / f"{model}.json") for model in ("llama", "t5"))
MODELS_FILE = Path(__file__).with_name("models_worker.py")
TINY = ("--layers", "2", "--hidden", "32", "--vocab", "64", "--seq", "32", "--batch", "2", "--rounds", "1")
VARIABLES = dict(os.environ) | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
COMMAND = (sys.executable, "-P", "-m", "overlay", "bench")


def bench(*arguments: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=VARIABLES, capture_output=True, text=True, check=False)


def measured(folder: Path, *arguments: object) -> tuple[subprocess.CompletedProcess[str], card.Card]:
    done = bench(*arguments, "--out", folder, "--name", "run", "--no-picture")
    assert done.returncode in (0, 1), done.stderr
    return done, card.read(folder / "run.json")


def line_of(kind: str) -> int:
    """The line that changes something in place in a class of models_worker.py."""
    lines = MODELS_FILE.read_text("utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"class {kind}("))
    return next(i for i, line in enumerate(lines) if i > start and "is to be named" in line) + 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> card.Card:
    """On stock, patched and latest, with everything."""
    folder = tmp_path_factory.mktemp("bench")
    done = bench("llama", *TINY, "--segments", "2,9", "--budget", "1GiB", "--out", folder)
    assert done.returncode in (0, 1), done.stderr
    assert "segments of 9 blocks: left out: at most 2 blocks follow one another" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["llama.json", "llama.md", "llama.png"]
    made = card.read(folder / "llama.json")
    assert done.returncode == (not made.passed)
    return made


def test_builds_and_modes(whole: card.Card) -> None:
    assert [(build.kind, build.version.partition("+overlay.")[:2]) for build in whole.builds] == [
        ("stock", (PATCHED[1].release, "")),
        ("patched", (PATCHED[1].release, "+overlay.")),
        ("latest", (LATEST.release, "")),
    ]
    for build in whole.builds:
        assert [(mode.mode, mode.outcome) for mode in build.modes] == [
            ("off", "ok"),
            ("reentrant", "ok"),
            ("non-reentrant", "ok"),
        ]
    assert whole.judged == "patched"


def test_memory_is_the_same_on_all_builds_and_lower_with_checkpointing(whole: card.Card) -> None:
    peaks = [[mode.memory.peak for mode in build.modes if mode.memory] for build in whole.builds]
    assert peaks[0] == peaks[1]
    for off, *others in peaks:
        assert all(other < off for other in others)
    memory = whole.ours.modes[0].memory
    assert memory is not None
    assert memory.parameters == 4 * whole.subject.parameters == memory.gradients
    assert 2 * memory.parameters < memory.optimizer < 2.01 * memory.parameters  # AdamW, and its count of steps


def test_what_is_saved_at_a_boundary_is_the_input_of_the_block(whole: card.Card) -> None:
    for build in whole.builds:
        for mode in build.modes[1:]:
            assert mode.saved is not None
            assert set(mode.saved.blocks.values()) == {2 * 32 * 32 * 4}
            assert mode.granularity is not None
            assert (mode.granularity.found, mode.granularity.checkpointed, mode.granularity.twice) == (2, 2, 0)


def test_parity_is_bit_for_bit(whole: card.Card) -> None:
    assert all(mode.parity is not None and mode.parity.exact for build in whole.builds for mode in build.modes)
    losses = {tuple(mode.parity.losses) for build in whole.builds for mode in build.modes if mode.parity}
    assert len(losses) == 1


def test_other_ways_to_checkpoint(whole: card.Card) -> None:
    found = {mode.mode: mode for mode in whole.choices}
    assert {name: mode.outcome for name, mode in found.items()} == {
        "group:2": "ok",
        "every:2": "ok",
        "offload": "not available",
    }
    group, every = found["group:2"], found["every:2"]
    assert group.parity is not None
    assert every.parity is not None
    assert group.parity.exact
    assert every.parity.exact
    assert group.saved is not None
    assert next(iter(group.saved.blocks.values())) == 0, "inside of a segment nothing is saved"
    assert every.granularity is not None
    assert (every.granularity.checkpointed, every.granularity.found) == (1, 2)
    assert whole.budget is not None
    assert whole.budget.best is not None


@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_on_two_ranks(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setitem(VARIABLES, "TMPDIR", str(tmp_path / "temporary"))
    _, made = measured(tmp_path, "bert", *TINY, f"--{way}", "2", "--accumulate", "2", "--builds", "patched")
    assert (made.settings.parallel, made.settings.ranks) == (way, 2)
    for mode in made.ours.modes:
        assert mode.outcome == "ok", mode.message
        assert mode.parity is not None
        assert mode.parity.gradient < 1e-5
        assert mode.time is not None
        assert mode.time.samples_per_second * mode.time.seconds == pytest.approx(2 * 2 * 2)
        assert mode.memory is not None
        share = mode.memory.parameters / (4 * made.subject.parameters)
        assert share == pytest.approx(0.5 if way == "fsdp" else 1, rel=0.02)
    assert made.choices_left_out
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in left
    assert list((tmp_path / "temporary").glob("overlay-*")) == []


def test_an_in_place_operation_is_named(tmp_path: Path) -> None:
    model = f"{MODELS_FILE}:changes_input"
    done, made = measured(tmp_path, model, *TINY[-6:], "--builds", "patched", "--segments", "0")
    assert done.returncode == 1
    assert [mode.outcome for mode in made.ours.modes] == ["ok", "failed", "failed"]
    named = "model.layers.0, model.layers.1: `hidden_states.mul_(1.5)` changes the argument `hidden_states` in place"
    for mode in ("reentrant", "non-reentrant"):
        assert f"- {mode}: failed: RuntimeError: " in done.stdout
        assert f"- {mode}: in-place-operation: {named} ({MODELS_FILE}:{line_of('ChangesInput')})" in done.stdout


def test_what_changes_in_place_what_backward_needs_is_named(tmp_path: Path) -> None:
    """Autograd refuses it but in the recompute of a non-reentrant checkpoint, where gradients are wrong."""
    model = f"{MODELS_FILE}:changes_result"
    done, made = measured(tmp_path, model, *TINY[-6:], "--builds", "patched", "--segments", "0")
    assert done.returncode == 1
    assert [mode.outcome for mode in made.ours.modes] == ["failed", "failed", "ok"]
    named = (
        "model.layers.0: `gate = torch.sigmoid(hidden_states).mul_(2) # the line that is to be named` "
        f"(aten.mul_.Tensor) changes in place a result that backward needs ({MODELS_FILE}:{line_of('ChangesResult')}): "
    )
    assert f"- off: failed: {named}RuntimeError: " in done.stdout
    assert "- reentrant: failed: RuntimeError: " in done.stdout
    for mode in ("reentrant", "non-reentrant"):
        assert done.stdout.count(f"- {mode}: in-place-operation: {named}") == 1


def test_an_in_place_operation_that_only_shows_when_it_runs_is_named(tmp_path: Path) -> None:
    model = f"{MODELS_FILE}:counts"
    done, _ = measured(
        tmp_path, model, *TINY[-6:], "--builds", "patched", "--modes", "off,reentrant", "--segments", "0"
    )
    assert done.returncode == 1
    assert re.search(r"gradients differ from off by \d", done.stdout)
    assert f"changes its buffer in place ({MODELS_FILE}:{line_of('Counts')})" in done.stdout


def test_blocks_that_are_not_checkpointed_are_found(tmp_path: Path) -> None:
    """What 5.24.0 does to a layer whose forward was replaced."""
    model = f"{MODELS_FILE}:replaced"
    options = ("--builds", "patched,latest", "--modes", "off,reentrant", "--segments", "0")
    _, made = measured(tmp_path, model, *TINY[-6:], *options)
    found = {build.kind: build.modes[-1] for build in made.builds}
    counted = {kind: mode.granularity and mode.granularity.checkpointed for kind, mode in found.items()}
    assert counted == {"patched": 2, "latest": 0}
    assert "0 of 2 blocks are checkpointed" in found["latest"].off


def test_doubled_checkpoints_are_found(tmp_path: Path) -> None:
    model = f"{MODELS_FILE}:twice"
    options = ("--builds", "patched", "--modes", "off,non-reentrant", "--segments", "0")
    done, _ = measured(tmp_path, model, *TINY[-6:], *options)
    assert "- non-reentrant: checkpointed-twice: model.layers.0, model.layers.1: " in done.stdout


def test_a_batch_that_fills_the_budget(tmp_path: Path) -> None:
    budget = 8 * 2**20
    sizes = (*TINY[:8], "--batch", "auto", "--budget", "8MiB", "--rounds", "1")
    _, made = measured(tmp_path, "llama", *sizes, "--builds", "patched", "--modes", "off", "--segments", "0")
    memory = made.ours.modes[0].memory
    assert memory is not None
    assert made.settings.batch > 4
    each = (memory.peak - memory.parameters - memory.optimizer) / made.settings.batch
    assert budget - each <= memory.peak <= budget


def test_a_batch_that_fills_what_the_optimizer_leaves(tmp_path: Path) -> None:
    """A batch of one and of two have the same peak, which is the optimizer's."""
    budget = 14 * 2**20
    sizes = ("--layers", "1", "--hidden", "128", "--vocab", "64", "--seq", "2", "--rounds", "1")
    run = ("--batch", "auto", "--budget", "14MiB", "--builds", "patched", "--modes", "off", "--segments", "0")
    _, made = measured(tmp_path, "llama", *sizes, *run)
    memory = made.ours.modes[0].memory
    assert memory is not None
    assert 0.95 * budget < memory.peak <= budget


def test_out_of_memory_in_one_mode_leaves_the_others(tmp_path: Path) -> None:
    model = f"{MODELS_FILE}:large"
    _, made = measured(tmp_path, model, *TINY[-6:], "--builds", "patched", "--segments", "0")
    off, *others = made.ours.modes
    assert off.outcome == "out of memory"
    assert off.off == []
    for mode in others:
        assert mode.outcome == "ok"
        assert mode.time is not None
        assert mode.time.slowdown is None


def test_a_mode_that_takes_its_process_with_it_leaves_the_others(tmp_path: Path) -> None:
    model = f"{MODELS_FILE}:killed"
    done, made = measured(tmp_path, model, *TINY[-6:], "--builds", "patched", "--segments", "0")
    assert [mode.outcome for mode in made.ours.modes] == ["ok", "out of memory", "ok"]
    assert "- reentrant: out of memory: it was killed" in done.stdout
    last = made.ours.modes[-1]
    assert last.parity is not None
    assert last.parity.exact
    assert last.time is not None
    assert last.time.slowdown is not None


def test_a_mode_that_breaks_the_gpu_of_its_process_leaves_the_others(tmp_path: Path) -> None:
    model = f"{MODELS_FILE}:breaks"
    done, made = measured(tmp_path, model, *TINY[-6:], "--builds", "patched", "--segments", "0")
    assert [mode.outcome for mode in made.ours.modes] == ["ok", "failed", "ok"]
    assert "- reentrant: failed: RuntimeError: CUDA error: device-side assert triggered" in done.stdout


def here(folder: Path, build: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """By the Python that trains, which need not have matplotlib; with the overlay wheel, or its files alone."""
    path = os.pathsep.join(map(str, (build, environments.variant(overlay_wheel()), ROOT)))
    command = [str(environments.python("train-2.13")), *COMMAND[1:], "llama", *TINY, "--here", "--modes", "off"]
    command += ["--segments", "0", *words]
    environment = VARIABLES | {"PYTHONPATH": path} | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_here_without_what_draws(tmp_path: Path) -> None:
    done = here(tmp_path, installed(STOCK[1]))
    assert done.returncode == 1
    assert "expected the library matplotlib, found none: --here needs it in this Python" in done.stderr
    assert "--no-picture" in done.stderr


@pytest.mark.parametrize(
    ("variant", "state", "series"),
    [
        (STOCK[1], "stock", ""),
        (Variant("patched", PATCHED[1].release, by="wheel"), "patched wheel", "transformers-5.2-5.22"),
        (Variant("patched", PATCHED[1].release, by="overlay"), "overlaid", "transformers-5.2-5.22"),
    ],
    ids=["stock", "wheel", "overlay"],
)
def test_here_says_which_build_it_is(tmp_path: Path, variant: Variant, state: str, series: str) -> None:
    done = here(tmp_path, installed(variant), "--no-picture")
    assert done.returncode == 0, done.stderr
    [build] = card.read(tmp_path / "llama.json").builds
    assert (build.kind, build.state, build.series) == ("here", state, series)
    assert build.version.startswith(f"{variant.release}{variant.label}")
    assert f"\nnothing to judge: here {build.version} ({state}), off alone\n" in done.stdout
    of = f": the patches of {series}" if series else ""
    said = f"transformers {build.version} ({state}){of}"
    assert f"overlay: what is here: {said}\n" in done.stderr
    assert f"\nWhat is here: {said}.\n" in (tmp_path / "llama.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lama", "--builds", "patched"), "found 'lama': did you mean llama"),
        (("bert", "--hidden", "30", "--heads", "4", "--builds", "patched"), "--hidden 30 --heads 4: --heads 3 does"),
        (("none.json", "--builds", "patched"), "none.json: expected a configuration, found none: No such file"),
        (
            (f"{MODELS_FILE}:nothing", "--builds", "patched"),
            "models_worker.py:nothing: expected a model and a function",
        ),
        ((f"{MODELS_FILE}:leaves", "--builds", "patched"), "models_worker.py:leaves, found SystemExit: 3"),
        (("llama", "--release", "1.0"), f"expected one of the releases {PATCHED[0].release}, "),
        (
            ("llama", "--device", "cuda", "--builds", "patched", "--torch", "2.13"),
            "expected 1 NVIDIA GPU and a CUDA build",
        ),
        (("llama", "--here"), "expected torch and transformers for"),
        (("compare", "none.json", "none.json"), "expected a run card, none.json cannot be read"),
        (("llama", "--out", "/dev/null/cards"), "expected a folder that can be written, found /dev/null"),
        (("gpt2", "--preset", "cpu"), "expected one of llama, bert"),
        (("llama", "--experts", "4", "--builds", "patched"), "found --experts: leave it out"),
        (
            ("imagegpt", "--builds", "patched", "--image", "32", "--segments", "0", "--rounds", "1"),
            f"expected a mode that runs, found none: patched {PATCHED[1].release}, off: ValueError: You have",
        ),
        (("compare", *CARDS), "expected two cards of one model, found LlamaForCausalLM and T5For"),
    ],
    ids=[
        "model",
        "heads",
        "config",
        "no model",
        "no return",
        "release",
        "gpu",
        "here",
        "card",
        "out",
        "preset",
        "a size without effect",
        "no mode runs",
        "cards of two models",
    ],
)
def test_an_error_is_one_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = bench(*arguments, folder=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("llama", "bert"),
        ("llama", "--modes", "on"),
        ("llama", "--budget", "much"),
        ("llama", "--batch", "auto"),
        ("llama", "--fsdp", "2", "--ddp", "2"),
        ("llama", "--here", "--release", "5.22.2"),
        ("llama", "--here", "--torch", "2.14"),
        ("llama", "--modes", "reentrant"),
        ("llama", "--fsdp", "1"),
        ("llama", "--ddp", "1"),
        ("llama", "--segments", "1"),
        ("llama", "--fsdp", "2", "--segments", "2"),
        ("llama", "--compile", "--segments", "2"),
        ("llama", "--budget", "0"),
        ("llama", "--name", "cards/one"),
        ("--preset", "cpu", "--name", "one"),
        ("compare", "a.json"),
        ("compare", "a.json", "b.json", "--dry-run"),
        ("draw",),
        ("draw", "a.json", "--rounds", "2"),
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: overlay bench")


@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_dry_run_of_a_preset(tmp_path: Path, preset: str) -> None:
    done = bench("--preset", preset, "--dry-run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if not line.startswith(" ")] == list(MODELS)
    assert done.stdout.count("device cuda") == (5 if preset == "gpu" else 0)
    assert done.stdout.count(f"torch: {2.14 if preset == 'gpu' else 2.13}") == 5
    assert list(tmp_path.iterdir()) == []


def test_dry_run_says_what_is_filled(tmp_path: Path) -> None:
    said = bench(
        "llama", "--batch", "auto", "--budget", "8MiB", "--segments", "3,2,3", "--dry-run", folder=tmp_path
    ).stdout
    assert "batch auto" in said
    assert "other ways: segments of 2 blocks, segments of 3 blocks, every 2 layers, every 3 layers, offload" in said


def test_drawing_a_card_again(tmp_path: Path) -> None:
    """Without measuring: its JSON stays as it is."""
    done = bench("draw", *CARDS, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama.md", "llama.png", "t5.md", "t5.png"]
    for name in CARDS:
        page = Path(name).with_suffix(".md")
        assert (tmp_path / page.name).read_bytes() == page.read_bytes()
    beside = tmp_path / "beside.json"
    beside.write_bytes(Path(CARDS[0]).read_bytes())
    assert bench("draw", beside, "--no-picture").returncode == 0
    assert sorted(path.name for path in tmp_path.glob("beside.*")) == ["beside.json", "beside.md"]
    assert beside.read_bytes() == Path(CARDS[0]).read_bytes()


@pytest.mark.parametrize("name", ["card.json", "card.md", "card.png"])
@pytest.mark.parametrize(
    "arguments", [("llama", "--name", "card"), ("draw", CARDS[0], "--out", ".")], ids=["run", "draw"]
)
def test_nothing_but_a_card_is_replaced(tmp_path: Path, arguments: tuple[str, ...], name: str) -> None:
    """And that is said before anything is measured."""
    file = tmp_path / name.replace("card", "llama" if arguments[0] == "draw" else "card")
    file.write_text('{"model_type": "llama"}', "utf-8")
    done = bench(*arguments, *([] if name.endswith(".png") else ["--no-picture"]), folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"expected nothing or a run card at {file.name}, " in done.stderr
    assert [path.read_text("utf-8") for path in tmp_path.iterdir()] == ['{"model_type": "llama"}']
    if name.endswith(".png") and arguments[0] == "draw":
        assert bench(*arguments, "--no-picture", folder=tmp_path).returncode == 0
        assert bench(*arguments, folder=tmp_path).returncode == 0  # by now the page beside it says that it is a card's


def test_a_configuration_stays_beside_its_card(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"model_type": "llama"}', "utf-8")
    assert "card: mine-card.json, " in bench("mine.json", "--dry-run", folder=tmp_path).stdout
    done = bench("./mine.json", "--dry-run", "--out", tmp_path, folder=tmp_path)
    assert f"card: {tmp_path}/mine-card.json, " in done.stdout
    assert "card: cards/mine.json, " in bench("mine.json", "--dry-run", "--out", "cards", folder=tmp_path).stdout


def test_cards_of_other_builds_are_not_compared(tmp_path: Path) -> None:
    """As one of all builds, and one of `--here`; nothing is wrong with the model."""
    changed = json.loads(Path(CARDS[0]).read_text("utf-8"))
    changed |= {"builds": [changed["builds"][0] | {"kind": "here"}], "choices": []}
    (tmp_path / "here.json").write_text(json.dumps(changed), "utf-8")
    done = bench("compare", CARDS[0], tmp_path / "here.json")
    assert done.returncode == 1
    assert done.stderr.endswith(
        "found stock, patched, latest and here: measure both with the same --builds, or both with --here\n"
    )


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_lines_are_as_wide_as_the_terminal(tmp_path: Path, columns: int) -> None:
    assert max(map(len, on_terminal(columns, "llama", "--dry-run"))) <= columns
    changed = json.loads(Path(CARDS[0]).read_text("utf-8"))
    changed["machine"]["device"] = "a machine with a name that does not fit in a line with what is said about it"
    (tmp_path / "other.json").write_text(json.dumps(changed), "utf-8")
    lines = on_terminal(columns, "compare", CARDS[0], str(tmp_path / "other.json"))
    assert len(lines) > 2
    assert max(map(len, lines)) <= columns


def on_terminal(columns: int, *words: str) -> list[str]:
    ours, theirs = pty.openpty()
    running = subprocess.Popen([*COMMAND, *words], env=VARIABLES | {"COLUMNS": str(columns)}, stdout=theirs)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError), open(ours, "rb", buffering=0) as terminal:  # noqa: PTH123 - a descriptor
        while read := terminal.read(4096):
            said += read
    assert running.wait() == 0
    return said.decode().splitlines()


def test_interrupted(tmp_path: Path) -> None:
    """No process and no file is left."""
    command = [
        *COMMAND,
        "llama",
        *TINY,
        "--ddp",
        "2",
        "--builds",
        "patched",
        "--out",
        str(tmp_path),
        "--rounds",
        "9999",
    ]
    mark = {"OVERLAY_TEST_MARK": str(tmp_path)}
    with subprocess.Popen(
        command, env=VARIABLES | mark, stderr=subprocess.PIPE, text=True, preexec_fn=signals.heard
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "off: parity" in line:
                break
        while len(marked(tmp_path)) < 3:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("overlay: interrupted")
    assert marked(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def marked(mark: Path) -> list[str]:
    """The processes whose environment has the mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"OVERLAY_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def test_compare(whole: card.Card, tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(card.write(whole), "utf-8")
    changed = json.loads(one.read_text("utf-8"))
    changed["builds"][1]["modes"][1]["memory"]["peak"] *= 2
    other.write_text(json.dumps(changed), "utf-8")
    assert bench("compare", one, one).returncode == 0
    done = bench("compare", one, other)
    assert done.returncode == 1
    assert done.stdout.startswith("worse  patched, reentrant: peak memory: ")
    assert bench("compare", other, one).returncode == 0
