"""Models made for tests: random, tiny, and the same at every call."""

from treepass.testing.models import tiny_llama, tiny_recurrent

__all__ = ["tiny_llama", "tiny_recurrent"]
