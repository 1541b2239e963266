"""The union of drafters: their trees merged into one, nodes with the same path joined."""

from collections.abc import Sequence

from treepass.drafters.base import Candidates, ChildLaw, Draftable, Drafter, Outcome, Plan
from treepass.tree import DraftTree


class UnionDrafter:
    """Several drafters as one. The merged tree may hold more nodes than the plan; the engine buys the likeliest."""

    def __init__(self, parts: Sequence[Drafter], name: str = "") -> None:
        """Args: the drafters, at least one; ``name`` defaults to theirs, joined.

        Raises:
            ValueError: without drafters.
        """
        if not parts:
            raise ValueError("a union needs at least one drafter, got none")
        self.parts = tuple(parts)
        self.name = name or "+".join(part.name for part in self.parts)
        self.law: ChildLaw = "shared noise" if any(p.law == "shared noise" for p in self.parts) else "deterministic"
        self.candidates = max(part.candidates for part in self.parts)
        self.prompt_rows = max(part.prompt_rows for part in self.parts)

    def begin(self, session: Draftable, prompt: Candidates | None) -> None:
        """Tells every part."""
        for part in self.parts:
            part.begin(session, prompt)

    def propose(self, sessions: Sequence[Draftable], plan: Plan) -> list[DraftTree]:
        """The merged trees."""
        drafts = [part.propose(sessions, plan) for part in self.parts]
        return [DraftTree.merge(trees) for trees in zip(*drafts, strict=True)]

    def observe(self, sessions: Sequence[Draftable], outcomes: Sequence[Outcome]) -> None:
        """Every part learns from the outcome, whoever proposed the nodes."""
        for part in self.parts:
            part.observe(sessions, outcomes)

    def end(self, session: Draftable) -> None:
        """Tells every part."""
        for part in self.parts:
            part.end(session)

    def reset(self) -> None:
        """Every part forgets."""
        for part in self.parts:
            part.reset()
