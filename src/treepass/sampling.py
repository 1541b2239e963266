"""The target's choice at a node: ``argmax(log p + G)``, with noise keyed by seed, sample and position.

p is the target's distribution after temperature, top-k, top-p and min-p, in the order in which transformers applies
them. G is standard Gumbel noise from a counter-based hash of (seed, sample index, position, token id): it does not
depend on the draft, on batch rows, on the device or on the padding of the vocabulary. At temperature 0 G is 0. By the
Gumbel-max theorem the choice is distributed as p, and in exact arithmetic the text is a function of the target and
the seed alone.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch

from treepass.errors import LogitsError
from treepass.tree import FloatArray, IntArray

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1
_UNIFORM_BITS = 52
_TOP_P_START = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's distribution is turned into a choice; the names are those of transformers' GenerationConfig.

    Attributes:
        temperature: 0 for greedy decoding, else the divisor of the logits.
        top_k: keep the k largest scores (ties at the k-th included); 0 or None keeps all.
        top_p: keep the smallest set of likeliest tokens whose probabilities reach ``top_p``; 1 keeps all.
        min_p: keep tokens with at least ``min_p`` times the probability of the likeliest; 0 keeps all.
        seed: key of the noise, any integer.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind, fits, rule in (
            ("temperature", float, lambda v: 0 <= v < math.inf, "be finite and >= 0"),
            ("top_k", int, lambda v: 0 <= v < math.inf and int(v) == v, "be an integer >= 0"),
            ("top_p", float, lambda v: 0 < v <= 1, "lie in (0, 1]"),
            ("min_p", float, lambda v: 0 <= v <= 1, "lie in [0, 1]"),
            ("seed", int, lambda v: abs(v) < math.inf and int(v) == v, "be an integer"),
        ):
            value: Any = getattr(self, name)
            if name == "top_k" and value is None:
                continue
            real = isinstance(value, Real) and not isinstance(value, bool)
            if not real or not fits(value):
                raise ValueError(f"{name} must {rule}, got {value!r}")
            # Numbers of NumPy are numbers too, but 64-bit seeds and JSON need those of Python.
            object.__setattr__(self, name, int(value) if kind is int else float(value))

    @property
    def greedy(self) -> bool:
        """Whether the choice is the argmax, without noise."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The target's choice at a node.

    Attributes:
        token: the chosen token.
        logprob: its log-probability under the raw model, natural logarithm.
        score: its score after processors, temperature and truncation, as in transformers' ``scores``.
        top: the likeliest tokens of the raw model and their log-probabilities, if asked for.
        logits: [vocabulary], raw, if rows are kept.
        processed: [vocabulary], after processors, temperature and truncation, -inf where cut off, if rows are kept.
    """

    token: int
    logprob: float
    score: float
    top: tuple[tuple[int, float], ...] = ()
    logits: torch.Tensor | None = None
    processed: torch.Tensor | None = None


def draw_seed() -> int:
    """A seed from the operating system's entropy, 32 bits so that it is easy to note down."""
    return secrets.randbits(32)


class Noise:
    """Gumbel noise of one sample of one request, by position and token."""

    __slots__ = ("_base",)

    def __init__(self, seed: int, sample: int = 0) -> None:
        """Keys the noise by ``seed`` and the index of the sample within the request."""
        self._base = _mix_int(_mix_int(seed & _WORD) ^ _mix_int((sample + 1) * _GOLDEN & _WORD))

    def gumbel(self, position: int, tokens: Any) -> Any:
        """float64 Gumbel noise of ``tokens`` at ``position``.

        Args:
            position: index in the sequence of the token to be chosen.
            tokens: int64 NumPy array or torch tensor of token ids; the result has its kind, shape and device.
        """
        bits = _uniform_bits(_mix_int((self._base + (position + 1) * _GOLDEN) & _WORD), tokens)
        # Never 0 and never 1: the largest value is 1 - 2**-53.
        if isinstance(bits, torch.Tensor):
            return -torch.log(-torch.log((bits.to(torch.float64) + 0.5) * 2.0**-_UNIFORM_BITS))
        return -np.log(-np.log((bits.astype(np.float64) + 0.5) * 2.0**-_UNIFORM_BITS))


class Process(Protocol):
    """What the scores of a row go through before the choice; see ``processors.ProcessorChain``."""

    def __call__(self, prefix: torch.Tensor, row: torch.Tensor, node: int, position: int) -> torch.Tensor:
        """[1, tokens] and [vocabulary] to the processed [vocabulary]; node and position are for messages."""
        ...

    def forced(self, prefix: torch.Tensor) -> int | None:
        """The only token that can follow, if that is known beforehand."""
        ...

    @property
    def removes_invalid(self) -> bool:
        """Whether NaN and infinite logits of the model are dealt with."""
        ...


class Sampler:
    """Choices of one sample of one request."""

    def __init__(
        self,
        params: SamplingParams,
        sample: int = 0,
        *,
        process: Process | None = None,
        top: int = 0,
        keep_rows: bool = False,
    ) -> None:
        """A sampler.

        Args:
            params: the request's parameters.
            sample: index of this sample within the request.
            process: what the scores go through before temperature and truncation.
            top: how many of the likeliest tokens to report with every choice.
            keep_rows: whether every choice carries its raw and its processed row.
        """
        self.params = params
        self.noise = Noise(params.seed, sample)
        self.process = process
        self.top = top
        self.keep_rows = keep_rows

    def chooser(
        self, logits: torch.Tensor, positions: Sequence[int], prefix: Callable[[], torch.Tensor] | None = None
    ) -> Callable[[int], Choice]:
        """The choices at the rows of a pass, as a function of the row that does no more work than it is asked for.

        On the CPU a row is judged when the walk reaches it. On an accelerator, where every look costs a
        synchronisation, greedy choices of all rows are made at once and fetched together.

        Args:
            logits: [rows, vocabulary], raw logits.
            positions: position of each row; its choice stands one further.
            prefix: int64 [1, tokens], the text up to and including the row that is being judged; for processors.
        """
        plain = self.params.greedy and not (self.process or self.top or self.keep_rows)
        if not plain or logits.device.type == "cpu":
            return lambda node: self.choose(logits[node], positions[node] + 1, node, prefix)
        judged = _greedy(_at_least_float32(logits)).tolist()
        return lambda node: _checked(judged[node], node, positions[node])

    def choose(
        self, logits: torch.Tensor, position: int, node: int = 0, prefix: Callable[[], torch.Tensor] | None = None
    ) -> Choice:
        """The choice at one node.

        Args:
            logits: [vocabulary], the raw logits of the node.
            position: index in the sequence of the token to be chosen.
            node: row of the node in its tree, for the error message.
            prefix: see ``chooser``.

        Raises:
            LogitsError: if the logits are NaN, infinite or all masked, before or after the processors.
        """
        row = _at_least_float32(logits)
        judged = _greedy(row[None])[0].tolist()
        # Logits that are not finite may be what a processor is there to remove; log-probabilities are NaN then.
        repaired = self.process is not None and self.process.removes_invalid
        greedy = Choice(int(judged[0]), *judged[1:]) if repaired else _checked(judged, node, position - 1)
        if self.params.greedy and not (self.process or self.top or self.keep_rows):
            return greedy
        log_total = float(row.logsumexp(dim=-1)) if repaired else float(row[greedy.token]) - greedy.logprob
        scores = row
        if self.process:
            if prefix is None:
                raise ValueError("processors need the text before the choice")
            scores = self.process(prefix(), row, node, position - 1)
        temperature = self.params.temperature or 1.0
        if self.params.greedy:
            token, tokens = int(scores.argmax()), None
        else:
            tokens, perturbed = self.support(scores)
            perturbed = perturbed + self.noise.gumbel(position, tokens)
            # Support tokens ascend, so the first of equals has the lowest id.
            token = int(tokens[perturbed.argmax()])
        choice = Choice(token, float(row[token]) - log_total, float(scores[token]) / temperature)
        if not (self.top or self.keep_rows):
            return choice
        return replace(choice, **self._kept(row, log_total, scores / temperature, tokens))

    def _kept(
        self, row: torch.Tensor, log_total: float, scores: torch.Tensor, tokens: torch.Tensor | None
    ) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        if self.top:
            values, ids = row.topk(min(self.top, len(row)))
            kept["top"] = tuple(zip(ids.tolist(), (values.double() - log_total).tolist(), strict=True))
        if self.keep_rows:
            processed = scores
            if tokens is not None:
                processed = torch.full_like(scores, float("-inf"))
                processed[tokens] = scores[tokens]
            kept |= {"logits": row.clone(), "processed": processed.clone()}
        return kept

    def draft_scores(self, logprobs: FloatArray, tokens: IntArray, position: int) -> FloatArray:
        """What a drafter ranks candidates by: ``log q + G`` with the noise of the choice that it tries to foresee.

        Temperature, top-k, top-p and min-p apply to q as they do to p; the candidates count as all of q.

        Args:
            logprobs: [k], log q before temperature, likeliest first.
            tokens: int64 [k], the candidates.
            position: index in the sequence of the token to be chosen.

        Returns:
            float64 [k]; -inf where a candidate is cut off.
        """
        params = self.params
        if params.greedy:
            return logprobs
        scores = (logprobs - logprobs[0]) / params.temperature
        mass = np.exp(scores)
        cut = np.cumsum(mass) - mass >= params.top_p * mass.sum()
        cut |= mass < params.min_p
        if params.top_k:
            cut[params.top_k :] = True
        return np.where(cut, -np.inf, scores + self.noise.gumbel(position, tokens))

    def support(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that can be chosen and their scores.

        Args:
            row: [vocabulary], float32 or float64, finite or -inf.

        Returns:
            int64 token ids, ascending, and float64 scores: logits over temperature less those of the likeliest token.
        """
        params = self.params
        scores = (row.double() - row.max()) / params.temperature
        tokens = torch.nonzero(scores > float("-inf"))[:, 0]
        scores = scores[tokens]
        if params.top_k and params.top_k < len(scores):
            tokens, scores = _keep(tokens, scores, scores >= torch.topk(scores, params.top_k).values[-1])
        if params.top_p < 1:
            tokens, scores = _keep(tokens, scores, _top_p(scores, params.top_p))
        if params.min_p > 0:
            tokens, scores = _keep(tokens, scores, scores >= math.log(params.min_p))
        return tokens, scores


def _at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _greedy(rows: torch.Tensor) -> torch.Tensor:
    """float64 [rows, 3]: argmax (lowest id of equals), its log-probability, its logit; for one transfer to the host."""
    tokens = rows.argmax(dim=-1)
    logits = rows.gather(-1, tokens[:, None])[:, 0]
    logprobs = logits - torch.logsumexp(rows, dim=-1)
    return torch.stack([tokens.double(), logprobs.double(), logits.double()], dim=-1)


def _checked(judged: list[float], node: int, position: int) -> Choice:
    token, logprob, logit = judged
    if not math.isfinite(logprob):
        raise LogitsError(
            f"the target's logits at node {node} (position {position}) are NaN, infinite or all masked, "
            "so no token can be chosen; check the weights, or load them in float32"
        )
    return Choice(int(token), logprob, logit)


def _keep(tokens: torch.Tensor, scores: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens[keep], scores[keep]


def _top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Ascending indices of the smallest set of largest scores whose probability reaches ``top_p``.

    Looks at the largest few first and at more only while their mass does not suffice, so the vocabulary is never
    sorted unless the law is flat. Of equal scores at the edge the lowest indices are kept.
    """
    log_total = torch.logsumexp(scores, dim=-1)
    looked = min(_TOP_P_START, len(scores))
    while True:
        largest = torch.topk(scores, looked).values
        mass = torch.exp(largest - log_total).cumsum(dim=-1)
        count = int((mass < top_p).sum()) + 1
        if count <= looked or looked == len(scores):
            break
        looked = min(looked * 16, len(scores)) if looked == _TOP_P_START else len(scores)
    edge = largest[min(count, looked) - 1]
    above = torch.nonzero(scores > edge)[:, 0]
    ties = torch.nonzero(scores == edge)[: min(count, looked) - len(above), 0]
    return torch.cat([above, ties]).sort().values


def _mix_int(word: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on a Python integer."""
    word = (word ^ (word >> 30)) * _MIX_1 & _WORD
    word = (word ^ (word >> 27)) * _MIX_2 & _WORD
    return word ^ (word >> 31)


def _uniform_bits(key: int, tokens: Any) -> Any:
    """52 random bits per token: SplitMix64 at counter ``token`` from state ``key``.

    Works on int64 NumPy arrays and torch tensors alike: products wrap, right shifts are made logical by a mask.
    """
    word = tokens * _signed(_GOLDEN) + _signed(key)
    word = (word ^ _shift(word, 30)) * _signed(_MIX_1)
    word = (word ^ _shift(word, 27)) * _signed(_MIX_2)
    return _shift(word ^ _shift(word, 31), 64 - _UNIFORM_BITS)


def _shift(word: Any, bits: int) -> Any:
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
