"""For tests: tiny random models, random trees, drafters made from a function, and targets that watch another one."""

from treepass.testing.models import tiny_llama, tiny_recurrent
from treepass.testing.targets import WatchedTarget
from treepass.testing.trees import FunctionDrafter, random_order, random_tree

__all__ = ["FunctionDrafter", "WatchedTarget", "random_order", "random_tree", "tiny_llama", "tiny_recurrent"]
