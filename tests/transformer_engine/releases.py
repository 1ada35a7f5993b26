"""The releases of TransformerEngine that the tests look at."""

from overlay.queue import lock
from tests.variants import ROOT

PACKAGE = lock.read(ROOT / "upstream.lock").packages["transformer_engine"]
DELIVERED = [release.version for release in PACKAGE.releases if release.use == "deliver"]
MENDED = "2.16.0"
"""The first release with upstream's own fix."""
