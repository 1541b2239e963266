"""Milliseconds of one pass with each kernel of the dense attention, by rows; kernels take turns.

python benchmarks/attention_kernels.py --context 256
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from treepass import DraftTree, load
from treepass.attention import DENSE_KERNELS
from treepass.cli.output import versions
from treepass.target import HFTarget, prefill
from treepass.tree import Forest


def main() -> None:
    """Measures and prints a table; medians over the rounds."""
    options = _options()
    model = load(options.model, dtype=options.dtype).model
    random = np.random.default_rng(0)
    targets = {kernel: HFTarget(model, kernel=kernel) for kernel in DENSE_KERNELS}
    context = random.integers(model.config.vocab_size, size=options.context).tolist()
    times: dict[tuple[str, int], list[float]] = {}
    caches = {kernel: target.new_cache(options.context + max(options.rows)) for kernel, target in targets.items()}
    for kernel, target in targets.items():
        prefill(target, caches[kernel], context)
    for round_ in range(options.rounds + 1):
        for rows in options.rows:
            parents = [-1, *(int(random.integers(row)) for row in range(1, rows))]
            tree = DraftTree.from_parents(random.permutation(model.config.vocab_size)[:rows], parents)
            for kernel, target in targets.items():
                start = time.perf_counter()
                target.forward(Forest((tree,), (options.context,)), [caches[kernel]])
                if round_:  # the first round warms up
                    times.setdefault((kernel, rows), []).append((time.perf_counter() - start) * 1e3)
    medians = {kernel: {rows: statistics.median(times[kernel, rows]) for rows in options.rows} for kernel in targets}
    print(f"{'rows':>6}" + "".join(f"{kernel:>10}" for kernel in targets) + "   ms per pass")
    for rows in options.rows:
        print(f"{rows:>6}" + "".join(f"{medians[kernel][rows]:>10.1f}" for kernel in targets))
    if options.json:
        document = {
            "schema": "treepass.benchmark.attention/1",
            "versions": versions(),
            "arguments": {key: value for key, value in vars(options).items() if key != "json"},
            "threads": torch.get_num_threads(),
            "pass_ms": medians,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="file to write the medians to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
