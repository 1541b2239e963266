"""A second language model as a drafter: a chain of its own choices, with the target's noise."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from treepass.cache import TreeCache
from treepass.drafters.base import Candidates, ChildLaw, Draftable, NoDrafter, Outcome, Plan
from treepass.target import HFTarget, Target, prefill
from treepass.tree import DraftTree, Forest

CHAIN_DEPTH = 5
"""Tokens of a chain at most."""

LOOKED_AT = 64
"""Likeliest tokens among which the draft model chooses."""

VOCABULARY_PADDING = 1024
"""Most ids by which two vocabularies may differ and still be the same one, padded."""


@dataclass(slots=True)
class _Draft:
    """What the draft model has of a sequence.

    Attributes:
        cache: its rows.
        text: how many tokens of the sequence they begin with.
        chain: the tokens drafted behind them whose rows are there.
    """

    cache: TreeCache
    text: int = 0
    chain: list[int] = field(default_factory=list)


class LanguageModelDrafter(NoDrafter):
    """Another causal language model with the target's vocabulary; each level is one pass over all sequences."""

    name = "lm"
    law: ChildLaw = "shared noise"

    def __init__(self, model: object, vocab_size: int, depth: int = CHAIN_DEPTH) -> None:
        """Wraps the draft model.

        Args:
            model: a transformers causal language model in evaluation mode, or a target.
            vocab_size: of the target; tokens beyond it are never drafted.
            depth: tokens of a chain at most.

        Raises:
            UnsupportedModelError: if the draft model cannot decode trees exactly.
            ValueError: if its vocabulary is another one.
        """
        self.target: Target = model if isinstance(model, HFTarget) else HFTarget(model)
        if abs(self.target.vocab_size - vocab_size) > VOCABULARY_PADDING:
            raise ValueError(
                f"the draft model has a vocabulary of {self.target.vocab_size} tokens, the target one of {vocab_size}; "
                "a drafter needs the target's own"
            )
        self.vocab_size = min(vocab_size, self.target.vocab_size)
        self.depth = depth
        self._drafts: dict[int, _Draft] = {}

    def begin(self, session: Draftable, prompt: Candidates | None) -> None:
        """Makes an empty cache for the sequence."""
        self._drafts[id(session)] = _Draft(self.target.new_cache(len(session.ids)))

    def end(self, session: Draftable) -> None:
        """Drops the cache of the sequence."""
        self._drafts.pop(id(session), None)

    def reset(self) -> None:
        """Drops all caches."""
        self._drafts.clear()

    def observe(self, sessions: Sequence[Draftable], outcomes: Sequence[Outcome]) -> None:
        """Nothing to do: ``propose`` sees what became of the chain in the text."""

    def propose(self, sessions: Sequence[Draftable], plan: Plan) -> list[DraftTree]:
        """A chain for every sequence that the draft model can read."""
        depths = [
            min(depth, self.depth, plan.nodes, self.target.max_length - len(session.ids))
            if max(session.ids) < self.target.vocab_size
            else 0
            for session, depth in zip(sessions, plan.depths, strict=True)
        ]
        drafts = [self._drafts[id(session)] for session in sessions]
        chains = [[session.ids[-1]] for session in sessions]
        probabilities = [[1.0] for _ in sessions]
        for draft, session, depth in zip(drafts, sessions, depths, strict=True):
            if depth > 0:
                self._catch_up(draft, session)
        for level in range(max(depths)):
            live = [i for i, depth in enumerate(depths) if level < depth]
            caches = [drafts[i].cache for i in live]
            trees = tuple(DraftTree.root_only(chains[i][-1]) for i in live)
            logits = self.target.forward(Forest(trees, tuple(cache.length for cache in caches)), caches).logits
            for i, cache, row in zip(live, caches, logits, strict=True):
                cache.commit([0])
                token, probability = self._choice(sessions[i], row, cache.length)
                chains[i].append(token)
                probabilities[i].append(probabilities[i][-1] * probability)
        for draft, session, chain, depth in zip(drafts, sessions, chains, depths, strict=True):
            if depth > 0:  # the last token of a chain has no row
                draft.text, draft.chain = len(session.ids), chain[1:-1]
        return [
            DraftTree.from_parents(chain, [-1, *range(len(chain) - 1)], probability)
            for chain, probability in zip(chains, probabilities, strict=True)
        ]

    def _catch_up(self, draft: _Draft, session: Draftable) -> None:
        """Keeps the rows of what was accepted, forgets the others, and computes those of the rest of the text."""
        new = session.ids[draft.text :]
        kept = next((i for i, pair in enumerate(zip(draft.chain, new, strict=False)) if pair[0] != pair[1]), None)
        kept = min(len(draft.chain), len(new)) if kept is None else kept
        draft.cache.truncate(min(draft.text + kept, len(session.ids) - 1, draft.cache.length))
        prefill(self.target, draft.cache, session.ids[draft.cache.length : -1])

    def _choice(self, session: Draftable, row: torch.Tensor, position: int) -> tuple[int, float]:
        """The draft model's token at a position, chosen with the target's noise, and its probability."""
        logprobs = row[: self.vocab_size].float().log_softmax(dim=-1)
        values, tokens = logprobs.topk(min(LOOKED_AT, self.vocab_size))
        ids, logq = tokens.cpu().numpy().astype(np.int64), values.double().cpu().numpy()
        best = int(np.argmax(session.sampler.draft_scores(logq, ids, position)))
        return int(ids[best]), min(1.0, float(np.exp(logq[best])))
