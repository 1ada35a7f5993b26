"""What is read off patches and commits, and what does not fit of a patch."""

from pathlib import Path

import pytest

from overlay.errors import OverlayError
from overlay.queue import series
from overlay.queue.worktree import WorkTree, context
from tests.sample import Sample, message, upstream

ROWS = [f"{number}\n" for number in range(1, 61)]


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("where", ["first", "middle", "last", "near"])
def test_the_width_of_the_context_is_read_off_a_patch(tmp_path: Path, width: int, where: str) -> None:
    work = WorkTree.create(tmp_path, {"a": "".join(ROWS).encode()}, "upstream")
    base = work.head()
    places = {"first": (1, 30), "middle": (30, 31), "last": (60, 20), "near": (20, 22)}[where]
    (tmp_path / "a").write_text("".join("--- x\n" if int(row) in places else row for row in ROWS))
    work.git("commit", "--quiet", "--all", "--message", message("Change"))
    (commit,) = work.commits(base)
    patch = work.export(commit, width)
    assert context(patch.decode()) == width
    assert commit.dated("2026-12-24").last_update == "2026-12-24"
    assert commit.dated("2026-12-24").same(commit)
    assert work.export(commit, width) == patch


def test_what_is_not_ascii_comes_back(tmp_path: Path) -> None:
    """Names, subjects and paths, in mail headers too."""
    (tmp_path / "one").mkdir()
    work = WorkTree.create(tmp_path / "one", {"größe.py": b"a\n"}, "upstream")
    base = work.head()
    (work.folder / "größe.py").write_text("ä\n")
    author = "Jürgen Müller <j@mail.example>"
    text = message("Größe ändern, und noch viel mehr als das, was in eine Zeile von einer E-Mail paßt")
    work.git("commit", "--quiet", "--all", "--author", author, "--date", "2026-11-01T14:00:00+02:00", "-m", text)
    (commit,) = work.commits(base)
    file = tmp_path / "0001-one.patch"
    file.write_bytes(work.export(commit, 3))
    assert f"From: {author}\nDate: Sun, 1 Nov 2026 12:00:00 +0000\n".encode() in file.read_bytes()
    (tmp_path / "two").mkdir()
    other = WorkTree.create(tmp_path / "two", {"größe.py": b"a\n"}, "upstream")
    base = other.head()
    assert other.take(file)
    (again,) = other.commits(base)
    assert again.same(commit)
    assert other.export(again, 3) == file.read_bytes()
    assert series.read_patch(file).subject == commit.subject


def test_every_hunk_that_does_not_fit_is_named(sample: Sample) -> None:
    patches = series.read(sample.root / "patches" / "demo-1.0-1.1").for_delivery("wheel")
    core = upstream("demo", "1.0")["demo/core.py"]
    files = {"src/demo/core.py": core, "src/demo/layers/block.py": upstream("demo", "1.0")["demo/layers/block.py"]}
    assert series.failures(patches, files) == []
    found = series.failures(patches, {"src/demo/core.py": core.replace(b"value + 30\n", b"value + 31\n")})
    assert [row.partition(" hunk ")[0] for row in found] == [
        "0001-Subtract-in-the-core.patch: src/demo/core.py:",
        "0002-Multiply-in-the-block-and-the-core.patch: src/demo/layers/block.py: there is no such file",
    ]


def test_git_that_fails_is_an_error(tmp_path: Path) -> None:
    work = WorkTree.create(tmp_path, {}, "upstream")
    with pytest.raises(OverlayError, match=r"git show failed: .*: mend that and run this again"):
        work.git("show", "nothing")
