"""The patch queue: the lock, the artefacts that it pins, and the series of patches over them."""
