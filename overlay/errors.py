"""The one exception that a user of `overlay` meets."""


class OverlayError(Exception):
    """What was expected, what was found and what to do, in one line. The command line prints it and exits 1."""
