"""The suffix drafter: what followed the longest suffix of the text when it stood in the text before.

An index maps every n-gram of a few orders to the tokens that followed it, with counts. A node's children come from the
longest order that knows its context, so that several continuations of one suffix become a tree; the empty suffix, which
every context ends in, adds the commonest tokens of late. In the manner of prompt lookup and suffix decoding (arXiv
2411.04975), with a tree and with estimated probabilities.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treepass.drafters.base import Candidates, ChildLaw, Draftable, Outcome, Plan
from treepass.drafters.expand import Continuations, best_first
from treepass.tree import DraftTree

EMPTY_SUFFIX_RELIABILITY = 0.7
RECENT_TOKENS = 256
COMMON_TOKENS = 12
COMMON_PRIOR = 20
"""Added to the count of recent tokens when a share of them is taken, so that a short text proves little."""

RELIABILITY = {1: 0.31, 2: 0.54, 3: 0.72, 4: 0.74, 6: 0.76, 8: 0.80, 12: 0.93}
"""By match length: how often the only known continuation came true, measured on held-out text."""

ORDERS = tuple(sorted(RELIABILITY))
MAX_DEPTH = 32
MAX_CONTINUATIONS = 8
WINDOW_TOKENS = 32_768
MEMORY_TOKENS = 16_384
MEMORY_DISCOUNT = 0.5
"""How much less a match in another request's text counts than one in the text itself."""


class NGramIndex:
    """Which tokens followed which n-grams among the last ``window`` tokens added.

    Adding a token and looking up a context cost the same however long the text is.
    """

    def __init__(self, window: int) -> None:
        """Args: tokens after which the oldest are forgotten."""
        self.window = window
        # Per n-gram: [token, count, token, count, ...], the most recently seen token last.
        self._followers: dict[int, dict[tuple[int, ...], list[int]]] = {order: {} for order in ORDERS}
        self._text: deque[tuple[tuple[int, ...], int]] = deque()
        self._recent: deque[int] = deque()
        self._recent_counts: Counter[int] = Counter()

    def __len__(self) -> int:
        """Tokens in the window."""
        return len(self._text)

    @property
    def entries(self) -> int:
        """n-grams known."""
        return sum(len(followers) for followers in self._followers.values())

    def add(self, context: Sequence[int], token: int) -> None:
        """Adds one token that follows ``context``, the text so far (its last tokens suffice)."""
        recent = tuple(context[-ORDERS[-1] :])
        for order in ORDERS:
            if order > len(recent):
                break
            _see(self._followers[order].setdefault(recent[-order:], []), token)
        self._text.append((recent, token))
        self._recent.append(token)
        self._recent_counts[token] += 1
        if len(self._recent) > RECENT_TOKENS:
            self._forget_recent()
        if len(self._text) > self.window:
            self._forget()

    def extend(self, ids: Sequence[int], start: int) -> None:
        """Adds ``ids[start:]``, each token following those before it."""
        for place in range(start, len(ids)):
            self.add(ids[max(0, place - ORDERS[-1]) : place], ids[place])

    def followers(self, context: tuple[int, ...]) -> tuple[int, list[int]]:
        """The longest order that knows the context, and its ``[token, count, ...]``; (0, []) if none does."""
        for order in reversed(ORDERS):
            if order <= len(context):
                found = self._followers[order].get(context[-order:])
                if found:
                    return order, found
        return 0, []

    def common(self) -> list[tuple[int, float]]:
        """The commonest of the recent tokens and their shares, the commonest first."""
        total = len(self._recent) + COMMON_PRIOR
        return [(token, count / total) for token, count in self._recent_counts.most_common(COMMON_TOKENS)]

    def _forget_recent(self) -> None:
        token = self._recent.popleft()
        self._recent_counts[token] -= 1
        if not self._recent_counts[token]:
            del self._recent_counts[token]

    def _forget(self) -> None:
        recent, token = self._text.popleft()
        for order in ORDERS:
            if order > len(recent):
                break
            followers = self._followers[order]
            entry = followers.get(recent[-order:])
            if entry is None or token not in entry[::2]:
                continue
            place = 2 * entry[::2].index(token)
            entry[place + 1] -= 1
            if entry[place + 1] == 0:
                del entry[place : place + 2]
            if not entry:
                del followers[recent[-order:]]


@dataclass(slots=True)
class _Memory:
    """What is remembered of one live sequence: its index, and how many of its tokens are in it."""

    index: NGramIndex
    seen: int = 0


class SuffixDrafter:
    """Longest-suffix continuations from the prompt and the text so far, as a tree."""

    name = "suffix"
    law: ChildLaw = "deterministic"
    candidates = 0
    prompt_rows = 0

    def __init__(self, *, memory: bool = True) -> None:
        """Args: ``memory`` keeps the texts of ended requests, up to ``MEMORY_TOKENS``, for later ones."""
        self._memory = NGramIndex(MEMORY_TOKENS) if memory else None
        self._live: dict[int, _Memory] = {}

    def begin(self, session: Draftable, prompt: Candidates | None) -> None:
        """Indexes the prompt."""
        self._live[id(session)] = memory = _Memory(NGramIndex(WINDOW_TOKENS))
        self._read(session, memory)

    def propose(self, sessions: Sequence[Draftable], plan: Plan) -> list[DraftTree]:
        """One tree per sequence from its own text, and from what is remembered of earlier ones."""
        return [
            best_first(
                tuple(session.ids[-ORDERS[-1] :]),
                self._continuations(self._live[id(session)].index),
                plan.nodes,
                min(depth, MAX_DEPTH),
                ORDERS[-1],
            )
            for session, depth in zip(sessions, plan.depths, strict=True)
        ]

    def observe(self, sessions: Sequence[Draftable], outcomes: Sequence[Outcome]) -> None:
        """Indexes the emitted tokens."""
        for session in sessions:
            self._read(session, self._live[id(session)])

    def end(self, session: Draftable) -> None:
        """Drops the sequence's index; its emitted text goes into the memory, if there is one."""
        if self._live.pop(id(session), None) and self._memory is not None:
            self._memory.extend(session.ids, session.prompt_length)

    def reset(self) -> None:
        """Forgets the texts of ended requests."""
        if self._memory is not None:
            self._memory = NGramIndex(MEMORY_TOKENS)

    def _read(self, session: Draftable, memory: _Memory) -> None:
        memory.index.extend(session.ids, max(memory.seen, 1))
        memory.seen = len(session.ids)

    def _continuations(self, own: NGramIndex) -> Continuations:
        common = own.common()

        def continuations(context: tuple[int, ...], _depth: int) -> Iterable[tuple[int, float]]:
            order, followers = own.followers(context)
            found = _estimates(order, followers)
            if self._memory:
                for token, prob in _estimates(*self._memory.followers(context)).items():
                    found[token] = max(found.get(token, 0.0), MEMORY_DISCOUNT * prob)
            unexplained = EMPTY_SUFFIX_RELIABILITY * (1 - RELIABILITY.get(order, 0.0))
            for token, share in common:
                found[token] = max(found.get(token, 0.0), unexplained * share)
            return found.items()

        return continuations


def _estimates(order: int, followers: list[int]) -> dict[int, float]:
    """Probability of each follower: its share of the counts, the latest counted once more, times the reliability.

    The only known follower fails less often the more often it was seen.
    """
    total = sum(followers[1::2]) + 1
    latest = len(followers) - 2
    reliability = RELIABILITY.get(order, 0.0)
    if latest == 0:
        reliability = 1 - (1 - reliability) / followers[1]
    return {
        followers[place]: reliability * (followers[place + 1] + (place == latest)) / total
        for place in range(0, len(followers), 2)
    }


def _see(followers: list[int], token: int) -> None:
    """Counts ``token`` once more and makes it the latest; beyond ``MAX_CONTINUATIONS`` the oldest is dropped."""
    count = 0
    for place in range(0, len(followers), 2):
        if followers[place] == token:
            count = followers[place + 1]
            del followers[place : place + 2]
            break
    followers += (token, count + 1)
    if len(followers) > 2 * MAX_CONTINUATIONS:
        del followers[:2]
