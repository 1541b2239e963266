"""For tests: tiny random models, random trees, drafters made from a function, and targets that watch another one."""

from treepass.random_trees import random_order, random_tree
from treepass.testing.models import tiny_llama, tiny_recurrent
from treepass.testing.precision import NoDowncasts
from treepass.testing.targets import WatchedTarget
from treepass.testing.trees import FunctionDrafter

__all__ = [
    "FunctionDrafter",
    "NoDowncasts",
    "WatchedTarget",
    "random_order",
    "random_tree",
    "tiny_llama",
    "tiny_recurrent",
]
