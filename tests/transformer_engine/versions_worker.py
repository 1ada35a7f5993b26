"""What the version checks of `transformer_engine/common/__init__.py` say.

`python versions_worker.py RESULT.json CODE FOLDER` runs the checks of the file CODE where the metadata of FOLDER is
installed beside the transformer_engine on the path. The native library is not there: a check that passes gets as far
as missing it.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def outcome(check: Callable[..., Any], *arguments: str) -> str:
    try:
        check(*arguments)
    except (AssertionError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def main(result: Path, code: Path, folder: str) -> None:
    sys.path.insert(0, folder)
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # upstream's own switch: define the checks, load nothing
    spec = importlib.util.spec_from_file_location("checks", code)
    assert spec is not None
    assert spec.loader is not None
    checks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checks)
    found = {
        "package": outcome(checks.sanity_checks_for_pypi_installation),
        "framework": outcome(checks.load_framework_extension, "torch"),
    }
    result.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
