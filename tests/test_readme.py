"""Every command in README.md and docs/ works, in a fresh clone, in the order in which they stand there."""

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest

from overlay import commands, environments, processes
from overlay.queue import lock, source
from tests.ports import reserved
from tests.variants import PATCHED, ROOT, installed, run_worker

README = (ROOT / "README.md").read_text("utf-8")
PAGES = {path.name: path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}


def commands_of(page: str) -> list[str]:
    """The lines of its `sh` blocks, without comments."""
    return [
        line.partition(" #")[0].strip()
        for block in re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if line.partition("#")[0].strip()
    ]


COMMANDS = commands_of(README)
LATER = [command for page in PAGES.values() for command in commands_of(page) if command not in COMMANDS]
"""Those of docs/, which stand on what README.md has made: a `.venv`, and `dist/`."""

PROGRAMS = [
    program
    for page in (README, *PAGES.values())
    for program in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
]

READ_BY_TESTS: dict[str, tuple[str, ...]] = {
    "publishing.md": ("shell", "toml", "dockerfile"),
    "scaling.md": ("py",),
}
"""Blocks of other languages in the pages of docs/, which tests of their own take from there and run."""

PORT = "8765"
"""Which README.md gives to its server; here it may be somebody else's."""

CHECKOUT_RELEASE = "5.22.2"
MODEL_TEST = """
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

def test_gradient_checkpointing():
    assert not LlamaDecoderLayer.gradient_checkpointing
"""
"""In the place of upstream's own tests, which are in no wheel."""


def test_no_code_block_is_left_out() -> None:
    assert len(COMMANDS) == len(set(COMMANDS)) >= 10
    assert set(re.findall(r"^```(\S+)$", README, re.MULTILINE)) == {"sh", "python"}
    assert README.count("```python") == 1
    for name, page in PAGES.items():
        blocks = set(re.findall(r"^```(\S+)$", page, re.MULTILINE))
        assert blocks <= {"sh", "python", "text", *READ_BY_TESTS.get(name, ())}, f"{name}: {blocks}"


SHOWN = [
    (name, line.partition("  #")[0].strip())
    for name, page in PAGES.items()
    for block in re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if re.match(r"(\.venv/bin/)?(overlay|git|aws|pip|python) ", line)
]
"""What is not run as it stands: it takes minutes, or needs another machine, or an editor."""


@pytest.mark.parametrize(("name", "command"), SHOWN, ids=[f"{name}-{number}" for number, (name, _) in enumerate(SHOWN)])
def test_shown_commands_are_well_formed(name: str, command: str) -> None:
    checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    for part in command.split(" && "):
        program, *arguments = shlex.split(part)
        if Path(program).name == "overlay":
            _, unknown = commands.parser().parse_known_args(arguments)
            assert not unknown


@pytest.mark.parametrize("name", sorted({name for name, _ in SHOWN}))
def test_why_a_shown_command_is_not_run_is_said_before_it(name: str) -> None:
    """A GPU, another host, an editor, time, or something of the reader's that it needs or changes."""
    for fence in re.finditer(r"^```text\n(.*?)^```", PAGES[name], re.DOTALL | re.MULTILINE):
        if any((name, line.partition("  #")[0].strip()) in SHOWN for line in fence[1].splitlines()):
            before = " ".join(PAGES[name][: fence.start()].strip().split("\n\n")[-1].split())
            assert re.search(
                r"GPU|minute|server|bucket|page itself|editor|in the lock|is installed|checkout|work tree", before
            ), fence[0]


def test_what_needs_a_gpu_or_another_machine_is_marked() -> None:
    for page in (README, *PAGES.values()):
        for fence in re.finditer(r"^```(\S+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
            language, block = fence.groups()
            before = "".join(page[: fence.start()].strip().split("\n\n")[-3:])
            if re.search(r"(^|[ -])gpu\b", block, re.MULTILINE):
                assert "GPU" in before, block
            if language == "sh":
                assert not re.search(r"\w+://(?!127\.0\.0\.1)", block), block


def test_continuous_integration_runs_the_tests_as_the_readme_gives_them() -> None:
    suites = ["scripts/test.sh", "scripts/test.sh te"]
    assert (ROOT / ".ci" / "run").read_text("utf-8").splitlines()[-2:] == suites
    assert set(suites) <= set(COMMANDS)


class Clone:
    """A fresh clone with a checkout of upstream beside it, and an empty virtual environment that is active.

    Its server listens to a port of this run's own.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.folder = folder / "modeling-overlay"
        self.environment = folder / "environment"
        self.background: list[subprocess.Popen[bytes]] = []
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        self.git(self.folder, "init", "--quiet")
        subprocess.run([sys.executable, "-m", "venv", str(self.environment)], check=True)
        (self.environment / "bin" / "uv").symlink_to(Path(sys.executable).parent / "uv")
        self.commit = self.checkout(folder / "transformers")
        self.fork(folder / "TransformerEngine-fork")

    def git(self, folder: Path, *arguments: str) -> str:
        identity = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")
        done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def checkout(self, folder: Path) -> str:
        """A repository with the files of a release where upstream's git tree has them; gives its commit."""
        project, package, release = lock.read(ROOT / "upstream.lock").find(f"transformers=={CHECKOUT_RELEASE}")
        with zipfile.ZipFile(source.fetch(project, release.wheel)) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(f"{project}/")]
            wheel.extractall(folder / package.prefix, names)
        tests = folder / "tests" / "models" / "llama"
        tests.mkdir(parents=True)
        (folder / "conftest.py").touch()
        (tests / "test_modeling_llama.py").write_text(MODEL_TEST, "utf-8")
        self.git(folder, "init", "--quiet")
        self.git(folder, "add", "--force", ".")
        self.git(folder, "commit", "--quiet", "--message", "upstream")
        return self.git(folder, "rev-parse", "HEAD")

    def fork(self, folder: Path) -> None:
        """A tree of TransformerEngine with version checks of its own."""
        project, _, release = lock.read(ROOT / "upstream.lock").find("transformer_engine==2.13.0")
        with zipfile.ZipFile(source.fetch(project, release.wheel)) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(f"{project}/")])
        (folder / project / "common" / "__init__.py").write_text("# of the fork\n", "utf-8")

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
        kept["PATH"] = f"{self.environment / 'bin'}{os.pathsep}{kept['PATH']}"
        kept |= {"VIRTUAL_ENV": str(self.environment), "PIP_NO_COMPILE": "1", "PYTHON": sys.executable}
        shell = ["bash", "-c", command.removesuffix("&")]
        if command.endswith("&"):
            nothing = subprocess.DEVNULL
            process = subprocess.Popen(
                shell, cwd=self.folder, env=kept, start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing
            )
            self.background.append(process)
            deadline = time.monotonic() + 600
            while process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port)):
                    return subprocess.CompletedProcess(shell, 0, "", "")
                time.sleep(0.05)
            return subprocess.CompletedProcess(
                shell, 1, "", f"{command}: it ended with {process.returncode}, or does not answer"
            )
        return subprocess.run(shell, cwd=self.folder, env=kept, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    with reserved() as port:
        clone = Clone(tmp_path_factory.mktemp("readme"), port)
        yield clone
        for process in clone.background:
            processes.kill_group(process)


@pytest.mark.parametrize("command", list(dict.fromkeys([*COMMANDS, *LATER])))
def test_command(command: str, clone: Clone) -> None:
    done = clone.run(prepared(command, clone))
    assert done.returncode == 0, done.stderr
    if "pip install" in command and ".venv" not in command:
        assert expected(command, clone) in clone.run("pip list --format freeze").stdout
        checked = clone.run("pip check")
        assert checked.returncode == 0, checked.stdout
    if "--from-tree" in command:
        patched = Path("transformer_engine", "pytorch", "ops", "fuser.py")
        assert b"Modified by modeling-overlay" in (clone.folder / command.split()[-1] / patched).read_bytes()


def test_programs(tmp_path: Path) -> None:
    """Each, with a model that reentrant checkpointing trains wrongly, prints that, and stops."""
    program = tmp_path / "program_worker.py"
    program.write_text(
        "import json, pathlib, sys\n"
        "import overlay\n"
        "from transformers import MixtralConfig, MixtralForCausalLM\n"
        "sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)\n"
        "config = MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=2, output_router_logits=True)\n"
        "model = MixtralForCausalLM(config)\n"
        'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})\n'
        "model.train()\n"
        "told = []\n"
        + "".join(map(tried, PROGRAMS))
        + "pathlib.Path(sys.argv[1]).write_text(json.dumps(told), 'utf-8')\n",
        encoding="utf-8",
    )
    found = run_worker(
        program,
        on="README.md",
        interpreter=environments.python("train-2.13"),
        laid_over=[installed(PATCHED[0]), ROOT],
    )
    assert len(found) == len(PROGRAMS)
    assert all("captured-outputs" in codes for codes in found)


def tried(program: str) -> str:
    """The program as a part of another, which notes what stopped it."""
    return (
        f"try:\n{indent(program, '    ')}"
        "except overlay.CheckError as error:\n"
        "    told.append([finding.code for finding in error.findings])\n"
    )


def expected(command: str, clone: Clone) -> str:
    """The line of `pip list` that an installing command of the README has to bring about."""
    named = re.search(r"-c (dist\S*)/constraints\.txt (\S+)$", command)
    if named is not None:
        constraints = (clone.folder / named[1] / "constraints.txt").read_text("utf-8")
        pinned = re.search(rf"^{named[2]}==(\S+)", constraints, re.MULTILINE)
        assert pinned is not None
        return f"{named[2]}=={pinned[1]}\n"
    stock = re.search(r" (\S+)===(\S+)$", command)
    if stock is not None:
        return f"{stock[1]}=={stock[2]}\n"
    return f"+overlay.g{clone.commit[:12]}" if "dist-commit" in command else "transformers==5.14.1\n"


def prepared(command: str, clone: Clone) -> str:
    """The command as it is run here: what would run this test again, or needs another torch, only collects."""
    if command.startswith("scripts/test.sh te --"):  # as they stand, in tests/transformer_engine/native
        return f"{command} --help"
    if command.startswith("scripts/test.sh") and "--checkout" not in command:
        return f"{command} --collect-only --quiet"
    if "lock complete" in command:
        pins = clone.folder / "upstream.lock"
        pins.write_text(
            pins.read_text("utf-8").replace('id = "cdb75de"', f'id = "{clone.commit[:7]}"'), encoding="utf-8"
        )
    return command.replace(PORT, str(clone.port))
