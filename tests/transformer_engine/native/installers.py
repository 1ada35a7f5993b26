"""Environments that pip and uv fill with TransformerEngine's wheels."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlay.queue.git import blob_id
from tests.transformer_engine.native import stack
from tests.variants import ROOT, run_worker, wheel

LIBRARY = "transformer_engine/wheel_lib/libtransformer_engine.so"
FUSER = "transformer_engine/pytorch/ops/fuser.py"
CHECKS = "transformer_engine/common/__init__.py"


class Wheels:
    """The wheels of a release, and what environments have beside them."""

    def __init__(self, folder: Path, release: str) -> None:
        self.release = release
        self.dist = folder / "dist"
        command = [
            sys.executable,
            "-P",
            "-m",
            "overlay",
            "apply",
            f"{stack.PROJECT}=={release}",
            "--out",
            str(self.dist),
        ]
        _run(command, os.environ | {"PYTHONPATH": str(ROOT)})
        self.index = folder / "index"
        self.index.mkdir()
        _without_library(stack.companion("transformer_engine_cu13", release), self.index)
        for whole in (stack.extension_wheel(release), wheel(stack.stock(release))):
            (self.index / whole.name).symlink_to(whole)
        environment = next(stack.interpreter(release).parents[1].glob("lib/python3.*/site-packages"))
        self.library = environment / LIBRARY
        self.linked = folder / "linked"
        self.described = folder / "described"
        for made in (self.linked, self.described):
            made.mkdir()
        for item in environment.iterdir():
            if not item.name.startswith(("transformer_engine", "pip")):
                (self.linked / item.name).symlink_to(item)
            if item.suffix == ".dist-info" and not item.name.startswith(("transformer_engine", "pip-", "torch-")):
                (self.described / item.name).symlink_to(item)
        # What torch itself requires is not wholly there: this is for pip, which would look for another torch
        torch = self.described / "torch-2.14.1.dist-info"
        torch.mkdir()
        (torch / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.1\n", "utf-8")

    @property
    def stock(self) -> list[str]:
        """The wheels that stock TransformerEngine consists of."""
        return sorted(map(str, self.index.iterdir()))


class Environment:
    """A virtual environment that installers fill with TransformerEngine's wheels.

    Args:
        beside: a folder of packages that it sees without having installed them, so that no installer writes there:
            `Wheels.linked`, what `te-2.14` has, or `Wheels.described`, the metadata of it.
    """

    def __init__(self, folder: Path, wheels: Wheels, beside: Path) -> None:
        self.wheels = wheels
        self.python = folder / "bin" / "python"
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], _unset())
        self.packages = next(folder.glob("lib/python3.*/site-packages"))
        (self.packages / "beside.pth").write_text(f"{beside}\n", "utf-8")

    def install(self, installer: str, *arguments: str, constraints: bool = True) -> None:
        """Install as README.md has it, with a folder in the place of the public index."""
        command = {
            "pip": ["pip", "--python", str(self.python), "install", "--no-compile"],
            "uv": ["uv", "pip", "install", "--no-config", "--no-cache", "--python", str(self.python)],
        }[installer]
        folders = [f"--find-links={folder}" for folder in (self.wheels.dist, self.wheels.index)]
        constrained = ["-c", str(self.wheels.dist / "constraints.txt")] if constraints else []
        _run([sys.executable, "-P", "-m", *command, "--no-index", *folders, *constrained, *arguments], _unset())
        self._link_the_library()

    def install_stock(self) -> None:
        _run([*self._pip, "install", "--no-compile", "--no-index", "--no-deps", *self.wheels.stock], _unset())
        self._link_the_library()

    def complaints(self) -> list[str]:
        """What `pip check` says of TransformerEngine."""
        done = subprocess.run([*self._pip, "check"], env=_unset(), capture_output=True, text=True, check=False)
        return [line for line in done.stdout.splitlines() if line.startswith("transformer")]

    def blobs(self) -> dict[str, str]:
        """The ids that git gives to the files that are patched."""
        return {path: blob_id((self.packages / path).read_bytes()) for path in (FUSER, CHECKS)}

    def run(self, script: Path) -> Any:
        """What `script RESULT.json` wrote."""
        return run_worker(
            script,
            on=str(self.python),
            interpreter=self.python,
            laid_over=[],
            variables=stack.variables(self.wheels.release),
        )

    @property
    def _pip(self) -> list[str]:
        return [sys.executable, "-P", "-m", "pip", "--python", str(self.python)]

    def _link_the_library(self) -> None:
        """The library itself, half a GB, is that of `te-2.14`."""
        there = self.packages / LIBRARY
        if there.parent.is_dir() and not there.is_symlink():
            there.symlink_to(self.wheels.library)


def _without_library(native: Path, folder: Path) -> None:
    """A copy of the native library's wheel in `folder`, with all but the library."""
    with zipfile.ZipFile(native) as whole, zipfile.ZipFile(folder / native.name, "w") as copy:
        for member in whole.namelist():
            if member == LIBRARY:
                continue
            data = whole.read(member)
            if member.endswith(".dist-info/RECORD"):
                lines = data.splitlines(keepends=True)
                data = b"".join(line for line in lines if not line.startswith(LIBRARY.encode()))
            copy.writestr(member, data)


def _run(command: list[str], variables: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _unset() -> dict[str, str]:
    """The environment variables without what a user has set for pip or for uv, and without pip's configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull}
