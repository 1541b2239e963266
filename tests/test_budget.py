"""Buying takes the global optimum of expected tokens per time, and never a child without its parent."""

import numpy as np
import pytest

from treepass.budget import ROW_COST, buy
from treepass.testing import random_tree
from treepass.tree import DraftTree

unit = pytest.mark.unit


def value(path_prob, row_cost: float) -> float:
    """Expected tokens per unit of time."""
    return (1 + sum(path_prob[1:])) / (1 + row_cost * (len(path_prob) - 1))


@unit
@pytest.mark.parametrize("row_cost", [0.0, 0.01, 0.1, 1.0, 5.0])
def test_no_number_of_likeliest_nodes_is_worth_more(row_cost):
    rng = np.random.default_rng(0)
    for _ in range(100):
        tree = random_tree(rng, 0, nodes=int(rng.integers(1, 30)), max_depth=6, vocab_size=40)
        limit = int(rng.integers(0, 40))
        bought = buy(tree, limit, row_cost)
        assert bought.nodes <= limit
        best = max(value(tree.best(nodes).path_prob, row_cost) for nodes in range(min(limit, tree.nodes) + 1))
        assert value(bought.path_prob, row_cost) == pytest.approx(best)


@unit
def test_a_sure_chain_is_bought_without_the_unlikely_siblings():
    chain = DraftTree.chain(range(11), [1.0] + [0.99] * 10)
    siblings = DraftTree.from_parents([0, *range(50, 70)], [-1] + [0] * 20, [1.0] + [0.02] * 20)
    assert buy(DraftTree.merge([chain, siblings]), 32).nodes == 10
    assert buy(siblings, 32).nodes == 20


@unit
def test_nothing_is_bought_where_nothing_pays():
    tree = DraftTree.from_parents([0, 1, 2], [-1, 0, 0], [1.0, ROW_COST / 2, ROW_COST / 3])
    assert buy(tree, 8).nodes == 0
    assert buy(tree, 8, row_cost=0.0).nodes == 2


@unit
def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="nodes must be >= 0, got -1"):
        buy(DraftTree.root_only(1), -1)
