"""Side by side with transformers' own ``generate``: its speed, and where texts part.

Speeds leave prefill out. ``generate`` reports tokens through a streamer; its prefill ends with the first tokens that it
streams, and its rate counts the tokens and the seconds after them.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from treepass.paths import path_logits, rounding_dtype
from treepass.sampling import SamplingParams
from treepass.settings import merged, sampling_fields, with_settings

NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.5}
"""By dtype: a difference of two logits that passes of different row counts can turn around by rounding alone."""


def near_tie(model: PreTrainedModel) -> float:
    """The entry of ``NEAR_TIE`` for a model; quantised weights make it as coarse as bfloat16."""
    return max(NEAR_TIE.get(dtype, 0.0) for dtype in (model.dtype, rounding_dtype(model)))


@dataclass(frozen=True, slots=True)
class TimedText:
    """A timed generation.

    Attributes:
        ids: emitted tokens.
        first_tokens: how many of them came with the prefill; they count in no rate.
        prefill_seconds: seconds to the first tokens.
        seconds: seconds after them.
    """

    ids: list[int]
    first_tokens: int
    prefill_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after prefill; 0 if all tokens came with it."""
        timed = len(self.ids) - self.first_tokens
        return timed / self.seconds if timed else 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two texts part.

    Attributes:
        index: first emitted token that differs.
        tokens: the token of either text there; None where a text has ended.
        margin: difference of the two tokens' logits in one plain pass of the model over the common prefix; infinite
            where a text has ended.
        near_tie: whether rounding alone can turn the margin around, see ``NEAR_TIE``.
    """

    index: int
    tokens: tuple[int | None, int | None]
    margin: float
    near_tie: bool


def timed_generate(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    params: SamplingParams,
    eos_ids: Sequence[int],
    stopping_criteria: StoppingCriteriaList | None = None,
    **options: Any,
) -> TimedText:
    """Runs ``model.generate`` on one prompt with the same settings as ours, those of the model's own included.

    Args:
        model: the model.
        prompt: token ids.
        max_new_tokens: tokens at most.
        params: temperature, top-k, top-p, min-p, seed.
        eos_ids: tokens that end the text; empty for none.
        stopping_criteria: more reasons to end.
        **options: more of ``GenerationConfig``'s fields, such as ``prompt_lookup_num_tokens``.
    """
    ids = torch.tensor([list(prompt)], device=model.device)
    streamer = _Stopwatch()
    if not params.greedy:
        torch.manual_seed(params.seed)
    config = merged(model.generation_config, None, options)
    config.update(max_new_tokens=max_new_tokens, max_length=None, **sampling_fields(params))
    config.eos_token_id = list(eos_ids) or None
    config.pad_token_id = model.generation_config.pad_token_id or 0
    output = with_settings(model, config).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        streamer=streamer,
        stopping_criteria=stopping_criteria,
    )
    end = time.perf_counter()
    first_at, first_tokens = streamer.first
    return TimedText(output[0, len(prompt) :].tolist(), first_tokens, first_at - streamer.start, end - first_at)


@torch.inference_mode()
def first_difference(
    model: PreTrainedModel, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]
) -> Difference | None:
    """Where two continuations of a prompt part, and by how little the model tells the two tokens apart; None if equal.

    Args:
        model: the model that wrote both.
        prompt: token ids, at least one.
        a: one continuation.
        b: the other.
    """
    if list(a) == list(b):
        return None
    index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if index >= min(len(a), len(b)):
        tokens = (a[index] if index < len(a) else None, b[index] if index < len(b) else None)
        return Difference(index, tokens, math.inf, False)
    logits = path_logits(model, [[*prompt, *a[:index]]])[0].double()
    margin = abs(float(logits[a[index]] - logits[b[index]]))
    return Difference(index, (a[index], b[index]), margin, margin <= near_tie(model))


class _Stopwatch(BaseStreamer):
    """Notes when ``generate`` hands out its first tokens; its first call carries the prompt."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first = (self.start, 0)
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first = (time.perf_counter(), value.numel())

    def end(self) -> None:
        """Nothing to flush."""
