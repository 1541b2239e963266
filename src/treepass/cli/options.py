"""Options that several verbs take, each described once; the checks that need no model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from treepass import models
from treepass.errors import unknown

if TYPE_CHECKING:
    from treepass.sampling import SamplingParams

Model = Annotated[str, typer.Option(help="Alias, folder or hub id.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens only.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")]
MinP = Annotated[float, typer.Option(help="Sample from tokens with this share of the likeliest's.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the noise.", show_default="drawn and reported")]
Drafter = Annotated[str, typer.Option(help="auto, suffix, recycling, union, random or none; never changes the text.")]
Nodes = Annotated[int, typer.Option(help="Drafted nodes per pass at most; 0 is plain decoding.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="cuda where there is one, else cpu")
]
Threads = Annotated[int | None, typer.Option(help="Threads to compute with.", show_default="torch's own")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model with a drafter, and how to sample: checked as far as that is possible without the model.

    Raises:
        ValueError: if an argument is unknown or outside its range.
    """

    model: str
    max_new_tokens: int
    params: "SamplingParams"
    drafter: str
    nodes: int
    attention: str | None = None
    kernel: str | None = None
    dtype: str
    device: str | None
    threads: int | None
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


def require_positive(max_new_tokens: int, threads: int | None) -> None:
    """Checks the counts at once, before torch is imported.

    Raises:
        ValueError: if one is below 1.
    """
    for option, value in (("--max-new-tokens", max_new_tokens), ("--threads", threads)):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}")


def sampling_params(
    temperature: float, top_k: int | None, top_p: float, min_p: float, seed: int | None
) -> "SamplingParams":
    """How to sample; a seed that is not given is drawn.

    Raises:
        ValueError: if an argument is outside its range.
    """
    from treepass.sampling import SamplingParams, draw_seed

    return SamplingParams(temperature, top_k, top_p, min_p, draw_seed() if seed is None else seed)
