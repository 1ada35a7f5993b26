"""Upstream's mixins, from the sdist of a release, on the families of `families.py`."""

import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from overlay.queue import lock, source
from tests.upstream import families, session
from tests.upstream.outcomes import Outcomes
from tests.variants import ROOT, Variant, installed

WORKER = Path(__file__).with_name("mixins_worker.py")
FILE = "test_families.py"
TIMEOUT = 1800.0

CHECKPOINTING = (
    "test_training_gradient_checkpointing",
    "test_training_gradient_checkpointing_use_reentrant_false",
    "test_training_gradient_checkpointing_use_reentrant_true",
)
"""They mock the forward of a layer, and count its calls; a subtest for each class of models."""

COMMON = (
    *CHECKPOINTING,
    "test_gradient_checkpointing_backward_compatibility",
    "test_gradient_checkpointing_enable_disable",
    "test_peft_gradient_checkpointing_enable_disable",
    "test_enable_input_require_grads",
    "test_training",
)
"""What is run of ModelTesterMixin on every family."""

WITH_TOKENS = ("test_enable_input_require_grads_with_gradient_checkpointing",)
"""And on the families that embed tokens: on the others it skips itself."""

ON_RELEASE = {
    "5.14.1": {
        "training": ("test_training_overfit",),
        "tensor parallel": ("test_tp_backward",),
        "fsdp": (),  # the mixin is not there yet
    },
    "5.22.2": {
        "training": ("test_training_overfit",),
        "tensor parallel": ("test_tp_backward",),
        "fsdp": ("test_fsdp2_plan_vs_ddp_0_untied", "test_fsdp2_save_load"),
    },
}
"""What is run of the other mixins of a release, on the families that name them."""


def names(release: str, only: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """The tests that are run, as family and test."""
    for name, family in families.FAMILIES.items():
        if only and name not in only:
            continue
        tests = [*COMMON, *(test for mixin in family.mixins for test in ON_RELEASE[release][mixin])]
        if family.inputs not in families.WITHOUT_TOKENS:
            tests += WITH_TOKENS
        yield from ((name, test) for test in tests)


def identifier(family: str, test: str) -> str:
    """pytest's name of a test."""
    return f"{FILE}::{family}::{test}"


def run(variant: Variant, only: Sequence[str] = (), variables: dict[str, str] | None = None) -> Outcomes:
    """The outcomes of upstream's tests with a build, on all families or some.

    Raises:
        AssertionError: the run did not come to its end, or another build was tested.
    """
    build = installed(variant)
    with tempfile.TemporaryDirectory(prefix="overlay-mixins-") as scratch:
        folder = Path(scratch, "run")
        unpack(variant.release, folder / "tests")
        shutil.copy(WORKER, folder / FILE)
        shutil.copy(families.__file__, folder / "families.py")
        tests = [identifier(*test) for test in names(variant.release, only)]
        code, outcomes = session.run(
            folder,
            ["-q", "--disable-warnings", "--tb=short", "--timeout=900", *tests],
            session.transformers(build, folder, variables=variables),
            timeout=TIMEOUT,
        )
        said = Path(scratch, "output.txt").read_text("utf-8", "replace")[-4000:]
        assert code in session.CLEAN, f"{variant}: {'timed out' if code is None else f'exit status {code}'}\n{said}"
        assert Path(outcomes.path).is_relative_to(build), outcomes.path
    return outcomes


def unpack(release: str, folder: Path) -> None:
    """Writes the Python files of `tests/` in the sdist of a release into a new folder, as they are."""
    project, _, pinned = lock.read(ROOT / "upstream.lock").find(f"transformers=={release}")
    assert pinned.sdist is not None
    folder.mkdir(parents=True)
    with tarfile.open(source.fetch(project, pinned.sdist)) as archive:
        for member in archive:
            path = Path(member.name)
            if member.isfile() and path.match(f"transformers-{release}/tests/*.py"):
                stream = archive.extractfile(member)
                assert stream is not None
                (folder / path.name).write_bytes(stream.read())
