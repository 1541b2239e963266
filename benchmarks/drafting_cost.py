"""What proposing and observing cost by length of context, and what 1,000 passes leave in memory.

    python benchmarks/drafting_cost.py

No model runs: trees are verified against a made-up text from a bigram source over few tokens, so that trees are full at
every length and the figures are those of the drafter alone. The two lengths take turns.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

from treepass.cli.output import versions
from treepass.drafters import Candidates, Drafter, Outcome, Plan, build_drafter
from treepass.sampling import Sampler, SamplingParams
from treepass.verify import follow

VOCABULARY = 49_152
ALPHABET = 199
FOLLOWERS = 8


class _Text:
    """A sequence whose every token has eight possible followers, the first ones likeliest."""

    def __init__(self, length: int, temperature: float, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.ids = [int(self.random.integers(ALPHABET))]
        self.sampler = Sampler(SamplingParams(temperature=temperature))
        while len(self.ids) < length:
            self.ids.append(self.next_token(self.ids[-1]))
        self.prompt_length = length

    def next_token(self, last: int) -> int:
        """A follower of ``last``."""
        return int(followers(np.array(last))[min(int(self.random.geometric(0.5)), FOLLOWERS) - 1])


def followers(tokens: np.ndarray) -> np.ndarray:
    """The followers of tokens, [..., FOLLOWERS], likeliest first."""
    return (tokens[..., None] * 31 + 7 * np.arange(1, FOLLOWERS + 1)) % ALPHABET


def main() -> None:
    """Measures and prints."""
    options = _options()
    document = {"schema": "treepass.benchmark.drafting/1", "versions": versions(), "drafters": {}}
    for name in ("suffix", "recycling", "auto"):
        micro: dict[int, list[float]] = {length: [] for length in options.lengths}
        nodes: dict[int, list[float]] = {length: [] for length in options.lengths}
        for round_ in range(options.rounds):
            for length in options.lengths:
                seconds, drafted = _measured(name, length, options, seed=round_)
                micro[length].append(seconds / options.passes * 1e6)
                nodes[length].append(drafted / options.passes)
        medians = {length: statistics.median(values) for length, values in micro.items()}
        ratio = medians[options.lengths[-1]] / medians[options.lengths[0]]
        grown = _growth(name, options)
        drafted_nodes = {length: statistics.median(values) for length, values in nodes.items()}
        document["drafters"][name] = {
            "microseconds": medians,
            "nodes": drafted_nodes,
            "ratio": ratio,
            "bytes_per_pass": grown,
        }
        print(
            f"{name:<10}"
            + "".join(f"{n:>8} tokens {us:6.0f} µs, {drafted_nodes[n]:4.1f} nodes" for n, us in medians.items())
            + f"   ratio {ratio:.2f}   memory {grown:+.0f} bytes a pass"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


def _measured(name: str, length: int, options: argparse.Namespace, seed: int) -> tuple[float, int]:
    """Seconds of propose and observe together over the passes, and nodes drafted."""
    text = _Text(length, options.temperature, seed)
    drafter = build_drafter(name, vocab_size=VOCABULARY, memory=False)
    drafter.begin(text, None)
    _passes(drafter, text, 100, options.nodes)
    return _passes(drafter, text, options.passes, options.nodes)


def _growth(name: str, options: argparse.Namespace) -> float:
    """Bytes that a pass leaves behind once every table is full."""
    tracemalloc.start()
    text = _Text(40_000, options.temperature, 0)
    drafter = build_drafter(name, vocab_size=VOCABULARY)
    drafter.begin(text, None)
    _passes(drafter, text, 3000, options.nodes)
    gc.collect()
    before, ids = tracemalloc.get_traced_memory()[0], sys.getsizeof(text.ids)
    _passes(drafter, text, 1000, options.nodes)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before - (sys.getsizeof(text.ids) - ids)
    tracemalloc.stop()
    return grown / 1000


def _passes(drafter: Drafter, text: _Text, passes: int, nodes: int) -> tuple[float, int]:
    """Runs passes; returns the seconds spent in the drafter, and the nodes drafted."""
    spent, drafted = 0.0, 0
    for _ in range(passes):
        start = time.perf_counter()
        tree = drafter.propose([text], Plan(nodes, (64,)))[0].best(nodes)
        spent += time.perf_counter() - start
        drafted += tree.nodes
        verdict = follow(tree, lambda row, tree=tree: _Choice(text.next_token(int(tree.tokens[row]))))
        text.ids += verdict.tokens
        logprobs = np.tile(np.log(0.5) * np.arange(1.0, FOLLOWERS + 1), (tree.rows, 1))
        candidates = Candidates(followers(tree.tokens), logprobs)
        outcome = Outcome(tree, verdict.path, verdict.tokens, candidates)
        start = time.perf_counter()
        drafter.observe([text], [outcome])
        spent += time.perf_counter() - start
    return spent, drafted


class _Choice:
    def __init__(self, token: int) -> None:
        self.token = token


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs=2, default=[200, 20_000])
    parser.add_argument("--passes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", help="file to write the figures to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
