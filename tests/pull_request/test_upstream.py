"""Pull requests on what upstream released: the 5.24.0 sdist, and wheels with the files where the git tree has them."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from overlay.queue import git as own_git
from overlay.queue import lock, series, source
from tests.pull_request.user import EMAIL, NAME
from tests.sample import commit, git
from tests.variants import ROOT

LOCK = lock.read(ROOT / "upstream.lock")
FORM = "# What is it?\n\nFixes # (issue)\n\n## Before sending\n\n- [ ] Did you write any new tests?\n"


def repository(folder: Path, requirement: str) -> Path:
    """A git repository with the files of a release: of its wheel, without models; of 5.24.0, all of its sdist."""
    project, package, release = LOCK.find(requirement)
    folder.mkdir(parents=True)
    if requirement == "transformers==5.24.0":
        assert release.sdist is not None
        with tarfile.open(source.fetch(project, release.sdist)) as sdist:
            sdist.extractall(folder, filter="data")
        (folder,) = folder.iterdir()
    else:
        with zipfile.ZipFile(source.fetch(project, release.wheel)) as wheel:
            for name in wheel.namelist():
                if name.startswith(f"{project}/") and "/models/" not in name:
                    wheel.extract(name, folder / package.prefix)
    git("init", "--quiet", "--template=", folder=folder)
    git("config", "core.compression", "0", folder=folder)
    commit(folder, "A release", {".github/PULL_REQUEST_TEMPLATE.md": FORM.encode()})
    return folder


def asked(checkout: Path, requirement: str, *arguments: str) -> str:
    """What `overlay pr` prints."""
    home = checkout.parent / "home"
    home.mkdir(exist_ok=True)
    (home / ".gitconfig").write_text(f'[user]\n\tname = "{NAME}"\n\temail = {EMAIL}\n', "utf-8")
    command = [sys.executable, "-P", "-m", "overlay", "pr", requirement.partition("==")[0], "--checkout", str(checkout)]
    done = subprocess.run(
        [*command, "--python", "false", *arguments],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("requirement", "name", "table"),
    [
        ("transformers==5.24.0", "transformers-5.24", "| before (5.24.0) | after |"),
        ("transformers==5.14.1", "transformers-5.2-5.22", "| before (5.14.1) | after |"),
        ("transformers==5.22.2", "transformers-5.2-5.22", "| before (5.22.2) | after |"),
        ("transformer_engine==2.13.0", "transformer_engine-2.12-2.15", "| before (2.13.0) | after |"),
    ],
)
def test_the_pull_request(requirement: str, name: str, table: str, tmp_path: Path) -> None:
    checkout = repository(tmp_path / "upstream", requirement)
    said = asked(checkout, requirement)
    queue = series.read(ROOT / "patches" / name)
    patches = queue.for_delivery("pull-request")
    tree = checkout.with_name(f"{checkout.name}-pull-request")
    head = git("rev-parse", "HEAD", folder=checkout)
    subjects = git("log", "--reverse", "--format=%s", f"{head}..HEAD", folder=tree).splitlines()
    assert subjects == [patch.subject for patch in patches]
    people = {f"{NAME} <{EMAIL}>, {NAME} <{EMAIL}>, {NAME} <{EMAIL}>"}
    form = "%an <%ae>, %cn <%ce>, %(trailers:key=Signed-off-by,valueonly,separator=)"
    assert {*git("log", f"--format={form}", f"{head}..HEAD", folder=tree).splitlines()} == people

    _, package, release = LOCK.find(requirement)
    there = dict.fromkeys(path for patch in patches for path in patch.paths if path not in patch.created)
    before = {path: (checkout / path).read_bytes() for path in there}
    for path, content in series.apply(patches, before).items():
        assert (tree / path).read_bytes() == content
        compile(content, path, "exec")
    changed = git("diff", "--name-only", head, "HEAD", folder=tree).splitlines()
    assert {*changed} == {path for patch in patches for path in patch.paths}
    blobs = {f"{package.prefix}{file.path}": file.after for file in release.files}
    notices = [own_git.blob_id((tree / path).read_bytes()) != blobs[path] for path in changed if path in blobs]
    assert notices, "a wheel's files say that they were modified, and these do not"
    assert all(notices)
    added = [line for line in git("diff", head, "HEAD", folder=tree).splitlines() if line.startswith("+")]
    told = git("log", "--format=%B", f"{head}..HEAD", folder=tree)
    for text in (told, *added):
        assert not re.search(r"overlay|Applied-Upstream|Last-Update|Delivery:|Fault:", text), text

    text = tree.with_name(f"{tree.name}.md").read_text("utf-8")
    assert table in text
    assert "scripts/test.sh" in text
    assert text.count("```python\n") == 1
    assert text.startswith("# What is it?\n\n**")
    brings_tests = any(path.startswith("tests/") for path in changed)
    assert f"- [{'x' if brings_tests else ' '}] Did you write any new tests?" in text
    assert brings_tests == (requirement == "transformers==5.24.0")
    if brings_tests:
        assert "upstream has: a fix of fsdp2-gradients, gradients are dropped without an error" in said
        assert "(since 5.23)" in said
        assert "| `SomeDecoderLayer.forward = f` | not checkpointed, silently | checkpointed |" in text
    else:
        assert "later, upstream has: " in said


def test_transformer_engine_that_has_it(tmp_path: Path) -> None:
    """The first release with upstream's own change, after one without, with a branch of that."""
    checkout = repository(tmp_path / "TransformerEngine", "transformer_engine==2.13.0")
    git("branch", "release_v2.13", folder=checkout)
    newer = repository(tmp_path / "newer", "transformer_engine==2.16.0")
    path = "transformer_engine/pytorch/ops/fuser.py"
    commit(checkout, "[PyTorch] guard it (#2919)", {path: (newer / path).read_bytes()})
    git("tag", "v2.16", folder=checkout)
    said = asked(checkout, "transformer_engine")
    assert "(since 2.16.0, commit " in said
    assert "'[PyTorch] guard it (#2919)', first in v2.16)\n" in said
    assert f"  overlay pr transformer_engine --checkout {checkout} --base release_v2.13\n" in said
    assert not checkout.with_name("TransformerEngine-pull-request").exists()
    assert git("branch", "--format=%(refname:short)", folder=checkout).split() in (
        ["main", "release_v2.13"],
        ["master", "release_v2.13"],
    )
    said = asked(checkout, "transformer_engine", "--base", "release_v2.13")
    message = git(
        "log", "-1", "--format=%B", "do-not-set-requires-grad-without-gradients-release-v2.13", folder=checkout
    )
    assert "This is a backport of https://github.com/NVIDIA/TransformerEngine/pull/2919." in message
    said = asked(newer, "transformer_engine")
    assert "(since 2.16.0)" in said, "by the content that the lock names, without a history"
