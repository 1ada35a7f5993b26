"""git, run so that neither the user's configuration nor a repository around the folder can change what it does."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from overlay.errors import OverlayError


def blob_id(content: bytes) -> str:
    """The id that git gives to a file with this content: 40 hex digits (gitformat-object(5), SHA-1 object format)."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


MAXIMUM = 1 << 30
"""Bytes that git may print: a tree can be named by far fewer bytes than it has."""


def run(
    *arguments: str,
    folder: Path,
    isolated: bool = False,
    stdin: bytes = b"",
    index: Path | None = None,
    maximum: int = MAXIMUM,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[bytes]:
    """Runs git in `folder`, with its messages in English and whatever GIT_* variables the caller's process has left
    out. It runs no program that a repository's configuration names, and fetches nothing.

    Args:
        arguments: what follows `git`.
        folder: where it runs.
        stdin: what git reads from its standard input.
        index: the index file in place of the repository's own.
        variables: environment variables that git is to have all the same.
        isolated: also without any configuration or attributes of the user's, and blind to repositories above `folder`.
        maximum: the bytes that it may print.

    Raises:
        OverlayError: there is no git, or it prints more.
    """
    program = shutil.which("git")
    if program is None:
        raise OverlayError("expected git on PATH, found none: install git and run this again")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # A partial clone asks its origin for what it lacks, by a program that its configuration names.
    environment |= {"LC_ALL": "C", "GIT_ALLOW_PROTOCOL": "none", **variables}
    if index is not None:
        environment["GIT_INDEX_FILE"] = str(index)
    if isolated:
        environment.update(_isolation(folder))
    elif arguments[0] in _COMPARING:
        environment.update(_without_filters([program, *_QUIET], folder, environment))
    command = [program, *_QUIET, *arguments]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(stdin)
        given.seek(0)
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdin=given, stdout=subprocess.PIPE, stderr=said
        ) as process:
            assert process.stdout is not None
            try:
                printed = process.stdout.read(maximum + 1)
            except BaseException:  # interrupted: what git still does must not meet what is done about it
                process.kill()
                raise
            if len(printed) > maximum:
                process.kill()
                raise OverlayError(
                    f"{folder}: expected at most {maximum} bytes of git {arguments[0]}, found more: this is no "
                    "repository of a pinned project"
                )
        said.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, printed, said.read())


_QUIET = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")

_COMPARING = ("diff",)
"""What looks into files of the work tree, and runs filters over them (gitattributes(5))."""


def _without_filters(git: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Variables that make every filter one that does nothing."""
    listing = [*git, "config", "--name-only", "-z", "--get-regexp", r"^filter\..*\."]
    done = subprocess.run(listing, cwd=folder, env=environment, capture_output=True, check=False)
    drivers = {os.fsdecode(name).rpartition(".")[0] for name in filter(None, done.stdout.split(b"\0"))}
    values = {"clean": "", "smudge": "", "process": "", "required": "false"}
    settings = [(f"{driver}.{name}", value) for driver in sorted(drivers) for name, value in values.items()]
    found = {"GIT_CONFIG_COUNT": str(len(settings))}
    for number, (name, value) in enumerate(settings):
        found |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
    return found


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
