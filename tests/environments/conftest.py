"""A small checkout with environments of its own, whose packages are wheels that the tests make: nothing is fetched."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import signals
from tests.variants import ROOT

MAIN = "import json, os, sys\nimport tiny\nprint(json.dumps([sys.argv[1:], os.getcwd(), tiny.VERSION, sys.prefix]))\n"
"""What stands in for the command line: it needs the environment's package, and says how it was called."""


def make_wheel(folder: Path, version: str) -> Path:
    """The wheel of `tiny`, one module that knows its version."""
    info = f"tiny-{version}.dist-info"
    files = {
        "tiny.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    hashes = {
        name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for name, text in files.items()
    }
    record = (
        "".join(f"{name},sha256={digest},{len(files[name])}\n" for name, digest in hashes.items())
        + f"{info}/RECORD,,\n"
    )
    path = folder / f"tiny-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return path


@dataclass(frozen=True)
class Checkout:
    """A copy of the scripts and of the modules that they begin with, beside an empty cache folder."""

    root: Path
    environment: Mapping[str, str]

    @property
    def cache(self) -> Path:
        return Path(self.environment["XDG_CACHE_HOME"], "modeling-overlay")

    def pin(self, version: str) -> None:
        (self.root / "overlay" / "environments" / "queue.txt").write_text(
            f"# a package for the tests; at once\ntiny=={version}\n", "utf-8"
        )

    def start(self, *arguments: str, script: Path | None = None, **changes: str) -> subprocess.Popen[str]:
        command = [str(script or self.root / "scripts" / "apply.sh"), *arguments]
        environment = {**self.environment, **changes}
        return subprocess.Popen(
            command,
            cwd=self.root.parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=signals.heard,
        )

    def run(self, *arguments: str, script: Path | None = None, **changes: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of `scripts/apply.sh`, with changes to the process environment."""
        process = self.start(*arguments, script=script, **changes)
        out, said = process.communicate(timeout=600)
        return process.returncode, out, said


def make_checkout(folder: Path) -> Checkout:
    root = folder / "ein Ordner für Übungen"
    wheels = folder / "wheels"
    wheels.mkdir()
    for version in ("1.0", "2.0"):
        make_wheel(wheels, version)
    shutil.copytree(ROOT / "scripts", root / "scripts")
    package = root / "overlay"
    shutil.copytree(
        ROOT / "overlay" / "environments", package / "environments", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("__init__.py", "errors.py", "atomic.py", "cache.py", "processes.py", "progress.py"):
        shutil.copy(ROOT / "overlay" / name, package / name)
    (package / "__main__.py").write_text(MAIN, "utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment |= {
        "XDG_CACHE_HOME": str(folder / "cache é"),
        "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }
    checkout = Checkout(root, environment)
    checkout.pin("1.0")
    return checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return make_checkout(tmp_path)
