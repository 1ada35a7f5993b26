"""git as the user's own: with their identity and configuration, in their checkout, and without hooks or a network."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import OverlayError
from overlay.queue import git

_KEPT = ("GIT_AUTHOR_", "GIT_COMMITTER_", "GIT_CONFIG_")
"""What the user may say of themselves and their configuration in the environment; a GIT_DIR or GIT_INDEX_FILE of
another repository stays out."""

_QUIET = (
    *("-c", "gc.auto=0", "-c", "maintenance.auto=false"),  # git am may pack the user's whole repository otherwise
    *("-c", "core.sparseCheckout=false"),  # the new work tree has all files, tests too, where the user's has not
    *("-c", "rerere.enabled=false"),  # it records conflicts in the user's repository
)


_SHOWN = 5
"""Lines of a message of git's."""


@dataclass(frozen=True)
class Identity:
    """Who commits: the author, as git has it."""

    name: str
    email: str


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Runs git in `folder` as the user would, with the filters and the program for signing that they have configured;
    hooks are not run, nothing is fetched (`overlay.queue.git.run`), and nothing is packed."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
    return git.run(*_QUIET, *arguments, folder=folder, variables=kept)


def out(*arguments: str, folder: Path) -> str:
    """What git prints, "" where it fails."""
    done = run(*arguments, folder=folder)
    return os.fsdecode(done.stdout).strip() if done.returncode == 0 else ""


def said(done: subprocess.CompletedProcess[bytes]) -> str:
    """The message of a git that failed, in one line; of many lines, as of a full disk, the first and the last."""
    lines = [line for line in os.fsdecode(done.stderr).splitlines() if not line.startswith("hint:")]
    if len(lines) > _SHOWN:
        lines[1:-1] = [f"(and {len(lines) - 2} lines more)"]
    return re.sub(r"^(fatal|error): ", "", " ".join(" ".join(lines).split())) or f"exit status {done.returncode}"


def identity(folder: Path) -> Identity:
    """Who commits in the checkout at `folder`.

    Raises:
        OverlayError: git does not know, and would have to guess from the name of the machine.
    """
    found = []
    for role in ("AUTHOR", "COMMITTER"):  # the first is the author, the second signs off
        done = run("-c", "user.useConfigOnly=true", "var", f"GIT_{role}_IDENT", folder=folder)
        parts = re.fullmatch(r"(.+) <(.+)> \d+ [+-]\d+", os.fsdecode(done.stdout).strip())
        if done.returncode != 0 or parts is None:
            raise OverlayError(
                f"{folder}: expected git to know your name and address, found that it does not: git config --global "
                'user.name "YOUR NAME"; git config --global user.email YOUR@ADDRESS'
            )
        found.append(Identity(parts[1], parts[2]))
    return found[0]
