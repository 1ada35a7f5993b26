"""The rules about an environment: of packages that are on the path, and are never imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlay import manifest
from tests.variants import ROOT

FAILS_AT_IMPORT = "raise SystemExit('this package was imported')\n"
LAYERS = "class GradientCheckpointingLayer: ...\n"
WRAPPING = "class GradientCheckpointingLayer:\n    def __init_subclass__(cls): ...\n"
NOTICE = manifest.NOTICE.decode() + "see there\n"
FUSER = "is_grad_enabled = torch.is_grad_enabled()\n"
MENDED_FUSER = FUSER + "set_output_requires_grad = is_grad_enabled\n"


def install(folder: Path, project: str, version: str, **files: str) -> None:
    """A package with files by their path (`utils/generic.py`), or their name without the suffix, and its metadata."""
    for path, text in {"__init__.py": FAILS_AT_IMPORT, **files}.items():
        file = folder / project / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        for above in file.parents:
            if above == folder / project:
                break
            (above / "__init__.py").touch()
    information = folder / f"{project}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n", "utf-8")


def transformers(folder: Path, version: str, layers: str = LAYERS, **files: str) -> None:
    install(folder, "transformers", version, **{"modeling_layers.py": layers, **files})


def transformer_engine(folder: Path, version: str, fuser: str) -> None:
    install(folder, "transformer_engine", version, **{"pytorch/ops/fuser.py": fuser})


def check(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`overlay check` with nothing but the standard library, this project and what is in `folder`."""
    return subprocess.run(
        [sys.executable, "-S", "-P", "-m", "overlay", "check", *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def found(folder: Path) -> list[tuple[str, str, str]]:
    done = check(folder, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["format"] == 1
    return [(one["severity"], one["code"], one["where"]) for one in report["findings"]]


@pytest.mark.parametrize("version", ["5.0.0", "5.14.1", "5.22.2", "5.23.0.dev0"])
def test_transformers_with_hooks_inside_of_the_checkpoint(tmp_path: Path, version: str) -> None:
    transformers(tmp_path, version)
    assert found(tmp_path) == [("info", "fsdp2-reentrant", f"transformers {version}")]
    said = check(tmp_path).stdout
    assert "fsdp2-reentrant" in said
    assert max(map(len, said.splitlines())) <= 80


def test_transformers_with_upstreams_own_fix(tmp_path: Path) -> None:
    transformers(tmp_path, "5.24.0", WRAPPING)
    assert found(tmp_path) == [("info", "forward-replaced", "transformers 5.24.0")]


@pytest.mark.parametrize("version", ["5.14.1+overlay.2", "5.14.1", "5.24.0+overlay.1"])
def test_patched_transformers(tmp_path: Path, version: str) -> None:
    transformers(tmp_path, version, NOTICE + LAYERS)
    assert found(tmp_path) == []


def test_deepspeed_with_the_fault(tmp_path: Path) -> None:
    transformers(tmp_path, "5.14.1", NOTICE + LAYERS)
    install(tmp_path, "deepspeed", "0.19.2")
    assert found(tmp_path) == []
    install(tmp_path, "peft", "0.21.2")
    assert found(tmp_path) == [("info", "peft-zero3", "deepspeed 0.19.2")]


def test_deepspeed_beside_a_guard(tmp_path: Path) -> None:
    transformers(tmp_path, "5.14.1", NOTICE + LAYERS, **{"modeling_utils.py": NOTICE})
    install(tmp_path, "deepspeed", "0.19.2")
    install(tmp_path, "peft", "0.21.2")
    assert found(tmp_path) == []


def test_mended_deepspeed(tmp_path: Path) -> None:
    transformers(tmp_path, "5.14.1", NOTICE + LAYERS)
    install(tmp_path, "deepspeed", "0.19.3")
    install(tmp_path, "peft", "0.21.2")
    assert found(tmp_path) == []


@pytest.mark.parametrize("version", ["2.10.0", "2.15.0", "2.13.0+1a2b3c4"])
def test_fuser_with_the_fault(tmp_path: Path, version: str) -> None:
    transformer_engine(tmp_path, version, FUSER)
    assert found(tmp_path) == [("warning", "fuser-recompute", f"transformer_engine {version}")]


@pytest.mark.parametrize(("version", "source"), [("2.13.0+overlay.2", NOTICE + MENDED_FUSER), ("2.16.0", MENDED_FUSER)])
def test_mended_fuser(tmp_path: Path, version: str, source: str) -> None:
    transformer_engine(tmp_path, version, source)
    assert found(tmp_path) == []


def test_text(tmp_path: Path) -> None:
    transformer_engine(tmp_path, "2.13.0", FUSER)
    done = check(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, *rest = done.stdout.splitlines()
    assert first == "warning  fuser-recompute  transformer_engine 2.13.0"
    assert [line.split()[0] for line in rest if line.startswith("  ") and line[2] != " "] == ["what", "why", "fix"]
    assert rest[-1] == "a model is checked in the program that trains it: overlay.check(model)"


def test_text_where_nothing_is_found(tmp_path: Path) -> None:
    assert check(tmp_path).stdout.startswith("nothing found in this environment\n")


def test_an_error_is_an_exit_code(tmp_path: Path) -> None:
    """No rule has an error for an environment; one that does stands in for them."""
    assert _with_rule('yield Finding("a-code", "error", "here", "one", "two", "three")').returncode == 1


def test_a_rule_that_raises_is_a_finding() -> None:
    done = _with_rule('yield Finding("a-code", "warning", "here", "one", "two", "three"); raise KeyError("odd\\nname")')
    assert (done.returncode, done.stderr) == (0, "")
    first, second = json.loads(done.stdout)["findings"]
    assert (first["severity"], first["where"]) == ("warning", "here")
    assert second == {
        "code": "a-code",
        "severity": "info",
        "where": "this environment",
        "what": "this could not be looked at",
        "why": "KeyError: 'odd\\nname'",
        "fix": "report it to modeling-overlay, with the name of the model",
    }


def _with_rule(body: str) -> subprocess.CompletedProcess[str]:
    """`overlay check --json` with one rule alone."""
    program = f"""
from types import SimpleNamespace
from overlay import checks
from overlay.checks import report
from overlay.checks.finding import Finding
def in_environment(environment):
    {body}
checks.rules = lambda: [SimpleNamespace(CODE="a-code", in_environment=in_environment)]
raise SystemExit(report.main("json"))
"""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
