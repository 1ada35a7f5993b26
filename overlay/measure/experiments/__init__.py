"""The experiments that show the faults, and that they are mended: what runs in a build, and what is right there.

A module `NAME.py` says what is run and judges it, with the standard library alone; `NAME_worker.py` is what runs,
beside torch and the build (`overlay.measure.rows`). The tests run these workers, too, and ask more of them.
"""
