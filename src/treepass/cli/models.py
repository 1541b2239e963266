"""``treepass models``: which model types decode trees exactly, as measured, and why the others do not."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treepass.cli.output import document, escape_controls, examples, print_json, version
from treepass.cli.progress import LiveLine
from treepass.models import ALIASES

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = examples("treepass models", "treepass models llama", "treepass models --json")

VERDICTS = {"exact": "exact", "refused": "refused", "untested": "untested", "not_built": "not built"}
"""Keys of the table, and what they are called."""

# Okabe and Ito's palette; the headings say the same in words.
STYLES = {"exact": "#009E73", "refused": "#E69F00", "untested": "#CC79A7", "not built": "#CC79A7"}
NOT_IN_TABLE = "not in the table"
TRIED = "a model is tried on one tree when it is wrapped, and refused if its logits are not those of plain forwards"


@dataclass(frozen=True, slots=True)
class Support:
    """What the table says about a model type.

    Attributes:
        model_type: as configurations have it.
        verdict: ``exact``, ``refused``, ``untested``, ``not built`` or ``not in the table``.
        reason: why it is not exact.
        entry: its entry in the table.
    """

    model_type: str
    verdict: str
    reason: str
    entry: dict[str, Any]

    @property
    def in_short(self) -> str:
        """The attention of an exact type, the reason for any other."""
        return self.reason or ", ".join(self.entry["attention"])


def models(
    model_type: Annotated[
        str | None,
        typer.Argument(metavar="TYPE", help="One type, and what its verdict rests on.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the model types that decode trees exactly.

    Each was measured on a small random model of the type, in float64. A type that is not in the table is tried on one
    tree when a model is wrapped; treepass audit model checks a model of your own.
    """
    with LiveLine() as live:
        live.show("reading the table")
        from treepass.support import verified_table

        table = verified_table()
        listed = list(_listed(table))
        if model_type is not None:
            listed = [_find(model_type, listed)]
    if as_json:
        print_json(_contents(table, listed, model_type))
    elif model_type is not None:
        _print_lines(_about(table, listed[0]))
    elif sys.stdout.isatty():
        _print_table(table, listed)
    else:
        for one in listed:
            typer.echo(escape_controls("\t".join((one.model_type, one.verdict, " ".join(one.in_short.split())))))


def _listed(table: dict[str, Any]) -> Iterator[Support]:
    for key, verdict in VERDICTS.items():
        for name, entry in table[key].items():
            yield Support(name, verdict, entry.get("reason", ""), entry)


def _find(model_type: str, listed: list[Support]) -> Support:
    """What is known about a type.

    Raises:
        ValueError: if it seems mistyped, or is the name of a model.
    """
    from transformers import CONFIG_MAPPING

    by_name = {one.model_type: one for one in listed}
    if model_type in by_name:
        return by_name[model_type]
    if model_type in ALIASES or "/" in model_type:
        raise ValueError(f"'{model_type}' is a model, not a type; run treepass audit model --model {model_type}")
    near = [] if model_type in CONFIG_MAPPING else get_close_matches(model_type, by_name, n=1, cutoff=0.7)
    if near:
        raise ValueError(f"unknown model type '{model_type}'; did you mean '{near[0]}'?")
    return Support(model_type, NOT_IN_TABLE, TRIED, {})


def _contents(table: dict[str, Any], listed: list[Support], model_type: str | None) -> dict[str, Any]:
    """The document of ``treepass models --json``; with a type it holds that one, its verdict and the reason."""
    reasons: dict[str, Any] = {
        key: {one.model_type: one.reason for one in listed if one.verdict == verdict}
        for key, verdict in VERDICTS.items()
        if key != "exact"
    }
    exact = [one for one in listed if one.verdict == "exact"]
    asked: dict[str, Any] = {}
    if model_type is not None:
        asked = {"type": model_type, "verdict": listed[0].verdict, "reason": listed[0].reason}
    return document(
        "models",
        model=None,
        dtype=None,
        device=None,
        threads=None,
        exact=[one.model_type for one in exact],
        wrong=[],  # what was found wrong is refused
        **reasons,
        attention={one.model_type: one.entry["attention"] for one in exact},
        transformers=table["transformers"],
        aliases=list(ALIASES),
        **asked,
    )


def _about(table: dict[str, Any], one: Support) -> Iterator[tuple[str, str]]:
    """What a verdict rests on, as labels and values."""
    yield "type", one.model_type
    yield "verdict", one.verdict
    if one.reason:
        yield "reason", one.reason
    if not one.entry:
        return
    yield "class", one.entry["class"]
    if one.verdict == "exact":
        yield "attention", ", ".join(one.entry["attention"])
        if one.entry["noticed"]:
            yield "errors noticed", ", ".join(one.entry["noticed"])
        if one.entry["positions"]:
            settings = ", ".join(f"{name}={value}" for name, value in one.entry["positions"].items())
            yield "settings", f"{settings}; with others {TRIED}"
    yield "measured with", _measured(table)


def _measured(table: dict[str, Any]) -> str:
    from packaging.version import Version

    oldest, newest = table["transformers"]
    installed = version("transformers") or "0"
    if Version(oldest) <= Version(installed) <= Version(newest):
        return f"transformers {oldest} to {newest}"
    return f"transformers {oldest} to {newest}; with {installed}, which is installed, {TRIED}"


def _print_lines(lines: Iterable[tuple[str, str]]) -> None:
    if not sys.stdout.isatty():
        for label, value in lines:
            typer.echo(escape_controls(f"{label:<16}{value}"))
        return
    from rich.table import Table
    from rich.text import Text

    from treepass.cli.text import terminal_console

    grid = Table.grid(padding=(0, 2))
    for label, value in lines:
        style = STYLES.get(value, "") if label == "verdict" else ""
        grid.add_row(Text(label, style="dim"), Text(escape_controls(value), style=style))
    terminal_console().print(grid)


def _print_table(table: dict[str, Any], listed: list[Support]) -> None:
    from rich.text import Text

    from treepass.cli.text import terminal_console

    console = terminal_console()
    by_verdict = {verdict: [one for one in listed if one.verdict == verdict] for verdict in VERDICTS.values()}
    counts = [Text(f"{len(group)} {verdict}", style=STYLES[verdict]) for verdict, group in by_verdict.items()]
    console.print(Text(", ").join([*counts, Text("0 wrong")]))
    console.print(Text(f"measured with {_measured(table)}", style="dim"))
    _print_exact(console, by_verdict.pop("exact"))
    for verdict, group in by_verdict.items():
        if group:
            _print_reasons(console, verdict, group)
    console.print(Text(f"\nOf any other type {TRIED}.", style="dim"))


def _print_exact(console: "Console", group: list[Support]) -> None:
    from rich.columns import Columns
    from rich.text import Text

    for attention, names in _grouped(group).items():
        console.print(Text(f"\nexact (attention: {attention})", style=f"bold {STYLES['exact']}"))
        console.print(Columns(map(Text, names), padding=(0, 2), equal=True, column_first=True))


def _print_reasons(console: "Console", verdict: str, group: list[Support]) -> None:
    from rich.box import ROUNDED
    from rich.table import Table
    from rich.text import Text

    table = Table("why", "model types", box=ROUNDED, border_style="dim", show_lines=True)
    by_reason = sorted(_grouped(group).items(), key=lambda item: -len(item[1]))
    for reason, names in by_reason:
        table.add_row(Text(escape_controls(reason)), Text(", ".join(names)))
    console.print(Text(f"\n{verdict}", style=f"bold {STYLES[verdict]}"))
    console.print(table)


def _grouped(group: list[Support]) -> dict[str, list[str]]:
    """Names of the types by what is said about them in short."""
    names: dict[str, list[str]] = defaultdict(list)
    for one in group:
        names[one.in_short].append(one.model_type)
    return names
