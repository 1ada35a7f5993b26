"""The formulas by themselves; what they say of FSDP2 is measured in tests/distributed/test_scaling.py."""

import subprocess
import sys

import pytest

from overlay.errors import OverlayError
from overlay.measure.collectives import Collectives, Sharded, Unit, collectives, whole_gradients
from tests.variants import ROOT

LAYER = Unit(((5, 4), (8,)), frozen=((3, 2),))
ROOT_UNIT = Unit(((8, 4),))


def test_each_parameter_is_filled_up_along_its_first_dimension() -> None:
    assert (LAYER.gathered(1), LAYER.reduced(1)) == (20 + 8 + 6, 20 + 8)
    assert (LAYER.gathered(4), LAYER.reduced(4)) == (32 + 8 + 8, 32 + 8)
    assert LAYER.gathered(16) == 64 + 16 + 32


def test_a_layer_that_is_all_frozen_is_gathered_and_not_reduced() -> None:
    model = Sharded((LAYER, Unit((), frozen=((8, 8),))), ROOT_UNIT, ranks=2)
    assert collectives(model, "reentrant", 3) == Collectives(
        2, 6 * 2 + 1, 3 + 1, gathered=(6 * (24 + 8 + 8 + 64) + 32) * 4, reduced=(3 * (24 + 8) + 32) * 4
    )
    assert whole_gradients(model, "reentrant", 3) == (28 + 32) * 4


def test_what_a_rank_sends_and_how_long_it_takes() -> None:
    found = collectives(Sharded((LAYER,), ROOT_UNIT, ranks=4, gathered_bytes=2), "non-reentrant")
    assert (found.gathered, found.reduced) == ((2 * 48 + 32) * 2, (40 + 32) * 4)
    assert found.sent == (256 + 288) * 3 // 4
    assert found.seconds(204) == 2


def test_one_rank_communicates_nothing() -> None:
    assert collectives(Sharded((LAYER,), ROOT_UNIT, ranks=1), "reentrant", 4) == Collectives(1, 0, 0, 0, 0)


def test_an_impossible_step_is_refused() -> None:
    with pytest.raises(OverlayError, match="expected one or more ranks, found 0"):
        Sharded((LAYER,), ROOT_UNIT, ranks=0)
    model = Sharded((LAYER,), ROOT_UNIT, ranks=2)
    for function in (collectives, whole_gradients):
        with pytest.raises(OverlayError, match="expected one or more forwards, found 0"):
            function(model, "none", 0)


def test_nothing_but_the_standard_library_is_needed() -> None:
    """A plan for a cluster is made on a laptop."""
    program = "import overlay.measure.collectives, sys; sys.exit('torch' in sys.modules)"
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {program}"], check=True
    )
