"""Drafters made from a function."""

from collections.abc import Callable, Sequence

from treepass.drafters.base import Draftable, NoDrafter, Plan
from treepass.tree import DraftTree


class FunctionDrafter(NoDrafter):
    """Proposes whatever a function says: for drafters that are right, wrong or out of order on purpose."""

    name = "function"

    def __init__(self, tree_of: Callable[[Draftable, Plan, int], DraftTree]) -> None:
        """Args: ``tree_of`` maps a sequence, the plan and the sequence's depth limit to its tree."""
        self._tree_of = tree_of

    def propose(self, sessions: Sequence[Draftable], plan: Plan) -> list[DraftTree]:
        """One call of the function per sequence."""
        return [self._tree_of(session, plan, depth) for session, depth in zip(sessions, plan.depths, strict=True)]
