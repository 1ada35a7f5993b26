"""What `import transformer_engine.pytorch` comes to, and whose code it is.

`python import_worker.py RESULT.json` writes the error of the import, if there is one, the versions and the files of the
packages, and what an operation does to a tensor that it hands on.
"""

import hashlib
import importlib
import importlib.util
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PATCHED = ("transformer_engine/pytorch/ops/fuser.py", "transformer_engine/common/__init__.py")


def blob(path: Path) -> str:
    """The id that git gives to a file's content."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def versions() -> dict[str, str]:
    found = {}
    for project in ("transformer_engine", "transformer_engine_torch", "transformer_engine_cu13"):
        try:
            found[project] = metadata.version(project)
        except metadata.PackageNotFoundError:
            continue
    return found


def imported() -> dict[str, Any]:
    """Imports the package and hands a tensor on, without gradients."""
    package = importlib.import_module("transformer_engine")  # before torch: its checks need nothing else
    import torch
    import transformer_engine.pytorch as te

    tensor = torch.ones(4, 8, requires_grad=True) * 1
    try:
        with torch.no_grad():
            output, extra = te.ops.MakeExtraOutput()(tensor)
        said = "handed on" if output is extra is tensor else "copied"
    except RuntimeError as error:
        said = str(error)
    packages = {
        name: module.__file__
        for name, module in sys.modules.items()
        if name.partition(".")[0].startswith("transformer_")
    }
    return {"version": package.__version__, "operation": said, "files": packages}


def main(result: Path) -> None:
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parents[1]
    found: dict[str, Any] = {"versions": versions(), "blobs": {path: blob(root / path) for path in PATCHED}}
    try:
        found |= imported()
    except (AssertionError, ImportError, RuntimeError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    result.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
