"""What a program of `overlay/pull_request/programs` prints with the package on the path.

`python program_worker.py RESULT.json PROGRAM`. That of TransformerEngine runs without its native library.
"""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path


def main(result: Path, program: Path) -> None:
    if "transformer_engine" in program.read_text("utf-8"):
        without_the_native_library()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(program), run_name="__main__")
    result.write_text(json.dumps(said.getvalue().splitlines()), "utf-8")


def without_the_native_library() -> None:
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from overlay.measure import te_stand_ins

    te_stand_ins.load_operations()
    import transformer_engine.pytorch.ops as operations
    from transformer_engine.pytorch.ops.basic.make_extra_output import MakeExtraOutput
    from transformer_engine.pytorch.ops.sequential import Sequential

    operations.MakeExtraOutput, operations.Sequential = MakeExtraOutput, Sequential


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
