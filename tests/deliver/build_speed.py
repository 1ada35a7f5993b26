"""How long it takes to build the patched wheel of transformers 5.14.1 and its index from a warm cache, as ratios.

Three ways in turn, in one run: `scripts/apply.sh transformers==5.14.1`; `sha256sum` and `cp` of upstream's wheel, which
is the least that any way has to do; and the usual way by hand, `wheel unpack`, `git apply` and `wheel pack`.
`scripts/test.sh speed` prints the median of each, and the ratios.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from overlay.queue import lock, series, source
from tests import variants

ROUNDS = 7
RELEASE = "transformers==5.14.1"


@dataclass(frozen=True)
class Speed:
    """Seconds, the median of each way."""

    apply: float
    copy: float
    by_hand: float

    @property
    def to_copy(self) -> float:
        """How many times as long as `sha256sum` and `cp` our way takes."""
        return self.apply / self.copy

    @property
    def to_by_hand(self) -> float:
        """How many times as long as the way by hand our way takes."""
        return self.apply / self.by_hand

    def table(self) -> str:
        """The figures as text."""
        return "\n".join(
            (
                f"building {RELEASE} from a warm cache, index included; median of {ROUNDS}, interleaved",
                f"  scripts/apply.sh                     {self.apply:6.2f} s",
                f"  sha256sum and cp of the wheel        {self.copy:6.2f} s   ratio {self.to_copy:4.1f} (<= 10; aim 5)",
                f"  wheel unpack, git apply, wheel pack  {self.by_hand:6.2f} s   ratio {self.to_by_hand:4.2f} (<= 1/6)",
            )
        )


def measure() -> Speed:
    """Runs all three ways ROUNDS times, in turn."""
    project, package, release = lock.read(variants.ROOT / "upstream.lock").find(RELEASE)
    wheel = source.fetch(project, release.wheel)
    assert release.series is not None
    patches = [patch.file for patch in series.read(variants.ROOT / "patches" / release.series).for_delivery("wheel")]
    with tempfile.TemporaryDirectory(prefix="overlay-speed-") as temporary:
        folder = Path(temporary)

        def apply() -> None:
            _run([str(variants.ROOT / "scripts" / "apply.sh"), RELEASE, "--out", str(folder / "dist")], folder)

        def copy() -> None:
            _run(["sha256sum", str(wheel)], folder)
            _run(["cp", str(wheel), str(folder / "copy.whl")], folder)

        def by_hand() -> None:
            _run([sys.executable, "-m", "wheel", "unpack", "--dest", str(folder / "unpacked"), str(wheel)], folder)
            tree = folder / "unpacked" / f"{project}-{release.version}"
            depth = len(Path(package.prefix).parts) + 1
            environment = {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
            _run(["git", "apply", f"-p{depth}", *map(str, patches)], tree, environment)
            _run([sys.executable, "-m", "wheel", "pack", "--dest-dir", str(folder), str(tree)], folder)
            _run(["rm", "-r", str(folder / "unpacked")], folder)

        apply()  # fills the caches
        times: dict[Callable[[], None], list[float]] = {way: [] for way in (apply, copy, by_hand)}
        for _ in range(ROUNDS):
            for way, seconds in times.items():
                begin = time.perf_counter()
                way()
                seconds.append(time.perf_counter() - begin)
        return Speed(*(statistics.median(seconds) for seconds in times.values()))


def _run(command: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, cwd=folder, env=kept | (environment or {}), check=True, capture_output=True)
