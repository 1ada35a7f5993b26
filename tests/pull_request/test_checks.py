"""Upstream's formatter and tests run where they can; where not, that is said, with the command."""

import sys
from pathlib import Path

import pytest

from overlay.pull_request import checks
from overlay.queue.checkout import Checkout
from overlay.queue.lock import Package
from tests.pull_request.user import known
from tests.sample import Sample, commit, git

RUFF = """\
#!/bin/sh
echo "$@" >> {log}
case "$1" in
  --version) echo "ruff {version}";;
  check) ;;
  format) [ "$2" = --check ] && exit {found}; shift 3; for file; do echo "# formatted" >> "$file"; done;;
esac
"""
"""A formatter that adds a line to each file."""


@pytest.fixture
def tree(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work tree whose upstream pins a formatter, with its user's identity in the environment."""
    tree = sample.checkouts / "demo-1.0"
    commit(tree, "x", {"setup.py": b'deps = ["ruff==1.2.3"]\n'})
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(known(sample).folder / "home/.gitconfig"))
    return tree


def formatter(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, found: int = 0) -> Path:
    """Puts the formatter on PATH; gives the file in which it notes how it was called."""
    program, log = folder / "bin" / "ruff", folder / "log"
    program.parent.mkdir()
    program.write_text(RUFF.format(log=log, version=version, found=found))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return log


FILES = ["src/demo/core.py", "src/demo/größe.txt"]


def test_what_the_formatter_changes_is_a_commit(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = formatter(tmp_path, monkeypatch, "1.2.3")
    outcome = checks.formatted("transformers", tree, FILES, "false")
    assert (outcome.passed, outcome.said) == (True, "ruff 1.2.3 changed files, in a commit of its own")
    assert outcome.command == "pip install ruff==1.2.3 && make style"
    assert git("show", "--name-only", "--format=%s%n%b", folder=tree).split("\n") == [
        "Format with ruff 1.2.3",
        "Signed-off-by: Zoë O'Neil (work), Jr <zoe@users.example>",
        *("", "", "src/demo/core.py"),
    ]
    assert git("status", "--porcelain", folder=tree) == ""
    assert log.read_text().splitlines()[1:] == [
        "check --fix --quiet -- src/demo/core.py",
        "format --quiet -- src/demo/core.py",
    ]


@pytest.mark.parametrize("found", [0, 1])
def test_another_version_only_looks(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: int) -> None:
    formatter(tmp_path, monkeypatch, "9.9", found)
    head = git("rev-parse", "HEAD", folder=tree)
    outcome = checks.formatted("transformers", tree, FILES, "false")
    if found:
        assert (outcome.passed, outcome.said) == (
            None,
            "ruff 9.9, which is not the 1.2.3 that upstream pins: files would be changed",
        )
    else:
        assert (outcome.passed, outcome.said) == (True, "ruff 9.9 would change nothing; upstream pins 1.2.3")
    assert git("status", "--porcelain", folder=tree) == ""
    assert git("rev-parse", "HEAD", folder=tree) == head


def test_without_the_formatter(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    outcome = checks.formatted("transformers", tree, FILES, "false")
    assert (outcome.passed, outcome.said) == (None, "not run: ruff was not there")
    assert outcome.command == "pip install ruff==1.2.3 && make style"
    assert "--python" in outcome.hint


def test_the_arguments_that_transformer_engine_gives_to_black(tree: Path) -> None:
    config = (
        "repos:\n  - repo: https://github.com/psf/black\n    rev: 24.4.2\n    hooks:\n      - id: black\n"
        "        args: [--line-length=100, --preview]\n  - repo: https://x\n    rev: v1\n    args: [-x]\n"
    )
    commit(tree, "x", {".pre-commit-config.yaml": config.encode()})
    outcome = checks.formatted("transformer_engine", tree, FILES, "false")
    assert outcome.command == "pip install black==24.4.2 && bash qa/format.sh"


def test_tests_that_fail_are_an_error_and_the_branch_stays(sample: Sample) -> None:
    test = sample.patch(3)
    test.write_text(test.read_text().replace("+    pass", "+    assert not 1"))
    checkout = known(sample).checkouts / "demo-1.0"
    done = sample.overlay("pr", "demo", "--checkout", checkout)
    done.fails(
        "expected upstream's checks to pass, found tests: 1 failed in",
        "not without this change: tests/test_core.py::test_core",
        "mend",
    )
    assert "to run it in the work tree: PYTHONPATH=src python -m pytest tests/test_core.py" in done.stdout
    tree = sample.checkouts / "demo-1.0-pull-request"
    assert "- tests: 1 failed in" in (sample.checkouts / "demo-1.0-pull-request.md").read_text("utf-8")
    assert git("status", "--porcelain", "--ignored", folder=tree) == ""


@pytest.mark.parametrize(
    ("test", "said"),
    [
        pytest.param("import nothing_of_it\n", "1 error in", id="a module is missing"),
        pytest.param(
            "def test():\n    assert 0\n", "; what failed fails without this change as well", id="fails anyway"
        ),
        pytest.param("x = 1\n", "none of these files has a test of its own", id="none in it"),
        pytest.param("import time\ntime.sleep(60)\n", "stopped after 3 s", id="too long"),
    ],
)
def test_tests_that_say_nothing_of_the_branch(
    tree: Path, monkeypatch: pytest.MonkeyPatch, test: str, said: str
) -> None:
    if said.startswith("stopped"):
        monkeypatch.setattr(checks, "LIMIT", 3)
    commit(tree, "x", {"tests/test_x.py": test.encode()})
    package = Package.model_construct(prefix="src/")
    (outcome,) = checks.tested(
        "demo", package, tree, Checkout.open(tree), ["tests/test_x.py", "src/demo/core.py"], sys.executable
    )
    assert outcome.passed is None
    assert said in outcome.said
    assert len(git("worktree", "list", folder=tree).splitlines()) == 1


def test_those_of_transformer_engine_need_a_build(tree: Path) -> None:
    commit(tree, "x", {"tests/pytorch/test_fusible_ops.py": b"def test(): pass\n"})
    package = Package.model_construct(prefix="")
    paths = ["transformer_engine/pytorch/ops/fuser.py"]
    (outcome,) = checks.tested("transformer_engine", package, tree, Checkout.open(tree), paths, sys.executable)
    assert outcome.passed is None
    assert outcome.said.startswith("not run: they need a build of TransformerEngine")
    assert outcome.command == "PYTHONPATH=. python -m pytest tests/pytorch/test_fusible_ops.py"


def test_each_file_by_itself(tree: Path) -> None:
    """What cannot be collected keeps no other from running; a mixin has the tests of a model in its place."""
    files = {"tests/test_broken.py": b"import nothing_of_it\n", "tests/test_right.py": b"def test(): pass\n"}
    llama = "tests/models/llama/test_modeling_llama.py"
    commit(tree, "x", files | {llama: b"def test_gradient_checkpointing(): pass\ndef test_other(): pass\n"})
    paths = ["src/transformers/modeling_layers.py", *files, "tests/test_modeling_common.py", "tests/data.txt"]
    outcomes = checks.tested(
        "transformers", Package.model_construct(prefix="src/"), tree, Checkout.open(tree), paths, "false"
    )
    command = "PYTHONPATH=src python -m pytest "
    assert [outcome.command.removeprefix(command) for outcome in outcomes] == [
        f"{llama} -k gradient_checkpointing",
        *files,
    ]
