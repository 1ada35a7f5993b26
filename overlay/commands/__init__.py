"""One module a verb: its arguments, and the thin command that calls what does the work.

A module has `add(verbs)`, which adds its parser with `command` set to a function that takes the options and returns the
exit code, or nothing for 0. Only the command that was asked for imports what it needs.
"""

import argparse
from importlib import import_module

from overlay import __version__

VERBS = (
    "apply",
    "publish",
    "verify_wheel",
    "explain",
    "doctor",
    "check",
    "verify",
    "bench",
    "edit",
    "refresh",
    "add_release",
    "retire",
    "pr",
    "drift",
    "lock",
)
"""The modules of this folder, in the order of the help."""


def parser(asked: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line.

    Args:
        asked: the first word of the command line. Where it is a verb, the parser has no other: to make them all takes a
            tenth of a short run.
    """
    whole = argparse.ArgumentParser(
        prog="overlay",
        description="Patched wheels of transformers and TransformerEngine, which train with the right gradients under "
        "activation checkpointing.",
        epilog="What a command takes, and which page has more of it: overlay COMMAND --help.",
    )
    whole.add_argument("--version", action="version", version=f"modeling-overlay {__version__}")
    verbs = whole.add_subparsers(metavar="COMMAND", required=True)
    for name in [verb for verb in VERBS if verb.replace("_", "-") == asked] or VERBS:
        import_module(f"overlay.commands.{name}").add(verbs)
    return whole
