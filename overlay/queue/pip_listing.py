"""What the user's pip is told: `pip config list`, which can be asked for ahead, while other things are read."""

import subprocess
import sys

from overlay.errors import OverlayError

_begun: "list[subprocess.Popen[str]]" = []


def begin() -> None:
    """Asks for it now; the next `read` waits for this answer."""
    _begun.append(
        subprocess.Popen(
            [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "config", "list"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )


def read() -> str:
    """What pip prints, a line `SECTION.OPTION='VALUE'` for each setting.

    Raises:
        OverlayError: there is no pip, or it cannot read its configuration.
    """
    if not _begun:
        begin()
    with _begun.pop() as process:
        printed, failed = process.communicate()
    if process.returncode != 0:
        reason = " ".join((failed.strip() or printed).split()) or "no message"
        raise OverlayError(
            f"expected `{sys.executable} -m pip config list` to print your pip settings, found: {reason}: mend "
            "pip or your pip configuration"
        )
    return printed
