"""The program for a GPU, as far as it goes without one: what it says, what it finds wrong, and a dry run on the CPU."""

import pytest

from tests.transformer_engine.native import gpu


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
    assert lines[-1] == "the patched build is off nowhere"


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
