"""Drafters: whatever proposes. ``build_drafter`` makes one from its name."""

from typing import Any

from transformers import PreTrainedModel

from treepass.drafters.base import Candidates, Draftable, Drafter, NoDrafter, Outcome, Plan, RandomDrafter
from treepass.drafters.lm import LanguageModelDrafter
from treepass.drafters.recycling import RecyclingDrafter
from treepass.drafters.suffix import SuffixDrafter
from treepass.drafters.union import UnionDrafter
from treepass.errors import unknown

DRAFTERS = ("auto", "suffix", "recycling", "union", "random", "none")
"""Names that ``build_drafter`` knows; ``auto`` is the union of suffix and recycling."""

DRAFTER_PARTS = ("name", "law", "candidates", "prompt_rows", "begin", "propose", "observe", "end", "reset")

__all__ = [
    "DRAFTERS",
    "Candidates",
    "Draftable",
    "Drafter",
    "LanguageModelDrafter",
    "NoDrafter",
    "Outcome",
    "Plan",
    "RandomDrafter",
    "RecyclingDrafter",
    "SuffixDrafter",
    "UnionDrafter",
    "build_drafter",
]


def build_drafter(drafter: str | Drafter | PreTrainedModel | None, *, vocab_size: int, memory: bool = True) -> Drafter:
    """A drafter from its name; a drafter object is returned as it is, None is ``none``.

    Args:
        drafter: one of ``DRAFTERS``, a drafter, or another causal language model with the target's vocabulary.
        vocab_size: the target's.
        memory: whether it remembers earlier requests.

    Raises:
        ValueError: if the name is unknown, with the nearest known one, or if the object is no drafter.
    """
    if drafter is None:
        return NoDrafter()
    if isinstance(drafter, PreTrainedModel):
        return LanguageModelDrafter(drafter, vocab_size)
    if not isinstance(drafter, str):
        # A class has the parts too, but it is not a drafter before it is called.
        missing = [name for name in DRAFTER_PARTS if isinstance(drafter, type) or not hasattr(drafter, name)]
        if missing:
            raise ValueError(f"a drafter needs {', '.join(missing)}, got {drafter!r:.60}; see drafters.base.Drafter")
        return drafter
    if drafter in ("auto", "union"):
        return UnionDrafter([SuffixDrafter(memory=memory), RecyclingDrafter(memory=memory)])
    known: dict[str, Any] = {
        "suffix": lambda: SuffixDrafter(memory=memory),
        "recycling": lambda: RecyclingDrafter(memory=memory),
        "random": lambda: RandomDrafter(vocab_size),
        "none": NoDrafter,
    }
    if drafter not in known:
        raise ValueError(unknown("drafter", drafter, DRAFTERS))
    return known[drafter]()
