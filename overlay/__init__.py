"""Right gradients under activation checkpointing: a small queue of patches over pinned releases of transformers and
TransformerEngine."""

__version__ = "0.1.0"
