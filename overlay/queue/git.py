"""git, run so that neither the user's configuration nor a repository around the folder can change what it does."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from overlay.errors import OverlayError


def blob_id(content: bytes) -> str:
    """The id that git gives to a file with this content: 40 hex digits (gitformat-object(5), SHA-1 object format)."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def run(
    *arguments: str, folder: Path, isolated: bool = False, stdin: bytes = b"", index: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Runs git in `folder`, with its messages in English and whatever GIT_* variables the caller's process has left
    out.

    Args:
        arguments: what follows `git`.
        folder: where it runs.
        stdin: what git reads from its standard input.
        index: the index file in place of the repository's own.
        isolated: also without any configuration or attributes of the user's, and blind to repositories above `folder`.

    Raises:
        OverlayError: there is no git.
    """
    program = shutil.which("git")
    if program is None:
        raise OverlayError("expected git on PATH, found none: install git and run this again")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["LC_ALL"] = "C"
    if index is not None:
        environment["GIT_INDEX_FILE"] = str(index)
    if isolated:
        environment.update(_isolation(folder))
    return subprocess.run(
        [program, *_QUIET, *arguments], cwd=folder, env=environment, capture_output=True, input=stdin, check=False
    )


_QUIET = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
"""No program that a repository's configuration names is run."""


def _isolation(folder: Path) -> Mapping[str, str]:
    nowhere = str(folder / ".no-configuration")
    return {
        # git looks for a repository from its folder upwards; inside one, git apply silently skips paths outside the
        # current folder. A path that is none ends the search; GIT_CEILING_DIRECTORIES could not name one with a colon.
        "GIT_DIR": os.devnull,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "HOME": nowhere,
        "XDG_CONFIG_HOME": nowhere,
    }
