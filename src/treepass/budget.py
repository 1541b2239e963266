"""Buying nodes: how many of a candidate tree are worth their rows."""

import numpy as np

from treepass.tree import DraftTree

ROW_COST = 0.015
"""Cost of a further row in units of a pass over one row; below what two CPU cores need, since a wide tree also teaches.

A constant stands in for a measured table of costs."""


def buy(tree: DraftTree, limit: int, row_cost: float = ROW_COST) -> DraftTree:
    """The likeliest nodes, as many as give the most expected tokens per unit of time, and at most ``limit``.

    A pass over n nodes is expected to emit ``1 + sum of their path probabilities`` tokens in ``1 + row_cost * n`` units
    of time. Nodes are taken best-first, which keeps the tree closed under ancestors; the maximum is the global one.

    Args:
        tree: the candidates.
        limit: most nodes.
        row_cost: cost of a node's row, in units of a pass over the root alone.

    Raises:
        ValueError: if ``limit`` is negative.
    """
    candidates = tree.best(limit)
    probabilities = -np.sort(-candidates.path_prob[1:])
    expected = 1 + np.concatenate(([0.0], np.cumsum(probabilities)))
    cost = 1 + row_cost * np.arange(len(expected))
    return candidates.best(int(np.argmax(expected / cost)))
