"""What `modeling_overlay.pth` imports when an interpreter starts: as little as can be, for every process pays for it.

The finder itself is imported when a package that is covered is.
"""

import os
import sys


class _Watch:
    """Stands first on `sys.meta_path` until a covered package is imported, and hands over to the finder then."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in ("transformers", "transformer_engine"):
            from overlay.activation import take_over

            take_over(self)


if os.environ.get("MODELING_OVERLAY") != "0":
    sys.meta_path.insert(0, _Watch())
