"""The sample upstream, made once a session and copied for each test."""

from tests.deliver.conftest import sample, template

__all__ = ["sample", "template"]
