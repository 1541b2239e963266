"""What a repetition penalty costs: seconds of verification with it and without, as a share of the step; in turns.

python benchmarks/processor_overhead.py --context 1000 --nodes 32
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch

from treepass import TreeDecoder, load
from treepass.cli.output import versions
from treepass.drafters import Draftable, Plan
from treepass.testing import FunctionDrafter, random_tree
from treepass.tree import DraftTree


def main() -> None:
    """Measures and prints medians over the passes of all rounds."""
    options = _options()
    model = load(options.model, dtype=options.dtype).model
    random = np.random.default_rng(0)
    prompt = random.integers(model.config.vocab_size, size=options.context).tolist()
    settings = {"without": {}, "with": {"repetition_penalty": 1.3}}
    verify: dict[str, list[float]] = {name: [] for name in settings}
    steps: dict[str, list[float]] = {name: [] for name in settings}
    for round_ in range(options.rounds + 1):
        for name, setting in settings.items():
            # The text is drafted beforehand, so that walks are long: every node of a walk is processed.
            text = TreeDecoder(model, None).generate(prompt, max_new_tokens=options.tokens, eos_token_id=(), **setting)
            drafter = FunctionDrafter(_right_chain_in_a_tree(text.ids[0], len(prompt), options.nodes))
            decoder = TreeDecoder(model, drafter, nodes=options.nodes)
            output = decoder.generate(prompt, max_new_tokens=options.tokens, eos_token_id=(), **setting)
            if round_:  # the first round warms up
                verify[name] += [record.times.verify / len(record.emitted) for record in output.records]
                steps[name] += [record.times.total for record in output.records]
    emitted = output.report.tokens_per_pass
    medians = {name: statistics.median(verify[name]) * 1e3 for name in settings}
    step_ms = statistics.median(steps["with"]) * 1e3
    share = (medians["with"] - medians["without"]) * emitted / step_ms
    print(f"verify per token: {medians['without']:.3f} ms without, {medians['with']:.3f} ms with")
    print(f"{emitted:.2f} tokens per pass, step {step_ms:.1f} ms: the penalty takes {share:.1%} of it")
    if options.json:
        document = {
            "schema": "treepass.benchmark.processors/1",
            "versions": versions(),
            "arguments": {key: value for key, value in vars(options).items() if key != "json"},
            "threads": torch.get_num_threads(),
            "verify_ms_per_token": medians,
            "step_ms": step_ms,
            "tokens_per_pass": emitted,
            "share": share,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


def _right_chain_in_a_tree(text: list[int], prompt_length: int, nodes: int):
    rng = np.random.default_rng(1)

    def tree_of(session: Draftable, plan: Plan, depth: int) -> DraftTree:
        done = len(session.ids) - prompt_length
        root, right = session.ids[-1], text[done : done + min(depth, 6)]
        other = random_tree(rng, root, nodes=nodes - len(right), max_depth=max(1, min(depth, 6)), vocab_size=1000)
        wide = DraftTree(other.tokens, other.parents, np.where(other.depths > 0, 0.5, 1.0), {})
        return DraftTree.merge([DraftTree.chain([root, *right]), wide])

    return tree_of


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file to write the result to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
