"""Each patch that mends a fault is missed by `overlay verify` where it alone is taken out of a build."""

import shutil
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


@pytest.mark.parametrize("fault", SHOWN_BY)
def test_a_mend_that_is_missing_is_noticed(fault: str, tmp_path: Path) -> None:
    project, version, patches, mend = mending(fault)
    left = [patch for patch in patches if patch.file < mend.file or not set(patch.paths) & set(mend.paths)]
    assert len(left) < len(patches)

    def build(experiment: Experiment, kind: str) -> Build:
        environment = f"{experiment.environment}-2.13"
        stock = builds.made_one(PINS, ROOT, project, version, "stock", environment, experiment.beside(kind))
        package, *beside = stock.laid_over
        copy = shutil.copytree(package, tmp_path / "packages")
        places = {path: copy / path.removeprefix("src/") for patch in patches for path in patch.paths}
        for path, content in series.apply(left, {path: places[path].read_bytes() for path in places}).items():
            places[path].write_bytes(content)
        return Build("patched", version, stock.interpreter, [copy, *beside])

    experiment = verify.EXPERIMENTS[SHOWN_BY[fault]]
    report = verify.run(verify.Plan([experiment], ["patched"], build, ranks=1, backend="gloo", keep=False))
    assert report.off
    assert report.tables[0].failed == {}
