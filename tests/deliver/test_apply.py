import re

from tests.sample import PRODUCTS, Sample, overlay_wheel_in, snapshot


def test_apply_writes_the_products_and_nothing_else(sample: Sample) -> None:
    sample.apply().succeeds()
    found = snapshot(sample.out)
    assert found is not None
    assert set(found) == {
        *PRODUCTS,
        overlay_wheel_in(sample.out),
        *(f"{name}.metadata" for name in (*PRODUCTS, overlay_wheel_in(sample.out))),
        "constraints.txt",
        "simple",
        "simple/index.html",
        "simple/demo",
        "simple/demo/index.html",
        "simple/modeling-overlay",
        "simple/modeling-overlay/index.html",
        "simple/plain",
        "simple/plain/index.html",
    }
    assert sorted(path.name for path in sample.out.parent.iterdir()) == ["dist"]


def constraints(sample: Sample, *requirements: str) -> list[str]:
    sample.apply(*requirements).succeeds()
    lines = (sample.out / "constraints.txt").read_text("utf-8").splitlines()
    return [re.sub(r"  # --hash=sha256:[0-9a-f]{64}$", "", line) for line in lines]


def test_the_constraints_say_how_to_install_what_was_built(sample: Sample) -> None:
    """Once for each project, whatever the order."""
    head = "# The wheels beside this file: pip install --find-links . --constraint constraints.txt "
    assert constraints(sample, "plain==3.0")[0] == f"{head}plain"
    found = constraints(sample, "demo==2.0", "plain==3.0", "demo==1.0")
    assert found[0] == f"{head}demo"
    assert found[2:] == [
        "demo==2.0+overlay.1",
        "# One version of demo can be active; for another, move the '# ' from its line to the active one:",
        "# demo==1.0+overlay.1",
        "plain==3.0+overlay.1",
    ]


def test_many_versions_have_one_comment(sample: Sample) -> None:
    sample.edit('version = "1.1"\nuse = "test"\n', 'version = "1.1"\nuse = "deliver"\nrevision = 1\n')
    sample.overlay("lock", "update").succeeds()
    assert constraints(sample)[2:] == [
        "demo==1.0+overlay.1",
        "# One version of demo can be active; for another, move the '# ' from its line to the active one:",
        "# demo==1.1+overlay.1",
        "# demo==2.0+overlay.1",
        "plain==3.0+overlay.1",
        f"modeling-overlay=={overlay_wheel_in(sample.out).split('-')[1]}",
    ]
