"""The engine: live sequences, and one decoding step over all of them.

    drafter.propose      candidate trees
    target.forward       logits of every node, keys and values written
    follow               the path
    cache.commit         accepted rows stay, the others are forgotten
    drafter.observe      the drafter learns
    PassRecord           what everything else reads

The root of a tree is the last committed token, whose row is not computed yet. So prefill covers the prompt without its
last token, the first tree already hangs below the prompt, and every emitted token comes from a step.
"""

import time
import warnings
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import StoppingCriteria

from treepass.budget import buy
from treepass.cache import TreeCache
from treepass.drafters.base import Candidates, Drafter, Outcome, Plan
from treepass.errors import TreepassWarning
from treepass.record import PassRecord, PassTimes, Report
from treepass.sampling import Choice, Sampler
from treepass.settings import finish_reason
from treepass.target import PREFILL_ROWS, Target, prefill
from treepass.tree import DraftTree, Forest
from treepass.verify import Verdict, follow

HOPELESS_PASSES = 32
"""Passes in a row without one accepted node after which drafting stops for the request."""


@dataclass(slots=True, eq=False)
class Session:
    """One sequence being written.

    Attributes:
        ids: prompt and emitted tokens.
        prompt_length: tokens of the prompt.
        max_new_tokens: where the text ends at the latest.
        eos_ids: tokens that end the text; they are part of it.
        sampler: makes the target's choices.
        cache: keys and values of ``ids`` without the last one.
        sequence: index within the request.
        criteria: stopping criteria of transformers; each sees every prefix of the text once, in order.
        padding: tokens that processors and criteria see before the prompt.
        device: where they see the text.
        finish_reason: ``stop``, ``length`` or ``time`` once the text has ended.
        report: counts of this sequence.
        logprobs: of every emitted token, under the raw model.
        scores: of every emitted token, after processors, temperature and truncation.
        choices: of every emitted token, where the sampler keeps more than that.
    """

    ids: list[int]
    max_new_tokens: int
    eos_ids: frozenset[int]
    sampler: Sampler
    cache: TreeCache
    sequence: int = 0
    criteria: Sequence[StoppingCriteria] = ()
    padding: Sequence[int] = ()
    device: torch.device | None = None
    finish_reason: str | None = None
    report: Report = field(default_factory=Report)
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    scores: "array[float]" = field(default_factory=lambda: array("d"))
    choices: list[Choice] = field(default_factory=list)
    prompt_length: int = field(init=False)
    _text: torch.Tensor | None = field(init=False, default=None)
    _filled: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - (len(self.ids) - self.prompt_length)

    def text(self) -> torch.Tensor:
        """int64 [1, tokens]: padding, prompt and what was emitted, as processors and criteria see it."""
        before = len(self.padding)
        if self._text is None:
            longest = before + self.prompt_length + self.max_new_tokens
            self._text = torch.empty(1, longest, dtype=torch.long, device=self.device)
            self._text[0, :before] = torch.tensor(list(self.padding), device=self.device)
        new = self.ids[self._filled :]
        self._text[0, before + self._filled : before + len(self.ids)] = torch.tensor(new, device=self.device)
        self._filled = len(self.ids)
        return self._text[:, : before + len(self.ids)]

    def emit(self, choice: Choice) -> bool:
        """Adds a token to the text; whether the text ends with it."""
        self.ids.append(choice.token)
        self.logprobs.append(choice.logprob)
        self.scores.append(choice.score)
        if self.sampler.top or self.sampler.keep_rows:
            self.choices.append(choice)
        reasons = [finish_reason(one) for one in self.criteria if bool(one(self.text(), None))]
        if choice.token in self.eos_ids:
            self.finish_reason = "stop"
        elif reasons:
            self.finish_reason = reasons[0]
        elif self.room <= 0:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def take_back(self, length: int) -> None:
        """Forgets the tokens from ``length`` on, after a walk that failed."""
        emitted = length - self.prompt_length
        del self.ids[length:], self.logprobs[emitted:], self.scores[emitted:], self.choices[emitted:]
        self._filled = min(self._filled, length)
        self.finish_reason = None


class Engine:
    """A target, a drafter and a node limit."""

    def __init__(self, target: Target, drafter: Drafter, nodes: int) -> None:
        """Args: ``nodes`` is the most drafted nodes per sequence and pass."""
        self.target = target
        self.drafter = drafter
        self.nodes = nodes
        self._disabled = False
        self._fruitless = 0
        self._pending_warnings: list[str] = []
        self._begun: set[int] = set()

    def admit(self, session: Session) -> None:
        """Computes the rows of the prompt that are not in the cache yet, all but the last token's."""
        start = time.perf_counter()
        known = session.cache.length
        wanted = min(self.drafter.prompt_rows, PREFILL_ROWS) if self.nodes else 0
        logits = prefill(self.target, session.cache, session.ids[known:-1], wanted)
        candidates = None if logits is None else _candidates(logits, self.drafter.candidates)
        _synchronise(self.target.device)
        session.report.prompt_rows += session.cache.length - known
        session.report.prefill_seconds += time.perf_counter() - start
        if not self._disabled:
            self._begun.add(id(session))
        self._guard("begin", lambda: self.drafter.begin(session, candidates))

    def release(self, session: Session) -> None:
        """Lets the drafter drop what it remembers for the sequence alone, even if drafting is switched off by now."""
        if id(session) not in self._begun:
            return
        self._begun.remove(id(session))
        if self._disabled:
            # Why it was switched off is told already; that it fails once more is no news.
            with suppress(Exception):
                self.drafter.end(session)
        self._guard("end", lambda: self.drafter.end(session))

    def step(self, sessions: Sequence[Session]) -> list[PassRecord]:
        """One pass over the trees of all sequences; each emits at least one token.

        Raises:
            LogitsError: if the target's logits at a node of a walk are NaN, infinite or all masked.
        """
        clock = _Clock()
        trees = self._draft(sessions)
        clock.lap("draft")
        forest = Forest(tuple(trees), tuple(session.cache.length for session in sessions))
        logits = self.target.forward(forest, [session.cache for session in sessions]).logits
        _synchronise(self.target.device)
        clock.lap("forward")
        verdicts = _walk(sessions, forest, logits)
        clock.lap("verify")
        for session, verdict in zip(sessions, verdicts, strict=True):
            # The last emitted token is the next root: its row, if it has one, is computed again with its children.
            session.cache.commit((0, *verdict.path[: len(verdict.tokens) - 1]))
        clock.lap("commit")
        self._learn(sessions, forest, verdicts, logits)
        clock.lap("draft")
        return self._record(sessions, forest, verdicts, clock)

    def _draft(self, sessions: Sequence[Session]) -> list[DraftTree]:
        depths = tuple(
            max(0, min(session.room - 1, self.target.max_length - 1 - session.cache.length)) for session in sessions
        )
        roots = [DraftTree.root_only(session.ids[-1]) for session in sessions]
        if self.nodes == 0 or max(depths) == 0:
            return roots
        plan = Plan(self.nodes, depths)
        trees: list[DraftTree] = roots

        def propose() -> None:
            nonlocal trees
            trees = self._bought(sessions, plan, self.drafter.propose(sessions, plan))

        self._guard("propose", propose)
        return [
            _forced_chain(session, min(depth, self.nodes)) or tree
            for session, tree, depth in zip(sessions, trees, depths, strict=True)
        ]

    def _bought(self, sessions: Sequence[Session], plan: Plan, drafts: Sequence[DraftTree]) -> list[DraftTree]:
        """The drafts, cut to the plan.

        Raises:
            ValueError: if a draft does not belong to its sequence.
        """
        if len(drafts) != len(sessions):
            raise ValueError(f"a draft needs one tree per sequence, got {len(drafts)} for {len(sessions)}")
        for session, draft in zip(sessions, drafts, strict=True):
            if int(draft.tokens[0]) != session.ids[-1]:
                raise ValueError(f"the root must carry the last token {session.ids[-1]}, got {int(draft.tokens[0])}")
            draft.check_vocabulary(self.target.vocab_size)
        return [buy(draft.truncate_depth(depth), plan.nodes) for draft, depth in zip(drafts, plan.depths, strict=True)]

    def _learn(
        self,
        sessions: Sequence[Session],
        forest: Forest,
        verdicts: Sequence[Verdict[Choice]],
        logits: torch.Tensor,
    ) -> None:
        if self._disabled or self.nodes == 0:
            return
        drafted = sum(tree.nodes for tree in forest.trees)
        accepted = sum(len(verdict.path) for verdict in verdicts)
        self._fruitless = 0 if accepted else self._fruitless + (drafted > 0)

        def observe() -> None:
            candidates = _candidates(logits, self.drafter.candidates) if self.drafter.candidates else None
            outcomes = [
                Outcome(tree, verdict.path, verdict.tokens, candidates and candidates.rows(start, tree.rows))
                for tree, start, verdict in zip(forest.trees, forest.offsets, verdicts, strict=True)
            ]
            self.drafter.observe(sessions, outcomes)

        self._guard("observe", observe)
        if self._fruitless >= HOPELESS_PASSES and not self._disabled:
            self._disable(
                f"no node of drafter '{self.drafter.name}' was accepted in {HOPELESS_PASSES} passes; "
                "drafting is switched off for this request"
            )

    def _guard(self, hook: str, call: Callable[[], None]) -> None:
        """Runs a drafter's hook. A drafter that fails costs speed, never the text: it is reported and left out."""
        if self._disabled:
            return
        try:
            call()
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self._disable(
                f"drafter '{self.drafter.name}' failed in {hook} ({reason}); drafting is switched off for this request"
            )

    def _disable(self, message: str) -> None:
        self._disabled = True
        self._pending_warnings.append(message)
        warnings.warn(message, TreepassWarning, stacklevel=2)

    def _record(
        self,
        sessions: Sequence[Session],
        forest: Forest,
        verdicts: Sequence[Verdict[Choice]],
        clock: "_Clock",
    ) -> list[PassRecord]:
        messages = tuple(self.take_warnings())
        ranks = [tuple(tree.ranks().tolist()) for tree in forest.trees]
        arrays = [
            (tuple(tree.tokens.tolist()), tuple(tree.parents.tolist()), tuple(tree.path_prob.tolist()))
            for tree in forest.trees
        ]
        clock.lap("other")
        records = [
            PassRecord(
                sequence=session.sequence,
                index=session.report.passes,
                context_length=forest.context_lengths[i],
                tokens=arrays[i][0],
                parents=arrays[i][1],
                path_prob=arrays[i][2],
                ranks=ranks[i],
                path=verdicts[i].path,
                emitted=verdicts[i].tokens,
                logprobs=tuple(choice.logprob for choice in verdicts[i].choices),
                scores=tuple(choice.score for choice in verdicts[i].choices),
                ended=verdicts[i].ended,
                times=clock.share(forest.trees[i].rows / forest.rows),
                warnings=messages if i == 0 else (),
            )
            for i, session in enumerate(sessions)
        ]
        for session, record in zip(sessions, records, strict=True):
            session.report.add(record)
        return records

    def take_warnings(self) -> list[str]:
        """The warnings that no record carries yet."""
        messages, self._pending_warnings = self._pending_warnings, []
        return messages


def _forced_chain(session: Session, depth: int) -> DraftTree | None:
    """The tokens that must come next, as far as processors know them beforehand: a chain that is accepted whole."""
    process = session.sampler.process
    if process is None or depth == 0:
        return None
    text, chain = session.text(), [session.ids[-1]]
    while len(chain) <= depth and (token := process.forced(text)) is not None:
        chain.append(token)
        text = torch.cat([text, text.new_tensor([[token]])], dim=1)
        if token in session.eos_ids:
            break
    return DraftTree.chain(chain) if len(chain) > 1 else None


def _walk(sessions: Sequence[Session], forest: Forest, logits: torch.Tensor) -> list[Verdict[Choice]]:
    """Walks down every tree; tokens enter the texts as they are chosen, and none is judged beyond the end of its text.

    If a walk fails the texts of all sessions are as they were before it.
    """
    lengths = [len(session.ids) for session in sessions]
    verdicts = []
    try:
        for session, tree, start, context in zip(
            sessions, forest.trees, forest.offsets, forest.context_lengths, strict=True
        ):
            rows, positions = logits[start : start + tree.rows], (tree.depths + context).tolist()
            verdicts.append(follow(tree, session.sampler.chooser(rows, positions, session.text), session.emit))
    except BaseException:
        for session, length in zip(sessions, lengths, strict=True):
            session.take_back(length)
        raise
    return verdicts


def _candidates(logits: torch.Tensor, count: int) -> Candidates:
    """The likeliest tokens of every row; one transfer to the host."""
    rows = logits.float()
    values, tokens = rows.topk(min(count, rows.shape[-1]), dim=-1)
    logprobs = values - rows.logsumexp(dim=-1, keepdim=True)
    packed = torch.cat([tokens.double(), logprobs.double()], dim=-1).cpu().numpy()
    ids, logp = np.split(packed, 2, axis=-1)
    return Candidates(ids.astype(np.int64), logp)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Clock:
    """Seconds by part: every lap goes to the part named at its end."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._parts = {"draft": 0.0, "forward": 0.0, "verify": 0.0, "commit": 0.0, "other": 0.0}

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[part] += now - self._last
        self._last = now

    def share(self, fraction: float) -> PassTimes:
        return PassTimes(**{part: seconds * fraction for part, seconds in self._parts.items()})
