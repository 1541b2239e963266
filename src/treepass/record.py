"""The pass record: everything one pass leaves behind, and the report that adds passes up.

Statistics, progress, traces and audits read these; none of them reaches into the engine. Token ids and text are data
here, never markup.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Literal

SCHEMA = "treepass.pass/1"

Ended = Literal["accepted", "correction", "bonus"]


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of one pass by part; ``other`` is the rest of the step."""

    draft: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.draft + self.forward + self.verify + self.commit + self.other


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One sequence's share of one pass.

    Attributes:
        sequence: index of the sequence within the request.
        index: number of the pass within the sequence, from 0.
        context_length: rows in the cache before the pass; the root's position.
        tokens, parents, path_prob: the tree, row 0 the root.
        ranks: place of each row among its siblings by path probability.
        path: accepted rows, after the cut.
        emitted: tokens added to the text, after the cut.
        logprobs: of the emitted tokens under the raw model.
        scores: of the emitted tokens after temperature and truncation.
        ended: what the last emitted token was: the correction, the bonus, or, where the text was cut within the
            path, an accepted token.
        times: seconds; of a forest's pass every sequence carries its share by rows.
        warnings: what went wrong beside the text, such as a drafter that failed.
    """

    sequence: int
    index: int
    context_length: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path_prob: tuple[float, ...]
    ranks: tuple[int, ...]
    path: tuple[int, ...]
    emitted: tuple[int, ...]
    logprobs: tuple[float, ...]
    scores: tuple[float, ...]
    ended: Ended
    times: PassTimes
    warnings: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        """Drafted nodes."""
        return len(self.tokens) - 1

    def to_json(self) -> str:
        """One line of JSON, with the schema's name."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, allow_nan=False)


def write_records(records: Iterable[PassRecord], file: IO[str]) -> None:
    """Writes records as JSON lines, each flushed whole."""
    for record in records:
        file.write(record.to_json() + "\n")
        file.flush()


@dataclass(slots=True)
class Report:
    """Counts over passes; ratios are formed only when asked for.

    Identities: ``emitted == accepted + passes - cut_on_accepted`` and ``rows == prompt_rows + passes + nodes``.

    Attributes:
        passes: target passes that emitted tokens; prefill does not count.
        emitted: tokens added to the text.
        accepted: of these, tokens that a draft node carried.
        cut_on_accepted: passes whose text was cut on an accepted token, so that they emitted no correction or bonus.
        nodes: drafted nodes over all passes.
        prompt_rows: rows computed by prefill.
        accepted_by_depth: accepted nodes at depth 1, 2, ...
        accepted_by_rank: accepted nodes by their place among their siblings, 0 the likeliest.
        prefill_seconds: seconds of prefill.
        time: seconds of the passes by part.
        warnings: each message once.
    """

    passes: int = 0
    emitted: int = 0
    accepted: int = 0
    cut_on_accepted: int = 0
    nodes: int = 0
    prompt_rows: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_by_rank: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    time: dict[str, float] = field(
        default_factory=lambda: {"draft": 0.0, "pass": 0.0, "verify": 0.0, "commit": 0.0, "other": 0.0}
    )
    warnings: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows that the target computed."""
        return self.prompt_rows + self.passes + self.nodes

    @property
    def seconds(self) -> float:
        """Seconds of all passes, prefill left out."""
        return sum(self.time.values())

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens per target pass, correction or bonus included; 0 without passes."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def nodes_per_pass(self) -> float:
        """Drafted nodes per pass; 0 without passes."""
        return self.nodes / self.passes if self.passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of passes, prefill left out; 0 without passes."""
        return self.emitted / self.seconds if self.passes else 0.0

    def add(self, record: PassRecord) -> None:
        """Counts one record in."""
        self.passes += 1
        self.emitted += len(record.emitted)
        self.accepted += len(record.path)
        self.cut_on_accepted += record.ended == "accepted"
        self.nodes += record.nodes
        for depth, row in enumerate(record.path):
            _count(self.accepted_by_depth, depth)
            _count(self.accepted_by_rank, record.ranks[row])
        for part, seconds in asdict(record.times).items():
            self.time["pass" if part == "forward" else part] += seconds
        self.warnings += [message for message in record.warnings if message not in self.warnings]

    def merge(self, other: "Report") -> None:
        """Adds another report's counts."""
        for name in ("passes", "emitted", "accepted", "cut_on_accepted", "nodes", "prompt_rows", "prefill_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in (
            (self.accepted_by_depth, other.accepted_by_depth),
            (self.accepted_by_rank, other.accepted_by_rank),
        ):
            for place, count in enumerate(theirs):
                _count(mine, place, count)
        for part, seconds in other.time.items():
            self.time[part] += seconds
        self.warnings += [message for message in other.warnings if message not in self.warnings]

    def to_dict(self) -> dict[str, Any]:
        """The keys of the JSON contract that a report knows of."""
        return {
            "passes": self.passes,
            "tokens_per_pass": self.tokens_per_pass,
            "accepted_by_depth": list(self.accepted_by_depth),
            "accepted_by_rank": list(self.accepted_by_rank),
            "nodes_per_pass": self.nodes_per_pass,
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "tokens_per_second": self.tokens_per_second,
            "time": dict(self.time),
            "warnings": list(self.warnings),
        }


def _count(counts: list[int], place: int, amount: int = 1) -> None:
    counts.extend([0] * (place + 1 - len(counts)))
    counts[place] += amount
