"""Signals to a process that a test starts."""

import signal


def heard() -> None:
    """Between fork and exec (`preexec_fn`): none is ignored that ends a program, as SIGINT is in a shell's background
    and SIGHUP below nohup."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
