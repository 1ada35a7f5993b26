"""`overlay verify --here`: what a Python has that trains, with nothing else installed."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from overlay import environments
from overlay.measure import builds
from overlay.queue import lock
from tests.variants import ROOT, Variant, installed, overlay_wheel

BARE = """
import importlib.abc, importlib.util, sys
class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "overlay", "torch", "transformer_engine"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
from overlay import cli
cli.main(sys.argv[1:])
"""
"""The command, in a Python that has nothing but the standard library; its worker has what there is."""

INSTALLED = "import sys; sys.path.append(sys.argv[1]); from overlay import cli; cli.main(sys.argv[2:])"
"""The command, from a folder in which other packages are, too, and which comes last."""


def python() -> str:
    return str(environments.python("train-2.13"))


@functools.cache
def folder(project: str, release: str, kind: str) -> Path:
    """The folder with a build."""
    pins = lock.read(ROOT / "upstream.lock")
    return Path(builds.made_one(pins, ROOT, project, release, kind, "train-2.13").laid_over[0])


@functools.cache
def program() -> Path:
    """The folder with the overlay wheel, which has the patched files; no `.pth` of it is read."""
    return environments.variant(overlay_wheel())


TE = "transformer_engine", "2.13.0"
Done = subprocess.CompletedProcess[str]


def here(
    *words: str, path: str | Path = "", begin: tuple[str, ...] = ("-P", "-m", "overlay"), **variables: str
) -> Done:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(path), str(program())])),
        "MODELING_OVERLAY": "strict",
        **variables,
    }
    line = [python(), *begin, "verify", *words, "--here"]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False, cwd="/")


def test_stock_is_off_and_the_last_line_says_what_mends_it() -> None:
    done = here("te", path=folder(*TE, "stock"))
    assert done.returncode == 1, done.stderr
    assert [line.split() for line in done.stdout.splitlines()[2:5]] == [["here"], ["2.13.0"], ["stock"]]
    assert done.stdout.count("\n- te on here: ") == 28
    assert done.stdout.splitlines()[-1] == "`python -m overlay doctor` says what is installed here, and what mends it"
    assert done.stderr == "overlay: te on here: 171 measurements\n"


def test_a_patched_wheel_is_right() -> None:
    done = here("te", path=folder(*TE, "patched"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "pass: what is installed here is right in 36 of 36 cases"
    assert [line.split() for line in done.stdout.splitlines()[2:5]] == [["here"], ["2.13.0"], ["patched", "wheel"]]


def test_the_overlay_wheel_over_stock_is_right() -> None:
    over = installed(Variant("patched", "5.14.1", by="overlay"))
    done = here("contracts", "--json", path=over)
    assert done.returncode == 0, done.stdout + done.stderr
    (experiment,) = json.loads(done.stdout)["experiments"]
    assert experiment["columns"] == {"here": ["5.14.1", "overlaid"]}
    assert all(row["cells"]["here"]["right"] for row in experiment["rows"])


def test_the_overlay_wheel_that_is_off_is_off_also_where_python_leaves_assertions_out() -> None:
    over = installed(Variant("patched", "5.14.1", by="overlay"))
    done = here("contracts", path=over, MODELING_OVERLAY="0", PYTHONOPTIMIZE="2", PYTHONWARNINGS="error")
    assert done.returncode == 1
    assert done.stdout.count("\n- contracts on here: where stock is silently wrong, ") == 4, done.stdout


def test_it_needs_nothing_but_what_it_measures() -> None:
    """No pydantic, no packaging, no tqdm: the command is the standard library alone."""
    path = folder(*TE, "patched")
    done = here("te", path=path, begin=("-P", "-c", BARE))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", [["--here"], ["--against", "patched", "--root", str(ROOT)]], ids=["here", "made"])
def test_what_is_installed_beside_this_program_is_not_before_what_is_measured(mode: list[str], tmp_path: Path) -> None:
    site, temporary = tmp_path / "site", tmp_path / "temporary"
    temporary.mkdir()
    shutil.copytree(ROOT / "overlay", site / "overlay", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "torch.py").write_text("raise ImportError('another torch')", "utf-8")
    line = [python() if mode == ["--here"] else sys.executable, "-P", "-c", INSTALLED, str(site), "verify", "te", *mode]
    variables = {"PYTHONPATH": str(folder(*TE, "patched")), "TMPDIR": str(temporary)}
    done = subprocess.run(line, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["contracts"], "(contracts: transformers not installed)"),
        (
            ["all"],
            "(fsdp2: transformers not installed; te: transformer_engine not installed; zero3: transformers, peft, ",
        ),
    ],
    ids=["one", "all"],
)
def test_without_what_is_measured_it_is_one_line(words: list[str], said: str) -> None:
    done = here(*words)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert done.stderr.endswith("install it, or leave out --here\n")


def test_of_all_what_is_not_installed_is_left_out_and_named() -> None:
    done = here("all", path=folder(*TE, "patched"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-7:] == [
        "fsdp2  left out: transformers not installed",
        "",
        "zero3  left out: transformers, peft, deepspeed not installed",
        "",
        "contracts  left out: transformers not installed",
        "",
        "pass: what is installed here is right in 36 of 36 cases",
    ]


def test_a_package_that_cannot_be_imported_is_not_measured(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file')", "utf-8"
    )
    done = here("contracts", path=tmp_path)
    assert done.returncode == 1
    assert "libcudart.so.13: cannot open shared object file" in " ".join(done.stdout.split())
    assert "doctor" not in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
