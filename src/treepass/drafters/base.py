"""What a drafter is: it proposes candidate trees with path probabilities, and learns from what became of them.

A drafter may be wrong, slow or broken: the text stays right. Drafters see sequences through ``Draftable`` and never
reach into the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from treepass.sampling import Sampler
from treepass.tree import DraftTree, FloatArray, IntArray

ChildLaw = Literal["deterministic", "shared noise"]


class Draftable(Protocol):
    """A live sequence, as a drafter sees it.

    Attributes:
        ids: prompt and emitted tokens; the last one is the root of the next tree. Grows in place.
        prompt_length: how many of them are the prompt.
        sampler: the target's sampler, for its temperature and its noise.
    """

    ids: list[int]
    prompt_length: int
    sampler: Sampler


@dataclass(frozen=True, slots=True)
class Plan:
    """Limits decided before a draft is made.

    Attributes:
        nodes: most drafted nodes per sequence.
        depths: deepest useful level for each sequence; 0 where no draft can pay.
    """

    nodes: int
    depths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The target's own likeliest tokens at some rows: those of a tree, or the last ones of a prompt.

    Attributes:
        tokens: int64 [rows, k], likeliest first.
        logprobs: float64 [rows, k], log-probabilities under the raw model.
    """

    tokens: IntArray
    logprobs: FloatArray

    def rows(self, start: int, count: int) -> "Candidates":
        """The candidates of ``count`` rows from ``start`` on."""
        return Candidates(self.tokens[start : start + count], self.logprobs[start : start + count])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a tree.

    Attributes:
        tree: the tree that was verified.
        path: accepted rows, after the cut.
        emitted: tokens added to the text, after the cut.
        candidates: the target's likeliest tokens at every row, if the drafter asked for them.
    """

    tree: DraftTree
    path: tuple[int, ...]
    emitted: tuple[int, ...]
    candidates: Candidates | None = None


class Drafter(Protocol):
    """Proposes trees for the whole forest at once.

    Attributes:
        name: as given on the command line.
        law: how children are chosen: as a function of the text alone, or with the sampler's own noise.
        candidates: how many of the target's likeliest tokens per row it wants to see; 0 for none.
        prompt_rows: for how many of the prompt's last rows it wants to see them in ``begin``.
    """

    name: str
    law: ChildLaw
    candidates: int
    prompt_rows: int

    def begin(self, session: Draftable, prompt: Candidates | None) -> None:
        """A sequence enters.

        Args:
            session: its ids are the prompt.
            prompt: candidates of the last rows computed by prefill, up to ``prompt_rows``: row i from the end belongs
                to ``session.ids[-2 - i]``. None if none were wanted, or if prefill was not needed.
        """
        ...

    def propose(self, sessions: Sequence[Draftable], plan: Plan) -> list[DraftTree]:
        """One candidate tree per sequence, its root the sequence's last token."""
        ...

    def observe(self, sessions: Sequence[Draftable], outcomes: Sequence[Outcome]) -> None:
        """Learns; ``session.ids`` already ends in the emitted tokens."""
        ...

    def end(self, session: Draftable) -> None:
        """A sequence leaves; what is remembered for it alone is dropped."""
        ...

    def reset(self) -> None:
        """Forgets everything that lasts over requests."""
        ...


class NoDrafter:
    """Proposes nothing: plain decoding."""

    name = "none"
    law: ChildLaw = "deterministic"
    candidates = 0
    prompt_rows = 0

    def begin(self, session: Draftable, prompt: Candidates | None) -> None:
        """Nothing to remember."""

    def propose(self, sessions: Sequence[Draftable], plan: Plan) -> list[DraftTree]:
        """Roots alone."""
        return [DraftTree.root_only(session.ids[-1]) for session in sessions]

    def observe(self, sessions: Sequence[Draftable], outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""

    def end(self, session: Draftable) -> None:
        """Nothing to drop."""

    def reset(self) -> None:
        """Nothing to forget."""


class RandomDrafter(NoDrafter):
    """Proposes random trees: the drafter of tests, since the text must not depend on it.

    Half of the tokens come from the sequence itself, so that some are accepted; the rest from the whole vocabulary.
    """

    name = "random"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        """Args: tokens are drawn below ``vocab_size``, from a generator seeded with ``seed``."""
        self.vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def propose(self, sessions: Sequence[Draftable], plan: Plan) -> list[DraftTree]:
        """Trees whose size, shape and tokens are random."""
        return [
            self._tree(session.ids, int(self._random.integers(plan.nodes + 1)), depth)
            for session, depth in zip(sessions, plan.depths, strict=True)
        ]

    def _tree(self, ids: list[int], nodes: int, max_depth: int) -> DraftTree:
        tokens, parents, depths, prob = [ids[-1]], [-1], [0], [1.0]
        edges: set[tuple[int, int]] = set()
        for _ in range(nodes):
            parent = int(self._random.integers(len(tokens)))
            from_text = self._random.random() < 0.5
            token = ids[self._random.integers(len(ids))] if from_text else int(self._random.integers(self.vocab_size))
            if depths[parent] >= max_depth or (parent, token) in edges:
                continue
            edges.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            prob.append(prob[parent] * self._random.random())
        return DraftTree.from_parents(tokens, parents, prob)
