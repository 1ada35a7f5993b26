"""The overlay over a stock TransformerEngine does what the patched wheel does."""

from pathlib import Path
from typing import Any

import pytest

from tests.transformer_engine.native import stack

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("worker", "arguments"), [("flags", ()), ("recompute", ()), ("aliasing", ("native",))], ids=lambda one: str(one)
)
def test_every_observation_is_that_of_the_wheel(worker: str, arguments: tuple[str, ...], release: str) -> None:
    script = HERE / f"{worker}_worker.py"
    overlaid, patched = (
        stack.observed(script, build, *arguments) for build in (stack.overlaid(release), stack.patched(release))
    )
    assert told(overlaid) == told(patched)


def told(found: Any) -> Any:
    """What was found, apart from the version label."""
    return {key: value for key, value in found.items() if key != "version"} if isinstance(found, dict) else found


def test_the_version_stays_and_the_post_image_is_loaded(release: str) -> None:
    found = stack.run(HERE / "import_worker.py", variant=stack.overlaid(release))
    assert (found["version"], found["operation"]) == (release, "handed on"), found
    fuser = found["files"]["transformer_engine.pytorch.ops.fuser"]
    assert fuser.endswith(f"overlay/patched/transformer_engine/{release}/transformer_engine/pytorch/ops/fuser.py")
