"""The judges: what they say of every pinned release, stock and patched; they say nothing that they have not seen."""

import ast
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from overlay.deliver.wheel import Wheel
from overlay.queue import images, judges, lock, series, source, verdicts
from overlay.queue.judges import FUSER, GENERIC, LAYERS, MODELS, RULES, Verdict
from tests.variants import ROOT

LOCK = lock.read(ROOT / "upstream.lock")
PINNED = [(name, release.version) for name, package in LOCK.packages.items() for release in package.releases]

Files = Mapping[str, bytes]


@cache
def files(project: str, version: str, patched: bool = False) -> Files:
    """The files that the judges look at, of the stock release or after its series."""
    _, package, release = LOCK.find(f"{project}=={version}")
    wheel = Wheel.read(source.read(project, release.wheel), release.wheel.file)
    paths = {path for rule in RULES[project].values() for path in rule.paths}
    found = {path: wheel.member(path).content() for path in paths}
    if patched and release.series is not None:
        queue = series.read(ROOT / "patches" / release.series)
        made = images.make(queue, package.prefix, lambda path: wheel.member(path).content())
        found |= {image.path: image.after for image in made if image.path in paths}
    return found


def judged(asked: Sequence[tuple[str, str, Files]]) -> list[Verdict]:
    """What the judges say of these faults, without a cache."""
    work = [
        (project, code, {path: contents[path] for path in RULES[project][code].paths})
        for project, code, contents in asked
    ]
    return [verdict for verdict, _ in verdicts.run(work)]


@pytest.fixture(scope="module")
def of_pinned() -> "Pinned":
    """What the judges say of each pinned release, stock and patched, in one process."""
    asked = [(*one, patched, code) for one in PINNED for patched in (False, True) for code in RULES[one[0]]]
    answers = judged([(project, code, files(project, version, patched)) for project, version, patched, code in asked])
    found: dict[tuple[str, str, bool], dict[str, Verdict]] = {}
    for (project, version, patched, code), verdict in zip(asked, answers, strict=True):
        found.setdefault((project, version, patched), {})[code] = verdict
    return found


Pinned = dict[tuple[str, str, bool], dict[str, Verdict]]


@pytest.mark.parametrize(("project", "version"), PINNED, ids=[f"{name}-{version}" for name, version in PINNED])
def test_a_pinned_release_has_the_faults_that_its_series_mends_and_no_other(
    project: str, version: str, of_pinned: Pinned
) -> None:
    release = LOCK.find(f"{project}=={version}")[2]
    named = series.read(ROOT / "patches" / release.series).faults("wheel") if release.series is not None else ()
    expected = dict.fromkeys(RULES[project], "not live") | {fault.code: "live" for fault in named}
    found = of_pinned[project, version, False]
    assert {code: verdict.state for code, verdict in found.items()} == expected, found
    assert bool(named) == (release.series is not None)


@pytest.mark.parametrize(("project", "version"), PINNED, ids=[f"{name}-{version}" for name, version in PINNED])
def test_a_patched_release_has_no_fault(project: str, version: str, of_pinned: Pinned) -> None:
    found = of_pinned[project, version, True]
    assert {verdict.state for verdict in found.values()} == {"not live"}, found


def changed(contents: Files, path: str, *changes: tuple[str, str]) -> Files:
    """`contents` with the first text of each pair exchanged for the second, wherever it stands."""
    text = contents[path].decode()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return {**contents, path: text.encode()}


ENABLED = "if self.gradient_checkpointing and self.training"
GRADIENTS = " and torch.is_grad_enabled()"
CALL = "def __call__(self, *args, **kwargs):\n"
MOVED = "from .moved import GradientCheckpointingLayer"
HELPER = "\nfrom .helpers import helper\n"
NEXT = "\n\n@auto_docstring\nclass GenericForSequenceClassification"
"""What stands behind the class of the layers."""

LATER = [
    'if logger is not None:\n    setattr(GradientCheckpointingLayer, "__call__", nn.Module.__call__)',
    "for one in (GradientCheckpointingLayer,):\n    one.__call__ = nn.Module.__call__",
    "del GradientCheckpointingLayer.__call__",
    'put = setattr(GradientCheckpointingLayer, "__call__", nn.Module.__call__)',
    "def put(one):\n    GradientCheckpointingLayer.__call__ = nn.Module.__call__\n\n\n@put\nclass Other:\n    pass",
    "class Other:\n    GradientCheckpointingLayer.__call__ = nn.Module.__call__",
    'class Other(nn.Module):\n    gradient_checkpointing = False\n\n\nglobals()["GradientCheckpointingLayer"] = Other',
]
"""Statements behind the class after which it checkpoints nothing."""

LAST = "GradientCheckpointingLayer.__call__ = nn.Module.__call__"
NOTHING = "expected a plain layer to be checkpointed once, found 0 checkpoints"
NO_STAND_IN = "it uses transformers.helpers.helper, for which there is no stand-in"

PATCHED_LAYERS = [
    # the release is mended, and one part of the mend is taken out again
    ("fsdp2-gradients", "5.22.2", [("if not hooks or not", "if True or not")], "live", "hooks of a layer ran inside"),
    ("training-cache", "5.22.2", [(f"{ENABLED}{GRADIENTS}", ENABLED)], "live", "without gradients a layer drops"),
    ("training-cache", "5.24.0", [(f"{ENABLED}{GRADIENTS}", ENABLED)], "live", "a layer drops use_cache, cache"),
    ("fsdp2-nested", "5.14.1", [("        raise RuntimeError(message)", "        pass")], "live", "is not refused"),
    ("fsdp2-nested", "5.24.0", [('"POST_BACKWARD" in states', "False")], "live", "the layer is sharded, too"),
    (
        "forward-replaced",
        "5.24.0",
        [("return self.forward(*args", "return type(self).forward(self, *args")],
        "not judged",
        "expected the replaced forward (instance) to run",
    ),
    # it goes wrong in another way
    (
        "fsdp2-nested",
        "5.14.1",
        [("raise RuntimeError(message)", 'raise RuntimeError("no")')],
        "not judged",
        "RuntimeError: no",
    ),
    ("fsdp2-gradients", "5.22.2", [(ENABLED, "if False")], "not judged", NOTHING),
    (
        "fsdp2-gradients",
        "5.22.2",
        [("if not hooks or not", 'if not hasattr(self, "_get_fsdp_state") or not')],
        "not judged",
        "found those of a sharded layer outside of its checkpoint, and others inside",
    ),
]
STOCK_LAYERS = [
    (code, "5.22.2", changes, "not judged", why)
    for code in ("fsdp2-gradients", "fsdp2-nested", "training-cache", "forward-replaced")
    for changes, why in (
        ([(ENABLED, "if False")], NOTHING),
        ([(CALL, f"{CALL}        raise ValueError('no')\n")], "ValueError: no"),
        ([(CALL, f"{CALL}        raise SystemExit(0)\n")], "SystemExit: 0"),
        ([(CALL, f"{CALL}        return helper(self)\n"), ("\nimport copy\n", f"\nimport copy{HELPER}")], NO_STAND_IN),
        # also where the code goes on without what has no stand-in
        (
            [
                (CALL, f"{CALL}        try:\n            helper(self)\n        except Exception:\n            pass\n"),
                ("\nimport copy\n", f"\nimport copy{HELPER}"),
            ],
            NO_STAND_IN,
        ),
        (
            [("class GradientCheckpointingLayer(", "class CheckpointedLayer(")],
            "expected GradientCheckpointingLayer in transformers.modeling_layers, found none",
        ),
        (
            [("class GradientCheckpointingLayer(nn.Module)", "class GradientCheckpointingLayer(Unheard)")],
            "NameError: name 'Unheard' is not defined",
        ),
        ([("class GradientCheckpointingLayer(", "GradientCheckpointingLayer.__call__ = (")], "found invalid syntax"),
        ([("class GradientCheckpointingLayer(", f"{MOVED}\n\n\nclass Other(")], "to be a class of modules"),
        # what is put on the class behind it counts, too
        ([(NEXT, f"\n\n{LAST}\n{NEXT}")], NOTHING),
        ([(NEXT, f"\n\ndef put():\n    {LAST}\n\n\nput()\n{NEXT}")], NOTHING),
        *(([(NEXT, f"\n\n{statement}\n{NEXT}")], NOTHING) for statement in LATER),
        ([(NEXT, f"{HELPER}helper(GradientCheckpointingLayer)\n{NEXT}")], NO_STAND_IN),
    )
]
MODEL_CHANGES = [
    (True, [("                        and torch.is_grad_enabled()\n", "")], "live", "merge_with_config_defaults sets"),
    (True, [('"use_cache"', '"caching"')], "not judged", "expected one function about use_cache"),
    (True, [("arg_value = False", "arg_value = arg_value")], "not judged", "to set use_cache to False with gradients"),
    (True, [("return wrapper", "return None")], "not judged", "TypeError: 'NoneType' object is not callable"),
]
ENABLING = [
    (True, [('version.parse("0.19.3")', 'version.parse("0.19.2")')], "live", "checkpointed non-reentrantly"),
    (
        True,
        [("if not parameter.requires_grad:\n                return True", "if False:\n                return True")],
        "live",
        "non-reentrantly",
    ),
    (
        True,
        [("return reentrant(layer", "return helper(layer")],
        "not judged",
        "NameError: name 'helper' is not defined",
    ),
    (
        False,
        [('"gradient_checkpointing", layer_index', '"checkpointing", layer_index')],
        "not judged",
        "to turn checkpointing on",
    ),
    (
        False,
        [("def gradient_checkpointing_enable(", "def enable(")],
        "not judged",
        "expected gradient_checkpointing_enable or activation_checkpointing_enable",
    ),
    (False, [("class PreTrainedModel(", "class Model(")], "not judged", "expected one class PreTrainedModel"),
    (False, [('{"use_reentrant": False}', "{}")], "not judged", "expected one checkpoint with use_reentrant set"),
]
GUARD = "if set_output_requires_grad:\n"
FUSERS = [
    ([(f"                    {GUARD}", "                    if True:\n")], "live", "MakeExtraOutput, a leaf"),
    (
        [(f"        {GUARD}            x.", "        if True:\n            x.")],
        "live",
        "Identity, a non-leaf: RuntimeError",
    ),
    ([("return forward_func(*args)", "return None")], "not judged", "expected the operation to run once"),
    ([("return forward_func(*args)", "raise RuntimeError('no')")], "not judged", "RuntimeError: no"),
    (
        [("x, fused_op_extra_outputs = op.fuser_forward(", "x, fused_op_extra_outputs = op.run(")],
        "not judged",
        "it uses transformer_engine.pytorch.ops.BasicOperation.run",
    ),
    ([("class OperationFuser:", "class Fuser:")], "not judged", "expected OperationFuser"),
]


def hostile(body: str) -> Files:
    """A fuser that does this when it is made."""
    head = "import os, socket, subprocess, sys\n\nclass OperationFuser:\n    def __init__(self, ops):\n"
    return {FUSER: f"{head}        {body}\n".encode()}


HOSTILE = [
    ("os.abort()", "its process ended with -6"),
    ("os._exit(0)", "its process ended with 0"),
    ("bytearray(1 << 40)", "MemoryError"),
    ('print(\'[0, "live", "", true]\', flush=True); sys.exit(0)', "SystemExit: 0"),
    ("open('made', 'w')", "PermissionError: open is refused here"),
    ("os.remove(sys.executable)", "PermissionError: os.remove is refused here"),
    ("subprocess.run(['true'])", "PermissionError: subprocess.Popen is refused here"),
    ("os.fork()", "PermissionError: os.fork is refused here"),
    ("pass", "TypeError: 'OperationFuser' object is not callable"),
]

Case = tuple[str, str, Files, str, str]
"""A project, a fault, the files, and what the judge must say of them and why."""


@cache
def cases() -> list[Case]:
    found: list[Case] = []
    for patched, layers in ((True, PATCHED_LAYERS), (False, STOCK_LAYERS)):
        for code, version, changes, state, why in layers:
            contents = changed(files("transformers", version, patched), LAYERS, *changes)
            found.append(("transformers", code, contents, state, why))
    for path, code, rows in ((GENERIC, "training-cache", MODEL_CHANGES), (MODELS, "peft-zero3", ENABLING)):
        for patched, changes, state, why in rows:
            contents = changed(files("transformers", "5.22.2", patched), path, *changes)
            found.append(("transformers", code, contents, state, why))
    for version in ("2.10.0", "2.15.0"):
        for changes, state, why in FUSERS:
            contents = changed(files("transformer_engine", version, patched=True), FUSER, *changes)
            found.append(("transformer_engine", "requires-grad", contents, state, why))
    return found + [("transformer_engine", "requires-grad", hostile(body), "not judged", why) for body, why in HOSTILE]


NUMBER = len(PATCHED_LAYERS) + len(STOCK_LAYERS) + len(MODEL_CHANGES) + len(ENABLING) + 2 * len(FUSERS) + len(HOSTILE)


@pytest.fixture(scope="module")
def of_cases() -> list[Verdict]:
    """What the judges say of them, in one process."""
    return judged([(project, code, contents) for project, code, contents, _, _ in cases()])


@pytest.mark.parametrize("number", range(NUMBER))
def test_a_changed_release(number: int, of_cases: list[Verdict]) -> None:
    """A mend that is taken out in part is seen; what goes wrong in another way is never called mended."""
    assert len(cases()) == NUMBER
    *_, state, why = cases()[number]
    assert of_cases[number].state == state, of_cases[number]
    assert why in of_cases[number].why


@pytest.mark.parametrize(
    ("body", "event"),
    [("socket.create_connection(('127.0.0.1', PORT))", "getaddrinfo"), ("socket.socket()", "__new__")],
)
def test_the_network_is_refused(body: str, event: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        contents = hostile(body.replace("PORT", str(server.getsockname()[1])))
        (found,) = judged([("transformer_engine", "requires-grad", contents)])
        with pytest.raises(BlockingIOError):
            server.accept()
    assert (found.state, found.why) == ("not judged", f"PermissionError: socket.{event} is refused here")


def test_one_that_hangs_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "EACH", 1)
    work = [
        ("transformer_engine", "requires-grad", {FUSER: contents[FUSER]})
        for contents in (
            hostile("while True: pass"),
            hostile(
                "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n        while True: pass"
            ),
            hostile("import signal, time; signal.alarm(0); os.closerange(3, 99); time.sleep(60)"),
            hostile("import signal; os.kill(os.getpid(), signal.SIGSTOP)"),
            files("transformer_engine", "2.13.0"),
        )
    ]
    found = verdicts.run(work)
    assert [(verdict.state, lasting) for verdict, lasting in found] == [
        *[("not judged", False)] * 4,
        ("live", True),
    ]
    assert [verdict.why for verdict, _ in found[:4]] == ["it took longer than 1 s"] * 4


def test_the_process_of_all_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "LIMIT", 1)
    started: list[int] = []

    class Popen(subprocess.Popen[str]):
        """Whose time begins when it has said something."""

        def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
            if input is not None:
                started.append(self.pid)
                assert self.stdin is not None
                assert self.stdout is not None
                self.stdin.write(input)
                self.stdin.close()
                self.stdin = None
                select.select([self.stdout], [], [], 600)
            return super().communicate(timeout=timeout)

    monkeypatch.setattr("subprocess.Popen", Popen)
    work = [("transformer_engine", "requires-grad", files("transformer_engine", "2.13.0"))]
    work.append(("transformer_engine", "requires-grad", hostile("while True: pass")))
    first, second = verdicts.run(work)
    assert (first[0].state, second[0].state, second[1]) == ("live", "not judged", False)
    assert "longer than 1 s" in second[0].why
    (pid,) = started
    left = subprocess.run(["ps", "-o", "s=", "-s", str(pid)], capture_output=True, text=True, check=False).stdout
    assert {*left.split()} <= {"Z"}, "a fork lives on"


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; and the artefacts of this session's, read before."""
    files("transformer_engine", "2.13.0")
    files("transformer_engine", "2.13.0", patched=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "modeling-overlay" / "judged"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much each call of `verdicts.run` had to judge."""
    counts: list[int] = []
    run = verdicts.run

    def counting(work: object) -> object:
        counts.append(len(work))  # type: ignore[arg-type]
        return run(work)  # type: ignore[arg-type]

    monkeypatch.setattr(verdicts, "run", counting)
    return counts


def test_equal_files_are_judged_once_and_never_again(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted(monkeypatch)
    stock, mended = files("transformer_engine", "2.13.0"), files("transformer_engine", "2.13.0", patched=True)
    other = {**stock, "transformer_engine/common/__init__.py": b"another file\n"}
    for _ in range(2):
        found = verdicts.judge("transformer_engine", ["requires-grad"], [stock, other, mended, stock])
        assert [one["requires-grad"].state for one in found] == ["live", "live", "not live", "live"]
    assert counts == [2]
    assert len(list(empty.iterdir())) == 2
    for damage in ("", "[]", '{"value": ["not live", ""], "sha256": "0"}'):
        for file in empty.iterdir():
            file.write_text(damage, "utf-8")
        found = verdicts.judge("transformer_engine", ["requires-grad"], [stock])
        assert found[0]["requires-grad"].state == "live"
    assert counts == [2, 1, 1, 1]
    monkeypatch.setattr(verdicts, "_judges", lambda: "other judges")
    verdicts.judge("transformer_engine", ["requires-grad"], [stock])
    assert counts == [2, 1, 1, 1, 1]


def test_what_may_be_otherwise_next_time_is_not_kept(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted(monkeypatch)
    for _ in range(2):
        verdicts.judge("transformer_engine", ["requires-grad"], [hostile("os.abort()")])
    assert counts == [1, 1]


def test_what_there_is_no_judge_or_no_file_for(empty: Path) -> None:
    (found,) = verdicts.judge("transformers", ["peft-zero3", "unheard"], [{MODELS: None}])
    assert [(verdict.state, verdict.why) for verdict in found.values()] == [
        ("not judged", f"there is no {MODELS} in the wheel"),
        ("not judged", "there is no judge of this fault"),
    ]
    (other,) = verdicts.judge("demo", ["unheard"], [{"demo/core.py": b""}])
    assert other["unheard"].state == "not judged"


def test_every_fault_of_a_series_has_a_judge_that_looks_at_files_of_the_series() -> None:
    for name, package in LOCK.packages.items():
        for queue in series.of(ROOT / "patches", name):
            for patch in queue.for_delivery("wheel"):
                for fault in patch.faults:
                    looked_at = {package.prefix + path for path in RULES[name][fault.code].paths}
                    assert set(patch.paths) & looked_at, fault.code


def test_the_code_gets_no_environment_and_an_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "geheim")
    contents = hostile("raise ValueError(sorted(os.environ), os.listdir())")
    (found,) = judged([("transformer_engine", "requires-grad", contents)])
    assert "SECRET" not in found.why
    assert found.why.endswith("[])"), found


def test_the_judges_need_nothing_but_the_standard_library_and_this_project() -> None:
    allowed = sys.stdlib_module_names | {"overlay"}
    for file in Path(judges.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                assert {name.name.partition(".")[0] for name in node.names} <= allowed, file
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] in allowed, file
