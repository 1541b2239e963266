"""Decoding speed beside transformers' own: one run, every variant on every prompt, in turn.

    python benchmarks/decoding.py --prompts question.jsonl --per-category 5

A prompt file has one JSON object per line with ``category`` and ``turns`` (a list; the first turn is used), the format
of MT-bench and Spec-Bench. Variants take turns on each prompt, in an order that rotates, so that drifts of the machine
meet all of them. Speeds leave prefill out; totals with it are given apart. All ratios are of total tokens to total
seconds. A variant whose text differs from ``generate`` by more than a near tie gets no speed, and the exit code is 3.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from treepass import TreeDecoder, load
from treepass.cli.output import versions
from treepass.compare import first_difference, timed_generate
from treepass.record import Report
from treepass.sampling import SamplingParams

BASELINES = ("generate", "prompt_lookup")
OURS = ("plain", "cold", "kept")
PROMPT_LOOKUP_TOKENS = 10


@dataclass(slots=True)
class Run:
    """One variant on one prompt. ``tokens`` are all emitted; ``timed_tokens`` those that ``seconds`` covers."""

    variant: str
    round: int
    prompt: int
    category: str
    prompt_tokens: int
    tokens: int
    timed_tokens: int
    seconds: float
    prefill_seconds: float
    passes: int = 0
    nodes: int = 0
    overhead_seconds: float = 0.0
    difference: dict[str, Any] | None = None


def main() -> None:
    """Runs the benchmark, prints its table and writes its JSON."""
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    loaded = load(options.model, dtype=options.dtype, device=options.device)
    prompts = _prompts(options.prompts, options.per_category, loaded.tokenizer, options.categories)
    bench = _Bench(loaded.model, options)
    bench.warm_up(prompts[0][1])
    runs: list[Run] = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("decoding", total=options.rounds * len(prompts))
        for round_ in range(options.rounds):
            bench.reset()
            for number, (category, ids) in enumerate(prompts):
                runs += bench.prompt(round_, number, category, ids)
                progress.advance(task)
                if not sys.stderr.isatty():
                    print(f"round {round_ + 1}, prompt {number + 1}/{len(prompts)}", file=sys.stderr, flush=True)
    document = _document(runs, options, loaded)
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    _print(document)
    sys.exit(3 if document["red"] else 0)


class _Bench:
    """The variants over one model."""

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        self.model = model
        self.options = options
        eos = model.generation_config.eos_token_id
        self.eos = [eos] if isinstance(eos, int) else list(eos or [])
        self.decoders = {
            "plain": TreeDecoder(model, "none"),
            "cold": TreeDecoder(model, options.drafter, nodes=options.nodes, memory=False),
            "kept": TreeDecoder(model, options.drafter, nodes=options.nodes, memory=True),
        }

    def reset(self) -> None:
        """Forgets what drafters learnt."""
        for decoder in self.decoders.values():
            decoder.drafter.reset()

    def warm_up(self, ids: Sequence[int]) -> None:
        """Runs every variant for a few tokens; nothing is measured."""
        for variant in (*BASELINES, *OURS):
            self._run(variant, ids, 8)

    def prompt(self, round_: int, number: int, category: str, ids: Sequence[int]) -> list[Run]:
        """All variants on one prompt."""
        order = [*BASELINES, *OURS]
        turn = (number + round_) % len(order)
        done: dict[str, Run] = {}
        texts: dict[str, list[int]] = {}
        for variant in order[turn:] + order[:turn]:
            texts[variant], measured = self._run(variant, ids, self.options.max_new_tokens)
            done[variant] = Run(variant, round_, number, category, len(ids), len(texts[variant]), **measured)
        for variant, run in done.items():
            found = first_difference(self.model, ids, texts["generate"], texts[variant])
            if found:
                run.difference = {"index": found.index, "margin": _finite(found.margin), "near_tie": found.near_tie}
        return list(done.values())

    def _run(self, variant: str, ids: Sequence[int], tokens: int) -> tuple[list[int], dict[str, Any]]:
        if variant in self.decoders:
            out = self.decoders[variant].generate(list(ids), max_new_tokens=tokens, keep_records=False)
            report: Report = out.report
            return out.ids[0], {
                "timed_tokens": report.emitted,
                "seconds": report.seconds,
                "prefill_seconds": report.prefill_seconds,
                "passes": report.passes,
                "nodes": report.nodes,
                "overhead_seconds": report.time["draft"] + report.time["verify"] + report.time["commit"],
            }
        extra = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS} if variant == "prompt_lookup" else {}
        text = timed_generate(self.model, ids, tokens, SamplingParams(), self.eos, **extra)
        return text.ids, {
            "timed_tokens": len(text.ids) - text.first_tokens,
            "seconds": text.seconds,
            "prefill_seconds": text.prefill_seconds,
        }


def _document(runs: list[Run], options: argparse.Namespace, loaded: Any) -> dict[str, Any]:
    categories = list(dict.fromkeys(run.category for run in runs))
    red = sorted({run.variant for run in runs if run.difference and not run.difference["near_tie"]})
    return {
        "schema": "treepass.benchmark.decoding/1",
        "versions": versions(),
        "model": loaded.name,
        "source": loaded.source,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "threads": torch.get_num_threads(),
        "seed": options.seed,
        "provenance": {
            "machine": _machine(),
            "date": time.strftime("%Y-%m-%d"),
            "arguments": {key: value for key, value in vars(options).items() if key not in ("json", "prompts")},
            "prompts": Path(options.prompts).name,
        },
        "red": red,
        "overall": _summary(runs, red, options.seed),
        "categories": {
            name: _summary([run for run in runs if run.category == name], red, options.seed) for name in categories
        },
        "runs": [asdict(run) for run in runs],
    }


def _summary(runs: list[Run], red: Sequence[str], seed: int) -> dict[str, Any]:
    by_variant = {name: [run for run in runs if run.variant == name] for name in (*BASELINES, *OURS)}
    summary: dict[str, Any] = {}
    for name, mine in by_variant.items():
        passes, seconds = sum(run.passes for run in mine), sum(run.seconds for run in mine)
        summary[name] = {
            "prompts": len({run.prompt for run in mine}),
            "tokens": sum(run.tokens for run in mine),
            "differing": sum(run.difference is not None for run in mine),
            "near_ties": sum(bool(run.difference and run.difference["near_tie"]) for run in mine),
            "prefill_seconds": sum(run.prefill_seconds for run in mine),
            "tokens_per_second": None if name in red else _rate(mine),
        }
        if name in OURS:
            summary[name] |= {
                "tokens_per_pass": sum(run.tokens for run in mine) / passes,
                "nodes_per_pass": sum(run.nodes for run in mine) / passes,
                "overhead": sum(run.overhead_seconds for run in mine) / seconds,
            }
        for base in ("generate", "plain", "prompt_lookup"):
            if name != base and name not in red:
                summary[name] |= _speedups(mine, by_variant[base], base, seed)
    return summary


def _speedups(mine: list[Run], base: list[Run], name: str, seed: int) -> dict[str, Any]:
    """Speed over a baseline: over all runs, by round, and the 95 % interval of a bootstrap over prompts."""
    rounds = sorted({run.round for run in mine})
    by_round = [
        _rate([run for run in mine if run.round == r]) / _rate([run for run in base if run.round == r]) for r in rounds
    ]
    numbers = sorted({run.prompt for run in mine})
    sums = np.array(
        [
            [sum(getattr(run, key) for run in part if run.prompt == n) for part in (mine, base) for key in _RATE_KEYS]
            for n in numbers
        ]
    )
    picks = np.random.default_rng(seed).integers(len(numbers), size=(2000, len(numbers)))
    tokens, seconds, base_tokens, base_seconds = sums[picks].sum(axis=1).T
    ratios = (tokens / seconds) / (base_tokens / base_seconds)
    whole = [_whole_rate(part) for part in (mine, base)]
    return {
        f"speedup_over_{name}": _rate(mine) / _rate(base),
        f"speedup_over_{name}_by_round": by_round,
        f"speedup_over_{name}_median": statistics.median(by_round),
        f"speedup_over_{name}_interval": np.quantile(ratios, [0.025, 0.975]).tolist(),
        f"speedup_over_{name}_with_prefill": whole[0] / whole[1],
    }


_RATE_KEYS = ("timed_tokens", "seconds")


def _rate(runs: list[Run]) -> float:
    return sum(run.timed_tokens for run in runs) / sum(run.seconds for run in runs)


def _whole_rate(runs: list[Run]) -> float:
    return sum(run.tokens for run in runs) / sum(run.seconds + run.prefill_seconds for run in runs)


def _print(document: dict[str, Any]) -> None:
    table = Table(title=f"{document['model']}, {document['dtype']}, {document['provenance']['machine']}")
    for column in ("category", "prompts", "tokens", "tokens/pass", "nodes/pass", "× generate", "× lookup", "× plain"):
        table.add_column(column, justify="left" if column == "category" else "right")
    for variant in ("cold", "kept"):
        for name, summary in (*document["categories"].items(), ("overall", document["overall"])):
            row = summary[variant]
            table.add_row(
                f"{name} ({variant})",
                str(row["prompts"]),
                str(row["tokens"]),
                f"{row['tokens_per_pass']:.2f}",
                f"{row['nodes_per_pass']:.1f}",
                *(_ratio(row.get(f"speedup_over_{base}")) for base in ("generate", "prompt_lookup", "plain")),
            )
        table.add_section()
    Console(width=120).print(table)
    for variant, row in document["overall"].items():
        interval = row.get("speedup_over_generate_interval")
        print(
            f"{variant:<14} {_ratio(row['tokens_per_second'])} tokens/s, × generate "
            f"{_ratio(row.get('speedup_over_generate'))}"
            + (f" (95 % {interval[0]:.2f} to {interval[1]:.2f})" if interval else "")
            + f", with prefill {_ratio(row.get('speedup_over_generate_with_prefill'))}"
            + f", differing {row['differing']} ({row['near_ties']} near ties)"
            + (f", drafting + verifying + committing {row['overhead']:.1%}" if "overhead" in row else "")
        )
    if document["red"]:
        print(f"no speed for {', '.join(document['red'])}: the text differs by more than a near tie")


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = f"{len(lines)} cores of {lines[0].split(':', 1)[1].strip()}" if lines else model
    return f"{model}, {torch.get_num_threads()} threads"


def _prompts(
    file: str, per_category: int, tokenizer: Any, categories: Sequence[str] | None
) -> list[tuple[str, list[int]]]:
    """The first prompts of every category as chat turns, categories taking turns."""
    by_category: dict[str, list[str]] = {}
    for line in Path(file).read_text().splitlines():
        entry = json.loads(line)
        by_category.setdefault(entry["category"], []).append(entry["turns"][0])
    chosen = []
    for place in range(per_category):
        for category, questions in by_category.items():
            if place < len(questions) and (not categories or category in categories):
                chat = [{"role": "user", "content": questions[place]}]
                ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
                chosen.append((category, list(ids)))
    return chosen


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="JSON lines with category and turns")
    parser.add_argument("--per-category", type=int, default=5)
    parser.add_argument("--categories", nargs="+", help="only these; all by default")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves torch's default")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--json", help="file to write all runs and provenance to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
