"""``treepass generate``: one completion, written as it comes."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treepass import models
from treepass.cli.interrupt import Interrupts
from treepass.cli.output import examples
from treepass.cli.progress import CaughtWarnings, LiveLine
from treepass.cli.trace import Trace
from treepass.errors import unknown

if TYPE_CHECKING:
    from treepass.sampling import SamplingParams

EPILOG = examples(
    'treepass generate "Why is the sky blue?"',
    'treepass generate "Why is the sky blue?" --compare',
    'treepass generate "Write a haiku." --temperature 0.8 --seed 7',
    'treepass generate "The sea is" --raw --max-new-tokens 40 --trace passes.jsonl --json',
)


@dataclass(frozen=True, slots=True)
class Request:
    """The command line, checked as far as that is possible without a model.

    Raises:
        ValueError: if an argument is unknown or outside its range.
    """

    prompt: str
    model: str
    raw: bool
    max_new_tokens: int
    params: "SamplingParams"
    drafter: str
    nodes: int
    attention: str | None
    kernel: str | None
    dtype: str
    device: str | None
    threads: int | None
    compare: bool
    as_json: bool

    def __post_init__(self) -> None:
        from treepass.attention import ATTENTIONS, KERNELS
        from treepass.drafters import DRAFTERS
        from treepass.generate import MAX_NODES

        for name, value, known in (
            ("drafter", self.drafter, DRAFTERS),
            ("attention", self.attention, ATTENTIONS),
            ("kernel", self.kernel, KERNELS),
            ("dtype", self.dtype, ("auto", *models.DTYPES)),
        ):
            if value is not None and value not in known:
                raise ValueError(unknown(name, value, known))
        if not 0 <= self.nodes <= MAX_NODES:
            raise ValueError(f"--nodes must be from 0 to {MAX_NODES}, got {self.nodes}")


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer or to continue; - reads it from standard input.")],
    model: Annotated[str, typer.Option(help="Alias, folder or hub id.")] = models.DEFAULT_MODEL,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens only.")] = None,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Sample from tokens with this share of the likeliest's.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the noise.", show_default="drawn and reported")] = None,
    drafter: Annotated[
        str, typer.Option(help="auto, suffix, recycling, union, random or none; never changes the text.")
    ] = "auto",
    nodes: Annotated[int, typer.Option(help="Drafted nodes per pass at most; 0 is plain decoding.")] = 32,
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
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="cuda where there is one, else cpu")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads to compute with.", show_default="torch's own")] = None,
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
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    if threads is not None and threads < 1:
        raise ValueError(f"--threads must be at least 1, got {threads}")
    with CaughtWarnings() as caught, LiveLine() as live, Interrupts() as interrupts:
        live.show("loading")
        request = Request(
            prompt=prompt,
            model=model,
            raw=raw,
            max_new_tokens=max_new_tokens,
            params=_params(temperature, top_k, top_p, min_p, seed),
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


def _params(temperature: float, top_k: int | None, top_p: float, min_p: float, seed: int | None) -> "SamplingParams":
    from treepass.sampling import SamplingParams, draw_seed

    return SamplingParams(temperature, top_k, top_p, min_p, draw_seed() if seed is None else seed)
