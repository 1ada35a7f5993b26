"""A git checkout and an unpacked tree that mean no good: nothing of theirs is run, and no path of theirs leads away."""

import os
import subprocess
from pathlib import Path

import pytest

from overlay.errors import OverlayError
from overlay.queue.checkout import Checkout
from tests.sample import Sample, commit, git, upstream

CORE = "src/demo/core.py"


@pytest.fixture
def checkout(sample: Sample) -> Path:
    return sample.checkouts / "demo-1.0"


def program(folder: Path) -> tuple[str, Path]:
    """A program, and the file that shows that it was run."""
    file, shows = folder / "program", folder / "was run"
    file.write_text(f'#!/bin/sh\ntouch "{shows}"\n')
    file.chmod(0o755)
    return str(file), shows


@pytest.mark.parametrize("how", ["clean", "process"])
def test_a_filter_is_not_run(sample: Sample, checkout: Path, tmp_path: Path, how: str) -> None:
    """git runs a filter that a repository names over each file that it compares (gitattributes(5))."""
    named, shows = program(tmp_path)
    git("config", f"filter.of the tree.x.{how}", named, folder=checkout)
    git("config", "filter.of the tree.x.required", "true", folder=checkout)
    (checkout / ".git" / "info").mkdir(exist_ok=True)
    (checkout / ".git" / "info" / "attributes").write_text('* "filter=of the tree.x"\n')
    (checkout / ".gitattributes").write_text("* filter=x\n")
    git("config", f"filter.x.{how}", named, folder=checkout)
    git("config", "filter.x.required", "true", folder=checkout)
    for path in (checkout / "src" / "demo").rglob("*.py"):
        os.utime(path, (1, 1))  # so that git has to look into them
    assert not shows.exists()
    sample.apply("--from-git", checkout, "--any-commit").succeeds()
    assert not shows.exists()
    git("status", folder=checkout, check=False)
    assert shows.exists(), "git itself runs it"


@pytest.mark.parametrize("setting", ["uploadpack", "ssh", "ext"])
def test_nothing_is_fetched_for_a_file_that_is_not_there(
    sample: Sample, checkout: Path, tmp_path: Path, setting: str
) -> None:
    """In a partial clone git asks its origin for what is missing, by a program that the repository names."""
    named, shows = program(tmp_path)
    url = {"uploadpack": str(checkout), "ssh": "ssh://x.example/y", "ext": f"ext::{named}"}[setting]
    for name, value in (
        ("core.repositoryFormatVersion", "1"),
        ("extensions.partialClone", "origin"),
        ("remote.origin.url", url),
        ("remote.origin.promisor", "true"),
        ("remote.origin.uploadpack", named),
        ("core.sshCommand", named),
        ("protocol.allow", "always"),
        ("protocol.ext.allow", "always"),
    ):
        git("config", name, value, folder=checkout)
    blob = git("rev-parse", "HEAD:src/demo/table.bin", folder=checkout)
    (checkout / ".git/objects" / blob[:2] / blob[2:]).unlink()
    sample.apply("--from-git", checkout).fails("expected the content of src/demo/table.bin", "git does not have it")
    assert not shows.exists()
    git("cat-file", "blob", blob, folder=checkout, check=False)
    assert shows.exists(), "git itself runs it"


@pytest.mark.parametrize(
    "name",
    [
        "a\u202eyp.py",
        "a\u200b.py",
        "a\x9b2J.py",
        "aux.py",
        "end.",
        "end ",
    ],
)
def test_a_name_that_is_not_what_it_looks_like(sample: Sample, checkout: Path, name: str) -> None:
    (checkout / "src/demo" / name).write_text("x\n")
    commit(checkout, "x")
    said = sample.apply("--from-git", checkout, "--any-commit").fails("found", "this tree cannot be made into a wheel")
    assert said.isprintable()
    assert not sample.out.exists()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["CORE.py"], "is the same as src/demo/CORE.py but for case"),
        (["e\u0301", "\u00e9"], "but for case or Unicode normalization"),
        (["Layers"], "lies in src/demo/Layers, which is a file"),
    ],
)
def test_names_that_a_file_system_takes_for_one(sample: Sample, checkout: Path, names: list[str], said: str) -> None:
    for name in names:
        (checkout / "src/demo" / name).write_text("x\n")
    commit(checkout, "x")
    sample.apply("--from-git", checkout, "--any-commit").fails(said, "cannot be made into a wheel")


def test_a_tree_that_is_larger_than_its_repository(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten folders that are one, each with ten that are one: git lists all of them."""
    tree = git("rev-parse", "HEAD:src/demo", folder=checkout)
    for _ in range(6):
        listing = "".join(f"040000 tree {tree}\t{number}\n" for number in range(10))
        made = subprocess.run(
            ["git", "mktree"], cwd=checkout, input=listing, capture_output=True, encoding="ascii", check=True
        )
        tree = made.stdout.strip()
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    bomb = git(*identity, "commit-tree", "-m", "x", tree, folder=checkout)
    with pytest.raises(OverlayError, match="expected at most 16777216 bytes of git ls-tree"):
        Checkout.open(checkout, bomb).files("")


def test_a_tree_of_many_folders_in_each_other(sample: Sample, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for path, content in upstream("demo", "1.0").items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(content)
    here = os.open(tree / "demo", os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    try:
        sample.apply("--from-tree", tree, "--out", tmp_path / "copy").fails("a few levels deep, found hundreds")
    finally:
        subprocess.run(["rm", "-rf", str(tree)], check=True)  # which Python cannot
    assert not (tmp_path / "copy").exists()
