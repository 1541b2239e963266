"""``treepass audit``: checks that anyone can run, each of which says what it looked at."""

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treepass import models
from treepass.cli.interrupt import Interrupts
from treepass.cli.output import ExitCode, document, escape_controls, examples, note, print_json
from treepass.cli.progress import CaughtWarnings, LiveLine
from treepass.errors import TreepassError, unknown

if TYPE_CHECKING:
    from treepass.audit import Check, ModelAudit

MODEL_EPILOG = examples(
    "treepass audit model",
    "treepass audit model --model ./my-model --dtype bfloat16",
    "treepass audit model --passes 10 --nodes 30 --seed 1 --json",
)

app = typer.Typer(
    name="audit",
    help="Check that the text is the model's own.",
    epilog=examples("treepass audit model", "treepass audit model --model ./my-model"),
    no_args_is_help=True,
    rich_markup_mode=None,
)

INTERRUPTED = "interrupted"

# Okabe and Ito's palette; the words tell the verdicts apart without it.
STYLES = {
    "exact": "#009E73",
    "wrong": "#D55E00 bold underline2",
    "refused": "#E69F00 underline",
    "untested": "#CC79A7 bold underline",
    "skipped": "dim",
    INTERRUPTED: "dim",
}
VERDICT_WIDTH, NAME_WIDTH = 8, 33
"""Columns of a terminal that the longest verdict and the longest name of a check take."""


@app.command("model", epilog=MODEL_EPILOG)
def audit_model(
    model: Annotated[str, typer.Option(help="Alias, folder or hub id.")] = models.DEFAULT_MODEL,
    dtype: Annotated[
        str,
        typer.Option(help="float32, bfloat16, float16 or auto; in a coarser one, rounding hides small errors."),
    ] = "float32",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="cuda where there is one, else cpu")
    ] = None,
    passes: Annotated[int, typer.Option(help="Tree passes per prompt; each keeps a random path.")] = 3,
    nodes: Annotated[int, typer.Option(help="Drafted nodes of each random tree.")] = 14,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each greedy text.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of prompts and trees.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document in place of the lines.")] = False,
) -> None:
    """Check whether a model decodes trees exactly.

    Every row of random tree passes is compared with a plain forward over its path, the cache with a fresh prefill, and
    greedy texts with those of transformers' generate. Then errors are put in on purpose, which the comparison has to
    notice. The checks go to stdout, each as soon as it is done, and the verdict comes last.

    Exit codes: 0 exact, 1 refused (the model cannot be used) or error, 2 usage, 3 wrong or untested, 130 interrupted.
    """
    for option, value, least in (
        ("--passes", passes, 1),
        ("--nodes", nodes, 1),
        ("--new-tokens", new_tokens, 1),
        ("--seed", seed, 0),
    ):
        if value < least:
            raise ValueError(f"{option} must be at least {least}, got {value}")
    if dtype not in (known := ("auto", *models.DTYPES)):
        raise ValueError(unknown("dtype", dtype, known))
    with CaughtWarnings(), LiveLine() as live, Interrupts() as interrupts:
        live.show(f"loading {model}")
        import torch

        from treepass.generate import MAX_NODES

        if nodes > MAX_NODES:
            raise ValueError(f"--nodes must be from 1 to {MAX_NODES}, got {nodes}")
        settings = {"passes": passes, "nodes": nodes, "new_tokens": new_tokens, "seed": seed}
        try:
            loaded = models.load(model, dtype=dtype, device=device, on_progress=live.show)
            _require_room(loaded, new_tokens)
            run = _Run(loaded, live, interrupts, None if as_json else _print_check)
            audit = run.all(settings)
        except torch.OutOfMemoryError as error:
            raise TreepassError(f"{error}; give a smaller --nodes or model, or --device cpu") from error
    if as_json:
        print_json(_contents(loaded, audit, seed))
        if _exit_code(audit) not in (ExitCode.OK, ExitCode.INTERRUPTED):
            note(f"error: {_meaning(audit)}")
    else:
        _print_closing(audit)
    if code := _exit_code(audit):
        raise typer.Exit(code)


def _require_room(loaded: models.LoadedModel, new_tokens: int) -> None:
    """Refuses greedy texts beyond the model's last position: transformers' generate would run on where we stop.

    Raises:
        ValueError: naming the bound.
    """
    from treepass.audit.model import PROMPTS
    from treepass.support import longest_text

    longest, bound = longest_text(loaded.model.config.get_text_config())
    if max(PROMPTS) + new_tokens > longest:
        raise ValueError(
            f"greedy texts of {max(PROMPTS)} + {new_tokens} tokens go beyond {longest}, {bound}; "
            "give a smaller --new-tokens"
        )


class _Run:
    """An audit that Ctrl-C ends, and what had been found by then."""

    def __init__(
        self,
        loaded: models.LoadedModel,
        live: LiveLine,
        interrupts: Interrupts,
        show: "Callable[[Check], None] | None",
    ) -> None:
        from treepass.audit import ModelAudit

        self._loaded = loaded
        self._live = live
        self._interrupts = interrupts
        self._show = show
        self._so_far = ModelAudit(loaded.model.config.model_type, str(loaded.dtype).removeprefix("torch."))

    def all(self, settings: dict[str, Any]) -> "ModelAudit":
        """The audit; its verdict is ``interrupted`` if Ctrl-C came first."""
        from treepass.audit import audit_model

        self._live.show("checking the structure")
        try:
            audit = audit_model(self._loaded.model, on_check=self._on_check, **settings)
        except BaseException:  # raised in the middle of a computation, the interrupt can surface as any other error
            if not self._interrupts.requested:
                raise
            audit = self._interrupted()
        self._live.clear()
        return audit

    def _on_check(self, check: "Check") -> None:
        if self._interrupts.requested:  # and taken for an error of the model
            raise KeyboardInterrupt
        self._so_far.add(check)
        self._live.clear()
        if self._show and not _is_all_that_is_said(check):
            self._show(check)
        self._live.show(f"{self._done()} done, the next one is running")

    def _interrupted(self) -> "ModelAudit":
        from treepass.attention import ATTENTIONS

        audit = self._so_far
        exact = {check.name for check in audit.checks if check.verdict == "exact"}
        audit.attention = [name for name in ATTENTIONS if f"trees, {name}" in exact]
        audit.verdict, audit.reason = INTERRUPTED, f"{self._done()} done, no verdict"
        return audit

    def _done(self) -> str:
        count = len(self._so_far.checks)
        return f"{count} {'check' if count == 1 else 'checks'}"


def _is_all_that_is_said(check: "Check") -> bool:
    """Whether the closing line will say the same: a model refused by its structure takes one line."""
    return (check.name, check.verdict) == ("structure", "refused")


def _print_check(check: "Check") -> None:
    detail = " ".join(check.detail.split())
    if not sys.stdout.isatty():
        typer.echo(escape_controls(f"{check.verdict}\t{check.name}\t{detail}"))
        return
    from rich.table import Table
    from rich.text import Text

    from treepass.cli.text import terminal_console

    console = terminal_console()
    line = Table.grid(padding=(0, 2))
    line.add_column(width=VERDICT_WIDTH)
    # Below each other where there is room, else every line as it comes: a column would be cut.
    line.add_column(min_width=NAME_WIDTH if console.width >= 2 * NAME_WIDTH else None)
    line.add_column(overflow="fold")
    line.add_row(Text(check.verdict, style=STYLES[check.verdict]), check.name, Text(escape_controls(detail)))
    console.print(line)


def _print_closing(audit: "ModelAudit") -> None:
    words = escape_controls(f"{audit.verdict}: {_meaning(audit)}")
    if not sys.stdout.isatty():
        typer.echo(words)
        return
    from rich.text import Text

    from treepass.cli.text import terminal_console

    line = Text(words)
    line.stylize(STYLES[audit.verdict], 0, len(audit.verdict))
    terminal_console().print(line)


def _meaning(audit: "ModelAudit") -> str:
    """The verdict in plain words."""
    words = {
        "exact": f"trees give this model's own text, with attention {' and '.join(audit.attention)}",
        "wrong": f"the text would not be this model's own; {audit.reason}",
        "refused": f"cannot decode trees with model type '{audit.model_type}': {audit.reason}",
        "untested": f"the checks would not notice every error in this model; {audit.reason}",
        INTERRUPTED: audit.reason,
    }[audit.verdict]
    return " ".join(words.split())


def _contents(loaded: models.LoadedModel, audit: "ModelAudit", seed: int) -> dict[str, Any]:
    """The document of ``treepass audit model --json``."""
    import torch

    return document(
        "audit model",
        model=loaded.name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        threads=torch.get_num_threads(),
        seed=seed,
        model_type=audit.model_type,
        verdict=audit.verdict,
        reason=audit.reason,
        attention=audit.attention,
        checks=[
            {"name": check.name, "verdict": check.verdict, "detail": check.detail, "error": _finite(check.error)}
            for check in audit.checks
        ],
    )


def _finite(error: float | None) -> float | None:
    """JSON has no infinity; the detail has it in words."""
    return error if error is not None and math.isfinite(error) else None


def _exit_code(audit: "ModelAudit") -> ExitCode:
    return {
        "exact": ExitCode.OK,
        "refused": ExitCode.RUNTIME,
        "wrong": ExitCode.PARITY,
        "untested": ExitCode.PARITY,
        INTERRUPTED: ExitCode.INTERRUPTED,
    }[audit.verdict]
