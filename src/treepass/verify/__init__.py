"""Verification rules: pure functions that walk down one path of a tree."""

from treepass.verify.base import Verdict
from treepass.verify.follow import follow

__all__ = ["Verdict", "follow"]
