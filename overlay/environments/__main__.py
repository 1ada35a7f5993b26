"""`python -m overlay.environments NAME [ARGUMENT...]`: make the environment if need be, and print its interpreter's
path, or become that interpreter with these arguments."""

import os
import signal
import sys

from overlay import environments
from overlay.errors import OverlayError


def main(arguments: list[str]) -> int:
    if not arguments:
        sys.stderr.write(f"usage: python -m overlay.environments {{{','.join(environments.names())}}} [ARGUMENT...]\n")
        return 2
    name, *rest = arguments
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    try:
        interpreter = environments.python(name)
        environments.remember(name, interpreter)
    except OverlayError as error:
        sys.stderr.write(f"overlay: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("overlay: interrupted: the environment is made anew by the next run\n")
        return 130
    if rest:
        os.execv(interpreter, [str(interpreter), *rest])  # noqa: S606
    sys.stdout.write(f"{interpreter}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
