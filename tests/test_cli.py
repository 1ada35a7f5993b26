"""The command line: its exit codes, its one line for an error, and what it needs to be there."""

import ast
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import overlay
from overlay import commands
from tests.deliver.conftest import sample, template
from tests.sample import PROJECT, Sample
from tests.variants import ROOT

__all__ = ["sample", "template"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["lock"],
        ["lock", "nothing"],
        ["lock", "complete"],
        ["lock", "check", "demo==1.0"],
        ["apply", "--nothing"],
        ["apply", "--any-commit"],
        ["apply", "--metadata-from", "x"],
        ["apply", "--run-upstream-build"],
        ["apply", "--from-git", "x", "demo==1.0"],
        ["apply", "--from-git", "x", "--metadata-from", "x", "--run-upstream-build"],
    ],
)
def test_wrong_usage(sample: Sample, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "overlay", *arguments],
        cwd=sample.folder,
        env=sample.environment(),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: overlay")
    assert done.stdout == ""
    assert not sample.out.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["apply", "--from-tree", "x"],
        ["publish"],
        ["publish", "x"],
        ["publish", "--to", "x", "--index-url", "x"],
        ["verify-wheel"],
        ["verify-wheel", "x", "y"],
        ["explain"],
        ["explain", "x", "--diff", "--json"],
        ["doctor", "x"],
        ["check", "x"],
        ["edit"],
        ["refresh", "x"],
        ["add-release"],
        ["add-release", "demo==1.0", "--use", "x"],
        ["retire", "x"],
        ["pr", "demo"],
        ["drift", "--all", "--json"],
    ],
    ids=" ".join,
)
def test_wrong_usage_of_each_command_shows_its_own(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "overlay", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert done.stderr.startswith(f"usage: overlay {arguments[0]} ")
    assert done.stderr.splitlines()[-1].startswith(f"overlay {arguments[0]}: error: ")


def test_help_and_version(sample: Sample) -> None:
    def said(*arguments: str) -> str:
        command = [sys.executable, "-P", "-m", "overlay", *arguments]
        return subprocess.run(
            command, env=sample.environment(), capture_output=True, encoding="utf-8", check=True
        ).stdout

    assert said("--version") == f"modeling-overlay {overlay.__version__}\n"
    assert "apply" in said("--help")
    assert "--from-git" in said("apply", "--help")


VERBS = [
    *([name.replace("_", "-")] for name in commands.VERBS if name != "lock"),
    *(["lock", name] for name in ("check", "update", "complete")),
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_the_help_of_a_command_says_what_it_does_and_where_more_is(
    verb: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            commands.parser().parse_args(arguments)
        assert stopped.value.code == 0
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "80")
    listed = " ".join(said(*verb[:-1], "--help").split())
    whole = said(*verb, "--help")
    assert max(map(len, whole.splitlines())) <= 80
    assert "%%" not in whole
    text = " ".join(whole.partition("\n\n")[2].partition("\n\n")[0].split())
    summary, _, more = text.partition(". ")
    assert f" {verb[-1]} {summary[0].lower()}{summary[1:]} " in listed
    found = re.search(r'More: (\S+\.md)(?:, "(.+)")?\.$', more)
    assert found is not None, text
    page = (ROOT / found[1]).read_text("utf-8")
    assert found[2] is None or f"\n## {found[2]}\n" in page


def test_an_error_is_one_line_and_a_traceback_only_with_debug(sample: Sample) -> None:
    done = sample.apply("demo==9.9")
    assert done.code == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        "overlay: expected one of the pinned releases (demo==1.0, demo==2.0), found 'demo==9.9': name one of "
    )
    done = sample.apply("demo==9.9", "--debug")
    assert done.code == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("overlay: expected one of the pinned releases")


def test_a_release_for_tests_is_not_delivered(sample: Sample) -> None:
    sample.apply("demo==1.1").fails(
        "demo==1.1 is pinned for the tests alone", "overlay add-release demo==1.1 --use deliver"
    )
    sample.apply("demo==9.9").fails(
        "expected one of the pinned releases (demo==1.0, demo==2.0), found 'demo==9.9'",
        "overlay add-release demo==9.9 --use deliver",
        "the overlay wheel covers what has the same files",
    )
    sample.apply("other==9.9").fails("expected one of the pinned releases (demo==1.0, demo==2.0, plain==3.0)")


def test_a_release_that_upstream_has_mended_needs_no_patch(sample: Sample) -> None:
    sample.lock.write_text(
        sample.lock.read_text()
        + f'\n[[packages.plain.fixed]]\nversion = "3.1"\nfiles = [{{ path = "plain/core.py", blob = "{"1" * 40}" }}]\n'
    )
    for version in ("3.1", "3.1.2"):
        said = sample.apply(f"plain=={version}").fails(
            f"plain=={version}: expected a release that is patched, found that", "has none of the faults since 3.1"
        )
        assert "add-release" not in said
    sample.apply("plain==3").fails("overlay add-release plain==3 --use deliver")
    sample.apply("plain==x").fails("expected one of the pinned releases (plain==3.0), found 'plain==x'")


def test_names_are_those_of_the_index(sample: Sample) -> None:
    sample.apply("Demo==1.0", "demo==1.0", "DEMO==1.0").succeeds()
    assert [file.name for file in sample.out.glob("*.whl")] == ["demo-1.0+overlay.1-py3-none-any.whl"]


def test_progress_goes_to_stderr_in_plain_lines(sample: Sample) -> None:
    shutil.rmtree(sample.cache)
    done = sample.apply("demo==1.0").succeeds()
    assert done.stdout == ""
    assert "\r" not in done.stderr
    lines = done.stderr.splitlines()
    assert all(line.startswith("overlay: ") for line in lines)
    assert lines[0] == "overlay: looking for demo-1.0-py3-none-any.whl on the package index"
    assert lines[1].startswith("overlay: demo-1.0-py3-none-any.whl: 0.1 MB")
    assert lines[-2] == f"overlay: wrote {sample.out}/demo-1.0+overlay.1-py3-none-any.whl"
    assert lines[-1] == (
        f"overlay: to install: pip install --find-links {sample.out} --constraint {sample.out}/constraints.txt demo"
    )


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((24, 100), b"\rdemo-1.0-py3-none-any.whl:"),
        ((0, 0), b"overlay: demo-1.0-py3-none-any.whl: 0.1 MB"),  # as a container's may be: there tqdm shows nothing
    ],
    ids=["bar", "without a size a line"],
)
def test_progress_on_a_terminal(sample: Sample, size: tuple[int, int], expected: bytes) -> None:
    shutil.rmtree(sample.cache)
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, size)
    running = subprocess.Popen(
        sample.command("apply", "demo==1.0"), cwd=sample.folder, env=sample.environment(), stderr=slave
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            read = os.read(master, 4096)
        except OSError:
            break
        if not read:
            break
        shown += read
    os.close(master)
    assert running.wait() == 0
    assert expected in shown


def test_the_root_is_where_the_lock_is(sample: Sample) -> None:
    sample.overlay("lock", "check", "--root", sample.folder).fails(
        f"expected upstream.lock in {sample.folder}, found none", "--root"
    )
    done = sample.overlay("lock", "check", "--root", "root").succeeds()
    assert done.stdout == f"{sample.lock} is sound\n"


def test_the_programs_own_root_is_found_from_a_folder_that_was_removed(tmp_path: Path) -> None:
    line = [sys.executable, "-P", "-m", "overlay", "lock", "check"]
    done = subprocess.run(
        ["sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh", *line],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "given",
    [
        "--root=root lock",
        "--root root lock",
        "--debug --root root lock",
        "lock --root root",
        "--debug lock --root root",
    ],
)
def test_options_of_every_command_may_stand_before_it(sample: Sample, given: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "overlay", *given.split(), "check"],
        cwd=sample.folder,
        env=sample.environment(),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{sample.lock} is sound\n"), done.stderr


def test_debug_before_the_command(sample: Sample) -> None:
    command = [sys.executable, "-P", "-m", "overlay", "--debug", "--root", str(sample.root), "apply", "--", "demo==9.9"]
    done = subprocess.run(command, env=sample.environment(), capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, "Traceback (most recent call last)" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--json drift", "expected the command before its options, found --json: type overlay COMMAND --json"),
        ("--out x apply", "expected the command before its options, found --out: type overlay COMMAND --out"),
        ("--root x", "expected the command before its options, found --root: type overlay COMMAND --root"),
        ("--root", "expected the command before its options, found --root: type overlay COMMAND --root"),
        ("lock --debug", "the following arguments are required: COMMAND"),
        ("--root x explain", "unrecognized arguments: --root"),
    ],
)
def test_other_options_before_the_command_are_told_where_they_go(tmp_path: Path, given: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "overlay", *given.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith(f"error: {said}"), done.stderr


@pytest.mark.parametrize(
    "arguments", [("apply",), ("lock", "check"), ("lock", "update"), ("lock", "complete", "--checkout", "x")]
)
@pytest.mark.parametrize(
    "library", ["packaging", "pydantic", "tomlkit", "unearth", "installer", "simple_repository", "httpx2", "hatchling"]
)
def test_a_library_that_is_not_installed(
    sample: Sample, tmp_path: Path, arguments: tuple[str, ...], library: str
) -> None:
    """One line that names the extra, from whichever command misses it; those that do not need it do not."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {library!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    sample.variables["PYTHONPATH"] = f"{PROJECT}:{tmp_path}"
    shutil.rmtree(sample.cache)
    done = sample.overlay(*arguments, own=True)
    needs = {
        "apply": {"packaging", "pydantic", "unearth", "installer", "simple_repository", "httpx2", "hatchling"},
        "check": {"packaging", "pydantic"},
        "update": {"packaging", "pydantic", "unearth", "installer", "httpx2"},
        "complete": {"packaging", "pydantic"},
    }[arguments[min(len(arguments), 2) - 1]]
    if library in needs:
        done.fails(
            f"expected the library {library}",
            "found none: this command needs the extra `queue`: in a checkout of modeling-overlay and an environment "
            "of its own, pip install --editable '.[queue]'",
        )
        assert not sample.out.exists()
        assert not sample.patched.exists()
        assert ("scripts/apply.sh" in done.stderr) == (arguments == ("apply",))
    else:
        assert "expected the library" not in done.stderr


def test_a_python_without_any_of_them(sample: Sample) -> None:
    """The interpreter that this environment was made from, without its packages (-S)."""
    done = subprocess.run(
        [getattr(sys, "_base_executable", sys.executable), "-S", "-P", *sample.command("apply")[2:]],
        env=sample.environment(),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "overlay: expected the library packaging, found none: this command needs the extra `queue`"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_nobody_who_reads(sample: Sample, closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *sample.command("apply")],
        cwd=sample.folder,
        env=sample.environment(),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert list(sample.out.glob("*.whl"))


def test_no_home(sample: Sample) -> None:
    sample.variables.update({"XDG_CACHE_HOME": None, "HOME": "/proc/nowhere"})
    sample.apply().fails("/proc/nowhere/.cache/modeling-overlay", "XDG_CACHE_HOME")


@pytest.mark.parametrize("name", ["overlay", "patches", "patches/demo", "scripts", "tests/x", ".git", ""])
def test_products_do_not_go_among_the_sources(sample: Sample, name: str) -> None:
    before = sorted(sample.root.rglob("*"))
    sample.overlay("apply", "--out", sample.root / name).fails("holds this project itself", "--out")
    assert sorted(sample.root.rglob("*")) == before


def test_an_unknown_option_shows_the_usage_of_its_command(sample: Sample) -> None:
    done = sample.overlay("apply", "--bogus")
    assert done.code == 2
    assert done.stderr.startswith("usage: overlay apply ")
    assert "unrecognized arguments: --bogus" in done.stderr


def test_a_size_that_the_lock_has_wrong(sample: Sample) -> None:
    sample.apply("demo==1.0").succeeds()
    found = re.search(r"size = (\d+)", sample.lock.read_text())
    assert found is not None
    sample.edit(found[0], f"size = {int(found[1]) + 1}", count=2)
    sample.apply("demo==1.0").fails(f"expected {int(found[1]) + 1} bytes, found {found[1]}", "upstream.lock")


def test_a_delivered_release_needs_no_revision_before_it_is_built(sample: Sample) -> None:
    text = re.sub(r"built = .*\n", "", sample.lock.read_text(), count=1).replace("revision = 1\n", "", 1)
    sample.lock.write_text(text)
    sample.overlay("lock", "update").succeeds()
    assert "revision = 1\n" in sample.lock.read_text()
    sample.apply("demo==1.0").succeeds()


def test_tables_too_deep_to_read(sample: Sample) -> None:
    sample.lock.write_text("a = " + "[" * 5000 + "]" * 5000 + "\n")
    sample.overlay("lock", "check").fails("a few levels deep")


def test_a_shell_in_the_products_folder_is_told_that_it_was_replaced(sample: Sample) -> None:
    sample.apply().succeeds()
    done = sample.overlay("apply", "--out", ".", cwd=sample.out).succeeds()
    assert done.stderr.splitlines()[-1].endswith(f"cd {sample.out}")
    assert "cd " not in sample.apply().succeeds().stderr


def test_the_checkout_is_found_from_the_folder_it_is_run_in(sample: Sample) -> None:
    """As where the program is installed, and does not lie in a checkout."""
    command = [sys.executable, "-P", "-c", CODE, "lock", "check"]
    environment = sample.environment() | {"PYTHONPATH": str(ROOT)}
    inside = subprocess.run(
        command, cwd=sample.root / "overlay", env=environment, capture_output=True, text=True, check=False
    )
    assert inside.stdout == f"{sample.lock} is sound\n"
    outside = subprocess.run(command, cwd=sample.folder, env=environment, capture_output=True, text=True, check=False)
    assert outside.returncode == 1
    assert "run this from a checkout of modeling-overlay" in outside.stderr


CODE = (
    "import overlay.cli, overlay.commands.arguments as arguments; "
    "arguments.__file__ = '/nowhere/overlay/commands/arguments.py'; overlay.cli.main()"
)
"""The command line, as if it did not lie in a checkout."""


def test_a_reader_who_has_seen_enough_is_no_error(sample: Sample) -> None:
    sample.apply().succeeds()
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", "-m", "overlay", "drift", "--json", "--root", str(sample.root)]
    done = subprocess.run(command, env=sample.environment(), stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, b"roken pipe" in done.stderr, b"Error" in done.stderr) == (141, False, False)


def test_a_python_that_is_too_old() -> None:
    """One line, before anything is imported that it cannot read, which would be a traceback."""
    old = (
        "import runpy, sys; sys.version_info = (3, 10, 1, 'final', 0); runpy.run_module('overlay', run_name='__main__')"
    )
    command = [sys.executable, "-c", old, "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("overlay: expected Python 3.11 or later, found ")
    assert done.stderr.count("\n") == 1
    for name in ("__init__.py", "__main__.py"):
        tree = ast.parse((ROOT / "overlay" / name).read_text("utf-8"), feature_version=(3, 7))
        evaluated = [
            part
            for one in ast.walk(tree)
            if isinstance(one, ast.FunctionDef) and one.returns
            for part in ast.walk(one.returns)
        ]
        assert not any(isinstance(part, ast.Subscript | ast.BinOp) for part in evaluated), name
