"""The builds of transformers and TransformerEngine that the proof runs on, and the processes that it runs them in."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from overlay import environments, processes
from overlay.measure import builds, owed, rows
from overlay.measure.experiments.experiment import Experiment, Row
from overlay.queue import lock, source

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Variant:
    """One build of a release."""

    kind: Literal["stock", "patched", "latest"]
    release: str
    project: str = "transformers"
    by: Literal["wheel", "overlay"] | None = None
    """How a patched one is delivered; None leaves it to the option `--delivery`."""

    def __str__(self) -> str:
        return f"{self.kind}-{self.release}" + (" by the overlay" if self.by == "overlay" else "")

    @property
    def delivery(self) -> Literal["wheel", "overlay"]:
        """How its files come to be what they are: in the wheel, or laid over the stock wheel by the overlay."""
        if self.kind != "patched" or self.by or _delivery == "wheel":
            return self.by or "wheel"
        return "wheel" if _delivery == "both" and self in BY_WHEEL else "overlay"

    @property
    def label(self) -> str:
        """What its version has in it (PEP 440): the overlay changes no version."""
        return "+overlay." if (self.kind, self.delivery) == ("patched", "wheel") else ""


PINNED = ("5.14.1", "5.22.2")
STOCK = [Variant("stock", release) for release in PINNED]
PATCHED = [Variant("patched", release) for release in PINNED]
LATEST = Variant("latest", "5.24.0")
"""Upstream with a fix of its own, as it was released."""
PATCHED_LATEST = Variant("patched", LATEST.release)
VARIANTS = [*STOCK, *PATCHED, LATEST, PATCHED_LATEST]
BY_WHEEL = (PATCHED[0], Variant("patched", "2.13.0", "transformer_engine"))
"""What is delivered by its patched wheel in a test run that tries both ways."""

_delivery = "wheel"


def deliver_by(choice: str) -> None:
    """Decides how the patched builds are delivered (`--delivery`): by `wheel`, `overlay`, or `both`.

    `both` is `BY_WHEEL` by wheels and all others by the overlay. The files are the same bytes (tests/deliver), so each
    way is tried with each test, and nothing twice.
    """
    global _delivery
    _delivery = choice


@functools.cache
def products() -> Path:
    """The folder that `overlay apply` filled for this test run."""
    folder = Path(_scratch().name, "dist")
    command = [sys.executable, "-P", "-m", "overlay", "apply", "--out", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="overlay-test-")


def wheel(variant: Variant) -> Path:
    """The wheel of a variant: from the index or the cache, or built for this test run."""
    project, _, release = lock.read(ROOT / "upstream.lock").find(f"{variant.project}=={variant.release}")
    if variant.kind != "patched":
        return source.fetch(project, release.wheel)
    assert release.built is not None
    return products() / release.built.file


def installed(variant: Variant) -> Path:
    """The folder to put on PYTHONPATH for a variant."""
    beside = builds.beside(variant.release) if variant.project == "transformers" else []
    if variant.delivery == "overlay":
        return overlaid(environments.variant(wheel(replace(variant, kind="stock")), overlay_wheel(), *beside))
    return environments.variant(wheel(variant), *beside)


def overlay_wheel() -> Path:
    """The overlay wheel, built for this test run."""
    (file,) = products().glob("modeling_overlay-*.whl")
    return file


@functools.cache
def overlaid(folder: Path) -> Path:
    """A folder to put on PYTHONPATH that makes `folder` one of packages as site-packages is, `.pth` files and all."""
    place = Path(_scratch().name, f"site-{folder.name}")
    place.mkdir(exist_ok=True)
    packages = place / "packages"
    packages.symlink_to(folder)
    lines = ["import site, sys", f"sys.path.insert(sys.path.index({str(place)!r}) + 1, {str(packages)!r})"]
    lines.append(f"site.addsitedir({str(packages)!r})")
    (place / "sitecustomize.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return place


def run(
    script: Path,
    *arguments: object,
    variant: Variant,
    torch: str = "2.13",
    environment: str = "train",
    beside: Sequence[str] = (),
    timeout: float = 1200,
) -> Any:
    """What `script RESULT.json ARGUMENT...` wrote to its first argument, run in a process of its own.

    Args:
        environment: what there is beside torch: `train` or another environment that is made for it.
        beside: exact pins of packages to lay over it, too: those that require transformers, and would bring another.
        timeout: seconds.

    Raises:
        AssertionError: it failed, or took longer than `timeout` seconds; says what it wrote to stderr. None of the
            processes that it started outlives it.
    """
    laid_over = [installed(variant), *([environments.variant(*beside)] if beside else [])]
    interpreter = environments.python(f"{environment}-{torch}")
    return run_worker(
        script, *arguments, on=str(variant), interpreter=interpreter, laid_over=laid_over, timeout=timeout
    )


def experiment(
    which: Experiment,
    variant: Variant,
    *,
    ranks: Sequence[int] = (),
    torch: str = "2.13",
    beside: Sequence[str] = (),
    timeout: float = 1200,
    **told: Any,
) -> tuple[Row, list[Row]]:
    """What an experiment finds with a variant: the versions that it had, and its rows.

    Args:
        ranks: the numbers of ranks of its groups.
        beside: as `run` has it.
        timeout: seconds that a row may take.
        told: what its worker is asked in the place of what `overlay verify` asks.

    Raises:
        WorkerError: it failed, took too long, or its rows are not those that it owes.
    """
    laid_over = [installed(variant), *([environments.variant(*beside)] if beside else [])]
    interpreter = str(environments.python(f"{which.environment}-{torch}"))
    build = builds.Build(variant.kind, variant.release, interpreter, laid_over)
    variables = {**build.variables(0), "MODELING_OVERLAY": "strict"}  # without the overlay wheel it says nothing
    asked = {"ranks": ranks, "backend": "gloo", "name": "", "meeting": 60, **which.told, **told}
    about, *found = owed.checked(rows.read([interpreter, "-P", str(which.worker)], variables, asked, timeout))
    return about, found


def run_worker(
    script: Path,
    *arguments: object,
    on: str,
    interpreter: Path,
    laid_over: Sequence[Path],
    variables: Mapping[str, str] | None = None,
    timeout: float = 1200,
) -> Any:
    """As `run`, with an interpreter, folders to put on PYTHONPATH, and environment variables beside the usual ones.

    Args:
        on: what it runs on, for the message of a failure.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, laid_over)),
        **builds.VARIABLES,
        "MODELING_OVERLAY": "strict",  # without the overlay wheel it says nothing
        **(variables or {}),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # half of the time to import transformers
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [str(interpreter), "-P", str(script), str(result), *map(str, arguments)]
        code, said = run_group(command, environment, timeout)
        assert code == 0, (
            f"{script.name} with {on}: {'timed out' if code is None else f'exit status {code}'}\n{said[-4000:]}"
        )
        return json.loads(result.read_text("utf-8"))


def run_group(command: Sequence[str], environment: dict[str, str], timeout: float) -> tuple[int | None, str]:
    """The exit status and stderr of a command, None where it took too long; its process group is gone afterwards."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = processes.start(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        finally:
            code = process.poll()
            processes.kill_group(process)
        said.seek(0)
        return code, said.read()
