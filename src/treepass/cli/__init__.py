"""The command line: one file per verb, each importing torch only once it runs."""

import sys
from typing import Annotated

import typer

from treepass.cli.audit import app as audit_verbs
from treepass.cli.chat import EPILOG as CHAT_EXAMPLES
from treepass.cli.chat import chat
from treepass.cli.env import EPILOG as ENV_EXAMPLES
from treepass.cli.env import env
from treepass.cli.generate import EPILOG as GENERATE_EXAMPLES
from treepass.cli.generate import generate
from treepass.cli.models import EPILOG as MODELS_EXAMPLES
from treepass.cli.models import models
from treepass.cli.output import Verbs, examples, version

app = typer.Typer(
    cls=Verbs,
    name="treepass",
    help="Lossless tree speculation: several tokens per forward pass, the text of the model alone.",
    epilog=examples(
        'treepass generate "Why is the sky blue?" --compare', "treepass models", "treepass audit model", "treepass env"
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.command("generate", epilog=GENERATE_EXAMPLES)(generate)
app.command("chat", epilog=CHAT_EXAMPLES)(chat)
app.add_typer(audit_verbs)
app.command("models", epilog=MODELS_EXAMPLES)(models)
app.command("env", epilog=ENV_EXAMPLES)(env)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"treepass {version('treepass')}")
        raise typer.Exit


@app.callback()
def _options(
    wanted: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; the ``treepass`` script."""
    # What an output encoding lacks is shown as an escape: a character of the model must not end the command.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    app(prog_name="treepass")
