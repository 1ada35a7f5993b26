"""In-place operations of a block that its recompute would see, found in the source of its `forward`.

Activation checkpointing runs a block a second time, on the inputs, parameters and buffers as they are by then. What the
block itself has changed in place in its first run is changed once more. `changes(block)` follows the tensors that come
from outside of the block through its `forward`, its submodules' and the functions that these call, and says where one
is changed. Nothing is run: conditions, loops and calls are followed as far as the block's attributes say how they go.

What cannot be told (a function without source, a tensor that may be a copy) does not count as a change, or counts as
one that is not certain.
"""

from overlay.in_place.changes import Change as Change
from overlay.in_place.changes import changes as changes
from overlay.in_place.values import Origin as Origin
