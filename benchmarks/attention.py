"""Milliseconds of one pass with each attention and kernel, by rows and sequences; all take turns in one run.

python benchmarks/attention.py --context 256                                       the kernels, one sequence
python benchmarks/attention.py --context 500 --sequences 8 --rows 8 --kernels grouped   dense against per_sequence
"""

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch

from treepass import DraftTree, load
from treepass.attention import ATTENTIONS, KERNELS
from treepass.cli.output import versions
from treepass.target import HFTarget, prefill
from treepass.tree import Forest


def main() -> None:
    """Measures and prints a table; medians over the rounds."""
    options = _options()
    model = load(options.model, dtype=options.dtype).model
    random = np.random.default_rng(0)
    variants = list(product(options.attentions, options.kernels))
    targets = {variant: HFTarget(model, *variant) for variant in variants}
    contexts = [
        random.integers(model.config.vocab_size, size=options.context).tolist() for _ in range(options.sequences)
    ]
    caches = [targets[variants[0]].new_cache(options.context + max(options.rows)) for _ in contexts]
    for context, cache in zip(contexts, caches, strict=True):
        prefill(targets[variants[0]], cache, context)
    times: dict[tuple[tuple[str, str], int], list[float]] = {}
    for round_ in range(options.rounds + 1):
        for rows in options.rows:
            forest = Forest(
                tuple(_tree(random, rows, model.config.vocab_size) for _ in contexts),
                (options.context,) * len(contexts),
            )
            # The first of a round finds other data in the processor's caches than the second: they take turns.
            for variant in variants if round_ % 2 else variants[::-1]:
                target = targets[variant]
                start = time.perf_counter()
                target.forward(forest, caches)
                if round_:  # the first round warms up
                    times.setdefault((variant, rows), []).append((time.perf_counter() - start) * 1e3)
    medians = {
        variant: {rows: statistics.median(times[variant, rows]) for rows in options.rows} for variant in variants
    }
    names = {variant: " ".join(variant) for variant in variants}
    print(f"{options.sequences} sequence(s), context {options.context}; ms per pass")
    print(f"{'rows each':>10}" + "".join(f"{name:>22}" for name in names.values()))
    for rows in options.rows:
        print(f"{rows:>10}" + "".join(f"{medians[variant][rows]:>22.1f}" for variant in variants))
    if options.json:
        document = {
            "schema": "treepass.benchmark.attention/2",
            "versions": versions(),
            "arguments": {key: value for key, value in vars(options).items() if key != "json"},
            "threads": torch.get_num_threads(),
            "pass_ms": {names[variant]: medians[variant] for variant in variants},
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


def _tree(random: np.random.Generator, rows: int, vocab_size: int) -> DraftTree:
    parents = [-1, *(int(random.integers(row)) for row in range(1, rows))]
    return DraftTree.from_parents(random.permutation(vocab_size)[:rows], parents)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=256, help="committed tokens of each sequence")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64], help="rows of each sequence's tree")
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="file to write the medians to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
