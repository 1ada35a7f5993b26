"""A user of git with a checkout, and what must not change in it."""

from collections.abc import Mapping
from pathlib import Path

from tests.sample import Entry, Sample, git, snapshot

NAME, EMAIL = "Zoë O'Neil (work), Jr", "zoe@users.example"


def known(sample: Sample, settings: Mapping[str, str] | None = None) -> Sample:
    """The sample, whose user has told git their name, and these settings."""
    home = sample.folder / "home"
    home.mkdir(exist_ok=True)
    for key, value in {"user.name": NAME, "user.email": EMAIL, **(settings or {})}.items():
        git("config", "--file", str(home / ".gitconfig"), key, value, folder=home)
    return sample


def in_use(checkout: Path) -> Path:
    """A checkout with what its user has in it: a stash, an untracked file, a remote, and hooks that refuse
    everything."""
    (checkout / "notes.txt").write_text("mine\n")
    (checkout / "tests/test_sample.py").write_text("# later\n")
    git("stash", folder=checkout)
    git("remote", "add", "origin", "https://git.example/demo", folder=checkout)
    hooks = checkout / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in (
        "applypatch-msg",
        "pre-applypatch",
        "commit-msg",
        "pre-commit",
        "post-checkout",
        "reference-transaction",
    ):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    return checkout


def kept(checkout: Path, branch: str = "-") -> dict[str, Entry]:
    """Everything in a checkout but what a new branch in a new work tree adds to it, or `git branch -D` leaves."""
    new = (
        ".git/objects/",
        ".git/packed-refs",
        ".git/worktrees",
        f".git/refs/heads/{branch}",
        f".git/logs/refs/heads/{branch}",
    )
    everything = snapshot(checkout)
    assert everything is not None
    return {path: entry for path, entry in everything.items() if not path.startswith(new)}


def left(sample: Sample) -> list[str]:
    """What is beside the checkouts, and what git knows of new branches and work trees."""
    beside = [
        path.name for path in sample.checkouts.iterdir() if path.name not in ("demo-1.0", "demo-2.0", "plain-3.0")
    ]
    for name in ("demo-1.0", "plain-3.0"):
        checkout = sample.checkouts / name
        beside += git("branch", "--format=%(refname:short)", folder=checkout).splitlines()[1:]
        beside += git("worktree", "list", "--porcelain", folder=checkout).split("\n\n")[1:]
    return beside
