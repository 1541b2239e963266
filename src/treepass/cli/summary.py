"""What is told about a completion: the JSON document, and the summary below the text."""

import math
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from treepass.cli.comparison import Comparison
from treepass.cli.output import document, escape_controls, note
from treepass.cli.text import STYLES, Role, terminal_console
from treepass.compare import Difference, TimedText
from treepass.generate import TreeDecoder, TreeOutput
from treepass.models import LoadedModel
from treepass.record import Report
from treepass.sampling import SamplingParams

LEGEND: tuple[tuple[Role, str], ...] = (
    ("accepted", "accepted"),
    ("correction", "corrected"),
    ("bonus", "bonus"),
    ("plain", "not drafted"),
)
FINISHED = {"stop": "the model ended the text", "length": "the limit was reached", "interrupted": "interrupted"}
OTHERS = {"generate": "transformers' generate", "plain": "plain decoding"}


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion with everything around it.

    Attributes:
        loaded: the model.
        decoder: what wrote the text.
        params: how it was sampled.
        max_new_tokens: its limit.
        prompt_tokens: tokens of the prompt.
        text: without special tokens.
        output: ids, counts, how it ended.
        warnings: each once.
        compared: whether a comparison was asked for.
        comparison: the comparison; None without one, or if it was interrupted.
    """

    loaded: LoadedModel
    decoder: TreeDecoder
    params: SamplingParams
    max_new_tokens: int
    prompt_tokens: int
    text: str
    output: TreeOutput
    warnings: list[str]
    compared: bool
    comparison: Comparison | None

    @property
    def finish_reason(self) -> str:
        """``stop``, ``length`` or ``interrupted``."""
        return self.output.finish_reasons[0]


def contents(done: Completion) -> dict[str, Any]:
    """The document of ``treepass generate --json``."""
    output, params = done.output, done.params
    return document(
        "generate",
        model=done.loaded.name,
        dtype=str(done.loaded.dtype).removeprefix("torch."),
        device=str(done.loaded.device),
        threads=torch.get_num_threads(),
        seed=output.seed,
        text=done.text,
        ids=output.ids[0],
        prompt_tokens=done.prompt_tokens,
        new_tokens=len(output.ids[0]),
        finish_reason=done.finish_reason,
        lossless=output.lossless,
        drafter=output.drafter,
        rule=output.rule,
        nodes=done.decoder.nodes,
        attention=done.decoder.target.attention,
        kernel=done.decoder.target.kernel,
        max_new_tokens=done.max_new_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        **output.report.to_dict() | {"warnings": done.warnings},
        **(_compared(done) if done.compared else {}),
    )


def _compared(done: Completion) -> dict[str, Any]:
    comparison = done.comparison
    if comparison is None:
        return dict.fromkeys(("generate", "plain", "identical", "speedup", "speedup_over_plain"))
    ours = done.output.report.tokens_per_second
    found: dict[str, Any] = {
        name: {"seconds": run.seconds, "tokens_per_second": run.tokens_per_second}
        for name, run in _others(comparison).items()
    }
    found["identical"] = comparison.identical
    found["speedup"] = _ratio(ours, comparison.generate.tokens_per_second)
    found["speedup_over_plain"] = _ratio(ours, comparison.plain.tokens_per_second)
    difference = comparison.difference
    if difference is not None:
        found["first_difference"] = {
            "index": difference.index,
            "tokens": list(difference.tokens),
            # JSON has no infinity: where a text has ended there are no two logits to compare.
            "margin": difference.margin if math.isfinite(difference.margin) else None,
            "near_tie": difference.near_tie,
        }
    return found


def _others(comparison: Comparison) -> dict[str, TimedText | Report]:
    return {"generate": comparison.generate, "plain": comparison.plain}


def _ratio(ours: float, theirs: float) -> float | None:
    """How many times as fast; None where one of the two has no speed, because all its tokens came with the prefill."""
    return ours / theirs if ours and theirs else None


def print_summary(done: Completion, seen: Counter[Role]) -> None:
    """Prints the summary to stderr: a table on a terminal, else plain lines.

    Args:
        done: the completion.
        seen: how many tokens a terminal shows in which style, for the legend.
    """
    rows = _rows(done)
    if not sys.stderr.isatty():
        for label, value in rows:
            note(f"{label:<24}{value}")
        return
    from rich.box import ROUNDED
    from rich.table import Table
    from rich.text import Text

    console = terminal_console(stderr=True)
    if sys.stdout.isatty() and set(seen) - {"plain"}:
        parts = [Text(f"{seen[role]} {words}", style=STYLES[role]) for role, words in LEGEND if seen[role]]
        legend = Text("   ").join(parts)
        console.print(Text("\n").append(legend))
    table = Table(box=ROUNDED, show_header=False, border_style="dim")
    for label, value in rows:
        table.add_row(Text(label, style="dim"), Text(escape_controls(value)))
    console.print(table)


def _rows(done: Completion) -> list[tuple[str, str]]:
    output, report = done.output, done.output.report
    rows = [
        ("tokens", f"{report.emitted} ({FINISHED[done.finish_reason]})"),
        ("passes", str(report.passes)),
        ("tokens per pass", f"{report.tokens_per_pass:.2f}"),
        ("tokens per second", f"{report.tokens_per_second:.1f}"),
        ("prefill", f"{report.prefill_seconds:.2f} s for {done.prompt_tokens} prompt tokens"),
        ("drafter", f"{output.drafter}, {report.nodes_per_pass:.1f} of {done.decoder.nodes} nodes per pass"),
    ]
    if not done.params.greedy:
        rows.append(("seed", str(output.seed)))
    if done.compared:
        rows += _comparison_rows(done)
    return rows


def _comparison_rows(done: Completion) -> list[tuple[str, str]]:
    comparison = done.comparison
    if comparison is None:
        return [("comparison", "interrupted")]
    ours = done.output.report.tokens_per_second
    rows = []
    for name, run in _others(comparison).items():
        ratio = _ratio(ours, run.tokens_per_second)
        times = f", treepass is {ratio:.2f} times as fast" if ratio else ""
        rows.append((OTHERS[name], f"{run.tokens_per_second:.1f} tokens/s{times}"))
    if comparison.identical is None:
        rows.append(("identical ids", "not compared above temperature 0, where generate draws other noise"))
    elif comparison.difference is None:
        rows.append(("identical ids", "yes"))
    else:
        rows.append(("identical ids", f"no: {describe(comparison.difference)}"))
    return rows


def describe(difference: Difference) -> str:
    """Where two texts part and what that means, in words."""
    place = f"they part at token {difference.index}"
    if not math.isfinite(difference.margin):
        return f"{place}, where one text has ended"
    verdict = "a near tie: rounding decides" if difference.near_tie else "more than rounding explains"
    return f"{place} by a top-2 margin of {difference.margin:.2g}, {verdict}"
