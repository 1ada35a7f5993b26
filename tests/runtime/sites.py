"""A virtual environment with small packages in place of transformers, and the overlay installed for them."""

import json
import os
import shutil
import subprocess
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from overlay import manifest
from tests.variants import ROOT

STOCK = b'''"""A layer."""


class Layer:
    def forward(self) -> str:
        return "stock"


def told(layer: type = Layer) -> str:
    return layer().forward()


def fails() -> None:
    raise ValueError("line 13")
'''
PATCHED = STOCK.replace(b'"""A layer."""', manifest.NOTICE + b'hooks.\n"""A layer."""').replace(
    b'"stock"', b'"patched"'
)
COVERED = "transformers/modeling_layers.py"
UTILS = "transformers/utils/generic.py"
RIGHT = b"FIXED = True\n"
"""What an upstream release with a fix of its own has at `UTILS`."""

TOLD = "import transformers.modeling_layers as m; print(m.told())"


@dataclass
class Site:
    """A virtual environment: its folder, and the variables that its processes see."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python3*/site-packages")
        return found

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def install(self, files: Mapping[str, bytes], where: Path | None = None) -> Path:
        """Writes files below `where`, by default into site-packages, with an `__init__.py` in each folder."""
        for path, content in files.items():
            file = (where or self.packages) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            for parent in Path(path).parents[:-1]:
                ((where or self.packages) / parent / "__init__.py").touch()
        return where or self.packages

    def install_overlay(self, where: Path | None = None, *, pth: bool = True) -> Path:
        """The run-time face with one post-image, as the overlay wheel installs it."""
        place = where or self.packages
        kept = shutil.ignore_patterns("__pycache__", "patched", "*.pth")
        shutil.copytree(ROOT / "overlay", place / "overlay", ignore=kept, dirs_exist_ok=True)
        folder = place / "overlay" / "patched"
        image = folder / "transformers" / "1.0" / COVERED
        image.parent.mkdir(parents=True)
        image.write_bytes(PATCHED)
        file = {
            "path": COVERED,
            "before": manifest.blob_id(STOCK),
            "after": manifest.blob_id(PATCHED),
            "image": f"transformers/1.0/{COVERED}",
        }
        fault = {"code": "stock", "text": "it says stock"}
        release = {"project": "transformers", "version": "1.0", "series": "s", "faults": [fault], "files": [file]}
        right = {UTILS: {manifest.blob_id(RIGHT): "2.0"}}
        listing = {"format": manifest.FORMAT, "complete": True, "releases": [release], "right": right}
        (folder / "manifest.json").write_text(json.dumps(listing), encoding="utf-8")
        (place / "_modeling_overlay").mkdir(exist_ok=True)
        shutil.move(place / "overlay/startup.py", place / "_modeling_overlay/__init__.py")
        if pth:
            (place / "modeling_overlay.pth").write_bytes((ROOT / "overlay" / "modeling_overlay.pth").read_bytes())
        return place

    def run(self, code: str, *options: str) -> "Done":
        """Runs `code` in a new process, from a folder that has nothing in it."""
        return self.command("-c", code, options=options)

    def command(self, *arguments: str, options: Sequence[str] = ()) -> "Done":
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        environment.pop("MODELING_OVERLAY", None)
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        done = subprocess.run(
            [str(self.python), *options, *arguments],
            env=environment | self.variables,
            cwd=empty,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        return Done(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Done:
    """How a process ended, and what it said."""

    code: int
    out: str
    said: str

    def says(self, *lines: str) -> None:
        """It ended well, with these lines, and not a word on stderr."""
        assert (self.code, self.out.splitlines(), self.said) == (0, list(lines), "")

    def fails(self, *parts: str) -> None:
        """It ended with an error whose last line has these parts."""
        last = self.said.strip().splitlines()[-1]
        assert self.code == 1, self
        for part in parts:
            assert part in last, self.said


def make(folder: Path) -> Site:
    """An empty virtual environment."""
    venv.create(folder, symlinks=True, with_pip=False)
    return Site(folder)
