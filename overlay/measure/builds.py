"""The builds that are measured, and what starts their workers.

By default these are made from the pins, in environments that are cached (overlay/environments): stock, patched, and the
latest release that is pinned. With `--here` it is what this interpreter has.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlay import environments
from overlay.errors import OverlayError

if TYPE_CHECKING:
    from overlay.queue.lock import Lock, Release

PROJECT = "transformers"

KINDS = ("stock", "patched", "latest")
"""A pinned release as upstream has it, the same one with the patches, and upstream's newest."""

TOKENIZERS = {"5.14.1": "tokenizers==0.22.2", "5.22.2": "tokenizers==0.23.1", "5.24.0": "tokenizers==0.23.1"}
"""Each release asks for its own range of tokenizers, so they are laid over the environment together."""

VARIABLES = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""For every process that imports transformers here: nothing is fetched, a fork needs no warning, and cuBLAS can be
deterministic."""

_LEFT_OUT = frozenset({"PYTHONDONTWRITEBYTECODE", "PYTHONOPTIMIZE"})
"""Variables of the user that a worker is without: bytecode halves its imports, and its assertions are part of it."""


@functools.cache
def _importable() -> str:
    """A folder to import this program from: its checkout. Where it is installed, other packages are beside it, which no
    worker is to have before its own; so it is one with nothing else in it, until this process ends."""
    top = Path(__file__).resolve().parents[2]
    if (top / "upstream.lock").is_file():
        return str(top)
    folder = Path(_temporary().name)
    (folder / "overlay").symlink_to(top / "overlay")
    return str(folder)


@functools.cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="overlay-import-")


@dataclass(frozen=True)
class Build:
    """One column.

    Attributes:
        kind: one of `KINDS`, or `here`.
        release: the pinned version; for `here`, empty.
        interpreter: the Python that runs its worker.
        laid_over: folders that come first on its path.
    """

    kind: str
    release: str
    interpreter: str
    laid_over: Sequence[Path]

    def __str__(self) -> str:
        return f"{self.kind} {self.release}".rstrip()

    def variables(self, threads: int) -> Mapping[str, str]:
        """The environment of its worker."""
        inherited = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
        before = [] if self.kind != "here" else [inherited.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, [*map(str, self.laid_over), *before, _importable()]))
        limited = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        return inherited | VARIABLES | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"} | limited


def beside(release: str) -> list[str]:
    """What has to be laid over an environment with a release of transformers: exact pins.

    Raises:
        OverlayError: it is not known.
    """
    if release not in TOKENIZERS:
        raise OverlayError(
            f"expected one of the releases {', '.join(TOKENIZERS)}, found {release}: give it its tokenizers in "
            "overlay/measure/builds.py"
        )
    return [TOKENIZERS[release]]


def here() -> list[Build]:
    """What this interpreter has."""
    return [Build("here", "", sys.executable, ())]


def releases(lock: "Lock", project: str = PROJECT) -> list[str]:
    """The releases of a project that are delivered, in the order of the lock."""
    return [release.version for name, _, release in lock.deliveries() if name == project]


def latest(lock: "Lock", project: str = PROJECT) -> str:
    """The newest release that is pinned, which has a fix of upstream's own."""
    from packaging.version import Version

    return max((release.version for release in lock.packages[project].releases), key=Version)


def made(lock: "Lock", root: Path, release: str | None, kinds: Sequence[str], torch: str) -> list[Build]:
    """The builds of a release of transformers and of the latest one, made where the cache does not have them.

    Args:
        lock: the pins.
        root: the checkout, for `patches/`.
        release: which is measured as stock and patched; None stands for the last one before the latest.
        kinds: which of `KINDS`.
        torch: the environment, `2.13` for `train-2.13`.

    Raises:
        OverlayError: the release is not pinned, or something cannot be fetched or made.
    """
    pinned = releases(lock)
    chosen = release or (pinned[-2] if len(pinned) > 1 else pinned[-1])
    if chosen not in pinned:
        raise OverlayError(f"expected one of the releases {', '.join(pinned)}, found {chosen}: name one of these")
    return [made_one(lock, root, PROJECT, chosen, kind, f"train-{torch}") for kind in kinds]


def made_one(
    lock: "Lock", root: Path, project: str, release: str, kind: str, environment: str, extra: Sequence[str] = ()
) -> Build:
    """One build, made where the cache does not have it.

    Args:
        release: which is `stock` and `patched`; `latest` is the newest that is pinned.
        environment: of `overlay.environments`.
        extra: exact pins to lay over it, without what they require.

    Raises:
        OverlayError: something cannot be fetched or made.
    """
    version = latest(lock, project) if kind == "latest" else release
    _, _, pin = lock.find(f"{project}=={version}")
    interpreter = str(environments.python(environment))
    beside_it = beside(version) if project == PROJECT else []
    folders = [_patched(lock, root, project, pin, beside_it) if kind == "patched" else _stock(project, pin, beside_it)]
    if extra:
        folders.append(environments.variant(*extra))
    return Build(kind, version, interpreter, folders)


def _stock(project: str, pin: "Release", beside_it: Sequence[str]) -> Path:
    from overlay.queue import source

    return environments.variant(source.fetch(project, pin.wheel), *beside_it)


def _patched(lock: "Lock", root: Path, project: str, pin: "Release", beside_it: Sequence[str]) -> Path:
    from overlay.deliver import apply, wheel

    derived = apply.derive(root / "patches", *lock.find(f"{project}=={pin.version}"))
    with tempfile.TemporaryDirectory(prefix="overlay-bench-") as folder:
        file = Path(folder, pin.built_file)
        sha256 = wheel.save(derived.members, file)
        if pin.built is None or sha256 != pin.built.sha256:
            expected = "one in the lock" if pin.built is None else pin.built.sha256
            raise OverlayError(f"{pin.built_file}: expected sha256 {expected}, found {sha256}: run overlay lock update")
        return environments.variant(file, *beside_it)
