"""`python -m overlay.environments NAME`: make the environment if need be, and print its interpreter's path."""

import sys

from overlay import environments
from overlay.errors import OverlayError


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write(f"usage: python -m overlay.environments {{{','.join(environments.names())}}}\n")
        return 2
    try:
        interpreter = environments.python(arguments[0])
        environments.remember(arguments[0], interpreter)
    except OverlayError as error:
        sys.stderr.write(f"overlay: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("overlay: interrupted: the environment is made anew by the next run\n")
        return 130
    sys.stdout.write(f"{interpreter}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
