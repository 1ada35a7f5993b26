"""The builds of transformers that are measured, and what starts their workers.

By default these are made from the pins, in environments that are cached (overlay/environments): stock, patched, and the
latest release that is pinned. With `--here` it is what this interpreter has.
"""

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

TOKENIZERS = {"5.14.1": "tokenizers==0.22.2", "5.22.2": "tokenizers==0.23.1", "5.24.0": "tokenizers==0.23.1"}
"""Each release asks for its own range of tokenizers, so they are laid over the environment together."""

VARIABLES = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""For every process that imports transformers here: nothing is fetched, and a fork needs no warning."""


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
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        package = str(Path(__file__).resolve().parents[2])
        before = [] if self.kind != "here" else [inherited.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, [*map(str, self.laid_over), *before, package]))
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


def releases(lock: "Lock") -> list[str]:
    """The releases of transformers that are delivered, in the order of the lock; the last one is the latest."""
    return [release.version for project, _, release in lock.deliveries() if project == PROJECT]


def made(lock: "Lock", root: Path, release: str | None, kinds: Sequence[str], torch: str) -> list[Build]:
    """The builds of a release and of the latest one, made where the cache does not have them.

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
    interpreter = str(environments.python(f"train-{torch}"))
    found = []
    for kind in kinds:
        version = pinned[-1] if kind == "latest" else chosen
        _, _, pin = lock.find(f"{PROJECT}=={version}")
        folder = _patched(lock, root, pin) if kind == "patched" else _stock(pin)
        found.append(Build(kind, version, interpreter, (folder,)))
    return found


def _stock(pin: "Release") -> Path:
    from overlay.queue import source

    return environments.variant(source.fetch(PROJECT, pin.wheel), *beside(pin.version))


def _patched(lock: "Lock", root: Path, pin: "Release") -> Path:
    from overlay.deliver import apply, wheel

    derived = apply.derive(root / "patches", *lock.find(f"{PROJECT}=={pin.version}"))
    with tempfile.TemporaryDirectory(prefix="overlay-bench-") as folder:
        file = Path(folder, pin.built_file)
        sha256 = wheel.save(derived.members, file)
        if pin.built is None or sha256 != pin.built.sha256:
            expected = "one in the lock" if pin.built is None else pin.built.sha256
            raise OverlayError(f"{pin.built_file}: expected sha256 {expected}, found {sha256}: run overlay lock update")
        return environments.variant(file, *beside(pin.version))
