"""`overlay apply --from-git`: a wheel from a checkout of upstream, for its user alone."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from installer.sources import WheelFile
from packaging.utils import parse_wheel_filename

from overlay.queue import lock, source
from tests import sample as make
from tests.sample import Sample, commit, git, snapshot, upstream
from tests.variants import ROOT

CORE = "src/demo/core.py"


@pytest.fixture
def checkout(sample: Sample) -> Path:
    return sample.checkouts / "demo-1.0"


def built(
    sample: Sample, *arguments: str | Path, version: str = "1.0", checkout: Path | None = None
) -> zipfile.ZipFile:
    """The one wheel that the command writes; it is sound, and nothing else is written."""
    checkout = checkout or sample.checkouts / "demo-1.0"
    before = snapshot(sample.root), snapshot(checkout)
    shutil.rmtree(sample.out, ignore_errors=True)
    sample.apply("--from-git", checkout, *arguments).succeeds()
    assert (snapshot(sample.root), snapshot(checkout)) == before
    (file,) = sample.out.iterdir()
    local = f"{version}+overlay.g{git('rev-parse', 'HEAD', folder=checkout)[:12]}"
    assert file.name == f"demo-{local}-py3-none-any.whl"
    assert str(parse_wheel_filename(file.name)[1]) == local
    opened = zipfile.ZipFile(file)
    assert opened.testzip() is None
    WheelFile(opened).validate_record(validate_contents=True)
    assert HeaderParser().parsestr(opened.read(f"demo-{local}.dist-info/METADATA").decode())["Version"] == local
    assert f'__version__ = "{local}"  #' in opened.read("demo/__init__.py").decode()
    return opened


def test_the_pinned_commit(sample: Sample) -> None:
    sample.apply("demo==1.0").succeeds()
    with zipfile.ZipFile(sample.out / make.PRODUCTS[0]) as expected, built(sample) as found:
        names = [name for name in expected.namelist() if "dist-info" not in name]
        assert sorted(name for name in found.namelist() if "dist-info" not in name) == sorted(names)
        for name in names:
            if name != "demo/__init__.py":
                assert found.read(name) == expected.read(name), name


def test_the_completed_commit(sample: Sample, checkout: Path) -> None:
    sample.overlay("lock", "complete", "--checkout", checkout).succeeds()
    built(sample).close()


def test_pip_installs_it(sample: Sample, tmp_path: Path) -> None:
    with built(sample) as found:
        command = [
            sys.executable,
            "-P",
            "-m",
            "pip",
            "install",
            "--no-index",
            "--no-deps",
            "--target",
            str(tmp_path / "site"),
            str(found.filename),
        ]
    done = subprocess.run(command, env=sample.environment(), capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    said = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            "import demo.core, importlib.metadata as m; "
            "print(m.version('demo') == demo.__version__, demo.core.core_30(1))",
        ],
        env=sample.environment() | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout
    assert said == "True -29\n"


def test_another_commit_needs_a_word(sample: Sample, checkout: Path) -> None:
    pinned = git("rev-parse", "HEAD", folder=checkout)
    later = commit(
        checkout,
        "Later",
        {"src/demo/later.py": b"LATER = 1\n", CORE: b"# later\n" + upstream("demo", "1.0")["demo/core.py"]},
    )
    sample.apply("--from-git", checkout).fails(
        f"{checkout}: expected the pinned commit {pinned[:9]}, found {later[:12]}", "use --any-commit"
    )
    assert not sample.out.exists()
    with built(sample, "--any-commit") as found:
        assert found.read("demo/later.py") == b"LATER = 1\n"
        assert found.read("demo/core.py").startswith(b"# later\n")
        assert b"value - 30" in found.read("demo/core.py")


def test_another_version_takes_the_series_and_the_metadata_nearest_to_it(sample: Sample) -> None:
    checkout = sample.checkouts / "demo-2.0"
    commit(checkout, "Development", {"src/demo/__init__.py": b'__version__ = "2.1.dev0"\n'})
    with built(sample, "--any-commit", version="2.1.dev0", checkout=checkout) as found:
        assert b"kernel_30(value):\n    return value - 30" in found.read("demo/core.py")
    done = sample.apply("--from-git", checkout, "--any-commit").succeeds()
    assert "overlay: metadata comes from demo-2.0-py3-none-any.whl" in done.stderr
    commit(checkout, "Old", {"src/demo/__init__.py": b'__version__ = "0.1"\n'})
    done = sample.apply("--from-git", checkout, "--any-commit").succeeds()
    assert "overlay: metadata comes from demo-1.0-py3-none-any.whl" in done.stderr


@pytest.mark.parametrize(
    ("changed", "nearest"),
    [
        pytest.param({}, "1.0", id="all of one release"),
        pytest.param({"layers/block.py": "own"}, "1.0", id="all but a file of one release"),
        pytest.param({"core.py": "1.1", "table.bin": "1.1"}, "1.1", id="more of the later one"),
        pytest.param({"__init__.py": "own", "core.py": "own", "table.bin": "own"}, "1.1", id="as much of both"),
        pytest.param({"__init__.py": "2.0", "table.bin": "2.0"}, "1.0", id="most of one with another series"),
    ],
)
def test_a_tree_without_its_version_takes_the_metadata_of_the_release_most_like_it(
    sample: Sample, checkout: Path, changed: dict[str, str], nearest: str
) -> None:
    sample.edit('version-file = "demo/__init__.py"\n', "")
    contents = {version: upstream("demo", version) for version in ("1.1", "2.0")}
    contents["own"] = {path: content + b"# own\n" for path, content in upstream("demo", "1.0").items()}
    commit(checkout, "x", {f"src/demo/{path}": contents[of][f"demo/{path}"] for path, of in changed.items()})
    done = sample.apply("--from-git", checkout, "--any-commit").succeeds()
    assert (
        f"overlay: metadata comes from demo-{nearest}-py3-none-any.whl, whose files are most like those of the tree; "
        "--metadata-from names another"
    ) in done.stderr.splitlines()
    (file,) = sample.out.iterdir()
    assert file.name.startswith(f"demo-{nearest}+overlay.g")


@pytest.mark.parametrize("version", ["2.13.0", "2.14.1"])
def test_a_development_tree_of_transformer_engine(version: str, tmp_path: Path) -> None:
    """No file of its package says the version, and its native library asks for its own."""
    name, _, release = lock.read(ROOT / "upstream.lock").find(f"transformer_engine=={version}")
    checkout, out = tmp_path / "checkout", tmp_path / "out"
    with zipfile.ZipFile(source.fetch(name, release.wheel)) as wheel:
        wheel.extractall(checkout, [path for path in wheel.namelist() if path.startswith(f"{name}/")])
    git("init", "--quiet", "--template=", folder=checkout)
    commit(checkout, "Development", {f"{name}/pytorch/ops/op.py": b"# changed\n"})
    command = [sys.executable, "-P", "-m", "overlay", "apply", "--from-git", str(checkout), "--any-commit"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--out", str(out)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = out.iterdir()
    assert file.name.startswith(f"{name}-{version}+overlay.g")


def test_a_version_that_is_none(sample: Sample, checkout: Path) -> None:
    commit(checkout, "x", {"src/demo/__init__.py": b'__version__ = "soon"\n'})
    sample.apply("--from-git", checkout, "--any-commit").fails(
        "demo/__init__.py: expected __version__ to be a version (PEP 440), found b'soon'"
    )
    commit(checkout, "x", {"src/demo/__init__.py": b"__version__ = str(1)\n"})
    sample.apply("--from-git", checkout, "--any-commit").fails("demo/__init__.py: expected one line __version__")
    assert not sample.out.exists()


def test_a_version_with_a_local_label(sample: Sample, checkout: Path) -> None:
    commit(checkout, "x", {"src/demo/__init__.py": b'__version__ = "1.0+cu13"\n'})
    sample.apply("--from-git", checkout, "--any-commit").succeeds()
    assert [file.name.partition(".overlay")[0] for file in sample.out.iterdir()] == ["demo-1.0+cu13"]


def test_metadata_from_a_file_and_from_a_release(sample: Sample, tmp_path: Path) -> None:
    files = make.members("demo", "1.0")
    files["demo-1.0.dist-info/METADATA"] = files["demo-1.0.dist-info/METADATA"].replace(b"A sample", b"Another sample")
    files |= {
        "demo-1.0.dist-info/RECORD": make.record(
            {path: content for path, content in files.items() if "RECORD" not in path}, "demo-1.0.dist-info"
        )
    }
    wheel = tmp_path / "demo-1.0-py3-none-any.whl"
    wheel.write_bytes(make.archive(files))
    with built(sample, "--metadata-from", wheel) as found:
        assert (
            "Summary: Another sample"
            in found.read(next(name for name in found.namelist() if name.endswith("METADATA"))).decode()
        )
    for name in ("demo==1.1", "demo==2.0"):
        built(sample, "--metadata-from", name).close()


def test_metadata_from_what_cannot_be(sample: Sample, checkout: Path, tmp_path: Path) -> None:
    def fails(named: str | Path, *parts: str) -> None:
        sample.apply("--from-git", checkout, "--metadata-from", named).fails(*parts)
        assert not sample.out.exists()

    fails(tmp_path / "missing.whl", "--metadata-from: expected a wheel or NAME==VERSION, found no file", "missing.whl")
    fails(tmp_path, str(tmp_path))
    fails("demo==9.9", "expected one of the pinned releases", "'demo==9.9'")
    fails("plain==3.0", "--metadata-from: expected a release of demo, found plain==3.0")
    fails(sample.wheel("plain-3.0"), "expected Name: demo", "this wheel is of another project")
    wrong = tmp_path / "demo-1.0-py3-none-any.whl"
    wrong.write_bytes(b"no wheel")
    fails(wrong, "demo-1.0-py3-none-any.whl: expected a wheel, found no zip file")


def test_what_is_not_committed(sample: Sample, checkout: Path) -> None:
    (checkout / CORE).write_bytes(upstream("demo", "1.0")["demo/core.py"] + b"# mine\n")
    for folder in (checkout, checkout / "src"):
        sample.apply("--from-git", folder).fails(
            f"expected {CORE} as it is committed, found changes that are not: commit or stash them"
        )
    git("add", CORE, folder=checkout)
    sample.apply("--from-git", checkout).fails(f"expected {CORE} as it is committed")
    git("reset", "--hard", "--quiet", folder=checkout)
    (checkout / "src/demo/größe.txt").write_text("mine\n")
    (checkout / "src/demo/new.py").write_text("mine\n")
    with built(sample) as found:
        assert found.read("demo/größe.txt") == "größe\n".encode()
        assert "demo/new.py" not in found.namelist()


def test_the_users_repository_is_not_touched(sample: Sample, checkout: Path) -> None:
    (checkout / CORE).touch()  # git status would write the index now
    index = (checkout / ".git" / "index").stat()
    sample.variables.update({"GIT_DIR": "/nowhere", "GIT_INDEX_FILE": "/nowhere", "GIT_WORK_TREE": "/nowhere"})
    built(sample).close()
    after = (checkout / ".git" / "index").stat()
    assert (after.st_ino, after.st_mtime_ns) == (index.st_ino, index.st_mtime_ns)


def test_a_bare_repository_and_a_folder_inside_one(sample: Sample, checkout: Path) -> None:
    bare = sample.folder / "bare.git"
    git("clone", "--quiet", "--bare", str(checkout), str(bare), folder=sample.folder)
    built(sample, checkout=bare).close()
    built(sample, checkout=checkout / "src").close()


def test_a_series_that_does_not_fit(sample: Sample, checkout: Path) -> None:
    commit(checkout, "x", {CORE: b"nothing of it\n"})
    said = sample.apply("--from-git", checkout, "--any-commit").fails(
        "expected one series that fits, found none: ", "does not fit"
    )
    assert said.count("does not fit") == 2
    commit(checkout, "x", {"src/demo/layers/block.py": b""})
    (checkout / CORE).unlink()
    commit(checkout, "y")
    sample.apply("--from-git", checkout, "--any-commit").fails(
        "expected one series that fits, found none: ", "add one for it under"
    )
    assert not sample.out.exists()


def test_a_link_and_a_submodule_in_the_package(sample: Sample, checkout: Path) -> None:
    (checkout / "src/demo/link.py").symlink_to("core.py")
    commit(checkout, "link")
    sample.apply("--from-git", checkout, "--any-commit").fails(
        "src/demo/link.py: expected a regular file, found mode 120000"
    )
    (checkout / "src/demo/link.py").unlink()
    git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},src/demo/module", folder=checkout)
    git("rm", "--cached", "--quiet", "src/demo/link.py", folder=checkout)
    git("commit", "--quiet", "--message", "submodule", folder=checkout)
    sample.apply("--from-git", checkout, "--any-commit").fails(
        "src/demo/module: expected a regular file, found mode 160000"
    )
    assert not sample.out.exists()


@pytest.mark.parametrize("name", ["a\\b.py", "a:b.py", "a\nb.py", "a\udcff.py"])
def test_a_name_that_a_wheel_cannot_have(sample: Sample, checkout: Path, name: str) -> None:
    (checkout / "src/demo" / name).write_text("x\n")
    commit(checkout, "x")
    sample.apply("--from-git", checkout, "--any-commit").fails(
        f"{checkout} at ", "found 'src/demo/a", "cannot be made into a wheel"
    )


def test_content_that_git_does_not_have(sample: Sample, checkout: Path) -> None:
    blob = git("rev-parse", "HEAD:src/demo/table.bin", folder=checkout)
    (checkout / ".git/objects" / blob[:2] / blob[2:]).unlink()
    sample.apply("--from-git", checkout).fails(
        "expected the content of src/demo/table.bin at", "found that git does not have it"
    )
    assert not sample.out.exists()


def test_foreign_files_stay_and_an_older_wheel_of_the_same_commit_goes(sample: Sample, checkout: Path) -> None:
    sample.apply().succeeds()
    before = snapshot(sample.out) or {}
    for _ in range(2):
        sample.apply("--from-git", checkout).succeeds()
        after = snapshot(sample.out) or {}
        assert {name: after[name] for name in before} == before
        assert len(after) == len(before) + 1


BACKEND = """\
[build-system]
requires = ["flit_core==3.12.0"]
build-backend = "flit_core.buildapi"

[project]
name = "demo"
version = "1.0"
description = "Built by upstream's own build"
requires-python = ">=3.9"
license = {text = "x"}
"""


def reachable(sample: Sample, requirement: str) -> None:
    """Lets the sample use this machine's own index, or skips."""
    for name in ("PIP_INDEX_URL", "PIP_CONFIG_FILE"):
        sample.variables[name] = None
    sample.variables.update(
        {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PIP_") or name.lower().endswith("_proxy")
        }
    )
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(sample.folder / "probe"),
        requirement,
    ]
    done = subprocess.run(
        command, env=sample.environment(), capture_output=True, encoding="utf-8", check=False, timeout=600
    )
    if done.returncode != 0:
        pytest.skip(f"no package index with {requirement} is reachable: {done.stderr.strip().splitlines()[-1:]}")


def test_upstreams_own_build(sample: Sample, checkout: Path) -> None:
    reachable(sample, "flit_core==3.12.0")
    commit(checkout, "Build", {"pyproject.toml": BACKEND.encode()})
    (checkout / "README").symlink_to("pyproject.toml")
    commit(checkout, "A link, outside of the package")
    with built(sample, "--any-commit", "--run-upstream-build") as found:
        assert b"value - 30" in found.read("demo/core.py")
        assert b"Summary: Built by upstream's own build" in found.read(
            next(name for name in found.namelist() if name.endswith("METADATA"))
        )


def test_upstreams_own_build_fails(sample: Sample, checkout: Path) -> None:
    sample.variables["PIP_NO_INDEX"] = "1"
    commit(checkout, "Build", {"pyproject.toml": BACKEND.replace("flit_core==3.12.0", "flit_core==0.0.1").encode()})
    sample.apply("--from-git", checkout, "--any-commit", "--run-upstream-build").fails(
        f"{checkout}: expected upstream's build to make one wheel, found: ", "or use --metadata-from"
    )
    assert not sample.out.exists()


def test_upstreams_own_build_of_a_tree_that_leads_out(sample: Sample, checkout: Path) -> None:
    for target in ("../outside", "/etc"):
        (checkout / "away").unlink(missing_ok=True)
        (checkout / "away").symlink_to(target)
        commit(checkout, "x")
        sample.apply("--from-git", checkout, "--any-commit", "--run-upstream-build").fails(
            "away: expected a link inside the tree, found one to", repr(target)
        )


def test_no_pinned_commit(sample: Sample) -> None:
    checkout = sample.checkouts / "plain-3.0"
    sample.apply("--from-git", checkout).fails(
        "expected a pinned commit of plain, found none in upstream.lock", "--any-commit"
    )
    sample.apply("--from-git", checkout, "--any-commit").succeeds()
    (file,) = sample.out.iterdir()
    assert re.fullmatch(r"plain-3\.0\+overlay\.g[0-9a-f]{12}-py3-none-any\.whl", file.name)
