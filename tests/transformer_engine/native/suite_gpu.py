"""The program for a GPU, as far as it goes without one: what it says, what it finds wrong, and a dry run on the CPU."""

from collections import Counter

import pytest
from packaging.version import Version

from tests.transformer_engine.native import gpu, stack, suite


def test_without_a_gpu_it_says_so_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.main([]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    [line] = said.err.splitlines()
    assert line.startswith("overlay: torch 2.14.1")
    assert "sees no CUDA device: this needs an NVIDIA GPU" in line


def test_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    table = {line[: gpu.NAME].strip(): line[gpu.NAME :].split() for line in lines[3:-1] if not line.startswith("    ")}
    assert set(table) == {row.name for row in gpu.rows()}
    for row in gpu.rows():
        found = table[row.name]
        if row.needs_cuda:
            assert found == ["CUDA", "only"] * 2
        else:
            fails = not row.control and "non-reentrant" not in row.name
            assert found == ["fails" if fails else "right", "right"]
    needing = sum(row.needs_cuda for row in gpu.rows())
    right = len(table) - needing
    assert lines[-1] == f"the patched build is right in all {right} rows; {needing} rows need a GPU"


def test_no_row_of_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "-k", "nosuchrow"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == ("overlay: expected a row with 'nosuchrow' in its name, found none: leave -k out to see all\n")


def test_what_cannot_be_measured_does_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "-k", "graphed by"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "overlay: expected a row that needs no GPU, found none among 2: leave --device cpu out\n"


def test_a_device_goes_with_the_program_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        suite.main(["--device", "cpu"])
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith("error: --device goes with --gpu\n")


def test_releases_are_in_the_order_of_their_versions() -> None:
    """Which the lock is not: the first one there is the one that constraints.txt names."""
    found = stack.releases()
    assert len(found) > 1
    assert found == sorted(found, key=Version)


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        ({"right": 3}, 0, "the patched build is right in all 3 rows"),
        ({"right": 1}, 0, "the patched build is right in the one row"),
        (
            {"right": 3, "needs a GPU": 2, "needs FP8": 1},
            0,
            "the patched build is right in all 3 rows; 2 rows need a GPU; 1 row needs FP8",
        ),
        (
            {"right": 3, "not repeatable": 2},
            0,
            "the patched build is right in all 3 rows; 2 rows not compared, because the device is not repeatable",
        ),
        ({"right": 3, "off": 1}, 1, "the patched build is off in 1 of 4 rows"),
        ({"off": 2, "needs a GPU": 2}, 1, "the patched build is off in 2 of 2 rows; 2 rows need a GPU"),
        ({"needs FP8": 2}, 1, "the patched build is right in no row; 2 rows need FP8"),
    ],
)
def test_verdict(found: dict[str, int], status: int, said: str) -> None:
    assert gpu.verdict(Counter(found)) == (status, said)


@pytest.mark.parametrize(
    ("answer", "repeatable", "found"),
    [
        ("right", True, False),
        ("no FP8 here", True, False),
        ("wrong", True, True),
        ("wrong", False, False),
        ("changed input 0; right", False, True),
        ("RuntimeError: no", False, True),
    ],
)
def test_what_is_off(answer: str, repeatable: bool, found: bool) -> None:
    assert gpu.off(answer, repeatable) is found
