"""Best-first expansion: from "what follows this context" to a tree of the likeliest paths."""

import heapq
from collections.abc import Callable, Iterable

from treepass.tree import DraftTree

PATH_PROB_FLOOR = 0.015
"""Paths below this estimate are not proposed: where a row costs two hundredths of a pass it earns less than that."""

Continuations = Callable[[tuple[int, ...], int], Iterable[tuple[int, float]]]
"""Maps a context (its last tokens, the node's own last) and the node's depth to children: (token, probability)."""


def best_first(
    context: tuple[int, ...], continuations: Continuations, nodes: int, depth: int, window: int
) -> DraftTree:
    """The tree of the ``nodes`` likeliest paths below a context, likeliest first. O(nodes * log nodes) plus look-ups.

    Args:
        context: last committed tokens; the last one is the root.
        continuations: children of a node and their probabilities given the node, at most 1; tokens must differ.
        nodes: most drafted nodes.
        depth: deepest level.
        window: tokens of context that ``continuations`` looks at.
    """
    tokens, parents, path_prob = [context[-1]], [-1], [1.0]
    contexts, depths = [context[-window:]], [0]
    frontier: list[tuple[float, int, int, int]] = []
    pushed = 0

    def expand(row: int) -> None:
        nonlocal pushed
        if depths[row] >= depth:
            return
        for token, prob in continuations(contexts[row], depths[row]):
            path = path_prob[row] * prob
            if path >= PATH_PROB_FLOOR:
                # The counter settles ties: earlier pushes first.
                heapq.heappush(frontier, (-path, pushed, row, token))
                pushed += 1

    expand(0)
    while frontier and len(tokens) <= nodes:
        negative, _, parent, token = heapq.heappop(frontier)
        tokens.append(token)
        parents.append(parent)
        path_prob.append(-negative)
        contexts.append((*contexts[parent], token)[-window:])
        depths.append(depths[parent] + 1)
        if len(tokens) <= nodes:
            expand(len(tokens) - 1)
    return DraftTree.from_parents(tokens, parents, path_prob)
