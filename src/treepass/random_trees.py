"""Random draft trees, for whatever has to hold for every tree."""

import numpy as np

from treepass.tree import DraftTree, IntArray


def random_tree(rng: np.random.Generator, root: int, *, nodes: int, max_depth: int, vocab_size: int) -> DraftTree:
    """A random tree whose rows stand in no order of depth and whose siblings may stand far apart.

    Args:
        rng: Where the randomness comes from.
        root: Token of the root.
        nodes: Drafted nodes; fewer where depth and vocabulary leave no place for more.
        max_depth: Deepest level.
        vocab_size: Tokens are drawn below it.
    """
    tokens, parents, depths, path_prob = [root], [-1], [0], [1.0]
    children: list[set[int]] = [set()]
    open_rows = [0] if max_depth else []
    while len(tokens) <= nodes and open_rows:
        parent = open_rows[int(rng.integers(len(open_rows)))]
        free = [token for token in range(vocab_size) if token not in children[parent]]
        token = free[int(rng.integers(len(free)))]
        children[parent].add(token)
        if len(free) == 1:
            open_rows.remove(parent)
        if depths[parent] + 1 < max_depth:
            open_rows.append(len(tokens))
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        path_prob.append(path_prob[parent] * float(rng.random()))
        children.append(set())
    tree = DraftTree.from_parents(tokens, parents, path_prob)
    return tree.reorder(random_order(rng, tree))


def random_order(rng: np.random.Generator, tree: DraftTree) -> IntArray:
    """A random order of the rows in which parents precede their children, for ``DraftTree.reorder``."""
    order: list[int] = []
    ready = [0]
    while ready:
        row = ready.pop(int(rng.integers(len(ready))))
        order.append(row)
        ready += tree.children(row).values()
    return np.array(order, dtype=np.int64)
