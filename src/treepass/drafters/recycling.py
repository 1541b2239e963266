"""The recycling drafter: the target's own likeliest tokens, kept and used again.

Every pass leaves, for every row, the target's likeliest next tokens, most of which are thrown away. A table keeps them
by the last two tokens of the row's context, and by the last one alone; a tree is expanded from it best-first. The
tokens that came second where the root was chosen are tried below it: a thought postponed is often said next. After
Token Recycling (arXiv 2408.08696), with a second order of context and with probabilities in place of a fixed shape.
Above temperature 0 children are ranked with the noise of the target's own choice.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from treepass.drafters.base import Candidates, ChildLaw, Draftable, Outcome, Plan
from treepass.drafters.expand import Continuations, best_first
from treepass.sampling import Sampler
from treepass.tree import DraftTree

CANDIDATES = 8
RELIABILITY = {1: 0.35, 2: 0.65}
"""By context length: how much of a kept probability came true in the next like context, on held-out text."""

RUNNERS_UP = 3
RUNNER_UP_PROB = 0.04
"""How often each of the tokens that came second to fourth was chosen one position later instead, on held-out text."""

PROMPT_ROWS = 128
MAX_DEPTH = 16
CAPACITY = 32_768
"""Contexts kept per order; the least recently written are forgotten."""

Key = TypeVar("Key")
Entry = tuple[tuple[int, ...], tuple[float, ...]]


class RecyclingTable:
    """The target's likeliest next tokens by the last one and the last two tokens of the context."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Args: contexts to keep per order."""
        self.capacity = capacity
        self._by_last: OrderedDict[int, Entry] = OrderedDict()
        self._by_last_two: OrderedDict[tuple[int, int], Entry] = OrderedDict()

    def __len__(self) -> int:
        """Contexts kept, over both orders."""
        return len(self._by_last) + len(self._by_last_two)

    def write(self, before: int | None, last: int, entry: Entry) -> None:
        """Keeps ``entry``, tokens and log-probabilities, for a row with token ``last`` after token ``before``."""
        self._put(self._by_last, last, entry)
        if before is not None:
            self._put(self._by_last_two, (before, last), entry)

    def read(self, context: tuple[int, ...]) -> tuple[int, Entry]:
        """The longest order that knows the context, and its entry; order 0 if none does."""
        if len(context) > 1:
            found = self._by_last_two.get((context[-2], context[-1]))
            if found:
                return 2, found
        found = self._by_last.get(context[-1])
        return (1, found) if found else (0, ((), ()))

    def _put(self, entries: OrderedDict[Key, Entry], key: Key, entry: Entry) -> None:
        entries[key] = entry
        entries.move_to_end(key)
        if len(entries) > self.capacity:
            entries.popitem(last=False)


@dataclass(slots=True)
class _Live:
    """What is kept for one live sequence: its table, and the tokens that came second where its root was chosen."""

    table: RecyclingTable
    runners_up: tuple[int, ...] = ()


class RecyclingDrafter:
    """Trees from the target's own earlier candidates."""

    name = "recycling"
    law: ChildLaw = "shared noise"
    candidates = CANDIDATES
    prompt_rows = PROMPT_ROWS

    def __init__(self, *, memory: bool = True) -> None:
        """Args: ``memory`` keeps one table over all requests; without it every sequence has a table of its own."""
        self._table = RecyclingTable() if memory else None
        self._live: dict[int, _Live] = {}

    def begin(self, session: Draftable, prompt: Candidates | None) -> None:
        """Gives the sequence its table, and writes the candidates of the prompt's last rows."""
        live = self._live[id(session)] = _Live(RecyclingTable() if self._table is None else self._table)
        if prompt is None:
            return
        entries = _entries(prompt)
        first = len(session.ids) - 1 - len(entries)
        for place, entry in enumerate(entries, start=first):
            live.table.write(session.ids[place - 1] if place else None, session.ids[place], entry)

    def propose(self, sessions: Sequence[Draftable], plan: Plan) -> list[DraftTree]:
        """One tree per sequence."""
        return [
            best_first(
                tuple(session.ids[-2:]),
                _continuations(self._live[id(session)], session.sampler, len(session.ids)),
                plan.nodes,
                min(depth, MAX_DEPTH),
                2,
            )
            for session, depth in zip(sessions, plan.depths, strict=True)
        ]

    def observe(self, sessions: Sequence[Draftable], outcomes: Sequence[Outcome]) -> None:
        """Writes the candidates of every row, accepted ones last, so that they stand where rows compete."""
        for session, outcome in zip(sessions, outcomes, strict=True):
            if outcome.candidates is None:
                raise ValueError("the recycling drafter needs the target's candidates, got none")
            live = self._live[id(session)]
            root = len(session.ids) - len(outcome.emitted) - 1
            before_root = session.ids[root - 1] if root > 0 else None
            tokens, parents = outcome.tree.tokens.tolist(), outcome.tree.parents.tolist()
            entries = _entries(outcome.candidates)
            accepted = (0, *outcome.path)
            for row in (*(row for row in range(len(tokens)) if row not in accepted), *accepted):
                before = tokens[parents[row]] if row else before_root
                live.table.write(before, tokens[row], entries[row])
            likeliest = entries[accepted[-1]][0]
            live.runners_up = tuple(t for t in likeliest if t != session.ids[-1])[:RUNNERS_UP]

    def end(self, session: Draftable) -> None:
        """Drops the sequence's table, unless it lasts over requests."""
        self._live.pop(id(session), None)

    def reset(self) -> None:
        """Forgets what lasts over requests."""
        if self._table is not None:
            self._table = RecyclingTable()


def _entries(candidates: Candidates) -> list[Entry]:
    return list(zip(map(tuple, candidates.tokens.tolist()), map(tuple, candidates.logprobs.tolist()), strict=True))


def _continuations(live: _Live, sampler: Sampler, position: int) -> Continuations:
    """Children of a node; ``position`` is that of the root's children."""

    def continuations(context: tuple[int, ...], depth: int) -> Iterable[tuple[int, float]]:
        order, (tokens, logprobs) = live.table.read(context)
        reliability = RELIABILITY.get(order, 0.0)
        if not order:
            probs = []
        elif sampler.params.greedy:
            probs = [math.exp(logprob) for logprob in logprobs]
        else:
            probs = _softmax(sampler.draft_scores(np.array(logprobs), np.array(tokens), position + depth))
        found = {token: reliability * prob for token, prob in zip(tokens, probs, strict=True)}
        if depth == 0:
            for token in live.runners_up:
                found[token] = max(found.get(token, 0.0), (1 - reliability) * RUNNER_UP_PROB)
        return found.items()

    return continuations


def _softmax(scores: np.ndarray) -> list[float]:
    """Evidence from perturbed scores: the leader is the likelier to be chosen the larger its gap to the others."""
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()).tolist()
