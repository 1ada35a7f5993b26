"""One run of pytest on upstream's tests, in the environment of a build of their package."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from overlay import environments, measure, processes
from tests.upstream.outcomes import Outcomes

RECORDER = Path(__file__).with_name("recorder.py")
RANKS = (Path(measure.__file__).with_name("gloo.py"), Path(__file__).with_name("spawned.py"))
POLL = 0.5  # seconds

CLEAN = (0, 1)
"""Exit statuses of a run of pytest that came to its end: all passed, some failed."""


@dataclass(frozen=True)
class Setup:
    """What tests run with.

    Attributes:
        package: the name by which the package under test is imported.
        interpreter: of an environment with pytest.
        paths: what comes first on `PYTHONPATH`; the package has to come from the first of them.
        variables: more of the environment's variables.
        plugins: more plugins of pytest, each a file that imports nothing of this project.
    """

    package: str
    interpreter: Path
    paths: Sequence[Path]
    variables: Mapping[str, str] = field(default_factory=dict)
    plugins: Sequence[Path] = ()


def transformers(*paths: Path, variables: Mapping[str, str] | None = None) -> Setup:
    """That of the tests of transformers, with a build of it on a path."""
    return Setup("transformers", environments.python("upstream-2.13"), paths, variables or {}, RANKS)


def run(
    folder: Path,
    arguments: Sequence[str],
    setup: Setup,
    *,
    timeout: float = float("inf"),
    watch: Callable[[Outcomes], None] = lambda outcomes: None,
) -> tuple[int | None, Outcomes]:
    """The exit status and the outcomes of `pytest ARGUMENT...` in `folder`; None where it took too long.

    Args:
        folder: where it runs. What it writes, temporary files too, goes into its parent, which has nothing else.
        timeout: seconds.
        watch: is told what is known, several times a second.

    None of the processes that it starts outlives the call, however it ends.
    """
    beside = folder.parent
    plugins, temporary = beside / "plugins", beside / "tmp"
    plugins.mkdir()
    temporary.mkdir()
    named = []
    for plugin in (RECORDER, *setup.plugins):
        shutil.copy(plugin, plugins / f"overlay_{plugin.name}")
        named += ["-p", f"overlay_{plugin.stem}"]
    file = beside / "outcomes.jsonl"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (*setup.paths, plugins))),
        "OVERLAY_OUTCOMES": str(file),
        "OVERLAY_PACKAGE": setup.package,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(beside / "huggingface"),
        "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **setup.variables,
    }
    for name in ("PYTEST_ADDOPTS", "PYTEST_DEBUG_TEMPROOT"):
        environment.pop(name, None)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # half of the time to import transformers
    command = [str(setup.interpreter), "-m", "pytest", *named, "-p", "no:cacheprovider", *arguments]
    end = time.monotonic() + timeout
    with _group(command, folder, environment, beside / "output.txt") as process:
        while process.poll() is None and time.monotonic() < end:
            watch(Outcomes.read(file))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL)
        code = process.poll()
    outcomes = Outcomes.read(file)
    watch(outcomes)
    return code, outcomes


@contextlib.contextmanager
def _group(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a process group of its own, which is killed at the end."""
    with output.open("wb") as said:
        process = processes.start(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
        try:
            yield process
        finally:
            processes.kill_group(process)
