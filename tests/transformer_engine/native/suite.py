"""`scripts/test.sh te`: makes the native stack, so that it is seen to be made, and then runs the suite, or compares."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from overlay.errors import OverlayError
from tests.variants import ROOT

FOLDER = Path(__file__).parent


def main(arguments: Sequence[str]) -> int:
    """pytest's exit status, or that of the comparison; 1 where the stack cannot be made, 2 for wrong usage, 130 where
    somebody stopped it."""
    from tests.transformer_engine.native import compare, gpu, stack

    if "--gpu" in arguments:
        return gpu.main([word for word in arguments if word != "--gpu"])
    parser = argparse.ArgumentParser(
        prog="scripts/test.sh te",
        description="The patched TransformerEngine with its native library, on a machine without a GPU. All other "
        "arguments go to pytest.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkout", metavar="PATH", help="compare upstream's own tests in this tree (te --checkout PATH --help)"
    )
    parser.add_argument("--gpu", action="store_true", help="what needs a GPU, in five minutes (te --gpu --help)")
    parser.add_argument("--release", default=stack.RELEASE, choices=stack.releases(), help=f"default: {stack.RELEASE}")
    if any(word.partition("=")[0] == "--device" for word in arguments):
        parser.error("--device goes with --gpu")
    if any(word.startswith("--checkout") for word in arguments):
        return compare.main(arguments)
    options, rest = parser.parse_known_args(arguments)
    try:
        stack.installed(stack.patched(options.release))
    except OverlayError as error:
        sys.stderr.write(f"overlay: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("overlay: interrupted: what was not complete is made anew by the next run\n")
        return 130
    os.chdir(ROOT)
    return pytest.main(
        [str(FOLDER.relative_to(ROOT)), "-o", "python_files=suite_*.py", f"--release={options.release}", *rest]
    )
