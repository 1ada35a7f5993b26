"""What `modeling_overlay.pth` imports when an interpreter starts: as little as can be, for every process pays for it.

The wheel has it as the package `_modeling_overlay` beside this one: `overlay` may be the name of a module of a
program's own, and is not imported before a package that is covered is.
"""

import os
import sys


class Watch:
    """Stands on `sys.meta_path`, and asks the finder, once a covered package is imported, about that alone."""

    finder = None

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        """See `overlay.finder.Finder.find_spec`."""
        if fullname.partition(".")[0] not in ("transformers", "transformer_engine"):
            return None
        if self.finder is None:
            try:
                from overlay.activation import take_over
            except ImportError as error:  # uninstalled since, or another `overlay` is first on the path
                self._say(error)
                return None
            take_over(self)
        return self.finder and self.finder.find_spec(fullname, path, target)

    def _say(self, error: ImportError) -> None:
        message = f"modeling-overlay: nothing is mended in this process: {error}"
        if os.environ.get("MODELING_OVERLAY") == "strict":
            raise RuntimeError(message) from error
        import warnings

        warnings.warn(message, RuntimeWarning, stacklevel=3)


if os.environ.get("MODELING_OVERLAY") != "0":
    sys.meta_path.insert(0, Watch())  # type: ignore[arg-type]
