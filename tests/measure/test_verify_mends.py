"""`overlay verify` notices where a patch that mends a fault is taken out of a build, or nothing is checkpointed."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from overlay.measure import builds, verify
from overlay.measure.builds import Build
from overlay.measure.experiments.experiment import Experiment
from overlay.queue import lock, series
from overlay.queue.series import Patch
from tests.variants import ROOT

SHOWN_BY = {
    "fsdp2-gradients": "fsdp2",
    "fsdp2-nested": "fsdp2",
    "training-cache": "contracts",
    "peft-zero3": "zero3",
    "forward-replaced": "contracts",
    "requires-grad": "te",
}
"""The experiment that shows a fault."""

PINS = lock.read(ROOT / "upstream.lock")


def mending(fault: str) -> tuple[str, str, list[Patch], Patch]:
    """The first release that is delivered with a mend of a fault, its project, its patches, and the one that mends."""
    for project, _, release in PINS.deliveries():
        patches = series.read(ROOT / "patches" / str(release.series)).for_delivery("wheel")
        for patch in patches:
            if fault in [one.code for one in patch.faults]:
                return project, release.version, list(patches), patch
    raise LookupError(fault)


def test_every_fault_has_an_experiment() -> None:
    files = sorted((ROOT / "patches").glob("*/*.patch"))
    assert {one.code for file in files for one in series.read_patch(file).faults} == set(SHOWN_BY)


def off(name: str, project: str, version: str, change: Callable[[Path], None]) -> list[str]:
    """What `overlay verify` says of a release, as a patched one, whose files `change` has changed."""

    def build(experiment: Experiment, kind: str) -> Build:
        environment = f"{experiment.environment}-2.13"
        stock = builds.made_one(PINS, ROOT, project, version, "stock", environment, experiment.beside(kind))
        package, *beside = stock.laid_over
        packages = Path(folder, "packages")
        change(shutil.copytree(package, packages))
        return Build("patched", version, stock.interpreter, [packages, *beside])

    plan = verify.Plan([verify.EXPERIMENTS[name]], ["patched"], build, ranks=1, backend="gloo", keep=False)
    with tempfile.TemporaryDirectory() as folder:  # 60 MB, which pytest would keep
        report = verify.run(plan)
    assert report.tables[0].failed == {}
    return report.off


@pytest.mark.parametrize("fault", SHOWN_BY)
def test_a_mend_that_is_missing_is_noticed(fault: str) -> None:
    project, version, patches, mend = mending(fault)
    left = [patch for patch in patches if patch.file < mend.file or not set(patch.paths) & set(mend.paths)]
    assert len(left) < len(patches)

    def change(packages: Path) -> None:
        places = {path: packages / path.removeprefix("src/") for patch in patches for path in patch.paths}
        for path, content in series.apply(left, {path: places[path].read_bytes() for path in places}).items():
            places[path].write_bytes(content)

    assert off(SHOWN_BY[fault], project, version, change)


def test_right_gradients_without_a_checkpoint_are_noticed() -> None:
    def change(packages: Path) -> None:
        file = packages / "transformers" / "modeling_layers.py"
        text = file.read_text("utf-8")
        assert text.count("if self.gradient_checkpointing and") == 1
        file.write_text(text.replace("if self.gradient_checkpointing and", "if False and"), "utf-8")

    found = off("fsdp2", "transformers", "5.14.1", change)
    # All but those that PyTorch's own wrapper checkpoints
    assert len(found) == 2 * (14 - 1)
    assert all(line.endswith(": no checkpoint") for line in found)
