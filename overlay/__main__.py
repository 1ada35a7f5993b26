"""`python -m overlay`: the command line."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  # before anything is imported that an older Python cannot read
    sys.exit(
        f"overlay: expected Python 3.11 or later, found {sys.version.split()[0]} at {sys.executable}: name another "
        "one; if this one trains, install the patched wheels (scripts/apply.sh), which need nothing of this program"
    )

from overlay.cli import main

if __name__ == "__main__":
    main()
