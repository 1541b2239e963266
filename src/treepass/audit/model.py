"""Does a model decode trees exactly? Every row of tree passes against plain forwards, the cache, and greedy texts."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from treepass.attention import ATTENTIONS
from treepass.audit.mutants import MUTANTS
from treepass.compare import Difference as TextDifference
from treepass.compare import first_difference, timed_generate
from treepass.drafters.base import Draftable, Plan
from treepass.errors import TreepassWarning, UnsupportedModelError
from treepass.generate import TreeDecoder
from treepass.paths import Difference, PathComparison, allowed_share, path_logits, rounding_dtype
from treepass.random_trees import random_tree
from treepass.sampling import SamplingParams
from treepass.target import HFTarget, prefill
from treepass.testing.trees import FunctionDrafter
from treepass.tree import DraftTree

EXACT, WRONG, REFUSED, UNTESTED, SKIPPED = "exact", "wrong", "refused", "untested", "skipped"
"""What a check or an audit can end in; ``untested`` is a check that an error put in on purpose has passed."""

ERROR_PUT_IN = "error put in: "
"""How the name of a check begins that must notice a mutant."""

GROWTH = 6
"""Most tokens that a text of an audit grows by in a pass."""

PROMPTS = (6, 20, 40)
"""Lengths of the prompts: inside, across and beyond the window of a small model."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        verdict: one of the verdicts above.
        detail: the figure or the reason, in words.
        error: the largest difference found, as a share of the largest value, where there is one.
    """

    name: str
    verdict: str
    detail: str
    error: float | None = None


@dataclass(slots=True)
class ModelAudit:
    """What an audit found.

    Attributes:
        model_type: of the configuration.
        dtype: of the weights.
        verdict: ``exact``, ``wrong``, ``refused`` or ``untested``, the worst of the checks.
        reason: why it is not exact; empty if it is.
        attention: the implementations that are exact.
        checks: in the order in which they ran.
    """

    model_type: str
    dtype: str
    verdict: str = EXACT
    reason: str = ""
    attention: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def add(self, check: Check) -> None:
        """Adds a check; the first one that is worse than what was found so far gives verdict and reason."""
        self.checks.append(check)
        severity = (EXACT, UNTESTED, REFUSED, WRONG)
        if check.verdict in severity and severity.index(check.verdict) > severity.index(self.verdict):
            self.verdict, self.reason = check.verdict, f"{check.name}: {check.detail}"


def audit_model(
    model: Any,
    *,
    nodes: int = 14,
    passes: int = 3,
    new_tokens: int = 24,
    seed: int = 0,
    tolerance: float | None = None,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    on_check: Callable[[Check], None] | None = None,
) -> ModelAudit:
    """Audits a model.

    While it looks whether errors would be noticed it puts them in for the whole process: nothing else should decode
    meanwhile.

    Args:
        model: a transformers causal language model in evaluation mode; it is left as it was.
        nodes: drafted nodes of each random tree.
        passes: tree passes per prompt; each keeps a random path.
        new_tokens: tokens of each greedy text.
        seed: of prompts and trees.
        tolerance: the largest difference that passes, as a share of the largest logit; by default what rounding
            explains in the model's dtype.
        precision: a context for the passes and forwards that are compared, see ``testing.NoDowncasts``.
        on_check: called with every check as soon as it is done.

    Returns:
        The verdict, and every check. A model that cannot be wrapped ends in ``refused`` with the reason.

    Raises:
        ValueError: if the model's maximum length leaves no room for what was asked for.
    """
    audit = ModelAudit(getattr(getattr(model, "config", None), "model_type", type(model).__name__), "")

    def report(check: Check) -> None:
        audit.add(check)
        if on_check:
            on_check(check)

    try:
        target = HFTarget(model, attention="dense", verify=False)
    except UnsupportedModelError as error:
        report(Check("structure", REFUSED, str(error).split(": ", 1)[-1]))
        audit.reason = audit.checks[0].detail
        return audit
    needed = max(PROMPTS) + max(new_tokens, GROWTH * 3 * passes)
    if needed > target.max_length:
        raise ValueError(
            f"texts of {needed} tokens go beyond {target.max_length}, {target.length_reason}; "
            "give fewer new_tokens or passes"
        )
    audit.dtype = str(target.dtype).removeprefix("torch.")
    report(Check("structure", EXACT, "a causal decoder whose cache holds one row per token"))
    run = _Run(
        target.model,
        allowed_share(rounding_dtype(target.model)) if tolerance is None else tolerance,
        nodes,
        passes,
        seed,
        precision,
    )
    for attention in ATTENTIONS:
        check = run.trees(attention)
        if check.verdict == EXACT:
            audit.attention.append(attention)
        elif check.verdict == REFUSED and audit.attention:
            check = replace(check, verdict=SKIPPED)  # the model decodes all the same, with another attention
        report(check)
    if audit.verdict != EXACT:
        return audit
    report(run.cache())
    for check in run.mutants():
        report(check)
    report(run.greedy(new_tokens))
    return audit


@dataclass(frozen=True, slots=True)
class _Run:
    model: Any
    allowed: float
    nodes: int
    passes: int
    seed: int
    precision: Callable[[], AbstractContextManager[Any]]

    def trees(self, attention: str) -> Check:
        """One sequence, then three of unequal length in one pass; every row against its path."""
        name = f"trees, {attention}"
        try:
            differences = [self._compare(attention, count) for count in ((20,), PROMPTS)]
        except UnsupportedModelError as error:
            return Check(name, REFUSED, str(error).split(": ", 1)[-1])
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            return Check(name, REFUSED, f"a pass over a tree fails in it ({type(error).__name__}: {reason})")
        worst = max(differences, key=lambda difference: difference.share)
        rows = sum(difference.rows for difference in differences)
        verdict = EXACT if worst.share <= self.allowed else WRONG
        return Check(name, verdict, _figure(worst, rows, self.allowed), worst.share)

    def mutants(self) -> Iterator[Check]:
        """The comparison of one sequence once more under each error; it must fail."""
        for mutant in MUTANTS:
            with mutant.inject() as bite:
                share = self._compare("dense", (20,)).share
            name = ERROR_PUT_IN + mutant.name
            if not bite.count:
                yield Check(name, SKIPPED, "changes nothing in this model")
            elif share <= self.allowed:
                yield Check(name, UNTESTED, f"not noticed, difference {share:.1e}", share)
            else:
                yield Check(name, EXACT, f"noticed, difference {share:.1e}", share)

    def cache(self) -> Check:
        """Rows after passes that kept random paths, against those of one pass over the whole text."""
        target = HFTarget(self.model, attention="dense", verify=False)
        comparison = self._comparison(target, (20,), compare=False)
        with self.precision():
            for _ in range(3 * self.passes):
                comparison.step(comparison.random_trees(self.nodes, GROWTH - 1))
            text, cache = comparison.texts[0], comparison.caches[0]
            fresh = target.new_cache()
            prefill(target, fresh, text[:-1])
        error = scale = 0.0
        for rows, others in zip(cache.committed(), fresh.committed(), strict=True):
            difference = float((rows - others).abs().max())
            error = float("inf") if np.isnan(difference) else max(error, difference)
            scale = max(scale, float(others.abs().max()))
        share = error / max(scale, 1.0)
        verdict = EXACT if share <= self.allowed else WRONG
        detail = f"{cache.length} rows after {3 * self.passes} passes, difference {share:.1e}"
        return Check("cache", verdict, detail, share)

    def greedy(self, new_tokens: int) -> Check:
        """Greedy texts with random and with wide drafts, against ``generate``."""
        rng = np.random.default_rng(self.seed)
        target = HFTarget(self.model, attention="dense", verify=False)
        vocab_size, near = target.vocab_size, 0
        decoder = TreeDecoder(target, FunctionDrafter(self._draft(rng, vocab_size)), nodes=self.nodes)
        for length in PROMPTS:
            prompt = rng.integers(vocab_size, size=length).tolist()
            expected = timed_generate(self.model, prompt, new_tokens, SamplingParams(), ()).ids
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TreepassWarning)
                got = decoder.generate(prompt, max_new_tokens=new_tokens, eos_token_id=()).ids[0]
            difference = first_difference(self.model, prompt, expected, got)
            if difference and not difference.near_tie:
                return self._parted(prompt, expected, difference)
            near += difference is not None
        detail = f"{len(PROMPTS)} texts of {new_tokens} tokens equal generate's"
        return Check("greedy", EXACT, detail + (f", {near} of them up to a near tie" if near else ""))

    def _parted(self, prompt: list[int], expected: list[int], difference: TextDifference) -> Check:
        """Ours is wrong, unless it is what the plain forward says: then ``generate`` is not the model's own text."""
        index = difference.index
        plain = int(path_logits(self.model, [[*prompt, *expected[:index]]])[0].argmax())
        if plain == difference.tokens[1]:
            return Check("greedy", REFUSED, "transformers' own cached decoding parts from the model's plain forward")
        return Check("greedy", WRONG, f"parts from generate at token {index}")

    def _compare(self, attention: str, lengths: Sequence[int]) -> Difference:
        comparison = self._comparison(HFTarget(self.model, attention=attention, verify=False), lengths)
        with self.precision():
            for _ in range(self.passes):
                comparison.step(comparison.random_trees(self.nodes, GROWTH - 1))
        return comparison.difference

    def _comparison(self, target: HFTarget, lengths: Sequence[int], compare: bool = True) -> PathComparison:
        rng = np.random.default_rng(self.seed)
        comparison = PathComparison(target, self.model, rng, compare=compare)
        with self.precision():
            comparison.start([rng.integers(target.vocab_size, size=length).tolist() for length in lengths])
        return comparison

    def _draft(self, rng: np.random.Generator, vocab_size: int) -> Callable[[Draftable, Plan, int], DraftTree]:
        def draft(session: Draftable, plan: Plan, depth: int) -> DraftTree:
            return random_tree(rng, session.ids[-1], nodes=self.nodes, max_depth=min(depth, 4), vocab_size=vocab_size)

        return draft


def _figure(difference: Difference, rows: int, allowed: float) -> str:
    return f"{rows} rows, difference {difference.share:.1e} of the largest logit, {allowed:.0e} allowed"
