"""``treepass generate``: one completion, written as it comes."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from treepass import models
from treepass.cli import options
from treepass.cli.interrupt import Interrupts
from treepass.cli.options import Setup, require_positive, sampling_params
from treepass.cli.output import examples
from treepass.cli.progress import CaughtWarnings, LiveLine
from treepass.cli.trace import Trace

EPILOG = examples(
    'treepass generate "Why is the sky blue?"',
    'treepass generate "Why is the sky blue?" --compare',
    'treepass generate "Write a haiku." --temperature 0.8 --seed 7',
    'treepass generate "The sea is" --raw --max-new-tokens 40 --trace passes.jsonl --json',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Setup):
    """The command line, checked as far as that is possible without a model."""

    prompt: str
    raw: bool
    compare: bool


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer or to continue; - reads it from standard input.")],
    model: options.Model = models.DEFAULT_MODEL,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    drafter: options.Drafter = "auto",
    nodes: options.Nodes = 32,
    attention: Annotated[
        str | None,
        typer.Option(
            help="Tree attention: dense or per_sequence.", show_default="per_sequence where verified, else dense"
        ),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(help="Kernel of the attention: grouped, sdpa or eager.", show_default="fastest on the device"),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run transformers' generate and plain decoding: speeds, same ids?")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the record of every pass to this file (JSONL).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document in place of the text.")] = False,
) -> None:
    """Write one completion, and say how fast.

    The text goes to stdout, the summary to stderr. On a terminal the text shows which tokens were drafted and accepted,
    which ones the model corrected, and which came on top (bonus).

    Exit codes: 0 done, 1 error, 2 usage, 3 the ids differ from those of transformers' generate by more than rounding,
    130 interrupted.
    """
    prompt = _read_prompt(prompt, raw)
    require_positive(max_new_tokens, threads)
    with CaughtWarnings() as caught, LiveLine() as live, Interrupts() as interrupts:
        live.show("loading")
        request = Request(
            prompt=prompt,
            model=model,
            raw=raw,
            max_new_tokens=max_new_tokens,
            params=sampling_params(temperature, top_k, top_p, min_p, seed),
            drafter=drafter,
            nodes=nodes,
            attention=attention,
            kernel=kernel,
            dtype=dtype,
            device=device,
            threads=threads,
            compare=compare,
            as_json=as_json,
        )
        from treepass.cli.completion import complete

        with Trace(trace) as file:
            code = complete(request, live, interrupts, caught, file)
    if code:
        raise typer.Exit(code)


def _read_prompt(prompt: str, raw: bool) -> str:
    """The prompt of the command line or of standard input.

    Raises:
        ValueError: if it is empty or no text.
    """
    where = "the prompt"
    try:
        if prompt == "-":
            where = "the prompt on standard input"
            prompt = sys.stdin.read()
            if not raw:
                prompt = prompt.rstrip("\r\n")
        prompt.encode()
    except UnicodeError as error:
        raise ValueError(f"{where} is not valid {getattr(sys.stdin, 'encoding', 'UTF-8')} text: {error}") from error
    if not (prompt if raw else prompt.strip()):
        raise ValueError(f"{where} is empty; give at least one word")
    return prompt
