"""The default rule: make the target's choice at the root and walk down while a child carries the choice."""

from collections.abc import Callable

from treepass.tree import DraftTree
from treepass.verify.base import C, Verdict


def follow(tree: DraftTree, choose: Callable[[int], C], ends: Callable[[C], bool] = lambda choice: False) -> Verdict[C]:
    """Follows the target's choices down the tree.

    Only rows on the walk are judged, each once. Law-exact for any tree that was built without looking at the target's
    choices, and seed-exact where the choice is a function of the target's law, the seed and the position: then the
    tokens do not depend on the tree at all.

    Args:
        tree: the draft.
        choose: the target's choice at a row.
        ends: asked after every choice, in order, whether the text ends with it; what lies below is not judged then.
    """
    row = 0
    path: list[int] = []
    choices: list[C] = []
    while True:
        choice = choose(row)
        choices.append(choice)
        child = tree.child(row, choice.token)
        ended = ends(choice)
        if child is None:
            return Verdict(tuple(path), tuple(choices), "bonus" if tree.is_leaf(row) else "correction")
        path.append(child)
        if ended:
            return Verdict(tuple(path), tuple(choices), "accepted")
        row = child
